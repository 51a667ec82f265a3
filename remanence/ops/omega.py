"""The Omega rule (ATLAS, arXiv 2505.23735, without its features and Muon): gradients of a window of losses.

    W_t = (1 - alpha_t) W_{t-1} - theta_t grad sum_{i = t-c+1..t} gamma loss(f(k_i), v_i)        at W_{t-1}

gamma, a gate of each token in the paper, is 1 / c for all of them here, or 1. For a matrix and unit keys, the mean of
the window's losses has a curvature of at most 1, so the rule contracts as gradient descent on one token does; the sum
does not: c equal keys multiply the step by c.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from remanence.ops.rules import RULES, Loss, Rule, descend
from remanence.ops.state import Gates, RuleState, Weights


@dataclass(frozen=True, kw_only=True)
class Omega(Rule):
    """An update for every token with the gradient of the losses of the last `window` tokens, at the current weights.

    window
        The number of tokens, the current one included. Their keys and values are part of the state. At the start of a
        document, the missing ones are zeros, which have no gradient in a net without biases.
    average
        Whether the losses are averaged (over `window`) or summed.
    """

    window: int = 4
    average: bool = True
    loss: str | Loss = "squared"

    forget = True
    anchor = "token"

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window: expected at least 1, got {self.window!r}")

    def init_state(self, weights: Weights) -> Weights:
        """Return the window's keys and values."""
        first, last = weights[0], weights[-1]
        return first.new_zeros(self.window, first.shape[-2]), last.new_zeros(self.window, last.shape[-1])

    def observe(self, buffers: Weights, k: Tensor, v: Tensor) -> Weights:
        keys, values = buffers
        return torch.cat([keys[1:], k.unsqueeze(0)]), torch.cat([values[1:], v.unsqueeze(0)])

    def objective(self, loss: Tensor, predict: Callable[[Tensor], Tensor], buffers: Weights) -> Tensor:
        keys, values = buffers
        losses = self.loss_function(predict(keys), values)
        return losses.mean() if self.average else losses.sum()

    def update(self, state: RuleState, gradients: Weights, gates: Gates) -> RuleState:
        return RuleState(descend(state.weights, gradients, gates), state.buffers)


RULES["omega"] = Omega()
