"""Decoding in place is the model: every block kind, rows anywhere in their chunks and segments, some of them
waiting.
"""

import importlib.util
import os
from contextlib import contextmanager, nullcontext

import pytest
import torch
from models import MEMORIES, STORES, VARIANTS, model, tokens
from torch import Tensor

from remanence import Generation, Sampling, Session
from remanence.inference import generate
from remanence.inference.decoder import Decoder, unsupported
from remanence.layers import decoding
from remanence.ops.triton import decode as decode_kernels
from remanence.ops.triton import dispatch
from remanence.testing import assert_close

pytestmark = pytest.mark.sample(2)

DEVICE = os.environ.get("REMANENCE_TEST_DEVICE", "cpu")
READ = [[3], [13], [8]]  # inside a chunk of 4, inside a segment of 8 and past a window of 5, and at a border


def begun(subject, rows=3):
    """Rows that have read different numbers of tokens."""
    mask = torch.arange(13) < torch.tensor(READ[:rows])
    return subject(tokens(rows, 13), mask=mask)[1]


@contextmanager
def nothing_waits(monkeypatch):
    """Whatever would wait for a device raises."""

    def refuse(*_):
        raise AssertionError("a step looked at a value")

    with monkeypatch.context() as patched:
        for name in (
            "tolist",
            "item",
            "__bool__",
            "__int__",
            "__float__",
            "__index__",
            "numpy",
            "cpu",
            "nonzero",
        ):
            patched.setattr(Tensor, name, refuse)
        yield


def walk(subject, state, monkeypatch, mode=None, steps=22, tolerance=1e-10, waits=False):
    """Each row sits out some steps, and none of them all; the state of both at the end."""
    decoder = Decoder(subject, state, mode)
    # On a CPU, where it costs nothing, a search asks what there is to find, and a store whether a segment has ended.
    waits = waits or "knn" in subject.config.blocks
    for step in range(steps):
        x = tokens(len(state.position), 1)
        active = torch.rand(len(state.position)) < 0.8 if step % 4 else None
        with nullcontext() if waits else nothing_waits(monkeypatch):
            logits = decoder.step(x[:, 0], active)
        rows = torch.ones(len(x), dtype=torch.bool) if active is None else active
        if rows.any():
            expected, state = subject(x, state, mask=rows.unsqueeze(-1), memory_mode=mode)
            assert_close(expected[rows, 0], logits[rows], tolerance)
        if step % 9 == 0:
            assert_close(state, decoder.state, tolerance, f"state after step {step}")
    assert_close(state, decoder.state, tolerance, "state")
    return state, decoder.state


@pytest.mark.parametrize("variant", VARIANTS)
class TestEveryVariant:
    @torch.no_grad()
    def test_it_is_the_model(self, variant, monkeypatch):
        subject = model(variant)
        state = begun(subject)
        before = state.clone()
        expected, ours = walk(subject, state, monkeypatch)
        assert_close(before, state, 0.0, "the state that was given")
        x = tokens(3, 11)
        assert_close(subject(x, expected)[0], subject(x, ours)[0], 1e-9, "what follows")

    @torch.no_grad()
    def test_from_a_documents_start(self, variant, monkeypatch):
        subject = model(variant)
        walk(subject, subject.start(2), monkeypatch, steps=9)

    def test_states_are_the_callers(self, variant):
        subject = model(variant)
        decoder = Decoder(subject, begun(subject))
        first = decoder.state
        copy = first.clone()
        for _ in range(6):
            decoder.step(tokens(3, 1)[:, 0])
        assert_close(first, copy, 0.0)
        assert not any(tensor.requires_grad for tensor in decoder.state.tensors())


@pytest.mark.parametrize("mode", ["frozen", "off"])
@pytest.mark.parametrize("variant", MEMORIES)
@torch.no_grad()
def test_modes_and_what_follows_them(variant, mode, monkeypatch):
    """A memory that was not written stands elsewhere in its chunk than the model in its segment; then it is written
    again.
    """
    subject = model(variant)
    state, _ = walk(subject, begun(subject), monkeypatch, mode, steps=10)
    walk(subject, state, monkeypatch, "on", steps=12)


