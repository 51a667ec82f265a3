# mypy: ignore-errors
"""Iterate the gradient of the state of a two-layer memory backwards over the chunks."""

from __future__ import annotations

import triton
import triton.language as tl

from remanence.ops.triton.kernels.tools import (
    COEF_C,
    COEF_S,
    chunk_tokens,
    clamp_factor,
    dot_add_in_loop,
    dot_in_loop,
    kernel,
    largest,
    load,
    load_coef,
    load_layers,
    load_tokens,
    store,
    store_layers,
    store_tokens,
    sum_over_programs,
    wait_for_programs,
)


@triton.jit
def _error_backward(
    g, D2, K, v, predictions, prediction_rstds, g_surprise, g_v, at, row_mask, writes,
    D: tl.constexpr, BD: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Return the gradient of Z2, given the gradient g of D2, and write the gradient of v.

    With the LayerNorm's output x, the loss's slope e, pull(u) = rstd (u - mean(u) - x mean(u x)), D2 =
    pull(e) and the surprise's gradient w: the gradient of x is g_value = pull(g) + w e, and that of Z2 is
    pull(g_value - rstd (g mean(e x) + e mean(g x))) - x rstd mean(g D2). This is a sum of g, e and x with one
    factor per row each, so one pass over them is enough.
    """
    w = tl.load(g_surprise + at, mask=row_mask, other=0.0)
    if NORM:
        x = load_tokens(predictions, at, row_mask, D, BD).to(g.dtype)
        rstd = tl.load(prediction_rstds + at, mask=row_mask, other=0.0)
        e = x - load_tokens(v, at, row_mask, D, BD)
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
        factor_g, factor_e, factor_x = rstd * (1.0 - ex), w - rstd * gx, -rstd * gx
        constant = factor_g * g_mean + factor_e * e_mean
        factor_x -= factor_g * gx + factor_e * ex + factor_x * xx + rstd * (ge - g_mean * e_mean - gx * ex)
        g_out = factor_g[:, None] * g + factor_e[:, None] * e + factor_x[:, None] * x - constant[:, None]
        if D != BD:
            g_out = tl.where((tl.arange(0, BD) < D)[None, :], g_out, 0.0)
        return g_out * rstd[:, None]
    else:
        g += D2 * w[:, None]
        store_tokens(g_v, -g, at, writes, D, BD)
        return g


@triton.jit
def _largest_of_programs(largest_entries, PROGRAMS_PER_MEMORY: tl.constexpr):
    """Return the largest of the entries that the PROGRAMS_PER_MEMORY programs of a memory wrote."""
    largest_entry = tl.load(largest_entries, cache_modifier=".cg")
    for other in tl.static_range(1, PROGRAMS_PER_MEMORY):
        largest_entry = tl.maximum(largest_entry, tl.load(largest_entries + other, cache_modifier=".cg"))
    return largest_entry


@kernel
def state_backward(
    k, v, starts2, coef, end_factors, errors, predictions, prediction_rstds, hiddens, slopes, curvatures, g_surprise,
    g_hiddens, g_hidden_errors, g_errors, g_starts1, g_starts2, received_norm, received_norm_end, g_end1,
    g_end2, g_start1, g_start2,
    g_key_preacts, g_chunk_ends1, g_chunk_ends2, g_v,
    clamped, exchange, arrivals, L, n, HEADS,
    D: tl.constexpr, BD: tl.constexpr, HIDDEN: tl.constexpr, BH: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
    MOMENTUM: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr,
    RELATIVE_LIMIT: tl.constexpr, ABSOLUTE_LIMIT: tl.constexpr,
    PROGRAMS_PER_MEMORY: tl.constexpr, IN_LOOP: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Iterate the gradient of the state from the last chunk to the first, in registers. Writes it at the end
    of each chunk (g_chunk_ends) and at the start of the first (g_start), the gradient of the keys' Z1
    (g_key_preacts), and that of v. `g_hiddens`, `g_hidden_errors`, `g_errors` and `g_starts` are the parts of the
    gradients of X2, D1, D2 and of the chunks' start states that come from the answers.

    With PROGRAMS_PER_MEMORY above 1, that many programs work on the same memory. Each has a block of the hidden
    axis, and at every chunk they exchange and add their parts of D2's gradient. Only then do they also know the
    largest entry of the whole gradient. The clamp is therefore applied there, to the gradient and to everything
    computed from it so far, which is linear in it. Each memory that was clamped adds 1 to `clamped`.
    """
    m, hidden_block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, f, t = tl.arange(0, BD), hidden_block * BH + tl.arange(0, BH), tl.arange(0, BC)
    PARTS: tl.constexpr = 2 if MOMENTUM else 1
    SIZE: tl.constexpr = D * HIDDEN
    EVEN: tl.constexpr = (D == BD) and (HIDDEN == BH * PROGRAMS_PER_MEMORY)
    g_W1, g_W2 = load_layers(g_end1, g_end2, m * PARTS * SIZE, d, f, D, HIDDEN, EVEN)
    if MOMENTUM:
        g_S1, g_S2 = load_layers(g_end1, g_end2, (m * PARTS + 1) * SIZE, d, f, D, HIDDEN, EVEN)
    total = tl.load(received_norm_end + m)
    largest_entry = total * 0.0
    smallest_factor = largest_entry + 1.0
    exchange += m * 2 * PROGRAMS_PER_MEMORY * (BC * BD + 1)
    largest_entries = exchange + 2 * PROGRAMS_PER_MEMORY * BC * BD
    for step in range(n):
        i = n - 1 - step
        base = m * n + i
        at, row_mask = chunk_tokens(m, i, L, HEADS, CHUNK, BC)
        K, D2 = load_tokens(k, at, row_mask, D, BD), load_tokens(errors, at, row_mask, D, BD)
        W2 = load(starts2 + base * PARTS * SIZE, f, d, HIDDEN, D, EVEN)
        c = load_coef(coef, base, COEF_C, BC)[:, None]
        keep = tl.load(end_factors + base * 4)
        H = load(hiddens + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)
        slope = load(slopes + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)
        curvature = load(curvatures + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)
        # The gradients of D1 and D2 through the state at the chunk's end.
        g_hidden_error = dot_in_loop(-c * K, g_W1, n, IN_LOOP, ACC, OP, PRECISION)
        g_error = dot_in_loop(-c * H, g_W2, n, IN_LOOP, ACC, OP, PRECISION)
        if MOMENTUM:
            s = load_coef(coef, base, COEF_S, BC)[:, None]
            g_hidden_error = dot_add_in_loop(g_hidden_error, -s * K, g_S1, n, IN_LOOP, OP, PRECISION)
            g_error = dot_add_in_loop(g_error, -s * H, g_S2, n, IN_LOOP, OP, PRECISION)
        g_error = dot_add_in_loop(g_error, g_hidden_error * slope, W2, n, IN_LOOP, OP, PRECISION)
        if PROGRAMS_PER_MEMORY > 1:
            tl.store(largest_entries + step % 2 * PROGRAMS_PER_MEMORY + hidden_block, largest_entry)
            g_error = sum_over_programs(
                g_error, exchange, arrivals + m, step, hidden_block, PROGRAMS_PER_MEMORY, BC, BD
            )
            largest_entry = _largest_of_programs(
                largest_entries + step % 2 * PROGRAMS_PER_MEMORY, PROGRAMS_PER_MEMORY
            )
        factor = clamp_factor(total, largest_entry, RELATIVE_LIMIT, ABSOLUTE_LIMIT)
        smallest_factor = tl.minimum(smallest_factor, factor)
        g_W1 *= factor
        g_W2 *= factor
        if MOMENTUM:
            g_S1 *= factor
            g_S2 *= factor
        g_hidden_error *= factor
        g_error = g_error * factor + load_tokens(g_errors, at, row_mask, D, BD)
        writes = row_mask & (hidden_block == 0)
        g_O = _error_backward(
            g_error,
            D2,
            K,
            v,
            predictions,
            prediction_rstds,
            g_surprise,
            g_v,
            at,
            row_mask,
            writes,
            D,
            BD,
            NORM,
            RESIDUAL,
        )
        g_O = g_O.to(OP)
        g_hidden = dot_in_loop(g_O, tl.trans(W2), n, IN_LOOP, ACC, OP, PRECISION)
        g_hidden = dot_add_in_loop(g_hidden, -c * D2, tl.trans(g_W2.to(OP)), n, IN_LOOP, OP, PRECISION)
        if MOMENTUM:
            g_hidden = dot_add_in_loop(g_hidden, -s * D2, tl.trans(g_S2.to(OP)), n, IN_LOOP, OP, PRECISION)
        g_hidden += load(g_hiddens + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)
        g_hidden_error = (
            g_hidden_error + load(g_hidden_errors + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)
        ).to(OP)
        g_key_preact = (g_hidden_error * curvature + slope * g_hidden).to(OP)
        g_hidden_error = (g_hidden_error * slope).to(OP)
        store(g_key_preacts + base * BC * HIDDEN, g_key_preact, t, f, BC, HIDDEN, EVEN)
        # The gradient of the state at the chunk's start.
        store_layers(g_chunk_ends1, g_chunk_ends2, base * PARTS * SIZE, g_W1, g_W2, d, f, D, HIDDEN, EVEN)
        if MOMENTUM:
            carry, past = tl.load(end_factors + base * 4 + 1), tl.load(end_factors + base * 4 + 2)
            store_layers(
                g_chunk_ends1, g_chunk_ends2, (base * PARTS + 1) * SIZE, g_S1, g_S2, d, f, D, HIDDEN, EVEN
            )
            g_S1 = (
                past * g_S1
                + carry * g_W1
                + load(g_starts1 + (base * PARTS + 1) * SIZE, d, f, D, HIDDEN, EVEN)
            )
            g_S2 = (
                past * g_S2
                + carry * g_W2
                + load(g_starts2 + (base * PARTS + 1) * SIZE, f, d, HIDDEN, D, EVEN)
            )
        g_W1 = keep * g_W1 + load(g_starts1 + base * PARTS * SIZE, d, f, D, HIDDEN, EVEN)
        g_W2 = keep * g_W2 + load(g_starts2 + base * PARTS * SIZE, f, d, HIDDEN, D, EVEN)
        g_W1 = dot_add_in_loop(g_W1, tl.trans(K), g_key_preact, n, IN_LOOP, OP, PRECISION)
        g_W2 = dot_add_in_loop(g_W2, tl.trans(H), g_O, n, IN_LOOP, OP, PRECISION)
        g_W2 = dot_add_in_loop(g_W2, tl.trans(g_hidden_error), D2, n, IN_LOOP, OP, PRECISION)
        total += tl.load(received_norm + base)
        if MOMENTUM:
            largest_entry = tl.maximum(
                largest(tl.maximum(tl.abs(g_W1), tl.abs(g_S1))),
                largest(tl.maximum(tl.abs(g_W2), tl.abs(g_S2))),
            )
        else:
            largest_entry = tl.maximum(largest(g_W1), largest(g_W2))
    if PROGRAMS_PER_MEMORY > 1:
        tl.store(largest_entries + n % 2 * PROGRAMS_PER_MEMORY + hidden_block, largest_entry)
        wait_for_programs(arrivals + m, (n + 1) * PROGRAMS_PER_MEMORY)
        largest_entry = _largest_of_programs(
            largest_entries + n % 2 * PROGRAMS_PER_MEMORY, PROGRAMS_PER_MEMORY
        )
    factor = clamp_factor(total, largest_entry, RELATIVE_LIMIT, ABSOLUTE_LIMIT)
    tl.atomic_add(
        clamped, 1, mask=(tl.minimum(smallest_factor, factor) < 1.0) & (hidden_block == 0), sem="relaxed"
    )
    g_W1 *= factor
    g_W2 *= factor
    if MOMENTUM:
        g_S1 *= factor
        g_S2 *= factor
    store_layers(g_start1, g_start2, m * PARTS * SIZE, g_W1, g_W2, d, f, D, HIDDEN, EVEN)
    if MOMENTUM:
        store_layers(g_start1, g_start2, (m * PARTS + 1) * SIZE, g_S1, g_S2, d, f, D, HIDDEN, EVEN)


@kernel
def state_backward_blocked(
    k, v, starts2, coef, end_factors, errors, predictions, prediction_rstds, hiddens, slopes, curvatures, g_surprise,
    g_hiddens, g_hidden_errors, g_errors, g_starts1, g_starts2, received_norm, received_norm_end, g_end1,
    g_end2, g_start1, g_start2,
    g_key_preacts, g_chunk_ends1, g_chunk_ends2, g_v,
    clamped, L, n, HEADS,
    D: tl.constexpr, BD: tl.constexpr, HIDDEN: tl.constexpr, BH: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
    MOMENTUM: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr,
    RELATIVE_LIMIT: tl.constexpr, ABSOLUTE_LIMIT: tl.constexpr,
    IN_LOOP: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Like `state_backward`, for a gradient that is kept in global memory, in g_start, and processed in
    blocks. g_chunk_ends may be the same tensors as g_starts.

    There is one pass over the gradient per chunk. As soon as a block has reached the start of a chunk, its
    part of the gradients of D1 (kept in g_key_preacts) and D2 of the chunk before is computed. The factor of
    the clamp is known only after the pass. It is therefore applied when a block is read again, and to the
    results computed from blocks that were not yet clamped, which are linear in them.
    """
    m = tl.program_id(0).to(tl.int64)
    d, t = tl.arange(0, BD), tl.arange(0, BC)
    PARTS: tl.constexpr = 2 if MOMENTUM else 1
    SIZE: tl.constexpr = D * HIDDEN
    BLOCKS: tl.constexpr = (HIDDEN + BH - 1) // BH
    EVEN: tl.constexpr = (D == BD) and (HIDDEN == BH * BLOCKS)
    g_end1 += m * PARTS * SIZE
    g_end2 += m * PARTS * SIZE
    g_start1 += m * PARTS * SIZE
    g_start2 += m * PARTS * SIZE
    total = tl.load(received_norm_end + m)
    factor = 1.0
    smallest_factor = total * 0.0 + 1.0
    base = m * n + n - 1
    last = base * PARTS * SIZE
    at, row_mask = chunk_tokens(m, n - 1, L, HEADS, CHUNK, BC)
    K = load_tokens(k, at, row_mask, D, BD)
    c = load_coef(coef, base, COEF_C, BC)[:, None]
    if MOMENTUM:
        s = load_coef(coef, base, COEF_S, BC)[:, None]
    g_error = tl.zeros([BC, BD], ACC)
    for j in tl.range(BLOCKS, num_stages=1):
        f = j * BH + tl.arange(0, BH)
        W2 = load(starts2 + last, f, d, HIDDEN, D, EVEN)
        g_W1, g_W2 = load_layers(g_end1, g_end2, 0, d, f, D, HIDDEN, EVEN)
        store_layers(g_start1, g_start2, 0, g_W1, g_W2, d, f, D, HIDDEN, EVEN)
        tile_offset = base * BC * HIDDEN
        H = load(hiddens + tile_offset, t, f, BC, HIDDEN, EVEN)
        slope = load(slopes + tile_offset, t, f, BC, HIDDEN, EVEN)
        g_hidden_error = dot_in_loop(-c * K, g_W1, n, IN_LOOP, ACC, OP, PRECISION)
        g_error = dot_add_in_loop(g_error, -c * H, g_W2, n, IN_LOOP, OP, PRECISION)
        if MOMENTUM:
            g_S1, g_S2 = load_layers(g_end1, g_end2, SIZE, d, f, D, HIDDEN, EVEN)
            store_layers(g_start1, g_start2, SIZE, g_S1, g_S2, d, f, D, HIDDEN, EVEN)
            g_hidden_error = dot_add_in_loop(g_hidden_error, -s * K, g_S1, n, IN_LOOP, OP, PRECISION)
            g_error = dot_add_in_loop(g_error, -s * H, g_S2, n, IN_LOOP, OP, PRECISION)
        g_error = dot_add_in_loop(g_error, g_hidden_error * slope, W2, n, IN_LOOP, OP, PRECISION)
        store(g_key_preacts + tile_offset, g_hidden_error, t, f, BC, HIDDEN, EVEN)
    for step in tl.range(n, num_stages=1):
        tl.debug_barrier()  # the blocks are read back by threads that did not write them
        i = n - 1 - step
        base = m * n + i
        state_offset = base * PARTS * SIZE
        D2 = load_tokens(errors, at, row_mask, D, BD)
        g_error = g_error * factor + load_tokens(g_errors, at, row_mask, D, BD)
        g_O = _error_backward(
            g_error,
            D2,
            K,
            v,
            predictions,
            prediction_rstds,
            g_surprise,
            g_v,
            at,
            row_mask,
            row_mask,
            D,
            BD,
            NORM,
            RESIDUAL,
        )
        g_O = g_O.to(OP)
        keep = tl.load(end_factors + base * 4)
        if MOMENTUM:
            carry, past = tl.load(end_factors + base * 4 + 1), tl.load(end_factors + base * 4 + 2)
        has_next = i > 0
        base_next = tl.where(has_next, base - 1, base)
        state_offset_next = base_next * PARTS * SIZE
        at, row_mask = chunk_tokens(m, i - 1, L, HEADS, CHUNK, BC)
        row_mask = row_mask & has_next
        K_next = load_tokens(k, at, row_mask, D, BD)
        c_next = load_coef(coef, base_next, COEF_C, BC)[:, None]
        Kt, c_D2, c_K_next = tl.trans(K), (-c * D2).to(OP), (-c_next * K_next).to(OP)
        if MOMENTUM:
            s_next = load_coef(coef, base_next, COEF_S, BC)[:, None]
            s_D2, s_K_next = (-s * D2).to(OP), (-s_next * K_next).to(OP)
        g_error = tl.zeros([BC, BD], ACC)
        largest_entry = tl.max(tl.max(g_error, 1), 0)
        for j in tl.range(BLOCKS, num_stages=1):
            f = j * BH + tl.arange(0, BH)
            tile_offset, tile_offset_next = base * BC * HIDDEN, base_next * BC * HIDDEN
            W2 = load(starts2 + state_offset, f, d, HIDDEN, D, EVEN)
            g_W1 = load(g_start1, d, f, D, HIDDEN, EVEN) * factor
            g_W2 = load(g_start2, f, d, HIDDEN, D, EVEN) * factor
            H = load(hiddens + tile_offset, t, f, BC, HIDDEN, EVEN)
            slope = load(slopes + tile_offset, t, f, BC, HIDDEN, EVEN)
            curvature = load(curvatures + tile_offset, t, f, BC, HIDDEN, EVEN)
            g_hidden_error = load(g_key_preacts + tile_offset, t, f, BC, HIDDEN, EVEN) * factor + load(
                g_hidden_errors + tile_offset, t, f, BC, HIDDEN, EVEN
            )
            g_hidden_error = g_hidden_error.to(OP)
            g_W1_next = load(g_starts1 + state_offset, d, f, D, HIDDEN, EVEN) + keep * g_W1
            g_W2_next = load(g_starts2 + state_offset, f, d, HIDDEN, D, EVEN) + keep * g_W2
            g_hidden = dot_in_loop(g_O, tl.trans(W2), n, IN_LOOP, ACC, OP, PRECISION)
            g_hidden = dot_add_in_loop(g_hidden, c_D2, tl.trans(g_W2.to(OP)), n, IN_LOOP, OP, PRECISION)
            if MOMENTUM:
                g_S1 = load(g_start1 + SIZE, d, f, D, HIDDEN, EVEN) * factor
                g_S2 = load(g_start2 + SIZE, f, d, HIDDEN, D, EVEN) * factor
                g_hidden = dot_add_in_loop(g_hidden, s_D2, tl.trans(g_S2.to(OP)), n, IN_LOOP, OP, PRECISION)
                g_S1_next = (
                    load(g_starts1 + state_offset + SIZE, d, f, D, HIDDEN, EVEN) + carry * g_W1 + past * g_S1
                )
                g_S2_next = (
                    load(g_starts2 + state_offset + SIZE, f, d, HIDDEN, D, EVEN) + carry * g_W2 + past * g_S2
                )
            g_hidden += load(g_hiddens + tile_offset, t, f, BC, HIDDEN, EVEN)
            g_key_preact = (g_hidden_error * curvature + slope * g_hidden).to(OP)
            tl.debug_barrier()  # all threads must have read g_key_preacts and g_starts before any writes
            store(g_key_preacts + tile_offset, g_key_preact, t, f, BC, HIDDEN, EVEN)
            store_layers(g_chunk_ends1, g_chunk_ends2, state_offset, g_W1, g_W2, d, f, D, HIDDEN, EVEN)
            g_W1 = dot_add_in_loop(g_W1_next, Kt, g_key_preact, n, IN_LOOP, OP, PRECISION)
            g_W2 = dot_add_in_loop(g_W2_next, tl.trans(H), g_O, n, IN_LOOP, OP, PRECISION)
            g_W2 = dot_add_in_loop(
                g_W2, tl.trans((g_hidden_error * slope).to(OP)), D2, n, IN_LOOP, OP, PRECISION
            )
            store_layers(g_start1, g_start2, 0, g_W1, g_W2, d, f, D, HIDDEN, EVEN)
            if MOMENTUM:
                store_layers(
                    g_chunk_ends1, g_chunk_ends2, state_offset + SIZE, g_S1, g_S2, d, f, D, HIDDEN, EVEN
                )
                store_layers(g_start1, g_start2, SIZE, g_S1_next, g_S2_next, d, f, D, HIDDEN, EVEN)
                largest_entry = tl.maximum(
                    largest_entry, largest(tl.maximum(tl.abs(g_W1), tl.abs(g_S1_next)))
                )
                largest_entry = tl.maximum(
                    largest_entry, largest(tl.maximum(tl.abs(g_W2), tl.abs(g_S2_next)))
                )
            else:
                largest_entry = tl.maximum(largest_entry, tl.maximum(largest(g_W1), largest(g_W2)))
            if has_next:
                H_next = load(hiddens + tile_offset_next, t, f, BC, HIDDEN, EVEN)
                g_hidden_error_next = dot_in_loop(c_K_next, g_W1, n, IN_LOOP, ACC, OP, PRECISION)
                g_error = dot_add_in_loop(g_error, -c_next * H_next, g_W2, n, IN_LOOP, OP, PRECISION)
                if MOMENTUM:
                    g_hidden_error_next = dot_add_in_loop(
                        g_hidden_error_next, s_K_next, g_S1_next, n, IN_LOOP, OP, PRECISION
                    )
                    g_error = dot_add_in_loop(g_error, -s_next * H_next, g_S2_next, n, IN_LOOP, OP, PRECISION)
                store(g_key_preacts + tile_offset_next, g_hidden_error_next, t, f, BC, HIDDEN, EVEN)
                g_hidden_error_next *= load(slopes + tile_offset_next, t, f, BC, HIDDEN, EVEN)
                W2 = load(starts2 + state_offset_next, f, d, HIDDEN, D, EVEN)
                g_error = dot_add_in_loop(g_error, g_hidden_error_next, W2, n, IN_LOOP, OP, PRECISION)
        total += tl.load(received_norm + base)
        factor = clamp_factor(total, largest_entry, RELATIVE_LIMIT, ABSOLUTE_LIMIT)
        smallest_factor = tl.minimum(smallest_factor, factor)
        K, c = K_next, c_next
        if MOMENTUM:
            s = s_next
    tl.atomic_add(clamped, 1, mask=smallest_factor < 1.0, sem="relaxed")
    tl.debug_barrier()
    for j in tl.range(BLOCKS, num_stages=1):
        f = j * BH + tl.arange(0, BH)
        g_W1 = load(g_start1, d, f, D, HIDDEN, EVEN) * factor
        g_W2 = load(g_start2, f, d, HIDDEN, D, EVEN) * factor
        tl.debug_barrier()
        store_layers(g_start1, g_start2, 0, g_W1, g_W2, d, f, D, HIDDEN, EVEN)
        if MOMENTUM:
            g_S1 = load(g_start1 + SIZE, d, f, D, HIDDEN, EVEN) * factor
            g_S2 = load(g_start2 + SIZE, f, d, HIDDEN, D, EVEN) * factor
            tl.debug_barrier()
            store_layers(g_start1, g_start2, SIZE, g_S1, g_S2, d, f, D, HIDDEN, EVEN)
