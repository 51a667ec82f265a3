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
    per,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
    EPS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Compute RMSNorm of x with gain `weight`, times SiLU of `gate`."""
    group, cols = tl.program_id(1).to(tl.int64), tl.arange(0, BD)
    t = group * per + tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    live = t < (group + 1) * per
    weight += group * D
    a = load_tile(x, t, live, cols, D, BD, D, ACC)
    a *= tl.rsqrt(tl.sum(a * a, 1) / D + EPS)[:, None]
    opened = activate(load_tile(gate, t, live, cols, D, BD, D, ACC), False)
    store_tile(y, a * load_vector(weight, cols, D, BD, 1, ACC)[None, :] * opened, t, live, cols, D, BD, D)


@kernel
def gated_norm_backward(
    x, gate, weight, g_y, g_x, g_gate, g_weight, per, steps,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write the gradients of x and of the gate, and each program's part of the gradient of the weight."""
    group, cols = tl.program_id(1).to(tl.int64), tl.arange(0, BD)
    w = load_vector(weight + group * D, cols, D, BD, 1, ACC)[None, :]
    sums = tl.zeros([BT, BD], ACC)
    for step in range(steps):
        t = group * per + (tl.program_id(0) * steps + step).to(tl.int64) * BT + tl.arange(0, BT)
        live = t < (group + 1) * per
        a = load_tile(x, t, live, cols, D, BD, D, ACC)
        g = load_tile(g_y, t, live, cols, D, BD, D, ACC)
        opened, slope = activate_with_slope(load_tile(gate, t, live, cols, D, BD, D, ACC), False)
        shrink = tl.rsqrt(tl.sum(a * a, 1) / D + EPS)[:, None]
        a *= shrink
        store_tile(g_gate, g * a * w * slope, t, live, cols, D, BD, D)
        g *= opened
        sums += g * a
        g *= w
        store_tile(g_x, (g - a * (tl.sum(g * a, 1) / D)[:, None]) * shrink, t, live, cols, D, BD, D)
    tl.store(
        g_weight + (group * tl.num_programs(0) + tl.program_id(0)) * D + cols, tl.sum(sums, 0), mask=cols < D
    )


@triton.jit
def _rms(x, t, live, cols, D: tl.constexpr, BD: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr):
    """Return rows scaled to unit mean square, and the factors that scaled them."""
    a = load_tile(x, t, live, cols, D, BD, D, ACC)
    shrink = tl.rsqrt(tl.sum(a * a, 1) / D + EPS)[:, None]
    return a * shrink, shrink


@triton.jit
def _rms_gradient(g, a, shrink, D: tl.constexpr):
    """Return the gradient of the input of `_rms`, given the gradient g of its result a."""
    return (g - a * (tl.sum(g * a, 1) / D)[:, None]) * shrink


@kernel
def rms_norm_kernel(
    x,
    weight,
    y,
    per,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
    EPS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Compute RMSNorm of x with gain `weight`."""
    group, cols = tl.program_id(1).to(tl.int64), tl.arange(0, BD)
    t = group * per + tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    live = t < (group + 1) * per
    a, _ = _rms(x, t, live, cols, D, BD, EPS, ACC)
    store_tile(y, a * load_vector(weight + group * D, cols, D, BD, 1, ACC)[None, :], t, live, cols, D, BD, D)


@kernel
def rms_norm_backward(
    x, weight, g_y, g_x, g_weight, per, steps,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x, and each program's part of the gradient of the weight."""
    group, cols = tl.program_id(1).to(tl.int64), tl.arange(0, BD)
    w = load_vector(weight + group * D, cols, D, BD, 1, ACC)[None, :]
    sums = tl.zeros([BT, BD], ACC)
    for step in range(steps):
        t = group * per + (tl.program_id(0) * steps + step).to(tl.int64) * BT + tl.arange(0, BT)
        live = t < (group + 1) * per
        a, shrink = _rms(x, t, live, cols, D, BD, EPS, ACC)
        g = load_tile(g_y, t, live, cols, D, BD, D, ACC)
        sums += g * a
        store_tile(g_x, _rms_gradient(g * w, a, shrink, D), t, live, cols, D, BD, D)
    tl.store(
        g_weight + (group * tl.num_programs(0) + tl.program_id(0)) * D + cols, tl.sum(sums, 0), mask=cols < D
    )


@kernel
def sigmoid_gated_norm_kernel(
    x,
    m,
    weight,
    gain,
    y,
    per,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
    EPS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Compute RMSNorm of x with gain `weight`, times the sigmoid of RMSNorm of m with gain `gain`."""
    group, cols = tl.program_id(1).to(tl.int64), tl.arange(0, BD)
    t = group * per + tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    live = t < (group + 1) * per
    a, _ = _rms(x, t, live, cols, D, BD, EPS, ACC)
    b, _ = _rms(m, t, live, cols, D, BD, EPS, ACC)
    a *= load_vector(weight + group * D, cols, D, BD, 1, ACC)[None, :]
    b *= load_vector(gain + group * D, cols, D, BD, 1, ACC)[None, :]
    store_tile(y, a / (1.0 + tl.exp(-b)), t, live, cols, D, BD, D)


@kernel
def sigmoid_gated_norm_backward(
    x, m, weight, gain, g_y, g_x, g_m, g_weight, g_gain, per, steps,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write the gradients of x and m, and each program's part of the gradients of `weight` and `gain`."""
    group, cols = tl.program_id(1).to(tl.int64), tl.arange(0, BD)
    w = load_vector(weight + group * D, cols, D, BD, 1, ACC)[None, :]
    v = load_vector(gain + group * D, cols, D, BD, 1, ACC)[None, :]
    sums, gains = tl.zeros([BT, BD], ACC), tl.zeros([BT, BD], ACC)
    for step in range(steps):
        t = group * per + (tl.program_id(0) * steps + step).to(tl.int64) * BT + tl.arange(0, BT)
        live = t < (group + 1) * per
        g = load_tile(g_y, t, live, cols, D, BD, D, ACC)
        a, shrink = _rms(x, t, live, cols, D, BD, EPS, ACC)
        b, other = _rms(m, t, live, cols, D, BD, EPS, ACC)
        opened = 1.0 / (1.0 + tl.exp(-b * v))
        slope = g * a * w * opened * (1.0 - opened)
        g *= opened
        sums += g * a
        gains += slope * b
        store_tile(g_x, _rms_gradient(g * w, a, shrink, D), t, live, cols, D, BD, D)
        store_tile(g_m, _rms_gradient(slope * v, b, other, D), t, live, cols, D, BD, D)
    place = (group * tl.num_programs(0) + tl.program_id(0)) * D + cols
    tl.store(g_weight + place, tl.sum(sums, 0), mask=cols < D)
    tl.store(g_gain + place, tl.sum(gains, 0), mask=cols < D)
