"""A rule in one file, with one entry in RULES, has the layer, models, memory files, decoding, training, the cost plan
and the command line without further code.
"""

import json
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from remanence import MemoryConfig, Model, NeuralMemory, Session, preset
from remanence.inference import memfile
from remanence.inference.decoder import unsupported
from remanence.ops import RULES
from remanence.ops.large_chunk import LargeChunk
from remanence.ops.state import memories
from remanence.testing import assert_close
from remanence.train.config import DataConfig, TrainConfig
from remanence.train.plan import flops_per_token, plan

pytestmark = pytest.mark.sample(4)

OWN = runpy.run_path(str(Path(__file__).parent.parent.parent / "examples" / "own_rule.py"))
RULES.pop("adagrad")
KINDS = {
    "large_chunk": {"net": "swiglu", "rule": "large_chunk"},
    "large_chunk at the token": {"net": "swiglu", "rule": "at the token"},
    "adagrad": {"net": "titans", "rule": "adagrad", "expansion": 1.0},
    "adagrad of a deep memory": {"net": "deep", "rule": "adagrad"},
    "kda": {"net": "deep", "rule": "kda"},
    "omega": {"net": "deep", "rule": "omega"},
    "yaad": {"net": "deep", "rule": "yaad"},
    "l_p": {"net": "titans", "rule": "l_p", "expansion": 1.0},
    "memora": {"net": "linear", "rule": "memora"},
    "kda of sparse features": {"net": "sparse", "rule": "kda"},
}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(RULES, "adagrad", OWN["Adagrad"]())
    monkeypatch.setitem(RULES, "at the token", LargeChunk(read="token"))


def made(kind, pattern=("lmm",), dtype=torch.float64, **fields):
    torch.manual_seed(0)
    memory = {"chunk": 4, "heads": 2, **KINDS[kind]}
    own = {"dim": 16, "heads": 2, "num_layers": len(pattern), "window": 8, "segment": 8, "vocab_size": 257}
    return Model(preset("tiny", pattern, memory=memory, **{**own, **fields})).to(dtype).eval()


def tokens(count=21):
    return torch.randint(
        257, (2, count), generator=torch.Generator(torch.get_default_device()).manual_seed(1)
    )


@torch.no_grad()
@pytest.mark.parametrize("pattern", [("lmm", "window"), ("mac",), ("mag",), ("mal",)], ids="+".join)
@pytest.mark.parametrize("kind", KINDS)
def test_the_laws_in_every_architecture(kind, pattern):
    subject, x = made(kind, pattern), tokens()
    whole, end = subject(x)
    state, pieces = None, []
    for piece in x.split([1, 7, 12, 1], 1):
        logits, state = subject(piece, state)
        pieces.append(logits)
    assert_close(whole, torch.cat(pieces, 1), 1e-10)
    assert_close(end, state, 1e-10)
    packed, _ = subject(x.flatten().unsqueeze(0), offsets=[0, 21, 42])
    assert_close(whole.flatten(0, 1).unsqueeze(0), packed, 1e-10)
    padded, _ = subject(torch.cat([x[:, :3] * 0, x], 1), mask=torch.arange(24).expand(2, -1) >= 3)
    assert_close(whole, padded[:, 3:], 1e-10)
    changed = x.clone()
    changed[:, 10] += 1
    after = subject(changed)[0]
    assert torch.equal(after[:, :10], whole[:, :10]) and not torch.equal(after[:, 10:], whole[:, 10:])
    for mode in ("frozen", "fresh", "off"):
        assert subject(x, end, memory_mode=mode)[0].isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_is_the_forward_pass(kind):
    """There is no decoding in place without a closed form; generation then runs the forward pass, token by token."""
    subject = made(kind, ("lmm", "window"))
    assert "has no closed form" in unsupported(subject)
    session = Session(subject)
    text = session.generate("What", max_tokens=9, temperature=0.0)
    ids = list(b"What")
    for _ in range(9):
        ids.append(int(subject(torch.tensor([ids]))[0][0, -1].argmax()))
    assert session.tokenizer.decode(ids[4:]) == text


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_memory_files(kind, tmp_path):
    subject, x = made(kind, dtype=torch.float32), tokens()
    _, state = subject(x)
    (memory,) = memories(state.blocks[0])
    assert len(memory.buffers) == len(RULES[KINDS[kind]["rule"]].init_state(memory.weights))
    memfile.save(tmp_path / "a.mem", subject, state)
    again = memfile.load(tmp_path / "a.mem", subject)
    assert_close(state, again, 0.0)
    more = tokens(9)
    assert torch.equal(subject(more, state)[0], subject(more, again)[0])
    earlier = subject(x[:, :20])[1]
    assert_close(subject(more, state.crop(1))[0], subject(more, earlier)[0], 1e-5)
    if memory.buffers:
        bad = memory._replace(buffers=tuple(buffer[:, :, :1] for buffer in memory.buffers))
        broken = state._replace(blocks=(state.blocks[0]._replace(memory=bad),))
        with pytest.raises(ValueError, match=r"buffers\.0: expected shape"):
            memfile.save(tmp_path / "b.mem", subject, broken)
    other = made("large_chunk" if kind.startswith("adagrad") else "adagrad", dtype=torch.float32)
    with pytest.raises(ValueError, match=r"memory\.net|memory\.rule"):
        memfile.load(tmp_path / "a.mem", other)