@pytest.mark.parametrize(
    "fields",
    [
        {"memory": {"chunk": 1}, "persistent": 0},
        {"memory": {"conv": 0}},
        {"memory": {"depth": 3}, "window": 1},
        {"memory": {"net": "titans", "depth": 3, "bias": True}, "window": 1},
        {"memory": {"chunk": 8}, "tie": False, "segment": 8},
    ],
    ids=str,
)
@pytest.mark.parametrize("variant", ["mac", "mag"])
@torch.no_grad()
def test_other_shapes(variant, fields, monkeypatch):
    subject = model(variant, **fields)
    walk(subject, begun(subject), monkeypatch)


@torch.no_grad()
def test_full_attention_grows(monkeypatch):
    monkeypatch.setattr(decoding, "INITIAL_CAPACITY", 4)
    subject = model("attention hybrid")
    walk(subject, subject.start(2), monkeypatch, steps=30, waits=True)


@pytest.mark.parametrize(
    "knn",
    [
        {"fuse": "joint", "size": 7, "k": 7},
        {"write": "surprise", "shared": True, "evict": "importance", "half_life": 9.0},
        {"write": "surprise", "fraction": 1.0, "size": 6, "search": "dense", "fuse": "joint"},
        {"size": 0},
        {"store_dtype": "int8"},
        {"store_dtype": "int8", "search": "dense", "evict": "importance"},
    ],
    ids=str,
)
@torch.no_grad()
def test_other_stores(knn, monkeypatch):
    """Written by what the model says, shared, full, and none at all."""
    subject = model("knn", knn=knn)
    state, _ = walk(subject, begun(subject), monkeypatch)
    state, _ = walk(subject, state, monkeypatch, "frozen", steps=7)
    walk(subject, state, monkeypatch, steps=7)


@torch.no_grad()
@pytest.mark.parametrize("variant", ["mac", "mal", *STORES])
def test_float32(variant, monkeypatch):
    subject = model(variant, torch.float32)
    walk(subject, begun(subject), monkeypatch, tolerance=1e-4)


@torch.no_grad()
def test_bfloat16_stores(monkeypatch):
    """Every entry is found: among the nearest only, one more or less may be."""
    for fuse in ("gate", "joint"):
        subject = model("knn", torch.bfloat16, knn={"search": "dense", "fuse": fuse})
        walk(subject, begun(subject), monkeypatch, tolerance=3e-2)


@pytest.mark.interpreted
@pytest.mark.parametrize("variant", ["hybrid", "attention hybrid", "delta", "linear_attention", "ttt"])
@torch.no_grad()
def test_with_kernels(variant, monkeypatch):
    """The kernels in their places: a memory of one layer or two, its convolutions, and MAC's weights at a segment's
    begin.
    """
    subject = model(variant)
    walk(subject, begun(subject), monkeypatch, steps=9, waits=True)


@pytest.mark.interpreted
@torch.no_grad()
def test_matrices_asked_by_segments(monkeypatch):
    subject = model("mac", memory={"net": "linear", "depth": None, "expansion": None})
    assert all(
        step.memory.running.step == step.memory.running._step_fused
        for step in Decoder(subject, begun(subject)).decoders
    )
    walk(subject, begun(subject), monkeypatch, steps=9, waits=True)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("variant", ["gated_delta", "delta", "linear_attention", "lmm", "ttt"])
def test_kernels_are_launched_without_waiting(variant, monkeypatch):
    """As a graph demands it; what they would compute is left out, since the interpreter does look at values."""
    names = []
    monkeypatch.setattr(dispatch, "decode_reason", lambda *_: None)
    monkeypatch.setattr(decode_kernels, "launch", lambda name, *_, **__: names.append(name))
    subject = model(variant)
    decoder = Decoder(subject, subject.start(2), graph=False)
    with nothing_waits(monkeypatch):
        decoder.step(tokens(2, 1)[:, 0])
    memory = (
        "decode_kernel" if variant == "ttt" else "decode_linear_kernel"
    )  # on a GPU norms and others are kernels, too
    assert [name for name in names if name in ("convolve_kernel", memory)] == [
        "convolve_kernel",
        memory,
    ] * len(subject.blocks)


