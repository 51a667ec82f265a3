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
    chunk_tokens,
    dot,
    dot_in_loop,
    kernel,
    load_coef,
    load_layers,
    load_tokens,
    norm,
    norm_backward,
    store_layers,
    store_tokens,
    sum_over_programs,
)


@triton.jit
def _error(
    out, K, k, v, at, row_mask, writes, errors, predictions, prediction_rstds, surprise,
    D: tl.constexpr, BD: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, SAVE_FOR_BACKWARD: tl.constexpr,
):  # fmt: skip
    """Return D2, the gradient of the loss with respect to the second layer's output Z2 (`out`). If this
    program `writes`, also write D2, the surprise, and with SAVE_FOR_BACKWARD what backward needs.
    """
    value = out
    if NORM:
        value, rstd = norm(out, D, BD)
        if SAVE_FOR_BACKWARD:
            store_tokens(predictions, value, at, row_mask & writes, D, BD)
            tl.store(prediction_rstds + at, rstd, mask=row_mask & writes)
    slope = value - load_tokens(v, at, row_mask, D, BD)
    if RESIDUAL:
        slope += K
    tl.store(surprise + at, 0.5 * tl.sum(slope * slope, 1), mask=row_mask & writes)
    D2 = slope
    if NORM:
        D2 = norm_backward(slope, value, rstd, D, BD)
    store_tokens(errors, D2, at, row_mask & writes, D, BD)
    return D2


