"""The wavefront is another order of the same work: outputs, states and gradients are those of layer after layer."""

import itertools
from contextlib import nullcontext

import pytest
import torch

from remanence import Model, preset
from remanence.memory.observation import observing_memories
from remanence.mixers import wavefront
from remanence.model import memories
from remanence.testing import assert_close

SEGMENT = 16


def model(depth=3, **fields):
    torch.manual_seed(0)
    shape = {
        "vocab_size": 50,
        "dim": 32,
        "heads": 2,
        "num_layers": depth,
        "ffn": 48,
        "segment": SEGMENT,
        "window": 16,
        "persistent": 3,
    }
    made = Model(preset("tiny", "mac", **{**shape, **fields})).double()
    with torch.no_grad():  # nothing may hide behind gains of 1 or features of nothing
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def results(subject, schedule, text, before=0):
    subject.schedule = schedule
    state = subject(text[:, :before])[1] if before else None
    seen = subject.trace(text[:, before:], state)
    outputs = [
        seen.hidden,
        seen.surprise,
        *seen.layers,
        *[gate for each in seen.traces for gate in each.gates.tensors()],
    ]
    loss = seen.hidden.sin().sum() + sum(
        weight.sin().sum() for memory in memories(seen.state) for weight in memory.weights
    )
    return outputs, seen.state, torch.autograd.grad(loss, list(subject.parameters()), allow_unused=True)


@pytest.fixture
def counted(monkeypatch):
    calls = []
    read = wavefront.read
    monkeypatch.setattr(wavefront, "read", lambda *a, **k: calls.append(1) or read(*a, **k))
    return calls


@pytest.mark.parametrize(
    "net", [{}, {"memory": {"net": "titans", "expansion": 1.0, "chunk": 8}}], ids=["deep", "titans"]
)
@pytest.mark.parametrize(("depth", "segments"), [(2, 2), (2, 5), (4, 2), (3, 3)])
def test_the_same_in_another_order(depth, segments, net, counted):
    subject, tokens = model(depth, **net), torch.randint(50, (2, SEGMENT * segments))
    one, other = (results(subject, schedule, tokens) for schedule in ("layers", "wavefront"))
    assert counted == [1]
    for a, b in zip(one, other, strict=True):
        assert_close(a, b, 1e-9)


@pytest.mark.parametrize(
    ("before", "tokens"),
    [(0, 3 * SEGMENT + 5), (5, 4 * SEGMENT), (2 * SEGMENT, 2 * SEGMENT), (7, SEGMENT + 9)],
)
def test_from_any_place_to_any_other(before, tokens, counted):
    """Whole segments in a wavefront, what stands before and behind them as ever; with gradients through the carried
    state.
    """
    subject, text = model(), torch.randint(50, (2, before + tokens))
    one, other = (results(subject, schedule, text, before) for schedule in ("layers", "wavefront"))
    assert len(counted) == (before >= 2 * SEGMENT) + (tokens >= 2 * SEGMENT + -before % SEGMENT)
    for a, b in zip(one, other, strict=True):
        assert_close(a, b, 1e-9)
    whole = results(subject, "wavefront", text)
    assert_close(whole[0][0][:, before:], other[0][0], 1e-9)
    assert_close(whole[1], other[1], 1e-9)


def test_checkpointing_changes_nothing():
    subject, tokens = model().train(), torch.randint(50, (2, 4 * SEGMENT))
    plain = results(subject, "wavefront", tokens)
    subject.checkpointing = True
    for a, b in zip(plain, results(subject, "wavefront", tokens), strict=True):
        assert_close(a, b, 1e-12)


def test_nothing_of_the_future_to_the_bit():
    subject, tokens = model(), torch.randint(50, (1, 4 * SEGMENT))
    subject.schedule = "wavefront"
    changed = tokens.clone()
    changed[:, 2 * SEGMENT + 3 :] = (changed[:, 2 * SEGMENT + 3 :] + 1) % 50
    with torch.no_grad():
        (a, _), (b, _) = subject(tokens), subject(changed)
    assert torch.equal(a[:, : 2 * SEGMENT + 3], b[:, : 2 * SEGMENT + 3])
    assert not torch.equal(a, b)


def test_gradients_twice_from_one_graph():
    """What was added up for the first is not there for the second."""
    subject, tokens = model(), torch.randint(50, (1, 3 * SEGMENT))
    subject.schedule = "wavefront"
    loss = subject(tokens)[0].sin().sum()
    first = torch.autograd.grad(loss, list(subject.parameters()), retain_graph=True)
    assert_close(first, torch.autograd.grad(loss, list(subject.parameters())), 0.0)


