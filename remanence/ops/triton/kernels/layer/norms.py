# mypy: ignore-errors
"""RMSNorm per head or of complete vectors, alone or multiplied by a gate."""

from __future__ import annotations

import triton
import triton.language as tl

from remanence.ops.triton.kernels.layer.tiles import kernel, load_tile, load_vector, store_tile
from remanence.ops.triton.kernels.tools import activate, activate_with_slope


@kernel
def gated_norm_kernel(
    x,
    gate,
    weight,
    y,
    group_size,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
    EPS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Compute RMSNorm of x with gain `weight`, times SiLU of `gate`."""
    group, cols = tl.program_id(1).to(tl.int64), tl.arange(0, BD)
    t = group * group_size + tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    row_mask = t < (group + 1) * group_size
    weight += group * D
    a = load_tile(x, t, row_mask, cols, D, BD, D, ACC)
    a *= tl.rsqrt(tl.sum(a * a, 1) / D + EPS)[:, None]
    activated = activate(load_tile(gate, t, row_mask, cols, D, BD, D, ACC), False)
    store_tile(
        y, a * load_vector(weight, cols, D, BD, 1, ACC)[None, :] * activated, t, row_mask, cols, D, BD, D
    )


@kernel
def gated_norm_backward(
    x, gate, weight, g_y, g_x, g_gate, g_weight, group_size, steps,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write the gradients of x and of the gate, and each program's part of the gradient of the weight."""
    group, cols = tl.program_id(1).to(tl.int64), tl.arange(0, BD)
    w = load_vector(weight + group * D, cols, D, BD, 1, ACC)[None, :]
    weight_sums = tl.zeros([BT, BD], ACC)
    for step in range(steps):
        t = group * group_size + (tl.program_id(0) * steps + step).to(tl.int64) * BT + tl.arange(0, BT)
        row_mask = t < (group + 1) * group_size
        a = load_tile(x, t, row_mask, cols, D, BD, D, ACC)
        g = load_tile(g_y, t, row_mask, cols, D, BD, D, ACC)
        activated, slope = activate_with_slope(load_tile(gate, t, row_mask, cols, D, BD, D, ACC), False)
        rstd = tl.rsqrt(tl.sum(a * a, 1) / D + EPS)[:, None]
        a *= rstd
        store_tile(g_gate, g * a * w * slope, t, row_mask, cols, D, BD, D)
        g *= activated
        weight_sums += g * a
        g *= w
        store_tile(g_x, (g - a * (tl.sum(g * a, 1) / D)[:, None]) * rstd, t, row_mask, cols, D, BD, D)
    tl.store(
        g_weight + (group * tl.num_programs(0) + tl.program_id(0)) * D + cols,
        tl.sum(weight_sums, 0),
        mask=cols < D,
    )


@triton.jit
def _rms_norm(x, t, row_mask, cols, D: tl.constexpr, BD: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr):
    """Return rows scaled to unit mean square, and the factors that scaled them."""
    a = load_tile(x, t, row_mask, cols, D, BD, D, ACC)
    rstd = tl.rsqrt(tl.sum(a * a, 1) / D + EPS)[:, None]
    return a * rstd, rstd


@triton.jit
def _rms_norm_backward(g, a, rstd, D: tl.constexpr):
    """Return the gradient of the input of `_rms_norm`, given the gradient g of its result a."""
    return (g - a * (tl.sum(g * a, 1) / D)[:, None]) * rstd


@kernel
def rms_norm_kernel(
    x,
    weight,
    y,
    group_size,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
    EPS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Compute RMSNorm of x with gain `weight`."""
    group, cols = tl.program_id(1).to(tl.int64), tl.arange(0, BD)
    t = group * group_size + tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    row_mask = t < (group + 1) * group_size
    a, _ = _rms_norm(x, t, row_mask, cols, D, BD, EPS, ACC)
    store_tile(
        y, a * load_vector(weight + group * D, cols, D, BD, 1, ACC)[None, :], t, row_mask, cols, D, BD, D
    )


@kernel
def rms_norm_backward(
    x, weight, g_y, g_x, g_weight, group_size, steps,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x, and each program's part of the gradient of the weight."""
    group, cols = tl.program_id(1).to(tl.int64), tl.arange(0, BD)
    w = load_vector(weight + group * D, cols, D, BD, 1, ACC)[None, :]
    weight_sums = tl.zeros([BT, BD], ACC)
    for step in range(steps):
        t = group * group_size + (tl.program_id(0) * steps + step).to(tl.int64) * BT + tl.arange(0, BT)
        row_mask = t < (group + 1) * group_size
        a, rstd = _rms_norm(x, t, row_mask, cols, D, BD, EPS, ACC)
        g = load_tile(g_y, t, row_mask, cols, D, BD, D, ACC)
        weight_sums += g * a
        store_tile(g_x, _rms_norm_backward(g * w, a, rstd, D), t, row_mask, cols, D, BD, D)
    tl.store(
        g_weight + (group * tl.num_programs(0) + tl.program_id(0)) * D + cols,
        tl.sum(weight_sums, 0),
        mask=cols < D,
    )


@kernel
def sigmoid_gated_norm_kernel(
    x,
    m,
    weight,
    gain,
    y,
    group_size,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
    EPS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Compute RMSNorm of x with gain `weight`, times the sigmoid of RMSNorm of m with gain `gain`."""
    group, cols = tl.program_id(1).to(tl.int64), tl.arange(0, BD)
    t = group * group_size + tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    row_mask = t < (group + 1) * group_size
    a, _ = _rms_norm(x, t, row_mask, cols, D, BD, EPS, ACC)
    b, _ = _rms_norm(m, t, row_mask, cols, D, BD, EPS, ACC)
    a *= load_vector(weight + group * D, cols, D, BD, 1, ACC)[None, :]
    b *= load_vector(gain + group * D, cols, D, BD, 1, ACC)[None, :]
    store_tile(y, a / (1.0 + tl.exp(-b)), t, row_mask, cols, D, BD, D)


@kernel
def sigmoid_gated_norm_backward(
    x, m, weight, gain, g_y, g_x, g_m, g_weight, g_gain, group_size, steps,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write the gradients of x and m, and each program's part of the gradients of `weight` and `gain`."""
    group, cols = tl.program_id(1).to(tl.int64), tl.arange(0, BD)
    w = load_vector(weight + group * D, cols, D, BD, 1, ACC)[None, :]
    v = load_vector(gain + group * D, cols, D, BD, 1, ACC)[None, :]
    weight_sums, gain_sums = tl.zeros([BT, BD], ACC), tl.zeros([BT, BD], ACC)
    for step in range(steps):
        t = group * group_size + (tl.program_id(0) * steps + step).to(tl.int64) * BT + tl.arange(0, BT)
        row_mask = t < (group + 1) * group_size
        g = load_tile(g_y, t, row_mask, cols, D, BD, D, ACC)
        a, rstd = _rms_norm(x, t, row_mask, cols, D, BD, EPS, ACC)
        b, rstd_m = _rms_norm(m, t, row_mask, cols, D, BD, EPS, ACC)
        activated = 1.0 / (1.0 + tl.exp(-b * v))
        slope = g * a * w * activated * (1.0 - activated)
        g *= activated
        weight_sums += g * a
        gain_sums += slope * b
        store_tile(g_x, _rms_norm_backward(g * w, a, rstd, D), t, row_mask, cols, D, BD, D)
        store_tile(g_m, _rms_norm_backward(slope * v, b, rstd_m, D), t, row_mask, cols, D, BD, D)
    weight_offset = (group * tl.num_programs(0) + tl.program_id(0)) * D + cols
    tl.store(g_weight + weight_offset, tl.sum(weight_sums, 0), mask=cols < D)
    tl.store(g_gain + weight_offset, tl.sum(gain_sums, 0), mask=cols < D)
