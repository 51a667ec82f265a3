# mypy: ignore-errors
"""Search for the nearest keys in two passes, without ever writing all scores:

    peaks_kernel      the best score of every group of keys, by tiles of queries and keys on tensor cores
    rescore_kernel    all scores of the selected groups, for each query, in float32

Both write a score and its index as one integer (`pack`). No two of these integers are equal, so torch's topk
selects the same ones every time. Queries ``[r t h e]`` and keys ``[r size h e]`` are read in place, with any
strides of tokens, slots and heads. The ``*_apart`` arguments are the distances between rows, for q and k in
tokens or slots.
"""

from __future__ import annotations

import triton
import triton.language as tl

from remanence.ops.triton.kernels.tools import dot

FAR = tl.constexpr(2**62)
"""The position of empty slots, beyond every limit."""

WORD, MOST = tl.constexpr(2**32 - 1), tl.constexpr(2**31 - 1)
"""The largest 32-bit unsigned and signed integers."""

# Compiled once for all numbers of queries and keys.
kernel = triton.jit(
    do_not_specialize=[
        "tokens",
        "size",
        "groups",
        "count",
        "q_apart",
        "k_apart",
        "position_apart",
        "limit_apart",
    ]
)


@triton.jit
def pack(score, index):
    """Pack a score and an index into one integer. A higher score gives a higher integer; of equal scores, the
    lower index does. The same as `pack` in ops/triton/nearest.py.
    """
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # turns minus zero into zero
    bits ^= (bits >> 31) & 0x7FFFFFFF
    return (bits.to(tl.int64) << 32) | (WORD - index.to(tl.int64))


@triton.jit
def _places(position, slot, size):
    """Return the positions of the keys in these slots. Empty slots, and slots from `size` on, get FAR."""
    place = tl.load(position + slot, mask=slot < size, other=-1)
    return tl.where(place < 0, FAR, place)


@triton.jit
def _bounds(limit, live):
    """Return the limits of queries, clamped to [-1, FAR - 1]. A query that is not `live` gets -1, so that it
    finds nothing.
    """
    return tl.minimum(tl.maximum(tl.load(limit, mask=live, other=-1), -1), FAR - 1)


@triton.jit
def _vectors(ptr, at, live, d, STRIDE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Load vectors ``[rows BD]`` of D channels from the rows `at`, with zeros where not `live`."""
    mask = live[:, None] & (d < D)[None, :] if D != BD else live[:, None]
    return tl.load(ptr + at[:, None] * STRIDE + d[None, :], mask=mask, other=0.0)


@kernel
def peaks_kernel(
    q, k, position, limit, peaks, tokens, size, groups, q_apart, k_apart, position_apart, limit_apart,
    HEADS: tl.constexpr, Q_TOKEN: tl.constexpr, Q_HEAD: tl.constexpr, K_SLOT: tl.constexpr, K_HEAD: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr, TURNS: tl.constexpr, GROUP: tl.constexpr,
    OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the best score of each group of keys, for one tile of queries and TURNS tiles of keys. Programs
    that read the same keys run next to each other: the queries vary fastest, then the heads, whose keys are
    adjacent in memory. `groups` includes groups beyond `size`, up to the end of the last program's tiles.
    """
    program = tl.program_id(0)
    tiles = tl.cdiv(tokens, BQ)
    head = program // tiles % HEADS
    spans = groups // (TURNS * BN // GROUP)
    span = program // tiles // HEADS % spans
    row = (program // tiles // HEADS // spans).to(tl.int64)
    t, n, d = program % tiles * BQ + tl.arange(0, BQ), tl.arange(0, BN), tl.arange(0, BD)
    asked = t < tokens
    bound = _bounds(limit + row * limit_apart + t, asked)
    q += row * q_apart * Q_TOKEN + head * Q_HEAD
    k += row * k_apart * K_SLOT + head * K_HEAD
    position += row * position_apart
    peaks += ((row * tokens + t) * HEADS + head)[:, None] * groups
    first = span * TURNS * BN
    place = _places(position, first + tl.arange(0, TURNS * BN), size)
    if tl.min(place, 0) > tl.max(bound, 0):  # no key here is visible to any of the queries
        for turn in tl.range(TURNS):
            group = (first + turn * BN) // GROUP + tl.arange(0, BN // GROUP)
            nothing = pack(tl.full([BQ, BN // GROUP], float("-inf"), tl.float32), group[None, :])
            tl.store(peaks + group[None, :], nothing, mask=asked[:, None])
    else:
        low = tl.min(tl.where(asked, bound, FAR), 0)
        all_seen = tl.max(place, 0) <= low
        # Positions are compared in 32 bits, as distances beyond the smallest limit. With 64 bits, there would
        # not be enough registers for a second program on the same processor. The limits of two queries of a
        # tile must therefore differ by less than 2^31.
        reach = tl.minimum(bound - low, MOST - 1).to(tl.int32)
        Q = _vectors(q, t.to(tl.int64), asked, d, Q_TOKEN, D, BD)
        for turn in tl.range(TURNS):
            slot = first + turn * BN + n
            K = _vectors(k, slot.to(tl.int64), slot < size, d, K_SLOT, D, BD)
            score = dot(Q, tl.trans(K), OP, PRECISION)
            if not all_seen:
                ahead = tl.minimum(tl.maximum(_places(position, slot, size) - low, 0), MOST).to(tl.int32)
                score = tl.where(ahead[None, :] <= reach[:, None], score, float("-inf"))
            best = tl.max(tl.reshape(score, [BQ, BN // GROUP, GROUP]), 2)
            group = (first + turn * BN) // GROUP + tl.arange(0, BN // GROUP)
            tl.store(peaks + group[None, :], pack(best, group[None, :]), mask=asked[:, None])


@kernel
def rescore_kernel(
    q, k, position, limit, chosen, scores, tokens, size, count, q_apart, k_apart, position_apart, limit_apart,
    HEADS: tl.constexpr, Q_TOKEN: tl.constexpr, Q_HEAD: tl.constexpr, K_SLOT: tl.constexpr, K_HEAD: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write the scores of one query with BN of the keys in its `count` selected groups."""
    m = tl.program_id(0).to(tl.int64)
    head, t, row = m % HEADS, m // HEADS % tokens, m // HEADS // tokens
    c, d = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BD)
    live = c < count * GROUP
    group = WORD - (tl.load(chosen + m * count + c // GROUP, mask=live, other=0) & WORD)
    slot = group * GROUP + c % GROUP
    Q = tl.load(q + (row * q_apart + t) * Q_TOKEN + head * Q_HEAD + d, mask=d < D, other=0.0).to(tl.float32)
    within = live & (slot < size)
    K = _vectors(k + row * k_apart * K_SLOT + head * K_HEAD, slot, within, d, K_SLOT, D, BD).to(tl.float32)
    place = _places(position + row * position_apart, slot, tl.where(live, size, 0))
    score = tl.where(
        place <= _bounds(limit + row * limit_apart + t, True), tl.sum(K * Q[None, :], 1), float("-inf")
    )
    tl.store(scores + m * count * GROUP + c, pack(score, slot), mask=live)
