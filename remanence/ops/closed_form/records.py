"""The records of the closed form (start of a chunk, activations of its keys, gradients), and the inner loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from remanence.ops.closed_form.layers import Norm, layer_norm
from remanence.ops.nets import MLP, Net
from remanence.ops.rules import Coefficients, LinearRule, Rule, is_linear
from remanence.ops.state import Weights


def unsupported_reason(net: Net, rule: Rule) -> str | None:
    """Return a message that says why a memory has no closed form, or None if it has one."""
    if not is_linear(rule):
        return f"the rule {type(rule).__name__} has no closed form"
    if isinstance(net, MLP) and isinstance(rule.loss, str):
        return None
    return "only MLP memories with one of the named losses have a closed form"


class Anchor(NamedTuple):
    """The start of a chunk: the state J of each layer, the coefficients of the chunk's tokens, and the
    token-exact solver (None if it is not needed).
    """

    state: Weights
    coef: Coefficients
    solver: Tensor | None = None

    def weight(self, layer: int) -> Tensor:
        """Return the weight of a layer at the start of the chunk."""
        return self.state[layer][:, 0]


class ChunkGrads(NamedTuple):
    """The gradients of a chunk's layer inputs, errors, start state and coefficients, accumulated in place."""

    inputs: list[Tensor]
    errors: list[Tensor]
    state: list[Tensor]
    coef: Coefficients


class KeyActivations(NamedTuple):
    """The activations of a chunk's keys at the anchor weights: layer inputs X, errors D, and the values that
    backward needs.
    """

    inputs: list[Tensor]
    errors: list[Tensor]
    outputs: list[Tensor]  # Z_l, before the activation
    slopes: list[Tensor]  # act'(Z_l)
    products: list[Tensor]  # X_l W_l if the anchor is scaled, else Z_l itself
    returned: list[Tensor]  # D_{l+1} W_{l+1}^T
    norm: Norm | None
    prediction: Tensor
    slope: Tensor  # dloss/dprediction

    def surprise(self, rule: LinearRule) -> Tensor:
        """Return the inner loss of each token, ``[m c]``."""
        if rule.loss == "squared":
            return 0.5 * (self.slope * self.slope).sum(-1)
        return (self.prediction * self.slope).sum(-1)


def prediction_and_slope(
    net: MLP, rule: LinearRule, k: Tensor, v: Tensor, output: Tensor
) -> tuple[Norm | None, Tensor, Tensor]:
    """Return the LayerNorm of the last output Z_L (None if the net has none), the prediction, and the
    derivative of the loss with respect to the prediction.
    """
    norm = layer_norm(output) if net.norm else None
    answer = norm.value if norm else output
    prediction = answer + k if net.residual else answer
    return norm, prediction, (prediction - v if rule.loss == "squared" else -v)


def is_token_exact(net: MLP, rule: LinearRule) -> bool:
    """Whether the gradient of each token is taken at the weights before that token. This is False for a net
    that is not linear in its weights, which needs chunks of one token for that.
    """
    return rule.anchor == "token" and net.linear


def prediction_backward(
    net: MLP, rule: LinearRule, key_activations: KeyActivations, g_error: Tensor, g_surprise: Tensor
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradients of k (through the residual; None without one), of v and of Z_L, from the gradients
    of the error D_L and of the surprise.
    """
    g_slope = key_activations.norm.backward(g_error) if key_activations.norm else g_error
    weight = g_surprise.unsqueeze(-1)
    if rule.loss == "squared":
        g_prediction = torch.addcmul(g_slope, key_activations.slope, weight)
        g_v = -g_prediction
    else:
        g_prediction = key_activations.slope * weight
        g_v = -torch.addcmul(g_slope, key_activations.prediction, weight)
    g_output = (
        key_activations.norm.double_backward(
            g_prediction, key_activations.slope, key_activations.errors[-1], g_error
        )
        if key_activations.norm
        else g_prediction
    )
    return (g_prediction if net.residual else None), g_v, g_output
