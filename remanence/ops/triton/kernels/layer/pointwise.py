# mypy: ignore-errors
"""SwiGLU and rotary position embeddings."""

from __future__ import annotations

import triton.language as tl

from remanence.ops.triton.kernels.layer.tiles import kernel, load_tile, store_tile
from remanence.ops.triton.kernels.tools import activate, activate_with_slope


@kernel
def swiglu_kernel(gate, up, y, count, BLOCK: tl.constexpr, ACC: tl.constexpr):
    """Compute SiLU of `gate`, times `up`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    activated = activate(tl.load(gate + at, mask=at < count, other=0.0).to(ACC), False)
    tl.store(
        y + at,
        (activated * tl.load(up + at, mask=at < count, other=0.0).to(ACC)).to(y.dtype.element_ty),
        mask=at < count,
    )


@kernel
def swiglu_backward(gate, up, g_y, g_gate, g_up, count, BLOCK: tl.constexpr, ACC: tl.constexpr):
    """Write the gradients of `gate` and `up`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    activated, slope = activate_with_slope(tl.load(gate + at, mask=at < count, other=0.0).to(ACC), False)
    g = tl.load(g_y + at, mask=at < count, other=0.0).to(ACC)
    value = tl.load(up + at, mask=at < count, other=0.0).to(ACC)
    tl.store(g_gate + at, (g * value * slope).to(g_gate.dtype.element_ty), mask=at < count)
    tl.store(g_up + at, (g * activated).to(g_up.dtype.element_ty), mask=at < count)


@kernel
def rotary_kernel(
    x, cos, sin, y, L, stride, x_row, x_token, x_head,
    HEADS: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr, BT: tl.constexpr, SIGN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Rotate the pairs of channels (i, i + HALF) of each head. The angles ``[L HALF]`` of consecutive rows
    are `stride` elements apart; 0 means that all rows have the same angles. x may have any strides (attention
    returns its gradients so), except that channels are contiguous.
    """
    head, row = tl.program_id(0) % HEADS, tl.program_id(1).to(tl.int64)
    t, cols = (tl.program_id(0) // HEADS).to(tl.int64) * BT + tl.arange(0, BT), tl.arange(0, BH)
    c = load_tile(cos + row * stride, t, t < L, cols, HALF, BH, HALF, ACC)
    s = SIGN * load_tile(sin + row * stride, t, t < L, cols, HALF, BH, HALF, ACC)
    x += row * x_row + head * x_head
    a = load_tile(x, t, t < L, cols, HALF, BH, x_token, ACC)
    b = load_tile(x + HALF, t, t < L, cols, HALF, BH, x_token, ACC)
    base = (row * L * HEADS + head) * 2 * HALF
    store_tile(y + base, a * c - b * s, t, t < L, cols, HALF, BH, HEADS * 2 * HALF)
    store_tile(y + base + HALF, b * c + a * s, t, t < L, cols, HALF, BH, HEADS * 2 * HALF)
