# mypy: ignore-errors
"""The closed form of a two-layer memory as Triton kernels: x + LN(act(x W1) W2), or without the LayerNorm.

One chunk's tokens are a tile of C rows; a program is one (row, head), or one of its chunks. Letters as in closed_form.py:

    coef_kernel       gates -> P, (a, r, c, s), fold                       every chunk at once
    state_kernel      W, S over the chunks, keys only; D2, surprise        one program per (row, head), state in registers
    state_stream      the same, state in blocks of the hidden axis through L2
    read_kernel       the answers, from the states at the chunks' starts   every chunk at once
    read_backward     gradients of q, a, r and half of P; what reading adds to the gradients of the state and of the keys' X2
    blend_backward    the other half of P; what reading adds to the gradients of k and of the keys' D
    carry_kernel      the state's gradient, backwards over the chunks      one program per (row, head); carry_stream likewise
    keys_backward     gradients of k, c, s and fold, given the gradient of every chunk's end state
    coef_backward     gradients of the gates

What is linear stays split: what reading contributes (parallel) and what comes from later chunks (sequential) are added up in
`carry_kernel`, so that nothing but the state's own recurrence waits. Operands of products have the inputs' dtype (OP), sums and
the state are float32 (float64 under the interpreter, where the algebra is tested).
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

# The interpreter multiplies bfloat16's raw bits, so it gets float32 operands there.
LIFT = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
EPS = tl.constexpr(1e-5)
LARGE = tl.constexpr(1e12)
DENSITY = tl.constexpr(0.3989422804014327)
ROOT_HALF = tl.constexpr(0.7071067811865476)

# One build for every length and number of heads.
_kernel = triton.jit(do_not_specialize=["L", "n", "HEADS"])


@triton.jit
def _dot(a, b, OP: tl.constexpr, PRECISION: tl.constexpr):
    a, b = a.to(OP), b.to(OP)
    if LIFT and tl.bfloat16 == OP:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _dot_apart(a, b, go, APART: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr):
    """`_dot`, go being above 0. With APART, in a loop of one round: Triton gives products that lead to others to the warps row by
    row, so that eight warps hold a tile of 64 rows twice over, and computes what led to an operand again in its layout. It does
    neither across a loop of unknown length (nor does it fetch the next round's operands early around one).
    """
    if APART:
        x = tl.zeros([a.shape[0], b.shape[1]], ACC)
        while go > 0:
            x = _dot(a, b, OP, PRECISION)
            go = -go
        return x
    else:
        return _dot(a, b, OP, PRECISION)


@triton.jit
def _activate(z, GELU: tl.constexpr):
    if GELU:
        return z * (0.5 * tl.erf(z * ROOT_HALF) + 0.5)
    else:
        return z / (1.0 + tl.exp(-z))


@triton.jit
def _activate_with_slope(z, GELU: tl.constexpr):
    if GELU:
        below = 0.5 * tl.erf(z * ROOT_HALF) + 0.5
        return z * below, below + z * tl.exp(-0.5 * z * z) * DENSITY
    else:
        gate = 1.0 / (1.0 + tl.exp(-z))
        return z * gate, gate + z * gate * (1.0 - gate)


@triton.jit
def _derivatives(z, GELU: tl.constexpr):
    """act, act', act''."""
    if GELU:
        below = 0.5 * tl.erf(z * ROOT_HALF) + 0.5
        density = tl.exp(-0.5 * z * z) * DENSITY
        return z * below, below + z * density, density * (2.0 - z * z)
    else:
        gate = 1.0 / (1.0 + tl.exp(-z))
        slope = gate * (1.0 - gate)
        return z * gate, gate + z * slope, slope * (2.0 + z * (1.0 - 2.0 * gate))


@triton.jit
def _norm(x, D: tl.constexpr, BD: tl.constexpr):
    """LayerNorm without gain: value, and 1 / deviation (of the row before it was shrunk into float32's squares)."""
    shrink = tl.minimum(LARGE / tl.max(tl.abs(x), 1), 1.0)
    x = x * shrink[:, None]
    x = x - (tl.sum(x, 1) / D)[:, None]
    if D != BD:
        x = tl.where((tl.arange(0, BD) < D)[None, :], x, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + EPS)
    return x * rstd[:, None], rstd * shrink


@triton.jit
def _pull(g, value, rstd, D: tl.constexpr, BD: tl.constexpr):
    """LayerNorm's backward."""
    g = g - (tl.sum(g, 1) / D)[:, None] - value * (tl.sum(g * value, 1) / D)[:, None]
    if D != BD:
        g = tl.where((tl.arange(0, BD) < D)[None, :], g, 0.0)
    return g * rstd[:, None]


@triton.jit
def _load(ptr, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr):
    at = ptr + rows[:, None] * COLS + cols[None, :]
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=(rows < ROWS)[:, None] & (cols < COLS)[None, :], other=0.0)


@triton.jit
def _store(ptr, x, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr):
    at = ptr + rows[:, None] * COLS + cols[None, :]
    if EVEN:
        tl.store(at, x.to(ptr.dtype.element_ty))
    else:
        tl.store(at, x.to(ptr.dtype.element_ty), mask=(rows < ROWS)[:, None] & (cols < COLS)[None, :])


