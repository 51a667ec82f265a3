"""The laws of the operator for every rule in RULES with every net, and for rules of a user's own."""

import copy
import pickle
import runpy
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from test_streaming import as_step, inputs

from remanence.ops import (
    MLP,
    NETS,
    RULES,
    FeatureNet,
    Gates,
    LinearRule,
    Rule,
    RuleState,
    current_weights,
    memorize,
    recall,
    start,
)
from remanence.ops.closed_form import unsupported_reason
from remanence.ops.large_chunk import LargeChunk, SwiGLU
from remanence.ops.scans import AutogradScan, ClosedFormScan, RuleScan, TokenExactScan, choose_scan
from remanence.testing import (
    assert_causal,
    assert_close,
    assert_packed,
    assert_rows_isolated,
    assert_same_function,
    assert_split,
)

pytestmark = pytest.mark.sample(4)

OWN = runpy.run_path(str(Path(__file__).parent.parent.parent / "examples" / "own_rule.py"))
RULES.pop("adagrad")


class Newest(Rule):
    """Gradient at each token's own weights, decayed first; the last gradient's norm and a count as buffers."""

    forget = True
    anchor = "token"

    def init_state(self, weights):
        return weights[0].new_zeros(()), weights[0].new_zeros(3)

    def gradient_at(self, weights, gates):
        return tuple(gates.log_keep.exp() * weight for weight in weights)

    def update(self, state, gradients, gates):
        size, count = state.buffers
        step = gates.log_step.exp() / (1 + size)
        weights = tuple(
            gates.log_keep.exp() * W - step * u for W, u in zip(state.weights, gradients, strict=True)
        )
        now = sum(u.square().sum() for u in gradients)
        return RuleState(weights, (torch.sqrt(now + 1e-3), count + step))


class Late(Rule):
    """An update for every token, and queries answered from the weights of the chunk's start."""

    read = "chunk"

    def update(self, state, gradients, gates):
        step = gates.log_step.exp()
        return RuleState(tuple(W - step * u for W, u in zip(state.weights, gradients, strict=True)))


class Bounded(LinearRule):
    """A linear rule that is changed: the closed form must not run it."""

    def update(self, state, gradients, gates):
        new = super().update(state, gradients, gates)
        return RuleState(tuple(torch.tanh(weight) for weight in new.weights), new.buffers)


ALL = {
    **RULES,
    "large_chunk at the token": LargeChunk(read="token", loss="squared"),
    "adagrad": OWN["Adagrad"](),
    "newest": Newest(),
    "late": Late(),
    "bounded": Bounded(),
}
SMALL = {"titans": MLP(expansion=1.5), "residual": MLP(norm=False, expansion=1.5), "linear": NETS["linear"]}
NETS_HERE = {name: SMALL.get(name, net) for name, net in NETS.items() if not isinstance(net, FeatureNet)}


def needs_matrix(rule):
    return rule.forget_channels or (isinstance(rule, LinearRule) and rule.anchor == "token")


PAIRS = [
    (rule, net)
    for rule in ALL
    for net in NETS_HERE
    # Token-exact linear rules run where the memory is linear in its weights; others at a chunk of 1.
    if not (needs_matrix(ALL[rule]) and net != "linear")
]
STEP = {"residual": -6.0, "swiglu": -2.0}


def case(rule, net, **fields):
    return Case(
        net=NETS_HERE[net],
        rule=ALL[rule],
        **{"chunk": 4, "tokens": 11, "step": STEP.get(net, -1.0), **fields},
    )


@pytest.mark.parametrize(("rule", "net"), PAIRS)
def test_chunked_equals_reference_in_outputs_state_and_gradients(rule, net):
    here = case(rule, net)
    assert_same_function(here.call("reference"), here.call("chunked"), here.leaves(), tolerance=1e-10)


@pytest.mark.parametrize("rule", ALL)
def test_the_laws_of_streaming(rule):
    net = "linear" if needs_matrix(ALL[rule]) else "swiglu"
    step = as_step(NETS_HERE[net], ALL[rule], 4)
    for sizes in ([1] * 23, [5, 18], [4, 4, 15], [0, 7, 0, 1, 15]):
        assert_split(step, inputs(), sizes, 1e-10)
    reads_late = ALL[rule].read == "chunk"  # the last chunk's tokens then change no answer
    assert_causal(step, inputs(), range(20 if reads_late else 23))
    assert_rows_isolated(step, inputs(batch=3))
    assert_packed(step, [inputs(1, tokens)[0] for tokens in (7, 1, 12, 4, 0, 2)], 1e-10)
    reference = as_step(NETS_HERE[net], ALL[rule], 4, "reference")
    assert_split(reference, inputs(), [1, 2, 20], 1e-10)
    assert_packed(reference, [inputs(1, tokens)[0] for tokens in (7, 1, 0, 2)], 1e-10)


