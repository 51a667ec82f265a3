"""Features of keys: the fixed first layers of a deep memory.

For narrow heads one kernel computes everything. Wide heads use torch's batched products, with kernels in
between.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from remanence.ops.library import register_differentiable
from remanence.ops.triton.layer import tiles
from remanence.ops.triton.layer.heads import heads_product, heads_weight_gradient
from remanence.ops.triton.layer.tiles import (
    TILE,
    group_sizes,
    next_power,
    product_options,
    product_padded_width,
    recorded_chip,
    sum_dtype,
)
from remanence.ops.triton.resources import Constants, Launch, recording

FEATURE_PARTS, FEATURE_PART = 16, 512
"""The most parts that a product over tokens is split into, and the fewest tokens in a part. A single product
per head would use few of the GPU's processors, and would give the whole sum in bfloat16.
"""


def key_features(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Apply one layer of features to keys x ``[b t h e]``; returns keys of the same shape. `up` ``[h e 2*o]``
    gives gated features, which are scaled to unit length. `down` ``[h o e]`` projects them back, and the sum
    of x and the projection is scaled to unit length.
    """
    return key_features_forward(x, up, down)


def _fits_one_processor(x: Tensor, down: Tensor) -> bool:
    """Whether the weights of a head and a tile of keys fit together on one processor."""
    return max(x.shape[-1], down.shape[-2]) <= (128 if x.dtype == torch.bfloat16 else 64)


def _key_features_tiles(x: Tensor, down: Tensor, backward: bool) -> Constants:
    """Return the compile-time arguments of the fused kernels. For wide heads, one backward program or two
    forward programs run on a processor, so that no registers are spilled.
    """
    count, width = down.shape[-2:]
    narrow = x.dtype == torch.bfloat16
    wide = narrow and max(count, width) > 64
    constants: Constants = {
        "HEADS": x.shape[2],
        "D": width,
        "BD": product_padded_width(width, x),
        "COUNT": count,
        "BC": product_padded_width(count, x),
    }
    constants |= {
        "BT": 64 if narrow else 32,
        "SCALE": math.sqrt(width),
        "IN_LOOP": wide and backward,
        "warps": 8 if wide else 4,
    }
    return constants | product_options(x)


