# mypy: ignore-errors
"""Log gates of a layer: logits from the input scaled to unit mean square, and their log-sigmoids."""

from __future__ import annotations

import triton
import triton.language as tl

from remanence.ops.triton.kernels.layer.tiles import kernel, load_tile, load_vector, store_tile

GATE_EPS = tl.constexpr(1e-6)
"""Added to the mean square of the input."""


@triton.jit
def _log_sigmoid(z, TERMS: tl.constexpr):
    """Return min(z, 0) - log(1 + exp(-|z|)). With u = exp(-|z|), log(1 + u) is computed by its series in u /
    (2 + u), which is at most 1/3. The log of a gate that is nearly open is small, and the GPU's own logarithm
    near 1 would be imprecise.
    """
    u = tl.exp(-tl.abs(z))
    v = u / (2.0 + u)
    total = tl.zeros_like(v)
    for i in tl.static_range(TERMS):
        total = total * v * v + 1.0 / (2 * (TERMS - 1 - i) + 1)
    return tl.minimum(z, 0.0) - 2.0 * v * total


@triton.jit
def _signs(gate, NEGATED: tl.constexpr, ACC: tl.constexpr):
    """Return -1 for gates whose bit in NEGATED is set (log-sigmoid of minus the logit), otherwise 1."""
    return 1.0 - 2.0 * ((NEGATED >> gate) & 1).to(ACC)


@kernel
def gates_kernel(
    x, weight, bias, logs, logits, rstds, n, group_size,
    GATES: tl.constexpr, HEADS: tl.constexpr, BG: tl.constexpr, DIM: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
    NEGATED: tl.constexpr, TERMS: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the log gates, and for backward the logits and 1 / RMS of each token's input (rstds)."""
    COUNT: tl.constexpr = GATES * HEADS
    group = tl.program_id(1).to(tl.int64)
    t, gates = group * group_size + tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT), tl.arange(0, BG)
    row_mask = t < (group + 1) * group_size
    weight, bias = weight + group * COUNT * DIM, bias + group * COUNT
    products, squares = tl.zeros([BT, BG], ACC), tl.zeros([BT, BD], ACC)
    for start in range(0, DIM, BD):
        cols = start + tl.arange(0, BD)
        # Columns need no mask if DIM is a multiple of the tile.
        a = load_tile(x, t, row_mask, cols, DIM, DIM if DIM % BD == 0 else 0, DIM, ACC)
        w = load_tile(weight, gates, gates < COUNT, cols, DIM, DIM if DIM % BD == 0 else 0, DIM, ACC)
        products = tl.dot(a, tl.trans(w), products, input_precision=PRECISION, out_dtype=ACC)
        squares += a * a
    rstd = tl.rsqrt(tl.sum(squares, 1) / DIM + GATE_EPS)
    logit = products * rstd[:, None] + load_vector(bias, gates, COUNT, BG, 1, ACC)[None, :]
    tl.store(rstds + t, rstd, mask=row_mask)
    store_tile(logits, logit, t, row_mask, gates, COUNT, BG, COUNT)
    log_gate = _log_sigmoid(logit * _signs(gates // HEADS, NEGATED, ACC)[None, :], TERMS)
    gate_offset = (gates // HEADS).to(tl.int64) * n * HEADS + gates % HEADS
    tl.store(
        logs + gate_offset[None, :] + t[:, None] * HEADS,
        log_gate,
        mask=(row_mask)[:, None] & (gates < COUNT)[None, :],
    )


@kernel
def gates_logits_backward(
    g_logs, logits, rstds, bias, g_logits, norm_corrections, g_bias, n, group_size,
    GATES: tl.constexpr, HEADS: tl.constexpr, BG: tl.constexpr, DIM: tl.constexpr, BT: tl.constexpr,
    NEGATED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the products of input and weight before scaling (g_logits), and each program's
    part of the gradient of the bias. The scaling to unit mean square reduces the gradient of each
    token's input by `norm_corrections` times that input.
    """
    COUNT: tl.constexpr = GATES * HEADS
    group = tl.program_id(1).to(tl.int64)
    t, gates = group * group_size + tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT), tl.arange(0, BG)
    row_mask = t < (group + 1) * group_size
    bias += group * COUNT
    logit = load_tile(logits, t, row_mask, gates, COUNT, BG, COUNT, ACC)
    rstd = tl.load(rstds + t, mask=row_mask, other=0.0)
    gate_offset = (gates // HEADS).to(tl.int64) * n * HEADS + gates % HEADS
    mask = (row_mask)[:, None] & (gates < COUNT)[None, :]
    g = tl.load(g_logs + gate_offset[None, :] + t[:, None] * HEADS, mask=mask, other=0.0)
    signs = _signs(gates // HEADS, NEGATED, ACC)[None, :]
    g = signs * g / (1.0 + tl.exp(signs * logit))
    product = tl.where(mask, logit - load_vector(bias, gates, COUNT, BG, 1, ACC)[None, :], 0.0)
    tl.store(
        g_bias + (group * tl.num_programs(0) + tl.program_id(0)) * COUNT + gates,
        tl.sum(g, 0),
        mask=gates < COUNT,
    )
    tl.store(norm_corrections + t, tl.sum(g * product, 1) * rstd * rstd / DIM, mask=row_mask)
    store_tile(g_logits, g * rstd[:, None], t, row_mask, gates, COUNT, BG, COUNT)


@kernel
def gates_backward(
    x, weight, g_logits, norm_corrections, g_x, g_weight, group_size, steps,
    COUNT: tl.constexpr, BG: tl.constexpr, DIM: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the input, and each program's part of the gradient of the weight, for a block of
    channels.
    """
    BLOCKS: tl.constexpr = (DIM + BD - 1) // BD
    UNMASKED_DIM: tl.constexpr = DIM if DIM % BD == 0 else 0
    block, part = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    group = tl.program_id(1).to(tl.int64)
    weight += group * COUNT * DIM
    cols, gates = block * BD + tl.arange(0, BD), tl.arange(0, BG)
    w = load_tile(weight, gates, gates < COUNT, cols, DIM, UNMASKED_DIM, DIM, ACC)
    g_w = tl.zeros([BG, BD], ACC)
    for step in range(steps):
        t = group * group_size + (part * steps + step).to(tl.int64) * BT + tl.arange(0, BT)
        row_mask = t < (group + 1) * group_size
        a = load_tile(x, t, row_mask, cols, DIM, UNMASKED_DIM, DIM, ACC)
        g = load_tile(g_logits, t, row_mask, gates, COUNT, BG, COUNT, ACC)
        norm_correction = tl.load(norm_corrections + t, mask=row_mask, other=0.0)
        g_a = tl.dot(g, w, input_precision=PRECISION, out_dtype=ACC) - a * norm_correction[:, None]
        store_tile(g_x, g_a, t, row_mask, cols, DIM, UNMASKED_DIM, DIM)
        g_w = tl.dot(tl.trans(g), a, g_w, input_precision=PRECISION, out_dtype=ACC)
    parts = tl.num_programs(0) // BLOCKS
    store_tile(
        g_weight + (group * parts + part) * COUNT * DIM,
        g_w,
        gates,
        gates < COUNT,
        cols,
        DIM,
        UNMASKED_DIM,
        DIM,
    )
