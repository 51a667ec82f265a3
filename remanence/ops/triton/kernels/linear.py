# mypy: ignore-errors
"""Forward of a one-layer memory: x W, optionally with a LayerNorm, optionally with x added. Keys have D
channels and values E; these may differ only without LayerNorm and without x added.

    linear_solve      the triangular systems of the token-exact rule; all chunks in parallel
    linear_state      iterate W and S over the chunks, from the keys alone, and compute the errors D;
                      one program per (row, head), or for some of its columns
    linear_read       the answers and the surprise; all chunks in parallel

The state is held, and saved at the starts of the chunks, transposed. It is then the left operand of all its
products, as are the errors, and both can stay in the registers of a warp between two products. A row of the
transposed state is a column of W and does not depend on other rows (except with LayerNorm), so the rows can
be divided among programs.

The other letters are listed in the docstring of the package. For the token-exact rule there are also

    T, `inverse`    the inverse of a chunk's triangular system, (I + (K K^T) P~)^-1
    U, R            T times the keys, scaled by the previous token's a and r
    ~, `_prev`      coefficients of the token before
"""

from __future__ import annotations

import triton
import triton.language as tl

from remanence.ops.triton.kernels.tools import (
    COEF_A,
    COEF_C,
    COEF_R,
    COEF_S,
    chunk_tokens,
    dot,
    kernel,
    load,
    load_coef,
    load_columns,
    load_tokens,
    norm,
    norm_backward,
    program_chunk_index,
    square_offsets,
    store,
    store_columns,
)


@triton.jit
def previous_token_coef(
    coef, log_keep, base, at, row_mask, BC: tl.constexpr, MOMENTUM: tl.constexpr, DECAY_FIRST: tl.constexpr
):
    """Return a and r of the token before each token, and the factor `scale` by which each token's own decay
    reduces them before its gradient is taken (1 unless DECAY_FIRST).
    """
    t = tl.arange(0, BC)
    a = tl.load(coef + base * 4 * BC + t - 1, mask=t > 0, other=1.0)
    r, scale = tl.zeros_like(a), tl.zeros_like(a) + 1.0
    if MOMENTUM:
        r = tl.load(coef + base * 4 * BC + BC + t - 1, mask=t > 0, other=0.0)
    if DECAY_FIRST:
        scale = tl.exp(tl.load(log_keep + at, mask=row_mask, other=0.0))
    return a, r, scale


@triton.jit
def previous_token_P(P, base, scale, BC: tl.constexpr):
    """Return P of the token before each token, times `scale`."""
    t = tl.arange(0, BC)
    square = base * BC * BC + (t[:, None] - 1) * BC + t[None, :]
    return tl.load(P + square, mask=(t > 0)[:, None], other=0.0) * scale[:, None]


