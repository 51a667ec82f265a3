"""Exact search for the nearest keys on a GPU, for any k and any number of keys. The kernels compute scores
and torch selects the best; nothing waits for the GPU.

The search first computes the best score of every group of keys, then selects the k best groups (of equal
ones, those with the lower index), and then computes every score in these groups. This is exact: a key in any
other group scores no higher than the best keys of the k selected groups. The scores of all keys are never
written to memory.
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

MAX_SCORES = 2**26
"""The most scores that are kept at once, of groups or of keys in selected groups (512 MiB). If there are more
queries, they are searched in several blocks.
"""

QUERIES, KEYS = (2**15, 256), (2**13, 64)
"""The most bytes and the most vectors in a tile of queries and in a tile of keys. Tiles of queries are
larger, because the keys are loaded again for each of them.
"""

TILES_PER_PROGRAM = 16
"""The most tiles of keys that one program processes. It is fewer if there would be too few programs to occupy
the GPU.
"""

CANDIDATES = 2**13
"""The most elements (keys times channels) that one program of the second pass loads."""

GROUPS = (16, 64)
"""The fewest and the most keys in a group."""

STAGES = {"group_max_kernel": 3, "rescore_kernel": 1}
"""The number of pipeline stages of each kernel."""


def pack(score: Tensor, index: Tensor) -> Tensor:
    """Pack a float32 score and an index below 2^32 into one int64. The integers are ordered by score; of
    equal scores, the one with the lower index is larger.
    """
    bits = (score + 0.0).view(torch.int32)  # + 0.0 turns minus zero into zero
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # now the integers are ordered like the floats
    return (bits.long() << 32) | (0xFFFFFFFF - index)


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores and indices of packed integers; the inverse of `pack`."""
    bits = (packed >> 32).int()
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32), 0xFFFFFFFF - (packed & 0xFFFFFFFF)


class Plan(NamedTuple):
    """How a search is split into tiles, groups and blocks."""

    block: int
    """Queries per row and head that are searched at once."""
    queries: int
    """Queries in a tile."""
    keys: int
    """Keys in a tile."""
    tiles_per_program: int
    """Tiles of keys per program."""
    group: int
    """Keys in a group."""
    bundle: int
    """Groups in a bundle. If above 1, the best bundles are selected first, and groups only among these."""
    groups: int
    """The number of groups, including empty ones that pad the last program's tiles and the last bundle."""
    chosen: int
    """The number of selected groups, in which every key is scored."""


