# mypy: ignore-errors
"""Iterate the gradient of the state of a two-layer memory backwards over the chunks."""

from __future__ import annotations

import triton
import triton.language as tl

from remanence.ops.triton.kernels.tools import (
    COEF_C,
    COEF_S,
    clamp_factor,
    dot_apart,
    kernel,
    largest,
    load,
    load_coef,
    load_layers,
    load_tokens,
    meet,
    onto_apart,
    rendezvous,
    store,
    store_layers,
    store_tokens,
    tokens,
)


@triton.jit
def _error_backward(
    g, D2, K, v, values, rstds, g_surprise, g_v, at, live, writes,
    D: tl.constexpr, BD: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Return the gradient of Z_2, given the gradient g of D2, and write the gradient of v.

    With the LayerNorm's output x, the loss's slope e, pull(u) = rstd (u - mean(u) - x mean(u x)), D2 =
    pull(e) and the surprise's gradient w: the gradient of x is g_value = pull(g) + w e, and that of Z_2 is
    pull(g_value - rstd (g mean(e x) + e mean(g x))) - x rstd mean(g D2). This is a sum of g, e and x with one
    factor per row each, so one pass over them is enough.
    """
    w = tl.load(g_surprise + at, mask=live, other=0.0)
    if NORM:
        x = load_tokens(values, at, live, D, BD).to(g.dtype)
        rstd = tl.load(rstds + at, mask=live, other=0.0)
        e = x - load_tokens(v, at, live, D, BD)
        if RESIDUAL:
            e += K
        g_mean, e_mean = tl.sum(g, 1) / D, tl.sum(e, 1) / D
        gx, ex, ge, xx = (
            tl.sum(g * x, 1) / D,
            tl.sum(e * x, 1) / D,
            tl.sum(g * e, 1) / D,
            tl.sum(x * x, 1) / D,
        )
        g_value = rstd[:, None] * (g - g_mean[:, None] - x * gx[:, None]) + w[:, None] * e
        store_tokens(g_v, -g_value, at, writes, D, BD)
        of_g, of_e, of_x = rstd * (1.0 - ex), w - rstd * gx, -rstd * gx
        constant = of_g * g_mean + of_e * e_mean
        of_x -= of_g * gx + of_e * ex + of_x * xx + rstd * (ge - g_mean * e_mean - gx * ex)
        g_out = of_g[:, None] * g + of_e[:, None] * e + of_x[:, None] * x - constant[:, None]
        if D != BD:
            g_out = tl.where((tl.arange(0, BD) < D)[None, :], g_out, 0.0)
        return g_out * rstd[:, None]
    else:
        g += D2 * w[:, None]
        store_tokens(g_v, -g, at, writes, D, BD)
        return g


@triton.jit
def _all_sizes(sizes, SHARES: tl.constexpr):
    """Return the largest of the sizes that the SHARES programs of a memory wrote."""
    size = tl.load(sizes, cache_modifier=".cg")
    for other in tl.static_range(1, SHARES):
        size = tl.maximum(size, tl.load(sizes + other, cache_modifier=".cg"))
    return size


@kernel
def carry_kernel(
    k, v, starts2, co, fold, errors, values, rstds, hiddens, slopes, bends, g_surprise,
    g_X2, g_D1, g_D2, g_J1, g_J2, received, received_end, g_end1, g_end2, g_first1, g_first2,
    g_Z, g_ends1, g_ends2, g_v,
    clamped, mail, flags, L, n, HEADS,
    D: tl.constexpr, BD: tl.constexpr, HIDDEN: tl.constexpr, BH: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
    MOMENTUM: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr,
    REACH: tl.constexpr, END: tl.constexpr,
    SHARES: tl.constexpr, APART: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Iterate the gradient of the state from the last chunk to the first, in registers. Writes it at the end
    of each chunk (g_ends) and at the start of the first (g_first), the gradient of Z_1 (g_Z), and that of v.

    With SHARES above 1, that many programs share a memory. Each has a block of the hidden axis, and at every
    chunk they exchange and add their parts of D2's gradient. Only then do they also know the largest entry of
    the whole gradient. The clamp is therefore applied there, to the gradient and to everything computed from
    it so far, which is linear in it. Each memory that was clamped adds 1 to `clamped`.
    """
    m, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, f, t = tl.arange(0, BD), share * BH + tl.arange(0, BH), tl.arange(0, BC)
    PARTS: tl.constexpr = 2 if MOMENTUM else 1
    SIZE: tl.constexpr = D * HIDDEN
    EVEN: tl.constexpr = (D == BD) and (HIDDEN == BH * SHARES)
    G1, G2 = load_layers(g_end1, g_end2, m * PARTS * SIZE, d, f, D, HIDDEN, EVEN)
    if MOMENTUM:
        T1, T2 = load_layers(g_end1, g_end2, (m * PARTS + 1) * SIZE, d, f, D, HIDDEN, EVEN)
    total = tl.load(received_end + m)
    size = total * 0.0
    least = size + 1.0
    mail += m * 2 * SHARES * (BC * BD + 1)
    sizes = mail + 2 * SHARES * BC * BD
    for back_from in range(n):
        i = n - 1 - back_from
        base = m * n + i
        at, live = tokens(m, i, L, HEADS, CHUNK, BC)
        K, D2 = load_tokens(k, at, live, D, BD), load_tokens(errors, at, live, D, BD)
        W2 = load(starts2 + base * PARTS * SIZE, f, d, HIDDEN, D, EVEN)
        c = load_coef(co, base, COEF_C, BC)[:, None]
        keep = tl.load(fold + base * 4)
        H = load(hiddens + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)
        slope = load(slopes + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)
        curve = load(bends + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)
        # The gradients of D1 and D2 through the state at the chunk's end.
        g_first = dot_apart(-c * K, G1, n, APART, ACC, OP, PRECISION)
        g_error = dot_apart(-c * H, G2, n, APART, ACC, OP, PRECISION)
        if MOMENTUM:
            s = load_coef(co, base, COEF_S, BC)[:, None]
            g_first = onto_apart(g_first, -s * K, T1, n, APART, OP, PRECISION)
            g_error = onto_apart(g_error, -s * H, T2, n, APART, OP, PRECISION)
        g_error = onto_apart(g_error, g_first * slope, W2, n, APART, OP, PRECISION)
        if SHARES > 1:
            tl.store(sizes + back_from % 2 * SHARES + share, size)
            g_error = meet(g_error, mail, flags + m, back_from, share, SHARES, BC, BD)
            size = _all_sizes(sizes + back_from % 2 * SHARES, SHARES)
        factor = clamp_factor(total, size, REACH, END)
        least = tl.minimum(least, factor)
        G1 *= factor
        G2 *= factor
        if MOMENTUM:
            T1 *= factor
            T2 *= factor
        g_first *= factor
        g_error = g_error * factor + load_tokens(g_D2, at, live, D, BD)
        writes = live & (share == 0)
        g_O = _error_backward(
            g_error, D2, K, v, values, rstds, g_surprise, g_v, at, live, writes, D, BD, NORM, RESIDUAL
        )
        g_O = g_O.to(OP)
        g_hidden = dot_apart(g_O, tl.trans(W2), n, APART, ACC, OP, PRECISION)
        g_hidden = onto_apart(g_hidden, -c * D2, tl.trans(G2.to(OP)), n, APART, OP, PRECISION)
        if MOMENTUM:
            g_hidden = onto_apart(g_hidden, -s * D2, tl.trans(T2.to(OP)), n, APART, OP, PRECISION)
        g_hidden += load(g_X2 + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)
        g_first = (g_first + load(g_D1 + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)).to(OP)
        g_first_layer = (g_first * curve + slope * g_hidden).to(OP)
        g_first = (g_first * slope).to(OP)
        store(g_Z + base * BC * HIDDEN, g_first_layer, t, f, BC, HIDDEN, EVEN)
        # The gradient of the state at the chunk's start.
        store_layers(g_ends1, g_ends2, base * PARTS * SIZE, G1, G2, d, f, D, HIDDEN, EVEN)
        if MOMENTUM:
            carry, past = tl.load(fold + base * 4 + 1), tl.load(fold + base * 4 + 2)
            store_layers(g_ends1, g_ends2, (base * PARTS + 1) * SIZE, T1, T2, d, f, D, HIDDEN, EVEN)
            T1 = past * T1 + carry * G1 + load(g_J1 + (base * PARTS + 1) * SIZE, d, f, D, HIDDEN, EVEN)
            T2 = past * T2 + carry * G2 + load(g_J2 + (base * PARTS + 1) * SIZE, f, d, HIDDEN, D, EVEN)
        G1 = keep * G1 + load(g_J1 + base * PARTS * SIZE, d, f, D, HIDDEN, EVEN)
        G2 = keep * G2 + load(g_J2 + base * PARTS * SIZE, f, d, HIDDEN, D, EVEN)
        G1 = onto_apart(G1, tl.trans(K), g_first_layer, n, APART, OP, PRECISION)
        G2 = onto_apart(G2, tl.trans(H), g_O, n, APART, OP, PRECISION)
        G2 = onto_apart(G2, tl.trans(g_first), D2, n, APART, OP, PRECISION)
        total += tl.load(received + base)
        if MOMENTUM:
            size = tl.maximum(
                largest(tl.maximum(tl.abs(G1), tl.abs(T1))), largest(tl.maximum(tl.abs(G2), tl.abs(T2)))
            )
        else:
            size = tl.maximum(largest(G1), largest(G2))
    if SHARES > 1:
        tl.store(sizes + n % 2 * SHARES + share, size)
        rendezvous(flags + m, (n + 1) * SHARES)
        size = _all_sizes(sizes + n % 2 * SHARES, SHARES)
    factor = clamp_factor(total, size, REACH, END)
    tl.atomic_add(clamped, 1, mask=(tl.minimum(least, factor) < 1.0) & (share == 0), sem="relaxed")
    G1 *= factor
    G2 *= factor
    if MOMENTUM:
        T1 *= factor
        T2 *= factor
    store_layers(g_first1, g_first2, m * PARTS * SIZE, G1, G2, d, f, D, HIDDEN, EVEN)
    if MOMENTUM:
        store_layers(g_first1, g_first2, (m * PARTS + 1) * SIZE, T1, T2, d, f, D, HIDDEN, EVEN)


@kernel
def carry_stream(
    k, v, starts2, co, fold, errors, values, rstds, hiddens, slopes, bends, g_surprise,
    g_X2, g_D1, g_D2, g_J1, g_J2, received, received_end, g_end1, g_end2, g_first1, g_first2,
    g_Z, g_ends1, g_ends2, g_v,
    clamped, L, n, HEADS,
    D: tl.constexpr, BD: tl.constexpr, HIDDEN: tl.constexpr, BH: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
    MOMENTUM: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr,
    REACH: tl.constexpr, END: tl.constexpr,
    APART: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Like `carry_kernel`, for a gradient that is kept in global memory, in g_first, and processed in blocks.
    g_ends may be the same tensors as g_J.

    There is one pass over the gradient per chunk. As soon as a block has reached the start of a chunk, its
    part of the gradients of D1 (kept in g_Z) and D2 of the chunk before is computed. The factor of the clamp
    is known only after the pass. It is therefore applied when a block is read again, and to the results
    computed from blocks that were not yet clamped, which are linear in them.
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
    total = tl.load(received_end + m)
    factor = 1.0
    least = total * 0.0 + 1.0
    base = m * n + n - 1
    last = base * PARTS * SIZE
    at, live = tokens(m, n - 1, L, HEADS, CHUNK, BC)
    K = load_tokens(k, at, live, D, BD)
    c = load_coef(co, base, COEF_C, BC)[:, None]
    if MOMENTUM:
        s = load_coef(co, base, COEF_S, BC)[:, None]
    g_error = tl.zeros([BC, BD], ACC)
    for j in tl.range(BLOCKS, num_stages=1):
        f = j * BH + tl.arange(0, BH)
        W2 = load(starts2 + last, f, d, HIDDEN, D, EVEN)
        G1, G2 = load_layers(g_end1, g_end2, 0, d, f, D, HIDDEN, EVEN)
        store_layers(g_first1, g_first2, 0, G1, G2, d, f, D, HIDDEN, EVEN)
        own = base * BC * HIDDEN
        H = load(hiddens + own, t, f, BC, HIDDEN, EVEN)
        slope = load(slopes + own, t, f, BC, HIDDEN, EVEN)
        g_first = dot_apart(-c * K, G1, n, APART, ACC, OP, PRECISION)
        g_error = onto_apart(g_error, -c * H, G2, n, APART, OP, PRECISION)
        if MOMENTUM:
            T1, T2 = load_layers(g_end1, g_end2, SIZE, d, f, D, HIDDEN, EVEN)
            store_layers(g_first1, g_first2, SIZE, T1, T2, d, f, D, HIDDEN, EVEN)
            g_first = onto_apart(g_first, -s * K, T1, n, APART, OP, PRECISION)
            g_error = onto_apart(g_error, -s * H, T2, n, APART, OP, PRECISION)
        g_error = onto_apart(g_error, g_first * slope, W2, n, APART, OP, PRECISION)
        store(g_Z + own, g_first, t, f, BC, HIDDEN, EVEN)
    for back_from in tl.range(n, num_stages=1):
        tl.debug_barrier()  # the blocks are read back by threads that did not write them
        i = n - 1 - back_from
        base = m * n + i
        here = base * PARTS * SIZE
        D2 = load_tokens(errors, at, live, D, BD)
        g_error = g_error * factor + load_tokens(g_D2, at, live, D, BD)
        g_O = _error_backward(
            g_error, D2, K, v, values, rstds, g_surprise, g_v, at, live, live, D, BD, NORM, RESIDUAL
        )
        g_O = g_O.to(OP)
        keep = tl.load(fold + base * 4)
        if MOMENTUM:
            carry, past = tl.load(fold + base * 4 + 1), tl.load(fold + base * 4 + 2)
        more = i > 0
        before = tl.where(more, base - 1, base)
        here_next = before * PARTS * SIZE
        at, live = tokens(m, i - 1, L, HEADS, CHUNK, BC)
        live = live & more
        K_next = load_tokens(k, at, live, D, BD)
        c_next = load_coef(co, before, COEF_C, BC)[:, None]
        Kt, less, K_less = tl.trans(K), (-c * D2).to(OP), (-c_next * K_next).to(OP)
        if MOMENTUM:
            s_next = load_coef(co, before, COEF_S, BC)[:, None]
            less_past, K_past = (-s * D2).to(OP), (-s_next * K_next).to(OP)
        g_error = tl.zeros([BC, BD], ACC)
        size = tl.max(tl.max(g_error, 1), 0)
        for j in tl.range(BLOCKS, num_stages=1):
            f = j * BH + tl.arange(0, BH)
            own, ahead = base * BC * HIDDEN, before * BC * HIDDEN
            W2 = load(starts2 + here, f, d, HIDDEN, D, EVEN)
            G1 = load(g_first1, d, f, D, HIDDEN, EVEN) * factor
            G2 = load(g_first2, f, d, HIDDEN, D, EVEN) * factor
            H = load(hiddens + own, t, f, BC, HIDDEN, EVEN)
            slope = load(slopes + own, t, f, BC, HIDDEN, EVEN)
            curve = load(bends + own, t, f, BC, HIDDEN, EVEN)
            g_first = load(g_Z + own, t, f, BC, HIDDEN, EVEN) * factor + load(
                g_D1 + own, t, f, BC, HIDDEN, EVEN
            )
            g_first = g_first.to(OP)
            now1 = load(g_J1 + here, d, f, D, HIDDEN, EVEN) + keep * G1
            now2 = load(g_J2 + here, f, d, HIDDEN, D, EVEN) + keep * G2
            g_hidden = dot_apart(g_O, tl.trans(W2), n, APART, ACC, OP, PRECISION)
            g_hidden = onto_apart(g_hidden, less, tl.trans(G2.to(OP)), n, APART, OP, PRECISION)
            if MOMENTUM:
                T1 = load(g_first1 + SIZE, d, f, D, HIDDEN, EVEN) * factor
                T2 = load(g_first2 + SIZE, f, d, HIDDEN, D, EVEN) * factor
                g_hidden = onto_apart(g_hidden, less_past, tl.trans(T2.to(OP)), n, APART, OP, PRECISION)
                held1 = load(g_J1 + here + SIZE, d, f, D, HIDDEN, EVEN) + carry * G1 + past * T1
                held2 = load(g_J2 + here + SIZE, f, d, HIDDEN, D, EVEN) + carry * G2 + past * T2
            g_hidden += load(g_X2 + own, t, f, BC, HIDDEN, EVEN)
            g_first_layer = (g_first * curve + slope * g_hidden).to(OP)
            tl.debug_barrier()  # all threads must have read g_Z and g_J before any writes there
            store(g_Z + own, g_first_layer, t, f, BC, HIDDEN, EVEN)
            store_layers(g_ends1, g_ends2, here, G1, G2, d, f, D, HIDDEN, EVEN)
            G1 = onto_apart(now1, Kt, g_first_layer, n, APART, OP, PRECISION)
            G2 = onto_apart(now2, tl.trans(H), g_O, n, APART, OP, PRECISION)
            G2 = onto_apart(G2, tl.trans((g_first * slope).to(OP)), D2, n, APART, OP, PRECISION)
            store_layers(g_first1, g_first2, 0, G1, G2, d, f, D, HIDDEN, EVEN)
            if MOMENTUM:
                store_layers(g_ends1, g_ends2, here + SIZE, T1, T2, d, f, D, HIDDEN, EVEN)
                store_layers(g_first1, g_first2, SIZE, held1, held2, d, f, D, HIDDEN, EVEN)
                size = tl.maximum(size, largest(tl.maximum(tl.abs(G1), tl.abs(held1))))
                size = tl.maximum(size, largest(tl.maximum(tl.abs(G2), tl.abs(held2))))
            else:
                size = tl.maximum(size, tl.maximum(largest(G1), largest(G2)))
            if more:
                H_next = load(hiddens + ahead, t, f, BC, HIDDEN, EVEN)
                g_next = dot_apart(K_less, G1, n, APART, ACC, OP, PRECISION)
                g_error = onto_apart(g_error, -c_next * H_next, G2, n, APART, OP, PRECISION)
                if MOMENTUM:
                    g_next = onto_apart(g_next, K_past, held1, n, APART, OP, PRECISION)
                    g_error = onto_apart(g_error, -s_next * H_next, held2, n, APART, OP, PRECISION)
                store(g_Z + ahead, g_next, t, f, BC, HIDDEN, EVEN)
                g_next *= load(slopes + ahead, t, f, BC, HIDDEN, EVEN)
                W2 = load(starts2 + here_next, f, d, HIDDEN, D, EVEN)
                g_error = onto_apart(g_error, g_next, W2, n, APART, OP, PRECISION)
        total += tl.load(received + base)
        factor = clamp_factor(total, size, REACH, END)
        least = tl.minimum(least, factor)
        K, c = K_next, c_next
        if MOMENTUM:
            s = s_next
    tl.atomic_add(clamped, 1, mask=least < 1.0, sem="relaxed")
    tl.debug_barrier()
    for j in tl.range(BLOCKS, num_stages=1):
        f = j * BH + tl.arange(0, BH)
        G1 = load(g_first1, d, f, D, HIDDEN, EVEN) * factor
        G2 = load(g_first2, f, d, HIDDEN, D, EVEN) * factor
        tl.debug_barrier()
        store_layers(g_first1, g_first2, 0, G1, G2, d, f, D, HIDDEN, EVEN)
        if MOMENTUM:
            T1 = load(g_first1 + SIZE, d, f, D, HIDDEN, EVEN) * factor
            T2 = load(g_first2 + SIZE, f, d, HIDDEN, D, EVEN) * factor
            tl.debug_barrier()
            store_layers(g_first1, g_first2, SIZE, T1, T2, d, f, D, HIDDEN, EVEN)
