"""RMSNorm over each head or over complete vectors, alone or multiplied by a gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from remanence.ops.library import raise_on_double_backward, register_differentiable, register_operator
from remanence.ops.triton.layer import tiles
from remanence.ops.triton.layer.tiles import (
    PARTS,
    TILE,
    group_sizes,
    next_power,
    split_tiles,
    sum_dtype,
    sum_parts,
)
from remanence.ops.triton.resources import Constants


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm of x ``[b t heads e]`` with gain `weight`, times SiLU of `gate` ``[b t heads*e]``. The
    result has the shape of `gate`.
    """
    return gated_norm_forward(x, gate, weight, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Return RMSNorm over the last axis with gain `weight`, computed in float32 or float64, with the result
    in `dtype`.
    """
    return rms_norm_forward(x, weight, eps, dtype)


def sigmoid_gated_norm(x: Tensor, m: Tensor, weight: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Return RMSNorm of x with gain `weight`, times the sigmoid of RMSNorm of m with gain `gain`."""
    return sigmoid_gated_norm_forward(x, m, weight, gain, eps)


def _norm_tiles(name: str, width: int, eps: float) -> Constants:
    """Return the compile-time arguments of a norm kernel."""
    return {"D": width, "BD": next_power(width), "BT": max(1, TILE[name] // next_power(width)), "EPS": eps}


def _gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, gate, weight = (tensor.contiguous() for tensor in (x, gate, weight))
    y = torch.empty(gate.shape, dtype=torch.promote_types(x.dtype, gate.dtype), device=x.device)
    constants = _norm_tiles("gated_norm_kernel", x.shape[-1], eps)
    groups, group_size = group_sizes(weight, 1, x.numel() // x.shape[-1])
    tiles.launch_kernel(
        "gated_norm_kernel",
        (-(-group_size // constants["BT"]), groups),
        x,
        gate,
        weight,
        y,
        group_size,
        **constants,
    )
    return y


def _gated_norm_backward(
    g_y: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, the gate and the weight."""
    g_y, x, gate, weight = (tensor.contiguous() for tensor in (g_y, x, gate, weight))
    constants = _norm_tiles("gated_norm_backward", x.shape[-1], eps)
    groups, group_size = group_sizes(weight, 1, x.numel() // x.shape[-1])
    parts, steps = split_tiles(-(-group_size // constants["BT"]), max(1, PARTS["gated_norm"] // groups))
    g_x, g_gate = torch.empty_like(x), torch.empty_like(gate)
    g_weight = torch.empty((groups * parts, x.shape[-1]), dtype=sum_dtype(x), device=x.device)
    tiles.launch_kernel(
        "gated_norm_backward",
        (parts, groups),
        x,
        gate,
        weight,
        g_y,
        g_x,
        g_gate,
        g_weight,
        group_size,
        steps,
        **constants,
    )
    return g_x, g_gate, sum_parts(g_weight, groups).view_as(weight).to(weight.dtype)


def _wide_norm(name: str, weight: Tensor, n: int, eps: float) -> tuple[Constants, int, int]:
    """Return the compile-time arguments of a norm over complete vectors, the number of groups, and the number
    of vectors in each group. `n` is the number of vectors.
    """
    groups, group_size = group_sizes(weight, 1, n)
    constants = _norm_tiles(name, weight.shape[-1], eps)
    constants["warps"] = max(4, min(16, constants["BD"] * constants["BT"] // 512))
    return constants, groups, group_size


def _rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    x, weight = x.contiguous(), weight.contiguous()
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    constants, groups, group_size = _wide_norm("rms_norm_kernel", weight, x.numel() // x.shape[-1], eps)
    tiles.launch_kernel(
        "rms_norm_kernel", (-(-group_size // constants["BT"]), groups), x, weight, y, group_size, **constants
    )
    return y


def _rms_norm_backward(g_y: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the weight."""
    g_y, x, weight = (tensor.contiguous() for tensor in (g_y, x, weight))
    constants, groups, group_size = _wide_norm("rms_norm_backward", weight, x.numel() // x.shape[-1], eps)
    parts, steps = split_tiles(-(-group_size // constants["BT"]), max(1, PARTS["rms_norm"] // groups))
    g_x, g_weight = (
        torch.empty_like(x),
        torch.empty((groups * parts, x.shape[-1]), dtype=sum_dtype(x), device=x.device),
    )
    tiles.launch_kernel(
        "rms_norm_backward", (parts, groups), x, weight, g_y, g_x, g_weight, group_size, steps, **constants
    )
    return g_x, sum_parts(g_weight, groups).view_as(weight).to(weight.dtype)


def _sigmoid_gated_norm(x: Tensor, m: Tensor, weight: Tensor, gain: Tensor, eps: float) -> Tensor:
    x, m, weight, gain = (tensor.contiguous() for tensor in (x, m, weight, gain))
    y = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, m.dtype), device=x.device)
    constants, groups, group_size = _wide_norm(
        "sigmoid_gated_norm_kernel", weight, x.numel() // x.shape[-1], eps
    )
    tiles.launch_kernel(
        "sigmoid_gated_norm_kernel",
        (-(-group_size // constants["BT"]), groups),
        x,
        m,
        weight,
        gain,
        y,
        group_size,
        **constants,
    )
    return y


def _sigmoid_gated_norm_backward(
    g_y: Tensor, x: Tensor, m: Tensor, weight: Tensor, gain: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, m, `weight` and `gain`."""
    g_y, x, m, weight, gain = (tensor.contiguous() for tensor in (g_y, x, m, weight, gain))
    constants, groups, group_size = _wide_norm(
        "sigmoid_gated_norm_backward", weight, x.numel() // x.shape[-1], eps
    )
    parts, steps = split_tiles(-(-group_size // constants["BT"]), max(1, PARTS["rms_norm"] // groups))
    g_x, g_m = torch.empty_like(x), torch.empty_like(m)
    g_weight, g_gain = (
        torch.empty((groups * parts, x.shape[-1]), dtype=sum_dtype(x), device=x.device) for _ in range(2)
    )
    tensors = (x, m, weight, gain, g_y, g_x, g_m, g_weight, g_gain)
    tiles.launch_kernel(
        "sigmoid_gated_norm_backward", (parts, groups), *tensors, group_size, steps, **constants
    )
    sums = [
        sum_parts(parts, groups).view_as(like).to(like.dtype)
        for parts, like in ((g_weight, weight), (g_gain, gain))
    ]
    return g_x, g_m, sums[0], sums[1]


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save x, the weight and eps for backward."""
    ctx.save_for_backward(*inputs[:2])
    ctx.eps = inputs[2]


gated_norm_forward = register_differentiable(
    "gated_norm", _gated_norm, _gated_norm_backward, "Tensor x, Tensor gate, Tensor weight", "float eps"
)
rms_norm_backward = register_operator(
    "rms_norm_backward",
    _rms_norm_backward,
    "(Tensor g_y, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    raise_on_double_backward,
)
rms_norm_forward = register_operator(
    "rms_norm",
    _rms_norm,
    "(Tensor x, Tensor weight, float eps, ScalarType dtype) -> Tensor",
    lambda ctx, g: (*rms_norm_backward(g, *ctx.saved_tensors, ctx.eps), None, None),
    _save_norm,
)
sigmoid_gated_norm_forward = register_differentiable(
    "sigmoid_gated_norm",
    _sigmoid_gated_norm,
    _sigmoid_gated_norm_backward,
    "Tensor x, Tensor m, Tensor weight, Tensor gain",
    "float eps",
)