def _fused_key_features(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """`key_features` in one kernel, for narrow heads."""
    x, up, down = (tensor.to(x.dtype).contiguous() for tensor in (x, up, down))
    groups, group_size = group_sizes(up, 3, x.shape[0] * x.shape[1])
    constants, y = _key_features_tiles(x, down, False), torch.empty_like(x)
    tiles.launch_kernel(
        "key_features_kernel",
        (-(-group_size // constants["BT"]), groups * x.shape[2]),
        x,
        up,
        down,
        y,
        group_size,
        **constants,
    )
    return y


def _fused_key_features_backward(
    g_y: Tensor, x: Tensor, up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, `up` and `down` for narrow heads."""
    g_y, x, narrow_up, narrow_down = (tensor.to(x.dtype).contiguous() for tensor in (g_y, x, up, down))
    groups, group_size = group_sizes(up, 3, x.shape[0] * x.shape[1])
    constants, count = _key_features_tiles(x, down, True), down.shape[-2]
    g_sum = torch.empty_like(x)
    u, g_z = (
        torch.empty((*x.shape[:3], size), dtype=x.dtype, device=x.device) for size in (count, 2 * count)
    )
    grid = (-(-group_size // constants["BT"]), groups * x.shape[2])
    tiles.launch_kernel(
        "key_features_backward", grid, g_y, x, narrow_up, narrow_down, u, g_sum, g_z, group_size, **constants
    )
    return (
        heads_product(g_z, narrow_up, g_sum, True),
        heads_weight_gradient(x, g_z, up),
        heads_weight_gradient(u, g_sum, down),
    )


def _key_features_launch(name: str, tokens: Any, heads: int, *tensors: Any, **constants: Any) -> None:
    """Launch a kernel over `tokens` tokens of `heads` heads, with tiles that fit the number of features or
    channels.
    """
    size = constants["COUNT" if "COUNT" in constants else "D"]
    constants |= {
        "BC" if "COUNT" in constants else "BD": next_power(size),
        "BT": max(1, TILE[name] // next_power(size)),
    }
    tiles.launch_kernel(name, (-(-tokens // constants["BT"]), heads), *tensors, **constants)


def _key_features_products(
    x: Tensor, up: Tensor, down: Tensor, padded_tokens: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return three tensors with heads as the leading axis: the products z with `up`, the features at unit
    length (padded with zeros to `padded_tokens` tokens), and their projection, which is to be added to x.
    """
    groups = up.shape[0] // x.shape[2]
    # A view if there is one group, otherwise a copy.
    by_heads = x.flatten(0, 1).unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    heads, n, width = by_heads.shape
    z = torch.bmm(by_heads, up)
    u = torch.empty((heads, padded_tokens, down.shape[1]), dtype=x.dtype, device=x.device)
    _key_features_launch(
        "key_features_gated",
        padded_tokens,
        heads,
        z,
        u,
        n,
        padded_tokens,
        COUNT=down.shape[1],
        SCALE=math.sqrt(width),
    )
    return z, u, torch.bmm(u[:, :n], down)


def _key_features(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The implementation of `key_features`."""
    if _fits_one_processor(x, down):
        return _fused_key_features(x, up, down)
    x, up, down = x.contiguous(), up.flatten(0, -3).to(x.dtype), down.flatten(0, -3).to(x.dtype)
    rows, tokens, heads, width = x.shape
    y, n = torch.empty_like(x), rows * tokens * heads // len(up)
    with torch.autocast(x.device.type, enabled=False):  # products are computed in the dtype of x
        _, _, added = _key_features_products(x, up, down, n)
    _key_features_launch("key_features_added", n, len(up), x, added, y, n, HEADS=heads, D=width)
    return y


def _padded_tokens(n: int) -> tuple[int, int]:
    """Return how many parts a product over n tokens is split into, and the number of tokens in all parts
    together, including padding.
    """
    parts = min(FEATURE_PARTS, -(-n // FEATURE_PART))
    return parts, parts * -(-n // parts)


def _product_over_tokens(a: Tensor, b: Tensor, parts: int) -> Tensor:
    """Return the product of a ``[h t i]`` and b ``[h t o]`` over the tokens, ``[h i o]``. The results of the
    parts are summed in float32 or float64.
    """
    a, b = (operand.reshape(len(operand) * parts, -1, operand.shape[-1]) for operand in (a, b))
    return torch.bmm(a.mT, b).unflatten(0, (-1, parts)).sum(1, dtype=sum_dtype(a))


def _key_features_backward(g_y: Tensor, x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, `up` and `down`."""
    if _fits_one_processor(x, down):
        return _fused_key_features_backward(g_y, x, up, down)
    g_y, x, narrow_up, narrow_down = (
        g_y.contiguous(),
        x.contiguous(),
        up.flatten(0, -3).to(x.dtype),
        down.flatten(0, -3).to(x.dtype),
    )
    rows, tokens, heads, width = x.shape
    all_heads = len(narrow_up)  # heads of all groups
    n = rows * tokens * heads // all_heads
    parts, padded_tokens = _padded_tokens(n)
    g_x, g_sum = (
        torch.empty_like(x),
        torch.empty((all_heads, padded_tokens, width), dtype=x.dtype, device=x.device),
    )
    x_by_head = torch.empty_like(g_sum)
    with torch.autocast(x.device.type, enabled=False):
        z, u, added = _key_features_products(x, narrow_up, narrow_down, padded_tokens)
        tensors = (g_y, x, added, g_x, g_sum, x_by_head)
        _key_features_launch(
            "key_features_added_backward",
            padded_tokens,
            all_heads,
            *tensors,
            n,
            padded_tokens,
            HEADS=heads,
            D=width,
        )
        g_down = _product_over_tokens(u, g_sum, parts).view_as(down).to(down.dtype)
        g_u = torch.bmm(g_sum[:, :n], narrow_down.mT)
        g_z = torch.empty((all_heads, padded_tokens, up.shape[-1]), dtype=x.dtype, device=x.device)
        constants = {"COUNT": down.shape[-2], "SCALE": math.sqrt(width)}
        _key_features_launch(
            "key_features_gated_backward",
            padded_tokens,
            all_heads,
            z,
            g_u,
            g_z,
            n,
            padded_tokens,
            **constants,
        )
        g_up = _product_over_tokens(x_by_head, g_z, parts).view_as(up).to(up.dtype)
        for group in range(all_heads // heads):  # a group's part of g_x is a view and can be added to
            part = slice(group * heads, (group + 1) * heads)
            g_x.flatten(0, 1)[group * n : (group + 1) * n].transpose(0, 1).baddbmm_(
                g_z[part, :n], narrow_up[part].mT
            )
    return g_x, g_up, g_down


def _key_features_shape(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return an uninitialised result of `key_features`, for fake tensors."""
    return x.new_empty(x.shape)


def _key_features_shapes(g_y: Tensor, x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialised gradients, for fake tensors. The real backward is not traced, because its number
    of parts would tie a compiled graph to one number of tokens.
    """
    return x.new_empty(x.shape), up.new_empty(up.shape), down.new_empty(down.shape)


def list_key_features_launches(
    heads: int, width: int, count: int, op: torch.dtype, arch: int
) -> list[Launch]:
    """Return the kernels that `key_features` and its gradient launch on a compute capability. The launches
    are recorded with fake tensors; nothing runs.
    """
    chip = recorded_chip.set(arch)
    with FakeTensorMode(), torch.device("cpu"), recording() as recorded:
        x, up, down = (
            torch.empty(1, 8192, heads, width, dtype=op),
            torch.empty(heads, width, 2 * count),
            torch.empty(heads, count, width),
        )
        _key_features_backward(_key_features(x, up, down), x, up, down)
    recorded_chip.reset(chip)
    return [
        Launch(name, types, constants, constants.pop("warps"), constants.pop("stages"))
        for name, types, constants in recorded
    ]


key_features_forward = register_differentiable(
    "key_features",
    _key_features,
    _key_features_backward,
    "Tensor x, Tensor up, Tensor down",
    fake=_key_features_shape,
    fake_backward=_key_features_shapes,
)
