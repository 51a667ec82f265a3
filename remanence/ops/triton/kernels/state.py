# mypy: ignore-errors
"""Iterate the state of a two-layer memory forwards over the chunks. This is the only sequential part of
forward.
"""

from __future__ import annotations

import triton
import triton.language as tl

from remanence.ops.triton.kernels.tools import (
    COEF_C,
    COEF_S,
    activate,
    activate_with_slope,
    dot,
    dot_apart,
    kernel,
    load_coef,
    load_layers,
    load_tokens,
    meet,
    norm,
    pull,
    store_layers,
    store_tokens,
    tokens,
)


@triton.jit
def _error(
    out, K, k, v, at, live, writes, errors, values, rstds, surprise,
    D: tl.constexpr, BD: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, TRAIN: tl.constexpr,
):  # fmt: skip
    """Return D2, the gradient of the loss with respect to the second layer's output Z_2 (`out`). If this
    program `writes`, also write D2, the surprise, and with TRAIN what backward needs.
    """
    value = out
    if NORM:
        value, rstd = norm(out, D, BD)
        if TRAIN:
            store_tokens(values, value, at, live & writes, D, BD)
            tl.store(rstds + at, rstd, mask=live & writes)
    slope = value - load_tokens(v, at, live, D, BD)
    if RESIDUAL:
        slope += K
    tl.store(surprise + at, 0.5 * tl.sum(slope * slope, 1), mask=live & writes)
    D2 = slope
    if NORM:
        D2 = pull(slope, value, rstd, D, BD)
    store_tokens(errors, D2, at, live & writes, D, BD)
    return D2