def test_what_cannot_be_decoded_is_said():
    subject = model("mac")
    assert unsupported(subject) is None
    assert "reset" in unsupported(subject, "fresh")
    with pytest.raises(
        ValueError, match="model: expected one that can be decoded in place, but memories that are reset"
    ):
        Decoder(subject, subject.start(1), "fresh")
    with pytest.raises(ValueError, match="have no memory, got 'frozen'"):
        Decoder(model("window"), model("window").start(1), "frozen")
    with torch.autocast(DEVICE):
        assert "autocast" in unsupported(subject)
    own = model("window")
    own.mixers[0].decode_unsupported_reason = lambda mode: "it looks at values"
    assert unsupported(own) == "it looks at values"
    subject.blocks[0].mixer.memory.layer.net = object()
    assert "closed form" in unsupported(subject)


def test_arguments_are_checked():
    subject = model("lmm")
    decoder = Decoder(subject, subject.start(2))
    with pytest.raises(
        ValueError, match=r"tokens: expected torch.int64 of shape \[2\], one per row, got \[3\]"
    ):
        decoder.step(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"active: expected torch.bool of shape \[2\]"):
        decoder.step(torch.zeros(2, dtype=torch.int64), torch.ones(2))
    with pytest.raises(ValueError, match="state: expected the State"):
        Decoder(subject, None)
    with pytest.raises(ValueError, match=r"tokens: expected torch\.int64"):
        Decoder(subject, subject.start(2)).step([1, 2])
    if DEVICE == "cpu":
        with pytest.raises(ValueError, match="graph: expected None or False for a model on cpu, got True"):
            Decoder(subject, subject.start(2), graph=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_a_graph_is_its_steps(variant, dtype, tolerance):
    """300 steps, over many chunks and segments; the eager step against the model as well, as long as rounding has not
    spread.
    """
    with torch.device("cuda"):
        fields = {
            "dim": 64,
            "vocab_size": 64,
            "window": 64,
            "segment": 64,
            "memory": {"chunk": 16, "expansion": 4.0},
        }
        subject = model(variant, dtype, **fields)
        _, state = subject(tokens(3, 21, 64))
        given, before = state, state.clone()
        graph, eager = Decoder(subject, state), Decoder(subject, state, graph=False)
        assert graph.captures
        for step in range(300):
            x, active = tokens(3, 1, 64), torch.rand(3) < 0.9
            logits, plain = graph.step(x[:, 0], active), eager.step(x[:, 0], active)
            assert_close(plain[active], logits[active], tolerance, f"step {step}")
            if step < 40 and bool(active.any()):
                expected, state = subject(x, state, mask=active.unsqueeze(-1))
                assert_close(expected[active, 0], plain[active], 10 * tolerance, f"step {step} of the model")
        assert_close(eager.state, graph.state, tolerance, "state")
        assert_close(before, given, 0.0, "the state that was given")


@pytest.mark.parametrize("variant", ["mac", "mag", "attention hybrid", "surprising tokens"])
@pytest.mark.parametrize("write", ["all", "prompt", "none"])
def test_generating_in_place_says_the_same(variant, write, monkeypatch):
    """Answers of different lengths, and the state when the loop is left early."""
    subject, prompts = model(variant, vocab_size=257), ["a", "some text", "more of it"]
    found = []
    for kinds in ({"cuda"}, {"cpu", "cuda"}):
        monkeypatch.setattr(generate, "IN_PLACE", kinds)
        made = Generation(
            subject, prompts, Sampling(max_tokens=14, temperature=1.0, stop=("e", "5"), seed=5), write=write
        ).run()
        left = Generation(subject, prompts, Sampling(max_tokens=14, temperature=0.0), write=write)
        for count, _ in enumerate(left):
            if count == 7:
                break
        session = Session(subject, write=write)
        stream = session.stream("abc", max_tokens=9, temperature=0)
        states = [session.state.position for _ in zip(range(4), stream, strict=False)]
        stream.close()
        found.append((made.texts, made.tokens, left.tokens, [made.state, left.state, session.state, states]))
    assert found[0][:-1] == found[1][:-1]
    assert_close(found[0][-1], found[1][-1], 1e-9)
