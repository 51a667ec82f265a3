# mypy: ignore-errors
"""Compute the coefficients of the closed form from the gates, and the gradients of the gates.

keep, kept      logs of the forget gates (1 - alpha), and their products over (j, t], ``[j t]``
eta, moved      logs of the momentum gates, and their products over (j, t], ``[j t]``
past            products of the momentum gates from the chunk's start to each token
mix             P, transposed: ``[j t]``
whole           1 if the chunk is complete, otherwise 0
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
    load_coef,
    program_chunk,
)

MIN_LOG_GATE = tl.constexpr(-30.0)
"""The lowest log of a gate in products that are computed FROM_LOG_SUMS. A gate of exp(-30), about 1e-13, lets
practically nothing through.
"""


@triton.jit
def _gate_products(log_gate, BC: tl.constexpr, FROM_LOG_SUMS: tl.constexpr):
    """Return ``[j t]``: the product of the gates over (j, t], or 0 for t < j.

    With FROM_LOG_SUMS, which is faster, it is computed from differences of cumulative sums of logs. Logs are
    then clamped at MIN_LOG_GATE, so that there is no difference of infinities and the sums stay small enough to
    be precise. The error is about 1e-4, which is below the precision of bfloat16 operands.
    """
    t = tl.arange(0, BC)
    if FROM_LOG_SUMS:
        summed = tl.cumsum(tl.maximum(log_gate, MIN_LOG_GATE), 0)
        products = tl.exp(tl.minimum(summed[None, :] - summed[:, None], 0.0))
    else:
        products = tl.cumprod(tl.where(t[None, :] > t[:, None], tl.exp(log_gate)[None, :], 1.0), 1)
    return tl.where(t[None, :] >= t[:, None], products, 0.0)


@triton.jit
def _gate_products_backward(g, products, BC: tl.constexpr, FROM_LOG_SUMS: tl.constexpr):
    """Return the gradient of the log gates, given the gradient g of `products`. The derivative of a product
    over (j, t] with respect to each of its log gates is the product itself.
    """
    t = tl.arange(0, BC)
    if FROM_LOG_SUMS:  # the product grows with the cumulative log of t, and shrinks with that of j
        changed = tl.where(t[None, :] > t[:, None], g * products, 0.0)
        return tl.cumsum(tl.sum(changed, 0) - tl.sum(changed, 1), 0, reverse=True)
    else:
        changed = tl.cumsum(g * products, 1, reverse=True)
        return tl.sum(tl.where(t[None, :] > t[:, None], changed, 0.0), 0)


@kernel
def coef_kernel(
    log_step, log_momentum, log_keep, totals, P, coef, end_factors, L, n, HEADS,
    CHUNK: tl.constexpr, BC: tl.constexpr, MOMENTUM: tl.constexpr, FORGET: tl.constexpr,
    FROM_LOG_SUMS: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write P ``[m n BC BC]``, the coefficients a, r, c, s of each token (`coef` ``[m n 4 BC]``), and the
    factors of the start state in the state at the end of each chunk (`end_factors` ``[m n 4]``). An incomplete
    chunk leaves the state unchanged.
    """
    i, m = program_chunk(n)
    t = tl.arange(0, BC)
    at, row_mask = chunk_tokens(m, i, L, HEADS, CHUNK, BC)
    complete = (i + 1) * CHUNK <= tl.load(totals + m // HEADS)
    theta = tl.where(row_mask, tl.exp(tl.load(log_step + at, mask=row_mask, other=0.0)), 0.0)
    later = t[None, :] >= t[:, None]
    kept = tl.where(later, 1.0, 0.0).to(ACC)
    a = tl.full([BC], 1.0, ACC)
    if FORGET:
        keep = tl.load(log_keep + at, mask=row_mask, other=0.0)
        kept = _gate_products(keep, BC, FROM_LOG_SUMS)
        a = tl.exp(tl.cumsum(keep, 0))
    if MOMENTUM:
        eta = tl.load(log_momentum + at, mask=row_mask, other=0.0)
        moved = _gate_products(eta, BC, FROM_LOG_SUMS)
        past = tl.exp(tl.cumsum(eta, 0))
        r = tl.sum(kept * past[:, None], 0)
        mix = tl.dot(moved, kept, input_precision=PRECISION) * theta[:, None]
    else:
        mix = kept * theta[:, None]
    base = m.to(tl.int64) * n + i
    tl.store(P + base * BC * BC + t[None, :] * BC + t[:, None], mix.to(P.dtype.element_ty))
    last = t == CHUNK - 1
    whole = tl.where(complete, 1.0, 0.0).to(ACC)
    tl.store(coef + base * 4 * BC + t, a)
    tl.store(coef + base * 4 * BC + 2 * BC + t, tl.sum(tl.where(last[None, :], mix, 0.0), 1) * whole)
    tl.store(end_factors + base * 4, tl.where(complete, tl.sum(tl.where(last, a, 0.0)), 1.0))
    tl.store(end_factors + base * 4 + 3, 0.0)
    if MOMENTUM:
        tl.store(coef + base * 4 * BC + BC + t, r)
        tl.store(
            coef + base * 4 * BC + 3 * BC + t, tl.sum(tl.where(last[None, :], moved, 0.0), 1) * theta * whole
        )
        tl.store(end_factors + base * 4 + 1, tl.sum(tl.where(last, r, 0.0)) * whole)
        tl.store(end_factors + base * 4 + 2, tl.where(complete, tl.sum(tl.where(last, past, 0.0)), 1.0))


@kernel
def coef_backward(
    log_step, log_momentum, log_keep, totals, g_P, g_coef, g_end_factors, g_step, g_momentum, g_keep, L, n, HEADS,
    CHUNK: tl.constexpr, BC: tl.constexpr, MOMENTUM: tl.constexpr, FORGET: tl.constexpr,
    FROM_LOG_SUMS: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the log gates, given those of P, `coef` and `end_factors`."""
    i, m = program_chunk(n)
    t = tl.arange(0, BC)
    at, row_mask = chunk_tokens(m, i, L, HEADS, CHUNK, BC)
    complete = (i + 1) * CHUNK <= tl.load(totals + m // HEADS)
    whole = tl.where(complete, 1.0, 0.0).to(ACC)
    last = t == CHUNK - 1
    base = m.to(tl.int64) * n + i
    theta = tl.where(row_mask, tl.exp(tl.load(log_step + at, mask=row_mask, other=0.0)), 0.0)
    later = t[None, :] >= t[:, None]
    # The axes are [j t], as in all products of this kernel.
    g_mix = tl.load(g_P + base * BC * BC + t[None, :] * BC + t[:, None]).to(ACC)
    g_c = load_coef(g_coef, base, COEF_C, BC) * whole
    g_mix = tl.where(later, g_mix + tl.where(last[None, :], g_c[:, None], 0.0), 0.0)
    g_a = load_coef(g_coef, base, COEF_A, BC) + tl.where(last, tl.load(g_end_factors + base * 4) * whole, 0.0)
    kept = tl.where(later, 1.0, 0.0).to(ACC)
    if FORGET:
        keep = tl.load(log_keep + at, mask=row_mask, other=0.0)
        kept = _gate_products(keep, BC, FROM_LOG_SUMS)
    if MOMENTUM:
        eta = tl.load(log_momentum + at, mask=row_mask, other=0.0)
        moved = _gate_products(eta, BC, FROM_LOG_SUMS)
        past = tl.exp(tl.cumsum(eta, 0))
        g_theta = tl.sum(g_mix * dot(moved, kept, OP, PRECISION), 1)
        g_mix = g_mix * theta[:, None]
        g_r = load_coef(g_coef, base, COEF_R, BC) + tl.where(
            last, tl.load(g_end_factors + base * 4 + 1) * whole, 0.0
        )
        g_s = load_coef(g_coef, base, COEF_S, BC) * whole
        g_theta += g_s * tl.sum(tl.where(last[None, :], moved, 0.0), 1)
        g_moved = dot(g_mix, tl.trans(kept), OP, PRECISION) + tl.where(
            last[None, :], (g_s * theta)[:, None], 0.0
        )
        g_past = tl.sum(kept * g_r[None, :], 1) + tl.where(
            last, tl.load(g_end_factors + base * 4 + 2) * whole, 0.0
        )
        g_eta = _gate_products_backward(g_moved, moved, BC, FROM_LOG_SUMS) + tl.cumsum(
            g_past * past, 0, reverse=True
        )
        tl.store(g_momentum + at, g_eta, mask=row_mask)
        g_kept = dot(tl.trans(moved), g_mix, OP, PRECISION) + past[:, None] * g_r[None, :]
    else:
        g_theta = tl.sum(g_mix * kept, 1)
        g_kept = g_mix * theta[:, None]
    tl.store(g_step + at, g_theta * theta, mask=row_mask)
    if FORGET:
        a = tl.exp(tl.cumsum(keep, 0))
        tl.store(
            g_keep + at,
            _gate_products_backward(g_kept, kept, BC, FROM_LOG_SUMS) + tl.cumsum(g_a * a, 0, reverse=True),
            mask=row_mask,
        )
