# mypy: ignore-errors
"""Loads and stores of tiles that are shared by the kernels of a layer."""

from __future__ import annotations

import triton
import triton.language as tl

UNIT_EPS = tl.constexpr(1e-12)
"""Added to the squared length of a vector that is scaled to unit length."""

kernel = triton.jit(do_not_specialize=["L", "n", "group_size", "padded_tokens", "steps", "stride"])
"""Decorator for kernels. They are compiled once for all lengths. `count` is not in the list, because wide
loads require that the end of their mask is known to be a multiple of 16.
"""


@triton.jit
def load_vector(ptr, cols, D: tl.constexpr, BD: tl.constexpr, STEP: tl.constexpr, ACC: tl.constexpr):
    """Load D elements that are STEP apart, padded with zeros to BD."""
    if D != BD:
        return tl.load(ptr + cols * STEP, mask=cols < D, other=0.0).to(ACC)
    else:
        return tl.load(ptr + cols * STEP).to(ACC)


@triton.jit
def load_tile(ptr, rows, row_mask, cols, D: tl.constexpr, BD: tl.constexpr, STRIDE, ACC: tl.constexpr):
    """Load a tile of rows that are STRIDE apart, with zeros where `row_mask` is false. Columns beyond D are
    zero too, unless D equals BD.
    """
    mask = row_mask[:, None] & (cols < D)[None, :] if D != BD else row_mask[:, None]
    return tl.load(ptr + rows[:, None] * STRIDE + cols[None, :], mask=mask, other=0.0).to(ACC)


@triton.jit
def store_tile(ptr, x, rows, row_mask, cols, D: tl.constexpr, BD: tl.constexpr, STRIDE: tl.constexpr):
    """Store a tile of rows that are STRIDE apart, except where `row_mask` is false and beyond D columns."""
    mask = row_mask[:, None] & (cols < D)[None, :] if D != BD else row_mask[:, None]
    tl.store(ptr + rows[:, None] * STRIDE + cols[None, :], x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_block(ptr, rows, cols, R: tl.constexpr, C: tl.constexpr, STRIDE: tl.constexpr, OP: tl.constexpr):
    """Load a tile of a matrix ``[R C]`` in the operand dtype OP, with zeros outside of it."""
    return tl.load(
        ptr + rows[:, None] * STRIDE + cols[None, :],
        mask=(rows < R)[:, None] & (cols < C)[None, :],
        other=0.0,
    ).to(OP)
