"""What a chunk starts from, what its keys leave behind, and the loss of its predictions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from remanence.ops.closed_form.layers import Norm, normalise
from remanence.ops.nets import MLP, Net
from remanence.ops.rules import Coefficients, LinearRule, Rule, is_linear
from remanence.ops.state import Weights


def unsupported(net: Net, rule: Rule) -> str | None:
    """Why such a memory has no closed form, in words; None if it has one."""
    if not is_linear(rule):
        return f"the rule {type(rule).__name__} has no closed form"
    if isinstance(net, MLP) and isinstance(rule.loss, str):
        return None
    return "only MLP memories with one of the named losses have a closed form"


class Anchor(NamedTuple):
    """What a chunk starts from: the state J of each layer, its tokens' coefficients, and the token-exact solver."""

    state: Weights
    co: Coefficients
    solver: Tensor | None = None

    def weight(self, layer: int) -> Tensor:
        return self.state[layer][:, 0]


class Grads(NamedTuple):
    """Gradients of one chunk's layer inputs, errors, start state and coefficients; added to in place."""

    inputs: list[Tensor]
    errors: list[Tensor]
    state: list[Tensor]
    co: Coefficients


class Record(NamedTuple):
    """A chunk's keys as the anchor weights saw them: layer inputs X, errors D, and what surprise and backward need."""

    inputs: list[Tensor]
    errors: list[Tensor]
    outputs: list[Tensor]  # Z_l, before the activation
    slopes: list[Tensor]  # act'(Z_l)
    products: list[Tensor]  # X_l W_l where the anchor is scaled, else Z_l itself
    returned: list[Tensor]  # D_{l+1} W_{l+1}^T
    norm: Norm | None
    prediction: Tensor
    slope: Tensor  # dloss/dprediction

    def surprise(self, rule: LinearRule) -> Tensor:
        if rule.loss == "squared":
            return 0.5 * (self.slope * self.slope).sum(-1)
        return (self.prediction * self.slope).sum(-1)


def prediction_and_slope(
    net: MLP, rule: LinearRule, k: Tensor, v: Tensor, output: Tensor
) -> tuple[Norm | None, Tensor, Tensor]:
    """From Z_L to the prediction and the loss's slope there."""
    norm = normalise(output) if net.norm else None
    answer = norm.value if norm else output
    prediction = answer + k if net.residual else answer
    return norm, prediction, (prediction - v if rule.loss == "squared" else -v)


def exact(net: MLP, rule: LinearRule) -> bool:
    """Whether each token of a chunk has its own anchor. A net not linear in its weights uses chunks of one for it."""
    return rule.anchor == "token" and net.linear


def prediction_backward(
    net: MLP, rule: LinearRule, rec: Record, g_error: Tensor, g_surprise: Tensor
) -> tuple[Tensor | None, Tensor, Tensor]:
    """From D_L and the surprise back to (k's residual part, v, Z_L)."""
    g_slope = rec.norm.pull(g_error) if rec.norm else g_error
    weight = g_surprise.unsqueeze(-1)
    if rule.loss == "squared":
        g_prediction = torch.addcmul(g_slope, rec.slope, weight)
        g_v = -g_prediction
    else:
        g_prediction = rec.slope * weight
        g_v = -torch.addcmul(g_slope, rec.prediction, weight)
    g_output = (
        rec.norm.backward(g_prediction, rec.slope, rec.errors[-1], g_error) if rec.norm else g_prediction
    )
    return (g_prediction if net.residual else None), g_v, g_output