def plan_of(shape: torch.Size, size: int, k: int, width: int, op: torch.dtype, num_sms: int) -> Plan:
    """Return the plan for queries ``[r t h e]`` and stores of `size` keys. `width` is the padded head width
    of the tiles.
    """
    rows, tokens, heads, _ = shape
    queries, keys = (
        min(max(max_bytes // (width * op.itemsize), 32), max_vectors)
        for max_bytes, max_vectors in (QUERIES, KEYS)
    )
    # The best score of each group is written and read once (16 bytes). Each key of a selected group is read
    # and its score sorted, which costs about eight times as much. At this group size, both passes cost the
    # same.
    group = min(max(_root(size / (8 * k)), GROUPS[0]), GROUPS[1], keys)
    groups = -(-size // group)
    bundle = _root(groups / k)
    bundle = bundle if bundle >= 8 else 1  # few groups are sorted quickly, without bundles
    max_queries = max(1, MAX_SCORES // (rows * heads * max(groups, min(k, groups) * group)))
    block = min(tokens, max_queries if max_queries < queries else max_queries - max_queries % queries)
    queries = 16 if block <= 16 else min(max(launch.padded_size(block), 64), queries)
    tiles_per_program, programs = TILES_PER_PROGRAM, rows * heads * -(-block // queries) * -(-size // keys)
    while tiles_per_program > 1 and programs < 4 * num_sms * tiles_per_program:
        tiles_per_program //= 2
    span = max(group * bundle, keys * tiles_per_program)  # both are powers of two
    groups = -(-size // span) * span // group
    return Plan(block, queries, keys, tiles_per_program, group, bundle, groups, min(k, groups))


def _root(ratio: float) -> int:
    """Return the square root of `ratio`, rounded to a power of two."""
    return int(2 ** round(math.log2(max(ratio, 1)) / 2))


def _search(
    q: Tensor, keys: Tensor, position: Tensor, max_position: Tensor, k: int, chip: int, num_sms: int
) -> tuple[Tensor, Tensor]:
    """Search block by block. Returns scores and slots ``[r t h k]``; see `nearest`. `chip` is the compute
    capability and `num_sms` the number of processors of the GPU.
    """
    if q.numel() == 0:
        return _shapes(q, keys, position, max_position, k)
    op = torch.bfloat16 if q.dtype == keys.dtype == torch.bfloat16 else torch.float32
    q, keys = _with_readable_strides(q), _with_readable_strides(keys)
    position, max_position = position.to(torch.int64).contiguous(), max_position.to(torch.int64)
    width = launch.padded_width(q.shape[-1], op, chip)
    plan = plan_of(q.shape, keys.shape[1], k, width, op, num_sms)
    parts = []
    for start in range(0, q.shape[1], plan.block):
        some = slice(start, start + plan.block)
        parts.append(
            _search_block(plan, q[:, some], keys, position, max_position[:, some].contiguous(), k, width, op)
        )
    score, index = unpack(parts[0] if len(parts) == 1 else torch.cat(parts, 1))
    return score, index.masked_fill_(score == -torch.inf, -1)


def _search_block(
    plan: Plan,
    q: Tensor,
    keys: Tensor,
    position: Tensor,
    max_position: Tensor,
    k: int,
    width: int,
    op: torch.dtype,
) -> Tensor:
    """Return the k best keys ``[r t h k]`` of a block of queries as packed integers, the best first."""
    rows, tokens, heads, _ = q.shape
    size, count = keys.shape[1], plan.chosen
    row_strides = (
        q.stride(0) // q.stride(1),
        keys.stride(0) // keys.stride(1),
        position.stride(0),
        max_position.stride(0),
    )
    strides = {
        "Q_TOKEN": q.stride(1),
        "Q_HEAD": q.stride(2),
        "K_SLOT": keys.stride(1),
        "K_HEAD": keys.stride(2),
    }
    shapes = {"HEADS": heads, **strides, "D": q.shape[-1], "BD": width, "GROUP": plan.group}
    group_max = torch.empty(rows, tokens, heads, plan.groups, dtype=torch.int64, device=q.device)
    spans = plan.groups * plan.group // (plan.keys * plan.tiles_per_program)
    _launch(
        "group_max_kernel", (-(-tokens // plan.queries) * heads * spans * rows,),
        q, keys, position, max_position, group_max, tokens, size, plan.groups, *row_strides,
        **shapes, BQ=plan.queries, BN=plan.keys, TILES_PER_PROGRAM=plan.tiles_per_program,
        OP=launch.triton_type(op), PRECISION=launch.precision(),
    )  # fmt: skip
    if plan.bundle > 1:
        bundles = group_max.unflatten(-1, (-1, plan.bundle))
        best = bundles.amax(-1).topk(count, sorted=False).indices
        group_max = bundles.gather(-2, best.unsqueeze(-1).expand(*best.shape, plan.bundle)).flatten(-2)
    chosen = group_max.topk(count, sorted=False).values
    scores = torch.empty(rows, tokens, heads, count * plan.group, dtype=torch.int64, device=q.device)
    candidates = CANDIDATES // width
    _launch(
        "rescore_kernel", (rows * tokens * heads, -(-count * plan.group // candidates)),
        q, keys, position, max_position, chosen, scores, tokens, size, count, *row_strides, **shapes, BN=candidates,
    )  # fmt: skip
    return scores.topk(k).values


def _with_readable_strides(x: Tensor) -> Tensor:
    """Return x, or a contiguous copy if the kernels cannot read its layout. They require that the stride of
    rows is a multiple of that of tokens or slots, and that the last axis is contiguous.
    """
    row, entry, _, number = x.stride()
    return x if number == 1 and entry > 0 and (len(x) == 1 or row % entry == 0) else x.contiguous()


def _launch(name: str, grid: tuple[int, ...], *tensors: Any, **constants: Any) -> None:
    """Launch a kernel with its number of warps and stages."""
    options = {"num_warps": warps_of(name, constants), "num_stages": STAGES[name]}
    launch.launch(name, grid, *tensors, options=options, **constants)


def warps_of(name: str, constants: Constants) -> int:
    """Return the number of warps of a kernel."""
    return 8 if name == "group_max_kernel" and constants["BQ"] > 64 else 4


def list_launches(
    heads: int, width: int, tokens: int, size: int, k: int, op: torch.dtype, arch: int
) -> list[Launch]:
    """Return the kernels that one search launches on a compute capability. The launches are recorded with
    fake tensors; nothing runs.
    """
    with FakeTensorMode(), torch.device("cpu"), recording() as recorded:
        q, keys = torch.empty(1, tokens, heads, width, dtype=op), torch.empty(1, size, heads, width, dtype=op)
        position, max_position = (torch.empty(1, n, dtype=torch.int64) for n in (size, tokens))
        _search(q, keys, position, max_position, k, arch, 132)
    return [Launch(*each, warps_of(each[0], each[2]), STAGES[each[0]]) for each in recorded]


def _nearest(
    q: Tensor, keys: Tensor, position: Tensor, max_position: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """The implementation of `nearest`."""
    num_sms = launch.num_sms(q.device) if q.is_cuda else 1
    return _search(q, keys, position, max_position, k, launch.arch(q.device), num_sms)


def _shapes(q: Tensor, keys: Tensor, position: Tensor, max_position: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return uninitialised results with the shapes of those of `nearest`."""
    score = torch.empty(*q.shape[:3], k, dtype=torch.float32, device=q.device)
    return score, torch.empty_like(score, dtype=torch.int64)


nearest = register_operator(
    "nearest",
    _nearest,
    "(Tensor q, Tensor keys, Tensor position, Tensor max_position, int k) -> (Tensor, Tensor)",
    fake=_shapes,
)
"""For each query q ``[r t h e]``, return the scores and slots ``[r t h k]`` of the keys ``[r size h e]`` with
the highest dot products. Only keys whose position ``[r size]`` is between 0 and the query's `max_position` ``[r
t]`` are found. The best comes first; of equal scores, the lower slot. If there are fewer than k, the score is
-inf and the slot -1.

The returned scores are float32 sums. Groups are selected by scores from tensor cores. These are exact
products for bfloat16; for float32 they use "tf32x3", with an error of about 4e-7 of the product of the
vectors' lengths, like plain float32. If two keys are that close, either one may be the last one found. Equal
keys get equal scores in both passes.
"""
