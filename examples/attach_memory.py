"""A memory for a pretrained model: attach, train what is new, read a text, ask, save.

pip install '.[attach]'                             # in a clone; transformers, accelerate and gguf
python examples/attach_memory.py                    # a tiny random Llama, to see the steps
python examples/attach_memory.py path/or/hub-name   # a model of yours
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import remanence


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=257, **shape))  # bytes: the tokenizer that needs no file


base = AutoModelForCausalLM.from_pretrained(sys.argv[1]) if len(sys.argv) > 1 else tiny()
tokens = torch.randint(base.config.vocab_size, (2, 96))
before = base(tokens).logits

model = remanence.attach(base, every=2, heads=2, head_dim=16)
print("as before:", torch.equal(model(tokens).logits, before))

# Only what is new has gradients; any loop, or the Trainer, or `remanence train attach`, will do.
optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
for _ in range(3):
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("new weights:", sum(weight.numel() for _, weight in model.model.saved_parameters()))

model.model.window = 32  # attention sees 32 tokens and the first four; the memory has the rest
session = remanence.Session(model.eval())
print(session.read("It was a bright cold day in April. " * 10))
with tempfile.TemporaryDirectory() as folder:
    session.save(Path(folder) / "read.mem")  # what was read
    model.save_pretrained(Path(folder) / "attached")  # what was trained: the base is only named
    print(sorted(path.name for path in (Path(folder) / "attached").iterdir()))