@kernel
def state_kernel(
    k, v, J1, J2, end1, end2, starts1, starts2, coef, end_factors, errors, predictions, prediction_rstds,
    surprise, exchange, arrivals, L, n, HEADS,
    D: tl.constexpr, BD: tl.constexpr, HIDDEN: tl.constexpr, BH: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
    MOMENTUM: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, GELU: tl.constexpr,
    SAVE_FOR_BACKWARD: tl.constexpr,
    PROGRAMS_PER_MEMORY: tl.constexpr, IN_LOOP: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Iterate the state over the chunks, in registers. Writes the state at each chunk's start and at the end,
    D2 and the surprise.

    With PROGRAMS_PER_MEMORY above 1, that many programs work on the same memory. Each has a block of the
    hidden axis, and at every chunk they exchange and add their parts of Z2, through `exchange` in global
    memory.
    """
    m, hidden_block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, f = tl.arange(0, BD), hidden_block * BH + tl.arange(0, BH)
    PARTS: tl.constexpr = 2 if MOMENTUM else 1
    SIZE: tl.constexpr = D * HIDDEN
    EVEN: tl.constexpr = (D == BD) and (HIDDEN == BH * PROGRAMS_PER_MEMORY)
    W1, W2 = load_layers(J1, J2, m * PARTS * SIZE, d, f, D, HIDDEN, EVEN)
    if MOMENTUM:
        S1, S2 = load_layers(J1, J2, (m * PARTS + 1) * SIZE, d, f, D, HIDDEN, EVEN)
    for i in range(n):
        base = m * n + i
        at, row_mask = chunk_tokens(m, i, L, HEADS, CHUNK, BC)
        K = load_tokens(k, at, row_mask, D, BD)
        store_layers(starts1, starts2, base * PARTS * SIZE, W1, W2, d, f, D, HIDDEN, EVEN)
        if MOMENTUM:
            store_layers(starts1, starts2, (base * PARTS + 1) * SIZE, S1, S2, d, f, D, HIDDEN, EVEN)
        H, slope = activate_with_slope(dot_in_loop(K, W1, n, IN_LOOP, ACC, OP, PRECISION), GELU)
        H, slope = H.to(OP), slope.to(OP)
        out = dot_in_loop(H, W2, n, IN_LOOP, ACC, OP, PRECISION)
        if PROGRAMS_PER_MEMORY > 1:
            out = sum_over_programs(
                out,
                exchange + m * 2 * PROGRAMS_PER_MEMORY * BC * BD,
                arrivals + m,
                i,
                hidden_block,
                PROGRAMS_PER_MEMORY,
                BC,
                BD,
            )
        D2 = _error(
            out,
            K,
            k,
            v,
            at,
            row_mask,
            hidden_block == 0,
            errors,
            predictions,
            prediction_rstds,
            surprise,
            D,
            BD,
            NORM,
            RESIDUAL,
            SAVE_FOR_BACKWARD,
        )
        D1 = dot_in_loop(D2, tl.trans(W2.to(OP)), n, IN_LOOP, ACC, OP, PRECISION) * slope
        c = load_coef(coef, base, COEF_C, BC)[:, None]
        keep = tl.load(end_factors + base * 4)
        Kt, Ht = tl.trans(K), tl.trans(H)
        W1 = keep * W1 - dot(Kt, c * D1, OP, PRECISION)
        W2 = keep * W2 - dot(Ht, c * D2, OP, PRECISION)
        if MOMENTUM:
            s = load_coef(coef, base, COEF_S, BC)[:, None]
            carry, past = tl.load(end_factors + base * 4 + 1), tl.load(end_factors + base * 4 + 2)
            W1 += carry * S1
            W2 += carry * S2
            S1 = past * S1 - dot(Kt, s * D1, OP, PRECISION)
            S2 = past * S2 - dot(Ht, s * D2, OP, PRECISION)
    store_layers(end1, end2, m * PARTS * SIZE, W1, W2, d, f, D, HIDDEN, EVEN)
    if MOMENTUM:
        store_layers(end1, end2, (m * PARTS + 1) * SIZE, S1, S2, d, f, D, HIDDEN, EVEN)


@kernel
def state_blocked(
    k, v, J1, J2, end1, end2, starts1, starts2, coef, end_factors, errors, predictions, prediction_rstds,
    surprise, L, n, HEADS,
    D: tl.constexpr, BD: tl.constexpr, HIDDEN: tl.constexpr, BH: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
    MOMENTUM: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, GELU: tl.constexpr,
    SAVE_FOR_BACKWARD: tl.constexpr,
    IN_LOOP: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
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
    at, row_mask = chunk_tokens(m, 0, L, HEADS, CHUNK, BC)
    K = load_tokens(k, at, row_mask, D, BD)
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
            out,
            K,
            k,
            v,
            at,
            row_mask,
            True,
            errors,
            predictions,
            prediction_rstds,
            surprise,
            D,
            BD,
            NORM,
            RESIDUAL,
            SAVE_FOR_BACKWARD,
        )
        c = load_coef(coef, base, COEF_C, BC)[:, None]
        keep = tl.load(end_factors + base * 4)
        if MOMENTUM:
            s = load_coef(coef, base, COEF_S, BC)[:, None]
            carry, past = tl.load(end_factors + base * 4 + 1), tl.load(end_factors + base * 4 + 2)
        Kt = tl.trans(K)
        has_next = i + 1 < n
        at, row_mask = chunk_tokens(m, i + 1, L, HEADS, CHUNK, BC)
        row_mask = row_mask & has_next
        K_next = load_tokens(k, at, row_mask, D, BD)
        out = tl.zeros([BC, BD], ACC)
        for j in tl.range(BLOCKS, num_stages=1):
            f = j * BH + tl.arange(0, BH)
            W1, W2 = load_layers(end1, end2, 0, d, f, D, HIDDEN, EVEN)
            H, slope = activate_with_slope(dot_in_loop(K, W1, n, IN_LOOP, ACC, OP, PRECISION), GELU)
            H, slope = H.to(OP), slope.to(OP)
            D1 = dot_in_loop(D2, tl.trans(W2.to(OP)), n, IN_LOOP, ACC, OP, PRECISION) * slope
            Ht = tl.trans(H)
            W1 = keep * W1 - dot_in_loop(Kt, c * D1, n, IN_LOOP, ACC, OP, PRECISION)
            W2 = keep * W2 - dot_in_loop(Ht, c * D2, n, IN_LOOP, ACC, OP, PRECISION)
            if MOMENTUM:
                S1, S2 = load_layers(end1, end2, SIZE, d, f, D, HIDDEN, EVEN)
                W1 += carry * S1
                W2 += carry * S2
                S1 = past * S1 - dot_in_loop(Kt, s * D1, n, IN_LOOP, ACC, OP, PRECISION)
                S2 = past * S2 - dot_in_loop(Ht, s * D2, n, IN_LOOP, ACC, OP, PRECISION)
                store_layers(end1, end2, SIZE, S1, S2, d, f, D, HIDDEN, EVEN)
                if has_next:
                    store_layers(starts1, starts2, SIZE, S1, S2, d, f, D, HIDDEN, EVEN)
            store_layers(end1, end2, 0, W1, W2, d, f, D, HIDDEN, EVEN)
            if has_next:
                store_layers(starts1, starts2, 0, W1, W2, d, f, D, HIDDEN, EVEN)
            out += dot(
                activate(dot_in_loop(K_next, W1, n, IN_LOOP, ACC, OP, PRECISION), GELU), W2, OP, PRECISION
            )
        K = K_next