@triton.jit
def _tokens(m, i, L, HEADS, CHUNK: tl.constexpr, BC: tl.constexpr):
    """Where the chunk's tokens stand in ``[r L heads]``, and which of the tile's rows are tokens."""
    t = tl.arange(0, BC)
    token = i * CHUNK + t
    return ((m // HEADS).to(tl.int64) * L + token) * HEADS + m % HEADS, (t < CHUNK) & (token < L)


@triton.jit
def _load_tokens(ptr, at, live, D: tl.constexpr, BD: tl.constexpr):
    cols = tl.arange(0, BD)
    return tl.load(ptr + at[:, None] * D + cols[None, :], mask=live[:, None] & (cols < D)[None, :], other=0.0)


@triton.jit
def _store_tokens(ptr, x, at, live, D: tl.constexpr, BD: tl.constexpr):
    cols = tl.arange(0, BD)
    tl.store(ptr + at[:, None] * D + cols[None, :], x.to(ptr.dtype.element_ty), mask=live[:, None] & (cols < D)[None, :])


# ---------------------------------------------------------------------------------------------------------- coefficients


@triton.jit
def _products(log_gate, BC: tl.constexpr):
    """``[j t]``: the product of the gates over (j, t], 0 for t < j."""
    t = tl.arange(0, BC)
    later = t[None, :] > t[:, None]
    products = tl.cumprod(tl.where(later, tl.exp(log_gate)[None, :], 1.0), 1)
    return tl.where(t[None, :] >= t[:, None], products, 0.0)


@triton.jit
def _products_backward(g, products, BC: tl.constexpr):
    """The logs' gradient: a product over (j, t] changes with each of its logs by itself."""
    t = tl.arange(0, BC)
    changed = tl.cumsum(g * products, 1, reverse=True)
    return tl.sum(tl.where(t[None, :] > t[:, None], changed, 0.0), 0)


@_kernel
def coef_kernel(
    log_step, log_momentum, log_keep, totals, P, co, fold, L, n, HEADS,
    CHUNK: tl.constexpr, BC: tl.constexpr, MOMENTUM: tl.constexpr, FORGET: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i, m = tl.program_id(0), tl.program_id(1)
    t = tl.arange(0, BC)
    at, live = _tokens(m, i, L, HEADS, CHUNK, BC)
    complete = (i + 1) * CHUNK <= tl.load(totals + m // HEADS)
    theta = tl.where(live, tl.exp(tl.load(log_step + at, mask=live, other=0.0)), 0.0)
    later = t[None, :] >= t[:, None]
    kept = tl.where(later, 1.0, 0.0).to(ACC)
    a = tl.full([BC], 1.0, ACC)
    if FORGET:
        keep = tl.load(log_keep + at, mask=live, other=0.0)
        kept = _products(keep, BC)
        a = tl.exp(tl.cumsum(keep, 0))
    if MOMENTUM:
        eta = tl.load(log_momentum + at, mask=live, other=0.0)
        moved = _products(eta, BC)
        past = tl.exp(tl.cumsum(eta, 0))
        r = tl.sum(kept * past[:, None], 0)
        mix = tl.dot(moved, kept, input_precision=PRECISION) * theta[:, None]
    else:
        mix = kept * theta[:, None]
    base = m.to(tl.int64) * n + i
    tl.store(P + base * BC * BC + t[None, :] * BC + t[:, None], mix.to(P.dtype.element_ty))
    last = t == CHUNK - 1
    whole = tl.where(complete, 1.0, 0.0).to(ACC)
    tl.store(co + base * 4 * BC + t, a)
    tl.store(co + base * 4 * BC + 2 * BC + t, tl.sum(tl.where(last[None, :], mix, 0.0), 1) * whole)
    tl.store(fold + base * 4, tl.where(complete, tl.sum(tl.where(last, a, 0.0)), 1.0))
    tl.store(fold + base * 4 + 3, 0.0)
    if MOMENTUM:
        tl.store(co + base * 4 * BC + BC + t, r)
        tl.store(co + base * 4 * BC + 3 * BC + t, tl.sum(tl.where(last[None, :], moved, 0.0), 1) * theta * whole)
        tl.store(fold + base * 4 + 1, tl.sum(tl.where(last, r, 0.0)) * whole)
        tl.store(fold + base * 4 + 2, tl.where(complete, tl.sum(tl.where(last, past, 0.0)), 1.0))


@_kernel
def coef_backward(
    log_step, log_momentum, log_keep, totals, g_P, g_co, g_fold, g_step, g_momentum, g_keep, L, n, HEADS,
    CHUNK: tl.constexpr, BC: tl.constexpr, MOMENTUM: tl.constexpr, FORGET: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i, m = tl.program_id(0), tl.program_id(1)
    t = tl.arange(0, BC)
    at, live = _tokens(m, i, L, HEADS, CHUNK, BC)
    complete = (i + 1) * CHUNK <= tl.load(totals + m // HEADS)
    whole = tl.where(complete, 1.0, 0.0).to(ACC)
    last = t == CHUNK - 1
    base = m.to(tl.int64) * n + i
    theta = tl.where(live, tl.exp(tl.load(log_step + at, mask=live, other=0.0)), 0.0)
    later = t[None, :] >= t[:, None]
    g_mix = tl.load(g_P + base * BC * BC + t[None, :] * BC + t[:, None]).to(ACC)  # [j t], like every product here
    g_c = tl.load(g_co + base * 4 * BC + 2 * BC + t) * whole
    g_mix = tl.where(later, g_mix + tl.where(last[None, :], g_c[:, None], 0.0), 0.0)
    g_a = tl.load(g_co + base * 4 * BC + t) + tl.where(last, tl.load(g_fold + base * 4) * whole, 0.0)
    kept = tl.where(later, 1.0, 0.0).to(ACC)
    if FORGET:
        keep = tl.load(log_keep + at, mask=live, other=0.0)
        kept = _products(keep, BC)
    if MOMENTUM:
        eta = tl.load(log_momentum + at, mask=live, other=0.0)
        moved = _products(eta, BC)
        past = tl.exp(tl.cumsum(eta, 0))
        g_theta = tl.sum(g_mix * tl.dot(moved, kept, input_precision=PRECISION), 1)
        g_mix = g_mix * theta[:, None]
        g_r = tl.load(g_co + base * 4 * BC + BC + t) + tl.where(last, tl.load(g_fold + base * 4 + 1) * whole, 0.0)
        g_s = tl.load(g_co + base * 4 * BC + 3 * BC + t) * whole
        g_theta += g_s * tl.sum(tl.where(last[None, :], moved, 0.0), 1)
        g_moved = tl.dot(g_mix, tl.trans(kept), input_precision=PRECISION) + tl.where(last[None, :], (g_s * theta)[:, None], 0.0)
        g_past = tl.sum(kept * g_r[None, :], 1) + tl.where(last, tl.load(g_fold + base * 4 + 2) * whole, 0.0)
        g_eta = _products_backward(g_moved, moved, BC) + tl.cumsum(g_past * past, 0, reverse=True)
        tl.store(g_momentum + at, g_eta, mask=live)
        g_kept = tl.dot(tl.trans(moved), g_mix, input_precision=PRECISION) + past[:, None] * g_r[None, :]
    else:
        g_theta = tl.sum(g_mix * kept, 1)
        g_kept = g_mix * theta[:, None]
    tl.store(g_step + at, g_theta * theta, mask=live)
    if FORGET:
        a = tl.exp(tl.cumsum(keep, 0))
        tl.store(g_keep + at, _products_backward(g_kept, kept, BC) + tl.cumsum(g_a * a, 0, reverse=True), mask=live)


# ------------------------------------------------------------------------------------------------------- state, forward


@triton.jit
def _error(
    out, K, k, v, at, live, errors, values, rstds, surprise,
    D: tl.constexpr, BD: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, TRAIN: tl.constexpr,
):  # fmt: skip
    """From Z_2 to D2, with the surprise and what backward needs written on the way."""
    value = out
    if NORM:
        value, rstd = _norm(out, D, BD)
        if TRAIN:
            _store_tokens(values, value, at, live, D, BD)
            tl.store(rstds + at, rstd, mask=live)
    slope = value - _load_tokens(v, at, live, D, BD)
    if RESIDUAL:
        slope += K
    tl.store(surprise + at, 0.5 * tl.sum(slope * slope, 1), mask=live)
    D2 = slope
    if NORM:
        D2 = _pull(slope, value, rstd, D, BD)
    _store_tokens(errors, D2, at, live, D, BD)
    return D2


@_kernel
def state_kernel(
    k, v, J1, J2, end1, end2, starts1, starts2, co, fold, errors, values, rstds, surprise, L, n, HEADS,
    D: tl.constexpr, BD: tl.constexpr, HIDDEN: tl.constexpr, BH: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
    MOMENTUM: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, GELU: tl.constexpr, TRAIN: tl.constexpr,
    APART: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64)
    d, f, t = tl.arange(0, BD), tl.arange(0, BH), tl.arange(0, BC)
    PARTS: tl.constexpr = 2 if MOMENTUM else 1
    SIZE: tl.constexpr = D * HIDDEN
    EVEN: tl.constexpr = (D == BD) and (HIDDEN == BH)
    W1 = _load(J1 + m * PARTS * SIZE, d, f, D, HIDDEN, EVEN)
    W2 = _load(J2 + m * PARTS * SIZE, f, d, HIDDEN, D, EVEN)
    if MOMENTUM:
        S1 = _load(J1 + (m * PARTS + 1) * SIZE, d, f, D, HIDDEN, EVEN)
        S2 = _load(J2 + (m * PARTS + 1) * SIZE, f, d, HIDDEN, D, EVEN)
    for i in range(n):
        base = m * n + i
        at, live = _tokens(m, i, L, HEADS, CHUNK, BC)
        K = _load_tokens(k, at, live, D, BD)
        _store(starts1 + base * PARTS * SIZE, W1, d, f, D, HIDDEN, EVEN)
        _store(starts2 + base * PARTS * SIZE, W2, f, d, HIDDEN, D, EVEN)
        if MOMENTUM:
            _store(starts1 + (base * PARTS + 1) * SIZE, S1, d, f, D, HIDDEN, EVEN)
            _store(starts2 + (base * PARTS + 1) * SIZE, S2, f, d, HIDDEN, D, EVEN)
        H, slope = _activate_with_slope(_dot_apart(K, W1, n, APART, ACC, OP, PRECISION), GELU)
        H, slope = H.to(OP), slope.to(OP)
        out = _dot_apart(H, W2, n, APART, ACC, OP, PRECISION)
        D2 = _error(out, K, k, v, at, live, errors, values, rstds, surprise, D, BD, NORM, RESIDUAL, TRAIN)
        D1 = _dot_apart(D2, tl.trans(W2.to(OP)), n, APART, ACC, OP, PRECISION) * slope
        c = tl.load(co + base * 4 * BC + 2 * BC + t)[:, None]
        keep = tl.load(fold + base * 4)
        Kt, Ht = tl.trans(K), tl.trans(H)
        W1 = keep * W1 - _dot(Kt, c * D1, OP, PRECISION)
        W2 = keep * W2 - _dot(Ht, c * D2, OP, PRECISION)
        if MOMENTUM:
            s = tl.load(co + base * 4 * BC + 3 * BC + t)[:, None]
            carry, past = tl.load(fold + base * 4 + 1), tl.load(fold + base * 4 + 2)
            W1 += carry * S1
            W2 += carry * S2
            S1 = past * S1 - _dot(Kt, s * D1, OP, PRECISION)
            S2 = past * S2 - _dot(Ht, s * D2, OP, PRECISION)
    _store(end1 + m * PARTS * SIZE, W1, d, f, D, HIDDEN, EVEN)
    _store(end2 + m * PARTS * SIZE, W2, f, d, HIDDEN, D, EVEN)
    if MOMENTUM:
        _store(end1 + (m * PARTS + 1) * SIZE, S1, d, f, D, HIDDEN, EVEN)
        _store(end2 + (m * PARTS + 1) * SIZE, S2, f, d, HIDDEN, D, EVEN)


@_kernel
def state_stream(
    k, v, J1, J2, end1, end2, starts1, starts2, co, fold, errors, values, rstds, surprise, L, n, HEADS,
    D: tl.constexpr, BD: tl.constexpr, HIDDEN: tl.constexpr, BH: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
    MOMENTUM: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, GELU: tl.constexpr, TRAIN: tl.constexpr,
    APART: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`end` holds the state while it changes. One pass over it per chunk: a block folded is read by the next chunk at once."""
    m = tl.program_id(0).to(tl.int64)
    d, t = tl.arange(0, BD), tl.arange(0, BC)
    PARTS: tl.constexpr = 2 if MOMENTUM else 1
    SIZE: tl.constexpr = D * HIDDEN
    BLOCKS: tl.constexpr = (HIDDEN + BH - 1) // BH
    EVEN: tl.constexpr = (D == BD) and (HIDDEN == BH * BLOCKS)
    J1 += m * PARTS * SIZE
    J2 += m * PARTS * SIZE
    end1 += m * PARTS * SIZE
    end2 += m * PARTS * SIZE
    at, live = _tokens(m, 0, L, HEADS, CHUNK, BC)
    K = _load_tokens(k, at, live, D, BD)
    out = tl.zeros([BC, BD], ACC)
    starts1 += m * n * PARTS * SIZE
    starts2 += m * n * PARTS * SIZE
    for j in tl.range(BLOCKS, num_stages=1):
        f = j * BH + tl.arange(0, BH)
        W1 = _load(J1, d, f, D, HIDDEN, EVEN)
        W2 = _load(J2, f, d, HIDDEN, D, EVEN)
        _store(end1, W1, d, f, D, HIDDEN, EVEN)
        _store(end2, W2, f, d, HIDDEN, D, EVEN)
        _store(starts1, W1, d, f, D, HIDDEN, EVEN)
        _store(starts2, W2, f, d, HIDDEN, D, EVEN)
        if MOMENTUM:
            S1 = _load(J1 + SIZE, d, f, D, HIDDEN, EVEN)
            S2 = _load(J2 + SIZE, f, d, HIDDEN, D, EVEN)
            _store(end1 + SIZE, S1, d, f, D, HIDDEN, EVEN)
            _store(end2 + SIZE, S2, f, d, HIDDEN, D, EVEN)
            _store(starts1 + SIZE, S1, d, f, D, HIDDEN, EVEN)
            _store(starts2 + SIZE, S2, f, d, HIDDEN, D, EVEN)
        out += _dot(_activate(_dot(K, W1, OP, PRECISION), GELU), W2, OP, PRECISION)
    for i in tl.range(n, num_stages=1):
        tl.debug_barrier()  # the blocks below are read back by other threads than wrote them
        base = m * n + i
        starts1 += PARTS * SIZE
        starts2 += PARTS * SIZE
        D2 = _error(out, K, k, v, at, live, errors, values, rstds, surprise, D, BD, NORM, RESIDUAL, TRAIN)
        c = tl.load(co + base * 4 * BC + 2 * BC + t)[:, None]
        keep = tl.load(fold + base * 4)
        if MOMENTUM:
            s = tl.load(co + base * 4 * BC + 3 * BC + t)[:, None]
            carry, past = tl.load(fold + base * 4 + 1), tl.load(fold + base * 4 + 2)
        Kt = tl.trans(K)
        more = i + 1 < n
        at, live = _tokens(m, i + 1, L, HEADS, CHUNK, BC)
        live = live & more
        K_next = _load_tokens(k, at, live, D, BD)
        out = tl.zeros([BC, BD], ACC)
        for j in tl.range(BLOCKS, num_stages=1):
            f = j * BH + tl.arange(0, BH)
            W1 = _load(end1, d, f, D, HIDDEN, EVEN)
            W2 = _load(end2, f, d, HIDDEN, D, EVEN)
            H, slope = _activate_with_slope(_dot_apart(K, W1, n, APART, ACC, OP, PRECISION), GELU)
            H, slope = H.to(OP), slope.to(OP)
            D1 = _dot_apart(D2, tl.trans(W2.to(OP)), n, APART, ACC, OP, PRECISION) * slope
            Ht = tl.trans(H)
            W1 = keep * W1 - _dot_apart(Kt, c * D1, n, APART, ACC, OP, PRECISION)
            W2 = keep * W2 - _dot_apart(Ht, c * D2, n, APART, ACC, OP, PRECISION)
            if MOMENTUM:
                S1 = _load(end1 + SIZE, d, f, D, HIDDEN, EVEN)
                S2 = _load(end2 + SIZE, f, d, HIDDEN, D, EVEN)
                W1 += carry * S1
                W2 += carry * S2
                S1 = past * S1 - _dot_apart(Kt, s * D1, n, APART, ACC, OP, PRECISION)
                S2 = past * S2 - _dot_apart(Ht, s * D2, n, APART, ACC, OP, PRECISION)
                _store(end1 + SIZE, S1, d, f, D, HIDDEN, EVEN)
                _store(end2 + SIZE, S2, f, d, HIDDEN, D, EVEN)
                if more:
                    _store(starts1 + SIZE, S1, d, f, D, HIDDEN, EVEN)
                    _store(starts2 + SIZE, S2, f, d, HIDDEN, D, EVEN)
            _store(end1, W1, d, f, D, HIDDEN, EVEN)
            _store(end2, W2, f, d, HIDDEN, D, EVEN)
            if more:
                _store(starts1, W1, d, f, D, HIDDEN, EVEN)
                _store(starts2, W2, f, d, HIDDEN, D, EVEN)
            out += _dot(_activate(_dot_apart(K_next, W1, n, APART, ACC, OP, PRECISION), GELU), W2, OP, PRECISION)
        K = K_next


# -------------------------------------------------------------------------------------------------------- read, forward


@_kernel
def read_kernel(
    q, k, starts1, starts2, P, co, errors, hiddens, slopes, firsts, bends, reads, scores, answers, spreads, y, bad, L, n, HEADS,
    D: tl.constexpr, BD: tl.constexpr, HIDDEN: tl.constexpr, BH: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
    MOMENTUM: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, GELU: tl.constexpr, TRAIN: tl.constexpr,
    APART: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What backward needs of the keys and of the queries is kept, rounded as the products here see it: X2 = act(Z_1) (hiddens),
    act'(Z_1) (slopes), D1 (firsts), act''(Z_1) D2 W2^T (bends); the queries' Z_1 (reads), A X2^T, LayerNorm's value and scale.
    """
    i, m = tl.program_id(0), tl.program_id(1)
    base = m.to(tl.int64) * n + i
    d, t = tl.arange(0, BD), tl.arange(0, BC)
    PARTS: tl.constexpr = 2 if MOMENTUM else 1
    SIZE: tl.constexpr = D * HIDDEN
    BLOCKS: tl.constexpr = (HIDDEN + BH - 1) // BH
    EVEN: tl.constexpr = (D == BD) and (HIDDEN == BH * BLOCKS)
    starts1 += base * PARTS * SIZE
    starts2 += base * PARTS * SIZE
    at, live = _tokens(m, i, L, HEADS, CHUNK, BC)
    Q, K = _load_tokens(q, at, live, D, BD), _load_tokens(k, at, live, D, BD)
    D2 = _load_tokens(errors, at, live, D, BD)
    a = tl.load(co + base * 4 * BC + t)[:, None]
    if MOMENTUM:
        r = tl.load(co + base * 4 * BC + BC + t)[:, None]
    square = base * BC * BC + t[:, None] * BC + t[None, :]
    blend = (_dot(Q, tl.trans(K), OP, PRECISION) * tl.load(P + square)).to(OP)
    met = tl.zeros([BC, BC], ACC)
    out = tl.zeros([BC, BD], ACC)
    for j in tl.range(BLOCKS, num_stages=1):
        f = j * BH + tl.arange(0, BH)
        W1 = _load(starts1, d, f, D, HIDDEN, EVEN)
        W2 = _load(starts2, f, d, HIDDEN, D, EVEN)
        back = _dot_apart(D2, tl.trans(W2), n, APART, ACC, OP, PRECISION)
        if TRAIN:
            H, slope, bend = _derivatives(_dot_apart(K, W1, n, APART, ACC, OP, PRECISION), GELU)
            _store(bends + base * BC * HIDDEN, back * bend, t, f, BC, HIDDEN, EVEN)
            _store(slopes + base * BC * HIDDEN, slope, t, f, BC, HIDDEN, EVEN)
        else:
            H, slope = _activate_with_slope(_dot_apart(K, W1, n, APART, ACC, OP, PRECISION), GELU)
        H, D1 = H.to(OP), (back * slope).to(OP)
        if TRAIN:
            _store(hiddens + base * BC * HIDDEN, H, t, f, BC, HIDDEN, EVEN)
            _store(firsts + base * BC * HIDDEN, D1, t, f, BC, HIDDEN, EVEN)
        Z = a * _dot_apart(Q, W1, n, APART, ACC, OP, PRECISION) - _dot_apart(blend, D1, n, APART, ACC, OP, PRECISION)
        if MOMENTUM:
            Z += r * _dot_apart(Q, _load(starts1 + SIZE, d, f, D, HIDDEN, EVEN), n, APART, ACC, OP, PRECISION)
        if TRAIN:
            _store(reads + base * BC * HIDDEN, Z, t, f, BC, HIDDEN, EVEN)
        A = _activate(Z, GELU)
        met += _dot(A, tl.trans(H), OP, PRECISION)
        out += _dot(a * A, W2, OP, PRECISION)
        if MOMENTUM:
            out += _dot(r * A, _load(starts2 + SIZE, f, d, HIDDEN, D, EVEN), OP, PRECISION)
    if TRAIN:
        tl.store(scores + square, met.to(scores.dtype.element_ty))
    out -= _dot(met * tl.load(P + square), D2, OP, PRECISION)
    if NORM:
        out, rstd = _norm(out, D, BD)
        if TRAIN:
            _store_tokens(answers, out, at, live, D, BD)
            tl.store(spreads + at, rstd, mask=live)
    if RESIDUAL:
        out += Q
    _store_tokens(y, out, at, live, D, BD)
    wrong = tl.where(live[:, None] & ~(tl.abs(out) < float("inf")), 1, 0)
    tl.store(bad + base, tl.max(tl.max(wrong, 1), 0))


# ------------------------------------------------------------------------------------------------------------- backward


@_kernel
def read_backward(
    q, starts1, starts2, P, co, errors, hiddens, reads, scores, answers, spreads, g_y, g_surprise,
    g_q, g_P, g_co, g_X2, g_Z, g_D2, g_J1, g_J2, came, L, n, HEADS,
    D: tl.constexpr, BD: tl.constexpr, HIDDEN: tl.constexpr, BH: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
    MOMENTUM: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, GELU: tl.constexpr,
    APART: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The queries' way back, to Z_1's gradient and through the state; g_q, g_P and g_D2 without layer 1's masked product."""
    i, m = tl.program_id(0), tl.program_id(1)
    base = m.to(tl.int64) * n + i
    d, t = tl.arange(0, BD), tl.arange(0, BC)
    PARTS: tl.constexpr = 2 if MOMENTUM else 1
    SIZE: tl.constexpr = D * HIDDEN
    BLOCKS: tl.constexpr = (HIDDEN + BH - 1) // BH
    EVEN: tl.constexpr = (D == BD) and (HIDDEN == BH * BLOCKS)
    starts1 += base * PARTS * SIZE
    starts2 += base * PARTS * SIZE
    g_J1 += base * PARTS * SIZE
    g_J2 += base * PARTS * SIZE
    at, live = _tokens(m, i, L, HEADS, CHUNK, BC)
    a = tl.load(co + base * 4 * BC + t)[:, None]
    if MOMENTUM:
        r = tl.load(co + base * 4 * BC + BC + t)[:, None]
    g_out = _load_tokens(g_y, at, live, D, BD).to(ACC)
    g_s = tl.load(g_surprise + at, mask=live, other=0.0)
    Q = _load_tokens(q, at, live, D, BD)
    reach = tl.maximum(tl.max(tl.max(tl.abs(Q).to(ACC), 1), 0), 1.0)
    tl.store(came + base, tl.sum(tl.sum(tl.abs(g_out), 1), 0) * reach + tl.sum(tl.abs(g_s), 0))
    if NORM:
        rstd = tl.load(spreads + at, mask=live, other=0.0)
        g_out = _pull(g_out, _load_tokens(answers, at, live, D, BD).to(ACC), rstd, D, BD)
    g_O = g_out.to(OP)
    # Layer 2's masked product: -[(A X^T) P] D2.
    square = base * BC * BC + t[:, None] * BC + t[None, :]
    mix, met = tl.load(P + square).to(ACC), tl.load(scores + square).to(ACC)
    g_error = -_dot(tl.trans((met * mix).to(OP)), g_O, OP, PRECISION)
    _store_tokens(g_D2, g_error, at, live, D, BD)
    g_blend = -_dot(g_O, tl.trans(_load_tokens(errors, at, live, D, BD)), OP, PRECISION)
    tl.store(g_P + square, (g_blend * met).to(g_P.dtype.element_ty))
    g_scores = (g_blend * mix).to(OP)
    g_query = tl.zeros([BC, BD], ACC)
    if RESIDUAL:
        g_query += _load_tokens(g_y, at, live, D, BD)
    g_a = tl.zeros([BC], ACC)
    g_r = tl.zeros([BC], ACC)
    for j in tl.range(BLOCKS, num_stages=1):
        f = j * BH + tl.arange(0, BH)
        H = _load(hiddens + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)
        A, slope = _activate_with_slope(_load(reads + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN).to(ACC), GELU)
        _store(g_X2 + base * BC * HIDDEN, _dot_apart(tl.trans(g_scores), A, n, APART, ACC, OP, PRECISION), t, f, BC, HIDDEN, EVEN)
        _store(g_J2, _dot_apart(tl.trans((a * A).to(OP)), g_O, n, APART, ACC, OP, PRECISION), f, d, HIDDEN, D, EVEN)
        g_first = _dot_apart(g_scores, H, n, APART, ACC, OP, PRECISION)
        back = _dot_apart(g_O, tl.trans(_load(starts2, f, d, HIDDEN, D, EVEN)), n, APART, ACC, OP, PRECISION)
        g_a += tl.sum(back * A, 1)
        g_first += a * back
        if MOMENTUM:
            _store(g_J2 + SIZE, _dot_apart(tl.trans((r * A).to(OP)), g_O, n, APART, ACC, OP, PRECISION), f, d, HIDDEN, D, EVEN)
            back = _dot_apart(g_O, tl.trans(_load(starts2 + SIZE, f, d, HIDDEN, D, EVEN)), n, APART, ACC, OP, PRECISION)
            g_r += tl.sum(back * A, 1)
            g_first += r * back
        g_first *= slope
        _store(g_Z + base * BC * HIDDEN, g_first, t, f, BC, HIDDEN, EVEN)
        _store(g_J1, _dot_apart(tl.trans(Q), a * g_first, n, APART, ACC, OP, PRECISION), d, f, D, HIDDEN, EVEN)
        back = _dot_apart(g_first, tl.trans(_load(starts1, d, f, D, HIDDEN, EVEN)), n, APART, ACC, OP, PRECISION)
        g_a += tl.sum(back * Q, 1)
        g_query += a * back
        if MOMENTUM:
            _store(g_J1 + SIZE, _dot_apart(tl.trans(Q), r * g_first, n, APART, ACC, OP, PRECISION), d, f, D, HIDDEN, EVEN)
            back = _dot_apart(g_first, tl.trans(_load(starts1 + SIZE, d, f, D, HIDDEN, EVEN)), n, APART, ACC, OP, PRECISION)
            g_r += tl.sum(back * Q, 1)
            g_query += r * back
    _store_tokens(g_q, g_query, at, live, D, BD)
    tl.store(g_co + base * 4 * BC + t, g_a)
    if MOMENTUM:
        tl.store(g_co + base * 4 * BC + BC + t, g_r)


@_kernel
def blend_backward(
    q, k, starts2, P, slopes, firsts, g_Z, g_q, g_k, g_P, g_D1, g_D2, L, n, HEADS,
    D: tl.constexpr, BD: tl.constexpr, HIDDEN: tl.constexpr, BH: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
    MOMENTUM: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Layer 1's masked product, -[(Q K^T) P] D1: added to g_q, g_P and g_D2, with D1's own way through W2. g_D1 may be g_Z.

    g_D2 comes out complete but for what later chunks add.
    """
    i, m = tl.program_id(0), tl.program_id(1)
    base = m.to(tl.int64) * n + i
    d, t = tl.arange(0, BD), tl.arange(0, BC)
    PARTS: tl.constexpr = 2 if MOMENTUM else 1
    SIZE: tl.constexpr = D * HIDDEN
    BLOCKS: tl.constexpr = (HIDDEN + BH - 1) // BH
    EVEN: tl.constexpr = (D == BD) and (HIDDEN == BH * BLOCKS)
    at, live = _tokens(m, i, L, HEADS, CHUNK, BC)
    square = base * BC * BC + t[:, None] * BC + t[None, :]
    Q, K = _load_tokens(q, at, live, D, BD), _load_tokens(k, at, live, D, BD)
    # Transposed, [j t], so that no product below has to turn it.
    across = t[:, None] + t[None, :] * BC + base * BC * BC
    blend = (_dot(K, tl.trans(Q), OP, PRECISION) * tl.load(P + across)).to(OP)
    g_blend = tl.zeros([BC, BC], ACC)
    g_error = tl.zeros([BC, BD], ACC)
    for j in tl.range(BLOCKS, num_stages=1):
        f = j * BH + tl.arange(0, BH)
        g_first = _load(g_Z + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)
        g_blend += _dot(g_first, tl.trans(_load(firsts + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)), OP, PRECISION)
        g_first = -_dot(blend, g_first, OP, PRECISION)
        slope = _load(slopes + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)
        g_error += _dot(g_first * slope, _load(starts2 + base * PARTS * SIZE, f, d, HIDDEN, D, EVEN), OP, PRECISION)
        tl.debug_barrier()  # all have read g_Z before any writes there
        _store(g_D1 + base * BC * HIDDEN, g_first, t, f, BC, HIDDEN, EVEN)
    g_error += _load_tokens(g_D2, at, live, D, BD)
    _store_tokens(g_D2, g_error, at, live, D, BD)
    g_mix = tl.load(g_P + square) - g_blend * _dot(Q, tl.trans(K), OP, PRECISION)
    tl.debug_barrier()
    tl.store(g_P + square, g_mix.to(g_P.dtype.element_ty))
    g_scores = (g_blend * tl.load(P + square)).to(OP)
    _store_tokens(g_k, -_dot(tl.trans(g_scores), Q, OP, PRECISION), at, live, D, BD)
    g_query = _load_tokens(g_q, at, live, D, BD) - _dot(g_scores, K, OP, PRECISION)
    tl.debug_barrier()
    _store_tokens(g_q, g_query, at, live, D, BD)


@triton.jit
def _error_backward(
    g, D2, K, v, values, rstds, g_surprise, g_v, at, live,
    D: tl.constexpr, BD: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """From D2's gradient g to that of Z_2; v's is written on the way.

    With LayerNorm's value x, the loss's slope e, pull(u) = rstd (u - mean(u) - x mean(u x)) and the surprise's gradient w:
    g_value = pull(g) + w e, and Z_2 gets pull(g_value - rstd (g mean(e x) + e mean(g x))) - x rstd mean(g D2), D2 = pull(e). All
    of it is a sum of g, e and x with one factor per row each, so that one pass over them is enough.
    """
    w = tl.load(g_surprise + at, mask=live, other=0.0)
    if NORM:
        x = _load_tokens(values, at, live, D, BD).to(g.dtype)
        rstd = tl.load(rstds + at, mask=live, other=0.0)
        e = x - _load_tokens(v, at, live, D, BD)
        if RESIDUAL:
            e += K
        g_mean, e_mean = tl.sum(g, 1) / D, tl.sum(e, 1) / D
        gx, ex, ge, xx = tl.sum(g * x, 1) / D, tl.sum(e * x, 1) / D, tl.sum(g * e, 1) / D, tl.sum(x * x, 1) / D
        g_value = rstd[:, None] * (g - g_mean[:, None] - x * gx[:, None]) + w[:, None] * e
        _store_tokens(g_v, -g_value, at, live, D, BD)
        of_g, of_e, of_x = rstd * (1.0 - ex), w - rstd * gx, -rstd * gx
        constant = of_g * g_mean + of_e * e_mean
        of_x -= of_g * gx + of_e * ex + of_x * xx + rstd * (ge - g_mean * e_mean - gx * ex)
        g_out = of_g[:, None] * g + of_e[:, None] * e + of_x[:, None] * x - constant[:, None]
        if D != BD:
            g_out = tl.where((tl.arange(0, BD) < D)[None, :], g_out, 0.0)
        return g_out * rstd[:, None]
    else:
        g += D2 * w[:, None]
        _store_tokens(g_v, -g, at, live, D, BD)
        return g


@triton.jit
def _leash(came, size, REACH: tl.constexpr, END: tl.constexpr):
    """Chunked's `Leash`: 1 while the gradient is within what came in times REACH, and within END."""
    factor = tl.minimum(tl.minimum(came * REACH, END) / size, 1.0)
    return tl.where(factor == factor, factor, 1.0)


@_kernel
def carry_kernel(
    k, v, starts2, co, fold, errors, values, rstds, hiddens, slopes, bends, g_surprise,
    g_X2, g_D1, g_D2, g_J1, g_J2, came, came_end, g_end1, g_end2, g_first1, g_first2, g_Z, g_ends1, g_ends2, g_v, L, n, HEADS,
    D: tl.constexpr, BD: tl.constexpr, HIDDEN: tl.constexpr, BH: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
    MOMENTUM: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr,
    REACH: tl.constexpr, END: tl.constexpr,
    APART: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state's gradient from the last chunk to the first; at each chunk's end it is kept in g_ends, Z_1's gradient in g_Z."""
    m = tl.program_id(0).to(tl.int64)
    d, f, t = tl.arange(0, BD), tl.arange(0, BH), tl.arange(0, BC)
    PARTS: tl.constexpr = 2 if MOMENTUM else 1
    SIZE: tl.constexpr = D * HIDDEN
    EVEN: tl.constexpr = (D == BD) and (HIDDEN == BH)
    G1 = _load(g_end1 + m * PARTS * SIZE, d, f, D, HIDDEN, EVEN)
    G2 = _load(g_end2 + m * PARTS * SIZE, f, d, HIDDEN, D, EVEN)
    if MOMENTUM:
        T1 = _load(g_end1 + (m * PARTS + 1) * SIZE, d, f, D, HIDDEN, EVEN)
        T2 = _load(g_end2 + (m * PARTS + 1) * SIZE, f, d, HIDDEN, D, EVEN)
    total = tl.load(came_end + m)
    for back_from in range(n):
        i = n - 1 - back_from
        base = m * n + i
        at, live = _tokens(m, i, L, HEADS, CHUNK, BC)
        K, D2 = _load_tokens(k, at, live, D, BD), _load_tokens(errors, at, live, D, BD)
        W2 = _load(starts2 + base * PARTS * SIZE, f, d, HIDDEN, D, EVEN)
        c = tl.load(co + base * 4 * BC + 2 * BC + t)[:, None]
        keep = tl.load(fold + base * 4)
        H = _load(hiddens + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)
        slope = _load(slopes + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)
        curve = _load(bends + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)
        # Through the fold: what the end state's gradient makes of D1 and D2.
        g_first = -c * _dot_apart(K, G1, n, APART, ACC, OP, PRECISION)
        g_error = -c * _dot_apart(H, G2, n, APART, ACC, OP, PRECISION)
        if MOMENTUM:
            s = tl.load(co + base * 4 * BC + 3 * BC + t)[:, None]
            g_first -= s * _dot_apart(K, T1, n, APART, ACC, OP, PRECISION)
            g_error -= s * _dot_apart(H, T2, n, APART, ACC, OP, PRECISION)
        g_first = g_first
        g_error += _dot_apart((g_first * slope).to(OP), W2, n, APART, ACC, OP, PRECISION)
        g_error = g_error + _load_tokens(g_D2, at, live, D, BD)
        g_O = _error_backward(g_error, D2, K, v, values, rstds, g_surprise, g_v, at, live, D, BD, NORM, RESIDUAL)
        g_O = g_O.to(OP)
        g_hidden = _dot_apart(g_O, tl.trans(W2), n, APART, ACC, OP, PRECISION)
        g_hidden -= c * _dot_apart(D2, tl.trans(G2.to(OP)), n, APART, ACC, OP, PRECISION)
        if MOMENTUM:
            g_hidden -= s * _dot_apart(D2, tl.trans(T2.to(OP)), n, APART, ACC, OP, PRECISION)
        g_hidden += _load(g_X2 + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)
        g_first = (g_first + _load(g_D1 + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)).to(OP)
        g_first_layer = (g_first * curve + slope * g_hidden).to(OP)
        g_first = (g_first * slope).to(OP)
        _store(g_Z + base * BC * HIDDEN, g_first_layer, t, f, BC, HIDDEN, EVEN)
        # To the state at the chunk's start.
        _store(g_ends1 + base * PARTS * SIZE, G1, d, f, D, HIDDEN, EVEN)
        _store(g_ends2 + base * PARTS * SIZE, G2, f, d, HIDDEN, D, EVEN)
        if MOMENTUM:
            carry, past = tl.load(fold + base * 4 + 1), tl.load(fold + base * 4 + 2)
            _store(g_ends1 + (base * PARTS + 1) * SIZE, T1, d, f, D, HIDDEN, EVEN)
            _store(g_ends2 + (base * PARTS + 1) * SIZE, T2, f, d, HIDDEN, D, EVEN)
            T1 = past * T1 + carry * G1 + _load(g_J1 + (base * PARTS + 1) * SIZE, d, f, D, HIDDEN, EVEN)
            T2 = past * T2 + carry * G2 + _load(g_J2 + (base * PARTS + 1) * SIZE, f, d, HIDDEN, D, EVEN)
        G1 = keep * G1 + _load(g_J1 + base * PARTS * SIZE, d, f, D, HIDDEN, EVEN)
        G2 = keep * G2 + _load(g_J2 + base * PARTS * SIZE, f, d, HIDDEN, D, EVEN)
        G1 += _dot(tl.trans(K), g_first_layer, OP, PRECISION)
        G2 += _dot_apart(tl.trans(H), g_O, n, APART, ACC, OP, PRECISION)
        G2 += _dot(tl.trans(g_first), D2, OP, PRECISION)
        total += tl.load(came + base)
        size = tl.maximum(tl.max(tl.max(tl.abs(G1), 1), 0), tl.max(tl.max(tl.abs(G2), 1), 0))
        if MOMENTUM:
            size = tl.maximum(size, tl.maximum(tl.max(tl.max(tl.abs(T1), 1), 0), tl.max(tl.max(tl.abs(T2), 1), 0)))
        factor = _leash(total, size, REACH, END)
        G1 *= factor
        G2 *= factor
        if MOMENTUM:
            T1 *= factor
            T2 *= factor
    _store(g_first1 + m * PARTS * SIZE, G1, d, f, D, HIDDEN, EVEN)
    _store(g_first2 + m * PARTS * SIZE, G2, f, d, HIDDEN, D, EVEN)
    if MOMENTUM:
        _store(g_first1 + (m * PARTS + 1) * SIZE, T1, d, f, D, HIDDEN, EVEN)
        _store(g_first2 + (m * PARTS + 1) * SIZE, T2, f, d, HIDDEN, D, EVEN)


@_kernel
def carry_stream(
    k, v, starts2, co, fold, errors, values, rstds, hiddens, slopes, bends, g_surprise,
    g_X2, g_D1, g_D2, g_J1, g_J2, came, came_end, g_end1, g_end2, g_first1, g_first2, g_Z, g_ends1, g_ends2, g_v, L, n, HEADS,
    D: tl.constexpr, BD: tl.constexpr, HIDDEN: tl.constexpr, BH: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
    MOMENTUM: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr,
    REACH: tl.constexpr, END: tl.constexpr,
    APART: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`carry_kernel` with the gradient in blocks through L2, in g_first. g_Z may be g_D1, and g_ends g_J.

    One pass over it per chunk: a block that has reached a chunk's start is at once sent through the fold before it, for that
    chunk's D2. The leash's factor is known only after the pass, so it is applied when a block is read again, and to what was made
    of unheld blocks, which is linear in them.
    """
    m = tl.program_id(0).to(tl.int64)
    d, t = tl.arange(0, BD), tl.arange(0, BC)
    PARTS: tl.constexpr = 2 if MOMENTUM else 1
    SIZE: tl.constexpr = D * HIDDEN
    BLOCKS: tl.constexpr = (HIDDEN + BH - 1) // BH
    EVEN: tl.constexpr = (D == BD) and (HIDDEN == BH * BLOCKS)
    g_end1 += m * PARTS * SIZE
    g_end2 += m * PARTS * SIZE
    g_first1 += m * PARTS * SIZE
    g_first2 += m * PARTS * SIZE
    total = tl.load(came_end + m)
    factor = 1.0
    base = m * n + n - 1
    last = base * PARTS * SIZE
    at, live = _tokens(m, n - 1, L, HEADS, CHUNK, BC)
    K = _load_tokens(k, at, live, D, BD)
    c = tl.load(co + base * 4 * BC + 2 * BC + t)[:, None]
    if MOMENTUM:
        s = tl.load(co + base * 4 * BC + 3 * BC + t)[:, None]
    g_error = tl.zeros([BC, BD], ACC)
    for j in tl.range(BLOCKS, num_stages=1):
        f = j * BH + tl.arange(0, BH)
        W2 = _load(starts2 + last, f, d, HIDDEN, D, EVEN)
        G1 = _load(g_end1, d, f, D, HIDDEN, EVEN)
        G2 = _load(g_end2, f, d, HIDDEN, D, EVEN)
        _store(g_first1, G1, d, f, D, HIDDEN, EVEN)
        _store(g_first2, G2, f, d, HIDDEN, D, EVEN)
        H = _load(hiddens + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)
        slope = _load(slopes + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)
        g_first = -c * _dot_apart(K, G1, n, APART, ACC, OP, PRECISION)
        g_error -= c * _dot_apart(H, G2, n, APART, ACC, OP, PRECISION)
        if MOMENTUM:
            T1 = _load(g_end1 + SIZE, d, f, D, HIDDEN, EVEN)
            T2 = _load(g_end2 + SIZE, f, d, HIDDEN, D, EVEN)
            _store(g_first1 + SIZE, T1, d, f, D, HIDDEN, EVEN)
            _store(g_first2 + SIZE, T2, f, d, HIDDEN, D, EVEN)
            g_first -= s * _dot_apart(K, T1, n, APART, ACC, OP, PRECISION)
            g_error -= s * _dot_apart(H, T2, n, APART, ACC, OP, PRECISION)
        g_error += _dot_apart(g_first * slope, W2, n, APART, ACC, OP, PRECISION)
    for back_from in tl.range(n, num_stages=1):
        tl.debug_barrier()  # the blocks below are read back by other threads than wrote them
        i = n - 1 - back_from
        base = m * n + i
        here = base * PARTS * SIZE
        D2 = _load_tokens(errors, at, live, D, BD)
        g_error = g_error * factor + _load_tokens(g_D2, at, live, D, BD)
        g_O = _error_backward(g_error, D2, K, v, values, rstds, g_surprise, g_v, at, live, D, BD, NORM, RESIDUAL).to(OP)
        keep = tl.load(fold + base * 4)
        if MOMENTUM:
            carry, past = tl.load(fold + base * 4 + 1), tl.load(fold + base * 4 + 2)
        more = i > 0
        before = tl.where(more, base - 1, base)
        here_next = before * PARTS * SIZE
        at, live = _tokens(m, i - 1, L, HEADS, CHUNK, BC)
        live = live & more
        K_next = _load_tokens(k, at, live, D, BD)
        c_next = tl.load(co + before * 4 * BC + 2 * BC + t)[:, None]
        if MOMENTUM:
            s_next = tl.load(co + before * 4 * BC + 3 * BC + t)[:, None]
        g_error = tl.zeros([BC, BD], ACC)
        size = tl.max(tl.max(g_error, 1), 0)
        for j in tl.range(BLOCKS, num_stages=1):
            f = j * BH + tl.arange(0, BH)
            W2 = _load(starts2 + here, f, d, HIDDEN, D, EVEN)
            G1 = _load(g_first1, d, f, D, HIDDEN, EVEN) * factor
            G2 = _load(g_first2, f, d, HIDDEN, D, EVEN) * factor
            H = _load(hiddens + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)
            slope = _load(slopes + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)
            curve = _load(bends + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)
            g_first = -c * _dot_apart(K, G1, n, APART, ACC, OP, PRECISION)
            g_hidden = _dot_apart(g_O, tl.trans(W2), n, APART, ACC, OP, PRECISION)
            g_hidden -= c * _dot_apart(D2, tl.trans(G2.to(OP)), n, APART, ACC, OP, PRECISION)
            now1 = _load(g_J1 + here, d, f, D, HIDDEN, EVEN) + keep * G1
            now2 = _load(g_J2 + here, f, d, HIDDEN, D, EVEN) + keep * G2
            if MOMENTUM:
                T1 = _load(g_first1 + SIZE, d, f, D, HIDDEN, EVEN) * factor
                T2 = _load(g_first2 + SIZE, f, d, HIDDEN, D, EVEN) * factor
                g_first -= s * _dot_apart(K, T1, n, APART, ACC, OP, PRECISION)
                g_hidden -= s * _dot_apart(D2, tl.trans(T2.to(OP)), n, APART, ACC, OP, PRECISION)
                held1 = _load(g_J1 + here + SIZE, d, f, D, HIDDEN, EVEN) + carry * G1 + past * T1
                held2 = _load(g_J2 + here + SIZE, f, d, HIDDEN, D, EVEN) + carry * G2 + past * T2
            g_first = (g_first + _load(g_D1 + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)).to(OP)
            g_hidden += _load(g_X2 + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)
            g_first_layer = (g_first * curve + slope * g_hidden).to(OP)
            tl.debug_barrier()  # all have read g_D1 and g_J before any writes there
            _store(g_Z + base * BC * HIDDEN, g_first_layer, t, f, BC, HIDDEN, EVEN)
            _store(g_ends1 + here, G1, d, f, D, HIDDEN, EVEN)
            _store(g_ends2 + here, G2, f, d, HIDDEN, D, EVEN)
            G1 = now1 + _dot_apart(tl.trans(K), g_first_layer, n, APART, ACC, OP, PRECISION)
            G2 = now2 + _dot_apart(tl.trans(H), g_O, n, APART, ACC, OP, PRECISION)
            G2 += _dot_apart(tl.trans((g_first * slope).to(OP)), D2, n, APART, ACC, OP, PRECISION)
            _store(g_first1, G1, d, f, D, HIDDEN, EVEN)
            _store(g_first2, G2, f, d, HIDDEN, D, EVEN)
            size = tl.maximum(size, tl.maximum(tl.max(tl.max(tl.abs(G1), 1), 0), tl.max(tl.max(tl.abs(G2), 1), 0)))
            if MOMENTUM:
                _store(g_ends1 + here + SIZE, T1, d, f, D, HIDDEN, EVEN)
                _store(g_ends2 + here + SIZE, T2, f, d, HIDDEN, D, EVEN)
                _store(g_first1 + SIZE, held1, d, f, D, HIDDEN, EVEN)
                _store(g_first2 + SIZE, held2, f, d, HIDDEN, D, EVEN)
                size = tl.maximum(size, tl.maximum(tl.max(tl.max(tl.abs(held1), 1), 0), tl.max(tl.max(tl.abs(held2), 1), 0)))
            if more:
                H_next = _load(hiddens + before * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)
                slope_next = _load(slopes + before * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)
                g_next = -c_next * _dot_apart(K_next, G1, n, APART, ACC, OP, PRECISION)
                g_error -= c_next * _dot_apart(H_next, G2, n, APART, ACC, OP, PRECISION)
                if MOMENTUM:
                    g_next -= s_next * _dot_apart(K_next, held1, n, APART, ACC, OP, PRECISION)
                    g_error -= s_next * _dot_apart(H_next, held2, n, APART, ACC, OP, PRECISION)
                g_error += _dot(g_next * slope_next, _load(starts2 + here_next, f, d, HIDDEN, D, EVEN), OP, PRECISION)
        total += tl.load(came + base)
        factor = _leash(total, size, REACH, END)
        K, c = K_next, c_next
        if MOMENTUM:
            s = s_next
    tl.debug_barrier()
    for j in tl.range(BLOCKS, num_stages=1):
        f = j * BH + tl.arange(0, BH)
        G1 = _load(g_first1, d, f, D, HIDDEN, EVEN) * factor
        G2 = _load(g_first2, f, d, HIDDEN, D, EVEN) * factor
        tl.debug_barrier()
        _store(g_first1, G1, d, f, D, HIDDEN, EVEN)
        _store(g_first2, G2, f, d, HIDDEN, D, EVEN)
        if MOMENTUM:
            T1 = _load(g_first1 + SIZE, d, f, D, HIDDEN, EVEN) * factor
            T2 = _load(g_first2 + SIZE, f, d, HIDDEN, D, EVEN) * factor
            tl.debug_barrier()
            _store(g_first1 + SIZE, T1, d, f, D, HIDDEN, EVEN)
            _store(g_first2 + SIZE, T2, f, d, HIDDEN, D, EVEN)


@_kernel
def keys_backward(
    k, starts1, starts2, co, errors, hiddens, firsts, g_Z, g_J1, g_J2, g_v, g_k, g_co, g_fold, L, n, HEADS,
    D: tl.constexpr, BD: tl.constexpr, HIDDEN: tl.constexpr, BH: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
    MOMENTUM: tl.constexpr, RESIDUAL: tl.constexpr,
    ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What nothing in the sequence waits for. g_k holds what reading gave, and is added to; g_J is each chunk's end gradient."""
    i, m = tl.program_id(0), tl.program_id(1)
    base = m.to(tl.int64) * n + i
    d, t = tl.arange(0, BD), tl.arange(0, BC)
    PARTS: tl.constexpr = 2 if MOMENTUM else 1
    SIZE: tl.constexpr = D * HIDDEN
    BLOCKS: tl.constexpr = (HIDDEN + BH - 1) // BH
    EVEN: tl.constexpr = (D == BD) and (HIDDEN == BH * BLOCKS)
    starts1 += base * PARTS * SIZE
    starts2 += base * PARTS * SIZE
    g_J1 += base * PARTS * SIZE
    g_J2 += base * PARTS * SIZE
    at, live = _tokens(m, i, L, HEADS, CHUNK, BC)
    K, D2 = _load_tokens(k, at, live, D, BD), _load_tokens(errors, at, live, D, BD)
    c = tl.load(co + base * 4 * BC + 2 * BC + t)[:, None]
    g_key = _load_tokens(g_k, at, live, D, BD).to(ACC)
    if RESIDUAL:
        g_key -= _load_tokens(g_v, at, live, D, BD)
    g_c = tl.zeros([BC], ACC)
    keep = tl.sum(g_c, 0)
    if MOMENTUM:
        s = tl.load(co + base * 4 * BC + 3 * BC + t)[:, None]
        g_s = tl.zeros([BC], ACC)
        carry, past = tl.sum(g_c, 0), tl.sum(g_c, 0)
    for j in tl.range(BLOCKS, num_stages=1):
        f = j * BH + tl.arange(0, BH)
        W1 = _load(starts1, d, f, D, HIDDEN, EVEN)
        W2 = _load(starts2, f, d, HIDDEN, D, EVEN)
        G1 = _load(g_J1, d, f, D, HIDDEN, EVEN)
        G2 = _load(g_J2, f, d, HIDDEN, D, EVEN)
        H = _load(hiddens + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)
        D1 = _load(firsts + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)
        keep += tl.sum(tl.sum(W1.to(ACC) * G1, 1), 0) + tl.sum(tl.sum(W2.to(ACC) * G2, 1), 0)
        g_key += _dot(_load(g_Z + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN), tl.trans(W1), OP, PRECISION)
        back = _dot(D1, tl.trans(G1), OP, PRECISION)
        g_key -= c * back
        g_c -= tl.sum(back * K, 1) + tl.sum(_dot(D2, tl.trans(G2), OP, PRECISION) * H, 1)
        if MOMENTUM:
            S1 = _load(starts1 + SIZE, d, f, D, HIDDEN, EVEN).to(ACC)
            S2 = _load(starts2 + SIZE, f, d, HIDDEN, D, EVEN).to(ACC)
            carry += tl.sum(tl.sum(S1 * G1, 1), 0) + tl.sum(tl.sum(S2 * G2, 1), 0)
            G1 = _load(g_J1 + SIZE, d, f, D, HIDDEN, EVEN)
            G2 = _load(g_J2 + SIZE, f, d, HIDDEN, D, EVEN)
            past += tl.sum(tl.sum(S1 * G1, 1), 0) + tl.sum(tl.sum(S2 * G2, 1), 0)
            back = _dot(D1, tl.trans(G1), OP, PRECISION)
            g_key -= s * back
            g_s -= tl.sum(back * K, 1) + tl.sum(_dot(D2, tl.trans(G2), OP, PRECISION) * H, 1)
    _store_tokens(g_k, g_key, at, live, D, BD)
    tl.store(g_co + base * 4 * BC + 2 * BC + t, g_c)
    tl.store(g_fold + base * 4, keep)
    if MOMENTUM:
        tl.store(g_co + base * 4 * BC + 3 * BC + t, g_s)
        tl.store(g_fold + base * 4 + 1, carry)
        tl.store(g_fold + base * 4 + 2, past)
