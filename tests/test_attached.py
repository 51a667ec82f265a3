"""A memory attached to a pretrained model: nothing changes before it is trained, and all our laws hold after that."""

import copy
import dataclasses
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from models import pairs_tokenizer
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

import remanence
from remanence.attached import base as pretrained
from remanence.attached import folder as attached_folder
from remanence.attached.base import digest
from remanence.cli import main
from remanence.data import Tokens
from remanence.hf import AttachedForCausalLM
from remanence.tasks.fact_dialogues import FactDialogues, Turns, draw_facts
from remanence.testing import assert_close
from remanence.tokenizers.tokens import ByteTokenizer
from remanence.train import DataConfig, OptimizerConfig, TrainConfig, export, fit

pytestmark = pytest.mark.sample(2)

SHAPE = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM, {}),
}
SMALL = {"heads": 2, "head_dim": 16, "chunk": 16}


def base(family="llama", **changes):
    torch.manual_seed(0)
    config, model, own = FAMILIES[family]
    return model(config(**SHAPE | own | changes)).eval()


def opt():
    """A model of no known family."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": 300,
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return OPTForCausalLM(OPTConfig(**shape, word_embed_proj_dim=32, max_position_embeddings=96)).eval()


def trained(model):
    """As if it had been trained: the memory says something."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in model.model.saved_parameters():
            if name.endswith("o_proj.weight"):
                weight.normal_(std=0.3)
            if name.endswith(".gate"):
                weight.fill_(0.7)
    return model.model.eval()


def tokens(rows=2, length=70, seed=0):
    return torch.randint(3, 300, (rows, length), generator=torch.Generator().manual_seed(seed))


# Before it is trained


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_bit_identical_to_the_bases(family, dtype):
    model, x = base(family).to(dtype), tokens()
    with torch.no_grad():
        whole, first = model(x).logits, model(x[:, :33])
        rest = model(x[:, 33:], past_key_values=first.past_key_values).logits
        for place in ("beside", "front"):
            own = remanence.attach(copy.deepcopy(model), every=2, place=place, **SMALL)
            assert torch.equal(own(x).logits, whole)
            assert torch.equal(own(x, use_cache=False).logits, whole)
            begun = own(x[:, :33])
            assert torch.equal(begun.logits, first.logits)
            assert torch.equal(own(x[:, 33:], past_key_values=begun.past_key_values).logits, rest)


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_says_what_the_base_says_with_padding_too(family):
    model, x = base(family), tokens(2, 20)
    mask = torch.ones_like(x)
    mask[0, :5] = 0
    about = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "output_logits": True}
    about |= {"return_dict_in_generate": True}
    wanted = model.generate(x, **about)
    got = remanence.attach(model, every=2, **SMALL).generate(x, **about)
    assert torch.equal(got.sequences, wanted.sequences)
    torch.testing.assert_close(got.logits, wanted.logits)


def test_a_model_of_another_family_by_the_name_of_its_attention():
    model, x = opt(), tokens()
    whole = model(x).logits
    assert torch.equal(remanence.attach(model, attention="self_attn", every=1, **SMALL)(x).logits, whole)


def test_lora_changes_nothing_at_first_and_is_trained():
    model, x = base(), tokens()
    whole = model(x).logits
    own = remanence.attach(model, every=2, lora=2, **SMALL)
    assert torch.equal(own(x).logits, whole)
    names = [name for name, weight in own.named_parameters() if weight.requires_grad]
    assert any(".lora_A." in name for name in names) and all(
        "lora" in name or "memories" in name for name in names
    )


# Laws


def settings():
    return {
        "whole": {"every": 2, **SMALL},
        "front": {"every": 2, "place": "front", **SMALL},
        "window": {"every": 2, "window": 24, "sinks": 3, **SMALL},
        "window alone": {"every": 2, "window": 24, "sinks": 0, **SMALL},
        "store": {"kind": "knn", "window": 16, "sinks": 2, "k": 4, "size": 64},
    }


