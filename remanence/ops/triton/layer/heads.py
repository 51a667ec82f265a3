"""Matrix products in which each head has its own matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from remanence.ops.library import raise_on_double_backward, register_operator
from remanence.ops.triton.layer import tiles
from remanence.ops.triton.layer.tiles import (
    group_sizes,
    product_options,
    product_padded_width,
    split_tiles,
    sum_dtype,
    sum_parts,
)
from remanence.ops.triton.resources import Constants


def per_head_matmul(x: Tensor, weight: Tensor, base: Tensor | None = None) -> Tensor:
    """Return each head of x ``[b t h i]`` times its matrix in `weight` ``[h i o]``, in the dtype of x. `base`
    ``[b t h o]`` is added if given.
    """
    return heads_forward(x, weight, base)


def _head_tiles(x: Tensor, inputs: int, outputs: int) -> Constants:
    """Return the compile-time arguments of `heads_kernel`. A tile has complete rows of x, and as many columns
    of the matrix as fit beside them.
    """
    narrow = x.dtype == torch.bfloat16
    block = min(product_padded_width(outputs, x), 128 if narrow else 64)
    constants = {
        "HEADS": x.shape[2],
        "INPUTS": inputs,
        "BI": product_padded_width(inputs, x),
        "OUTPUTS": outputs,
        "BO": block,
        "BT": 64 if narrow else 32,
    }
    return constants | product_options(x) | {"warps": 8 if narrow and block > 64 else 4}


def _heads(x: Tensor, weight: Tensor, base: Tensor | None) -> Tensor:
    """The implementation of `per_head_matmul`."""
    return heads_product(x, weight, base, False)


def heads_product(x: Tensor, weight: Tensor, base: Tensor | None, transposed: bool) -> Tensor:
    """Multiply each head of x by its matrix, or by the transposed matrix if `transposed`, and add `base` unless
    it is None.
    """
    x, weight = x.contiguous(), weight.to(x.dtype).contiguous()
    base = None if base is None else base.contiguous()
    inputs, outputs = weight.shape[-2:][::-1] if transposed else weight.shape[-2:]
    groups, group_size = group_sizes(weight, 3, x.shape[0] * x.shape[1])
    y = torch.empty((*x.shape[:3], outputs), dtype=x.dtype, device=x.device)
    constants = _head_tiles(x, inputs, outputs)
    grid = (-(-group_size // constants["BT"]), groups * x.shape[2], -(-outputs // constants["BO"]))
    base_or_x = x if base is None else base
    tiles.launch_kernel(
        "heads_kernel",
        grid,
        x,
        weight,
        base_or_x,
        y,
        group_size,
        TRANSPOSED=transposed,
        BASE=base is not None,
        **constants,
    )
    return y


HEAD_PROGRAMS = 528
"""The most programs among which a product over tokens is split: four per processor of a large GPU."""


def heads_weight_gradient(x: Tensor, g: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of `weight` in ``per_head_matmul(x, weight)``, where g is the gradient of the
    result.
    """
    inputs, outputs = weight.shape[-2:]
    groups, group_size = group_sizes(weight, 3, x.shape[0] * x.shape[1])
    max_block = 128 if x.dtype == torch.bfloat16 else 64
    constants = {
        "HEADS": x.shape[2],
        "INPUTS": inputs,
        "BI": min(product_padded_width(inputs, x), max_block),
        "OUTPUTS": outputs,
        "BO": min(product_padded_width(outputs, x), max_block),
    }
    constants |= {
        "BT": 64 if max_block == 128 else 32,
        **product_options(x),
        "warps": 8 if max_block == 128 else 4,
    }
    blocks = -(-inputs // constants["BI"]) * -(-outputs // constants["BO"])
    all_heads = groups * x.shape[2]
    parts, steps = split_tiles(
        -(-group_size // constants["BT"]), max(1, HEAD_PROGRAMS // (all_heads * blocks))
    )
    out = torch.empty((all_heads * parts, inputs, outputs), dtype=sum_dtype(x), device=x.device)
    tiles.launch_kernel(
        "heads_weight_backward", (parts, all_heads, blocks), x, g, out, group_size, steps, **constants
    )
    return sum_parts(out, all_heads).view_as(weight).to(weight.dtype)


def _heads_backward(g_y: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the weight."""
    g_y, x = g_y.contiguous(), x.contiguous()
    return heads_product(g_y.to(x.dtype), weight, None, True), heads_weight_gradient(x, g_y, weight)


def _save_heads(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save x, the weight, and the dtype of `base` (None if there is no base) for backward."""
    ctx.save_for_backward(*inputs[:2])
    ctx.base = None if inputs[2] is None else inputs[2].dtype


def _heads_gradient(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    """Return the gradients of x, the weight and the base (None if there is no base)."""
    return *heads_backward(g, *ctx.saved_tensors), g.to(ctx.base) if ctx.base is not None else None


heads_backward = register_operator(
    "heads_backward",
    _heads_backward,
    "(Tensor g_y, Tensor x, Tensor weight) -> (Tensor, Tensor)",
    raise_on_double_backward,
)
heads_forward = register_operator(
    "per_head_matmul",
    _heads,
    "(Tensor x, Tensor weight, Tensor? base) -> Tensor",
    _heads_gradient,
    _save_heads,
)
