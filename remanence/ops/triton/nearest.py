"""Exact nearest keys on a GPU, for any k and any number of keys. Kernels score, torch selects, nothing waits for the
device.

First the best score of every group of keys, then the k best groups (of equal ones the lower), then every score in
those. That is enough: any entry of another group is below the best entries of these k. The scores of all keys are never
written.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from remanence.ops.library import register_operator
from remanence.ops.triton import launch
from remanence.ops.triton.resources import Constants, Launch, recording

HELD = 2**26
"""Scores held at once, of groups or in chosen groups: 512 MiB. More queries are searched in several blocks."""

QUERIES, KEYS = (2**15, 256), (2**13, 64)
"""The most bytes and vectors of a tile. Keys are loaded again for every tile of queries, so those tiles are larger."""

TURNS = 16
"""The most tiles of keys per program; fewer if there would be too few programs for the GPU."""

CANDIDATES = 2**13
"""Numbers of the keys that a program scores again."""

GROUPS = (16, 64)
"""Keys of a group, least and most."""

STAGES = {"peaks_kernel": 3, "rescore_kernel": 1}


def pack(score: Tensor, index: Tensor) -> Tensor:
    """A float32 score and an index below 2^32 as one integer, ordered by the score, then by the lower index."""
    bits = (score + 0.0).view(torch.int32)  # + 0.0: minus zero is zero
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # a float's bits, the sign undone, are in the float's order
    return (bits.long() << 32) | (0xFFFFFFFF - index)


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    bits = (packed >> 32).int()
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32), 0xFFFFFFFF - (packed & 0xFFFFFFFF)


class Plan(NamedTuple):
    """How a search is split up."""

    block: int
    """Queries of a row that are searched for at once."""
    queries: int
    """Of a tile."""
    keys: int
    """Of a tile."""
    turns: int
    group: int
    bundle: int
    """Groups of which only the best is looked at, at first, when groups are chosen."""
    groups: int
    """With those past the end that fill the last program's tiles and the last bundle."""
    chosen: int
    """Groups whose keys are all scored."""


