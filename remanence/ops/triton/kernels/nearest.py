# mypy: ignore-errors
"""Search for the nearest keys in two passes, without ever writing all scores:

    group_max_kernel      the best score of every group of keys, by tiles of queries and keys on tensor cores
    rescore_kernel    all scores of the selected groups, for each query, in float32

Both write a score and its index as one integer (`pack`). No two of these integers are equal, so torch's topk
selects the same ones every time. Queries ``[r t h e]`` and keys ``[r size h e]`` are read in place, with any
strides of tokens, slots and heads. The ``*_row_stride`` arguments are the distances between rows; for q and k
they are counted in tokens or slots.

Only keys whose position is at most the query's `max_position` are found.
"""

from __future__ import annotations

import triton
import triton.language as tl

from remanence.ops.triton.kernels.tools import dot

EMPTY_POSITION = tl.constexpr(2**62)
"""The position of empty slots, beyond the `max_position` of every query."""

UINT32_MAX, INT32_MAX = tl.constexpr(2**32 - 1), tl.constexpr(2**31 - 1)
"""The largest 32-bit unsigned and signed integers."""

# Compiled once for all numbers of queries and keys.
kernel = triton.jit(
    do_not_specialize=[
        "tokens",
        "size",
        "groups",
        "count",
        "q_row_stride",
        "k_row_stride",
        "position_row_stride",
        "max_position_row_stride",
    ]
)


@triton.jit
def pack(score, index):
    """Pack a score and an index into one integer. A higher score gives a higher integer; of equal scores, the
    lower index does. The same as `pack` in ops/triton/nearest.py.
    """
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # turns minus zero into zero
    bits ^= (bits >> 31) & 0x7FFFFFFF
    return (bits.to(tl.int64) << 32) | (UINT32_MAX - index.to(tl.int64))


@triton.jit
def _key_positions(position, slot, size):
    """Return the positions of the keys in these slots. Empty slots, and slots from `size` on, get EMPTY_POSITION."""
    key_position = tl.load(position + slot, mask=slot < size, other=-1)
    return tl.where(key_position < 0, EMPTY_POSITION, key_position)


@triton.jit
def _clamped_max_positions(max_position, row_mask):
    """Return the `max_position` of queries, clamped to [-1, EMPTY_POSITION - 1]. Where `row_mask` is false,
    return -1, so that nothing is found.
    """
    return tl.minimum(tl.maximum(tl.load(max_position, mask=row_mask, other=-1), -1), EMPTY_POSITION - 1)


