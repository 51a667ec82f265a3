# mypy: ignore-errors
"""What the kernels are made of: products, activations, LayerNorm, and where tokens and states stand."""

from __future__ import annotations

import os

import triton
import triton.language as tl

WIDEN_BFLOAT16 = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
EPS = tl.constexpr(1e-5)
LARGE = tl.constexpr(1e12)
DENSITY = tl.constexpr(0.3989422804014327)
ROOT_HALF = tl.constexpr(0.7071067811865476)

# The rows of a chunk's coefficients.
COEF_A, COEF_R, COEF_C, COEF_S = (tl.constexpr(row) for row in range(4))

# One build for every length and number of heads.
kernel = triton.jit(do_not_specialize=["L", "n", "HEADS"])


@triton.jit
def dot(a, b, OP: tl.constexpr, PRECISION: tl.constexpr):
    a, b = a.to(OP), b.to(OP)
    if WIDEN_BFLOAT16 and tl.bfloat16 == OP:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def dot_onto(x, a, b, OP: tl.constexpr, PRECISION: tl.constexpr):
    """x + `dot`, added up where the product is made."""
    a, b = a.to(OP), b.to(OP)
    if WIDEN_BFLOAT16 and tl.bfloat16 == OP:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, x, input_precision=PRECISION, out_dtype=x.dtype)


@triton.jit
def onto_apart(x, a, b, go, APART: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr):
    """`dot_onto`, go being above 0. With APART, in a loop of one round: Triton gives products that lead to others to
    the warps row by row, so that eight warps hold a tile of 64 rows twice over, and computes what led to an operand
    again in its layout. It does neither across a loop of unknown length (nor does it fetch the next round's operands
    early around one).
    """
    if APART:
        while go > 0:
            x = dot_onto(x, a, b, OP, PRECISION)
            go = -go
        return x
    else:
        return dot_onto(x, a, b, OP, PRECISION)


@triton.jit
def dot_apart(a, b, go, APART: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr):
    if APART:
        return onto_apart(tl.zeros([a.shape[0], b.shape[1]], ACC), a, b, go, APART, OP, PRECISION)
    else:
        return dot(a, b, OP, PRECISION)


@triton.jit
def rendezvous(flag, arrived):
    """Wait until `arrived` programs have come here since the flag was 0; what each wrote before is then seen by all of
    them.

    All of them must be on the chip at once: the launch says so (launch_cooperative_grid), or is refused.
    """
    tl.debug_barrier()
    tl.atomic_add(flag, 1, sem="release", scope="gpu")
    while tl.atomic_add(flag, 0, sem="acquire", scope="gpu") < arrived:
        pass
    tl.debug_barrier()