@triton.jit
def _key_scores(
    k, log_keep, P, base, first_token, tokens_left, t, u,
    HEADS, D: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, DECAY_FIRST: tl.constexpr,
    OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the entries of (K K^T) P~ for the tokens t (rows) and u (columns) of a chunk, where P~ is
    `previous_token_P`.
    """
    at = first_token + t * HEADS
    K = load_tokens(k, at, t < tokens_left, D, BD)
    key_scores = dot(
        K, tl.trans(load_tokens(k, first_token + u * HEADS, u < tokens_left, D, BD)), OP, PRECISION
    )
    key_scores *= tl.load(
        P + base * BC * BC + (t[:, None] - 1) * BC + u[None, :], mask=(t > 0)[:, None], other=0.0
    )
    if DECAY_FIRST:
        key_scores *= tl.exp(tl.load(log_keep + at, mask=t < tokens_left, other=0.0))[:, None]
    return key_scores


@triton.jit
def _invert(A, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Return (I + A)^-1 for A that is zero on and above the diagonal. Diagonal blocks of 16 are inverted by
    forward substitution. Then pairs of neighbouring blocks are merged: the block below the diagonal is -X2
    A21 X1.

    The series of powers of A is not used: it cancels catastrophically if keys repeat, when the entries of A
    are all near one.
    """
    BLOCKS: tl.constexpr = SIZE // 16
    LEVELS: tl.constexpr = (SIZE > 16) + (SIZE > 32)
    b, offset, t = tl.arange(0, BLOCKS), tl.arange(0, 16), tl.arange(0, SIZE)
    same = (b[:, None] == b[None, :])[:, None, :, None]
    blocks = tl.sum(tl.where(same, tl.reshape(A, [BLOCKS, 16, BLOCKS, 16]), 0.0), 2)
    X = tl.zeros_like(blocks) + tl.where(offset[:, None] == offset[None, :], 1.0, 0.0)[None, :, :]
    for j in range(15):
        column = tl.sum(tl.where((offset == j)[None, None, :], blocks, 0.0), 2)
        row = tl.sum(tl.where((offset == j)[None, :, None], X, 0.0), 1)
        X -= column[:, :, None] * row[:, None, :]
    X = tl.reshape(tl.where(same, X[:, :, None, :], 0.0), [SIZE, SIZE])
    for level in tl.static_range(LEVELS):
        block = t // (16 << level)
        between = (block[:, None] % 2 == 1) & (block[None, :] == block[:, None] - 1)
        X -= tl.dot(
            X, tl.dot(tl.where(between, A, 0.0), X, input_precision=PRECISION), input_precision=PRECISION
        )
    return X


@kernel
def linear_solve(
    k, v, log_keep, P, coef, inverse, U, R, errors_at_zero, L, n, HEADS,
    D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
    MOMENTUM: tl.constexpr, RESIDUAL: tl.constexpr, DECAY_FIRST: tl.constexpr,
    ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """With T = (I + (K K^T) P~)^-1 (inverse), write U = T (a~ K), R = T (r~ K) and errors_at_zero =
    -T target, with the coefficients ~ of the token before. The errors are then D = U W + R S + errors_at_zero.
    """
    i, m, base = program_chunk_index(n)
    SIZE: tl.constexpr = min(BC, 64)
    t, u = tl.arange(0, BC), tl.arange(0, SIZE)
    first_token = ((m // HEADS).to(tl.int64) * L + i * CHUNK) * HEADS + m % HEADS
    tokens_left = tl.minimum(L - i * CHUNK, CHUNK)
    inverse += base * BC * BC
    square = inverse + u[:, None] * BC + u[None, :]
    X = _invert(
        _key_scores(
            k, log_keep, P, base, first_token, tokens_left, u, u, HEADS, D, BD, BC, DECAY_FIRST, OP, PRECISION
        ),
        SIZE,
        PRECISION,
    )
    tl.store(square, X.to(OP))
    if BC > SIZE:  # one more merge, on separate quarters: the whole matrix would not fit
        second = SIZE + u
        A = _key_scores(
            k,
            log_keep,
            P,
            base,
            first_token,
            tokens_left,
            second,
            u,
            HEADS,
            D,
            BD,
            BC,
            DECAY_FIRST,
            OP,
            PRECISION,
        )
        X = tl.dot(A, X, input_precision=PRECISION)
        A = _key_scores(
            k,
            log_keep,
            P,
            base,
            first_token,
            tokens_left,
            second,
            second,
            HEADS,
            D,
            BD,
            BC,
            DECAY_FIRST,
            OP,
            PRECISION,
        )
        A = _invert(A, SIZE, PRECISION)
        tl.store(square + SIZE, tl.zeros([SIZE, SIZE], OP))
        tl.store(square + SIZE * BC, -tl.dot(A, X, input_precision=PRECISION).to(OP))
        tl.store(square + SIZE * BC + SIZE, A.to(OP))
        tl.debug_barrier()  # it is read back by threads that did not write it
        T = tl.load(inverse + t[:, None] * BC + t[None, :])
    else:
        T = X.to(OP)
    at, row_mask = chunk_tokens(m, i, L, HEADS, CHUNK, BC)
    a, r, scale = previous_token_coef(coef, log_keep, base, at, row_mask, BC, MOMENTUM, DECAY_FIRST)
    for j in tl.range((D + BV - 1) // BV, num_stages=1):
        cols = j * BV + tl.arange(0, BV)
        K = load_columns(k, at, row_mask, cols, D)
        store_columns(U, dot(T, (a * scale)[:, None] * K, OP, PRECISION), at, row_mask, cols, D)
        if MOMENTUM:
            store_columns(R, dot(T, (r * scale)[:, None] * K, OP, PRECISION), at, row_mask, cols, D)
    for j in tl.range((E + BV - 1) // BV, num_stages=1):
        cols = j * BV + tl.arange(0, BV)
        target = load_columns(v, at, row_mask, cols, E).to(ACC)
        if RESIDUAL:
            target -= load_columns(k, at, row_mask, cols, D)
        store_columns(errors_at_zero, -dot(T, target, OP, PRECISION), at, row_mask, cols, E)


@kernel
def linear_state(
    k, v, U, R, errors_at_zero, J, end, starts, coef, end_factors, errors, L, n, HEADS,
    D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
    MOMENTUM: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, SQUARED: tl.constexpr,
    TOKEN_EXACT: tl.constexpr,
    ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Iterate the state over the chunks. Writes the state at each chunk's start (transposed) and at the end,
    and the errors.
    """
    m = tl.program_id(0).to(tl.int64)
    cols, d = tl.program_id(1) * BV + tl.arange(0, BV), tl.arange(0, BD)
    PARTS: tl.constexpr = 2 if MOMENTUM else 1
    SIZE: tl.constexpr = D * E
    EVEN: tl.constexpr = (D == BD) and (E % BV == 0)
    W = tl.trans(load(J + m * PARTS * SIZE, d, cols, D, E, EVEN))
    if MOMENTUM:
        S = tl.trans(load(J + (m * PARTS + 1) * SIZE, d, cols, D, E, EVEN))
    for i in range(n):
        base = m * n + i
        at, row_mask = chunk_tokens(m, i, L, HEADS, CHUNK, BC)
        K = load_tokens(k, at, row_mask, D, BD)
        store(starts + base * PARTS * SIZE, W, cols, d, E, D, EVEN)
        if MOMENTUM:
            store(starts + (base * PARTS + 1) * SIZE, S, cols, d, E, D, EVEN)
        if TOKEN_EXACT and SQUARED:
            error = tl.trans(load_columns(errors_at_zero, at, row_mask, cols, E)).to(ACC)
            error += dot(W, tl.trans(load_tokens(U, at, row_mask, D, BD)), OP, PRECISION)
            if MOMENTUM:
                error += dot(S, tl.trans(load_tokens(R, at, row_mask, D, BD)), OP, PRECISION)
        else:
            slope = -tl.trans(load_columns(v, at, row_mask, cols, E)).to(ACC)
            if SQUARED and RESIDUAL:
                slope += tl.trans(load_columns(k, at, row_mask, cols, D))
            if NORM:
                value, rstd = norm(tl.trans(dot(W, tl.trans(K), OP, PRECISION)), D, BD)
                slope = tl.trans(slope)
                if SQUARED:
                    slope += value
                error = tl.trans(norm_backward(slope, value, rstd, D, BD))
            elif SQUARED:
                error = slope + dot(W, tl.trans(K), OP, PRECISION)
            else:
                error = slope
        store_columns(errors, tl.trans(error), at, row_mask, cols, E)
        c = load_coef(coef, base, COEF_C, BC)[None, :]
        W = tl.load(end_factors + base * 4) * W - dot(error * c, K, OP, PRECISION)
        if MOMENTUM:
            s = load_coef(coef, base, COEF_S, BC)[None, :]
            W += tl.load(end_factors + base * 4 + 1) * S
            S = tl.load(end_factors + base * 4 + 2) * S - dot(error * s, K, OP, PRECISION)
    store(end + m * PARTS * SIZE, tl.trans(W), d, cols, D, E, EVEN)
    if MOMENTUM:
        store(end + (m * PARTS + 1) * SIZE, tl.trans(S), d, cols, D, E, EVEN)


@kernel
def linear_read(
    q, k, v, log_keep, starts, P, coef, errors, predictions, prediction_rstds, answers, answer_rstds, y,
    surprise, nonfinite, L, n, HEADS,
    D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
    MOMENTUM: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, SQUARED: tl.constexpr,
    TOKEN_EXACT: tl.constexpr,
    DECAY_FIRST: tl.constexpr, SAVE_FOR_BACKWARD: tl.constexpr,
    ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the answers and the surprise of one chunk, and flag it in `nonfinite` if an answer is not
    finite.

    With SAVE_FOR_BACKWARD, it writes what backward needs: the predictions for the keys, if they cannot be
    derived from the errors, and with LayerNorm its output and 1 / standard deviation for the keys (predictions,
    prediction_rstds) and for the queries (answers, answer_rstds).
    """
    i, m, base = program_chunk_index(n)
    d = tl.arange(0, BD)
    PARTS: tl.constexpr = 2 if MOMENTUM else 1
    SIZE: tl.constexpr = D * E
    BLOCKS: tl.constexpr = (E + BV - 1) // BV
    EVEN: tl.constexpr = (D == BD) and (E % BV == 0)
    starts += base * PARTS * SIZE
    at, row_mask = chunk_tokens(m, i, L, HEADS, CHUNK, BC)
    Q, K = load_tokens(q, at, row_mask, D, BD), load_tokens(k, at, row_mask, D, BD)
    a = load_coef(coef, base, COEF_A, BC)[:, None]
    if MOMENTUM:
        r = load_coef(coef, base, COEF_R, BC)[:, None]
    square = square_offsets(base, BC)
    masked_scores = (dot(Q, tl.trans(K), OP, PRECISION) * tl.load(P + square)).to(OP)
    if TOKEN_EXACT and not SQUARED:
        a_prev, r_prev, scale = previous_token_coef(
            coef, log_keep, base, at, row_mask, BC, MOMENTUM, DECAY_FIRST
        )
        key_scores = (dot(K, tl.trans(K), OP, PRECISION) * previous_token_P(P, base, scale, BC)).to(OP)
    loss = tl.zeros([BC], ACC)
    is_nonfinite = tl.zeros([BC], tl.int32)
    for j in tl.range(BLOCKS, num_stages=1):
        cols = j * BV + tl.arange(0, BV)
        W = tl.trans(load(starts, cols, d, E, D, EVEN))
        error = load_columns(errors, at, row_mask, cols, E)
        out = a * dot(Q, W, OP, PRECISION) - dot(masked_scores, error, OP, PRECISION)
        if MOMENTUM:
            S = tl.trans(load(starts + SIZE, cols, d, E, D, EVEN))
            out += r * dot(Q, S, OP, PRECISION)
        if SQUARED and not NORM:
            loss += 0.5 * tl.sum(error.to(ACC) * error, 1)
        else:
            prediction = dot(K, W, OP, PRECISION)
            if TOKEN_EXACT:
                prediction = (a_prev * scale)[:, None] * prediction - dot(key_scores, error, OP, PRECISION)
                if MOMENTUM:
                    prediction += (r_prev * scale)[:, None] * dot(K, S, OP, PRECISION)
            if NORM:
                prediction, rstd = norm(prediction, D, BD)
                if SAVE_FOR_BACKWARD:
                    tl.store(prediction_rstds + at, rstd, mask=row_mask)
            if SAVE_FOR_BACKWARD:
                store_columns(predictions, prediction, at, row_mask, cols, E)
            if RESIDUAL:
                prediction += load_columns(k, at, row_mask, cols, D)
            V = load_columns(v, at, row_mask, cols, E).to(ACC)
            if SQUARED:
                loss += 0.5 * tl.sum((prediction - V) * (prediction - V), 1)
            else:
                loss -= tl.sum(prediction * V, 1)
        if NORM:
            out, rstd = norm(out, D, BD)
            if SAVE_FOR_BACKWARD:
                store_columns(answers, out, at, row_mask, cols, E)
                tl.store(answer_rstds + at, rstd, mask=row_mask)
        if RESIDUAL:
            out += load_columns(q, at, row_mask, cols, D)
        store_columns(y, out, at, row_mask, cols, E)
        is_nonfinite = tl.maximum(
            is_nonfinite, tl.max(tl.where(row_mask[:, None] & ~(tl.abs(out) < float("inf")), 1, 0), 1)
        )
    tl.store(surprise + at, loss, mask=row_mask)
    tl.store(nonfinite + base, tl.max(is_nonfinite, 0))
