# mypy: ignore-errors
"""Matrix products in which each head has its own matrix."""

from __future__ import annotations

import triton.language as tl

from remanence.ops.triton.kernels.layer.tiles import kernel, load_block, load_tile, store_tile
from remanence.ops.triton.kernels.tools import dot_add


@kernel
def heads_kernel(
    x, weight, base, y, group_size,
    HEADS: tl.constexpr, INPUTS: tl.constexpr, BI: tl.constexpr, OUTPUTS: tl.constexpr, BO: tl.constexpr,
    BT: tl.constexpr,
    TRANSPOSED: tl.constexpr, BASE: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply x ``[tokens h INPUTS]`` by ``[g h INPUTS OUTPUTS]`` (if TRANSPOSED, by the transpose of ``[g h
    OUTPUTS INPUTS]``), and with BASE add `base`.
    """
    head = tl.program_id(1).to(tl.int64)
    group, own = head // HEADS, head % HEADS
    t = group * group_size + tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    row_mask = t < (group + 1) * group_size
    cols = tl.program_id(2) * BO + tl.arange(0, BO)
    SLICE: tl.constexpr = 64 if BI >= 64 else BI
    value = tl.zeros([BT, BO], ACC)
    for first in range(0, BI, SLICE):
        rows = first + tl.arange(0, SLICE)
        a = load_tile(x + own * INPUTS, t, row_mask, rows, INPUTS, 0, HEADS * INPUTS, OP)
        if TRANSPOSED:
            w = tl.trans(
                load_block(weight + head * INPUTS * OUTPUTS, cols, rows, OUTPUTS, INPUTS, INPUTS, OP)
            )
        else:
            w = load_block(weight + head * INPUTS * OUTPUTS, rows, cols, INPUTS, OUTPUTS, OUTPUTS, OP)
        value = dot_add(value, a, w, OP, PRECISION)
    if BASE:
        value += load_tile(base + own * OUTPUTS, t, row_mask, cols, OUTPUTS, 0, HEADS * OUTPUTS, ACC)
    store_tile(y + own * OUTPUTS, value, t, row_mask, cols, OUTPUTS, 0, HEADS * OUTPUTS)


@kernel
def heads_weight_backward(
    x, g, out, group_size, steps,
    HEADS: tl.constexpr, INPUTS: tl.constexpr, BI: tl.constexpr, OUTPUTS: tl.constexpr, BO: tl.constexpr,
    BT: tl.constexpr,
    ACC: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the matrices ``[g h parts INPUTS OUTPUTS]``. Each program sums over its part of
    the tokens of a group.
    """
    COLUMNS: tl.constexpr = (OUTPUTS + BO - 1) // BO
    head, part, parts = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.num_programs(0)
    group, own = head // HEADS, head % HEADS
    rows, cols = (
        tl.program_id(2) // COLUMNS * BI + tl.arange(0, BI),
        tl.program_id(2) % COLUMNS * BO + tl.arange(0, BO),
    )
    total = tl.zeros([BI, BO], ACC)
    for step in range(steps):
        t = group * group_size + (part * steps + step).to(tl.int64) * BT + tl.arange(0, BT)
        row_mask = t < (group + 1) * group_size
        a = load_tile(x + own * INPUTS, t, row_mask, rows, INPUTS, 0, HEADS * INPUTS, OP)
        b = load_tile(g + own * OUTPUTS, t, row_mask, cols, OUTPUTS, 0, HEADS * OUTPUTS, OP)
        total = dot_add(total, tl.trans(a), b, OP, PRECISION)
    mask = (rows < INPUTS)[:, None] & (cols < OUTPUTS)[None, :]
    tl.store(
        out + (head * parts + part) * INPUTS * OUTPUTS + rows[:, None] * OUTPUTS + cols[None, :],
        total,
        mask=mask,
    )