@pytest.mark.parametrize("kind", settings())
def test_a_text_read_in_any_pieces_is_the_text_read_whole(kind):
    model, x = trained(remanence.attach(base(), **settings()[kind])), tokens()
    with torch.no_grad():
        whole, end = model(x)
        assert (whole - model(x, memory_mode="off")[0]).abs().max() > 0.01  # the memory has something to say
        for cut in (1, 15, 24, 27, 40, 69):
            first, state = model(x[:, :cut])
            second, state = model(x[:, cut:], state)
            torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-4, atol=2e-5)
            assert state.position.tolist() == end.position.tolist() == [70, 70]
        steps, state = [], None
        for column in range(50):
            logits, state = model(x[:, column : column + 1], state)
            steps.append(logits)
        torch.testing.assert_close(torch.cat(steps, 1), whole[:, :50], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", settings())
def test_later_tokens_change_nothing_before_them(kind):
    model, x = trained(remanence.attach(base(), **settings()[kind])), tokens()
    other = x.clone()
    other[:, 41:] = 7
    with torch.no_grad():
        assert torch.equal(model(x)[0][:, :41], model(other)[0][:, :41])


@pytest.mark.parametrize("kind", settings())
def test_rows_never_share_a_state_and_padding_is_not_read(kind):
    model, x = trained(remanence.attach(base(), **settings()[kind])), tokens()
    mask = torch.ones_like(x, dtype=torch.bool)
    mask[0, :9] = False
    mask[1, 50:] = False
    with torch.no_grad():
        logits, state = model(x, mask=mask)
        near = {"rtol": 1e-4, "atol": 2e-5}
        torch.testing.assert_close(logits[0, 9:], model(x[:1, 9:])[0][0], **near)
        torch.testing.assert_close(logits[1, :50], model(x[1:, :50])[0][0], **near)
        assert state.position.tolist() == [61, 50]
        after = model(x[:, :3], state)[0]  # rows that stand at different places go on
        for row, own in enumerate((x[0, 9:], x[1, :50])):
            alone = model(torch.cat([own, x[row, :3]]).unsqueeze(0))[0][0, -3:]
            torch.testing.assert_close(after[row], alone, **near)
        packed = torch.cat([x[0, 9:], x[1, :50]]).unsqueeze(0)
        torch.testing.assert_close(model(packed, offsets=[0, 61, 111])[0][0, :61], logits[0, 9:], **near)


def test_a_window_with_first_tokens_is_the_model_on_those_tokens_and_the_last():
    """With one layer, keys are of single tokens: what StreamingLLM would have in its cache is a text of its own."""
    model, x = base(num_hidden_layers=1), tokens(1, 60)
    plain = copy.deepcopy(model)
    own = remanence.attach(model, every=1, window=16, sinks=3, **SMALL).model
    with torch.no_grad():
        logits = own(x)[0]
        for place in (10, 18, 19, 30, 59):
            cached = (
                x[:, : place + 1] if place < 19 else torch.cat([x[:, :3], x[:, place - 15 : place + 1]], 1)
            )
            torch.testing.assert_close(logits[0, place], plain(cached).logits[0, -1], rtol=1e-4, atol=1e-5)


def test_a_texts_beginning_has_no_gradient_made_of_nothing():
    """Keys that begin as the query before have none at a document's first token; brought to unit length, it was
    nothing divided by nothing, and gradients were a million times too large.
    """
    model = remanence.attach(base(), every=2, induction=True, **SMALL)
    trained(model)
    model(tokens(), labels=tokens()).loss.backward()
    assert max(float(weight.grad.norm()) for weight in model.parameters() if weight.grad is not None) < 100


@pytest.mark.parametrize("window", [None, 24])
def test_checkpointing_gives_the_same_gradients(window):
    found = []
    for on in (False, True):
        model = remanence.attach(base(), every=2, window=window, **SMALL)
        own = trained(model).train()
        own.checkpointing = on
        own(tokens())[0].square().mean().backward()
        found.append([weight.grad for _, weight in own.saved_parameters()])
    torch.testing.assert_close(found[0], found[1])


def test_a_store_finds_what_the_window_has_lost():
    model = trained(remanence.attach(base(), kind="knn", window=16, sinks=2, k=1, size=64))
    x = tokens(1, 64)
    with torch.no_grad():
        before = model(x)[1]
        store = before.blocks[model.config.layers[0]].memory.store
        assert int((store.position >= 0).sum()) == 48  # all but the last window
        near, far = (model(x[:, :1], before, memory_mode=mode)[0] for mode in ("off", "on"))
        assert (near - far).abs().max() > 1e-3


# Configuration, and the way back


def test_a_config_says_what_keyword_arguments_say():
    x = tokens()
    for fields, config in (
        ({"every": 2, "window": 24, **SMALL}, remanence.AttachConfig(every=2, window=24, memory=SMALL)),
        ({"layers": [1], "place": "front"}, remanence.AttachConfig(layers=[1], place="front")),
        (
            {"kind": "knn", "window": 16, "k": 4, "size": 64},
            remanence.AttachConfig(kind="knn", window=16, knn={"k": 4, "size": 64}),
        ),
    ):
        own, other = (trained(remanence.attach(base(), *a, **k)) for a, k in (((), fields), ((config,), {})))
        assert own.config == other.config
        with torch.no_grad():
            assert torch.equal(own(x)[0], other(x)[0])
        again = remanence.attach(base(), own.config).model  # of a model that is there
        assert again.config == own.config


def test_a_wrong_config_is_refused_in_one_line():
    config = remanence.AttachConfig
    for arguments, fields, message in (
        (("knn",), {}, "config: expected an AttachConfig, got 'str'"),
        ((config(),), {"window": 16}, "config: expected an AttachConfig or keyword arguments, got both"),
        ((config(),), {"heads": 2}, "config: expected an AttachConfig or keyword arguments, got both"),
        ((config(every=9),), {}, "every: expected a number from 1 to the model's 4 layers, got 9"),
        ((config(layers=(7,)),), {}, "layers: expected some of 0 to 3"),
        ((config(memory={"headz": 2}),), {}, "headz"),
        (
            (config(memory=remanence.MemoryConfig(dim=64)),),
            {},
            "memory.dim: expected the model's dim=32, got 64",
        ),
        ((), {"layers": []}, "layers: expected at least one"),
        ((), {"kind": "neuronal"}, "kind"),
    ):
        model = base()
        with pytest.raises(ValueError, match=message):
            remanence.attach(model, *arguments, **fields)
        assert all(weight.requires_grad for weight in model.parameters())
    for fields, message in (
        ({"kind": "knn"}, "window: expected a number of tokens with kind='knn'"),
        (
            {"memory": "knn"},
            "memory: expected a MemoryConfig or its fields as a dict, got 'knn'; kind= chooses",
        ),
        ({"window": 1}, "window: expected an integer of at least 2, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            config(**fields)


def test_the_old_name_of_kind_warns_once():
    with pytest.warns(DeprecationWarning, match="memory=...* is deprecated: use kind=") as seen:
        model = remanence.attach(base(), memory="knn", window=16, k=2, size=32)
    assert model.model.config.kind == "knn" and len(seen) == 1


def test_trainable_parameters_are_printed_as_peft_prints_them(capsys):
    model = remanence.attach(base(), every=2, **SMALL)
    new = sum(weight.numel() for _, weight in model.model.saved_parameters())
    total = sum(weight.numel() for weight in model.parameters())
    model.print_trainable_parameters()
    said = f"trainable params: {new:,} || all params: {total:,} || trainable%: {100 * new / total:.4f}\n"
    assert capsys.readouterr().out == said


@pytest.mark.parametrize("kind", ["whole", "front", "window", "store", "lora"])
def test_detach_returns_the_base_as_it_was(kind):
    plain, x = base(), tokens()
    plain.model.embed_tokens.weight.requires_grad_(False)
    model = copy.deepcopy(plain)
    hooks = lambda: sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    before = hooks(), {name: weight.requires_grad for name, weight in model.named_parameters()}
    fields = {"every": 2, "lora": 2, **SMALL} if kind == "lora" else settings()[kind]
    attached = remanence.attach(model, **fields)
    trained(attached)
    attached.model.checkpointing = True
    with torch.no_grad():
        for name, weight in attached.named_parameters():
            if ".lora_B." in name:
                weight.normal_()
        assert not torch.equal(attached(x).logits, plain(x).logits)
    assert remanence.detach(attached) is model
    with torch.no_grad():
        assert torch.equal(model(x).logits, plain(x).logits)
    assert (hooks(), {name: weight.requires_grad for name, weight in model.named_parameters()}) == before
    assert type(model) is type(plain) and str(model) == str(plain)
    assert vars(model.config) == vars(plain.config) and not model.is_gradient_checkpointing
    for call in (lambda: attached(x), lambda: remanence.detach(attached)):
        with pytest.raises(
            ValueError, match="model: expected an attached model, got one that has been detached"
        ):
            call()
    with pytest.raises(
        ValueError, match=r"model: expected what remanence.attach returns, got 'LlamaForCausalLM'"
    ):
        remanence.detach(model)
    again = remanence.attach(model, every=2, **SMALL)
    with torch.no_grad():
        assert torch.equal(again(x).logits, plain(x).logits)


# Files


def test_a_folder_holds_what_is_new_and_names_the_rest(tmp_path):
    base().save_pretrained(tmp_path / "base")
    model = remanence.attach(tmp_path / "base", every=2, window=24, **SMALL)
    own = trained(model)
    model.save_pretrained(tmp_path / "own")
    stored = remanence.io.tensors.read_header(tmp_path / "own" / "model.safetensors").entries
    assert all(".memories." in name for name in stored)
    x = tokens()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "own").eval()
    assert isinstance(again, AttachedForCausalLM)
    with torch.no_grad():
        assert torch.equal(again(x).logits, own(x)[0])
    assert not any(weight.requires_grad for weight in again.model.base.parameters())
    with pytest.raises(ValueError, match="made for another pretrained model than this LlamaForCausalLM"):
        attached_folder.load(tmp_path / "own", base(hidden_size=64))
    other = base()
    other.model.layers[0].mlp.up_proj.weight.data.mul_(1.5)
    with pytest.raises(ValueError, match="made for another pretrained model"):
        attached_folder.load(tmp_path / "own", other)


@pytest.mark.parametrize("kind", ["whole", "window", "store"])
def test_a_session_reads_forks_and_saves(tmp_path, kind):
    own = trained(remanence.attach(base(), **settings()[kind]))
    session = remanence.Session(own)
    reading = session.read("A text that is longer than any window. " * 4)
    assert reading.tokens == 156
    said = session.fork().generate("And", max_tokens=4, temperature=0)
    session.save(tmp_path / "text.mem")
    again = remanence.Session(own).load(tmp_path / "text.mem")
    assert again.fork().generate("And", max_tokens=4, temperature=0) == said
    for before, after in zip(session.state.tensors(), again.state.tensors(), strict=True):
        assert torch.equal(before, after)
    other = base()
    other.model.layers[0].mlp.up_proj.weight.data.mul_(1.5)
    with pytest.raises(ValueError, match="another configuration: base"):
        remanence.Session(trained(remanence.attach(other, **settings()[kind]))).load(tmp_path / "text.mem")


def test_a_session_takes_what_attach_returns():
    model = remanence.attach(base(), every=2, window=24, **SMALL)
    assert remanence.Session(model).read("a few words").tokens == 11


def test_an_attached_model_has_the_tokenizer_of_its_base(tmp_path):
    """Also one of thousands of tokens, of which bytes would be the first."""
    base(vocab_size=3000).save_pretrained(tmp_path / "base")
    pairs_tokenizer(tmp_path / "pairs.json").save(tmp_path / "base")
    own = remanence.attach(tmp_path / "base", every=2, window=16, **SMALL)
    own.save_pretrained(tmp_path / "own")  # without a tokenizer
    given = attached_folder.load(tmp_path / "own", base=tmp_path / "base")
    named = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    outer = AttachedForCausalLM.from_pretrained(tmp_path / "own")
    loaded = attached_folder.load(tmp_path / "own")
    for model in (own, tmp_path / "own", loaded, given, outer, remanence.attach(named, every=2, **SMALL)):
        session = remanence.Session(model)
        assert session.tokenizer.vocabulary == 258 and session.read("memme").tokens == 3
    main(["generate", str(tmp_path / "own"), "--prompt", "me", "--max-tokens", "1"])
    nameless = remanence.attach(base(vocab_size=3000), every=2, **SMALL)
    with pytest.raises(ValueError, match=r"^tokenizer: expected one for the model's 3,000 tokens, got none"):
        remanence.Session(nameless)
    assert remanence.Session(nameless, ByteTokenizer()).read("me").tokens == 2
    (tmp_path / "base" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"^tokenizer: expected one for the model's 3,000 tokens, got none"):
        remanence.Session(tmp_path / "own")


@pytest.mark.parametrize("kind", ["whole", "window", "store"])
def test_padding_may_be_any_number(kind):
    own, x = trained(remanence.attach(base(), **settings()[kind])), tokens(2, 12)
    mask = torch.ones_like(x, dtype=torch.bool)
    mask[0, :5] = False
    with torch.no_grad():
        logits, state = own(x, mask=mask)
        other, after = own(x.masked_fill(~mask, -100), mask=mask)
    assert torch.equal(logits[mask], other[mask])
    for one, two in zip(state.tensors(), after.tensors(), strict=True):
        if one.shape[1:2] != x.shape[1:]:  # without a window, keys of padding are there, and never seen
            assert torch.equal(one, two)


def test_two_digests_agree_in_every_dtype_and_with_lora():
    model = base()
    first = digest(model)
    assert digest(copy.deepcopy(model).bfloat16()) == first
    assert digest(remanence.attach(model, every=2, lora=2, **SMALL).model.base) == first


# Training


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(4):
        words = " ".join(f"word{index} {number}" for index in range(900))
        (folder / f"{number}.txt").write_text(words)
    subprocess.run(
        [sys.executable, "-m", "remanence", "data", "prepare", folder, "--out", folder / "tokens"], check=True
    )
    return folder / "tokens"


@pytest.mark.slow
def test_training_changes_only_what_is_new_and_resumes(tmp_path, corpus, command, monkeypatch):
    base().save_pretrained(tmp_path / "base")
    remanence.attach(tmp_path / "base", every=2, window=16, **SMALL).save_pretrained(tmp_path / "own")
    data = DataConfig(
        kind="fact_dialogues", path=str(corpus), length=512, curriculum=(512, 1024), pairs=1, share=0.5
    )
    config = TrainConfig(
        init_from=str(tmp_path / "own"), data=data, batch=4, steps=6, carry=True, windows=(64, 32), device="cpu",
        optimizer=OptimizerConfig(lr=1e-3, warmup=2), save_every=2, log_every=1,
    )  # fmt: skip
    whole = fit(config, tmp_path / "whole")
    assert whole.window == 16
    before = base().state_dict()
    assert all(torch.equal(before[name], weight) for name, weight in whole.base.state_dict().items())
    with remanence.train.Run.open(config, tmp_path / "halves") as run:
        windows = []
        for _ in range(4):
            run.step()
            windows.append(run.model.window)
    assert windows == [64, 64, 32, 16]
    halves = fit(None, tmp_path / "halves", resume=True)
    for (name, one), (_, other) in zip(whole.saved_parameters(), halves.saved_parameters(), strict=True):
        assert torch.equal(one, other), name
    lines = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    assert all(np.isfinite(json.loads(line)["loss"]) for line in lines)
    session = remanence.Session(tmp_path / "whole" / "model")
    assert session.read("It was so.").tokens == 10
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("It was so. " * 9)
    export("whole", "mine")
    card = Path("mine/README.md").read_text()
    typed = [shlex.split(line) for line in re.findall(r"^    remanence (.+)$", card, re.M)]
    assert [words[0] for words in typed] == ["read", "generate"]
    for words in typed:
        command(*words, "--device", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("memory", [{"every": 2, **SMALL}, {"kind": "knn", "k": 2, "size": 32}])
def test_windows_that_widen_are_taken_up_where_they_were_left(memory, tmp_path, corpus):
    base().save_pretrained(tmp_path / "base")
    remanence.attach(tmp_path / "base", window=16, **memory).save_pretrained(tmp_path / "own")
    data = DataConfig(
        kind="fact_dialogues", path=str(corpus), length=512, pairs=1, share=0.5, distance_ramp=0
    )
    config = TrainConfig(
        init_from=str(tmp_path / "own"), data=data, batch=4, steps=6, carry=True, windows=(8, 12), device="cpu",
        optimizer=OptimizerConfig(lr=1e-3, warmup=2), save_every=2, log_every=1,
    )  # fmt: skip
    whole = fit(config, tmp_path / "whole")
    for stop in (1, 2, 3, 4):  # in the middle of a window's steps, before a wider one, and in the model's own
        with remanence.train.Run.open(config, tmp_path / f"{stop}") as run:
            seen = []
            for _ in range(stop):
                run.step()
                seen.append(run.model.window)
            run.checkpoint()
        assert seen == [8, 8, 12, 16][:stop]
        halves = fit(None, tmp_path / f"{stop}", resume=True)
        for (name, one), (_, other) in zip(whole.saved_parameters(), halves.saved_parameters(), strict=True):
            assert torch.equal(one, other), name
    remanence.attach(tmp_path / "base", every=2, **SMALL).save_pretrained(tmp_path / "wide")
    message = r"windows: expected none \(--windows=\), as this model's attention is not narrowed"
    with pytest.raises(ValueError, match=message):
        fit(dataclasses.replace(config, init_from=str(tmp_path / "wide")), tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


def test_the_trainer_trains_it(tmp_path):
    from transformers import Trainer, TrainingArguments

    model = remanence.attach(base(), every=2, **SMALL)
    rows = [{"input_ids": row, "labels": row} for row in tokens(4, 24)]
    about = TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[], use_cpu=True,
        save_strategy="no",
    )  # fmt: skip
    before = model.model.base.state_dict()["model.layers.0.mlp.up_proj.weight"].clone()
    Trainer(model=model, args=about, train_dataset=rows).train()
    assert torch.equal(model.model.base.state_dict()["model.layers.0.mlp.up_proj.weight"], before)
    assert any(bool(weight.any()) for name, weight in model.model.saved_parameters() if "o_proj" in name)


@pytest.mark.slow
def test_its_folder_is_opened_where_nobody_imports_us(tmp_path):
    base().save_pretrained(tmp_path / "base")
    model = remanence.attach(tmp_path / "base", every=2, **SMALL)
    model.save_pretrained(tmp_path / "own")
    code = f"""
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "own")!r}, trust_remote_code=True)
print(type(model).__name__, model(torch.arange(8).unsqueeze(0)).logits.sum().item())
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    name, total = found.stdout.split()
    assert name == "AttachedForCausalLM"
    assert float(total) == model.eval()(torch.arange(8).unsqueeze(0)).logits.sum().item()


def test_pipelines_and_lm_eval_take_it(tmp_path):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer, pipeline

    ByteTokenizer().save(tmp_path)
    tokenizer, plain = AutoTokenizer.from_pretrained(tmp_path), base()
    pairs = [("The cat", " sat"), ("A longer context", " sat down")]
    asked = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    found = []
    for model in (plain, remanence.attach(copy.deepcopy(plain), every=2, **SMALL)):
        scores = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, max_length=64, device="cpu")
        said = pipeline("text-generation", model=model, tokenizer=tokenizer)(
            "Hello", max_new_tokens=4, do_sample=False
        )
        found.append(([score for score, _ in scores.loglikelihood(asked)], said))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert found[0][1] == found[1][1]


def test_a_threshold_may_be_set_after_training_and_is_saved(tmp_path):
    base().save_pretrained(tmp_path / "base")
    model = trained(remanence.attach(tmp_path / "base", every=2, **SMALL))
    text = tokens(2, 40)
    before, state = model(text)
    assert model.threshold == 0
    model.threshold = 0.45  # of steps that begin about a half
    after, _ = model(text)
    assert not torch.equal(before, after)
    model.save(tmp_path / "own")
    again = attached_folder.load(tmp_path / "own")
    assert again.threshold == 0.45 and torch.equal(again(text)[0], after)
    model.threshold = 0.999  # nothing is written any more
    _, later = model(text, state)
    for index, (old, new) in enumerate(zip(state.blocks, later.blocks, strict=True)):
        if old.memory is not None:
            layer = model.memories[str(index)].layer
            assert_close(layer.current_weights(old.memory), layer.current_weights(new.memory), 1e-6)
    model.threshold = 0.0
    assert torch.equal(model(text)[0], before)
    with pytest.raises(ValueError, match="threshold: expected at least 0 and below 1, got 2"):
        model.threshold = 2
    store = remanence.attach(base(), kind="knn", window=16, k=2, size=32).model
    with pytest.raises(ValueError, match="threshold: expected a neural memory, got a store"):
        store.threshold = 0.1


# Facts that are told


def told(corpus, **changes):
    about = {"lengths": (512, 1024), "tokens": 2048, "steps": 10, "facts": 2, "share": 0.5, "weight": 0.1}
    return FactDialogues(Tokens(corpus), **{**about, **changes})


def test_told_rows_are_a_function_of_the_step_and_hold_every_answer(corpus):
    source = told(corpus)
    for number in (0, 4, 5, 9):
        batch, again = source.step(number), told(corpus).step(number)
        assert all(
            torch.equal(x, y) for x, y in zip(batch, again, strict=True) if isinstance(x, torch.Tensor)
        )
        length = 512 if number < 5 else 1024
        assert batch.tokens.shape == (2048 // length, length)
        assert bool(batch.begins.all()) == (number in (0, 5))
        assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    batch, tokenizer = source.step(3), ByteTokenizer()
    text = tokenizer.decode(batch.tokens[0].tolist())
    known = tokenizer.decode(batch.targets[0][batch.weights[0] == 1].tolist()).split()
    said = [part.split("\n")[0] for part in text.split("Please remember this. ")[1:]]
    assert known and all(any(f" {value}." in part for part in said) for value in known)
    assert len(known) == sum(part.count(".") for part in said)


def test_told_rows_are_dense_at_first_and_grow(corpus):
    source = told(corpus, lengths=(2048,), tokens=32 * 2048, facts=8, distance_ramp=6)
    rows = [source.step(number) for number in (0, 6)]
    answers = [(batch.weights == 1).sum(1) for batch in rows]
    assert bool((answers[0] > 0).all())  # all rows are conversations
    assert bool((answers[1] > 0).any()) and not bool((answers[1] > 0).all())  # half of them
    assert answers[0].float().mean() > answers[1][answers[1] > 0].float().mean()
    assert set(rows[0].weights.unique().tolist()) == {0.0, 1.0}  # the text does not count yet
    assert rows[1].weights.unique().tolist() == pytest.approx([0.1, 1.0])
    assert all(bool(batch.begins.all()) for batch in rows)  # also those that read from now on
    assert not bool(source.step(7).begins.all())
    assert bool((told(corpus, lengths=(2048,), tokens=2048).step(0).weights == 1).any())  # of one row, too
    with pytest.raises(
        ValueError, match=r"data.length \(or .*\): expected at least \d+ tokens, for a conversation"
    ):
        told(corpus, lengths=(128,))


def test_texts_go_on_where_a_row_left_them(corpus):
    source = told(corpus, share=0.0)
    first, second = source.step(0), source.step(1)
    assert bool(first.begins.all())
    goes_on = [row for row in range(4) if not second.begins[row]]
    assert goes_on
    for row in goes_on:
        assert torch.equal(first.targets[row, -1], second.tokens[row, 0])


def test_names_that_are_asked_for_in_evaluation_are_never_told_in_training():
    rng = np.random.default_rng(0)
    seen = {fact.question for _ in range(200) for fact in draw_facts(rng, 20, held_out=False)}
    held = {fact.question for _ in range(200) for fact in draw_facts(rng, 20, held_out=True)}
    assert len(seen) > 1000 and len(held) > 500 and not seen & held
    assert not Turns(ByteTokenizer()).chatml


# What is refused


def test_what_cannot_have_a_memory_is_refused_by_name(tmp_path, corpus, command, monkeypatch):
    bert = BertModel(BertConfig(vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    for model, fields, message in (
        (torch.nn.Linear(2, 2), {}, "model: expected a causal language model of transformers, got 'Linear'"),
        (bert, {}, "model: expected a causal language model, got BertModel"),
        (opt(), {}, "attention: expected the name of the attention modules.*candidates: self_attn"),
        (opt(), {"attention": "mlp2", "every": 1}, "got 'mlp2' \\(0 found\\); candidates: self_attn"),
        (
            opt(),
            {"attention": "self_attn", "every": 1, "window": 8},
            "window: expected None for opt: only llama",
        ),
        (base(), {"every": 9}, "every: expected a number from 1 to the model's 4 layers, got 9"),
        (base(), {"layers": [7]}, "layers: expected some of 0 to 3"),
        (base(), {"kind": "knn"}, "window: expected a number of tokens with kind='knn'"),
        (base(), {"headz": 2}, "headz"),
        (tmp_path / "none.gguf", {}, "base: expected a GGUF file, got .*none.gguf, which is not there"),
        (tmp_path / "nothing", {}, "base: expected the folder or name of a causal language model"),
    ):
        with pytest.raises(ValueError, match=message):
            remanence.attach(model, **fields)
    model = base()
    attached = remanence.attach(model, every=2, **SMALL)
    with pytest.raises(ValueError, match="got one that has been attached to already"):
        remanence.attach(model, every=2, **SMALL)
    for again in (attached, attached.model, remanence.Model(remanence.preset("tiny"))):
        message = f"base: expected a model without a memory, got {type(again).__name__}, which has one"
        with pytest.raises(ValueError, match=message):
            remanence.attach(again, every=2, **SMALL)
    attached.save_pretrained(tmp_path / "attached")
    remanence.Model(remanence.preset("tiny")).save(tmp_path / "own")
    monkeypatch.setattr(
        pretrained.PretrainedSource, "load_model", pytest.fail
    )  # refused before weights are loaded
    for name in ("attached", "own"):
        with pytest.raises(ValueError, match=f"got .*{name}, which has one already"):
            remanence.attach(tmp_path / name)
        assert "which has one already" in command("attach", tmp_path / name, tmp_path / "new", code=2)
    said = command("attach", tmp_path / "anything", tmp_path / "attached", code=2)
    assert "an attached model; `remanence train attach --init_from=" in said


def test_a_quantised_base_that_cannot_be_trained_is_refused():
    model = base()

    class Quantizer:
        is_trainable = False
        quantization_config = type("Config", (), {"quant_method": "eetq"})()

    model.hf_quantizer = Quantizer()
    remanence.attach(copy.deepcopy(model), every=2, **SMALL)  # its weights are plain numbers all the same
    weight = model.model.layers[0].mlp.up_proj.weight
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="LlamaForCausalLM quantised by eetq, which cannot be trained"):
        remanence.attach(model, every=2, **SMALL)


def test_the_command_line_attaches_reads_and_refuses(tmp_path, capsys):
    base().save_pretrained(tmp_path / "base")
    ByteTokenizer().save(tmp_path / "base")
    (tmp_path / "text.txt").write_text("A text of some length. " * 20)
    own = str(tmp_path / "own")
    main(["attach", str(tmp_path / "base"), own, "--window", "24"])
    assert "new parameters of" in capsys.readouterr().out
    main(["read", own, str(tmp_path / "text.txt"), "--save", str(tmp_path / "text.mem")])
    main(
        ["generate", own, "--memory-file", str(tmp_path / "text.mem"), "--prompt", "And", "--max-tokens", "3"]
    )
    main(["inspect", str(tmp_path / "text.mem")])
    main(["inspect", own])
    page = ["lens", own, "--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "x")]
    for words, message in (
        (page, "model: expected a remanence Model, got a memory attached"),
        (["attach", str(tmp_path / "base"), own], "out: expected a new or empty folder"),
        (["attach", str(tmp_path / "missing"), str(tmp_path / "x")], "base: expected the folder or name"),
    ):
        with pytest.raises(SystemExit) as error:
            main(words)
        assert error.value.code == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
