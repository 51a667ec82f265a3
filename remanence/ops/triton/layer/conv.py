"""Short causal convolutions, followed by SiLU and optionally by scaling to unit length."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from remanence.ops.library import raise_on_double_backward, register_operator
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
from remanence.runtime.state import roll_history


def short_conv(x: Tensor, past: Tensor, weight: Tensor, heads: int, unit: bool) -> tuple[Tensor, Tensor]:
    """Return SiLU of the causal convolution of x ``[b t w]`` with `weight` ``[w taps]``, as ``[b t heads
    e]``, and the past after x. If `unit`, the vector of each head is scaled to unit length.

    The taps of the first tokens read the end of `past` ``[b s w]``, s >= taps - 1. One operator returns both
    results, because the returned past gives a gradient to only a few tokens of x.
    """
    y, kept, _ = short_conv_forward(x, past, weight, heads, unit)
    return y, kept


def _conv_tiles(name: str, weight: Tensor, heads: int) -> Constants:
    """Return the compile-time arguments of a convolution kernel."""
    width, taps = weight.shape[-2] // heads, weight.shape[-1]
    elements = TILE[name]
    if name == "short_conv_backward" and taps > 4:  # this kernel holds one tile per tap in registers
        elements = elements * 4 // next_power(taps)
    return {
        "HEADS": heads,
        "D": width,
        "BD": next_power(width),
        "BT": max(1, elements // next_power(width)),
        "TAPS": taps,
    }


def _short_conv(
    x: Tensor, past: Tensor, weight: Tensor, heads: int, unit: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `short_conv` and, for backward, the part of `past` that was read."""
    kept = roll_history(past, x)
    past = past[:, past.shape[1] - weight.shape[-1] + 1 :].to(x.dtype, copy=True)
    x, past, weight = (tensor.contiguous() for tensor in (x, past, weight))
    rows, tokens, width = x.shape
    constants = _conv_tiles("short_conv_kernel", weight, heads)
    y = torch.empty((rows, tokens, heads, width // heads), dtype=x.dtype, device=x.device)
    grid = (heads * -(-tokens // constants["BT"]), rows)
    tiles.launch_kernel(
        "short_conv_kernel",
        grid,
        x,
        past,
        weight,
        y,
        tokens,
        group_sizes(weight, 2, rows)[1],
        UNIT=unit,
        **constants,
    )
    return y, kept, past


def _short_conv_backward(
    g_y: Tensor,
    g_kept: Tensor | None,
    x: Tensor,
    past: Tensor,
    weight: Tensor,
    heads: int,
    unit: bool,
    like: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, of the whole past, and of the weight. `past` is the part that was read;
    `like` has the length and dtype of the whole past. `g_kept` is None if the returned past has no gradient.
    """
    g_y, x, past, weight = (tensor.contiguous() for tensor in (g_y, x, past, weight))
    rows, tokens, width = x.shape
    taps, (groups, group_size) = weight.shape[-1], group_sizes(weight, 2, rows)
    constants = _conv_tiles("short_conv_backward", weight, heads)
    parts, steps = split_tiles(-(-tokens // constants["BT"]), max(1, PARTS["short_conv"] // rows))
    g_z, g_x = torch.empty_like(x), torch.empty_like(x)
    g_past = torch.empty((rows, taps - 1, width), dtype=past.dtype, device=x.device)
    g_weight = torch.empty((rows * parts, width, taps), dtype=sum_dtype(x), device=x.device)
    tensors = (x, past, weight, g_y, g_z, g_weight)
    tiles.launch_kernel(
        "short_conv_backward",
        (heads * parts, rows),
        *tensors,
        tokens,
        steps,
        group_size,
        UNIT=unit,
        **constants,
    )
    constants = _conv_tiles("short_conv_input_backward", weight, heads)
    grid = (heads * -(-(tokens + taps - 1) // constants["BT"]), rows)
    tiles.launch_kernel(
        "short_conv_input_backward", grid, g_z, weight, g_x, g_past, tokens, group_size, **constants
    )
    history = like.shape[1]
    g_past = F.pad(g_past.to(like.dtype), (0, 0, history - taps + 1, 0))
    if g_kept is not None and history:
        new = min(tokens, history)
        g_x[:, tokens - new :] += g_kept[:, history - new :].to(g_x.dtype)
        g_past[:, new:] += g_kept[:, : history - new]
    return g_x, g_past, sum_parts(g_weight, groups).view_as(weight).to(weight.dtype)


def _save_conv(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save the inputs for backward. An empty tensor stands for the length and dtype of the whole past."""
    x, past, weight, *ctx.constants = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.shape = output[0].shape
    ctx.save_for_backward(x, output[2], weight, past[:0].new_empty(0, past.shape[1], 0))


def _conv_gradient(ctx: Any, g_y: Tensor | None, g_kept: Tensor | None, _: None) -> tuple[Any, ...]:
    """Return the gradient of every argument of the operator, None for those without one."""
    x, past, weight, like = ctx.saved_tensors
    g_y = x.new_zeros(ctx.shape) if g_y is None else g_y
    return *short_conv_backward(g_y, g_kept, x, past, weight, *ctx.constants, like), None, None


_CONV = "Tensor x, Tensor past, Tensor weight"
short_conv_backward = register_operator(
    "short_conv_backward",
    _short_conv_backward,
    f"(Tensor g_y, Tensor? g_kept, {_CONV}, int heads, bool unit, Tensor like) -> (Tensor, Tensor, Tensor)",
    raise_on_double_backward,
)
short_conv_forward = register_operator(
    "short_conv",
    _short_conv,
    f"({_CONV}, int heads, bool unit) -> (Tensor, Tensor, Tensor)",
    _conv_gradient,
    _save_conv,
)
