"""KDA: against the loop of its authors' code, at the ends of its gates, and where it does not apply."""

import pytest
import torch
import torch.nn.functional as F
from cases import Case

from remanence import NeuralMemory
from remanence.ops import MLP, NETS, RULES, Gates, RuleState, memorize, start
from remanence.ops.channel_decay import ChannelDecay
from remanence.testing import assert_close, assert_contracts, assert_same_function

MATRIX, RULE = NETS["linear"], RULES["kda"]


def loop(q, k, v, log_keep, beta, S):
    """`naive_recurrent_kda` of flash-linear-attention (MIT licence) without its scale of q."""
    answers = []
    for t in range(q.shape[1]):
        S = S * log_keep[:, t, ..., None].exp()
        change = v[:, t] - (k[:, t, ..., None] * S).sum(-2)
        S = S + torch.einsum("bhk,bhv->bhkv", beta[:, t, :, None] * k[:, t], change)
        answers.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(answers, 1), S


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_it_is_the_authors_recurrence(backend):
    here = Case(net=MATRIX, rule=RULE, chunk=4, tokens=12)

    def own(*leaves):
        y, _, state = here.call(backend)(*leaves)
        return y, state.weights[0]

    def theirs(q, k, v, log_step, log_keep, weight):
        return loop(q, k, v, log_keep, log_step.exp(), weight.expand(2, *weight.shape))

    assert_same_function(own, theirs, here.leaves(), 1e-12)


@pytest.mark.parametrize("extreme", ["clear", "no step"])
def test_gates_at_their_ends(extreme):
    here = Case(net=MATRIX, rule=RULE, chunk=5, tokens=13, extreme=extreme)
    assert_same_function(here.call("reference"), here.call("chunked"), here.leaves(), 1e-12)


def test_equal_gates_of_all_channels_are_gated_delta():
    here = Case(net=MATRIX, rule=RULES["gated_delta"], chunk=4)
    q, k, v, log_step, log_keep, weight = (x.detach() for x in here.leaves())
    run = lambda rule, keep: memorize(
        q,
        k,
        v,
        Gates(log_step, None, keep),
        start((weight,), 2, rule=rule, chunk=4),
        net=MATRIX,
        rule=rule,
        chunk=4,
    )
    y, state, surprise = run(RULE, log_keep.unsqueeze(-1).expand(k.shape).contiguous())
    z, end, other = run(RULES["gated_delta"], log_keep)
    assert_close([y, surprise, state.layers], [z, other, end.layers], 1e-12)


def test_a_subclass_is_computed_by_its_own_update():
    class Halved(ChannelDecay):
        def update(self, state, gradients, gates):
            return RuleState(
                tuple(0.5 * weight for weight in super().update(state, gradients, gates).weights)
            )

    here = Case(net=MATRIX, rule=Halved(), chunk=4, tokens=9)
    assert_same_function(here.call("reference"), here.call("chunked"), here.leaves(), 1e-12)


def test_only_a_matrix_has_channels():
    with pytest.raises(
        ValueError, match="forget gate for each channel, which needs the net 'deep' or 'linear'"
    ):
        NeuralMemory(dim=8, net="titans", rule="kda")
    x, weights = torch.randn(1, 2, 1, 4), MLP().init(1, 4)
    with pytest.raises(
        ValueError, match="rule: a forget gate for each channel needs a memory that is a matrix"
    ):
        memorize(
            x, x, x, Gates(x[..., 0], None, -x.abs()), start(weights, 1, rule=RULE), net=MLP(), rule=RULE
        )
    W = MATRIX.init(1, 4)
    with pytest.raises(
        ValueError, match=r"gates.log_keep: expected shape \[1, 2, 1, 4\] \(batch, tokens, heads, ch"
    ):
        memorize(x, x, x, Gates(x[..., 0], None, x[..., 0]), start(W, 1, rule=RULE), net=MATRIX, rule=RULE)


def test_the_layer():
    layer = NeuralMemory(dim=12, heads=3, rule="kda", chunk=4, forget_bias=-1.0, threshold=0.4).double()
    torch.nn.init.normal_(layer.gates.weight)
    x = torch.randn(2, 10, 12, dtype=torch.float64)
    gates = layer.log_gates(x)
    assert gates.log_keep.shape == (2, 10, 3, 4)
    skipped = gates.log_step == gates.log_step.min()
    assert skipped.any() and not skipped.all()
    assert not gates.log_keep[skipped].any() and (gates.log_keep[~skipped] < 0).all()
    traced = layer.trace(x).gates.log_keep
    assert_close(traced, gates.log_keep.exp().mean(-1).log(), 1e-12)
    (initial,) = layer.channel_gates.log_sigmoids(0 * x, [True])
    assert_close(initial, F.logsigmoid(torch.ones_like(initial)), 1e-12)
    draw = lambda count: torch.randn(1, count, 12, dtype=torch.float64)
    assert_contracts(layer, (draw(9), draw(9)), draw(32))
