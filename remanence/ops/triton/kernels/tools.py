# mypy: ignore-errors
"""Functions shared by the kernels: products, activations, LayerNorm, and the addresses of tokens and states."""

from __future__ import annotations

import os

import triton
import triton.language as tl

WIDEN_BFLOAT16 = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""Whether products of bfloat16 are computed in float32, as is done under Triton's interpreter."""

EPS = tl.constexpr(1e-5)
"""Added to the variance in LayerNorm."""

LARGE = tl.constexpr(1e12)
"""Rows with larger entries are scaled down to this in LayerNorm, so that their squares do not overflow."""

DENSITY = tl.constexpr(0.3989422804014327)
"""1 / sqrt(2 pi), the factor of the normal density."""

ROOT_HALF = tl.constexpr(0.7071067811865476)
"""sqrt(1/2)."""

COEF_A, COEF_R, COEF_C, COEF_S = (tl.constexpr(row) for row in range(4))
"""The rows of a chunk's coefficients `coef` ``[4 BC]``: a, r, c and s; see the package's docstring."""

kernel = triton.jit(do_not_specialize=["L", "n", "HEADS"])
"""Decorator for kernels. They are compiled once for all lengths and numbers of heads."""


@triton.jit
def dot(a, b, OP: tl.constexpr, PRECISION: tl.constexpr):
    """Return the matrix product of a and b, both converted to the operand dtype OP."""
    a, b = a.to(OP), b.to(OP)
    if WIDEN_BFLOAT16 and tl.bfloat16 == OP:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def dot_add(x, a, b, OP: tl.constexpr, PRECISION: tl.constexpr):
    """Return x + dot(a, b), accumulated within the product."""
    a, b = a.to(OP), b.to(OP)
    if WIDEN_BFLOAT16 and tl.bfloat16 == OP:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, x, input_precision=PRECISION, out_dtype=x.dtype)


@triton.jit
def dot_add_in_loop(x, a, b, positive, IN_LOOP: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr):
    """Return x + dot(a, b); `positive` is any number above 0. With IN_LOOP, the product is inside a loop of
    one iteration, which saves registers. The result is the same.

    Triton splits products whose results enter other products by rows among the warps, so that eight warps
    hold a tile of 64 rows twice. It also recomputes the inputs of an operand in the layout of that operand.
    It does neither across a loop whose length it does not know, such as this one, which ends when `positive`
    has changed its sign. (Nor does it prefetch operands for the next iteration of a loop around it.)
    """
    if IN_LOOP:
        while positive > 0:
            x = dot_add(x, a, b, OP, PRECISION)
            positive = -positive
        return x
    else:
        return dot_add(x, a, b, OP, PRECISION)


@triton.jit
def dot_in_loop(
    a, b, positive, IN_LOOP: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr
):
    """Return dot(a, b), with IN_LOOP inside a loop of one iteration; see `dot_add_in_loop`."""
    if IN_LOOP:
        return dot_add_in_loop(
            tl.zeros([a.shape[0], b.shape[1]], ACC), a, b, positive, IN_LOOP, OP, PRECISION
        )
    else:
        return dot(a, b, OP, PRECISION)


@triton.jit
def wait_for_programs(arrivals, expected):
    """A barrier among the programs that process the same memory: wait until `expected` calls have been made
    in total since the counter `arrivals`, which is in global memory, was 0. Everything that the programs wrote
    before is then visible to all of them.

    All programs must be on the GPU at the same time. The launch requests this (launch_cooperative_grid) and
    fails if it is impossible.
    """
    tl.debug_barrier()
    tl.atomic_add(arrivals, 1, sem="release", scope="gpu")
    while tl.atomic_add(arrivals, 0, sem="acquire", scope="gpu") < expected:
        pass
    tl.debug_barrier()