@pytest.mark.parametrize("rule", ALL)
def test_a_state_is_cropped_chosen_and_saved_with_its_buffers(rule):
    net = NETS["linear"]
    step = as_step(net, ALL[rule], 4)
    x = inputs(3, 11)
    state = step(x)[1]
    for other in (state.rows([2, 0]), pickle.loads(pickle.dumps(state)).rows([2, 0])):
        rest = inputs(2, 9)
        assert_close(step(rest, other)[0], step(torch.cat([x[[2, 0]], rest], 1))[0][:, 11:], 1e-10)
    assert_close(state.crop(2), step(x[:, :9])[1], 1e-12)
    assert not state.diverged.any()
    bad = x.clone()
    bad[1] *= 1e300
    assert step(bad)[1].diverged.tolist()[0::2] == [False, False]


@pytest.mark.parametrize("rule", ALL)
@pytest.mark.parametrize("read", [3, 4, 9])
def test_recall_asks_the_weights_that_the_next_query_would(rule, read):
    """The weights after all that was read; of a rule that reads late, those of the chunk's start."""
    net, rule = NETS["linear"], ALL[rule]
    step = as_step(net, rule, 4)
    x = inputs(2, read)
    state = step(x)[1]
    q = torch.randn(2, 5, 2, 3, dtype=torch.float64)
    apart = state.concat([state.rows(0), step(x[1:, : read - 1])[1]])  # rows at different places
    for here, last in ((state, read), (apart, read - 1)):
        answers = recall(q, here, net=net, rule=rule)
        if rule.read == "token":  # the last token's query, asked once more
            again = x[:, :last].clone()
            again[:, -1, :, :3] = q[:, 0]
            assert_close(answers[1, 0], step(again[1:])[0][0, -1], 1e-10)
        else:
            first = last // 4 * 4
            later = torch.cat([x[1:, :first], torch.cat([q[1:, :1], x[1:, :1, :, 3:]], -1)], 1)
            assert_close(answers[1, 0], step(later)[0][0, -1], 1e-10)
        assert_close(
            current_weights(here, net=net, rule=rule), current_weights(here.clone(), net=net, rule=rule), 0.0
        )


def by_hand(q, k, v, log_step, log_momentum, weights, chunk, read, loss):
    """Large chunks as a loop over tokens that shares no code with the package: one head, one document."""
    f = lambda W, x: (F.silu(x @ W[0]) * (x @ W[1])) @ W[2]
    W = [weight.clone() for weight in weights]
    norms, S = [weight.norm(dim=-1, keepdim=True) for weight in W], [torch.zeros_like(weight) for weight in W]
    answers, surprises = [], []
    for first in range(0, len(k), chunk):
        last = min(first + chunk, len(k))
        at = [weight.detach().requires_grad_() for weight in W]

        def written(end, at=at, first=first, W=W, S=S):
            total = sum(log_step[i].exp() * loss(f(at, k[i]), v[i]) for i in range(first, end))
            eta = log_momentum[first:end].exp().mean()
            new = [eta * s - g for s, g in zip(S, torch.autograd.grad(total, at), strict=True)]
            moved = [w + s for w, s in zip(W, new, strict=True)]
            return [w * n / w.norm(dim=-1, keepdim=True) for w, n in zip(moved, norms, strict=True)], new

        for t in range(first, last):
            answers.append(f(W if read == "chunk" else written(t + 1)[0], q[t]))
            surprises.append(loss(f(W, k[t]), v[t]))
        if last - first == chunk:
            W, S = written(last)
    return torch.stack(answers), torch.stack(surprises), W


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("read", ["chunk", "token"])
@pytest.mark.parametrize("loss", ["dot", "squared"])
def test_large_chunks_against_a_loop(backend, read, loss):
    here = Case(net=SwiGLU(expansion=1.5), rule=LargeChunk(read=read, loss=loss), chunk=5, tokens=18, width=6)
    q, k, v, log_step, log_momentum, *weights = (x.detach() for x in here.leaves())
    losses = {"dot": lambda y, v: -(y * v).sum(), "squared": lambda y, v: 0.5 * (y - v).square().sum()}
    y, surprise, state = here.call(backend)(q, k, v, log_step, log_momentum, *weights)
    for row in range(2):
        for head in range(2):
            own = (x[row, :, head] for x in (q, k, v, log_step, log_momentum))
            answers, surprises, end = by_hand(*own, [w[head] for w in weights], 5, read, losses[loss])
            assert_close(y[row, :, head], answers, 1e-12)
            assert_close(surprise[row, :, head], surprises, 1e-12)
            assert_close([w[row, head] for w in state.weights], end, 1e-12)


