# mypy: ignore-errors
"""Backward of a one-layer memory.

    linear_read_backward   gradients of q, a, r; the answers' part of those of P, k, D and of the start state
    linear_carry           iterate the gradient of the state from the last chunk to the first
    linear_keys_backward   gradients of k, v, c, s and fold; the predictions' part of those of P, a, r

The part of the gradient of a chunk's start state that does not come through its end state is summed
beforehand (g_J). Only the part that comes through the end state is therefore sequential. The state and its
gradients are transposed, as in linear.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from remanence.ops.triton.kernels.linear import earlier, earlier_mix
from remanence.ops.triton.kernels.tools import (
    COEF_A,
    COEF_C,
    COEF_R,
    COEF_S,
    clamp_factor,
    dot,
    kernel,
    load,
    load_coef,
    load_columns,
    load_tokens,
    pull,
    pull_backward,
    square_of,
    store,
    store_coef,
    store_columns,
    store_tokens,
    tokens,
    which_chunk,
)


@triton.jit
def _slope(
    v,
    value,
    K,
    at,
    live,
    cols,
    E: tl.constexpr,
    SQUARED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACC: tl.constexpr,
):
    """Return the derivative of the loss with respect to the output of the LayerNorm."""
    slope = -load_columns(v, at, live, cols, E).to(ACC)
    if SQUARED:
        slope += value
        if RESIDUAL:
            slope += K
    return slope


@kernel
def linear_read_backward(
    q, k, v, log_keep, U, R, starts, P, co, errors, values, rstds, answers, spreads, g_y, g_surprise,
    g_q, g_k, g_P, g_co, g_D, g_J, received, L, n, HEADS,
    D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
    MOMENTUM: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, SQUARED: tl.constexpr, TOKEN: tl.constexpr,
    SCALED: tl.constexpr,
    ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Backward of the answers and of the surprise of one chunk; see the module's docstring."""
    i, m, base = which_chunk(n)
    d, t = tl.arange(0, BD), tl.arange(0, BC)
    PARTS: tl.constexpr = 2 if MOMENTUM else 1
    SIZE: tl.constexpr = D * E
    BLOCKS: tl.constexpr = (E + BV - 1) // BV
    EVEN: tl.constexpr = (D == BD) and (E % BV == 0)
    starts += base * PARTS * SIZE
    g_J += base * PARTS * SIZE
    at, live = tokens(m, i, L, HEADS, CHUNK, BC)
    Q, K = load_tokens(q, at, live, D, BD), load_tokens(k, at, live, D, BD)
    a = load_coef(co, base, COEF_A, BC)[:, None]
    w = tl.load(g_surprise + at, mask=live, other=0.0)
    square = square_of(base, BC)
    if NORM:
        spread = tl.load(spreads + at, mask=live, other=0.0)
    # Three passes over the columns, each with few sums, to save registers.
    g_blend = tl.zeros([BC, BC], ACC)
    received_sum = tl.zeros([BC], ACC)
    for j in tl.range(BLOCKS, num_stages=1):
        cols = j * BV + tl.arange(0, BV)
        g_out = load_columns(g_y, at, live, cols, E).to(ACC)
        received_sum += tl.sum(tl.abs(g_out), 1)
        if NORM:
            g_out = pull(g_out, load_columns(answers, at, live, cols, E).to(ACC), spread, D, BD)
        g_blend -= dot(g_out, tl.trans(load_columns(errors, at, live, cols, E)), OP, PRECISION)
    tl.store(g_P + square, (g_blend * dot(Q, tl.trans(K), OP, PRECISION)).to(g_P.dtype.element_ty))
    g_scores = (g_blend * tl.load(P + square)).to(OP)
    store_tokens(g_k, dot(tl.trans(g_scores), Q, OP, PRECISION), at, live, D, BD)
    g_query = dot(g_scores, K, OP, PRECISION)
    if RESIDUAL:
        g_query += load_tokens(g_y, at, live, D, BD)
    g_a = tl.zeros([BC], ACC)
    if MOMENTUM:
        r = load_coef(co, base, COEF_R, BC)[:, None]
        g_r = tl.zeros([BC], ACC)
    for j in tl.range(BLOCKS, num_stages=1):
        cols = j * BV + tl.arange(0, BV)
        g_out = load_columns(g_y, at, live, cols, E)
        if NORM:
            g_out = pull(g_out.to(ACC), load_columns(answers, at, live, cols, E).to(ACC), spread, D, BD)
        g_out = g_out.to(OP)
        back = dot(g_out, load(starts, cols, d, E, D, EVEN), OP, PRECISION)
        g_a += tl.sum(back * Q, 1)
        g_query += a * back
        if MOMENTUM:
            back = dot(g_out, load(starts + SIZE, cols, d, E, D, EVEN), OP, PRECISION)
            g_r += tl.sum(back * Q, 1)
            g_query += r * back
    store_tokens(g_q, g_query, at, live, D, BD)
    store_coef(g_co, g_a, base, COEF_A, BC)
    if MOMENTUM:
        store_coef(g_co, g_r, base, COEF_R, BC)
    # Loaded transposed, [j t], so that the products below need no transposition.
    across = base * BC * BC + t[:, None] + t[None, :] * BC
    blend = (dot(K, tl.trans(Q), OP, PRECISION) * tl.load(P + across)).to(OP)
    if TOKEN and not SQUARED:
        a_met, r_met, scale = earlier(co, log_keep, base, at, live, BC, MOMENTUM, SCALED)
    for j in tl.range(BLOCKS, num_stages=1):
        cols = j * BV + tl.arange(0, BV)
        g_out = load_columns(g_y, at, live, cols, E)
        if NORM:
            g_out = pull(g_out.to(ACC), load_columns(answers, at, live, cols, E).to(ACC), spread, D, BD)
        g_out = g_out.to(OP)
        g_error = -dot(blend, g_out, OP, PRECISION)
        if SQUARED and not NORM:
            g_error += w[:, None] * load_columns(errors, at, live, cols, E)
        store_columns(g_D, g_error, at, live, cols, E)
        # The gradient of the start state: through the answers, and through the part of D's gradient known
        # here.
        if NORM:
            value = load_columns(values, at, live, cols, E).to(ACC)
            slope = _slope(v, value, K, at, live, cols, E, SQUARED, RESIDUAL, ACC)
            rstd = tl.load(rstds + at, mask=live, other=0.0)
            _, g_error = pull_backward(g_error, slope, value, rstd, w, SQUARED, D, BD)
        elif not SQUARED:
            g_error = -w[:, None] * load_columns(v, at, live, cols, E)
        turned, g_turned = tl.trans(g_error.to(OP)), tl.trans(g_out)
        G = dot(g_turned, a * Q, OP, PRECISION)
        if TOKEN and SQUARED:
            G += dot(turned, load_tokens(U, at, live, D, BD), OP, PRECISION)
        elif TOKEN:
            G += dot(turned, (a_met * scale)[:, None] * K, OP, PRECISION)
        else:
            G += dot(turned, K, OP, PRECISION)
        store(g_J, G, cols, d, E, D, EVEN)
        if MOMENTUM:
            G = dot(g_turned, r * Q, OP, PRECISION)
            if TOKEN and SQUARED:
                G += dot(turned, load_tokens(R, at, live, D, BD), OP, PRECISION)
            elif TOKEN:
                G += dot(turned, (r_met * scale)[:, None] * K, OP, PRECISION)
            store(g_J + SIZE, G, cols, d, E, D, EVEN)
    reach = tl.maximum(tl.max(tl.max(tl.abs(Q).to(ACC), 1), 0), 1.0)
    tl.store(received + base, tl.sum(received_sum, 0) * reach + tl.sum(tl.abs(w), 0))


