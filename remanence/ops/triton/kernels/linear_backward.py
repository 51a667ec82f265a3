# mypy: ignore-errors
"""Backward of a one-layer memory.

    linear_read_backward   gradients of q, a, r; the answers' part of those of P, k, D and of the start state
    linear_state_backward  iterate the gradient of the state from the last chunk to the first
    linear_keys_backward   gradients of k, v, c, s and end_factors; the predictions' part of those of P, a, r

The part of the gradient of a chunk's start state that does not come through its end state is summed
beforehand (g_starts). Only the part that comes through the end state is therefore sequential. The state and
its gradients are transposed, as in linear.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from remanence.ops.triton.kernels.linear import previous_token_coef, previous_token_P
from remanence.ops.triton.kernels.tools import (
    COEF_A,
    COEF_C,
    COEF_R,
    COEF_S,
    chunk_tokens,
    clamp_factor,
    dot,
    kernel,
    load,
    load_coef,
    load_columns,
    load_tokens,
    norm_backward,
    norm_double_backward,
    program_chunk_index,
    square_offsets,
    store,
    store_coef,
    store_columns,
    store_tokens,
)


@triton.jit
def _loss_slope(
    v,
    value,
    K,
    at,
    row_mask,
    cols,
    E: tl.constexpr,
    SQUARED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACC: tl.constexpr,
):
    """Return the derivative of the loss with respect to the output of the LayerNorm."""
    slope = -load_columns(v, at, row_mask, cols, E).to(ACC)
    if SQUARED:
        slope += value
        if RESIDUAL:
            slope += K
    return slope


@kernel
def linear_read_backward(
    q, k, v, log_keep, U, R, starts, P, coef, errors, predictions, prediction_rstds, answers, answer_rstds, g_y,
    g_surprise,
    g_q, g_k, g_P, g_coef, g_errors, g_starts, received_norm, L, n, HEADS,
    D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
    MOMENTUM: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, SQUARED: tl.constexpr,
    TOKEN_EXACT: tl.constexpr,
    DECAY_FIRST: tl.constexpr,
    ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Backward of the answers and of the surprise of one chunk; see the module's docstring."""
    i, m, base = program_chunk_index(n)
    d, t = tl.arange(0, BD), tl.arange(0, BC)
    PARTS: tl.constexpr = 2 if MOMENTUM else 1
    SIZE: tl.constexpr = D * E
    BLOCKS: tl.constexpr = (E + BV - 1) // BV
    EVEN: tl.constexpr = (D == BD) and (E % BV == 0)
    starts += base * PARTS * SIZE
    g_starts += base * PARTS * SIZE
    at, row_mask = chunk_tokens(m, i, L, HEADS, CHUNK, BC)
    Q, K = load_tokens(q, at, row_mask, D, BD), load_tokens(k, at, row_mask, D, BD)
    a = load_coef(coef, base, COEF_A, BC)[:, None]
    w = tl.load(g_surprise + at, mask=row_mask, other=0.0)
    square = square_offsets(base, BC)
    if NORM:
        answer_rstd = tl.load(answer_rstds + at, mask=row_mask, other=0.0)
    # Three passes over the columns, each with few sums, to save registers.
    g_masked_scores = tl.zeros([BC, BC], ACC)
    g_out_norm = tl.zeros([BC], ACC)
    for j in tl.range(BLOCKS, num_stages=1):
        cols = j * BV + tl.arange(0, BV)
        g_out = load_columns(g_y, at, row_mask, cols, E).to(ACC)
        g_out_norm += tl.sum(tl.abs(g_out), 1)
        if NORM:
            g_out = norm_backward(
                g_out, load_columns(answers, at, row_mask, cols, E).to(ACC), answer_rstd, D, BD
            )
        g_masked_scores -= dot(g_out, tl.trans(load_columns(errors, at, row_mask, cols, E)), OP, PRECISION)
    tl.store(g_P + square, (g_masked_scores * dot(Q, tl.trans(K), OP, PRECISION)).to(g_P.dtype.element_ty))
    g_scores = (g_masked_scores * tl.load(P + square)).to(OP)
    store_tokens(g_k, dot(tl.trans(g_scores), Q, OP, PRECISION), at, row_mask, D, BD)
    g_query = dot(g_scores, K, OP, PRECISION)
    if RESIDUAL:
        g_query += load_tokens(g_y, at, row_mask, D, BD)
    g_a = tl.zeros([BC], ACC)
    if MOMENTUM:
        r = load_coef(coef, base, COEF_R, BC)[:, None]
        g_r = tl.zeros([BC], ACC)
    for j in tl.range(BLOCKS, num_stages=1):
        cols = j * BV + tl.arange(0, BV)
        g_out = load_columns(g_y, at, row_mask, cols, E)
        if NORM:
            g_out = norm_backward(
                g_out.to(ACC), load_columns(answers, at, row_mask, cols, E).to(ACC), answer_rstd, D, BD
            )
        g_out = g_out.to(OP)
        back = dot(g_out, load(starts, cols, d, E, D, EVEN), OP, PRECISION)
        g_a += tl.sum(back * Q, 1)
        g_query += a * back
        if MOMENTUM:
            back = dot(g_out, load(starts + SIZE, cols, d, E, D, EVEN), OP, PRECISION)
            g_r += tl.sum(back * Q, 1)
            g_query += r * back
    store_tokens(g_q, g_query, at, row_mask, D, BD)
    store_coef(g_coef, g_a, base, COEF_A, BC)
    if MOMENTUM:
        store_coef(g_coef, g_r, base, COEF_R, BC)
    # Loaded transposed, [j t], so that the products below need no transposition.
    square_transposed = base * BC * BC + t[:, None] + t[None, :] * BC
    masked_scores = (dot(K, tl.trans(Q), OP, PRECISION) * tl.load(P + square_transposed)).to(OP)
    if TOKEN_EXACT and not SQUARED:
        a_prev, r_prev, scale = previous_token_coef(
            coef, log_keep, base, at, row_mask, BC, MOMENTUM, DECAY_FIRST
        )
    for j in tl.range(BLOCKS, num_stages=1):
        cols = j * BV + tl.arange(0, BV)
        g_out = load_columns(g_y, at, row_mask, cols, E)
        if NORM:
            g_out = norm_backward(
                g_out.to(ACC), load_columns(answers, at, row_mask, cols, E).to(ACC), answer_rstd, D, BD
            )
        g_out = g_out.to(OP)
        g_error = -dot(masked_scores, g_out, OP, PRECISION)
        if SQUARED and not NORM:
            g_error += w[:, None] * load_columns(errors, at, row_mask, cols, E)
        store_columns(g_errors, g_error, at, row_mask, cols, E)
        # The gradient of the start state: through the answers, and through the part of D's gradient known
        # here.
        if NORM:
            value = load_columns(predictions, at, row_mask, cols, E).to(ACC)
            slope = _loss_slope(v, value, K, at, row_mask, cols, E, SQUARED, RESIDUAL, ACC)
            rstd = tl.load(prediction_rstds + at, mask=row_mask, other=0.0)
            _, g_error = norm_double_backward(g_error, slope, value, rstd, w, SQUARED, D, BD)
        elif not SQUARED:
            g_error = -w[:, None] * load_columns(v, at, row_mask, cols, E)
        g_error_t, g_out_t = tl.trans(g_error.to(OP)), tl.trans(g_out)
        g_start = dot(g_out_t, a * Q, OP, PRECISION)
        if TOKEN_EXACT and SQUARED:
            g_start += dot(g_error_t, load_tokens(U, at, row_mask, D, BD), OP, PRECISION)
        elif TOKEN_EXACT:
            g_start += dot(g_error_t, (a_prev * scale)[:, None] * K, OP, PRECISION)
        else:
            g_start += dot(g_error_t, K, OP, PRECISION)
        store(g_starts, g_start, cols, d, E, D, EVEN)
        if MOMENTUM:
            g_start = dot(g_out_t, r * Q, OP, PRECISION)
            if TOKEN_EXACT and SQUARED:
                g_start += dot(g_error_t, load_tokens(R, at, row_mask, D, BD), OP, PRECISION)
            elif TOKEN_EXACT:
                g_start += dot(g_error_t, (r_prev * scale)[:, None] * K, OP, PRECISION)
            store(g_starts + SIZE, g_start, cols, d, E, D, EVEN)
    largest_query = tl.maximum(tl.max(tl.max(tl.abs(Q).to(ACC), 1), 0), 1.0)
    tl.store(received_norm + base, tl.sum(g_out_norm, 0) * largest_query + tl.sum(tl.abs(w), 0))