def test_rows_keep_their_norms_and_rows_of_zero_are_free():
    rule, net = LargeChunk(), NETS["linear"]
    weights = (torch.cat([torch.randn(1, 3, 6), torch.zeros(1, 3, 6)], 1),)
    q, k, v = torch.randn(3, 1, 32, 1, 6)
    gates = Gates(torch.zeros(1, 32, 1), torch.full((1, 32, 1), -0.5))
    state = start(weights, 1, rule=rule, chunk=8)
    _, state, _ = memorize(q, k, v, gates, state, net=net, rule=rule, chunk=8)
    assert_close(state.weights[0][0].norm(dim=-1)[:, :3], weights[0].norm(dim=-1)[:, :3], 1e-6)
    assert state.weights[0][0, 0, 3:].any()
    assert not torch.allclose(state.weights[0][0], weights[0])


@pytest.mark.sample(1)
@pytest.mark.parametrize("rule", ["large_chunk", "newest"])
def test_gradcheck(rule):
    here = Case(net=SwiGLU(), rule=ALL[rule], tokens=3, chunk=2, batch=1, heads=1, width=2, step=-2.0)

    def outputs(*leaves):
        y, surprise, state = here.call("chunked")(*leaves)
        return y, surprise, *state.layers, *state.buffers

    assert torch.autograd.gradcheck(outputs, here.leaves(), atol=1e-6)


def test_fast_paths_are_found_by_dispatch():
    matrix, net = NETS["linear"], NETS["titans"]
    assert type(choose_scan(net, RULES["titans"], True, 2)) is ClosedFormScan
    assert type(choose_scan(matrix, RULES["delta"], True, 1)) is TokenExactScan
    assert type(choose_scan(SwiGLU(), RULES["titans"], True, 3)) is AutogradScan
    for own in (Bounded(), RULES["large_chunk"], Newest()):
        assert type(choose_scan(matrix, own, True, 1)) is RuleScan
        assert type(own).__name__ in unsupported_reason(matrix, own)

    class Renamed(LinearRule):
        """Changes nothing, so it keeps its closed form."""

    assert type(choose_scan(net, Renamed(), True, 2)) is ClosedFormScan


def test_rules_made_as_before_are_linear_rules():
    rule = Rule(momentum=False, anchor="token")
    assert type(rule) is LinearRule and isinstance(rule, Rule)
    assert rule == LinearRule(momentum=False, anchor="token") == copy.deepcopy(rule)
    assert pickle.loads(pickle.dumps(rule)) == rule
    assert replace(rule, anchor="chunk").anchor == "chunk"
    assert Rule() == RULES["titans"]
    with pytest.raises(TypeError, match="speed"):
        Rule(speed=1)


@dataclass
class Wrong(Rule):
    granularity: str = "token"
    anchor: str = "chunk"
    read: str = "token"
    loss: str = "squared"


def _call(rule, state=None):
    weights = NETS["linear"].init(1, 4)
    x = torch.randn(1, 6, 1, 4)
    state = start(weights, 1, rule=rule, chunk=2) if state is None else state
    return memorize(x, x, x, Gates(torch.zeros(1, 6, 1)), state, net=NETS["linear"], rule=rule, chunk=2)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Wrong(granularity="row"), "rule.granularity: expected 'token' or 'chunk', got 'row'"),
        (Wrong(read="end"), "rule.read: expected 'token' or 'chunk', got 'end'"),
        (Wrong(anchor="end"), "rule.anchor: expected 'token' or 'chunk', got 'end'"),
        (
            Wrong(granularity="chunk", anchor="token"),
            "rule.anchor: expected 'chunk' for a rule of granularity",
        ),
        (Wrong(loss="cubed"), "rule.loss: expected a function or one of squared, dot, got 'cubed'"),
        ("titans", "rule: expected a Rule \\(or an entry of RULES\\), got str"),
    ],
)
def test_a_rule_that_declares_something_else_is_refused(rule, message):
    with pytest.raises(ValueError, match=message):
        _call(rule)


def test_a_rule_without_update_or_with_other_shapes_is_refused():
    with pytest.raises(NotImplementedError, match="Wrong: expected a method update"):
        _call(Wrong())

    class Grows(Rule):
        def update(self, state, gradients, gates):
            return RuleState(tuple(weight[None] for weight in state.weights))

    with pytest.raises(ValueError, match=r"rule: expected update of Grows .* \[\[\[4, 4\]\], \[\]\], got"):
        _call(Grows())

    class Counts(Late):
        def init_state(self, weights):
            return (torch.zeros(1, dtype=torch.int64),)

    with pytest.raises(ValueError, match="init_state to return a tuple of floating-point tensors, got"):
        _call(Counts())
    with pytest.raises(
        ValueError, match=r"state: expected buffers of shapes .* as init_state of Newest makes"
    ):
        _call(Newest(), start(NETS["linear"].init(1, 4), 1, rule=Late(), chunk=2))
    with pytest.raises(ValueError, match="momentum: expected None for a rule that makes its own state"):
        start(NETS["linear"].init(1, 4), 1, rule=Late(), momentum=(torch.zeros(1, 1, 4, 4),))
