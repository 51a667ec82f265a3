"""Activations and LayerNorm with their derivatives, and products with a state of weights and momentum."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from remanence.ops.nets import EPS, MLP, shrink

_aten = torch.ops.aten
DENSITY = 1.0 / math.sqrt(2.0 * math.pi)


def activate(net: MLP, z: Tensor) -> Tensor:
    return _aten.gelu(z) if net.activation == "gelu" else _aten.silu(z)


def pull(net: MLP, grad: Tensor, z: Tensor) -> Tensor:
    """grad * act'(z), in one pass."""
    return _aten.gelu_backward(grad, z) if net.activation == "gelu" else _aten.silu_backward(grad, z)


def activate_with_slope(net: MLP, z: Tensor) -> tuple[Tensor, Tensor]:
    """act(z) and act'(z), which share their costly half."""
    if net.activation == "gelu":
        below = torch.erf(z * math.sqrt(0.5)).add_(1.0).mul_(0.5)
        return z * below, below.addcmul_(z, (z * z).mul_(-0.5).exp_(), value=DENSITY)
    gate = torch.sigmoid(z)
    value = z * gate
    return value, torch.addcmul(gate, value, 1.0 - gate)


def curvature(net: MLP, z: Tensor) -> Tensor:
    """act''(z)."""
    if net.activation == "gelu":
        square = z * z
        return (square * -0.5).exp_().mul_(square.sub_(2.0)).mul_(-DENSITY)
    gate = torch.sigmoid(z)
    return gate * (1.0 - gate) * (2.0 + z * (1.0 - 2.0 * gate))


class Norm(NamedTuple):
    """LayerNorm without gain of one tensor, kept for its derivatives.

    Rows beyond float32's squares are shrunk first (nets.py), and their derivatives with them.
    """

    source: Tensor  # shrunk
    value: Tensor
    mean: Tensor
    rstd: Tensor
    shrink: Tensor

    def pull(self, grad: Tensor) -> Tensor:
        """Backward: rstd (grad - mean(grad) - value mean(grad value))."""
        only_input = [True, False, False]
        shape = self.source.shape[-1:]
        g = _aten.native_layer_norm_backward(
            grad, self.source, shape, self.mean, self.rstd, None, None, only_input
        )[0]
        return g.mul_(self.shrink)

    def backward(self, g_value: Tensor, grad: Tensor, pulled: Tensor, g_pulled: Tensor) -> Tensor:
        """The source's gradient, from those of value and of pulled = pull(grad), which follows the source through value
        and rstd.
        """
        rstd = self.rstd * self.shrink
        along = (grad * self.value).mean(-1, keepdim=True)
        g_along = (g_pulled * self.value).mean(-1, keepdim=True)
        through_value = (g_pulled * along).addcmul_(grad, g_along)
        through_rstd = (g_pulled * pulled).mean(-1, keepdim=True).mul_(rstd)
        return self.pull(torch.addcmul(g_value, through_value, rstd, value=-1)).addcmul_(
            self.value, through_rstd, value=-1
        )


def normalise(x: Tensor) -> Norm:
    factor = shrink(x)
    x = x * factor
    value, mean, rstd = _aten.native_layer_norm(x, x.shape[-1:], None, None, EPS)
    return Norm(x, value, mean, rstd, factor)


def with_ones(net: MLP, x: Tensor) -> Tensor:
    return torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1) if net.bias else x


def without_ones(net: MLP, x: Tensor) -> Tensor:
    return x[..., :-1] if net.bias else x


def scaled(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor.unsqueeze(-1)


def spread(x: Tensor, factors: Tensor) -> Tensor:
    """x ``[m c f]`` times each of its token's factors ``[m c p]``, side by side: ``[m c pf]``."""
    return (x.unsqueeze(-2) * factors.unsqueeze(-1)).flatten(-2)


def spread_backward(
    grad: Tensor, x: Tensor, factors: Tensor, g_x: Tensor, g_factors: Tensor, sign: int = 1
) -> None:
    """Backward of `spread`, added in place."""
    grad = grad.unflatten(-1, (factors.shape[-1], -1))
    g_factors.add_((grad * x.unsqueeze(-2)).sum(-1), alpha=sign)
    for p in range(factors.shape[-1]):
        g_x.addcmul_(grad[..., p, :], factors[..., p : p + 1], value=sign)


def rows(state: Tensor) -> Tensor:
    """J ``[m p f f']`` as one tall matrix ``[m pf f']``, to stand behind a `spread`."""
    return state.flatten(1, 2)
