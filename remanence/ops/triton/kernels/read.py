# mypy: ignore-errors
"""The answers of all chunks, computed from the states at the starts of the chunks, and their backward."""

from __future__ import annotations

import triton.language as tl

from remanence.ops.triton.kernels.tools import (
    COEF_A,
    COEF_R,
    activate,
    activate_with_slope,
    chunk_tokens,
    derivatives,
    dot,
    dot_in_loop,
    kernel,
    load,
    load_coef,
    load_layers,
    load_tokens,
    norm,
    norm_backward,
    program_chunk_index,
    square_offsets,
    store,
    store_coef,
    store_tokens,
)


@kernel
def read_kernel(
    q, k, starts1, starts2, P, coef, errors, hiddens, slopes, hidden_errors, curvatures, query_preacts, scores,
    answers, answer_rstds, y, nonfinite,
    L, n, HEADS,
    D: tl.constexpr, BD: tl.constexpr, HIDDEN: tl.constexpr, BH: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
    MOMENTUM: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, GELU: tl.constexpr,
    SAVE_FOR_BACKWARD: tl.constexpr,
    IN_LOOP: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the answers of one chunk, and flag it in `nonfinite` if one of them is not finite.

    With SAVE_FOR_BACKWARD, it writes what backward needs, rounded as in the products here. For the keys: X2 =
    act(Z1) (hiddens), act'(Z1) (slopes), D1 (hidden_errors) and act''(Z1) D2 W2^T (curvatures). For the queries:
    the first layer's output before the activation (query_preacts), A X2^T (scores), and the output and 1 /
    standard deviation of the LayerNorm (answers, answer_rstds).
    """
    i, m, base = program_chunk_index(n)
    d, t = tl.arange(0, BD), tl.arange(0, BC)
    PARTS: tl.constexpr = 2 if MOMENTUM else 1
    SIZE: tl.constexpr = D * HIDDEN
    BLOCKS: tl.constexpr = (HIDDEN + BH - 1) // BH
    EVEN: tl.constexpr = (D == BD) and (HIDDEN == BH * BLOCKS)
    starts1 += base * PARTS * SIZE
    starts2 += base * PARTS * SIZE
    at, row_mask = chunk_tokens(m, i, L, HEADS, CHUNK, BC)
    Q, K = load_tokens(q, at, row_mask, D, BD), load_tokens(k, at, row_mask, D, BD)
    D2 = load_tokens(errors, at, row_mask, D, BD)
    a = load_coef(coef, base, COEF_A, BC)[:, None]
    if MOMENTUM:
        r = load_coef(coef, base, COEF_R, BC)[:, None]
    square = square_offsets(base, BC)
    masked_scores = (dot(Q, tl.trans(K), OP, PRECISION) * tl.load(P + square)).to(OP)
    score_tile = tl.zeros([BC, BC], ACC)
    out = tl.zeros([BC, BD], ACC)
    for j in tl.range(BLOCKS, num_stages=1):
        f = j * BH + tl.arange(0, BH)
        W1, W2 = load_layers(starts1, starts2, 0, d, f, D, HIDDEN, EVEN)
        back = dot_in_loop(D2, tl.trans(W2), n, IN_LOOP, ACC, OP, PRECISION)
        if SAVE_FOR_BACKWARD:
            H, slope, curvature = derivatives(dot_in_loop(K, W1, n, IN_LOOP, ACC, OP, PRECISION), GELU)
            store(curvatures + base * BC * HIDDEN, back * curvature, t, f, BC, HIDDEN, EVEN)
            store(slopes + base * BC * HIDDEN, slope, t, f, BC, HIDDEN, EVEN)
        else:
            H, slope = activate_with_slope(dot_in_loop(K, W1, n, IN_LOOP, ACC, OP, PRECISION), GELU)
        H, D1 = H.to(OP), (back * slope).to(OP)
        if SAVE_FOR_BACKWARD:
            store(hiddens + base * BC * HIDDEN, H, t, f, BC, HIDDEN, EVEN)
            store(hidden_errors + base * BC * HIDDEN, D1, t, f, BC, HIDDEN, EVEN)
        Z = a * dot_in_loop(Q, W1, n, IN_LOOP, ACC, OP, PRECISION) - dot_in_loop(
            masked_scores, D1, n, IN_LOOP, ACC, OP, PRECISION
        )
        if MOMENTUM:
            Z += r * dot_in_loop(
                Q, load(starts1 + SIZE, d, f, D, HIDDEN, EVEN), n, IN_LOOP, ACC, OP, PRECISION
            )
        if SAVE_FOR_BACKWARD:
            store(query_preacts + base * BC * HIDDEN, Z, t, f, BC, HIDDEN, EVEN)
        A = activate(Z, GELU)
        score_tile += dot(A, tl.trans(H), OP, PRECISION)
        out += dot(a * A, W2, OP, PRECISION)
        if MOMENTUM:
            out += dot(r * A, load(starts2 + SIZE, f, d, HIDDEN, D, EVEN), OP, PRECISION)
    if SAVE_FOR_BACKWARD:
        tl.store(scores + square, score_tile.to(scores.dtype.element_ty))
    out -= dot(score_tile * tl.load(P + square), D2, OP, PRECISION)
    if NORM:
        out, rstd = norm(out, D, BD)
        if SAVE_FOR_BACKWARD:
            store_tokens(answers, out, at, row_mask, D, BD)
            tl.store(answer_rstds + at, rstd, mask=row_mask)
    if RESIDUAL:
        out += Q
    store_tokens(y, out, at, row_mask, D, BD)
    is_nonfinite = tl.where(row_mask[:, None] & ~(tl.abs(out) < float("inf")), 1, 0)
    tl.store(nonfinite + base, tl.max(tl.max(is_nonfinite, 1), 0))


@kernel
def read_backward(
    q, starts1, starts2, P, coef, errors, hiddens, query_preacts, scores, answers, answer_rstds, g_y, g_surprise,
    g_q, g_P, g_coef, g_hiddens, g_query_preacts, g_errors, g_starts1, g_starts2, received_norm, L, n, HEADS,
    D: tl.constexpr, BD: tl.constexpr, HIDDEN: tl.constexpr, BH: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
    MOMENTUM: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, GELU: tl.constexpr,
    IN_LOOP: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Backward of the answers: through the second layer and the state, down to the gradient of the first
    layer's output for the queries (g_query_preacts). The first layer's output has a term -[(Q K^T) P] D1; its
    backward, which adds to g_q, g_P and g_errors, is in `read_scores_backward`.
    """
    i, m, base = program_chunk_index(n)
    d, t = tl.arange(0, BD), tl.arange(0, BC)
    PARTS: tl.constexpr = 2 if MOMENTUM else 1
    SIZE: tl.constexpr = D * HIDDEN
    BLOCKS: tl.constexpr = (HIDDEN + BH - 1) // BH
    EVEN: tl.constexpr = (D == BD) and (HIDDEN == BH * BLOCKS)
    starts1 += base * PARTS * SIZE
    starts2 += base * PARTS * SIZE
    g_starts1 += base * PARTS * SIZE
    g_starts2 += base * PARTS * SIZE
    at, row_mask = chunk_tokens(m, i, L, HEADS, CHUNK, BC)
    a = load_coef(coef, base, COEF_A, BC)[:, None]
    if MOMENTUM:
        r = load_coef(coef, base, COEF_R, BC)[:, None]
    g_out = load_tokens(g_y, at, row_mask, D, BD).to(ACC)
    g_s = tl.load(g_surprise + at, mask=row_mask, other=0.0)
    Q = load_tokens(q, at, row_mask, D, BD)
    largest_query = tl.maximum(tl.max(tl.max(tl.abs(Q).to(ACC), 1), 0), 1.0)
    tl.store(
        received_norm + base, tl.sum(tl.sum(tl.abs(g_out), 1), 0) * largest_query + tl.sum(tl.abs(g_s), 0)
    )
    if NORM:
        rstd = tl.load(answer_rstds + at, mask=row_mask, other=0.0)
        g_out = norm_backward(g_out, load_tokens(answers, at, row_mask, D, BD).to(ACC), rstd, D, BD)
    g_O = g_out.to(OP)
    # The second layer's output has the term -[(A X2^T) P] D2, which is like attention with masked scores.
    square = square_offsets(base, BC)
    mix, score_tile = tl.load(P + square).to(ACC), tl.load(scores + square).to(ACC)
    g_error = -dot(tl.trans((score_tile * mix).to(OP)), g_O, OP, PRECISION)
    store_tokens(g_errors, g_error, at, row_mask, D, BD)
    g_masked_scores = -dot(g_O, tl.trans(load_tokens(errors, at, row_mask, D, BD)), OP, PRECISION)
    tl.store(g_P + square, (g_masked_scores * score_tile).to(g_P.dtype.element_ty))
    g_scores = (g_masked_scores * mix).to(OP)
    g_query = tl.zeros([BC, BD], ACC)
    if RESIDUAL:
        g_query += load_tokens(g_y, at, row_mask, D, BD)
    g_a = tl.zeros([BC], ACC)
    g_r = tl.zeros([BC], ACC)
    for j in tl.range(BLOCKS, num_stages=1):
        f = j * BH + tl.arange(0, BH)
        H = load(hiddens + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)
        A, slope = activate_with_slope(
            load(query_preacts + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN).to(ACC), GELU
        )
        store(
            g_hiddens + base * BC * HIDDEN,
            dot_in_loop(tl.trans(g_scores), A, n, IN_LOOP, ACC, OP, PRECISION),
            t,
            f,
            BC,
            HIDDEN,
            EVEN,
        )
        store(
            g_starts2,
            dot_in_loop(tl.trans((a * A).to(OP)), g_O, n, IN_LOOP, ACC, OP, PRECISION),
            f,
            d,
            HIDDEN,
            D,
            EVEN,
        )
        g_first = dot_in_loop(g_scores, H, n, IN_LOOP, ACC, OP, PRECISION)
        back = dot_in_loop(
            g_O, tl.trans(load(starts2, f, d, HIDDEN, D, EVEN)), n, IN_LOOP, ACC, OP, PRECISION
        )
        g_a += tl.sum(back * A, 1)
        g_first += a * back
        if MOMENTUM:
            store(
                g_starts2 + SIZE,
                dot_in_loop(tl.trans((r * A).to(OP)), g_O, n, IN_LOOP, ACC, OP, PRECISION),
                f,
                d,
                HIDDEN,
                D,
                EVEN,
            )
            back = dot_in_loop(
                g_O, tl.trans(load(starts2 + SIZE, f, d, HIDDEN, D, EVEN)), n, IN_LOOP, ACC, OP, PRECISION
            )
            g_r += tl.sum(back * A, 1)
            g_first += r * back
        g_first *= slope
        store(g_query_preacts + base * BC * HIDDEN, g_first, t, f, BC, HIDDEN, EVEN)
        store(
            g_starts1,
            dot_in_loop(tl.trans(Q), a * g_first, n, IN_LOOP, ACC, OP, PRECISION),
            d,
            f,
            D,
            HIDDEN,
            EVEN,
        )
        back = dot_in_loop(
            g_first, tl.trans(load(starts1, d, f, D, HIDDEN, EVEN)), n, IN_LOOP, ACC, OP, PRECISION
        )
        g_a += tl.sum(back * Q, 1)
        g_query += a * back
        if MOMENTUM:
            store(
                g_starts1 + SIZE,
                dot_in_loop(tl.trans(Q), r * g_first, n, IN_LOOP, ACC, OP, PRECISION),
                d,
                f,
                D,
                HIDDEN,
                EVEN,
            )
            back = dot_in_loop(
                g_first, tl.trans(load(starts1 + SIZE, d, f, D, HIDDEN, EVEN)), n, IN_LOOP, ACC, OP, PRECISION
            )
            g_r += tl.sum(back * Q, 1)
            g_query += r * back
    store_tokens(g_q, g_query, at, row_mask, D, BD)
    store_coef(g_coef, g_a, base, COEF_A, BC)
    if MOMENTUM:
        store_coef(g_coef, g_r, base, COEF_R, BC)


@kernel
def read_scores_backward(
    q, k, starts2, P, slopes, hidden_errors, g_query_preacts, g_q, g_k, g_P, g_hidden_errors, g_errors, L, n, HEADS,
    D: tl.constexpr, BD: tl.constexpr, HIDDEN: tl.constexpr, BH: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
    MOMENTUM: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Backward of the term -[(Q K^T) P] D1 in the first layer's output, the masked scores times the errors.
    Adds its part to g_q, g_P and g_errors, and writes g_k and g_hidden_errors. The part of g_errors that goes
    through D1 and W2 is included. g_hidden_errors may be the same tensor as g_query_preacts.

    After this, g_errors is complete except for the part from later chunks.
    """
    i, m, base = program_chunk_index(n)
    d, t = tl.arange(0, BD), tl.arange(0, BC)
    PARTS: tl.constexpr = 2 if MOMENTUM else 1
    SIZE: tl.constexpr = D * HIDDEN
    BLOCKS: tl.constexpr = (HIDDEN + BH - 1) // BH
    EVEN: tl.constexpr = (D == BD) and (HIDDEN == BH * BLOCKS)
    at, row_mask = chunk_tokens(m, i, L, HEADS, CHUNK, BC)
    square = square_offsets(base, BC)
    Q, K = load_tokens(q, at, row_mask, D, BD), load_tokens(k, at, row_mask, D, BD)
    # Loaded transposed, [j t], so that the products below need no transposition.
    square_transposed = t[:, None] + t[None, :] * BC + base * BC * BC
    masked_scores = (dot(K, tl.trans(Q), OP, PRECISION) * tl.load(P + square_transposed)).to(OP)
    g_masked_scores = tl.zeros([BC, BC], ACC)
    g_error = tl.zeros([BC, BD], ACC)
    for j in tl.range(BLOCKS, num_stages=1):
        f = j * BH + tl.arange(0, BH)
        g_first = load(g_query_preacts + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)
        g_masked_scores += dot(
            g_first, tl.trans(load(hidden_errors + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)), OP, PRECISION
        )
        g_first = -dot(masked_scores, g_first, OP, PRECISION)
        slope = load(slopes + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)
        g_error += dot(
            g_first * slope, load(starts2 + base * PARTS * SIZE, f, d, HIDDEN, D, EVEN), OP, PRECISION
        )
        tl.debug_barrier()  # g_hidden_errors may be g_query_preacts: all threads must have read before any writes
        store(g_hidden_errors + base * BC * HIDDEN, g_first, t, f, BC, HIDDEN, EVEN)
    g_error += load_tokens(g_errors, at, row_mask, D, BD)
    store_tokens(g_errors, g_error, at, row_mask, D, BD)
    g_mix = tl.load(g_P + square) - g_masked_scores * dot(Q, tl.trans(K), OP, PRECISION)
    tl.debug_barrier()
    tl.store(g_P + square, g_mix.to(g_P.dtype.element_ty))
    g_scores = (g_masked_scores * tl.load(P + square)).to(OP)
    store_tokens(g_k, -dot(tl.trans(g_scores), Q, OP, PRECISION), at, row_mask, D, BD)
    g_query = load_tokens(g_q, at, row_mask, D, BD) - dot(g_scores, K, OP, PRECISION)
    tl.debug_barrier()
    store_tokens(g_q, g_query, at, row_mask, D, BD)
