"""What is captured as a CUDA graph is what is launched: to the bit on a GPU, and elsewhere it is said why nothing is
captured.
"""

import copy
import os
import pickle
import re

import pytest
import torch
import torch.nn.functional as F

from remanence import Model, preset
from remanence.inference import reader
from remanence.inference.graphs import alignment_of, longest_window, unsupported
from remanence.layers.linear import Linear, StackedWeight
from remanence.model import memories
from remanence.ops.triton import dispatch
from remanence.runtime.positions import (
    Position,
    advance_position,
    host_copy,
    is_aligned,
    positions_of,
    with_host_copy,
)
from remanence.runtime.state import where
from remanence.train.graphed import Graphed

on_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs a GPU, not under the interpreter",
)
VARIANTS = ["lmm", "mag", "mal", "mac", "window"]


def model(variant, **fields):
    torch.manual_seed(0)
    shape = {
        "segment": 128,
        "window": 256,
        "vocab_size": 256,
        "dim": 256,
        "heads": 4,
        "num_layers": 3,
        **fields,
    }
    made = Model(preset("tiny", variant, **shape))
    with torch.no_grad():  # nothing may hide behind gains of 1 or features of nothing
        for name, parameter in made.named_parameters():
            if "features.down" in name:
                parameter.normal_()
            elif parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def test_why_nothing_is_captured():
    assert unsupported(model("lmm").cpu(), 512, True) == "only CUDA has graphs"
    with pytest.raises(
        ValueError, match="model: expected one whose step can be captured, but only CUDA has graphs"
    ):
        Graphed(model("lmm").cpu())(*torch.zeros(2, 1, 4, dtype=torch.int64, device="cpu"))


def test_where_everything_ends_together():
    subject = model("mac", memory={"chunk": 64})
    assert alignment_of(subject) == 128 and longest_window(subject) == 0
    assert alignment_of(model("mag", memory={"chunk": 64})) == 64 and longest_window(model("mag")) == 256


def test_a_state_that_is_said_to_stand_somewhere():
    """Every position in it; a segment's counts from its own start."""
    state = model("mac").start(2).to("meta").at([256, 300])
    assert host_copy(state.position) == [256, 300]
    assert [host_copy(memory.position) for memory in memories(state)] == [[256, 300]] * 3
    assert [host_copy(block.segment.position) for block in state.blocks] == [[0, 44]] * 3


def test_a_position_is_a_type_and_nothing_else_carries_it():
    position = with_host_copy(torch.zeros(2, dtype=torch.int64, device="meta"), [0, 64])
    assert type(position) is Position and position.host == [0, 64]
    assert type(copy.deepcopy(position)) is Position and copy.deepcopy(position).host == [0, 64]
    for other in (position + 0, position.clone(), position.detach(), position[:1], torch.stack([position])):
        assert type(other) is torch.Tensor
    assert type(pickle.loads(pickle.dumps(position))) is torch.Tensor, "files hold plain tensors"
    assert torch.utils._pytree.tree_leaves({"a": position})[0] is position
    here = torch.zeros(2, dtype=torch.int64, device="cpu")
    assert with_host_copy(here, [0, 0]) is here, "on a CPU there is nothing to remember"


def test_gradients_of_a_stacked_weight_go_to_its_sum():
    torch.manual_seed(0)
    layer, x = Linear(3, 2).double(), torch.randn(2, 4, 3, dtype=torch.float64)
    plain = torch.randn(2, 2, 3, dtype=torch.float64, requires_grad=True)
    total = torch.zeros_like(plain)
    weight = StackedWeight.of(plain, lambda: total)
    assert type(weight.mT) is torch.Tensor
    y = torch.func.functional_call(layer, {"weight": weight}, x)
    expected = torch.bmm(x, plain.mT)
    torch.testing.assert_close(y, expected)
    (wanted,) = torch.autograd.grad(expected.square().sum(), plain)
    y.square().sum().backward()
    assert plain.grad is None
    torch.testing.assert_close(total, wanted)


def test_what_the_host_knows_of_positions():
    """The host follows what all rows read, copies and a choice of rows; not what the device alone decides."""
    position = with_host_copy(torch.zeros(2, dtype=torch.int64, device="meta"), [0, 64])
    assert host_copy(advance_position(position, 64)) == [64, 128] and is_aligned(
        advance_position(position, 64), 64
    )
    assert host_copy(advance_position(position, torch.ones(2, dtype=torch.int64, device="meta"))) is None
    assert host_copy(position + 1) is None and not is_aligned(position + 1, 1)
    later = advance_position(position, 64)
    assert host_copy(where([True, False], position, later)) == [0, 128]
    assert host_copy(where(torch.tensor([True, False], device="meta"), position, later)) is None
    here = torch.tensor([3, 5], device="cpu")
    assert host_copy(here) == positions_of(here) == [3, 5]


