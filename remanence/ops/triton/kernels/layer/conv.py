# mypy: ignore-errors
"""Short causal convolutions, followed by SiLU and optionally by scaling to unit length per head."""

from __future__ import annotations

import triton
import triton.language as tl

from remanence.ops.triton.kernels.layer.tiles import UNIT_EPS, kernel, load_tile, load_vector, store_tile
from remanence.ops.triton.kernels.tools import activate, activate_with_slope


@triton.jit
def _load_with_past(
    x,
    past,
    at,
    L,
    cols,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    HISTORY: tl.constexpr,
    ACC: tl.constexpr,
):
    """Load the tokens `at` of one row and head. Negative indices are in `past`, whose last token is at -1."""
    new = load_tile(x, at, (at >= 0) & (at < L), cols, D, BD, HEADS * D, ACC)
    if HISTORY > 0:
        return new + load_tile(past, at + HISTORY, (at < 0) & (at >= -HISTORY), cols, D, BD, HEADS * D, ACC)
    else:
        return new


@kernel
def short_conv_kernel(
    x, past, weight, y, L, group_size,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, TAPS: tl.constexpr, UNIT: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Compute the convolution, SiLU, and with UNIT the scaling to unit length, for a tile of tokens of one
    row and head.
    """
    head, row = tl.program_id(0) % HEADS, tl.program_id(1).to(tl.int64)
    t, cols = (tl.program_id(0) // HEADS).to(tl.int64) * BT + tl.arange(0, BT), tl.arange(0, BD)
    base, past_offset = row * L * HEADS * D + head * D, row * (TAPS - 1) * HEADS * D + head * D
    weight += (row // group_size) * HEADS * D * TAPS
    z = tl.zeros([BT, BD], ACC)
    for back in tl.static_range(TAPS):
        w = load_vector(weight + head * D * TAPS + TAPS - 1 - back, cols, D, BD, TAPS, ACC)
        z += w[None, :] * _load_with_past(
            x + base, past + past_offset, t - back, L, cols, HEADS, D, BD, TAPS - 1, ACC
        )
    z = activate(z, False)
    if UNIT:
        z *= tl.rsqrt(tl.sum(z * z, 1) + UNIT_EPS)[:, None]
    store_tile(y + base, z, t, t < L, cols, D, BD, HEADS * D)


@kernel
def short_conv_backward(
    x, past, weight, g_y, g_z, g_weight, L, steps, group_size,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, TAPS: tl.constexpr, UNIT: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Write the gradient g_z of the convolution's result before SiLU, and each program's part of the gradient
    of the weight.
    """
    head, part, row = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS, tl.program_id(1).to(tl.int64)
    cols = tl.arange(0, BD)
    base, past_offset = row * L * HEADS * D + head * D, row * (TAPS - 1) * HEADS * D + head * D
    weight += (row // group_size) * HEADS * D * TAPS
    sums = (tl.zeros([BT, BD], ACC),) * TAPS
    for step in range(steps):
        t = (part * steps + step).to(tl.int64) * BT + tl.arange(0, BT)
        inputs, z = (), tl.zeros([BT, BD], ACC)  # tuples are extended by +, because Triton has no unpacking
        for back in tl.static_range(TAPS):
            w = load_vector(weight + head * D * TAPS + TAPS - 1 - back, cols, D, BD, TAPS, ACC)
            shifted = _load_with_past(
                x + base, past + past_offset, t - back, L, cols, HEADS, D, BD, TAPS - 1, ACC
            )
            inputs = inputs + (shifted,)  # noqa: RUF005
            z += w[None, :] * inputs[back]
        value, slope = activate_with_slope(z, False)
        g = load_tile(g_y + base, t, t < L, cols, D, BD, HEADS * D, ACC)
        if UNIT:
            inverse_length = tl.rsqrt(tl.sum(value * value, 1) + UNIT_EPS)[:, None]
            value *= inverse_length
            g = (g - value * tl.sum(g * value, 1)[:, None]) * inverse_length
        g *= slope
        store_tile(g_z + base, g, t, t < L, cols, D, BD, HEADS * D)
        new_sums = ()
        for back in tl.static_range(TAPS):
            new_sums = new_sums + (sums[back] + g * inputs[back],)  # noqa: RUF005
        sums = new_sums
    parts = tl.num_programs(0) // HEADS
    out = g_weight + ((row * parts + part) * HEADS + head) * D * TAPS
    for back in tl.static_range(TAPS):
        tl.store(out + cols * TAPS + TAPS - 1 - back, tl.sum(sums[back], 0), mask=cols < D)


@kernel
def short_conv_input_backward(
    g_z, weight, g_x, g_past, L, group_size,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, TAPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write the gradients of x and of the past. The gradient of a token is a sum over g_z at the token and
    the TAPS - 1 tokens after it. The past is at the beginning of the first tile.
    """
    HISTORY: tl.constexpr = TAPS - 1
    head, row = tl.program_id(0) % HEADS, tl.program_id(1).to(tl.int64)
    t, cols = (tl.program_id(0) // HEADS).to(tl.int64) * BT - HISTORY + tl.arange(0, BT), tl.arange(0, BD)
    base, past_offset = row * L * HEADS * D + head * D, row * HISTORY * HEADS * D + head * D
    weight += (row // group_size) * HEADS * D * TAPS
    g = tl.zeros([BT, BD], ACC)
    for ahead in tl.static_range(TAPS):
        w = load_vector(weight + head * D * TAPS + HISTORY - ahead, cols, D, BD, TAPS, ACC)
        g += w[None, :] * load_tile(
            g_z + base, t + ahead, (t + ahead >= 0) & (t + ahead < L), cols, D, BD, HEADS * D, ACC
        )
    store_tile(g_x + base, g, t, (t >= 0) & (t < L), cols, D, BD, HEADS * D)
    if HISTORY > 0:
        store_tile(g_past + past_offset, g, t + HISTORY, t < 0, cols, D, BD, HEADS * D)
