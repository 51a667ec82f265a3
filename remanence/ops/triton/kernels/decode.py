# mypy: ignore-errors
"""Process one token with a memory of one or two layers, in place. The query is answered, the token is stored
in the incomplete chunk, and if it completes the chunk, the chunk is added to the state.

    X1, X2, E1, E2, V      the layers' inputs, the layers' errors (D1, D2) and the values of the incomplete chunk's
                           tokens; in the one-layer kernel X and `errors`
    steps, momenta, keeps  log gates of these tokens
    slot                   the token's index in its chunk
    y, surprise            the token's answer, and its loss before it is written

The other letters are those of the package's docstring.
"""

from __future__ import annotations

import triton
import triton.language as tl

from remanence.ops.triton.kernels.coef import _gate_products
from remanence.ops.triton.kernels.tools import activate, activate_with_slope, load, norm, norm_backward, store


@triton.jit
def _append_row(ptr, new, t, cols, slot, WIDTH: tl.constexpr):
    """Store the new row in its slot of the incomplete chunk. Return the rows ``[c WIDTH]`` of the chunk,
    including the new one, with zeros after it.
    """
    tl.store(ptr + slot * WIDTH + cols, new, mask=cols < WIDTH)
    read = (t < slot)[:, None] & (cols < WIDTH)[None, :]
    old = tl.load(ptr + t[:, None] * WIDTH + cols[None, :], mask=read, other=0.0)
    return tl.where((t == slot)[:, None], new[None, :], old)


@triton.jit
def _append_gate(ptr, new, t, slot, other):
    """Store the new log gate in its slot of the incomplete chunk. Return the log gates of the chunk,
    including the new one, with `other` after it.
    """
    tl.store(ptr + slot, new)
    return tl.where(t == slot, new, tl.load(ptr + t, mask=t < slot, other=other))


@triton.jit
def _products_to_slot(ptr, new, t, slot, last):
    """Return the product of the gates over (j, last] for every slot j, or 0 for slots after `last`. `last` is
    `slot`, whose gate is `new`, or the slot before. This is one scan; the matrix of all products would be the
    kernel's largest tile.
    """
    following = tl.where(t + 1 == slot, new, tl.load(ptr + t + 1, mask=t + 1 < slot, other=0.0))
    return tl.where(t <= last, tl.cumprod(tl.where(t < last, tl.exp(following), 1.0), 0, reverse=True), 0.0)


