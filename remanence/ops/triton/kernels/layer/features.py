# mypy: ignore-errors
"""Features of unit keys: gated, at unit length, projected back and added to the keys."""

from __future__ import annotations

import triton
import triton.language as tl

from remanence.ops.triton.kernels.layer.tiles import UNIT_EPS, kernel, load_block, load_tile, store_tile
from remanence.ops.triton.kernels.tools import activate, activate_with_slope, dot_apart, dot_onto


@triton.jit
def _features(
    x, up, down, t, live, inner, cols, go,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, COUNT: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr,
    SCALE: tl.constexpr, APART: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of keys x: gate, value, features at length 1 and what they were divided by, keys and features added up, likewise.

    By slices of the keys: what is loaded in a loop needs no registers on its way.
    """
    SLICE: tl.constexpr = 64 if BD >= 64 else BD  # rows of 128 bytes, if there are so many
    gate, value = tl.zeros([BT, BC], ACC), tl.zeros([BT, BC], ACC)
    for first in range(0, BD, SLICE):
        some = first + tl.arange(0, SLICE)
        a = load_tile(x, t, live, some, D, 0, HEADS * D, OP)
        gate = dot_onto(gate, a, load_block(up, some, inner, D, COUNT, 2 * COUNT, OP), OP, PRECISION)
        value = dot_onto(
            value, a, load_block(up + COUNT, some, inner, D, COUNT, 2 * COUNT, OP), OP, PRECISION
        )
    gate, value = SCALE * gate, SCALE * value
    u = activate(gate, False) * value
    shrink = tl.rsqrt(tl.sum(u * u, 1) + UNIT_EPS)[:, None]
    u *= shrink
    y = dot_apart(u, load_block(down, inner, cols, COUNT, D, D, OP), go, APART, ACC, OP, PRECISION)
    y += load_tile(x, t, live, cols, D, BD, HEADS * D, ACC)
    other = tl.rsqrt(tl.sum(y * y, 1) + UNIT_EPS)[:, None]
    # The first two wait: narrow, they take half the registers.
    return (
        gate.to(OP),
        value.to(OP),
        u,
        shrink,
        y * other,
        other,
    )


@kernel
def key_features_kernel(
    x, up, down, y, per,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, COUNT: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr,
    SCALE: tl.constexpr, APART: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    group, own = head // HEADS, head % HEADS
    t = group * per + tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    live, cols, inner = t < (group + 1) * per, tl.arange(0, BD), tl.arange(0, BC)
    up, down = up + head * D * 2 * COUNT, down + head * COUNT * D
    _, _, _, _, value, _ = _features(
        x + own * D,
        up,
        down,
        t,
        live,
        inner,
        cols,
        per,
        HEADS,
        D,
        BD,
        COUNT,
        BC,
        BT,
        SCALE,
        APART,
        ACC,
        OP,
        PRECISION,
    )
    store_tile(y + own * D, value, t, live, cols, D, BD, HEADS * D)


@kernel
def key_features_slopes(
    g_y, x, up, down, u_out, g_sum, g_z, per,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, COUNT: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr,
    SCALE: tl.constexpr, APART: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """By tokens, the gradients of the sum and of the products with `up`, from which products make the keys' and the
    weights'; and the features, for the weights'.
    """
    head = tl.program_id(1).to(tl.int64)
    group, own = head // HEADS, head % HEADS
    t = group * per + tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    live, cols, inner = t < (group + 1) * per, tl.arange(0, BD), tl.arange(0, BC)
    up, down = up + head * D * 2 * COUNT, down + head * COUNT * D
    gate, value, u, shrink, y, other = _features(
        x + own * D,
        up,
        down,
        t,
        live,
        inner,
        cols,
        per,
        HEADS,
        D,
        BD,
        COUNT,
        BC,
        BT,
        SCALE,
        APART,
        ACC,
        OP,
        PRECISION,
    )
    store_tile(u_out + own * COUNT, u, t, live, inner, COUNT, BC, HEADS * COUNT)
    g = load_tile(g_y + own * D, t, live, cols, D, BD, HEADS * D, ACC)
    g = (g - y * tl.sum(g * y, 1)[:, None]) * other
    store_tile(g_sum + own * D, g, t, live, cols, D, BD, HEADS * D)
    g_u = dot_apart(
        g, tl.trans(load_block(down, inner, cols, COUNT, D, D, OP)), per, APART, ACC, OP, PRECISION
    )
    g_u = (g_u - u * tl.sum(g_u * u, 1)[:, None]) * (SCALE * shrink)
    opened, slope = activate_with_slope(gate.to(ACC), False)
    store_tile(
        g_z + own * 2 * COUNT, g_u * value.to(ACC) * slope, t, live, inner, COUNT, BC, HEADS * 2 * COUNT
    )
    store_tile(g_z + own * 2 * COUNT + COUNT, g_u * opened, t, live, inner, COUNT, BC, HEADS * 2 * COUNT)


@triton.jit
def _halves(z, t, live, cols, COUNT: tl.constexpr, BC: tl.constexpr, SCALE: tl.constexpr, ACC: tl.constexpr):
    gate = load_tile(z, t, live, cols, COUNT, BC, 2 * COUNT, ACC)
    return SCALE * gate, SCALE * load_tile(z + COUNT, t, live, cols, COUNT, BC, 2 * COUNT, ACC)


@kernel
def key_features_gated(
    z, u, n, room, COUNT: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr, SCALE: tl.constexpr, ACC: tl.constexpr
):  # fmt: skip
    """From ``[h n 2*COUNT]`` to ``[h room COUNT]``, zeros where there is room for more than n tokens."""
    head = tl.program_id(1).to(tl.int64)
    t, cols = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT), tl.arange(0, BC)
    gate, up = _halves(z + head * n * 2 * COUNT, t, t < n, cols, COUNT, BC, SCALE, ACC)
    value = activate(gate, False) * up
    value *= tl.rsqrt(tl.sum(value * value, 1) + UNIT_EPS)[:, None]
    store_tile(u + head * room * COUNT, value, t, t < room, cols, COUNT, BC, COUNT)


@kernel
def key_features_gated_backward(
    z, g_u, g_z, n, room, COUNT: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr, SCALE: tl.constexpr, ACC: tl.constexpr  # noqa: E501
):  # fmt: skip
    """g_z has the room, g_u has not."""
    head = tl.program_id(1).to(tl.int64)
    t, cols = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT), tl.arange(0, BC)
    gate, up = _halves(z + head * n * 2 * COUNT, t, t < n, cols, COUNT, BC, SCALE, ACC)
    opened, slope = activate_with_slope(gate, False)
    value = opened * up
    shrink = tl.rsqrt(tl.sum(value * value, 1) + UNIT_EPS)[:, None]
    value *= shrink
    g = load_tile(g_u + head * n * COUNT, t, t < n, cols, COUNT, BC, COUNT, ACC)
    g = (g - value * tl.sum(g * value, 1)[:, None]) * (SCALE * shrink)
    out = g_z + head * room * 2 * COUNT
    store_tile(out, g * up * slope, t, t < room, cols, COUNT, BC, 2 * COUNT)
    store_tile(out + COUNT, g * opened, t, t < room, cols, COUNT, BC, 2 * COUNT)


@kernel
def key_features_added(
    x, added, y, n, HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, ACC: tl.constexpr
):  # fmt: skip
    """x and y stand by tokens, ``[g n h D]``; what is added stands by heads, ``[g h n D]``."""
    head = tl.program_id(1).to(tl.int64)
    t, cols = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT), tl.arange(0, BD)
    place = (head // HEADS * n * HEADS + head % HEADS) * D
    a = load_tile(x + place, t, t < n, cols, D, BD, HEADS * D, ACC)
    a += load_tile(added + head * n * D, t, t < n, cols, D, BD, D, ACC)
    store_tile(
        y + place, a * tl.rsqrt(tl.sum(a * a, 1) + UNIT_EPS)[:, None], t, t < n, cols, D, BD, HEADS * D
    )


@kernel
def key_features_added_backward(
    g_y, x, added, g_x, g_sum, turned, n, room,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The sum's gradient by tokens, where the key's is added up, and by heads; and x by heads, too: with room, for
    products over parts of the tokens.
    """
    head = tl.program_id(1).to(tl.int64)
    t, cols = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT), tl.arange(0, BD)
    place = (head // HEADS * n * HEADS + head % HEADS) * D
    a = load_tile(x + place, t, t < n, cols, D, BD, HEADS * D, ACC)
    store_tile(turned + head * room * D, a, t, t < room, cols, D, BD, D)
    a += load_tile(added + head * n * D, t, t < n, cols, D, BD, D, ACC)
    shrink = tl.rsqrt(tl.sum(a * a, 1) + UNIT_EPS)[:, None]
    a *= shrink
    g = load_tile(g_y + place, t, t < n, cols, D, BD, HEADS * D, ACC)
    g = (g - a * tl.sum(g * a, 1)[:, None]) * shrink
    store_tile(g_x + place, g, t, t < n, cols, D, BD, HEADS * D)
    store_tile(g_sum + head * room * D, g, t, t < room, cols, D, BD, D)