@kernel
def linear_state_backward(
    k, v, U, R, coef, end_factors, predictions, prediction_rstds, g_starts, received_norm, received_norm_end,
    g_end, g_start, g_chunk_ends, exceeds_limit, clamped,
    L, n, HEADS,
    D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
    MOMENTUM: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, SQUARED: tl.constexpr,
    TOKEN_EXACT: tl.constexpr,
    CLAMP: tl.constexpr, PROGRAMS_PER_MEMORY: tl.constexpr, RELATIVE_LIMIT: tl.constexpr, ABSOLUTE_LIMIT: tl.constexpr,
    ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Iterate the gradient of the state from the last chunk to the first. Writes it at the end of each chunk
    (g_chunk_ends) and at the start of the first (g_start).

    The clamp needs the largest entry of the whole gradient before the next chunk. Programs that work
    on the same memory would have to wait for each other to know it. A first launch therefore only checks
    whether any entry exceeds the limit (`exceeds_limit`). If one does, a second launch (CLAMP), with the whole
    gradient in one program, repeats the computation with the clamp and adds 1 to `clamped`.
    """
    m = tl.program_id(0).to(tl.int64)
    if CLAMP:
        if (
            tl.max(tl.load(exceeds_limit + m * PROGRAMS_PER_MEMORY + tl.arange(0, PROGRAMS_PER_MEMORY)), 0)
            == 0
        ):
            return
        tl.atomic_add(clamped, 1, sem="relaxed")
    cols, d = tl.program_id(1) * BV + tl.arange(0, BV), tl.arange(0, BD)
    PARTS: tl.constexpr = 2 if MOMENTUM else 1
    SIZE: tl.constexpr = D * E
    EVEN: tl.constexpr = (D == BD) and (E % BV == 0)
    g_W = tl.trans(load(g_end + m * PARTS * SIZE, d, cols, D, E, EVEN))
    if MOMENTUM:
        g_S = tl.trans(load(g_end + (m * PARTS + 1) * SIZE, d, cols, D, E, EVEN))
    total = tl.load(received_norm_end + m)
    excess = tl.zeros([BV], ACC)
    for step in range(n):
        i = n - 1 - step
        base = m * n + i
        at, row_mask = chunk_tokens(m, i, L, HEADS, CHUNK, BC)
        store(g_chunk_ends + base * PARTS * SIZE, g_W, cols, d, E, D, EVEN)
        if MOMENTUM:
            store(g_chunk_ends + (base * PARTS + 1) * SIZE, g_S, cols, d, E, D, EVEN)
        if SQUARED or NORM:  # otherwise the errors do not depend on the state
            K = load_tokens(k, at, row_mask, D, BD)
            g_error = dot(g_W, tl.trans(K), OP, PRECISION) * -load_coef(coef, base, COEF_C, BC)[None, :]
            if MOMENTUM:
                g_error -= dot(g_S, tl.trans(K), OP, PRECISION) * load_coef(coef, base, COEF_S, BC)[None, :]
            if NORM:
                value = load_columns(predictions, at, row_mask, cols, E).to(ACC)
                slope = _loss_slope(v, value, K, at, row_mask, cols, E, SQUARED, RESIDUAL, ACC)
                rstd = tl.load(prediction_rstds + at, mask=row_mask, other=0.0)
                _, g_error = norm_double_backward(
                    tl.trans(g_error), slope, value, rstd, rstd * 0.0, SQUARED, D, BD
                )
                g_error = tl.trans(g_error)
            g_error = g_error.to(OP)
        if MOMENTUM:
            g_S = tl.load(end_factors + base * 4 + 2) * g_S + tl.load(end_factors + base * 4 + 1) * g_W
            g_S += load(g_starts + (base * PARTS + 1) * SIZE, cols, d, E, D, EVEN)
        g_W = tl.load(end_factors + base * 4) * g_W + load(
            g_starts + base * PARTS * SIZE, cols, d, E, D, EVEN
        )
        if TOKEN_EXACT and SQUARED:
            g_W += dot(g_error, load_tokens(U, at, row_mask, D, BD), OP, PRECISION)
            if MOMENTUM:
                g_S += dot(g_error, load_tokens(R, at, row_mask, D, BD), OP, PRECISION)
        elif SQUARED or NORM:
            g_W += dot(g_error, K, OP, PRECISION)
        total += tl.load(received_norm + base)
        size = tl.abs(g_W)
        if MOMENTUM:
            size = tl.maximum(size, tl.abs(g_S))
        if CLAMP:
            factor = clamp_factor(total, tl.max(tl.max(size, 1), 0), RELATIVE_LIMIT, ABSOLUTE_LIMIT)
            g_W *= factor
            if MOMENTUM:
                g_S *= factor
        else:
            excess = tl.maximum(excess, tl.max(size, 1) - tl.minimum(total * RELATIVE_LIMIT, ABSOLUTE_LIMIT))
    store(g_start + m * PARTS * SIZE, tl.trans(g_W), d, cols, D, E, EVEN)
    if MOMENTUM:
        store(g_start + (m * PARTS + 1) * SIZE, tl.trans(g_S), d, cols, D, E, EVEN)
    if not CLAMP:
        tl.store(
            exceeds_limit + m * PROGRAMS_PER_MEMORY + tl.program_id(1), (tl.max(excess, 0) > 0).to(tl.int32)
        )


@kernel
def linear_keys_backward(
    k, v, log_keep, starts, P, coef, inverse, errors, predictions, prediction_rstds, g_surprise, g_errors, g_chunk_ends,
    g_k, g_v, g_P, g_coef, g_end_factors, g_log_keep_anchor, L, n, HEADS,
    D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
    MOMENTUM: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, SQUARED: tl.constexpr,
    TOKEN_EXACT: tl.constexpr,
    DECAY_FIRST: tl.constexpr,
    ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients that no other chunk depends on; all chunks in parallel. g_k, g_P, and a and r in
    g_coef hold the parts from the answers and are added to.

    g_log_keep_anchor is the gradient of the log of the forget gate through `scale` (see `previous_token_coef`).
    """
    i, m, base = program_chunk_index(n)
    d, t = tl.arange(0, BD), tl.arange(0, BC)
    PARTS: tl.constexpr = 2 if MOMENTUM else 1
    SIZE: tl.constexpr = D * E
    BLOCKS: tl.constexpr = (E + BV - 1) // BV
    EVEN: tl.constexpr = (D == BD) and (E % BV == 0)
    starts += base * PARTS * SIZE
    g_chunk_ends += base * PARTS * SIZE
    at, row_mask = chunk_tokens(m, i, L, HEADS, CHUNK, BC)
    K = load_tokens(k, at, row_mask, D, BD)
    w = tl.load(g_surprise + at, mask=row_mask, other=0.0)
    c = load_coef(coef, base, COEF_C, BC)[:, None]
    g_key = tl.zeros([BC, BD], ACC)
    if MOMENTUM:
        s = load_coef(coef, base, COEF_S, BC)[:, None]
    if TOKEN_EXACT:
        a_prev, r_prev, scale = previous_token_coef(
            coef, log_keep, base, at, row_mask, BC, MOMENTUM, DECAY_FIRST
        )
        g_a, g_r = tl.zeros([BC], ACC), tl.zeros([BC], ACC)
        g_key_scores = tl.zeros([BC, BC], ACC)
        # Loaded transposed, [j t], as used below.
        square_transposed = base * BC * BC + t[:, None] + t[None, :] * BC
        if SQUARED:
            T = tl.load(inverse + square_transposed)
        else:
            key_scores = (
                tl.load(P + square_transposed - BC, mask=(t > 0)[None, :], other=0.0) * scale[None, :]
            )
            key_scores = (dot(K, tl.trans(K), OP, PRECISION) * key_scores).to(OP)
    # First the gradient of the keys through D, then through the end state: two passes with few sums each.
    for j in tl.range(BLOCKS, num_stages=1):
        cols = j * BV + tl.arange(0, BV)
        g_error = load_columns(g_errors, at, row_mask, cols, E).to(ACC)
        g_error -= c * dot(K, tl.trans(load(g_chunk_ends, cols, d, E, D, EVEN)), OP, PRECISION)
        if MOMENTUM:
            g_error -= s * dot(K, tl.trans(load(g_chunk_ends + SIZE, cols, d, E, D, EVEN)), OP, PRECISION)
        if SQUARED and not NORM:
            g_out = g_error
            if TOKEN_EXACT:
                g_out = dot(T, g_error, OP, PRECISION)
            g_value = -g_out
        else:
            slope = -load_columns(v, at, row_mask, cols, E).to(ACC)
            value = load_columns(predictions, at, row_mask, cols, E).to(ACC)
            loss_slope = value  # minus the derivative of the surprise with respect to v
            if RESIDUAL:
                loss_slope += load_columns(k, at, row_mask, cols, D)
            if SQUARED:
                loss_slope += slope
                slope = loss_slope
            if NORM:
                rstd = tl.load(prediction_rstds + at, mask=row_mask, other=0.0)
                g_error, g_out = norm_double_backward(g_error, slope, value, rstd, w, SQUARED, D, BD)
            else:
                g_out = w[:, None] * slope
            g_value = -g_error - w[:, None] * loss_slope
            if TOKEN_EXACT:
                g_value += dot(key_scores, g_out, OP, PRECISION)
        store_columns(g_v, g_value, at, row_mask, cols, E)
        g_out = g_out.to(OP)
        back = dot(g_out, load(starts, cols, d, E, D, EVEN), OP, PRECISION)
        if TOKEN_EXACT:
            g_a += tl.sum(back * K, 1)
            g_key += (a_prev * scale)[:, None] * back
            if MOMENTUM:
                back = dot(g_out, load(starts + SIZE, cols, d, E, D, EVEN), OP, PRECISION)
                g_r += tl.sum(back * K, 1)
                g_key += (r_prev * scale)[:, None] * back
            g_key_scores -= dot(g_out, tl.trans(load_columns(errors, at, row_mask, cols, E)), OP, PRECISION)
        else:
            g_key += back
    if TOKEN_EXACT:
        mix = previous_token_P(P, base, scale, BC)
        g_scores = g_key_scores * mix
        g_key += dot(g_scores + tl.trans(g_scores), K, OP, PRECISION)
        g_key_scores *= dot(K, tl.trans(K), OP, PRECISION)
        if DECAY_FIRST:
            # `mix` already contains the factor `scale`, so this is the gradient of the log of `scale`.
            g_log_keep = tl.sum(g_key_scores * mix, 1) + (g_a * a_prev + g_r * r_prev) * scale
            tl.store(g_log_keep_anchor + at, g_log_keep, mask=row_mask)
        # Each token used the coefficients of the token before it, so the gradients are moved back by one
        # token.
        later = t > 0
        before = base * BC * BC + (t[:, None] - 1) * BC + t[None, :]
        g_key_scores = g_key_scores * scale[:, None] + tl.load(g_P + before, mask=later[:, None], other=0.0)
        g_a = g_a * scale + tl.load(g_coef + base * 4 * BC + t - 1, mask=later, other=0.0)
        if MOMENTUM:
            g_r = g_r * scale + tl.load(g_coef + base * 4 * BC + BC + t - 1, mask=later, other=0.0)
        tl.debug_barrier()  # all threads must have read before any writes there
        tl.store(g_P + before, g_key_scores.to(g_P.dtype.element_ty), mask=later[:, None])
        tl.store(g_coef + base * 4 * BC + t - 1, g_a, mask=later)
        if MOMENTUM:
            tl.store(g_coef + base * 4 * BC + BC + t - 1, g_r, mask=later)
    g_c = tl.zeros([BC], ACC)
    keep = tl.sum(g_c, 0)
    if MOMENTUM:
        g_s = tl.zeros([BC], ACC)
        carry, past = tl.sum(g_c, 0), tl.sum(g_c, 0)
    for j in tl.range(BLOCKS, num_stages=1):
        cols = j * BV + tl.arange(0, BV)
        error = load_columns(errors, at, row_mask, cols, E)
        g_end = load(g_chunk_ends, cols, d, E, D, EVEN)
        keep += tl.sum(tl.sum(load(starts, cols, d, E, D, EVEN).to(ACC) * g_end, 1), 0)
        back = dot(error, g_end, OP, PRECISION)
        g_c -= tl.sum(back * K, 1)
        g_key -= c * back
        if MOMENTUM:
            S = load(starts + SIZE, cols, d, E, D, EVEN).to(ACC)
            carry += tl.sum(tl.sum(S * g_end, 1), 0)
            g_end = load(g_chunk_ends + SIZE, cols, d, E, D, EVEN)
            past += tl.sum(tl.sum(S * g_end, 1), 0)
            back = dot(error, g_end, OP, PRECISION)
            g_s -= tl.sum(back * K, 1)
            g_key -= s * back
    store_coef(g_coef, g_c, base, COEF_C, BC)
    tl.store(g_end_factors + base * 4, keep)
    if MOMENTUM:
        store_coef(g_coef, g_s, base, COEF_S, BC)
        tl.store(g_end_factors + base * 4 + 1, carry)
        tl.store(g_end_factors + base * 4 + 2, past)
    g_key += load_tokens(g_k, at, row_mask, D, BD)
    # g_v is read back by threads that did not write it, and all must have read g_k before any writes there.
    tl.debug_barrier()
    if RESIDUAL and SQUARED:
        g_key -= load_tokens(g_v, at, row_mask, D, BD)
    elif RESIDUAL:
        g_key -= w[:, None] * load_tokens(v, at, row_mask, D, BD)
    store_tokens(g_k, g_key, at, row_mask, D, BD)
