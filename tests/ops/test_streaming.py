"""Laws 3 and 4 at the operator: splits, causality, isolation, packing; and reading without writing."""

import itertools

import pytest
import torch
from cases import Case, pairwise
from hypothesis import given
from hypothesis import strategies as st

from remanence.ops import MLP, NETS, Gates, MemoryState, Rule, memorize, recall, start
from remanence.testing import assert_causal, assert_close, assert_packed, assert_rows_isolated, assert_split

pytestmark = pytest.mark.sample(4)

LINEAR = MLP(depth=1, norm=False)
KINDS = {
    "titans": (MLP(expansion=1.5), Rule()),
    "no momentum": (MLP(expansion=1.5, bias=True), Rule(momentum=False)),
    "deep": (MLP(depth=3, expansion=1.5), Rule(decay_first=True)),
    "plain": (MLP(norm=False, expansion=1.5), Rule(forget=False)),
    "exact": (LINEAR, Rule(anchor="token")),
}


def as_step(net, rule, chunk, backend="chunked", heads=2, width=3):
    """The operator as ``y, state = step(x, state)``, x holding q, k, v and gates side by side."""
    torch.manual_seed(7)
    weights = tuple(weight.double() for weight in net.init(heads, width))

    def step(x, state=None, offsets=None):
        q, k, v = x[..., : 3 * width].unflatten(-1, (3, width)).unbind(-2)
        logs = torch.nn.functional.logsigmoid(x[..., 3 * width :])
        keep = torch.nn.functional.logsigmoid(v) if rule.forget_channels else logs[..., 2]
        gates = Gates(
            logs[..., 0] - 1, logs[..., 1] if rule.momentum else None, keep if rule.forget else None
        )
        if state is None:
            state = start(
                weights, x.shape[0] if offsets is None else len(offsets) - 1, rule=rule, chunk=chunk
            )
        k = torch.nn.functional.normalize(k, dim=-1)
        y, state, _ = memorize(
            q, k, v, gates, state, net=net, rule=rule, chunk=chunk, offsets=offsets, backend=backend
        )
        return y, state

    return step


def inputs(batch=2, tokens=23, heads=2, width=3):
    return torch.randn(batch, tokens, heads, 3 * width + 3, dtype=torch.float64)


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [[1] * 23, [5, 18], [4, 4, 15], [23], [0, 7, 0, 1, 15], [22, 1]], ids=str)
def test_whole_equals_any_split(kind, sizes, backend):
    if backend == "reference" and len(sizes) > 6:
        sizes = [1, 2, 20]
    assert_split(as_step(*KINDS[kind], 4, backend), inputs(), sizes, 1e-10)


@given(cuts=st.lists(st.integers(0, 23), max_size=6), chunk=st.integers(1, 9))
def test_whole_equals_hypothetical_splits(cuts, chunk):
    borders = [0, *sorted(cuts), 23]
    sizes = [b - a for a, b in itertools.pairwise(borders)]
    assert_split(as_step(*KINDS["titans"], chunk), inputs(), sizes, 1e-10)