@kernel
def state_kernel(
    k, v, J1, J2, end1, end2, starts1, starts2, co, fold, errors, values, rstds, surprise, mail, flags, L, n, HEADS,
    D: tl.constexpr, BD: tl.constexpr, HIDDEN: tl.constexpr, BH: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
    MOMENTUM: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, GELU: tl.constexpr, TRAIN: tl.constexpr,
    SHARES: tl.constexpr, APART: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Iterate the state over the chunks, in registers. Writes the state at each chunk's start and at the end,
    D2 and the surprise.

    With SHARES above 1, that many programs share a memory. Each has a block of the hidden axis, and at every
    chunk they exchange and add their parts of Z_2.
    """
    m, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, f = tl.arange(0, BD), share * BH + tl.arange(0, BH)
    PARTS: tl.constexpr = 2 if MOMENTUM else 1
    SIZE: tl.constexpr = D * HIDDEN
    EVEN: tl.constexpr = (D == BD) and (HIDDEN == BH * SHARES)
    W1, W2 = load_layers(J1, J2, m * PARTS * SIZE, d, f, D, HIDDEN, EVEN)
    if MOMENTUM:
        S1, S2 = load_layers(J1, J2, (m * PARTS + 1) * SIZE, d, f, D, HIDDEN, EVEN)
    for i in range(n):
        base = m * n + i
        at, live = tokens(m, i, L, HEADS, CHUNK, BC)
        K = load_tokens(k, at, live, D, BD)
        store_layers(starts1, starts2, base * PARTS * SIZE, W1, W2, d, f, D, HIDDEN, EVEN)
        if MOMENTUM:
            store_layers(starts1, starts2, (base * PARTS + 1) * SIZE, S1, S2, d, f, D, HIDDEN, EVEN)
        H, slope = activate_with_slope(dot_apart(K, W1, n, APART, ACC, OP, PRECISION), GELU)
        H, slope = H.to(OP), slope.to(OP)
        out = dot_apart(H, W2, n, APART, ACC, OP, PRECISION)
        if SHARES > 1:
            out = meet(out, mail + m * 2 * SHARES * BC * BD, flags + m, i, share, SHARES, BC, BD)
        D2 = _error(
            out, K, k, v, at, live, share == 0, errors, values, rstds, surprise, D, BD, NORM, RESIDUAL, TRAIN
        )
        D1 = dot_apart(D2, tl.trans(W2.to(OP)), n, APART, ACC, OP, PRECISION) * slope
        c = load_coef(co, base, COEF_C, BC)[:, None]
        keep = tl.load(fold + base * 4)
        Kt, Ht = tl.trans(K), tl.trans(H)
        W1 = keep * W1 - dot(Kt, c * D1, OP, PRECISION)
        W2 = keep * W2 - dot(Ht, c * D2, OP, PRECISION)
        if MOMENTUM:
            s = load_coef(co, base, COEF_S, BC)[:, None]
            carry, past = tl.load(fold + base * 4 + 1), tl.load(fold + base * 4 + 2)
            W1 += carry * S1
            W2 += carry * S2
            S1 = past * S1 - dot(Kt, s * D1, OP, PRECISION)
            S2 = past * S2 - dot(Ht, s * D2, OP, PRECISION)
    store_layers(end1, end2, m * PARTS * SIZE, W1, W2, d, f, D, HIDDEN, EVEN)
    if MOMENTUM:
        store_layers(end1, end2, (m * PARTS + 1) * SIZE, S1, S2, d, f, D, HIDDEN, EVEN)


@kernel
def state_stream(
    k, v, J1, J2, end1, end2, starts1, starts2, co, fold, errors, values, rstds, surprise, L, n, HEADS,
    D: tl.constexpr, BD: tl.constexpr, HIDDEN: tl.constexpr, BH: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
    MOMENTUM: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, GELU: tl.constexpr, TRAIN: tl.constexpr,
    APART: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Like `state_kernel`, for a state that is kept in global memory, in `end`, while it changes. There is
    one pass over the state per chunk: as soon as a block is updated, the next chunk's keys are multiplied by
    it.
    """
    m = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    PARTS: tl.constexpr = 2 if MOMENTUM else 1
    SIZE: tl.constexpr = D * HIDDEN
    BLOCKS: tl.constexpr = (HIDDEN + BH - 1) // BH
    EVEN: tl.constexpr = (D == BD) and (HIDDEN == BH * BLOCKS)
    J1 += m * PARTS * SIZE
    J2 += m * PARTS * SIZE
    end1 += m * PARTS * SIZE
    end2 += m * PARTS * SIZE
    at, live = tokens(m, 0, L, HEADS, CHUNK, BC)
    K = load_tokens(k, at, live, D, BD)
    out = tl.zeros([BC, BD], ACC)
    starts1 += m * n * PARTS * SIZE
    starts2 += m * n * PARTS * SIZE
    for j in tl.range(BLOCKS, num_stages=1):
        f = j * BH + tl.arange(0, BH)
        W1, W2 = load_layers(J1, J2, 0, d, f, D, HIDDEN, EVEN)
        store_layers(end1, end2, 0, W1, W2, d, f, D, HIDDEN, EVEN)
        store_layers(starts1, starts2, 0, W1, W2, d, f, D, HIDDEN, EVEN)
        if MOMENTUM:
            S1, S2 = load_layers(J1, J2, SIZE, d, f, D, HIDDEN, EVEN)
            store_layers(end1, end2, SIZE, S1, S2, d, f, D, HIDDEN, EVEN)
            store_layers(starts1, starts2, SIZE, S1, S2, d, f, D, HIDDEN, EVEN)
        out += dot(activate(dot(K, W1, OP, PRECISION), GELU), W2, OP, PRECISION)
    for i in tl.range(n, num_stages=1):
        tl.debug_barrier()  # the blocks are read back by threads that did not write them
        base = m * n + i
        starts1 += PARTS * SIZE
        starts2 += PARTS * SIZE
        D2 = _error(
            out, K, k, v, at, live, True, errors, values, rstds, surprise, D, BD, NORM, RESIDUAL, TRAIN
        )
        c = load_coef(co, base, COEF_C, BC)[:, None]
        keep = tl.load(fold + base * 4)
        if MOMENTUM:
            s = load_coef(co, base, COEF_S, BC)[:, None]
            carry, past = tl.load(fold + base * 4 + 1), tl.load(fold + base * 4 + 2)
        Kt = tl.trans(K)
        more = i + 1 < n
        at, live = tokens(m, i + 1, L, HEADS, CHUNK, BC)
        live = live & more
        K_next = load_tokens(k, at, live, D, BD)
        out = tl.zeros([BC, BD], ACC)
        for j in tl.range(BLOCKS, num_stages=1):
            f = j * BH + tl.arange(0, BH)
            W1, W2 = load_layers(end1, end2, 0, d, f, D, HIDDEN, EVEN)
            H, slope = activate_with_slope(dot_apart(K, W1, n, APART, ACC, OP, PRECISION), GELU)
            H, slope = H.to(OP), slope.to(OP)
            D1 = dot_apart(D2, tl.trans(W2.to(OP)), n, APART, ACC, OP, PRECISION) * slope
            Ht = tl.trans(H)
            W1 = keep * W1 - dot_apart(Kt, c * D1, n, APART, ACC, OP, PRECISION)
            W2 = keep * W2 - dot_apart(Ht, c * D2, n, APART, ACC, OP, PRECISION)
            if MOMENTUM:
                S1, S2 = load_layers(end1, end2, SIZE, d, f, D, HIDDEN, EVEN)
                W1 += carry * S1
                W2 += carry * S2
                S1 = past * S1 - dot_apart(Kt, s * D1, n, APART, ACC, OP, PRECISION)
                S2 = past * S2 - dot_apart(Ht, s * D2, n, APART, ACC, OP, PRECISION)
                store_layers(end1, end2, SIZE, S1, S2, d, f, D, HIDDEN, EVEN)
                if more:
                    store_layers(starts1, starts2, SIZE, S1, S2, d, f, D, HIDDEN, EVEN)
            store_layers(end1, end2, 0, W1, W2, d, f, D, HIDDEN, EVEN)
            if more:
                store_layers(starts1, starts2, 0, W1, W2, d, f, D, HIDDEN, EVEN)
            out += dot(activate(dot_apart(K_next, W1, n, APART, ACC, OP, PRECISION), GELU), W2, OP, PRECISION)
        K = K_next