@pytest.mark.parametrize("kind", KINDS)
def test_training_lowers_the_loss(kind):
    subject = made(kind, ("lmm",), torch.float32, vocab_size=32).train()
    optimizer = torch.optim.AdamW(subject.parameters(), lr=1e-2)
    x = torch.randint(32, (4, 8)).repeat(1, 3)  # repeated, so that a memory helps
    losses = []
    for _ in range(12):
        logits, state = subject(x)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    assert not state.diverged.any()
    layer = subject.mixers[0].memory.layer
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in layer.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_cost(kind):
    config = made(kind).config
    assert flops_per_token(config, 64) > 0
    run = TrainConfig(model=config, data=DataConfig(kind="recall", length=64, pairs=4), batch=2)
    assert plan(run, gpus=1).hours > 0


def test_the_command_line(tmp_path, command):
    options = ["--model.memory.net=swiglu", "--model.memory.rule=large_chunk", "--model.memory.chunk=8"]
    command("new", "tiny", tmp_path / "m", "--variant", "lmm", "--model.dim=16", "--model.heads=2", *options)
    config = Model.load(tmp_path / "m").config
    assert (config.dim, config.memory.dim, config.memory.net) == (16, 16, "swiglu")
    assert (config.memory.rule, config.memory.chunk, config.memory.step_bias) == ("large_chunk", 8, None)
    (tmp_path / "text.txt").write_text("something to read")
    command("read", tmp_path / "m", tmp_path / "text.txt", "--save", tmp_path / "text.mem")
    assert '"large_chunk"' in command("inspect", tmp_path / "text.mem")
    command(
        "generate",
        tmp_path / "m",
        "--prompt",
        "So",
        "--memory-file",
        tmp_path / "text.mem",
        "--max-tokens",
        3,
    )
    small = ["--model.dim=16", "--data.length=32", "--data.pairs=2", "--batch=2", "--steps=2"]
    command("train", "recall", "--out", tmp_path / "run", *options, *small)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])
    assert "hours" in command("train", "recall", "--dry-run", *options, *small)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model.memory.rule=large_chunks"], "did you mean 'large_chunk'?"),
        (
            ["--model.memory.rule=large_chunk", "--model.memory.anchor=token"],
            "anchor: expected None, as the rule 'large_chunk' declares its own, got 'token'",
        ),
        (["--model.memory.net=swiglu", "--model.memory.depth=3"], "as the net 'swiglu' has no depth, got 3"),
        (["--model.memory.net=swiglu", "--model.memory.expansion=0"], "expansion: expected a number above 0"),
        (["--model.vocab_size=3"], "--model.vocab_size: expected the tokenizer's"),
        (["--sed=3"], "--sed: expected an option, or a field of the model"),
    ],
)
def test_wrong_options_of_new(options, message, tmp_path, command):
    assert message in command("new", "tiny", tmp_path / "m", *options, code=2)
    assert not (tmp_path / "m").exists()


def test_large_chunks_by_fields():
    layer = NeuralMemory(dim=32, net="swiglu", rule="large_chunk", chunk=512)
    assert layer.net.expansion == 1.0 and layer.gate_names == ["step", "momentum"]
    x = torch.randn(1, 700, 32)
    y, state = layer(x)
    first, rest = layer(x[:, :600])
    assert_close(torch.cat([first, layer(x[:, 600:], rest)[0]], 1), y, 1e-5)
    initial = list(layer.initial.parameters())
    for weight, start in zip(state.memory.weights, initial, strict=True):
        assert_close(weight[0].norm(dim=-1), start.norm(dim=-1), 1e-5)
        assert not torch.allclose(weight[0], start)
    wider = NeuralMemory(MemoryConfig(dim=32, net="swiglu"), rule="large_chunk", expansion=2.0)
    assert wider.initial.layer0.shape[-1] == 2 * wider.head_dim
