"""Finding stored entries for queries, and attending to what was found. Searching chooses and has no gradient; attending
has.

A search is a function ``(q, state, k, limit) -> Found``. A query finds an entry only if the entry's position is at most
the query's `limit` (its own position less the local window: nothing that local attention sees is met twice).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from remanence.memory.store import StoreState
from remanence.ops.triton import dispatch, launch
from remanence.ops.triton.nearest import nearest, pack, unpack

P = ParamSpec("P")
T = TypeVar("T")

BLOCK, SCORES = 2**16, 2**22
"""Entries that a query meets at once, and scores of a head held at once. The fastest of those tried on one core, 8K to
262K.
"""


class Found(NamedTuple):
    """What a query found in its head: scores (the dot products) and slots ``[r t h k]``, the best first.

    Where fewer than k were to be found the rest are -inf and -1. `dense` says "every entry" by an index ``[r t 1 0]``
    of none and a score ``[r t 1 size]`` of 0, or -inf where an entry may not be found.
    """

    score: Tensor
    index: Tensor  # type: ignore[assignment]  # a tuple has a method of this name, of no use here


class Search(Protocol):
    def __call__(
        self, q: Float[Tensor, "r t h e"], state: StoreState, k: int, limit: Int[Tensor, "r t"]
    ) -> Found: ...


FEW = 8
"""Queries for which the keys are multiplied where they lie in the store; for more, they are brought together first."""


def plainly(function: Callable[P, T]) -> Callable[P, T]:
    """Outside of autocast, which would lower the float32 that is asked for."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        q: Any = args[0] if args else kwargs["q"]
        with torch.autocast(q.device.type, enabled=False):
            return function(*args, **kwargs)

    return run


def unit(x: Float[Tensor, "... e"]) -> Float[Tensor, "... e"]:
    """Of unit length, as stored keys and their queries are."""
    return F.normalize(x, dim=-1)


@plainly
@torch.no_grad()
def exact(q: Float[Tensor, "r t h e"], state: StoreState, k: int, limit: Int[Tensor, "r t"]) -> Found:
    """The k best of all entries; of equal ones the lower slot. Memory does not grow with the store.

    In two rounds, because choosing costs more than scoring: the k best lie in the k groups whose best scores are best,
    so only the groups' maxima and then the scores in k groups are sorted.
    """
    check(q, state, k, limit)
    if dispatch.search_reason(q, state.k) is None:
        return Found(*nearest(q, state.k, state.position, limit, k))
    rows, tokens, heads, _ = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    score = torch.full((rows, tokens, heads, k), -torch.inf, dtype=dtype, device=q.device)
    index = torch.zeros((rows, tokens, heads, k), dtype=torch.int64, device=q.device)
    queries = SCORES // min(state.size, BLOCK)
    for row, head in _parts(q, min(state.size, BLOCK)):
        for first in range(0, state.size, BLOCK):
            slots = slice(first, min(first + BLOCK, state.size))
            position = state.position[row, slots]
            seen = _seen(position, limit[row])
            if seen == "none":
                continue
            keys = state.k[row, slots, head].to(dtype).transpose(1, 2)
            keys = (keys.contiguous() if tokens > FEW else keys).transpose(2, 3)
            for start in range(0, tokens, queries):
                some = (row, slice(start, start + queries), head)
                scores = q[some].to(dtype).transpose(1, 2) @ keys
                if seen == "some":
                    hidden = (position < 0).unsqueeze(1) | (
                        position.unsqueeze(1) > limit[some[:2]].unsqueeze(-1)
                    )
                    scores.masked_fill_(hidden.unsqueeze(1), -torch.inf)
                top, place = (x.transpose(1, 2) for x in _best_of_block(scores, k))
                if first or top.shape[-1] < k:
                    both = torch.cat([score[some], top], -1), torch.cat([index[some], place + first], -1)
                    top, place = best(*both, k)
                score[some], index[some] = top, place
    return Found(score, index.masked_fill_(score == -torch.inf, -1))