@triton.jit
def _load_vectors(ptr, at, row_mask, d, STRIDE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Load vectors ``[rows BD]`` of D channels from the rows `at`, with zeros where
    `row_mask` is false.
    """
    mask = row_mask[:, None] & (d < D)[None, :] if D != BD else row_mask[:, None]
    return tl.load(ptr + at[:, None] * STRIDE + d[None, :], mask=mask, other=0.0)


@kernel
def group_max_kernel(
    q, k, position, max_position, group_max, tokens, size, groups, q_row_stride, k_row_stride,
    position_row_stride, max_position_row_stride,
    HEADS: tl.constexpr, Q_TOKEN: tl.constexpr, Q_HEAD: tl.constexpr, K_SLOT: tl.constexpr, K_HEAD: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr, TILES_PER_PROGRAM: tl.constexpr,
    GROUP: tl.constexpr,
    OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the best score of each group of keys, for one tile of queries and TILES_PER_PROGRAM tiles of keys.
    Programs that read the same keys run next to each other: the queries vary fastest, then the heads, whose
    keys are adjacent in memory. `groups` includes groups beyond `size`, up to the end of the last program's
    tiles.
    """
    program = tl.program_id(0)
    tiles = tl.cdiv(tokens, BQ)
    head = program // tiles % HEADS
    spans = groups // (TILES_PER_PROGRAM * BN // GROUP)
    span = program // tiles // HEADS % spans
    row = (program // tiles // HEADS // spans).to(tl.int64)
    t, n, d = program % tiles * BQ + tl.arange(0, BQ), tl.arange(0, BN), tl.arange(0, BD)
    query_mask = t < tokens
    max_seen = _clamped_max_positions(max_position + row * max_position_row_stride + t, query_mask)
    q += row * q_row_stride * Q_TOKEN + head * Q_HEAD
    k += row * k_row_stride * K_SLOT + head * K_HEAD
    position += row * position_row_stride
    group_max += ((row * tokens + t) * HEADS + head)[:, None] * groups
    first = span * TILES_PER_PROGRAM * BN
    key_position = _key_positions(position, first + tl.arange(0, TILES_PER_PROGRAM * BN), size)
    if tl.min(key_position, 0) > tl.max(max_seen, 0):  # no key here is visible to any of the queries
        for tile in tl.range(TILES_PER_PROGRAM):
            group = (first + tile * BN) // GROUP + tl.arange(0, BN // GROUP)
            empty_max = pack(tl.full([BQ, BN // GROUP], float("-inf"), tl.float32), group[None, :])
            tl.store(group_max + group[None, :], empty_max, mask=query_mask[:, None])
    else:
        lowest_max_seen = tl.min(tl.where(query_mask, max_seen, EMPTY_POSITION), 0)
        all_visible = tl.max(key_position, 0) <= lowest_max_seen
        # Positions are compared in 32 bits, as distances beyond the smallest `max_position`. With 64 bits, there would
        # not be enough registers for a second program on the same processor. The values of two queries of a
        # tile must therefore differ by less than 2^31.
        max_distance = tl.minimum(max_seen - lowest_max_seen, INT32_MAX - 1).to(tl.int32)
        Q = _load_vectors(q, t.to(tl.int64), query_mask, d, Q_TOKEN, D, BD)
        for tile in tl.range(TILES_PER_PROGRAM):
            slot = first + tile * BN + n
            K = _load_vectors(k, slot.to(tl.int64), slot < size, d, K_SLOT, D, BD)
            score = dot(Q, tl.trans(K), OP, PRECISION)
            if not all_visible:
                distance = tl.minimum(
                    tl.maximum(_key_positions(position, slot, size) - lowest_max_seen, 0), INT32_MAX
                ).to(tl.int32)
                score = tl.where(distance[None, :] <= max_distance[:, None], score, float("-inf"))
            best = tl.max(tl.reshape(score, [BQ, BN // GROUP, GROUP]), 2)
            group = (first + tile * BN) // GROUP + tl.arange(0, BN // GROUP)
            tl.store(group_max + group[None, :], pack(best, group[None, :]), mask=query_mask[:, None])


@kernel
def rescore_kernel(
    q, k, position, max_position, chosen_groups, scores, tokens, size, count, q_row_stride, k_row_stride,
    position_row_stride, max_position_row_stride,
    HEADS: tl.constexpr, Q_TOKEN: tl.constexpr, Q_HEAD: tl.constexpr, K_SLOT: tl.constexpr, K_HEAD: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write the scores of one query with BN of the keys in its `count` selected groups."""
    m = tl.program_id(0).to(tl.int64)
    head, t, row = m % HEADS, m // HEADS % tokens, m // HEADS // tokens
    candidate, d = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BD)
    row_mask = candidate < count * GROUP
    group = UINT32_MAX - (
        tl.load(chosen_groups + m * count + candidate // GROUP, mask=row_mask, other=0) & UINT32_MAX
    )
    slot = group * GROUP + candidate % GROUP
    Q = tl.load(q + (row * q_row_stride + t) * Q_TOKEN + head * Q_HEAD + d, mask=d < D, other=0.0).to(
        tl.float32
    )
    within = row_mask & (slot < size)
    K = _load_vectors(k + row * k_row_stride * K_SLOT + head * K_HEAD, slot, within, d, K_SLOT, D, BD).to(
        tl.float32
    )
    key_position = _key_positions(position + row * position_row_stride, slot, tl.where(row_mask, size, 0))
    score = tl.where(
        key_position <= _clamped_max_positions(max_position + row * max_position_row_stride + t, True),
        tl.sum(K * Q[None, :], 1),
        float("-inf"),
    )
    tl.store(scores + m * count * GROUP + candidate, pack(score, slot), mask=row_mask)
