"""Activations and LayerNorm with their derivatives, and helpers for products with a state of weights and momentum."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from remanence.ops.nets import LAYER_NORM_EPS, MLP, overflow_scale

_aten = torch.ops.aten
DENSITY = 1.0 / math.sqrt(2.0 * math.pi)
"""The density of the standard normal distribution at 0, for the derivatives of GELU."""


def activate(net: MLP, z: Tensor) -> Tensor:
    """Return act(z), with the activation of the net."""
    return _aten.gelu(z) if net.activation == "gelu" else _aten.silu(z)


def activation_backward(net: MLP, grad: Tensor, z: Tensor) -> Tensor:
    """Return grad * act'(z), computed in one operation."""
    return _aten.gelu_backward(grad, z) if net.activation == "gelu" else _aten.silu_backward(grad, z)


def activate_with_slope(net: MLP, z: Tensor) -> tuple[Tensor, Tensor]:
    """Return act(z) and act'(z), whose most expensive part is computed only once."""
    if net.activation == "gelu":
        below = torch.erf(z * math.sqrt(0.5)).add_(1.0).mul_(0.5)
        return z * below, below.addcmul_(z, (z * z).mul_(-0.5).exp_(), value=DENSITY)
    gate = torch.sigmoid(z)
    value = z * gate
    return value, torch.addcmul(gate, value, 1.0 - gate)


def activation_second_derivative(net: MLP, z: Tensor) -> Tensor:
    """Return act''(z)."""
    if net.activation == "gelu":
        square = z * z
        return (square * -0.5).exp_().mul_(square.sub_(2.0)).mul_(-DENSITY)
    gate = torch.sigmoid(z)
    return gate * (1.0 - gate) * (2.0 + z * (1.0 - 2.0 * gate))


class Norm(NamedTuple):
    """The result of LayerNorm without gain, with the values that its derivatives need.

    Rows whose squares would overflow are scaled down first (`nets.overflow_scale`), and their derivatives
    with them.
    """

    source: Tensor  # the input, after it was scaled down
    value: Tensor
    mean: Tensor
    rstd: Tensor
    overflow_scale: Tensor

    def backward(self, grad: Tensor) -> Tensor:
        """Return the gradient of the input: rstd (grad - mean(grad) - value mean(grad value))."""
        only_input = [True, False, False]
        shape = self.source.shape[-1:]
        g = _aten.native_layer_norm_backward(
            grad, self.source, shape, self.mean, self.rstd, None, None, only_input
        )[0]
        return g.mul_(self.overflow_scale)

    def double_backward(self, g_value: Tensor, grad: Tensor, result: Tensor, g_result: Tensor) -> Tensor:
        """Return the gradient of the input, from the gradients of `value` and of ``result = backward(grad)``.
        The latter depends on the input through `value` and `rstd`.
        """
        rstd = self.rstd * self.overflow_scale
        mean_product = (grad * self.value).mean(-1, keepdim=True)
        g_mean_product = (g_result * self.value).mean(-1, keepdim=True)
        through_value = (g_result * mean_product).addcmul_(grad, g_mean_product)
        through_rstd = (g_result * result).mean(-1, keepdim=True).mul_(rstd)
        return self.backward(torch.addcmul(g_value, through_value, rstd, value=-1)).addcmul_(
            self.value, through_rstd, value=-1
        )


def layer_norm(x: Tensor) -> Norm:
    """Compute LayerNorm without gain over the last axis."""
    factor = overflow_scale(x)
    x = x * factor
    value, mean, rstd = _aten.native_layer_norm(x, x.shape[-1:], None, None, LAYER_NORM_EPS)
    return Norm(x, value, mean, rstd, factor)


def append_ones(net: MLP, x: Tensor) -> Tensor:
    """Return x with a column of ones for the bias appended, or x itself if the net has no bias."""
    return torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1) if net.bias else x


def drop_ones(net: MLP, x: Tensor) -> Tensor:
    """Return x without the column that `append_ones` appended."""
    return x[..., :-1] if net.bias else x


def scale_tokens(x: Tensor, factor: Tensor | None) -> Tensor:
    """Return x ``[m c f]`` times a factor ``[m c]`` per token, or x itself if the factor is None."""
    return x if factor is None else x * factor.unsqueeze(-1)


def stack_scaled(x: Tensor, factors: Tensor) -> Tensor:
    """Multiply x ``[m c f]`` by each of the p factors ``[m c p]`` of its token, and concatenate the results:
    ``[m c p*f]``.
    """
    return (x.unsqueeze(-2) * factors.unsqueeze(-1)).flatten(-2)


def stack_scaled_backward(
    grad: Tensor, x: Tensor, factors: Tensor, g_x: Tensor, g_factors: Tensor, sign: int = 1
) -> None:
    """Compute the backward of `stack_scaled` and add it, times `sign`, to `g_x` and `g_factors` in place."""
    grad = grad.unflatten(-1, (factors.shape[-1], -1))
    g_factors.add_((grad * x.unsqueeze(-2)).sum(-1), alpha=sign)
    for p in range(factors.shape[-1]):
        g_x.addcmul_(grad[..., p, :], factors[..., p : p + 1], value=sign)


def flatten_state(state: Tensor) -> Tensor:
    """Return J ``[m p f f']`` as one matrix ``[m p*f f']``, to be multiplied with the result of
    `stack_scaled`.
    """
    return state.flatten(1, 2)
