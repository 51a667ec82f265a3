"""The kernels' yardstick is the function it should be."""

import pytest
from cases import Case
from plain import plain

from remanence.ops import MLP, Gates, Rule
from remanence.testing import assert_same_function


@pytest.mark.parametrize("activation", ["gelu", "silu"])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("momentum", [True, False])
def test_plain_is_the_chunked_tier(norm, momentum, activation):
    net, rule = MLP(expansion=1.5, norm=norm, activation=activation), Rule(momentum=momentum)
    case = Case(net=net, rule=rule, tokens=11, chunk=4, step=-5.0)

    def written(q, k, v, log_step, *rest):
        gates = Gates(log_step, rest[0] if momentum else None, rest[momentum])
        weights, past = rest[momentum + 1 : momentum + 3], rest[momentum + 3 :]
        return plain(q, k, v, gates, weights, past, net=net, rule=rule, chunk=4, dtype=q.dtype)

    def chunked(*leaves):
        y, surprise, new = case.call("chunked")(*leaves)
        return y, surprise, *new.layers

    assert_same_function(chunked, written, case.leaves(), tolerance=1e-10)