def dense(q: Float[Tensor, "r t h e"], state: StoreState, k: int, limit: Int[Tensor, "r t"]) -> Found:
    """Every entry, whatever k is: attention over the whole store."""
    hidden = (state.position < 0).unsqueeze(1) | (state.position.unsqueeze(1) > limit.unsqueeze(-1))
    score = torch.zeros(hidden.shape, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    score = score.masked_fill_(hidden, -torch.inf).unsqueeze(2)
    return Found(score, torch.empty(*score.shape[:3], 0, dtype=torch.int64, device=q.device))


@plainly
@torch.no_grad()
def _by_kernels(q: Float[Tensor, "r t h e"], state: StoreState, k: int, limit: Int[Tensor, "r t"]) -> Found:
    """`exact` on the kernels, an error where they cannot run."""
    check(q, state, k, limit)
    reason = dispatch.search_reason(q, state.k)
    if reason is not None:
        raise ValueError(f"search: 'triton' cannot run this call: {reason}")
    return Found(*nearest(q, state.k, state.position, limit, k))


def _triton() -> Search:
    if launch.kernels() is None:
        raise ImportError("search 'triton' needs Triton: pip install 'remanence[triton]'")
    return _by_kernels


def _ivf() -> Search:
    from remanence.memory.ivf import InvertedFile

    return InvertedFile()


CAPTURED = (exact, dense, _by_kernels)
"""Searches that decide nothing on the host and keep nothing beside the store: a CUDA graph can hold them."""

SEARCHES: dict[str, Callable[[], Search]] = {
    "exact": lambda: exact,
    "dense": lambda: dense,
    "triton": _triton,
    "ivf": _ivf,
}
"""Makers of searches: an approximate one keeps an index of its own beside the state, from which it could always be made
anew.
"""


@plainly
def attend(
    q: Float[Tensor, "r t h e"], found: Found, state: StoreState, scale: Float[Tensor, " h"]
) -> tuple[Float[Tensor, "r t h e"], Float[Tensor, "r t h"]]:
    """Softmax attention over what was found, and its log-sum-exp; 0 and -inf where nothing was.

    Scores are made anew from the stored keys, so that queries and the heads' `scale` learn; the store does not.
    """
    if found.index.shape[-1] < found.score.shape[-1]:
        return _attend_to_all(q, found.score, state, scale)
    rows, heads = torch.arange(q.shape[0], device=q.device), torch.arange(q.shape[2], device=q.device)
    place = (rows.view(-1, 1, 1, 1), found.index.clamp(min=0), heads.view(-1, 1))
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = state.k.detach()[place].to(wide), state.v.detach()[place].to(q.dtype)
    score = (k @ q.to(wide).unsqueeze(-1)).squeeze(-1)
    weight, lse = _softmax(score, scale, found.index < 0)
    return (weight.to(v.dtype).unsqueeze(-2) @ v).squeeze(-2), lse


def combine(
    local: Float[Tensor, "r t h e"],
    local_lse: Float[Tensor, "r t h"] | None,
    memory: Float[Tensor, "r t h e"],
    memory_lse: Float[Tensor, "r t h"],
    gate: Float[Tensor, " h"] | None = None,
) -> Float[Tensor, "r t h e"]:
    """Local and memory attention as one: mixed by the sigmoid of the heads' `gate`, or, without one, under a joint
    softmax.

    Where the memory is empty this is local attention alone, with a gate too.
    """
    if gate is None:
        if local_lse is None:
            raise ValueError(
                "local_lse: expected local attention's log-sum-exp, which a joint softmax needs, got None"
            )
        return _joined(local, local_lse, memory, memory_lse)[0]
    share = gate.sigmoid().expand(memory_lse.shape).masked_fill(memory_lse == -torch.inf, 0.0)
    return torch.lerp(local, memory, share.unsqueeze(-1).to(local.dtype))


def check(q: Tensor, state: StoreState, k: int, limit: Tensor) -> None:
    if list(state.k.shape[2:]) != list(q.shape[2:]) or len(state.k) != len(q):
        raise ValueError(
            f"q: expected rows, heads and width of the store's {list(state.k.shape)}, got shape {list(q.shape)}"
        )
    if list(limit.shape) != list(q.shape[:2]):
        raise ValueError(f"limit: expected shape {list(q.shape[:2])}, got {list(limit.shape)}")
    if not 0 < k <= state.size:
        raise ValueError(f"k: expected between 1 and the store's size of {state.size}, got {k}")


def _parts(q: Tensor, entries: int) -> Iterator[tuple[slice, slice]]:
    """Rows and heads to be searched together: all on a GPU or for a few scores, else one at a time, to stay in the
    cache.
    """
    rows, tokens, heads, _ = q.shape
    if q.is_cuda or rows * heads * tokens * entries <= SCORES:
        yield slice(0, rows), slice(0, heads)
        return
    for row in range(rows):
        for head in range(heads):
            yield slice(row, row + 1), slice(head, head + 1)


def _seen(position: Tensor, limit: Tensor) -> str:
    """How many of a block's entries its queries may find. On a GPU always "some": to ask would be to wait for it."""
    if position.is_cuda or not limit.numel():
        return "some"
    if bool((position >= 0).all() & (position.max() <= limit.min())):
        return "all"
    return "none" if not bool(((position >= 0) & (position <= limit.max())).any()) else "some"


def _best_of_block(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of ``[... n]`` (fewer where n is less) and their places."""
    entries = scores.shape[-1]
    size = 2 ** round(math.log2(max(entries / k, 1)) / 2)  # where both rounds have as much to sort
    groups = -(-entries // size)
    if groups <= k:
        return best(scores, torch.arange(entries, device=scores.device).expand(scores.shape), min(k, entries))
    grouped = F.pad(scores, (0, groups * size - entries), value=-torch.inf) if entries % size else scores
    grouped = grouped.unflatten(-1, (groups, size))
    every = torch.arange(groups, device=scores.device)
    top = best(grouped.amax(-1), every.expand(*scores.shape[:-1], -1), k)[1]
    chosen = grouped.gather(-2, top.unsqueeze(-1).expand(*top.shape, size)).flatten(-2)
    place = (top.unsqueeze(-1) * size + torch.arange(size, device=scores.device)).flatten(-2)
    return best(chosen, place, k)


def best(score: Tensor, index: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best scores and their indices, the lower index first among equals. topk leaves equals in any order."""
    if score.dtype == torch.float32:
        return unpack(pack(score, index).topk(k).values)
    order = index.argsort(dim=-1)
    order = order.gather(-1, score.gather(-1, order).argsort(dim=-1, descending=True, stable=True)[..., :k])
    return score.gather(-1, order), index.gather(-1, order)


def _softmax(score: Tensor, scale: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and log-sum-exp of scores ``[r t h n]``; in float32 at least. No NaN where all is hidden, in gradients
    neither.
    """
    score = score.to(torch.promote_types(score.dtype, torch.float32)) * scale.unsqueeze(-1)
    nothing = hidden.all(-1, keepdim=True)
    score = score.masked_fill(hidden, -torch.inf).masked_fill(nothing, 0.0)
    lse = score.logsumexp(-1, keepdim=True)
    weight = (score - lse).exp().masked_fill(nothing, 0.0)
    return weight, lse.masked_fill(nothing, -torch.inf).squeeze(-1)


def _attend_to_all(q: Tensor, mask: Tensor, state: StoreState, scale: Tensor) -> tuple[Tensor, Tensor]:
    """By blocks of entries, each joined to those before. Without gradients, only the mask grows with the store."""
    whole: tuple[Tensor, Tensor] | None = None
    block = max(1, BLOCK // 256, SCORES // max(q[..., 0].numel(), 1))
    for first in range(0, state.size, block):
        slots = slice(first, first + block)
        wide = torch.promote_types(q.dtype, torch.float32)
        k, v = (
            state.k[:, slots].detach().to(wide).transpose(1, 2),
            state.v[:, slots].detach().to(q.dtype).transpose(1, 2),
        )
        score = (q.to(wide).transpose(1, 2) @ k.transpose(2, 3)).transpose(1, 2)
        weight, lse = _softmax(score, scale, mask[..., slots] == -torch.inf)
        part = (weight.to(v.dtype).transpose(1, 2) @ v).transpose(1, 2)
        whole = (part, lse) if whole is None else _joined(*whole, part, lse)
    assert whole is not None
    return whole


def _joined(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two attentions as one softmax over the keys of both."""
    empty = b_lse == -torch.inf
    share = (b_lse - a_lse).masked_fill(empty, -torch.inf).sigmoid()
    # Not logaddexp of two -inf, whose gradient is NaN.
    lse = torch.where(empty, a_lse, torch.logaddexp(a_lse, b_lse.masked_fill(empty, 0.0)))
    return torch.lerp(a, b, share.unsqueeze(-1).to(a.dtype)), lse
