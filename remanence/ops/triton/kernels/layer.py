# mypy: ignore-errors
"""What stands around the memory in its layer, each as one pass over its tensors: what a kernel reads it reads from
memory once.

    short_conv_kernel     causal depthwise convolution, SiLU, and unit length per head
    gates_kernel          logits of the input at unit mean square, and their log-sigmoids
    gated_norm_kernel     RMSNorm per head times SiLU of another tensor
    rms_norm_kernel       RMSNorm of whole vectors
    join_kernel           RMSNorm of one tensor times a sigmoid of another's
    swiglu_kernel         SiLU of one tensor times another
    rotary_kernel         pairs of channels turned by an angle
    heads_kernel          each head times a matrix of its own
    key_features_kernel   unit keys to unit features in one kernel (for narrow ones, whose weights fit a processor)
    key_features_gated    unit features from the products that torch made of unit keys
    key_features_added    the sum of keys and torch's products of their features, normalised to length 1

Weights may come in groups, one for each of so many rows or tokens in a row (`per`): several layers' at once.

Backward computes again what forward did not write. Sums over tokens (the weights' gradients) are taken per program and
added up by torch: no atomics, so that two runs agree bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from remanence.ops.triton.kernels.tools import activate, activate_with_slope, dot_apart, dot_onto

UNIT_EPS = tl.constexpr(1e-12)
GATE_EPS = tl.constexpr(1e-6)

# One build for every length. (Not of `count`: loads are wide only where their mask's end is known to be a multiple of
# 16.)
kernel = triton.jit(do_not_specialize=["L", "n", "per", "room", "steps", "stride"])


@triton.jit
def _columns(ptr, cols, D: tl.constexpr, BD: tl.constexpr, STEP: tl.constexpr, ACC: tl.constexpr):
    if D != BD:
        return tl.load(ptr + cols * STEP, mask=cols < D, other=0.0).to(ACC)
    else:
        return tl.load(ptr + cols * STEP).to(ACC)


@triton.jit
def _tile(ptr, rows, live, cols, D: tl.constexpr, BD: tl.constexpr, STRIDE, ACC: tl.constexpr):
    mask = live[:, None] & (cols < D)[None, :] if D != BD else live[:, None]
    return tl.load(ptr + rows[:, None] * STRIDE + cols[None, :], mask=mask, other=0.0).to(ACC)


@triton.jit
def _put(ptr, x, rows, live, cols, D: tl.constexpr, BD: tl.constexpr, STRIDE: tl.constexpr):
    mask = live[:, None] & (cols < D)[None, :] if D != BD else live[:, None]
    tl.store(ptr + rows[:, None] * STRIDE + cols[None, :], x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _inputs(
    x,
    past,
    at,
    L,
    cols,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    LEAD: tl.constexpr,
    ACC: tl.constexpr,
):
    """The tokens `at` of one row and head; those before the first are the last of the past."""
    new = _tile(x, at, (at >= 0) & (at < L), cols, D, BD, HEADS * D, ACC)
    if LEAD > 0:
        return new + _tile(past, at + LEAD, (at < 0) & (at >= -LEAD), cols, D, BD, HEADS * D, ACC)
    else:
        return new


@kernel
def short_conv_kernel(
    x, past, weight, y, L, per,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, TAPS: tl.constexpr, UNIT: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(0) % HEADS, tl.program_id(1).to(tl.int64)
    t, cols = (tl.program_id(0) // HEADS).to(tl.int64) * BT + tl.arange(0, BT), tl.arange(0, BD)
    base, before = row * L * HEADS * D + head * D, row * (TAPS - 1) * HEADS * D + head * D
    weight += (row // per) * HEADS * D * TAPS
    z = tl.zeros([BT, BD], ACC)
    for back in tl.static_range(TAPS):
        w = _columns(weight + head * D * TAPS + TAPS - 1 - back, cols, D, BD, TAPS, ACC)
        z += w[None, :] * _inputs(x + base, past + before, t - back, L, cols, HEADS, D, BD, TAPS - 1, ACC)
    z = activate(z, False)
    if UNIT:
        z *= tl.rsqrt(tl.sum(z * z, 1) + UNIT_EPS)[:, None]
    _put(y + base, z, t, t < L, cols, D, BD, HEADS * D)


@kernel
def short_conv_slopes(
    x, past, weight, g_y, g_z, g_weight, L, steps, per,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, TAPS: tl.constexpr, UNIT: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """The convolution's own gradient g_z, and with it the weights'."""
    head, part, row = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS, tl.program_id(1).to(tl.int64)
    cols = tl.arange(0, BD)
    base, before = row * L * HEADS * D + head * D, row * (TAPS - 1) * HEADS * D + head * D
    weight += (row // per) * HEADS * D * TAPS
    sums = (tl.zeros([BT, BD], ACC),) * TAPS
    for step in range(steps):
        t = (part * steps + step).to(tl.int64) * BT + tl.arange(0, BT)
        inputs, z = (), tl.zeros([BT, BD], ACC)  # tuples grow by sums: Triton knows no unpacking
        for back in tl.static_range(TAPS):
            w = _columns(weight + head * D * TAPS + TAPS - 1 - back, cols, D, BD, TAPS, ACC)
            taken = _inputs(x + base, past + before, t - back, L, cols, HEADS, D, BD, TAPS - 1, ACC)
            inputs = inputs + (taken,)  # noqa: RUF005
            z += w[None, :] * inputs[back]
        value, slope = activate_with_slope(z, False)
        g = _tile(g_y + base, t, t < L, cols, D, BD, HEADS * D, ACC)
        if UNIT:
            shrink = tl.rsqrt(tl.sum(value * value, 1) + UNIT_EPS)[:, None]
            value *= shrink
            g = (g - value * tl.sum(g * value, 1)[:, None]) * shrink
        g *= slope
        _put(g_z + base, g, t, t < L, cols, D, BD, HEADS * D)
        added = ()
        for back in tl.static_range(TAPS):
            added = added + (sums[back] + g * inputs[back],)  # noqa: RUF005
        sums = added
    parts = tl.num_programs(0) // HEADS
    out = g_weight + ((row * parts + part) * HEADS + head) * D * TAPS
    for back in tl.static_range(TAPS):
        tl.store(out + cols * TAPS + TAPS - 1 - back, tl.sum(sums[back], 0), mask=cols < D)


@kernel
def short_conv_turned(
    g_z, weight, g_x, g_past, L, per,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, TAPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """A token's gradient is of itself and the TAPS - 1 after it; the past's too, which is the first tile's
    beginning.
    """
    LEAD: tl.constexpr = TAPS - 1
    head, row = tl.program_id(0) % HEADS, tl.program_id(1).to(tl.int64)
    t, cols = (tl.program_id(0) // HEADS).to(tl.int64) * BT - LEAD + tl.arange(0, BT), tl.arange(0, BD)
    base, before = row * L * HEADS * D + head * D, row * LEAD * HEADS * D + head * D
    weight += (row // per) * HEADS * D * TAPS
    g = tl.zeros([BT, BD], ACC)
    for ahead in tl.static_range(TAPS):
        w = _columns(weight + head * D * TAPS + LEAD - ahead, cols, D, BD, TAPS, ACC)
        g += w[None, :] * _tile(
            g_z + base, t + ahead, (t + ahead >= 0) & (t + ahead < L), cols, D, BD, HEADS * D, ACC
        )
    _put(g_x + base, g, t, (t >= 0) & (t < L), cols, D, BD, HEADS * D)
    if LEAD > 0:
        _put(g_past + before, g, t + LEAD, t < 0, cols, D, BD, HEADS * D)


@triton.jit
def _log_sigmoid(z, TERMS: tl.constexpr):
    """min(z, 0) - log(1 + exp(-|z|)), the latter from log(1 + u)'s series in u / (2 + u), at most 1/3: a gate that is
    nearly open has a small log, which the chip's own logarithm near 1 would leave few digits of.
    """
    u = tl.exp(-tl.abs(z))
    v = u / (2.0 + u)
    total = tl.zeros_like(v)
    for i in tl.static_range(TERMS):
        total = total * v * v + 1.0 / (2 * (TERMS - 1 - i) + 1)
    return tl.minimum(z, 0.0) - 2.0 * v * total


@triton.jit
def _signs(gate, FLIPPED: tl.constexpr, ACC: tl.constexpr):
    return 1.0 - 2.0 * ((FLIPPED >> gate) & 1).to(ACC)


@kernel
def gates_kernel(
    x, weight, bias, logs, logits, scales, n, per,
    GATES: tl.constexpr, HEADS: tl.constexpr, BG: tl.constexpr, DIM: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
    FLIPPED: tl.constexpr, TERMS: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    COUNT: tl.constexpr = GATES * HEADS
    group = tl.program_id(1).to(tl.int64)
    t, gates = group * per + tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT), tl.arange(0, BG)
    live = t < (group + 1) * per
    weight, bias = weight + group * COUNT * DIM, bias + group * COUNT
    products, squares = tl.zeros([BT, BG], ACC), tl.zeros([BT, BD], ACC)
    for start in range(0, DIM, BD):
        cols = start + tl.arange(0, BD)
        # A tile of columns is whole where DIM is a multiple of it.
        a = _tile(x, t, live, cols, DIM, DIM if DIM % BD == 0 else 0, DIM, ACC)
        w = _tile(weight, gates, gates < COUNT, cols, DIM, DIM if DIM % BD == 0 else 0, DIM, ACC)
        products = tl.dot(a, tl.trans(w), products, input_precision=PRECISION, out_dtype=ACC)
        squares += a * a
    scale = tl.rsqrt(tl.sum(squares, 1) / DIM + GATE_EPS)
    logit = products * scale[:, None] + _columns(bias, gates, COUNT, BG, 1, ACC)[None, :]
    tl.store(scales + t, scale, mask=live)
    _put(logits, logit, t, live, gates, COUNT, BG, COUNT)
    log_gate = _log_sigmoid(logit * _signs(gates // HEADS, FLIPPED, ACC)[None, :], TERMS)
    place = (gates // HEADS).to(tl.int64) * n * HEADS + gates % HEADS
    tl.store(
        logs + place[None, :] + t[:, None] * HEADS, log_gate, mask=(live)[:, None] & (gates < COUNT)[None, :]
    )


@kernel
def gates_slopes(
    g_logs, logits, scales, bias, g_logits, pulls, g_bias, n, per,
    GATES: tl.constexpr, HEADS: tl.constexpr, BG: tl.constexpr, DIM: tl.constexpr, BT: tl.constexpr,
    FLIPPED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Of the products before they are scaled; and what each token's input loses by being scaled, as a multiple of
    itself.
    """
    COUNT: tl.constexpr = GATES * HEADS
    group = tl.program_id(1).to(tl.int64)
    t, gates = group * per + tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT), tl.arange(0, BG)
    live = t < (group + 1) * per
    bias += group * COUNT
    logit = _tile(logits, t, live, gates, COUNT, BG, COUNT, ACC)
    scale = tl.load(scales + t, mask=live, other=0.0)
    place = (gates // HEADS).to(tl.int64) * n * HEADS + gates % HEADS
    mask = (live)[:, None] & (gates < COUNT)[None, :]
    g = tl.load(g_logs + place[None, :] + t[:, None] * HEADS, mask=mask, other=0.0)
    signs = _signs(gates // HEADS, FLIPPED, ACC)[None, :]
    g = signs * g / (1.0 + tl.exp(signs * logit))
    product = tl.where(mask, logit - _columns(bias, gates, COUNT, BG, 1, ACC)[None, :], 0.0)
    tl.store(
        g_bias + (group * tl.num_programs(0) + tl.program_id(0)) * COUNT + gates,
        tl.sum(g, 0),
        mask=gates < COUNT,
    )
    tl.store(pulls + t, tl.sum(g * product, 1) * scale * scale / DIM, mask=live)
    _put(g_logits, g * scale[:, None], t, live, gates, COUNT, BG, COUNT)


@kernel
def gates_backward(
    x, weight, g_logits, pulls, g_x, g_weight, per, steps,
    COUNT: tl.constexpr, BG: tl.constexpr, DIM: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (DIM + BD - 1) // BD
    EVEN: tl.constexpr = DIM if DIM % BD == 0 else 0
    block, part = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    group = tl.program_id(1).to(tl.int64)
    weight += group * COUNT * DIM
    cols, gates = block * BD + tl.arange(0, BD), tl.arange(0, BG)
    w = _tile(weight, gates, gates < COUNT, cols, DIM, EVEN, DIM, ACC)
    g_w = tl.zeros([BG, BD], ACC)
    for step in range(steps):
        t = group * per + (part * steps + step).to(tl.int64) * BT + tl.arange(0, BT)
        live = t < (group + 1) * per
        a = _tile(x, t, live, cols, DIM, EVEN, DIM, ACC)
        g = _tile(g_logits, t, live, gates, COUNT, BG, COUNT, ACC)
        pull = tl.load(pulls + t, mask=live, other=0.0)
        g_a = tl.dot(g, w, input_precision=PRECISION, out_dtype=ACC) - a * pull[:, None]
        _put(g_x, g_a, t, live, cols, DIM, EVEN, DIM)
        g_w = tl.dot(tl.trans(g), a, g_w, input_precision=PRECISION, out_dtype=ACC)
    parts = tl.num_programs(0) // BLOCKS
    _put(g_weight + (group * parts + part) * COUNT * DIM, g_w, gates, gates < COUNT, cols, DIM, EVEN, DIM)


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
    group, cols = tl.program_id(1).to(tl.int64), tl.arange(0, BD)
    t = group * per + tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    live = t < (group + 1) * per
    weight += group * D
    a = _tile(x, t, live, cols, D, BD, D, ACC)
    a *= tl.rsqrt(tl.sum(a * a, 1) / D + EPS)[:, None]
    opened = activate(_tile(gate, t, live, cols, D, BD, D, ACC), False)
    _put(y, a * _columns(weight, cols, D, BD, 1, ACC)[None, :] * opened, t, live, cols, D, BD, D)


@kernel
def gated_norm_backward(
    x, gate, weight, g_y, g_x, g_gate, g_weight, per, steps,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    group, cols = tl.program_id(1).to(tl.int64), tl.arange(0, BD)
    w = _columns(weight + group * D, cols, D, BD, 1, ACC)[None, :]
    sums = tl.zeros([BT, BD], ACC)
    for step in range(steps):
        t = group * per + (tl.program_id(0) * steps + step).to(tl.int64) * BT + tl.arange(0, BT)
        live = t < (group + 1) * per
        a = _tile(x, t, live, cols, D, BD, D, ACC)
        g = _tile(g_y, t, live, cols, D, BD, D, ACC)
        opened, slope = activate_with_slope(_tile(gate, t, live, cols, D, BD, D, ACC), False)
        shrink = tl.rsqrt(tl.sum(a * a, 1) / D + EPS)[:, None]
        a *= shrink
        _put(g_gate, g * a * w * slope, t, live, cols, D, BD, D)
        g *= opened
        sums += g * a
        g *= w
        _put(g_x, (g - a * (tl.sum(g * a, 1) / D)[:, None]) * shrink, t, live, cols, D, BD, D)
    tl.store(
        g_weight + (group * tl.num_programs(0) + tl.program_id(0)) * D + cols, tl.sum(sums, 0), mask=cols < D
    )


@triton.jit
def _rms(x, t, live, cols, D: tl.constexpr, BD: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr):
    """Rows at unit mean square, and what they were multiplied by."""
    a = _tile(x, t, live, cols, D, BD, D, ACC)
    shrink = tl.rsqrt(tl.sum(a * a, 1) / D + EPS)[:, None]
    return a * shrink, shrink


@triton.jit
def _rms_gradient(g, a, shrink, D: tl.constexpr):
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
    group, cols = tl.program_id(1).to(tl.int64), tl.arange(0, BD)
    t = group * per + tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    live = t < (group + 1) * per
    a, _ = _rms(x, t, live, cols, D, BD, EPS, ACC)
    _put(y, a * _columns(weight + group * D, cols, D, BD, 1, ACC)[None, :], t, live, cols, D, BD, D)


@kernel
def rms_norm_backward(
    x, weight, g_y, g_x, g_weight, per, steps,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    group, cols = tl.program_id(1).to(tl.int64), tl.arange(0, BD)
    w = _columns(weight + group * D, cols, D, BD, 1, ACC)[None, :]
    sums = tl.zeros([BT, BD], ACC)
    for step in range(steps):
        t = group * per + (tl.program_id(0) * steps + step).to(tl.int64) * BT + tl.arange(0, BT)
        live = t < (group + 1) * per
        a, shrink = _rms(x, t, live, cols, D, BD, EPS, ACC)
        g = _tile(g_y, t, live, cols, D, BD, D, ACC)
        sums += g * a
        _put(g_x, _rms_gradient(g * w, a, shrink, D), t, live, cols, D, BD, D)
    tl.store(
        g_weight + (group * tl.num_programs(0) + tl.program_id(0)) * D + cols, tl.sum(sums, 0), mask=cols < D
    )


@kernel
def join_kernel(
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
    """`weight` is the gain of x, `gain` that of m."""
    group, cols = tl.program_id(1).to(tl.int64), tl.arange(0, BD)
    t = group * per + tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    live = t < (group + 1) * per
    a, _ = _rms(x, t, live, cols, D, BD, EPS, ACC)
    b, _ = _rms(m, t, live, cols, D, BD, EPS, ACC)
    a *= _columns(weight + group * D, cols, D, BD, 1, ACC)[None, :]
    b *= _columns(gain + group * D, cols, D, BD, 1, ACC)[None, :]
    _put(y, a / (1.0 + tl.exp(-b)), t, live, cols, D, BD, D)


@kernel
def join_backward(
    x, m, weight, gain, g_y, g_x, g_m, g_weight, g_gain, per, steps,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    group, cols = tl.program_id(1).to(tl.int64), tl.arange(0, BD)
    w = _columns(weight + group * D, cols, D, BD, 1, ACC)[None, :]
    v = _columns(gain + group * D, cols, D, BD, 1, ACC)[None, :]
    sums, gains = tl.zeros([BT, BD], ACC), tl.zeros([BT, BD], ACC)
    for step in range(steps):
        t = group * per + (tl.program_id(0) * steps + step).to(tl.int64) * BT + tl.arange(0, BT)
        live = t < (group + 1) * per
        g = _tile(g_y, t, live, cols, D, BD, D, ACC)
        a, shrink = _rms(x, t, live, cols, D, BD, EPS, ACC)
        b, other = _rms(m, t, live, cols, D, BD, EPS, ACC)
        opened = 1.0 / (1.0 + tl.exp(-b * v))
        slope = g * a * w * opened * (1.0 - opened)
        g *= opened
        sums += g * a
        gains += slope * b
        _put(g_x, _rms_gradient(g * w, a, shrink, D), t, live, cols, D, BD, D)
        _put(g_m, _rms_gradient(slope * v, b, other, D), t, live, cols, D, BD, D)
    place = (group * tl.num_programs(0) + tl.program_id(0)) * D + cols
    tl.store(g_weight + place, tl.sum(sums, 0), mask=cols < D)
    tl.store(g_gain + place, tl.sum(gains, 0), mask=cols < D)


@kernel
def swiglu_kernel(gate, up, y, count, BLOCK: tl.constexpr, ACC: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    opened = activate(tl.load(gate + at, mask=at < count, other=0.0).to(ACC), False)
    tl.store(
        y + at,
        (opened * tl.load(up + at, mask=at < count, other=0.0).to(ACC)).to(y.dtype.element_ty),
        mask=at < count,
    )


@kernel
def swiglu_backward(gate, up, g_y, g_gate, g_up, count, BLOCK: tl.constexpr, ACC: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    opened, slope = activate_with_slope(tl.load(gate + at, mask=at < count, other=0.0).to(ACC), False)
    g = tl.load(g_y + at, mask=at < count, other=0.0).to(ACC)
    value = tl.load(up + at, mask=at < count, other=0.0).to(ACC)
    tl.store(g_gate + at, (g * value * slope).to(g_gate.dtype.element_ty), mask=at < count)
    tl.store(g_up + at, (g * opened).to(g_up.dtype.element_ty), mask=at < count)


@kernel
def rotary_kernel(
    x, cos, sin, y, L, stride, x_row, x_token, x_head,
    HEADS: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr, BT: tl.constexpr, SIGN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Each head's two halves are the pairs. Angles by token ``[L HALF]``, `stride` apart from row to row, or the same
    for all. x may stand in any order, as attention leaves its gradients.
    """
    head, row = tl.program_id(0) % HEADS, tl.program_id(1).to(tl.int64)
    t, cols = (tl.program_id(0) // HEADS).to(tl.int64) * BT + tl.arange(0, BT), tl.arange(0, BH)
    c = _tile(cos + row * stride, t, t < L, cols, HALF, BH, HALF, ACC)
    s = SIGN * _tile(sin + row * stride, t, t < L, cols, HALF, BH, HALF, ACC)
    x += row * x_row + head * x_head
    a = _tile(x, t, t < L, cols, HALF, BH, x_token, ACC)
    b = _tile(x + HALF, t, t < L, cols, HALF, BH, x_token, ACC)
    base = (row * L * HEADS + head) * 2 * HALF
    _put(y + base, a * c - b * s, t, t < L, cols, HALF, BH, HEADS * 2 * HALF)
    _put(y + base + HALF, b * c + a * s, t, t < L, cols, HALF, BH, HEADS * 2 * HALF)


@triton.jit
def _block(ptr, rows, cols, R: tl.constexpr, C: tl.constexpr, STRIDE: tl.constexpr, OP: tl.constexpr):
    """A tile of a matrix ``[R C]`` in the operands' dtype, zeros outside."""
    return tl.load(
        ptr + rows[:, None] * STRIDE + cols[None, :],
        mask=(rows < R)[:, None] & (cols < C)[None, :],
        other=0.0,
    ).to(OP)


@kernel
def heads_kernel(
    x, weight, base, y, per,
    HEADS: tl.constexpr, INPUTS: tl.constexpr, BI: tl.constexpr, OUTPUTS: tl.constexpr, BO: tl.constexpr,
    BT: tl.constexpr,
    TURNED: tl.constexpr, BASE: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x ``[tokens h INPUTS]`` by ``[g h I OUTPUTS]`` (or, turned, ``[g h OUTPUTS INPUTS]``), added to a base or not."""
    head = tl.program_id(1).to(tl.int64)
    group, own = head // HEADS, head % HEADS
    t = group * per + tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    live = t < (group + 1) * per
    cols = tl.program_id(2) * BO + tl.arange(0, BO)
    SLICE: tl.constexpr = 64 if BI >= 64 else BI
    value = tl.zeros([BT, BO], ACC)
    for first in range(0, BI, SLICE):
        rows = first + tl.arange(0, SLICE)
        a = _tile(x + own * INPUTS, t, live, rows, INPUTS, 0, HEADS * INPUTS, OP)
        if TURNED:
            w = tl.trans(_block(weight + head * INPUTS * OUTPUTS, cols, rows, OUTPUTS, INPUTS, INPUTS, OP))
        else:
            w = _block(weight + head * INPUTS * OUTPUTS, rows, cols, INPUTS, OUTPUTS, OUTPUTS, OP)
        value = dot_onto(value, a, w, OP, PRECISION)
    if BASE:
        value += _tile(base + own * OUTPUTS, t, live, cols, OUTPUTS, 0, HEADS * OUTPUTS, ACC)
    _put(y + own * OUTPUTS, value, t, live, cols, OUTPUTS, 0, HEADS * OUTPUTS)


@kernel
def heads_weight(
    x, g, out, per, steps,
    HEADS: tl.constexpr, INPUTS: tl.constexpr, BI: tl.constexpr, OUTPUTS: tl.constexpr, BO: tl.constexpr,
    BT: tl.constexpr,
    ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The matrices' gradient, of the part of a group's tokens that a program has: ``[g h parts I OUTPUTS]``."""
    COLUMNS: tl.constexpr = (OUTPUTS + BO - 1) // BO
    head, part, parts = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.num_programs(0)
    group, own = head // HEADS, head % HEADS
    rows, cols = (
        tl.program_id(2) // COLUMNS * BI + tl.arange(0, BI),
        tl.program_id(2) % COLUMNS * BO + tl.arange(0, BO),
    )
    total = tl.zeros([BI, BO], ACC)
    for step in range(steps):
        t = group * per + (part * steps + step).to(tl.int64) * BT + tl.arange(0, BT)
        live = t < (group + 1) * per
        a = _tile(x + own * INPUTS, t, live, rows, INPUTS, 0, HEADS * INPUTS, OP)
        b = _tile(g + own * OUTPUTS, t, live, cols, OUTPUTS, 0, HEADS * OUTPUTS, OP)
        total = dot_onto(total, tl.trans(a), b, OP, PRECISION)
    mask = (rows < INPUTS)[:, None] & (cols < OUTPUTS)[None, :]
    tl.store(
        out + (head * parts + part) * INPUTS * OUTPUTS + rows[:, None] * OUTPUTS + cols[None, :],
        total,
        mask=mask,
    )


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
        a = _tile(x, t, live, some, D, 0, HEADS * D, OP)
        gate = dot_onto(gate, a, _block(up, some, inner, D, COUNT, 2 * COUNT, OP), OP, PRECISION)
        value = dot_onto(value, a, _block(up + COUNT, some, inner, D, COUNT, 2 * COUNT, OP), OP, PRECISION)
    gate, value = SCALE * gate, SCALE * value
    u = activate(gate, False) * value
    shrink = tl.rsqrt(tl.sum(u * u, 1) + UNIT_EPS)[:, None]
    u *= shrink
    y = dot_apart(u, _block(down, inner, cols, COUNT, D, D, OP), go, APART, ACC, OP, PRECISION)
    y += _tile(x, t, live, cols, D, BD, HEADS * D, ACC)
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
    _put(y + own * D, value, t, live, cols, D, BD, HEADS * D)


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
    _put(u_out + own * COUNT, u, t, live, inner, COUNT, BC, HEADS * COUNT)
    g = _tile(g_y + own * D, t, live, cols, D, BD, HEADS * D, ACC)
    g = (g - y * tl.sum(g * y, 1)[:, None]) * other
    _put(g_sum + own * D, g, t, live, cols, D, BD, HEADS * D)
    g_u = dot_apart(g, tl.trans(_block(down, inner, cols, COUNT, D, D, OP)), per, APART, ACC, OP, PRECISION)
    g_u = (g_u - u * tl.sum(g_u * u, 1)[:, None]) * (SCALE * shrink)
    opened, slope = activate_with_slope(gate.to(ACC), False)
    _put(g_z + own * 2 * COUNT, g_u * value.to(ACC) * slope, t, live, inner, COUNT, BC, HEADS * 2 * COUNT)
    _put(g_z + own * 2 * COUNT + COUNT, g_u * opened, t, live, inner, COUNT, BC, HEADS * 2 * COUNT)


@triton.jit
def _halves(z, t, live, cols, COUNT: tl.constexpr, BC: tl.constexpr, SCALE: tl.constexpr, ACC: tl.constexpr):
    gate = _tile(z, t, live, cols, COUNT, BC, 2 * COUNT, ACC)
    return SCALE * gate, SCALE * _tile(z + COUNT, t, live, cols, COUNT, BC, 2 * COUNT, ACC)


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
    _put(u + head * room * COUNT, value, t, t < room, cols, COUNT, BC, COUNT)


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
    g = _tile(g_u + head * n * COUNT, t, t < n, cols, COUNT, BC, COUNT, ACC)
    g = (g - value * tl.sum(g * value, 1)[:, None]) * (SCALE * shrink)
    out = g_z + head * room * 2 * COUNT
    _put(out, g * up * slope, t, t < room, cols, COUNT, BC, 2 * COUNT)
    _put(out + COUNT, g * opened, t, t < room, cols, COUNT, BC, 2 * COUNT)


@kernel
def key_features_added(
    x, added, y, n, HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, ACC: tl.constexpr
):  # fmt: skip
    """x and y stand by tokens, ``[g n h D]``; what is added stands by heads, ``[g h n D]``."""
    head = tl.program_id(1).to(tl.int64)
    t, cols = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT), tl.arange(0, BD)
    place = (head // HEADS * n * HEADS + head % HEADS) * D
    a = _tile(x + place, t, t < n, cols, D, BD, HEADS * D, ACC)
    a += _tile(added + head * n * D, t, t < n, cols, D, BD, D, ACC)
    _put(y + place, a * tl.rsqrt(tl.sum(a * a, 1) + UNIT_EPS)[:, None], t, t < n, cols, D, BD, HEADS * D)


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
    a = _tile(x + place, t, t < n, cols, D, BD, HEADS * D, ACC)
    _put(turned + head * room * D, a, t, t < room, cols, D, BD, D)
    a += _tile(added + head * n * D, t, t < n, cols, D, BD, D, ACC)
    shrink = tl.rsqrt(tl.sum(a * a, 1) + UNIT_EPS)[:, None]
    a *= shrink
    g = _tile(g_y + place, t, t < n, cols, D, BD, HEADS * D, ACC)
    g = (g - a * tl.sum(g * a, 1)[:, None]) * shrink
    _put(g_x + place, g, t, t < n, cols, D, BD, HEADS * D)
    _put(g_sum + head * room * D, g, t, t < room, cols, D, BD, D)