def test_gradients_of_a_split_equal_the_whole():
    step = as_step(*KINDS["titans"], 4)
    x = inputs().requires_grad_()
    weights = torch.randn(2, 23, 2, 3, dtype=torch.float64)
    whole = torch.autograd.grad((step(x)[0] * weights).sum(), x)
    state, pieces = None, []
    for piece in x.split([6, 1, 1, 15], 1):
        y, state = step(piece, state)
        pieces.append(y)
    assert_close(torch.autograd.grad((torch.cat(pieces, 1) * weights).sum(), x), whole, 1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_causal_to_the_bit(kind, dtype):
    step = as_step(*KINDS[kind], 8)
    if dtype == torch.float32:
        net, rule = KINDS[kind]
        weights = tuple(weight for weight in net.init(2, 3))
        exact = step
        step = lambda x, state: exact(x, start(weights, 2, rule=rule, chunk=8))
    assert_causal(step, inputs().to(dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_isolated(kind):
    assert_rows_isolated(as_step(*KINDS[kind], 4), inputs(batch=3))


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_equals_alone(kind, backend):
    documents = [inputs(1, tokens)[0] for tokens in (7, 1, 12, 4, 0, 2)]
    assert_packed(as_step(*KINDS[kind], 4, backend), documents, 1e-10)


def test_packed_rows_continue_at_different_places():
    """Rows whose documents stand at different places in their chunks are read together, packed or side by side."""
    step = as_step(*KINDS["titans"], 4)
    documents = [inputs(1, 20)[0] for _ in range(3)]
    heads, states = [5, 2, 8], []
    for document, head in zip(documents, heads, strict=True):
        states.append(step(document[None, :head])[1])
    alone = [step(document[None])[0] for document in documents]
    rest = [document[head : head + 12] for document, head in zip(documents, heads, strict=True)]
    y, _ = step(torch.stack(rest), MemoryState.concat(states))
    for row, head in enumerate(heads):
        assert_close(y[row], alone[row][0, head : head + 12], 1e-10)
    z, _ = step(torch.cat(rest)[None], MemoryState.concat(states), offsets=[0, 12, 24, 36])
    assert_close(z.view_as(y), y, 1e-10)


@pytest.mark.parametrize(
    "s", pairwise(kind=list(KINDS), head=[0, 3, 4, 9], packed=[False, True], chunk=[1, 4, 16]), ids=str
)
def test_recall_asks_the_weights_as_they_are(s):
    """Asking without writing = writing one token that changes nothing (no step, no past, all kept) and reading its
    answer.
    """
    net, rule = KINDS[s["kind"]]
    step = as_step(net, rule, s["chunk"])
    x = inputs(2, s["head"])
    state = step(x)[1]
    q = torch.randn(2, 5, 2, 3, dtype=torch.float64)
    if s["packed"]:
        answers = recall(q.flatten(0, 1)[None], state, net=net, rule=rule, offsets=[0, 5, 10]).view_as(q)
    else:
        answers = recall(q, state, net=net, rule=rule)
    nothing = torch.full((2, 1, 2), -torch.inf, dtype=torch.float64)
    gates = Gates(
        nothing, nothing if rule.momentum else None, torch.zeros_like(nothing) if rule.forget else None
    )
    for t in range(5):
        one, zero = q[:, t : t + 1], torch.zeros(2, 1, 2, 3, dtype=torch.float64)
        y, _, _ = memorize(
            one, zero, zero, gates, state, net=net, rule=rule, chunk=s["chunk"], backend="reference"
        )
        assert_close(answers[:, t : t + 1], y, 1e-10)


def test_recall_is_differentiable_in_what_was_read():
    net, rule = KINDS["titans"]
    step = as_step(net, rule, 4)
    x = inputs(1, 6).requires_grad_()
    q = torch.randn(1, 2, 2, 3, dtype=torch.float64)

    def answers(x):
        return recall(q, step(x)[1], net=net, rule=rule)

    assert torch.autograd.gradcheck(answers, (x,), atol=1e-6)


def test_state_is_a_value():
    """Rows can be taken, reordered and joined; nothing is shared or changed behind the caller's back."""
    step = as_step(*KINDS["titans"], 4)
    _, state = step(inputs(3, 6))
    joined = MemoryState.concat([state.rows(2), state.rows([0, 1])])
    assert_close(joined, state.rows([2, 0, 1]), 0.0)
    assert state.nbytes == sum(tensor.nbytes for tensor in state.tensors())
    assert state.chunk == 4
    assert state.position.tolist() == [6, 6, 6]
    assert not state.detach().weights[0].requires_grad
    longer = step(inputs(3, 600), state)[1]
    assert longer.nbytes == state.nbytes, "a state's size must not depend on how much was read"


def test_linear_tokens_do_not_need_a_state_per_token():
    """Memory: what is kept for backward grows with t e, not with a copy of the weights per chunk."""

    def kept(tokens):
        case = Case(
            net=MLP(expansion=4.0), chunk=4, tokens=tokens, batch=1, heads=1, width=8, dtype=torch.float32
        )
        leaves = case.leaves()
        seen = {}

        def pack(x):
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            case.call("chunked")(*leaves)
        inputs_size = sum(leaf.nbytes for leaf in leaves[:6])
        weights_size = 2 * sum(leaf.nbytes for leaf in leaves[6:8])
        return sum(seen.values()), inputs_size, weights_size

    for tokens in (256, 1024):
        total, inputs_size, weights_size = kept(tokens)
        chunks = tokens // 4
        assert total < 6 * inputs_size + 2.5 * chunks**0.5 * weights_size
        assert total < 0.6 * chunks * weights_size


@pytest.mark.parametrize("net", [NETS["titans"], LINEAR], ids=["deep", "linear"])
def test_empty_call_changes_nothing(net):
    step = as_step(net, Rule(), 4)
    _, state = step(inputs(2, 6))
    y, same = step(inputs(2, 0), state)
    assert y.shape == (2, 0, 2, 3)
    assert_close(same, state, 0.0)
    none = state.rows([])
    y, same = step(inputs(0, 6), none)
    assert y.shape == recall(y, none, net=net).shape == (0, 6, 2, 3)
    assert_close(same, none, 0.0)
