"""Other losses and retentions (MIRAS, arXiv 2504.13173): Yaad's Huber loss, Moneta's l_p loss, Memora's KL retention.

    Yaad      W_t = (1 - alpha_t) W_{t-1} - theta_t grad huber(|f(k_t) - v_t|)                   equation 26
    l_p       W_t = (1 - alpha_t) W_{t-1} - theta_t grad |f(k_t) - v_t|_p^p / p                  equations 10, 25
    Memora    W_t = c softmax((1 - alpha_t) log W_{t-1} - theta_t grad loss(f(k_t), v_t))        equation 27

All gradients are taken at W_{t-1}. Moneta's l_q retention, ``W = A / |A|_q^(q-2)``, is not offered: with q = 4, weights
grow as what they accumulate shrinks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from remanence.ops.rules import RULES, Loss, Rule, descend
from remanence.ops.state import Gates, RuleState, Weights


@dataclass(frozen=True, kw_only=True)
class Huber:
    """The Huber loss of the length of an error: half its square up to `delta`, linear beyond it, so that an outlier's
    gradient is at most `delta` long.
    """

    delta: float = 1.0

    def __call__(self, prediction: Tensor, value: Tensor) -> Tensor:
        square = (prediction - value).square().sum(-1)
        near = square <= self.delta**2
        length = torch.where(near, 1.0, square).sqrt()  # the derivative of a length of 0 is not finite
        return torch.where(near, 0.5 * square, self.delta * (length - 0.5 * self.delta))


@dataclass(frozen=True, kw_only=True)
class PowerLoss:
    """The l_p loss, ``sum |error|^p / p``."""

    p: float = 3.0

    def __call__(self, prediction: Tensor, value: Tensor) -> Tensor:
        return (prediction - value).abs().pow(self.p).sum(-1) / self.p


@dataclass(frozen=True, kw_only=True)
class Descent(Rule):
    """Gradient descent on any loss, at the current weights, with a forget gate: Yaad with `Huber`, or `PowerLoss`."""

    loss: str | Loss = Huber()

    forget = True
    anchor = "token"

    def update(self, state: RuleState, gradients: Weights, gates: Gates) -> RuleState:
        return RuleState(descend(state.weights, gradients, gates))


@dataclass(frozen=True, kw_only=True)
class Memora(Rule):
    """Retention by KL divergence: weights are positive, and each column sums to `scale` from the first update on.

    The buffers are log W but for a constant of each column, which the softmax ignores. They start at zero: the first
    update forgets the initial weights of the net.
    """

    scale: float = 1.0
    loss: str | Loss = "squared"

    forget = True
    anchor = "token"

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ValueError(f"scale: expected a positive number, got {self.scale!r}")

    def init_state(self, weights: Weights) -> Weights:
        return tuple(torch.zeros_like(weight) for weight in weights)

    def update(self, state: RuleState, gradients: Weights, gates: Gates) -> RuleState:
        logs = descend(state.buffers, gradients, gates)
        return RuleState(tuple(self.scale * torch.softmax(log, -2) for log in logs), logs)


RULES["yaad"] = Descent()
RULES["l_p"] = Descent(loss=PowerLoss())
RULES["memora"] = Memora()
