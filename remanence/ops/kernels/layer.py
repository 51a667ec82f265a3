# mypy: ignore-errors
"""What stands around the memory in its layer, each as one pass over its tensors: what a kernel reads it reads from memory once.

    short_conv_kernel     causal depthwise convolution, SiLU, and unit length per head
    gates_kernel          logits of the input at unit mean square, and their log-sigmoids
    gated_norm_kernel     RMSNorm per head times SiLU of another tensor
    lift_gated            unit features of the products that torch made of unit keys
    lift_added            keys and what torch's products made of their features, added and brought back to length 1

Backward computes again what forward did not write. Sums over tokens (the weights' gradients) are taken per program and added up
by torch: no atomics, so that two runs agree bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from remanence.ops.kernels.tools import activate, activate_with_slope

UNIT_EPS = tl.constexpr(1e-12)
GATE_EPS = tl.constexpr(1e-6)

# One build for every length.
kernel = triton.jit(do_not_specialize=["L", "n", "room", "steps"])


@triton.jit
def _columns(ptr, cols, D: tl.constexpr, BD: tl.constexpr, STEP: tl.constexpr, ACC: tl.constexpr):
    if D != BD:
        return tl.load(ptr + cols * STEP, mask=cols < D, other=0.0).to(ACC)
    else:
        return tl.load(ptr + cols * STEP).to(ACC)


@triton.jit
def _tile(ptr, rows, live, cols, D: tl.constexpr, BD: tl.constexpr, STRIDE: tl.constexpr, ACC: tl.constexpr):
    mask = live[:, None] & (cols < D)[None, :] if D != BD else live[:, None]
    return tl.load(ptr + rows[:, None] * STRIDE + cols[None, :], mask=mask, other=0.0).to(ACC)


@triton.jit
def _put(ptr, x, rows, live, cols, D: tl.constexpr, BD: tl.constexpr, STRIDE: tl.constexpr):
    mask = live[:, None] & (cols < D)[None, :] if D != BD else live[:, None]
    tl.store(ptr + rows[:, None] * STRIDE + cols[None, :], x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _inputs(x, past, at, L, cols, HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, LEAD: tl.constexpr, ACC: tl.constexpr):
    """The tokens `at` of one row and head; those before the first are the last of the past."""
    new = _tile(x, at, (at >= 0) & (at < L), cols, D, BD, HEADS * D, ACC)
    if LEAD > 0:
        return new + _tile(past, at + LEAD, (at < 0) & (at >= -LEAD), cols, D, BD, HEADS * D, ACC)
    else:
        return new


@kernel
def short_conv_kernel(
    x, past, weight, y, L,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, TAPS: tl.constexpr, UNIT: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(0) % HEADS, tl.program_id(1).to(tl.int64)
    t, cols = (tl.program_id(0) // HEADS).to(tl.int64) * BT + tl.arange(0, BT), tl.arange(0, BD)
    base, before = row * L * HEADS * D + head * D, row * (TAPS - 1) * HEADS * D + head * D
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
    x, past, weight, g_y, g_z, g_weight, L, steps,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, TAPS: tl.constexpr, UNIT: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """The convolution's own gradient g_z, and with it the weights'."""
    head, part, row = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS, tl.program_id(1).to(tl.int64)
    cols = tl.arange(0, BD)
    base, before = row * L * HEADS * D + head * D, row * (TAPS - 1) * HEADS * D + head * D
    sums = (tl.zeros([BT, BD], ACC),) * TAPS
    for step in range(steps):
        t = (part * steps + step).to(tl.int64) * BT + tl.arange(0, BT)
        inputs, z = (), tl.zeros([BT, BD], ACC)  # tuples grow by sums: Triton knows no unpacking
        for back in tl.static_range(TAPS):
            w = _columns(weight + head * D * TAPS + TAPS - 1 - back, cols, D, BD, TAPS, ACC)
            inputs = inputs + (_inputs(x + base, past + before, t - back, L, cols, HEADS, D, BD, TAPS - 1, ACC),)  # noqa: RUF005
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
    g_z, weight, g_x, g_past, L,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, TAPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """A token's gradient is of itself and the TAPS - 1 after it; the past's too, which is the first tile's beginning."""
    LEAD: tl.constexpr = TAPS - 1
    head, row = tl.program_id(0) % HEADS, tl.program_id(1).to(tl.int64)
    t, cols = (tl.program_id(0) // HEADS).to(tl.int64) * BT - LEAD + tl.arange(0, BT), tl.arange(0, BD)
    base, before = row * L * HEADS * D + head * D, row * LEAD * HEADS * D + head * D
    g = tl.zeros([BT, BD], ACC)
    for ahead in tl.static_range(TAPS):
        w = _columns(weight + head * D * TAPS + LEAD - ahead, cols, D, BD, TAPS, ACC)
        g += w[None, :] * _tile(g_z + base, t + ahead, (t + ahead >= 0) & (t + ahead < L), cols, D, BD, HEADS * D, ACC)
    _put(g_x + base, g, t, (t >= 0) & (t < L), cols, D, BD, HEADS * D)
    if LEAD > 0:
        _put(g_past + before, g, t + LEAD, t < 0, cols, D, BD, HEADS * D)


@triton.jit
def _log_sigmoid(z, TERMS: tl.constexpr):
    """min(z, 0) - log(1 + exp(-|z|)), the latter from log(1 + u)'s series in u / (2 + u), at most 1/3: a gate that is nearly open
    has a small log, which the chip's own logarithm near 1 would leave few digits of.
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
    x, weight, bias, logs, logits, scales, n,
    GATES: tl.constexpr, HEADS: tl.constexpr, BG: tl.constexpr, DIM: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
    FLIPPED: tl.constexpr, TERMS: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    COUNT: tl.constexpr = GATES * HEADS
    t, gates = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT), tl.arange(0, BG)
    products, squares = tl.zeros([BT, BG], ACC), tl.zeros([BT, BD], ACC)
    for start in range(0, DIM, BD):
        cols = start + tl.arange(0, BD)
        # A tile of columns is whole where DIM is a multiple of it.
        a = _tile(x, t, t < n, cols, DIM, DIM if DIM % BD == 0 else 0, DIM, ACC)
        w = _tile(weight, gates, gates < COUNT, cols, DIM, DIM if DIM % BD == 0 else 0, DIM, ACC)
        products = tl.dot(a, tl.trans(w), products, input_precision=PRECISION, out_dtype=ACC)
        squares += a * a
    scale = tl.rsqrt(tl.sum(squares, 1) / DIM + GATE_EPS)
    logit = products * scale[:, None] + _columns(bias, gates, COUNT, BG, 1, ACC)[None, :]
    tl.store(scales + t, scale, mask=t < n)
    _put(logits, logit, t, t < n, gates, COUNT, BG, COUNT)
    log_gate = _log_sigmoid(logit * _signs(gates // HEADS, FLIPPED, ACC)[None, :], TERMS)
    place = (gates // HEADS).to(tl.int64) * n * HEADS + gates % HEADS
    tl.store(logs + place[None, :] + t[:, None] * HEADS, log_gate, mask=(t < n)[:, None] & (gates < COUNT)[None, :])


@kernel
def gates_slopes(
    g_logs, logits, scales, bias, g_logits, pulls, g_bias, n,
    GATES: tl.constexpr, HEADS: tl.constexpr, BG: tl.constexpr, DIM: tl.constexpr, BT: tl.constexpr,
    FLIPPED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Of the products before they are scaled; and what each token's input loses by being scaled, as a multiple of itself."""
    COUNT: tl.constexpr = GATES * HEADS
    t, gates = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT), tl.arange(0, BG)
    logit = _tile(logits, t, t < n, gates, COUNT, BG, COUNT, ACC)
    scale = tl.load(scales + t, mask=t < n, other=0.0)
    place = (gates // HEADS).to(tl.int64) * n * HEADS + gates % HEADS
    mask = (t < n)[:, None] & (gates < COUNT)[None, :]
    g = tl.load(g_logs + place[None, :] + t[:, None] * HEADS, mask=mask, other=0.0)
    signs = _signs(gates // HEADS, FLIPPED, ACC)[None, :]
    g = signs * g / (1.0 + tl.exp(signs * logit))
    product = tl.where(mask, logit - _columns(bias, gates, COUNT, BG, 1, ACC)[None, :], 0.0)
    tl.store(g_bias + tl.program_id(0) * COUNT + gates, tl.sum(g, 0), mask=gates < COUNT)
    tl.store(pulls + t, tl.sum(g * product, 1) * scale * scale / DIM, mask=t < n)
    _put(g_logits, g * scale[:, None], t, t < n, gates, COUNT, BG, COUNT)


@kernel
def gates_backward(
    x, weight, g_logits, pulls, g_x, g_weight, n, steps,
    COUNT: tl.constexpr, BG: tl.constexpr, DIM: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (DIM + BD - 1) // BD
    EVEN: tl.constexpr = DIM if DIM % BD == 0 else 0
    block, part = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    cols, gates = block * BD + tl.arange(0, BD), tl.arange(0, BG)
    w = _tile(weight, gates, gates < COUNT, cols, DIM, EVEN, DIM, ACC)
    g_w = tl.zeros([BG, BD], ACC)
    for step in range(steps):
        t = (part * steps + step).to(tl.int64) * BT + tl.arange(0, BT)
        a = _tile(x, t, t < n, cols, DIM, EVEN, DIM, ACC)
        g = _tile(g_logits, t, t < n, gates, COUNT, BG, COUNT, ACC)
        pull = tl.load(pulls + t, mask=t < n, other=0.0)
        g_a = tl.dot(g, w, input_precision=PRECISION, out_dtype=ACC) - a * pull[:, None]
        _put(g_x, g_a, t, t < n, cols, DIM, EVEN, DIM)
        g_w = tl.dot(tl.trans(g), a, g_w, input_precision=PRECISION, out_dtype=ACC)
    _put(g_weight + part.to(tl.int64) * COUNT * DIM, g_w, gates, gates < COUNT, cols, DIM, EVEN, DIM)


@kernel
def gated_norm_kernel(
    x, gate, weight, y, n, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr
):
    t, cols = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT), tl.arange(0, BD)
    a = _tile(x, t, t < n, cols, D, BD, D, ACC)
    a *= tl.rsqrt(tl.sum(a * a, 1) / D + EPS)[:, None]
    opened = activate(_tile(gate, t, t < n, cols, D, BD, D, ACC), False)
    _put(y, a * _columns(weight, cols, D, BD, 1, ACC)[None, :] * opened, t, t < n, cols, D, BD, D)


@kernel
def gated_norm_backward(
    x, gate, weight, g_y, g_x, g_gate, g_weight, n, steps,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BD)
    w = _columns(weight, cols, D, BD, 1, ACC)[None, :]
    sums = tl.zeros([BT, BD], ACC)
    for step in range(steps):
        t = (tl.program_id(0) * steps + step).to(tl.int64) * BT + tl.arange(0, BT)
        a = _tile(x, t, t < n, cols, D, BD, D, ACC)
        g = _tile(g_y, t, t < n, cols, D, BD, D, ACC)
        opened, slope = activate_with_slope(_tile(gate, t, t < n, cols, D, BD, D, ACC), False)
        shrink = tl.rsqrt(tl.sum(a * a, 1) / D + EPS)[:, None]
        a *= shrink
        _put(g_gate, g * a * w * slope, t, t < n, cols, D, BD, D)
        g *= opened
        sums += g * a
        g *= w
        _put(g_x, (g - a * (tl.sum(g * a, 1) / D)[:, None]) * shrink, t, t < n, cols, D, BD, D)
    tl.store(g_weight + tl.program_id(0).to(tl.int64) * D + cols, tl.sum(sums, 0), mask=cols < D)


@triton.jit
def _halves(z, t, live, cols, COUNT: tl.constexpr, BC: tl.constexpr, SCALE: tl.constexpr, ACC: tl.constexpr):
    gate = _tile(z, t, live, cols, COUNT, BC, 2 * COUNT, ACC)
    return SCALE * gate, SCALE * _tile(z + COUNT, t, live, cols, COUNT, BC, 2 * COUNT, ACC)


@kernel
def lift_gated(
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
def lift_gated_backward(
    z, g_u, g_z, n, room, COUNT: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr, SCALE: tl.constexpr, ACC: tl.constexpr
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
def lift_added(
    x, added, y, n, HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, ACC: tl.constexpr
):  # fmt: skip
    """x and y stand by tokens, ``[n h D]``; what is added stands by heads."""
    head = tl.program_id(1).to(tl.int64)
    t, cols = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT), tl.arange(0, BD)
    a = _tile(x + head * D, t, t < n, cols, D, BD, HEADS * D, ACC)
    a += _tile(added + head * n * D, t, t < n, cols, D, BD, D, ACC)
    _put(y + head * D, a * tl.rsqrt(tl.sum(a * a, 1) + UNIT_EPS)[:, None], t, t < n, cols, D, BD, HEADS * D)


@kernel
def lift_added_backward(
    g_y, x, added, g_x, g_sum, turned, n, room,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The sum's gradient by tokens, where the key's is added up, and by heads; and x by heads, too: with room, for products over
    parts of the tokens.
    """
    head = tl.program_id(1).to(tl.int64)
    t, cols = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT), tl.arange(0, BD)
    a = _tile(x + head * D, t, t < n, cols, D, BD, HEADS * D, ACC)
    _put(turned + head * room * D, a, t, t < room, cols, D, BD, D)
    a += _tile(added + head * n * D, t, t < n, cols, D, BD, D, ACC)
    shrink = tl.rsqrt(tl.sum(a * a, 1) + UNIT_EPS)[:, None]
    a *= shrink
    g = _tile(g_y + head * D, t, t < n, cols, D, BD, HEADS * D, ACC)
    g = (g - a * tl.sum(g * a, 1)[:, None]) * shrink
    _put(g_x + head * D, g, t, t < n, cols, D, BD, HEADS * D)
    _put(g_sum + head * room * D, g, t, t < room, cols, D, BD, D)