@triton.jit
def meet(x, mail, flag, turn, share, SHARES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The sum of all shares' x, added up in the same order by each. Two letter boxes in turn: nobody is two turns
    ahead.
    """
    at = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    mail += (turn % 2) * SHARES * ROWS * COLS
    tl.store(mail + share * ROWS * COLS + at, x)
    rendezvous(flag, (turn + 1) * SHARES)
    x = tl.load(mail + at, cache_modifier=".cg")
    for other in tl.static_range(1, SHARES):
        x += tl.load(mail + other * ROWS * COLS + at, cache_modifier=".cg")
    return x


@triton.jit
def largest(x):
    return tl.max(tl.abs(x))


@triton.jit
def activate(z, GELU: tl.constexpr):
    if GELU:
        return z * (0.5 * tl.erf(z * ROOT_HALF) + 0.5)
    else:
        return z / (1.0 + tl.exp(-z))


@triton.jit
def activate_with_slope(z, GELU: tl.constexpr):
    if GELU:
        below = 0.5 * tl.erf(z * ROOT_HALF) + 0.5
        return z * below, below + z * tl.exp(-0.5 * z * z) * DENSITY
    else:
        gate = 1.0 / (1.0 + tl.exp(-z))
        return z * gate, gate + z * gate * (1.0 - gate)


@triton.jit
def derivatives(z, GELU: tl.constexpr):
    """act, act', act''."""
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
    """LayerNorm without gain: value, and 1 / deviation (of the row before it was shrunk into float32's squares)."""
    shrink = tl.minimum(LARGE / tl.max(tl.abs(x), 1), 1.0)
    x = x * shrink[:, None]
    x = x - (tl.sum(x, 1) / D)[:, None]
    if D != BD:
        x = tl.where((tl.arange(0, BD) < D)[None, :], x, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + EPS)
    return x * rstd[:, None], rstd * shrink


@triton.jit
def pull(g, value, rstd, D: tl.constexpr, BD: tl.constexpr):
    """LayerNorm's backward."""
    g = g - (tl.sum(g, 1) / D)[:, None] - value * (tl.sum(g * value, 1) / D)[:, None]
    if D != BD:
        g = tl.where((tl.arange(0, BD) < D)[None, :], g, 0.0)
    return g * rstd[:, None]


@triton.jit
def pull_backward(g, e, value, rstd, w, SQUARED: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """From the gradients g of pull(e) and w of the loss to those of e through pull, and of LayerNorm's source.

    e is the loss's slope, and so depends on the value itself where the loss is squared. Everything is a sum of g, e and
    value with one factor per row each, so that one pass over them is enough.
    """
    g_mean, e_mean = tl.sum(g, 1) / D, tl.sum(e, 1) / D
    gx, ex, ge = tl.sum(g * value, 1) / D, tl.sum(e * value, 1) / D, tl.sum(g * e, 1) / D
    of_g, of_e, of_x = -rstd * ex, w - rstd * gx, tl.zeros_like(gx)
    if SQUARED:
        of_g += rstd
        of_x -= rstd * gx
    constant = of_g * g_mean + of_e * e_mean
    of_x -= (
        of_g * gx
        + of_e * ex
        + of_x * (tl.sum(value * value, 1) / D)
        + rstd * (ge - g_mean * e_mean - gx * ex)
    )
    g_source = of_g[:, None] * g + of_e[:, None] * e + of_x[:, None] * value - constant[:, None]
    g_e = g - g_mean[:, None] - value * gx[:, None]
    if D != BD:
        within = (tl.arange(0, BD) < D)[None, :]
        g_e, g_source = tl.where(within, g_e, 0.0), tl.where(within, g_source, 0.0)
    return g_e * rstd[:, None], g_source * rstd[:, None]


@triton.jit
def load(ptr, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr):
    at = ptr + rows[:, None] * COLS + cols[None, :]
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=(rows < ROWS)[:, None] & (cols < COLS)[None, :], other=0.0)


@triton.jit
def store(ptr, x, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr):
    at = ptr + rows[:, None] * COLS + cols[None, :]
    if EVEN:
        tl.store(at, x.to(ptr.dtype.element_ty))
    else:
        tl.store(at, x.to(ptr.dtype.element_ty), mask=(rows < ROWS)[:, None] & (cols < COLS)[None, :])


@triton.jit
def load_layers(first, second, offset, d, f, D: tl.constexpr, HIDDEN: tl.constexpr, EVEN: tl.constexpr):
    """The hidden units f of a memory's first layer ``[d f]`` and of its second ``[f d]``, from the same offset
    in both.
    """
    return load(first + offset, d, f, D, HIDDEN, EVEN), load(second + offset, f, d, HIDDEN, D, EVEN)


@triton.jit
def store_layers(
    first, second, offset, x1, x2, d, f, D: tl.constexpr, HIDDEN: tl.constexpr, EVEN: tl.constexpr
):
    store(first + offset, x1, d, f, D, HIDDEN, EVEN)
    store(second + offset, x2, f, d, HIDDEN, D, EVEN)


@triton.jit
def which(n):
    """A program of a parallel kernel: its chunk, and its row and head. On one axis, as the others end at 65,535."""
    program = tl.program_id(0)
    return program % n, program // n


@triton.jit
def which_chunk(n):
    """`which`, and the index of the chunk among those of all rows and heads."""
    i, m = which(n)
    return i, m, m.to(tl.int64) * n + i


@triton.jit
def load_coef(co, base, WHICH: tl.constexpr, BC: tl.constexpr):
    """One of a chunk's coefficients, of every token: a and r at its answer, c and s at the chunk's end."""
    return tl.load(co + base * 4 * BC + WHICH * BC + tl.arange(0, BC))


@triton.jit
def store_coef(co, x, base, WHICH: tl.constexpr, BC: tl.constexpr):
    tl.store(co + base * 4 * BC + WHICH * BC + tl.arange(0, BC), x)


@triton.jit
def square_of(base, BC: tl.constexpr):
    """Where a chunk's matrix of tokens by tokens is."""
    t = tl.arange(0, BC)
    return base * BC * BC + t[:, None] * BC + t[None, :]


@triton.jit
def clamp_factor(received, size, REACH: tl.constexpr, END: tl.constexpr):
    """`GradientClamp`: 1 while the gradient's largest entry is below REACH times what was received, and below END."""
    factor = tl.minimum(tl.minimum(received * REACH, END) / size, 1.0)
    return tl.where(factor == factor, factor, 1.0)


@triton.jit
def tokens(m, i, L, HEADS, CHUNK: tl.constexpr, BC: tl.constexpr):
    """Where the chunk's tokens stand in ``[r L heads]``, and which of the tile's rows are tokens."""
    t = tl.arange(0, BC)
    token = i * CHUNK + t
    return ((m // HEADS).to(tl.int64) * L + token) * HEADS + m % HEADS, (t < CHUNK) & (token < L)


@triton.jit
def load_columns(ptr, at, live, cols, D: tl.constexpr):
    return tl.load(ptr + at[:, None] * D + cols[None, :], mask=live[:, None] & (cols < D)[None, :], other=0.0)


@triton.jit
def store_columns(ptr, x, at, live, cols, D: tl.constexpr):
    tl.store(
        ptr + at[:, None] * D + cols[None, :],
        x.to(ptr.dtype.element_ty),
        mask=live[:, None] & (cols < D)[None, :],
    )


@triton.jit
def load_tokens(ptr, at, live, D: tl.constexpr, BD: tl.constexpr):
    return load_columns(ptr, at, live, tl.arange(0, BD), D)


@triton.jit
def store_tokens(ptr, x, at, live, D: tl.constexpr, BD: tl.constexpr):
    store_columns(ptr, x, at, live, tl.arange(0, BD), D)