@triton.jit
def sum_over_programs(
    x,
    exchange,
    arrivals,
    round_index,
    program,
    PROGRAMS_PER_MEMORY: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Return the sum of x ``[ROWS COLS]`` over the PROGRAMS_PER_MEMORY programs of a memory, of which this is
    number `program`. Each writes its x to `exchange` in global memory, and then all add them in the same
    order. `round_index` counts the calls. Two buffers are used alternately, which is enough because no program
    is ever two calls ahead of another.
    """
    at = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    exchange += (round_index % 2) * PROGRAMS_PER_MEMORY * ROWS * COLS
    tl.store(exchange + program * ROWS * COLS + at, x)
    wait_for_programs(arrivals, (round_index + 1) * PROGRAMS_PER_MEMORY)
    x = tl.load(exchange + at, cache_modifier=".cg")
    for other in tl.static_range(1, PROGRAMS_PER_MEMORY):
        x += tl.load(exchange + other * ROWS * COLS + at, cache_modifier=".cg")
    return x


@triton.jit
def largest(x):
    """Return the largest absolute value in x."""
    return tl.max(tl.abs(x))


@triton.jit
def activate(z, GELU: tl.constexpr):
    """Return GELU(z), or SiLU(z) if not GELU."""
    if GELU:
        return z * (0.5 * tl.erf(z * ROOT_HALF) + 0.5)
    else:
        return z / (1.0 + tl.exp(-z))


@triton.jit
def activate_with_slope(z, GELU: tl.constexpr):
    """Return the activation and its first derivative."""
    if GELU:
        below = 0.5 * tl.erf(z * ROOT_HALF) + 0.5
        return z * below, below + z * tl.exp(-0.5 * z * z) * DENSITY
    else:
        gate = 1.0 / (1.0 + tl.exp(-z))
        return z * gate, gate + z * gate * (1.0 - gate)


@triton.jit
def derivatives(z, GELU: tl.constexpr):
    """Return the activation and its first and second derivatives."""
    if GELU:
        below = 0.5 * tl.erf(z * ROOT_HALF) + 0.5
        density = tl.exp(-0.5 * z * z) * DENSITY
        return z * below, below + z * density, density * (2.0 - z * z)
    else:
        gate = 1.0 / (1.0 + tl.exp(-z))
        slope = gate * (1.0 - gate)
        return z * gate, gate + z * slope, slope * (2.0 + z * (1.0 - 2.0 * gate))


@triton.jit
def norm(x, D: tl.constexpr, BD: tl.constexpr):
    """LayerNorm without gain. Returns the output and the factor 1 / standard deviation of each row. Rows with
    very large entries are scaled down first, so that their squares do not overflow float32; the returned
    factor includes this scale.
    """
    shrink = tl.minimum(LARGE / tl.max(tl.abs(x), 1), 1.0)
    x = x * shrink[:, None]
    x = x - (tl.sum(x, 1) / D)[:, None]
    if D != BD:
        x = tl.where((tl.arange(0, BD) < D)[None, :], x, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + EPS)
    return x * rstd[:, None], rstd * shrink


@triton.jit
def norm_backward(g, value, rstd, D: tl.constexpr, BD: tl.constexpr):
    """Backward of LayerNorm: return the gradient of its input, given the gradient g of its output `value`."""
    g = g - (tl.sum(g, 1) / D)[:, None] - value * (tl.sum(g * value, 1) / D)[:, None]
    if D != BD:
        g = tl.where((tl.arange(0, BD) < D)[None, :], g, 0.0)
    return g * rstd[:, None]


@triton.jit
def norm_double_backward(g, e, value, rstd, w, SQUARED: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Backward of ``norm_backward(e)``. Given its gradient g and the gradient w of the loss, return the
    gradient of e through `norm_backward`, and the gradient of the LayerNorm's input.

    e is the derivative of the loss, and with the squared loss it depends on `value` itself. All results are
    sums of g, e and `value` with one factor per row each, so one pass over them is enough.
    """
    g_mean, e_mean = tl.sum(g, 1) / D, tl.sum(e, 1) / D
    gx, ex, ge = tl.sum(g * value, 1) / D, tl.sum(e * value, 1) / D, tl.sum(g * e, 1) / D
    factor_g, factor_e, factor_x = -rstd * ex, w - rstd * gx, tl.zeros_like(gx)
    if SQUARED:
        factor_g += rstd
        factor_x -= rstd * gx
    constant = factor_g * g_mean + factor_e * e_mean
    factor_x -= (
        factor_g * gx
        + factor_e * ex
        + factor_x * (tl.sum(value * value, 1) / D)
        + rstd * (ge - g_mean * e_mean - gx * ex)
    )
    g_source = factor_g[:, None] * g + factor_e[:, None] * e + factor_x[:, None] * value - constant[:, None]
    g_e = g - g_mean[:, None] - value * gx[:, None]
    if D != BD:
        within = (tl.arange(0, BD) < D)[None, :]
        g_e, g_source = tl.where(within, g_e, 0.0), tl.where(within, g_source, 0.0)
    return g_e * rstd[:, None], g_source * rstd[:, None]


@triton.jit
def load(ptr, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr):
    """Load a tile of a matrix ``[ROWS COLS]``, with zeros outside of it. EVEN means that no index is outside."""
    at = ptr + rows[:, None] * COLS + cols[None, :]
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=(rows < ROWS)[:, None] & (cols < COLS)[None, :], other=0.0)


@triton.jit
def store(ptr, x, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr):
    """Store a tile of a matrix ``[ROWS COLS]``, except the part outside of it. EVEN means that no index is
    outside.
    """
    at = ptr + rows[:, None] * COLS + cols[None, :]
    if EVEN:
        tl.store(at, x.to(ptr.dtype.element_ty))
    else:
        tl.store(at, x.to(ptr.dtype.element_ty), mask=(rows < ROWS)[:, None] & (cols < COLS)[None, :])


