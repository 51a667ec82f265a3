"""The delta rule with a forget gate for each channel of the keys, as in Kimi Delta Attention (KDA, arXiv 2510.26692).

    W_t = (I - beta_t k_t k_t') Diag(a_t) W_{t-1} + beta_t k_t v_t'

It is a gradient step at decayed weights, so `update` needs no more than the gradient of the squared loss. With unit
keys, beta at most 2 and a in [0, 1], both factors have no singular value above 1: the rule contracts.

`parallel_chunk` computes a chunk at once. With D[t, i] = prod a_j over (i, t], channel by channel, and
A[t, i] = sum_d k_t[d] k_i[d] D[t, i][d]:

    e_t + sum_{i<t} A[t, i] beta_i e_i = (k_t * D[t, 0]) W_0 - v_t
    W_t = D[t, 0] W_0 - sum_{i<=t} (k_i * D[t, i]) beta_i e_i'
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from remanence.ops.closed_form.token_exact import invert_unit_triangular
from remanence.ops.rules import RULES, Rule, decay_matrix
from remanence.ops.state import Gates, RuleState, Weights


@dataclass(frozen=True, kw_only=True)
class ChannelDecay(Rule):
    """The delta rule with a forget gate for each channel of the keys, for a memory that is a matrix."""

    forget = True
    forget_channels = True
    anchor = "token"

    def gradient_at(self, weights: Weights, gates: Gates) -> Weights:
        assert gates.log_keep is not None
        return (gates.log_keep.exp().unsqueeze(-1) * weights[0],)

    def update(self, state: RuleState, gradients: Weights, gates: Gates) -> RuleState:
        (decayed,) = self.gradient_at(state.weights, gates)
        return RuleState((decayed - gates.log_step.exp() * gradients[0],))

    def parallel_chunk(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Gates, state: RuleState
    ) -> tuple[Tensor, Tensor, RuleState]:
        assert gates.log_keep is not None
        (W,) = state.weights
        step = gates.log_step.exp().unsqueeze(-2)
        products = decay_matrix(gates.log_keep.mT)  # [m f c c]
        keep = gates.log_keep.cumsum(1).exp()
        solver = invert_unit_triangular((torch.einsum("mtf,mif,mfti->mti", k, k, products) * step).tril(-1))
        error = solver @ ((k * keep) @ W - v)
        queried = slice(k.shape[1] - q.shape[1], None)
        scores = torch.einsum("mtf,mif,mfti->mti", q, k, products[:, :, queried]) * step
        answers = (q * keep[:, queried]) @ W - scores @ error
        kept = k * products[:, :, -1].mT * step.mT
        end = keep[:, -1].unsqueeze(-1) * W - kept.mT @ error
        return answers, 0.5 * error.square().sum(-1), RuleState((end,))


RULES["kda"] = ChannelDecay()