def test_reading_in_pieces_is_reading():
    subject, tokens = model("mag").double(), torch.randint(256, (1, 700))
    with torch.no_grad():
        whole = subject.trace(tokens)
        found = reader.read(subject, tokens)
    assert torch.allclose(found.last, whole.hidden[:, -1], atol=1e-9) and not found.diverged
    assert found.surprise == pytest.approx(float(whole.surprise.sum())) and found.surprise_count == 700
    found.state.blocks[0].memory.memory.diverged[0] = True
    assert reader.read(subject, tokens[:, :3], found.state).diverged


def gradients(subject, tokens, dtype, *, fused=True, schedule="wavefront"):
    before, subject.schedule = dispatch.KERNELS, schedule
    dispatch.KERNELS = before if fused else tuple(kind for kind in before if kind != "layer")
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
        logits, _ = subject(tokens)
    found = torch.autograd.grad(100 * logits.float().sin().mean(), list(subject.parameters()))
    dispatch.KERNELS, subject.schedule = before, "wavefront"
    return [logits.detach(), *found]


def apart(true, x):
    error = float(
        (true.double() - x.double()).square().mean().sqrt()
        / true.double().square().mean().sqrt().clamp_min(1e-30)
    )
    return error if error == error else float("inf")


@on_gpu
@pytest.mark.parametrize("schedule", ["layers", "wavefront"])
@pytest.mark.parametrize("width", [16, 32, 64, 128])
@pytest.mark.parametrize("variant", ["mac", "mag", "attention"])
def test_whole_models_on_their_own_kernels(variant, width, schedule):
    """At most twice as far from float32 as torch's own parts are in bfloat16, and the same twice."""
    subject = model(variant, memory={"head_dim": width}).cuda()
    tokens = torch.randint(256, (3, 600), device="cuda")
    true = gradients(subject, tokens, torch.float32, fused=False, schedule="layers")
    usual = gradients(subject, tokens, torch.bfloat16, fused=False, schedule="layers")
    first, second = (gradients(subject, tokens, torch.bfloat16, schedule=schedule) for _ in range(2))
    names = ["y", *dict(subject.named_parameters())]
    assert all(torch.equal(ours, again) for ours, again in zip(first, second, strict=True))
    alike = lambda name: re.sub(
        r"\d+", "*", name
    )  # of all layers together: a bias of four numbers can be off by luck
    for kind in {alike(name) for name in names}:
        exact, plain, ours = (torch.cat([x.flatten() for x, name in zip(each, names, strict=True) if alike(name) == kind])  # noqa: E501
                              for each in (true, usual, first))  # fmt: skip
        assert apart(exact, ours) <= 2 * apart(exact, plain) + 1e-5, kind


@on_gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_captured_steps_are_steps(variant):
    """Rows that begin, go on, and begin again beside others that go on."""
    subject = model(variant).cuda().train()
    parameters, graphed, state = (
        list(subject.parameters()),
        Graphed(subject, torch.bfloat16),
        subject.start(3).detach(),
    )
    for step in range(5):
        tokens, begins = torch.randint(256, (3, 513), device="cuda"), [step == 3, False, False]
        loss, seen = graphed(tokens[:, :-1], tokens[:, 1:], state, torch.tensor(begins))
        found = [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]
        after, said = seen.state.clone(), float(loss)
        with torch.autocast("cuda", torch.bfloat16):
            plain = subject.trace(tokens[:, :-1], where(begins, subject.start(3), state))
            truth = F.cross_entropy(
                subject.logits(plain.hidden).flatten(0, 1).float(), tokens[:, 1:].flatten()
            )
        assert said == pytest.approx(float(truth), abs=1e-6)
        for a, b in zip(torch.autograd.grad(truth, parameters, allow_unused=True), found, strict=True):
            assert a is None or torch.equal(a, b)
        assert all(torch.equal(a, b) for a, b in zip(plain.state.tensors(), after.tensors(), strict=True))
        assert positions_of(after.position) == after.position.tolist()
        state = after.detach()
    assert len(graphed.captured_steps) == 2


@on_gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_captured_pieces_are_pieces(variant, monkeypatch):
    subject, tokens = model(variant).cuda().eval(), torch.randint(256, (1, 512 * 7 + 100), device="cuda")
    monkeypatch.setattr(reader, "GPU_PIECE", 512)
    monkeypatch.setattr(reader, "PIECE", 512)
    captured = reader.read(subject, tokens)
    assert reader._CAPTURES[subject].graph is not None
    reader._CAPTURES.clear()
    monkeypatch.setattr(reader, "PIECES_BEFORE_CAPTURE", 10**9)
    launched = reader.read(subject, tokens)
    assert torch.equal(captured.last, launched.last) and captured.surprise == launched.surprise
    assert all(
        torch.equal(a, b) for a, b in zip(captured.state.tensors(), launched.state.tensors(), strict=True)
    )
    assert positions_of(captured.state.position) == [512 * 7 + 100]
