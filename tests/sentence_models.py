"""A tiny chat model over bytes with a memory of sentences, as a folder that commands open."""

import json

import numpy as np
import torch
from models import pairs_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from remanence.attached import base as pretrained
from remanence.attached.config import AttachConfig
from remanence.attached.model import Attached
from remanence.attached.sentences.config import ChatFormat, SentenceConfig
from remanence.attached.sentences.model import SentenceModel
from remanence.attached.sentences.vocabulary import END, NEWLINE, OPENS, SPECIAL

START, STOP, SPACE = 3, 6, ord("\n")
USER, ANSWER = (START, ord("u")), (START, ord("a"))
FORMAT = ChatFormat(
    user=USER,
    assistant=ANSWER,
    end=STOP,
    newline=SPACE,
    recall_start=(STOP, SPACE, START, ord("s")),
    recall_end=(STOP, SPACE, *ANSWER),
)
SETTINGS = SentenceConfig(
    layers=(1, 2), heads=2, head_dim=8, key_dim=12, recalled=2, longest=60, shortest=3, query=40, answer=200, rank=3,
    size=400, format=FORMAT,
)  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}\x03u{% else %}\x03a{% endif %}"
    "{{ message.content }}\x06\n{% endfor %}{% if add_generation_prompt %}\x03a{% endif %}"
)


def message(text):
    """A message of a user, up to the start of the answer."""
    return f"\x03u{text}\x06\n\x03a"


def flags():
    found = np.zeros(300, np.uint8)
    found[[START, STOP]], found[SPACE], found[ord(" ")] = SPECIAL | OPENS, NEWLINE | OPENS, OPENS
    found[[ord(mark) for mark in ".?!"]] = END
    return found


def chat_folder(path):
    """Write the folder of a chat model, with the folder of its base inside."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    base = LlamaForCausalLM(shape).eval()
    torch.nn.init.normal_(base.lm_head.weight, std=0.3)
    base.save_pretrained(path / "base")
    config = AttachConfig(kind="sentences", window=128, sinks=2, sentences=SETTINGS)
    config = config.for_model(pretrained.digest(base), "self_attn", **pretrained.model_shape(base))
    source = pretrained.PretrainedSource.from_path(path / "base")
    model = SentenceModel(Attached(base, config, source), flags())
    with torch.no_grad():
        for name, parameter in model.saved_parameters():
            if name.startswith("adapter.up"):
                parameter.normal_(std=0.3)
    model.save(path)
    pairs_tokenizer(path / "tokenizer.json")
    (path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE})
    )
    return path