@triton.jit
def load_layers(first, second, offset, d, f, D: tl.constexpr, HIDDEN: tl.constexpr, EVEN: tl.constexpr):
    """Load the hidden units f of a memory's first layer ``[d f]`` and of its second ``[f d]``, from the same
    offset in both.
    """
    return load(first + offset, d, f, D, HIDDEN, EVEN), load(second + offset, f, d, HIDDEN, D, EVEN)


@triton.jit
def store_layers(
    first, second, offset, x1, x2, d, f, D: tl.constexpr, HIDDEN: tl.constexpr, EVEN: tl.constexpr
):
    """Store the hidden units f of a memory's first layer ``[d f]`` and of its second ``[f d]``, at the same
    offset in both.
    """
    store(first + offset, x1, d, f, D, HIDDEN, EVEN)
    store(second + offset, x2, f, d, HIDDEN, D, EVEN)


@triton.jit
def program_chunk(n):
    """Return the chunk i, and the row and head m, of a program of a parallel kernel. The grid has one axis,
    because the other axes of a grid are limited to 65,535.
    """
    program = tl.program_id(0)
    return program % n, program // n


@triton.jit
def program_chunk_index(n):
    """Return i and m as in `program_chunk`, and the index of the chunk among those of all rows and heads."""
    i, m = program_chunk(n)
    return i, m, m.to(tl.int64) * n + i


@triton.jit
def load_coef(coef, base, ROW: tl.constexpr, BC: tl.constexpr):
    """Load one coefficient of all tokens of a chunk: a and r apply to each token's answer, c and s to the
    state at the chunk's end.
    """
    return tl.load(coef + base * 4 * BC + ROW * BC + tl.arange(0, BC))


@triton.jit
def store_coef(coef, x, base, ROW: tl.constexpr, BC: tl.constexpr):
    """Store one coefficient of all tokens of a chunk."""
    tl.store(coef + base * 4 * BC + ROW * BC + tl.arange(0, BC), x)


@triton.jit
def square_offsets(base, BC: tl.constexpr):
    """Return the offsets of a chunk's matrix of tokens by tokens ``[BC BC]``."""
    t = tl.arange(0, BC)
    return base * BC * BC + t[:, None] * BC + t[None, :]


@triton.jit
def clamp_factor(received_norm, largest_entry, RELATIVE_LIMIT: tl.constexpr, ABSOLUTE_LIMIT: tl.constexpr):
    """Return the factor that scales the gradient of a state, whose largest entry is given, down to its
    limit, or 1 if it is within. The limit is the smaller of RELATIVE_LIMIT times the norm of the gradient that
    the outputs received so far, and ABSOLUTE_LIMIT; see `GradientClamp`.
    """
    factor = tl.minimum(tl.minimum(received_norm * RELATIVE_LIMIT, ABSOLUTE_LIMIT) / largest_entry, 1.0)
    return tl.where(factor == factor, factor, 1.0)


@triton.jit
def chunk_tokens(m, i, L, HEADS, CHUNK: tl.constexpr, BC: tl.constexpr):
    """Return the index of each token of a chunk in ``[r L heads]``, and `row_mask`: which rows of the tile
    are tokens of the call. The others are padding.
    """
    t = tl.arange(0, BC)
    token = i * CHUNK + t
    return ((m // HEADS).to(tl.int64) * L + token) * HEADS + m % HEADS, (t < CHUNK) & (token < L)


@triton.jit
def load_columns(ptr, at, row_mask, cols, D: tl.constexpr):
    """Load the columns `cols` of the tokens at `at`, with zeros where `row_mask` is false and beyond D."""
    return tl.load(
        ptr + at[:, None] * D + cols[None, :], mask=row_mask[:, None] & (cols < D)[None, :], other=0.0
    )


@triton.jit
def store_columns(ptr, x, at, row_mask, cols, D: tl.constexpr):
    """Store the columns `cols` of the tokens at `at`, except where `row_mask` is false and beyond D."""
    tl.store(
        ptr + at[:, None] * D + cols[None, :],
        x.to(ptr.dtype.element_ty),
        mask=row_mask[:, None] & (cols < D)[None, :],
    )


@triton.jit
def load_tokens(ptr, at, row_mask, D: tl.constexpr, BD: tl.constexpr):
    """Load all D channels of the tokens at `at`, padded with zeros to BD."""
    return load_columns(ptr, at, row_mask, tl.arange(0, BD), D)


@triton.jit
def store_tokens(ptr, x, at, row_mask, D: tl.constexpr, BD: tl.constexpr):
    """Store all D channels of the tokens at `at`."""
    store_columns(ptr, x, at, row_mask, tl.arange(0, BD), D)