def test_frozen_parameters_get_none():
    subject, tokens = model(), torch.randint(50, (1, 3 * SEGMENT))
    subject.schedule = "wavefront"
    subject.blocks[1].ffn.requires_grad_(False)
    subject(tokens)[0].sin().sum().backward()
    assert subject.blocks[1].ffn.up.weight.grad is None
    assert subject.blocks[0].ffn.up.weight.grad is not None


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("mag", "whole segments"),
        ("one layer", "at least two"),
        ("observed", "recording"),
        ("hooked", "hooks"),
        ("another's", "not part of this package"),
    ],
)
def test_what_cannot_be_is_read_layer_after_layer(case, why, counted):
    subject = model(1 if case == "one layer" else 2)
    if case == "mag":
        subject = Model(preset("tiny", "mag", vocab_size=50)).double()
    if case == "hooked":
        subject.blocks[1].ffn.register_forward_hook(lambda module, inputs, output: None)
    if case == "another's":  # as LoRA puts its own in their place
        subject.blocks[1].ffn.down = torch.nn.Linear(48, 32, bias=False).double()
    subject.schedule = "wavefront"
    observes = case == "observed"
    with observing_memories(lambda layer, values, predictions: None) if observes else nullcontext():
        assert why in wavefront.unsupported_reason(list(subject.blocks))
        subject(torch.randint(50, (1, 4 * SEGMENT)))
    assert not counted


def test_memories_that_missed_something_and_rows_apart_are_read_layer_after_layer(counted):
    """A memory that was off while tokens went by has its chunks elsewhere; rows at different places have their segments
    there.
    """
    subject, tokens = model(2), torch.randint(50, (2, 4 * SEGMENT))
    subject.schedule = "wavefront"
    _, state = subject(tokens[:, :5], memory_mode="off")
    subject(tokens, state)
    _, state = subject(tokens[:, :5], mask=torch.tensor([[True] * 5, [True] * 3 + [False] * 2]))
    subject(tokens, state)
    assert not counted


def test_it_is_the_default(counted):
    model(2)(torch.randint(50, (1, 4 * SEGMENT)))
    assert counted == [1]


DOCUMENTS = {
    "one": [0, 3 * SEGMENT],
    "many of all sizes": [0, 5, 5 + SEGMENT, 40, 40, 41, 41 + 4 * SEGMENT, 130, 150],
    "whole segments": [0, SEGMENT, 3 * SEGMENT, 4 * SEGMENT],
    "short": [0, 1, 2, 3],
}


@pytest.mark.parametrize(
    "net", [{}, {"memory": {"net": "titans", "expansion": 1.0, "chunk": 8}}], ids=["deep", "titans"]
)
@pytest.mark.parametrize("borders", DOCUMENTS.values(), ids=DOCUMENTS)
def test_packed_documents_side_by_side(borders, net, counted):
    """If the state is not to be kept: the same outputs and gradients as document by document; nothing of one reaches
    another.
    """
    subject, tokens = model(**net), torch.randint(50, (1, borders[-1]))

    def found(schedule):
        subject.schedule = schedule
        seen = subject.trace(tokens, offsets=borders, keep=False)
        gates = [gate for each in seen.traces for gate in each.gates.tensors()]
        grads = torch.autograd.grad(seen.hidden.sin().sum(), list(subject.parameters()), allow_unused=True)
        return [seen.hidden, seen.surprise, *seen.layers, *gates], seen.state.position, grads

    one, other = found("layers"), found("wavefront")
    assert counted == [1]
    for a, b in zip(one, other, strict=True):
        assert_close(a, b, 1e-9)


def test_documents_lie_in_few_rows_and_none_is_lost():
    torch.manual_seed(0)
    borders = [0, *torch.randint(0, 900, (60,)).cumsum(0).tolist()]
    there, back, begins = wavefront.pack_rows(borders, 512)
    assert len(there) <= wavefront.TARGET_ROWS + 1 and there.shape[1] == 512 * begins.shape[1]
    assert torch.equal(there.flatten()[back], torch.arange(borders[-1]))
    assert int(begins.sum()) == sum(b > a for a, b in itertools.pairwise(borders))


def test_a_state_that_is_asked_for_is_there(counted):
    subject, tokens = model(), torch.randint(50, (1, 60))
    subject.schedule = "wavefront"
    seen = subject.trace(tokens, offsets=[0, 20, 60])
    assert len(seen.state.blocks) == 3 and not counted


def test_a_schedule_that_there_is_not():
    with pytest.raises(
        ValueError, match=r"schedule: expected one of wavefront, layers, got 'layer'; did you mean 'layers'\?"
    ):
        model(2).schedule = "layer"
