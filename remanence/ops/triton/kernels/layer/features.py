# mypy: ignore-errors
"""Features of unit keys: gated, scaled to unit length, projected back and added to the keys."""

from __future__ import annotations

import triton
import triton.language as tl

from remanence.ops.triton.kernels.layer.tiles import UNIT_EPS, kernel, load_block, load_tile, store_tile
from remanence.ops.triton.kernels.tools import activate, activate_with_slope, dot_add, dot_in_loop


@triton.jit
def _features(
    x, up, down, t, row_mask, inner, cols, positive,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, COUNT: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr,
    SCALE: tl.constexpr, IN_LOOP: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return, for keys x: the gate, the value, the features at unit length and the factor that scaled them,
    and the sum of keys and projected features at unit length and the factor that scaled it.

    The keys are loaded in slices, in a loop, because loads in a loop need no registers before they are used.
    """
    SLICE: tl.constexpr = 64 if BD >= 64 else BD  # rows of at least 128 bytes, if the keys are wide enough
    gate, value = tl.zeros([BT, BC], ACC), tl.zeros([BT, BC], ACC)
    for first in range(0, BD, SLICE):
        channels = first + tl.arange(0, SLICE)
        a = load_tile(x, t, row_mask, channels, D, 0, HEADS * D, OP)
        gate = dot_add(gate, a, load_block(up, channels, inner, D, COUNT, 2 * COUNT, OP), OP, PRECISION)
        value = dot_add(
            value, a, load_block(up + COUNT, channels, inner, D, COUNT, 2 * COUNT, OP), OP, PRECISION
        )
    gate, value = SCALE * gate, SCALE * value
    u = activate(gate, False) * value
    u_scale = tl.rsqrt(tl.sum(u * u, 1) + UNIT_EPS)[:, None]
    u *= u_scale
    y = dot_in_loop(u, load_block(down, inner, cols, COUNT, D, D, OP), positive, IN_LOOP, ACC, OP, PRECISION)
    y += load_tile(x, t, row_mask, cols, D, BD, HEADS * D, ACC)
    y_scale = tl.rsqrt(tl.sum(y * y, 1) + UNIT_EPS)[:, None]
    # The first two are used late: in OP, they need fewer registers until then.
    return (
        gate.to(OP),
        value.to(OP),
        u,
        u_scale,
        y * y_scale,
        y_scale,
    )


@kernel
def key_features_kernel(
    x, up, down, y, group_size,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, COUNT: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr,
    SCALE: tl.constexpr, IN_LOOP: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a layer of features for a tile of tokens of one head."""
    head = tl.program_id(1).to(tl.int64)
    group, own = head // HEADS, head % HEADS
    t = group * group_size + tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    row_mask, cols, inner = t < (group + 1) * group_size, tl.arange(0, BD), tl.arange(0, BC)
    up, down = up + head * D * 2 * COUNT, down + head * COUNT * D
    _, _, _, _, value, _ = _features(
        x + own * D,
        up,
        down,
        t,
        row_mask,
        inner,
        cols,
        group_size,
        HEADS,
        D,
        BD,
        COUNT,
        BC,
        BT,
        SCALE,
        IN_LOOP,
        ACC,
        OP,
        PRECISION,
    )
    store_tile(y + own * D, value, t, row_mask, cols, D, BD, HEADS * D)


@kernel
def key_features_backward(
    g_y, x, up, down, u_out, g_sum, g_z, group_size,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, COUNT: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr,
    SCALE: tl.constexpr, IN_LOOP: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write, for each token, the gradients of the sum (g_sum) and of the products with `up` (g_z), and the
    features (u_out). Other kernels compute the gradients of the keys and the weights from these.
    """
    head = tl.program_id(1).to(tl.int64)
    group, own = head // HEADS, head % HEADS
    t = group * group_size + tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    row_mask, cols, inner = t < (group + 1) * group_size, tl.arange(0, BD), tl.arange(0, BC)
    up, down = up + head * D * 2 * COUNT, down + head * COUNT * D
    gate, value, u, u_scale, y, y_scale = _features(
        x + own * D,
        up,
        down,
        t,
        row_mask,
        inner,
        cols,
        group_size,
        HEADS,
        D,
        BD,
        COUNT,
        BC,
        BT,
        SCALE,
        IN_LOOP,
        ACC,
        OP,
        PRECISION,
    )
    store_tile(u_out + own * COUNT, u, t, row_mask, inner, COUNT, BC, HEADS * COUNT)
    g = load_tile(g_y + own * D, t, row_mask, cols, D, BD, HEADS * D, ACC)
    g = (g - y * tl.sum(g * y, 1)[:, None]) * y_scale
    store_tile(g_sum + own * D, g, t, row_mask, cols, D, BD, HEADS * D)
    g_u = dot_in_loop(
        g, tl.trans(load_block(down, inner, cols, COUNT, D, D, OP)), group_size, IN_LOOP, ACC, OP, PRECISION
    )
    g_u = (g_u - u * tl.sum(g_u * u, 1)[:, None]) * (SCALE * u_scale)
    activated, slope = activate_with_slope(gate.to(ACC), False)
    store_tile(
        g_z + own * 2 * COUNT, g_u * value.to(ACC) * slope, t, row_mask, inner, COUNT, BC, HEADS * 2 * COUNT
    )
    store_tile(
        g_z + own * 2 * COUNT + COUNT, g_u * activated, t, row_mask, inner, COUNT, BC, HEADS * 2 * COUNT
    )


@triton.jit
def _halves(
    z, t, row_mask, cols, COUNT: tl.constexpr, BC: tl.constexpr, SCALE: tl.constexpr, ACC: tl.constexpr
):
    """Load the gate and the value, which are the two halves of z, times SCALE."""
    gate = load_tile(z, t, row_mask, cols, COUNT, BC, 2 * COUNT, ACC)
    return SCALE * gate, SCALE * load_tile(z + COUNT, t, row_mask, cols, COUNT, BC, 2 * COUNT, ACC)


@kernel
def key_features_gated(
    z, u, n, padded_tokens, COUNT: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr, SCALE: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Compute unit features ``[h padded_tokens COUNT]`` from products z ``[h n 2*COUNT]``. Tokens from n on are filled
    with zeros.
    """
    head = tl.program_id(1).to(tl.int64)
    t, cols = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT), tl.arange(0, BC)
    gate, up = _halves(z + head * n * 2 * COUNT, t, t < n, cols, COUNT, BC, SCALE, ACC)
    value = activate(gate, False) * up
    value *= tl.rsqrt(tl.sum(value * value, 1) + UNIT_EPS)[:, None]
    store_tile(u + head * padded_tokens * COUNT, value, t, t < padded_tokens, cols, COUNT, BC, COUNT)


@kernel
def key_features_gated_backward(
    z, g_u, g_z, n, padded_tokens, COUNT: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr, SCALE: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Write the gradient of z as ``[h padded_tokens 2*COUNT]``, padded with zeros. g_u ``[h n COUNT]`` is not
    padded.
    """
    head = tl.program_id(1).to(tl.int64)
    t, cols = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT), tl.arange(0, BC)
    gate, up = _halves(z + head * n * 2 * COUNT, t, t < n, cols, COUNT, BC, SCALE, ACC)
    activated, slope = activate_with_slope(gate, False)
    value = activated * up
    u_scale = tl.rsqrt(tl.sum(value * value, 1) + UNIT_EPS)[:, None]
    value *= u_scale
    g = load_tile(g_u + head * n * COUNT, t, t < n, cols, COUNT, BC, COUNT, ACC)
    g = (g - value * tl.sum(g * value, 1)[:, None]) * (SCALE * u_scale)
    out = g_z + head * padded_tokens * 2 * COUNT
    store_tile(out, g * up * slope, t, t < padded_tokens, cols, COUNT, BC, 2 * COUNT)
    store_tile(out + COUNT, g * activated, t, t < padded_tokens, cols, COUNT, BC, 2 * COUNT)


@kernel
def key_features_added(
    x, added, y, n, HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, ACC: tl.constexpr
):  # fmt: skip
    """Add the keys and the projected features and scale the sum to unit length. x and y are ``[g n h D]``,
    with tokens before heads; `added` is ``[g h n D]``.
    """
    head = tl.program_id(1).to(tl.int64)
    t, cols = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT), tl.arange(0, BD)
    head_offset = (head // HEADS * n * HEADS + head % HEADS) * D
    a = load_tile(x + head_offset, t, t < n, cols, D, BD, HEADS * D, ACC)
    a += load_tile(added + head * n * D, t, t < n, cols, D, BD, D, ACC)
    store_tile(
        y + head_offset, a * tl.rsqrt(tl.sum(a * a, 1) + UNIT_EPS)[:, None], t, t < n, cols, D, BD, HEADS * D
    )


@kernel
def key_features_added_backward(
    g_y, x, added, g_x, g_sum, x_by_head, n, padded_tokens,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the sum twice: as ``[g n h D]`` (g_x, to which the rest of the keys' gradient is
    added later) and as ``[g h padded_tokens D]`` (g_sum). Also write x as ``[g h padded_tokens D]``
    (x_by_head). Both are padded with zeros, for products over parts of the tokens.
    """
    head = tl.program_id(1).to(tl.int64)
    t, cols = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT), tl.arange(0, BD)
    head_offset = (head // HEADS * n * HEADS + head % HEADS) * D
    a = load_tile(x + head_offset, t, t < n, cols, D, BD, HEADS * D, ACC)
    store_tile(x_by_head + head * padded_tokens * D, a, t, t < padded_tokens, cols, D, BD, D)
    a += load_tile(added + head * n * D, t, t < n, cols, D, BD, D, ACC)
    u_scale = tl.rsqrt(tl.sum(a * a, 1) + UNIT_EPS)[:, None]
    a *= u_scale
    g = load_tile(g_y + head_offset, t, t < n, cols, D, BD, HEADS * D, ACC)
    g = (g - a * tl.sum(g * a, 1)[:, None]) * u_scale
    store_tile(g_x + head_offset, g, t, t < n, cols, D, BD, HEADS * D)
    store_tile(g_sum + head * padded_tokens * D, g, t, t < padded_tokens, cols, D, BD, D)
