# mypy: ignore-errors
"""The answers of all chunks, computed from the states at the starts of the chunks, and their backward."""

from __future__ import annotations

import triton.language as tl

from remanence.ops.triton.kernels.tools import (
    COEF_A,
    COEF_R,
    activate,
    activate_with_slope,
    derivatives,
    dot,
    dot_apart,
    kernel,
    load,
    load_coef,
    load_layers,
    load_tokens,
    norm,
    pull,
    square_of,
    store,
    store_coef,
    store_tokens,
    tokens,
    which_chunk,
)


@kernel
def read_kernel(
    q, k, starts1, starts2, P, co, errors, hiddens, slopes, firsts, bends, reads, scores, answers, spreads, y, bad,
    L, n, HEADS,
    D: tl.constexpr, BD: tl.constexpr, HIDDEN: tl.constexpr, BH: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
    MOMENTUM: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, GELU: tl.constexpr, TRAIN: tl.constexpr,
    APART: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the answers of one chunk, and flag it in `bad` if one of them is not finite.

    With TRAIN, it writes what backward needs, rounded as in the products here. For the keys: X2 = act(Z_1)
    (hiddens), act'(Z_1) (slopes), D1 (firsts) and act''(Z_1) D2 W2^T (bends). For the queries: Z_1 (reads), A
    X2^T (scores), and the output and scale of the LayerNorm (answers, spreads).
    """
    i, m, base = which_chunk(n)
    d, t = tl.arange(0, BD), tl.arange(0, BC)
    PARTS: tl.constexpr = 2 if MOMENTUM else 1
    SIZE: tl.constexpr = D * HIDDEN
    BLOCKS: tl.constexpr = (HIDDEN + BH - 1) // BH
    EVEN: tl.constexpr = (D == BD) and (HIDDEN == BH * BLOCKS)
    starts1 += base * PARTS * SIZE
    starts2 += base * PARTS * SIZE
    at, live = tokens(m, i, L, HEADS, CHUNK, BC)
    Q, K = load_tokens(q, at, live, D, BD), load_tokens(k, at, live, D, BD)
    D2 = load_tokens(errors, at, live, D, BD)
    a = load_coef(co, base, COEF_A, BC)[:, None]
    if MOMENTUM:
        r = load_coef(co, base, COEF_R, BC)[:, None]
    square = square_of(base, BC)
    blend = (dot(Q, tl.trans(K), OP, PRECISION) * tl.load(P + square)).to(OP)
    met = tl.zeros([BC, BC], ACC)
    out = tl.zeros([BC, BD], ACC)
    for j in tl.range(BLOCKS, num_stages=1):
        f = j * BH + tl.arange(0, BH)
        W1, W2 = load_layers(starts1, starts2, 0, d, f, D, HIDDEN, EVEN)
        back = dot_apart(D2, tl.trans(W2), n, APART, ACC, OP, PRECISION)
        if TRAIN:
            H, slope, bend = derivatives(dot_apart(K, W1, n, APART, ACC, OP, PRECISION), GELU)
            store(bends + base * BC * HIDDEN, back * bend, t, f, BC, HIDDEN, EVEN)
            store(slopes + base * BC * HIDDEN, slope, t, f, BC, HIDDEN, EVEN)
        else:
            H, slope = activate_with_slope(dot_apart(K, W1, n, APART, ACC, OP, PRECISION), GELU)
        H, D1 = H.to(OP), (back * slope).to(OP)
        if TRAIN:
            store(hiddens + base * BC * HIDDEN, H, t, f, BC, HIDDEN, EVEN)
            store(firsts + base * BC * HIDDEN, D1, t, f, BC, HIDDEN, EVEN)
        Z = a * dot_apart(Q, W1, n, APART, ACC, OP, PRECISION) - dot_apart(
            blend, D1, n, APART, ACC, OP, PRECISION
        )
        if MOMENTUM:
            Z += r * dot_apart(Q, load(starts1 + SIZE, d, f, D, HIDDEN, EVEN), n, APART, ACC, OP, PRECISION)
        if TRAIN:
            store(reads + base * BC * HIDDEN, Z, t, f, BC, HIDDEN, EVEN)
        A = activate(Z, GELU)
        met += dot(A, tl.trans(H), OP, PRECISION)
        out += dot(a * A, W2, OP, PRECISION)
        if MOMENTUM:
            out += dot(r * A, load(starts2 + SIZE, f, d, HIDDEN, D, EVEN), OP, PRECISION)
    if TRAIN:
        tl.store(scores + square, met.to(scores.dtype.element_ty))
    out -= dot(met * tl.load(P + square), D2, OP, PRECISION)
    if NORM:
        out, rstd = norm(out, D, BD)
        if TRAIN:
            store_tokens(answers, out, at, live, D, BD)
            tl.store(spreads + at, rstd, mask=live)
    if RESIDUAL:
        out += Q
    store_tokens(y, out, at, live, D, BD)
    wrong = tl.where(live[:, None] & ~(tl.abs(out) < float("inf")), 1, 0)
    tl.store(bad + base, tl.max(tl.max(wrong, 1), 0))


@kernel
def read_backward(
    q, starts1, starts2, P, co, errors, hiddens, reads, scores, answers, spreads, g_y, g_surprise,
    g_q, g_P, g_co, g_X2, g_Z, g_D2, g_J1, g_J2, received, L, n, HEADS,
    D: tl.constexpr, BD: tl.constexpr, HIDDEN: tl.constexpr, BH: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
    MOMENTUM: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, GELU: tl.constexpr,
    APART: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Backward of the answers: through the second layer and the state, down to the gradient of the queries'
    Z_1 (g_Z). The masked product of the first layer is not included in g_q, g_P and g_D2; `blend_backward`
    adds it.
    """
    i, m, base = which_chunk(n)
    d, t = tl.arange(0, BD), tl.arange(0, BC)
    PARTS: tl.constexpr = 2 if MOMENTUM else 1
    SIZE: tl.constexpr = D * HIDDEN
    BLOCKS: tl.constexpr = (HIDDEN + BH - 1) // BH
    EVEN: tl.constexpr = (D == BD) and (HIDDEN == BH * BLOCKS)
    starts1 += base * PARTS * SIZE
    starts2 += base * PARTS * SIZE
    g_J1 += base * PARTS * SIZE
    g_J2 += base * PARTS * SIZE
    at, live = tokens(m, i, L, HEADS, CHUNK, BC)
    a = load_coef(co, base, COEF_A, BC)[:, None]
    if MOMENTUM:
        r = load_coef(co, base, COEF_R, BC)[:, None]
    g_out = load_tokens(g_y, at, live, D, BD).to(ACC)
    g_s = tl.load(g_surprise + at, mask=live, other=0.0)
    Q = load_tokens(q, at, live, D, BD)
    reach = tl.maximum(tl.max(tl.max(tl.abs(Q).to(ACC), 1), 0), 1.0)
    tl.store(received + base, tl.sum(tl.sum(tl.abs(g_out), 1), 0) * reach + tl.sum(tl.abs(g_s), 0))
    if NORM:
        rstd = tl.load(spreads + at, mask=live, other=0.0)
        g_out = pull(g_out, load_tokens(answers, at, live, D, BD).to(ACC), rstd, D, BD)
    g_O = g_out.to(OP)
    # The masked product of layer 2: -[(A X^T) P] D2.
    square = square_of(base, BC)
    mix, met = tl.load(P + square).to(ACC), tl.load(scores + square).to(ACC)
    g_error = -dot(tl.trans((met * mix).to(OP)), g_O, OP, PRECISION)
    store_tokens(g_D2, g_error, at, live, D, BD)
    g_blend = -dot(g_O, tl.trans(load_tokens(errors, at, live, D, BD)), OP, PRECISION)
    tl.store(g_P + square, (g_blend * met).to(g_P.dtype.element_ty))
    g_scores = (g_blend * mix).to(OP)
    g_query = tl.zeros([BC, BD], ACC)
    if RESIDUAL:
        g_query += load_tokens(g_y, at, live, D, BD)
    g_a = tl.zeros([BC], ACC)
    g_r = tl.zeros([BC], ACC)
    for j in tl.range(BLOCKS, num_stages=1):
        f = j * BH + tl.arange(0, BH)
        H = load(hiddens + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)
        A, slope = activate_with_slope(load(reads + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN).to(ACC), GELU)
        store(
            g_X2 + base * BC * HIDDEN,
            dot_apart(tl.trans(g_scores), A, n, APART, ACC, OP, PRECISION),
            t,
            f,
            BC,
            HIDDEN,
            EVEN,
        )
        store(
            g_J2,
            dot_apart(tl.trans((a * A).to(OP)), g_O, n, APART, ACC, OP, PRECISION),
            f,
            d,
            HIDDEN,
            D,
            EVEN,
        )
        g_first = dot_apart(g_scores, H, n, APART, ACC, OP, PRECISION)
        back = dot_apart(g_O, tl.trans(load(starts2, f, d, HIDDEN, D, EVEN)), n, APART, ACC, OP, PRECISION)
        g_a += tl.sum(back * A, 1)
        g_first += a * back
        if MOMENTUM:
            store(
                g_J2 + SIZE,
                dot_apart(tl.trans((r * A).to(OP)), g_O, n, APART, ACC, OP, PRECISION),
                f,
                d,
                HIDDEN,
                D,
                EVEN,
            )
            back = dot_apart(
                g_O, tl.trans(load(starts2 + SIZE, f, d, HIDDEN, D, EVEN)), n, APART, ACC, OP, PRECISION
            )
            g_r += tl.sum(back * A, 1)
            g_first += r * back
        g_first *= slope
        store(g_Z + base * BC * HIDDEN, g_first, t, f, BC, HIDDEN, EVEN)
        store(g_J1, dot_apart(tl.trans(Q), a * g_first, n, APART, ACC, OP, PRECISION), d, f, D, HIDDEN, EVEN)
        back = dot_apart(
            g_first, tl.trans(load(starts1, d, f, D, HIDDEN, EVEN)), n, APART, ACC, OP, PRECISION
        )
        g_a += tl.sum(back * Q, 1)
        g_query += a * back
        if MOMENTUM:
            store(
                g_J1 + SIZE,
                dot_apart(tl.trans(Q), r * g_first, n, APART, ACC, OP, PRECISION),
                d,
                f,
                D,
                HIDDEN,
                EVEN,
            )
            back = dot_apart(
                g_first, tl.trans(load(starts1 + SIZE, d, f, D, HIDDEN, EVEN)), n, APART, ACC, OP, PRECISION
            )
            g_r += tl.sum(back * Q, 1)
            g_query += r * back
    store_tokens(g_q, g_query, at, live, D, BD)
    store_coef(g_co, g_a, base, COEF_A, BC)
    if MOMENTUM:
        store_coef(g_co, g_r, base, COEF_R, BC)


@kernel
def blend_backward(
    q, k, starts2, P, slopes, firsts, g_Z, g_q, g_k, g_P, g_D1, g_D2, L, n, HEADS,
    D: tl.constexpr, BD: tl.constexpr, HIDDEN: tl.constexpr, BH: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
    MOMENTUM: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Backward of the first layer's masked product, -[(Q K^T) P] D1. Adds its part to g_q, g_P and g_D2, and
    writes g_k and g_D1. The part of g_D2 that goes through D1 and W2 is included. g_D1 may be the same tensor
    as g_Z.

    After this, g_D2 is complete except for the part from later chunks.
    """
    i, m, base = which_chunk(n)
    d, t = tl.arange(0, BD), tl.arange(0, BC)
    PARTS: tl.constexpr = 2 if MOMENTUM else 1
    SIZE: tl.constexpr = D * HIDDEN
    BLOCKS: tl.constexpr = (HIDDEN + BH - 1) // BH
    EVEN: tl.constexpr = (D == BD) and (HIDDEN == BH * BLOCKS)
    at, live = tokens(m, i, L, HEADS, CHUNK, BC)
    square = square_of(base, BC)
    Q, K = load_tokens(q, at, live, D, BD), load_tokens(k, at, live, D, BD)
    # Loaded transposed, [j t], so that the products below need no transposition.
    across = t[:, None] + t[None, :] * BC + base * BC * BC
    blend = (dot(K, tl.trans(Q), OP, PRECISION) * tl.load(P + across)).to(OP)
    g_blend = tl.zeros([BC, BC], ACC)
    g_error = tl.zeros([BC, BD], ACC)
    for j in tl.range(BLOCKS, num_stages=1):
        f = j * BH + tl.arange(0, BH)
        g_first = load(g_Z + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)
        g_blend += dot(
            g_first, tl.trans(load(firsts + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)), OP, PRECISION
        )
        g_first = -dot(blend, g_first, OP, PRECISION)
        slope = load(slopes + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)
        g_error += dot(
            g_first * slope, load(starts2 + base * PARTS * SIZE, f, d, HIDDEN, D, EVEN), OP, PRECISION
        )
        tl.debug_barrier()  # g_D1 may be g_Z: all threads must have read before any writes
        store(g_D1 + base * BC * HIDDEN, g_first, t, f, BC, HIDDEN, EVEN)
    g_error += load_tokens(g_D2, at, live, D, BD)
    store_tokens(g_D2, g_error, at, live, D, BD)
    g_mix = tl.load(g_P + square) - g_blend * dot(Q, tl.trans(K), OP, PRECISION)
    tl.debug_barrier()
    tl.store(g_P + square, g_mix.to(g_P.dtype.element_ty))
    g_scores = (g_blend * tl.load(P + square)).to(OP)
    store_tokens(g_k, -dot(tl.trans(g_scores), Q, OP, PRECISION), at, live, D, BD)
    g_query = load_tokens(g_q, at, live, D, BD) - dot(g_scores, K, OP, PRECISION)
    tl.debug_barrier()
    store_tokens(g_q, g_query, at, live, D, BD)
