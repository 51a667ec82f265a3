"""Which rules contract: two memories that read the same tokens never move apart, whatever the gates and unit keys.

Where it holds, no gate, key, value or weight that a search finds enlarges a difference; where it does not, a
counterexample is kept.
"""

import math
from dataclasses import replace

import pytest
import torch
from contraction import gain, jacobian, worst_gain

from remanence.ops import RULES, Gates, LinearRule, Rule, RuleState

HOLDS = {
    "delta": RULES["delta"],
    "gated_delta": RULES["gated_delta"],
    "linear_attention": RULES["linear_attention"],
    "kda": RULES["kda"],
    "wide_delta": RULES["wide_delta"],
    "yaad": RULES["yaad"],
    "gradient before decay": replace(RULES["no_momentum"], anchor="token"),
}
FAILS = {
    "titans": LinearRule(anchor="token"),
    "l_p": RULES["l_p"],
    "memora": RULES["memora"],
    "gradient before decay, steps up to 2": LinearRule(momentum=False, anchor="token", max_step=2.0),
}


@pytest.mark.parametrize("rule", HOLDS)
def test_no_update_enlarges_a_difference(rule):
    assert 0.9 < worst_gain(HOLDS[rule]) <= 1 + 1e-12


@pytest.mark.parametrize("rule", FAILS)
def test_a_search_finds_updates_that_enlarge_a_difference(rule):
    assert worst_gain(FAILS[rule], starts=1, steps=10) > 1.1


def vector(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.parametrize(
    ("keep", "step", "decay_first", "factors"),
    [
        (1.0, 2.0, True, (-1.0, 1.0, 1.0)),  # a reflection: wide_delta
        (0.5, 1.0, False, (-0.5, 0.5, 0.5)),  # the paper's order: keep - step along the key
        (0.0, 1.0, False, (-1.0, 0.0, 0.0)),
        (0.0, 2.0, False, (-2.0, 0.0, 0.0)),  # alpha + theta = 3: the difference is doubled
    ],
)
def test_factors_along_and_across_a_key(keep, step, decay_first, factors):
    rule = LinearRule(momentum=False, anchor="token", decay_first=decay_first, max_step=2.0)
    gates = Gates(vector(step).log()[0], None, vector(keep).log()[0])
    J = jacobian(rule, vector(1, 0, 0), vector(3, -4), gates, (torch.zeros(3, 2).double(),))
    assert torch.equal(J, torch.diag(vector(*factors).repeat_interleave(2)))


def test_momentum_is_a_counterexample():
    """Without forgetting, M' = M + S', S' = S - k k' M: a difference in S is added to M."""
    found = gain(
        FAILS["titans"], vector(1, 0, 0), vector(0, 0), vector(0, 40, 40, 0, 0), torch.zeros(3, 2).double()
    )
    assert found > 1.5


class EraseGate(Rule):
    """W <- (I - k (b k)') W + k v' with b = (1, 0, 0), an erase gate for each channel as in Gated DeltaNet-2. The
    gradient of the squared loss is k (k'W - v), so only its value part is used.
    """

    def update(self, state, gradients, gates):
        (W,) = state.weights
        k = torch.full_like(W[:, 0], 1 / math.sqrt(2)) * vector(1, 1, 0)
        return RuleState((W - torch.outer(k, (vector(1, 0, 0) * k) @ W),))


def test_an_erase_gate_for_each_channel_is_a_counterexample():
    """I - k (b k)' with k = (1, 1) / sqrt 2 and b = (1, 0) has singular value 1.144, although b is within [0, 1]."""
    found = gain(
        EraseGate(), vector(1, 1, 0), vector(0, 0), vector(0, 0, 0, 0, 0), torch.zeros(3, 2).double()
    )
    assert found == pytest.approx(1.144, abs=1e-3)