@triton.jit
def decode_kernel(
    q, k, v, log_step, log_momentum, log_keep, J1, J2, X1, X2, E1, E2, V, steps, momenta, keeps,
    position, active, y, surprise, diverged,
    HEADS: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, HIDDEN: tl.constexpr,
    BH: tl.constexpr, MOMENTUM: tl.constexpr, FORGET: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr,
    GELU: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Process one token with a two-layer memory. Rows that are not active get answers and surprise of 0.

    Only the last row of every product of the closed form is needed, so matrices are multiplied by vectors, in
    full precision. There are two passes over the hidden blocks, because the answer depends on the token's own
    write and so on its error, which must be computed first. A third pass updates the state if the chunk is
    complete.
    """
    m = tl.program_id(0).to(tl.int64)
    row = m // HEADS
    d, t = tl.arange(0, BD), tl.arange(0, BC)
    if tl.load(active + row) == 0:
        tl.store(y + m * D + d, tl.zeros([BD], ACC).to(y.dtype.element_ty), mask=d < D)
        tl.store(surprise + m, 0.0)
    else:
        PARTS: tl.constexpr = 2 if MOMENTUM else 1
        SIZE: tl.constexpr = D * HIDDEN
        BLOCKS: tl.constexpr = (HIDDEN + BH - 1) // BH
        EVEN: tl.constexpr = (D == BD) and (HIDDEN == BH * BLOCKS)
        J1 += m * PARTS * SIZE
        J2 += m * PARTS * SIZE
        slot = (tl.load(position + row) % CHUNK).to(tl.int32)
        is_slot = t == slot
        # The coefficients a, r, P of this token. If the token completes the chunk, they also update the
        # state.
        theta = tl.exp(_append_gate(steps + m * CHUNK, tl.load(log_step + m), t, slot, float("-inf")))
        kept = tl.where(t <= slot, 1.0, 0.0).to(ACC)
        a = tl.full([], 1.0, ACC)
        if FORGET:
            keep = _append_gate(keeps + m * CHUNK, tl.load(log_keep + m), t, slot, 0.0)
            kept = tl.sum(tl.where(is_slot[None, :], _gate_products(keep, BC, False), 0.0), 1)
            a = tl.exp(tl.sum(keep, 0))
        P = kept * theta
        if MOMENTUM:
            eta = _append_gate(momenta + m * CHUNK, tl.load(log_momentum + m), t, slot, 0.0)
            moved = _gate_products(eta, BC, False)
            P = tl.sum(moved * kept[None, :], 1) * theta
            s = tl.sum(tl.where(is_slot[None, :], moved, 0.0), 1) * theta
            r = tl.sum(kept * tl.exp(tl.cumsum(eta, 0)), 0)
            past = tl.exp(tl.sum(eta, 0))
        Q = tl.load(q + m * D + d, mask=d < D, other=0.0).to(ACC)
        K = tl.load(k + m * D + d, mask=d < D, other=0.0).to(ACC)
        value = tl.load(v + m * D + d, mask=d < D, other=0.0).to(ACC)
        tl.store(V + (m * CHUNK + slot) * D + d, value, mask=d < D)
        out = tl.zeros([BD], ACC)
        for j in tl.range(BLOCKS, num_stages=1):
            f = j * BH + tl.arange(0, BH)
            h = activate(tl.sum(K[:, None] * load(J1, d, f, D, HIDDEN, EVEN), 0), GELU)
            out += tl.sum(h[:, None] * load(J2, f, d, HIDDEN, D, EVEN), 0)
        if NORM:
            prediction, rstd = norm(out[None, :], D, BD)
            slope = prediction - value[None, :]
        else:
            slope = (out - value)[None, :]
        if RESIDUAL:
            slope += K[None, :]
        loss = 0.5 * tl.sum(tl.sum(slope * slope, 1), 0)
        if NORM:
            slope = norm_backward(slope, prediction, rstd, D, BD)
        error = tl.sum(slope, 0)
        Ks = _append_row(X1 + m * CHUNK * D, K, t, d, slot, D)
        D2 = _append_row(E2 + m * CHUNK * D, error, t, d, slot, D)
        masked_scores = tl.sum(Ks * Q[None, :], 1) * P
        hidden_scores = tl.zeros([BC], ACC)
        out = tl.zeros([BD], ACC)
        for j in tl.range(BLOCKS, num_stages=1):
            f = j * BH + tl.arange(0, BH)
            W1, W2 = load(J1, d, f, D, HIDDEN, EVEN), load(J2, f, d, HIDDEN, D, EVEN)
            h, act_slope = activate_with_slope(tl.sum(K[:, None] * W1, 0), GELU)
            hidden_error = tl.sum(W2 * error[None, :], 1) * act_slope
            H = _append_row(X2 + m * CHUNK * HIDDEN, h, t, f, slot, HIDDEN)
            D1 = _append_row(E1 + m * CHUNK * HIDDEN, hidden_error, t, f, slot, HIDDEN)
            W1, W2 = a * W1, a * W2
            if MOMENTUM:
                W1 += r * load(J1 + SIZE, d, f, D, HIDDEN, EVEN)
                W2 += r * load(J2 + SIZE, f, d, HIDDEN, D, EVEN)
            A = activate(tl.sum(Q[:, None] * W1, 0) - tl.sum(masked_scores[:, None] * D1, 0), GELU)
            hidden_scores += tl.sum(H * A[None, :], 1)
            out += tl.sum(A[:, None] * W2, 0)
        out -= tl.sum((hidden_scores * P)[:, None] * D2, 0)
        if NORM:
            prediction, rstd = norm(out[None, :], D, BD)
            out = tl.sum(prediction, 0)
        if RESIDUAL:
            out += Q
        tl.store(y + m * D + d, out.to(y.dtype.element_ty), mask=d < D)
        tl.store(surprise + m, loss)
        is_nonfinite = tl.max(tl.where((d < D) & ~(tl.abs(out) < float("inf")), 1, 0), 0)
        if (is_nonfinite > 0) | ~(loss < float("inf")):
            tl.store(diverged + row, 1)
        if slot == CHUNK - 1:
            tl.debug_barrier()  # other threads read back the stored rows and write the state
            for j in tl.range(BLOCKS, num_stages=1):
                f = j * BH + tl.arange(0, BH)
                W1, W2 = a * load(J1, d, f, D, HIDDEN, EVEN), a * load(J2, f, d, HIDDEN, D, EVEN)
                if MOMENTUM:
                    S1, S2 = load(J1 + SIZE, d, f, D, HIDDEN, EVEN), load(J2 + SIZE, f, d, HIDDEN, D, EVEN)
                    W1 += r * S1
                    W2 += r * S2
                    S1 *= past
                    S2 *= past
                for i in tl.range(CHUNK, num_stages=1):
                    at = m * CHUNK + i
                    x1, e2 = (
                        tl.load(X1 + at * D + d, mask=d < D, other=0.0),
                        tl.load(E2 + at * D + d, mask=d < D, other=0.0),
                    )
                    x2 = tl.load(X2 + at * HIDDEN + f, mask=f < HIDDEN, other=0.0)
                    e1 = tl.load(E1 + at * HIDDEN + f, mask=f < HIDDEN, other=0.0)
                    write1, write2 = x1[:, None] * e1[None, :], x2[:, None] * e2[None, :]
                    c = tl.sum(tl.where(t == i, P, 0.0), 0)
                    W1 -= c * write1
                    W2 -= c * write2
                    if MOMENTUM:
                        c = tl.sum(tl.where(t == i, s, 0.0), 0)
                        S1 -= c * write1
                        S2 -= c * write2
                tl.debug_barrier()
                store(J1, W1, d, f, D, HIDDEN, EVEN)
                store(J2, W2, f, d, HIDDEN, D, EVEN)
                if MOMENTUM:
                    store(J1 + SIZE, S1, d, f, D, HIDDEN, EVEN)
                    store(J2 + SIZE, S2, f, d, HIDDEN, D, EVEN)


@triton.jit
def decode_linear_kernel(
    q, k, v, log_step, log_momentum, log_keep, J, X, errors, V, steps, momenta, keeps,
    position, active, y, surprise, diverged,
    HEADS: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr,
    BV: tl.constexpr, MOMENTUM: tl.constexpr, FORGET: tl.constexpr, RESIDUAL: tl.constexpr, SQUARED: tl.constexpr,
    TOKEN_EXACT: tl.constexpr, DECAY_FIRST: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Process one token with a one-layer memory, a matrix of D by E. Its columns are independent, so one pass
    over blocks of columns is enough: it computes the error of the key, the answer, and the update of the
    state from weights that are loaded once.
    """
    m = tl.program_id(0).to(tl.int64)
    row = m // HEADS
    d, t = tl.arange(0, BD), tl.arange(0, BC)
    BLOCKS: tl.constexpr = (E + BV - 1) // BV
    if tl.load(active + row) == 0:
        for j in tl.range(BLOCKS, num_stages=1):
            f = j * BV + tl.arange(0, BV)
            tl.store(y + m * E + f, tl.zeros([BV], ACC).to(y.dtype.element_ty), mask=f < E)
        tl.store(surprise + m, 0.0)
    else:
        PARTS: tl.constexpr = 2 if MOMENTUM else 1
        SIZE: tl.constexpr = D * E
        EVEN: tl.constexpr = (D == BD) and (E == BV * BLOCKS)
        J += m * PARTS * SIZE
        slot = (tl.load(position + row) % CHUNK).to(tl.int32)
        # The coefficients a, r, P of this token's answer, and those (*_key) of the weights at which its
        # gradient is taken: of the token before if the rule is token-exact, otherwise of the chunk's start.
        # With DECAY_FIRST, the latter include the token's own decay.
        theta = tl.exp(_append_gate(steps + m * CHUNK, tl.load(log_step + m), t, slot, float("-inf")))
        a, a_key, r_key = tl.full([], 1.0, ACC), tl.full([], 1.0, ACC), tl.full([], 0.0, ACC)
        kept, kept_key = tl.where(t <= slot, 1.0, 0.0).to(ACC), tl.where(t < slot, 1.0, 0.0).to(ACC)
        if FORGET:
            new = tl.load(log_keep + m)
            keep = _append_gate(keeps + m * CHUNK, new, t, slot, 0.0)
            kept = _products_to_slot(keeps + m * CHUNK, new, t, slot, slot)
            a = tl.exp(tl.sum(keep, 0))
            if TOKEN_EXACT:
                kept_key = _products_to_slot(keeps + m * CHUNK, new, t, slot, slot - 1)
                a_key = tl.exp(tl.sum(tl.where(t < slot, keep, 0.0), 0))
        P, P_key = kept * theta, kept_key * theta
        if MOMENTUM:
            new = tl.load(log_momentum + m)
            eta = _append_gate(momenta + m * CHUNK, new, t, slot, 0.0)
            moved = _gate_products(eta, BC, False)
            past = tl.exp(tl.cumsum(eta, 0))
            r = tl.sum(kept * past, 0)
            P = tl.sum(moved * kept[None, :], 1) * theta
            s = _products_to_slot(momenta + m * CHUNK, new, t, slot, slot) * theta
            past_at_slot = tl.exp(tl.sum(eta, 0))
            if TOKEN_EXACT:
                r_key = tl.sum(kept_key * past, 0)
                P_key = tl.sum(moved * kept_key[None, :], 1) * theta
        if DECAY_FIRST:
            scale = tl.exp(tl.load(log_keep + m))
            a_key, r_key, P_key = a_key * scale, r_key * scale, P_key * scale
        Q = tl.load(q + m * D + d, mask=d < D, other=0.0).to(ACC)
        K = tl.load(k + m * D + d, mask=d < D, other=0.0).to(ACC)
        Ks = _append_row(X + m * CHUNK * D, K, t, d, slot, D)
        masked_scores = tl.sum(Ks * Q[None, :], 1) * P
        key_scores = tl.sum(Ks * K[None, :], 1) * P_key
        # The effect of the token's own write on its answer.
        own_score = tl.sum(tl.where(t == slot, masked_scores, 0.0), 0)
        loss = tl.zeros([], ACC)
        is_nonfinite = tl.zeros([], tl.int32)
        for j in tl.range(BLOCKS, num_stages=1):
            f = j * BV + tl.arange(0, BV)
            at = (m * CHUNK + t)[:, None] * E + f[None, :]
            old = tl.load(errors + at, mask=(t < slot)[:, None] & (f < E)[None, :], other=0.0)
            W = load(J, d, f, D, E, EVEN)
            prediction = a_key * tl.sum(K[:, None] * W, 0)
            out = a * tl.sum(Q[:, None] * W, 0) - tl.sum(masked_scores[:, None] * old, 0)
            if MOMENTUM:
                S = load(J + SIZE, d, f, D, E, EVEN)
                out += r * tl.sum(Q[:, None] * S, 0)
            if TOKEN_EXACT:
                prediction -= tl.sum(key_scores[:, None] * old, 0)
                if MOMENTUM:
                    prediction += r_key * tl.sum(K[:, None] * S, 0)
            if RESIDUAL:
                prediction += tl.load(k + m * D + f, mask=f < D, other=0.0).to(ACC)
                out += tl.load(q + m * D + f, mask=f < D, other=0.0).to(ACC)
            value = tl.load(v + m * E + f, mask=f < E, other=0.0).to(ACC)
            tl.store(V + (m * CHUNK + slot) * E + f, value, mask=f < E)
            if SQUARED:
                error = prediction - value
                loss += 0.5 * tl.sum(error * error, 0)
            else:
                error = -value
                loss += tl.sum(prediction * error, 0)
            tl.store(errors + (m * CHUNK + slot) * E + f, error, mask=f < E)
            out -= own_score * error
            tl.store(y + m * E + f, out.to(y.dtype.element_ty), mask=f < E)
            is_nonfinite = tl.maximum(
                is_nonfinite, tl.max(tl.where((f < E) & ~(tl.abs(out) < float("inf")), 1, 0), 0)
            )
            if slot == CHUNK - 1:
                tl.debug_barrier()  # other threads read back the stored rows and write the state
                W = a * W
                if MOMENTUM:
                    W += r * S
                    S = past_at_slot * S
                for i in tl.range(CHUNK, num_stages=1):
                    x = tl.load(X + (m * CHUNK + i) * D + d, mask=d < D, other=0.0)
                    e = tl.load(errors + (m * CHUNK + i) * E + f, mask=f < E, other=0.0)
                    written = x[:, None] * e[None, :]
                    W -= tl.sum(tl.where(t == i, P, 0.0), 0) * written
                    if MOMENTUM:
                        S -= tl.sum(tl.where(t == i, s, 0.0), 0) * written
                store(J, W, d, f, D, E, EVEN)
                if MOMENTUM:
                    store(J + SIZE, S, d, f, D, E, EVEN)
        tl.store(surprise + m, loss)
        if (is_nonfinite > 0) | ~(tl.abs(loss) < float("inf")):
            tl.store(diverged + row, 1)


@triton.jit
def _convolve(
    x, past, weight, y, m, is_active,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, HISTORY: tl.constexpr, BT: tl.constexpr, TAPS: tl.constexpr,
    ACC: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Convolve one token of one row and head, apply SiLU, and scale to unit length if UNIT. If `is_active`,
    shift the past inputs by one token in place.
    """
    OP: tl.constexpr = x.dtype.element_ty
    d, t = tl.arange(0, BD), tl.arange(0, BT)
    channel_mask = d < D
    at = (m % HEADS) * D + d
    past += (m // HEADS) * HISTORY * HEADS * D
    past_at = past + t[:, None] * HEADS * D + at[None, :]
    past_mask = (t < HISTORY)[:, None] & channel_mask[None, :]
    old = tl.load(past_at, mask=past_mask, other=0.0)
    later = tl.load(past_at + HEADS * D, mask=(t + 1 < HISTORY)[:, None] & channel_mask[None, :], other=0.0)
    new = tl.load(x + (m // HEADS) * HEADS * D + at, mask=channel_mask, other=0.0)
    tap = t - (HISTORY - TAPS + 1)  # the newest input belongs to the last tap
    taps = (
        tl.load(weight + at[None, :] * TAPS + tap[:, None], mask=past_mask & (tap >= 0)[:, None], other=0.0)
        .to(OP)
        .to(ACC)
    )
    last = tl.load(weight + at * TAPS + TAPS - 1, mask=channel_mask, other=0.0).to(OP).to(ACC)
    # Rounded at the same places as in torch.
    z = (tl.sum(old.to(OP).to(ACC) * taps, 0) + new.to(ACC) * last).to(OP).to(ACC)
    z = (z / (1.0 + tl.exp(-z))).to(OP).to(ACC)
    if UNIT:
        z = z / tl.sqrt(tl.sum(z * z, 0) + 1e-12)
    tl.store(y + m * D + d, z.to(OP), mask=channel_mask)
    if is_active:
        tl.debug_barrier()  # all threads must have read before any writes
        tl.store(
            past_at, tl.where((t == HISTORY - 1)[:, None], new[None, :].to(old.dtype), later), mask=past_mask
        )


@triton.jit
def convolve_kernel(
    x0, x1, x2, past0, past1, past2, weight0, weight1, weight2, y0, y1, y2, active,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, HISTORY: tl.constexpr, BT: tl.constexpr, TAPS: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Compute the short convolutions of q, k and v ``[r h e]`` of one token, with SiLU, and for q and k at
    unit length. The past inputs ``[r past h e]`` of active rows are shifted by one token in place.
    """
    m, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_active = tl.load(active + m // HEADS) != 0
    if which == 0:
        _convolve(x0, past0, weight0, y0, m, is_active, HEADS, D, BD, HISTORY, BT, TAPS, ACC, True)
    elif which == 1:
        _convolve(x1, past1, weight1, y1, m, is_active, HEADS, D, BD, HISTORY, BT, TAPS, ACC, True)
    else:
        _convolve(x2, past2, weight2, y2, m, is_active, HEADS, D, BD, HISTORY, BT, TAPS, ACC, False)


@triton.jit
def copy_weights_kernel(
    row_starts_segment, source, weights, SIZE, PARTS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr
):
    """Copy the weights at the start of the chunk (the first part of the state J) to `weights`, for rows where
    `row_starts_segment` is not 0. Other rows are neither read nor written.
    """
    m = tl.program_id(0).to(tl.int64)
    if tl.load(row_starts_segment + m // HEADS) != 0:
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        tl.store(weights + m * SIZE + i, tl.load(source + m * PARTS * SIZE + i, mask=i < SIZE), mask=i < SIZE)
