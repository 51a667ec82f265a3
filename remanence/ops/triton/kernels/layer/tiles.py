# mypy: ignore-errors
"""Loads and stores of tiles that the kernels of a layer share."""

from __future__ import annotations

import triton
import triton.language as tl

UNIT_EPS = tl.constexpr(1e-12)

# One build for every length. (Not of `count`: loads are wide only where their mask's end is known to be a multiple of
# 16.)
kernel = triton.jit(do_not_specialize=["L", "n", "per", "room", "steps", "stride"])


@triton.jit
def load_vector(ptr, cols, D: tl.constexpr, BD: tl.constexpr, STEP: tl.constexpr, ACC: tl.constexpr):
    if D != BD:
        return tl.load(ptr + cols * STEP, mask=cols < D, other=0.0).to(ACC)
    else:
        return tl.load(ptr + cols * STEP).to(ACC)


@triton.jit
def load_tile(ptr, rows, live, cols, D: tl.constexpr, BD: tl.constexpr, STRIDE, ACC: tl.constexpr):
    mask = live[:, None] & (cols < D)[None, :] if D != BD else live[:, None]
    return tl.load(ptr + rows[:, None] * STRIDE + cols[None, :], mask=mask, other=0.0).to(ACC)


@triton.jit
def store_tile(ptr, x, rows, live, cols, D: tl.constexpr, BD: tl.constexpr, STRIDE: tl.constexpr):
    mask = live[:, None] & (cols < D)[None, :] if D != BD else live[:, None]
    tl.store(ptr + rows[:, None] * STRIDE + cols[None, :], x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_block(ptr, rows, cols, R: tl.constexpr, C: tl.constexpr, STRIDE: tl.constexpr, OP: tl.constexpr):
    """A tile of a matrix ``[R C]`` in the operands' dtype, zeros outside."""
    return tl.load(
        ptr + rows[:, None] * STRIDE + cols[None, :],
        mask=(rows < R)[:, None] & (cols < C)[None, :],
        other=0.0,
    ).to(OP)
