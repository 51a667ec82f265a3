# mypy: ignore-errors
"""Gradients of keys and coefficients, given the gradient of the state at the end of every chunk."""

from __future__ import annotations

import triton.language as tl

from remanence.ops.triton.kernels.tools import (
    COEF_C,
    COEF_S,
    chunk_tokens,
    dot,
    kernel,
    load,
    load_coef,
    load_layers,
    load_tokens,
    program_chunk_index,
    store_coef,
    store_tokens,
)


@kernel
def keys_backward(
    k, starts1, starts2, coef, errors, hiddens, hidden_errors, g_key_preacts, g_chunk_ends1, g_chunk_ends2, g_v,
    g_k, g_coef, g_end_factors, L, n, HEADS,
    D: tl.constexpr, BD: tl.constexpr, HIDDEN: tl.constexpr, BH: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
    MOMENTUM: tl.constexpr, RESIDUAL: tl.constexpr,
    ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients that no other chunk depends on; all chunks in parallel. g_k holds the part from
    the answers and is added to. g_chunk_ends1 and g_chunk_ends2 are the gradients of the state at the end of
    each chunk, g_key_preacts those of Z1.
    """
    i, m, base = program_chunk_index(n)
    d, t = tl.arange(0, BD), tl.arange(0, BC)
    PARTS: tl.constexpr = 2 if MOMENTUM else 1
    SIZE: tl.constexpr = D * HIDDEN
    BLOCKS: tl.constexpr = (HIDDEN + BH - 1) // BH
    EVEN: tl.constexpr = (D == BD) and (HIDDEN == BH * BLOCKS)
    starts1 += base * PARTS * SIZE
    starts2 += base * PARTS * SIZE
    g_chunk_ends1 += base * PARTS * SIZE
    g_chunk_ends2 += base * PARTS * SIZE
    at, row_mask = chunk_tokens(m, i, L, HEADS, CHUNK, BC)
    K, D2 = load_tokens(k, at, row_mask, D, BD), load_tokens(errors, at, row_mask, D, BD)
    c = load_coef(coef, base, COEF_C, BC)[:, None]
    g_key = load_tokens(g_k, at, row_mask, D, BD).to(ACC)
    if RESIDUAL:
        g_key -= load_tokens(g_v, at, row_mask, D, BD)
    g_c = tl.zeros([BC], ACC)
    keep = tl.sum(g_c, 0)
    if MOMENTUM:
        s = load_coef(coef, base, COEF_S, BC)[:, None]
        g_s = tl.zeros([BC], ACC)
        carry, past = tl.sum(g_c, 0), tl.sum(g_c, 0)
    for j in tl.range(BLOCKS, num_stages=1):
        f = j * BH + tl.arange(0, BH)
        W1, W2 = load_layers(starts1, starts2, 0, d, f, D, HIDDEN, EVEN)
        g_end1, g_end2 = load_layers(g_chunk_ends1, g_chunk_ends2, 0, d, f, D, HIDDEN, EVEN)
        H = load(hiddens + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)
        D1 = load(hidden_errors + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN)
        keep += tl.sum(tl.sum(W1.to(ACC) * g_end1, 1), 0) + tl.sum(tl.sum(W2.to(ACC) * g_end2, 1), 0)
        g_key += dot(
            load(g_key_preacts + base * BC * HIDDEN, t, f, BC, HIDDEN, EVEN), tl.trans(W1), OP, PRECISION
        )
        back = dot(D1, tl.trans(g_end1), OP, PRECISION)
        g_key -= c * back
        g_c -= tl.sum(back * K, 1) + tl.sum(dot(D2, tl.trans(g_end2), OP, PRECISION) * H, 1)
        if MOMENTUM:
            S1 = load(starts1 + SIZE, d, f, D, HIDDEN, EVEN).to(ACC)
            S2 = load(starts2 + SIZE, f, d, HIDDEN, D, EVEN).to(ACC)
            carry += tl.sum(tl.sum(S1 * g_end1, 1), 0) + tl.sum(tl.sum(S2 * g_end2, 1), 0)
            g_end1, g_end2 = load_layers(g_chunk_ends1, g_chunk_ends2, SIZE, d, f, D, HIDDEN, EVEN)
            past += tl.sum(tl.sum(S1 * g_end1, 1), 0) + tl.sum(tl.sum(S2 * g_end2, 1), 0)
            back = dot(D1, tl.trans(g_end1), OP, PRECISION)
            g_key -= s * back
            g_s -= tl.sum(back * K, 1) + tl.sum(dot(D2, tl.trans(g_end2), OP, PRECISION) * H, 1)
    store_tokens(g_k, g_key, at, row_mask, D, BD)
    store_coef(g_coef, g_c, base, COEF_C, BC)
    tl.store(g_end_factors + base * 4, keep)
    if MOMENTUM:
        store_coef(g_coef, g_s, base, COEF_S, BC)
        tl.store(g_end_factors + base * 4 + 1, carry)
        tl.store(g_end_factors + base * 4 + 2, past)