def plan_of(shape: torch.Size, size: int, k: int, width: int, op: torch.dtype, processors: int) -> Plan:
    """For queries ``[r t h e]`` and stores of `size`, in tiles so wide."""
    rows, tokens, heads, _ = shape
    queries, keys = (
        min(max(room // (width * op.itemsize), 32), vectors) for room, vectors in (QUERIES, KEYS)
    )
    # A group's best is written once and read once, 16 bytes; a chosen group's keys are each read and their scores
    # sorted, about eight times as much: at this size of groups, both come to the same.
    group = min(max(_root(size / (8 * k)), GROUPS[0]), GROUPS[1], keys)
    groups = -(-size // group)
    bundle = _root(groups / k)
    bundle = bundle if bundle >= 8 else 1  # few are quickly sorted
    held = max(1, HELD // (rows * heads * max(groups, min(k, groups) * group)))
    block = min(tokens, held if held < queries else held - held % queries)
    queries = 16 if block <= 16 else min(max(launch.power(block), 64), queries)
    turns, programs = TURNS, rows * heads * -(-block // queries) * -(-size // keys)
    while turns > 1 and programs < 4 * processors * turns:
        turns //= 2
    span = max(group * bundle, keys * turns)  # both are powers of two
    groups = -(-size // span) * span // group
    return Plan(block, queries, keys, turns, group, bundle, groups, min(k, groups))


def _root(ratio: float) -> int:
    """The square root, as a power of two."""
    return int(2 ** round(math.log2(max(ratio, 1)) / 2))


def _search(
    q: Tensor, keys: Tensor, position: Tensor, limit: Tensor, k: int, chip: int, processors: int
) -> tuple[Tensor, Tensor]:
    if q.numel() == 0:
        return _shapes(q, keys, position, limit, k)
    op = torch.bfloat16 if q.dtype == keys.dtype == torch.bfloat16 else torch.float32
    q, keys = _regular(q), _regular(keys)
    position, limit = position.to(torch.int64).contiguous(), limit.to(torch.int64)
    width = launch.side(q.shape[-1], op, chip)
    plan = plan_of(q.shape, keys.shape[1], k, width, op, processors)
    parts = []
    for start in range(0, q.shape[1], plan.block):
        some = slice(start, start + plan.block)
        parts.append(
            _search_block(plan, q[:, some], keys, position, limit[:, some].contiguous(), k, width, op)
        )
    score, index = unpack(parts[0] if len(parts) == 1 else torch.cat(parts, 1))
    return score, index.masked_fill_(score == -torch.inf, -1)


def _search_block(
    plan: Plan, q: Tensor, keys: Tensor, position: Tensor, limit: Tensor, k: int, width: int, op: torch.dtype
) -> Tensor:
    """The k best ``[r t h k]``, packed, the best first."""
    rows, tokens, heads, _ = q.shape
    size, count = keys.shape[1], plan.chosen
    apart = (
        q.stride(0) // q.stride(1),
        keys.stride(0) // keys.stride(1),
        position.stride(0),
        limit.stride(0),
    )
    strides = {
        "Q_TOKEN": q.stride(1),
        "Q_HEAD": q.stride(2),
        "K_SLOT": keys.stride(1),
        "K_HEAD": keys.stride(2),
    }
    shapes = {"HEADS": heads, **strides, "D": q.shape[-1], "BD": width, "GROUP": plan.group}
    peaks = torch.empty(rows, tokens, heads, plan.groups, dtype=torch.int64, device=q.device)
    spans = plan.groups * plan.group // (plan.keys * plan.turns)
    _launch(
        "peaks_kernel", (-(-tokens // plan.queries) * heads * spans * rows,),
        q, keys, position, limit, peaks, tokens, size, plan.groups, *apart,
        **shapes, BQ=plan.queries, BN=plan.keys, TURNS=plan.turns,
        OP=launch.triton_type(op), PRECISION=launch.precision(),
    )  # fmt: skip
    if plan.bundle > 1:
        bundles = peaks.unflatten(-1, (-1, plan.bundle))
        best = bundles.amax(-1).topk(count, sorted=False).indices
        peaks = bundles.gather(-2, best.unsqueeze(-1).expand(*best.shape, plan.bundle)).flatten(-2)
    chosen = peaks.topk(count, sorted=False).values
    scores = torch.empty(rows, tokens, heads, count * plan.group, dtype=torch.int64, device=q.device)
    candidates = CANDIDATES // width
    _launch(
        "rescore_kernel", (rows * tokens * heads, -(-count * plan.group // candidates)),
        q, keys, position, limit, chosen, scores, tokens, size, count, *apart, **shapes, BN=candidates,
    )  # fmt: skip
    return scores.topk(k).values


def _regular(x: Tensor) -> Tensor:
    """As the kernels can read it: rows a multiple of tokens or slots apart, and the last axis contiguous."""
    row, entry, _, number = x.stride()
    return x if number == 1 and entry > 0 and (len(x) == 1 or row % entry == 0) else x.contiguous()


def _launch(name: str, grid: tuple[int, ...], *tensors: Any, **constants: Any) -> None:
    options = {"num_warps": warps_of(name, constants), "num_stages": STAGES[name]}
    launch.launch(name, grid, *tensors, options=options, **constants)


def warps_of(name: str, constants: Constants) -> int:
    return 8 if name == "peaks_kernel" and constants["BQ"] > 64 else 4


def launches(
    heads: int, width: int, tokens: int, size: int, k: int, op: torch.dtype, arch: int
) -> list[Launch]:
    """The kernels of one search as they are launched on a chip; nothing runs."""
    with FakeTensorMode(), torch.device("cpu"), recording() as recorded:
        q, keys = torch.empty(1, tokens, heads, width, dtype=op), torch.empty(1, size, heads, width, dtype=op)
        position, limit = (torch.empty(1, n, dtype=torch.int64) for n in (size, tokens))
        _search(q, keys, position, limit, k, arch, 132)
    return [Launch(*each, warps_of(each[0], each[2]), STAGES[each[0]]) for each in recorded]


def _nearest(q: Tensor, keys: Tensor, position: Tensor, limit: Tensor, k: int) -> tuple[Tensor, Tensor]:
    processors = launch.processors(q.device) if q.is_cuda else 1
    return _search(q, keys, position, limit, k, launch.arch(q.device), processors)


def _shapes(q: Tensor, keys: Tensor, position: Tensor, limit: Tensor, k: int) -> tuple[Tensor, Tensor]:
    score = torch.empty(*q.shape[:3], k, dtype=torch.float32, device=q.device)
    return score, torch.empty_like(score, dtype=torch.int64)


nearest = register_operator(
    "nearest",
    _nearest,
    "(Tensor q, Tensor keys, Tensor position, Tensor limit, int k) -> (Tensor, Tensor)",
    fake=_shapes,
)
"""Scores and slots ``[r t h k]`` of the keys ``[r size h e]`` whose products with q ``[r t h e]`` are highest, among
those whose position ``[r size]`` is from 0 to the query's limit ``[r t]``: the best first, of equal ones the lower
slot; -inf and -1 where there are fewer than k.

Scores are float32 sums. Groups are chosen by tensor cores' sums: of bfloat16 as it is, whose products are exact, of
float32 by three products for one, off by some 4e-7 of the vectors' lengths, as plain float32 is. Of two entries that
close, either may be the last one found. Equal keys have equal scores in both.
"""