@kernel
def linear_carry(
    k, v, U, R, co, fold, values, rstds, g_J, received, received_end, g_end, g_first, g_ends, over, clamped,
    L, n, HEADS,
    D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
    MOMENTUM: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, SQUARED: tl.constexpr, TOKEN: tl.constexpr,
    HELD: tl.constexpr, PROGRAMS: tl.constexpr, REACH: tl.constexpr, END: tl.constexpr,
    ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Iterate the gradient of the state from the last chunk to the first. Writes it at the end of each chunk
    (g_ends) and at the start of the first (g_first).

    The clamp needs the largest entry of the whole gradient before the next chunk. Programs that share a
    memory would have to wait for each other to know it. A first launch therefore only checks whether any
    entry exceeds the limit (`over`). If one does, a second launch (HELD), with the whole gradient in one
    program, repeats the computation with the clamp and adds 1 to `clamped`.
    """
    m = tl.program_id(0).to(tl.int64)
    if HELD:
        if tl.max(tl.load(over + m * PROGRAMS + tl.arange(0, PROGRAMS)), 0) == 0:
            return
        tl.atomic_add(clamped, 1, sem="relaxed")
    cols, d = tl.program_id(1) * BV + tl.arange(0, BV), tl.arange(0, BD)
    PARTS: tl.constexpr = 2 if MOMENTUM else 1
    SIZE: tl.constexpr = D * E
    EVEN: tl.constexpr = (D == BD) and (E % BV == 0)
    G = tl.trans(load(g_end + m * PARTS * SIZE, d, cols, D, E, EVEN))
    if MOMENTUM:
        H = tl.trans(load(g_end + (m * PARTS + 1) * SIZE, d, cols, D, E, EVEN))
    total = tl.load(received_end + m)
    beyond = tl.zeros([BV], ACC)
    for back_from in range(n):
        i = n - 1 - back_from
        base = m * n + i
        at, live = tokens(m, i, L, HEADS, CHUNK, BC)
        store(g_ends + base * PARTS * SIZE, G, cols, d, E, D, EVEN)
        if MOMENTUM:
            store(g_ends + (base * PARTS + 1) * SIZE, H, cols, d, E, D, EVEN)
        if SQUARED or NORM:  # otherwise the errors do not depend on the state
            K = load_tokens(k, at, live, D, BD)
            g_error = dot(G, tl.trans(K), OP, PRECISION) * -load_coef(co, base, COEF_C, BC)[None, :]
            if MOMENTUM:
                g_error -= dot(H, tl.trans(K), OP, PRECISION) * load_coef(co, base, COEF_S, BC)[None, :]
            if NORM:
                value = load_columns(values, at, live, cols, E).to(ACC)
                slope = _slope(v, value, K, at, live, cols, E, SQUARED, RESIDUAL, ACC)
                rstd = tl.load(rstds + at, mask=live, other=0.0)
                _, g_error = pull_backward(tl.trans(g_error), slope, value, rstd, rstd * 0.0, SQUARED, D, BD)
                g_error = tl.trans(g_error)
            g_error = g_error.to(OP)
        if MOMENTUM:
            H = tl.load(fold + base * 4 + 2) * H + tl.load(fold + base * 4 + 1) * G
            H += load(g_J + (base * PARTS + 1) * SIZE, cols, d, E, D, EVEN)
        G = tl.load(fold + base * 4) * G + load(g_J + base * PARTS * SIZE, cols, d, E, D, EVEN)
        if TOKEN and SQUARED:
            G += dot(g_error, load_tokens(U, at, live, D, BD), OP, PRECISION)
            if MOMENTUM:
                H += dot(g_error, load_tokens(R, at, live, D, BD), OP, PRECISION)
        elif SQUARED or NORM:
            G += dot(g_error, K, OP, PRECISION)
        total += tl.load(received + base)
        size = tl.abs(G)
        if MOMENTUM:
            size = tl.maximum(size, tl.abs(H))
        if HELD:
            factor = clamp_factor(total, tl.max(tl.max(size, 1), 0), REACH, END)
            G *= factor
            if MOMENTUM:
                H *= factor
        else:
            beyond = tl.maximum(beyond, tl.max(size, 1) - tl.minimum(total * REACH, END))
    store(g_first + m * PARTS * SIZE, tl.trans(G), d, cols, D, E, EVEN)
    if MOMENTUM:
        store(g_first + (m * PARTS + 1) * SIZE, tl.trans(H), d, cols, D, E, EVEN)
    if not HELD:
        tl.store(over + m * PROGRAMS + tl.program_id(1), (tl.max(beyond, 0) > 0).to(tl.int32))


@kernel
def linear_keys_backward(
    k, v, log_keep, starts, P, co, inverse, errors, values, rstds, g_surprise, g_D, g_ends,
    g_k, g_v, g_P, g_co, g_fold, g_scale, L, n, HEADS,
    D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
    MOMENTUM: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, SQUARED: tl.constexpr, TOKEN: tl.constexpr,
    SCALED: tl.constexpr,
    ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients that no other chunk depends on; all chunks in parallel. g_k, g_P, and a and r in
    g_co hold the parts from the answers and are added to.

    g_scale is the gradient of the log of the forget gate through `scale` (see `earlier`).
    """
    i, m, base = which_chunk(n)
    d, t = tl.arange(0, BD), tl.arange(0, BC)
    PARTS: tl.constexpr = 2 if MOMENTUM else 1
    SIZE: tl.constexpr = D * E
    BLOCKS: tl.constexpr = (E + BV - 1) // BV
    EVEN: tl.constexpr = (D == BD) and (E % BV == 0)
    starts += base * PARTS * SIZE
    g_ends += base * PARTS * SIZE
    at, live = tokens(m, i, L, HEADS, CHUNK, BC)
    K = load_tokens(k, at, live, D, BD)
    w = tl.load(g_surprise + at, mask=live, other=0.0)
    c = load_coef(co, base, COEF_C, BC)[:, None]
    g_key = tl.zeros([BC, BD], ACC)
    if MOMENTUM:
        s = load_coef(co, base, COEF_S, BC)[:, None]
    if TOKEN:
        a_met, r_met, scale = earlier(co, log_keep, base, at, live, BC, MOMENTUM, SCALED)
        g_a, g_r = tl.zeros([BC], ACC), tl.zeros([BC], ACC)
        g_met = tl.zeros([BC, BC], ACC)
        # Loaded transposed, [j t], as used below.
        across = base * BC * BC + t[:, None] + t[None, :] * BC
        if SQUARED:
            T = tl.load(inverse + across)
        else:
            met = tl.load(P + across - BC, mask=(t > 0)[None, :], other=0.0) * scale[None, :]
            met = (dot(K, tl.trans(K), OP, PRECISION) * met).to(OP)
    # First the gradient of the keys through D, then through the end state: two passes with few sums each.
    for j in tl.range(BLOCKS, num_stages=1):
        cols = j * BV + tl.arange(0, BV)
        g_error = load_columns(g_D, at, live, cols, E).to(ACC)
        g_error -= c * dot(K, tl.trans(load(g_ends, cols, d, E, D, EVEN)), OP, PRECISION)
        if MOMENTUM:
            g_error -= s * dot(K, tl.trans(load(g_ends + SIZE, cols, d, E, D, EVEN)), OP, PRECISION)
        if SQUARED and not NORM:
            g_out = g_error
            if TOKEN:
                g_out = dot(T, g_error, OP, PRECISION)
            g_value = -g_out
        else:
            slope = -load_columns(v, at, live, cols, E).to(ACC)
            value = load_columns(values, at, live, cols, E).to(ACC)
            loss_slope = value  # minus the derivative of the surprise with respect to v
            if RESIDUAL:
                loss_slope += load_columns(k, at, live, cols, D)
            if SQUARED:
                loss_slope += slope
                slope = loss_slope
            if NORM:
                rstd = tl.load(rstds + at, mask=live, other=0.0)
                g_error, g_out = pull_backward(g_error, slope, value, rstd, w, SQUARED, D, BD)
            else:
                g_out = w[:, None] * slope
            g_value = -g_error - w[:, None] * loss_slope
            if TOKEN:
                g_value += dot(met, g_out, OP, PRECISION)
        store_columns(g_v, g_value, at, live, cols, E)
        g_out = g_out.to(OP)
        back = dot(g_out, load(starts, cols, d, E, D, EVEN), OP, PRECISION)
        if TOKEN:
            g_a += tl.sum(back * K, 1)
            g_key += (a_met * scale)[:, None] * back
            if MOMENTUM:
                back = dot(g_out, load(starts + SIZE, cols, d, E, D, EVEN), OP, PRECISION)
                g_r += tl.sum(back * K, 1)
                g_key += (r_met * scale)[:, None] * back
            g_met -= dot(g_out, tl.trans(load_columns(errors, at, live, cols, E)), OP, PRECISION)
        else:
            g_key += back
    if TOKEN:
        mix = earlier_mix(P, base, scale, BC)
        g_scores = g_met * mix
        g_key += dot(g_scores + tl.trans(g_scores), K, OP, PRECISION)
        g_met *= dot(K, tl.trans(K), OP, PRECISION)
        if SCALED:
            # `mix` already contains the factor `scale`, so this is the gradient of the log of `scale`.
            g_log = tl.sum(g_met * mix, 1) + (g_a * a_met + g_r * r_met) * scale
            tl.store(g_scale + at, g_log, mask=live)
        # Each token used the coefficients of the token before it, so the gradients are moved back by one
        # token.
        later = t > 0
        before = base * BC * BC + (t[:, None] - 1) * BC + t[None, :]
        g_met = g_met * scale[:, None] + tl.load(g_P + before, mask=later[:, None], other=0.0)
        g_a = g_a * scale + tl.load(g_co + base * 4 * BC + t - 1, mask=later, other=0.0)
        if MOMENTUM:
            g_r = g_r * scale + tl.load(g_co + base * 4 * BC + BC + t - 1, mask=later, other=0.0)
        tl.debug_barrier()  # all threads must have read before any writes there
        tl.store(g_P + before, g_met.to(g_P.dtype.element_ty), mask=later[:, None])
        tl.store(g_co + base * 4 * BC + t - 1, g_a, mask=later)
        if MOMENTUM:
            tl.store(g_co + base * 4 * BC + BC + t - 1, g_r, mask=later)
    g_c = tl.zeros([BC], ACC)
    keep = tl.sum(g_c, 0)
    if MOMENTUM:
        g_s = tl.zeros([BC], ACC)
        carry, past = tl.sum(g_c, 0), tl.sum(g_c, 0)
    for j in tl.range(BLOCKS, num_stages=1):
        cols = j * BV + tl.arange(0, BV)
        error = load_columns(errors, at, live, cols, E)
        G = load(g_ends, cols, d, E, D, EVEN)
        keep += tl.sum(tl.sum(load(starts, cols, d, E, D, EVEN).to(ACC) * G, 1), 0)
        back = dot(error, G, OP, PRECISION)
        g_c -= tl.sum(back * K, 1)
        g_key -= c * back
        if MOMENTUM:
            S = load(starts + SIZE, cols, d, E, D, EVEN).to(ACC)
            carry += tl.sum(tl.sum(S * G, 1), 0)
            G = load(g_ends + SIZE, cols, d, E, D, EVEN)
            past += tl.sum(tl.sum(S * G, 1), 0)
            back = dot(error, G, OP, PRECISION)
            g_s -= tl.sum(back * K, 1)
            g_key -= s * back
    store_coef(g_co, g_c, base, COEF_C, BC)
    tl.store(g_fold + base * 4, keep)
    if MOMENTUM:
        store_coef(g_co, g_s, base, COEF_S, BC)
        tl.store(g_fold + base * 4 + 1, carry)
        tl.store(g_fold + base * 4 + 2, past)
    g_key += load_tokens(g_k, at, live, D, BD)
    # g_v is read back by threads that did not write it, and all must have read g_k before any writes there.
    tl.debug_barrier()
    if RESIDUAL and SQUARED:
        g_key -= load_tokens(g_v, at, live, D, BD)
    elif RESIDUAL:
        g_key -= w[:, None] * load_tokens(v, at, live, D, BD)
    store_tokens(g_k, g_key, at, live, D, BD)
