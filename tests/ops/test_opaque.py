"""The chunked tier as torch.compile sees it: one operator, and the same function."""

import pytest
import torch
from cases import Case
from compiling import assert_same, whole

from remanence import MLP, NETS, RULES
from remanence.ops import Gates, clamped, opaque, reset_clamped, start

pytestmark = pytest.mark.sample(4)


@pytest.mark.parametrize("offsets", [None, [0, 3, 3, 14]])
@pytest.mark.parametrize("rule", ["titans", "ttt", "gated_delta", "linear_attention"])
def test_the_operator_is_one_of_torchs(rule, offsets, aside):
    """torch's own checks of it, and its gradients beside those of the chunked tier."""
    net = NETS["linear"] if RULES[rule].anchor == "token" else MLP(depth=2, bias=True)
    case = Case(net=net, rule=RULES[rule], tokens=14, chunk=4, batch=1 if offsets else 2, offsets=offsets)
    leaves = case.leaves()
    seen = []
    run = opaque.chunked_forward

    def noted(*arguments):
        seen.append(arguments)
        return run(*arguments)

    opaque.chunked_forward = noted
    try:
        q, k, v, *rest = leaves
        gates = [rest.pop(0) if there else None for there in (True, case.rule.momentum, case.rule.forget)]
        state = start(tuple(rest[: case.depth]), 3 if offsets else 2, rule=case.rule, chunk=4)
        opaque.memorize(q, k, v, Gates(*gates), state, net, case.rule, 4, offsets)
    finally:
        opaque.chunked_forward = run
    torch.library.opcheck(run, seen[0])
    results = lambda call: [*call[:2], *call[2].tensors()]
    found = aside(lambda: results(whole(case.call("chunked"))(*leaves)))
    true = results(case.call("chunked")(*leaves))
    loss = lambda outputs: sum(x.sin().sum() for x in outputs if x.is_floating_point())
    assert_same(true, found)
    gradients = [torch.autograd.grad(loss(outputs), leaves, allow_unused=True) for outputs in (true, found)]
    assert_same(*gradients)


def test_a_net_of_ones_own_runs_as_it_is(aside):
    class Own:
        def init(self, heads, width, generator=None):
            return (torch.randn(heads, width, width, generator=generator),)

        def apply(self, weights, x):
            return torch.tanh(x @ weights[0])

    case = Case(net=Own(), tokens=9)
    leaves = case.leaves()
    found = aside(lambda: torch.compile(case.call("chunked"), backend="aot_eager")(*leaves)[0])
    assert_same([case.call("chunked")(*leaves)[0]], [found])


def test_compiled_gradients_that_are_held_are_counted(aside, monkeypatch):
    case = Case(tokens=9)
    leaves = case.leaves()
    y = aside(lambda: whole(case.call("chunked"))(*leaves)[0])
    monkeypatch.setattr(torch, "finfo", lambda dtype: type("Short", (), {"eps": 1e9, "max": 1e30}))
    reset_clamped()
    torch.autograd.grad(y.sin().sum(), leaves, allow_unused=True)
    assert clamped() == 4, "of two rows and two heads"
    reset_clamped()
