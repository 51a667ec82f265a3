"""Search for stored entries, and attention over them. Attention is differentiable, search is not.

A search is a function ``(q, state, k, max_position) -> SearchResult``. A query finds only entries whose position is
at most its `max_position`: its own position minus the local window, so that no token is attended to twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

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
"""The number of entries that are searched at once, and the number of scores of a head that are held at once.
These were the fastest values among those tried on one core with 8K to 262K entries.
"""


class SearchResult(NamedTuple):
    """The result of a search: scores (dot products) and slots ``[r t h k]`` for each query and head, the best first.

    If fewer than k entries are found, the rest are -inf and -1. `dense` returns all entries in another form: an empty
    index ``[r t 1 0]``, and a score ``[r t 1 size]`` that is 0, or -inf for entries after `max_position`.
    """

    score: Tensor
    index: Tensor  # type: ignore[assignment]  # hides the method of tuples


class Search(Protocol):
    """A function that finds the k best entries of a store for each query."""

    def __call__(
        self, q: Float[Tensor, "r t h e"], state: StoreState, k: int, max_position: Int[Tensor, "r t"]
    ) -> SearchResult: ...


FEW_QUERIES, CONVERTED = 8, 2**17
"""Up to this number of queries, the strided keys of the store are multiplied directly; on a CPU so many numbers at once
that they are still in its caches after their conversion to float32. For more queries, the keys are copied first.
"""


def without_autocast(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that it runs without autocast, which would lower the precision of float32
    products.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        q = args[0] if args else kwargs["q"]
        assert isinstance(q, Tensor)
        with torch.autocast(q.device.type, enabled=False):
            return function(*args, **kwargs)

    return run


def l2_normalize(x: Float[Tensor, "... e"]) -> Float[Tensor, "... e"]:
    """Scale x to unit length over the last axis. Stored keys and their queries are normalised in this way."""
    return F.normalize(x, dim=-1)


@without_autocast
@torch.no_grad()
def exact(
    q: Float[Tensor, "r t h e"], state: StoreState, k: int, max_position: Int[Tensor, "r t"]
) -> SearchResult:
    """Return the k best of all entries; of equal scores the entry in the lower slot. Memory use does not grow
    with the store.

    Selection costs more than scoring, so it has two rounds. The k best entries are in the k groups with the
    highest maxima, so only the maxima of all groups and the scores of k groups are sorted.
    """
    check_search(q, state, k, max_position)
    if dispatch.search_reason(q, state.k) is None:
        return SearchResult(*nearest(q, state.k, state.position, max_position, k))
    rows, tokens, heads, _ = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    score = torch.full((rows, tokens, heads, k), -torch.inf, dtype=dtype, device=q.device)
    index = torch.zeros((rows, tokens, heads, k), dtype=torch.int64, device=q.device)
    few = tokens <= FEW_QUERIES and not q.is_cuda
    queries = max(tokens, 1) if few else SCORES // min(state.size, BLOCK)
    for row, head in _search_tiles(q, min(state.size, BLOCK)):
        for first in range(0, state.size, BLOCK):
            slots = slice(first, min(first + BLOCK, state.size))
            position = state.position[row, slots]
            seen = _visible_entries(position, max_position[row])
            if seen == "none":
                continue
            keys: Iterable[Tensor]
            if few and state.k.dtype != dtype:
                keys = _converted_keys(state, row, slots, head, dtype)
            else:
                whole = state.read_keys((row, slots, head), dtype).transpose(1, 2)
                keys = [whole.contiguous() if tokens > FEW_QUERIES else whole]
            for start in range(0, tokens, queries):
                some = (row, slice(start, start + queries), head)
                asked = q[some].to(dtype).transpose(1, 2)
                scores = torch.cat([asked @ each.transpose(2, 3) for each in keys], -1)
                if seen == "some":
                    hidden = (position < 0).unsqueeze(1) | (
                        position.unsqueeze(1) > max_position[some[:2]].unsqueeze(-1)
                    )
                    scores.masked_fill_(hidden.unsqueeze(1), -torch.inf)
                top, place = (x.transpose(1, 2) for x in _top_k_of_block(scores, k))
                if first or top.shape[-1] < k:
                    both = torch.cat([score[some], top], -1), torch.cat([index[some], place + first], -1)
                    top, place = top_k(*both, k)
                score[some], index[some] = top, place
    return SearchResult(score, index.masked_fill_(score == -torch.inf, -1))


def dense(
    q: Float[Tensor, "r t h e"], state: StoreState, k: int, max_position: Int[Tensor, "r t"]
) -> SearchResult:
    """Return all entries, for any k, so that attention covers the whole store."""
    hidden = (state.position < 0).unsqueeze(1) | (state.position.unsqueeze(1) > max_position.unsqueeze(-1))
    score = torch.zeros(hidden.shape, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    score = score.masked_fill_(hidden, -torch.inf).unsqueeze(2)
    return SearchResult(score, torch.empty(*score.shape[:3], 0, dtype=torch.int64, device=q.device))


@without_autocast
@torch.no_grad()
def _triton_search(
    q: Float[Tensor, "r t h e"], state: StoreState, k: int, max_position: Int[Tensor, "r t"]
) -> SearchResult:
    """Compute `exact` with the Triton kernels. Raise ValueError if they cannot run."""
    check_search(q, state, k, max_position)
    reason = dispatch.search_reason(q, state.k)
    if reason is not None:
        raise ValueError(f"search: 'triton' cannot run this call: {reason}")
    return SearchResult(*nearest(q, state.k, state.position, max_position, k))


def _make_triton_search() -> Search:
    """Return `_triton_search`, or raise ImportError if Triton is not installed."""
    if launch.kernels() is None:
        raise ImportError("search 'triton' needs Triton: pip install 'remanence[triton]'")
    return _triton_search


def _make_ivf_search() -> Search:
    from remanence.memory.ivf import IvfSearch

    return IvfSearch()


CAPTURED = (exact, dense, _triton_search)
"""The searches that a CUDA graph can capture, because they make no decisions on the host and use no data
except the store.
"""

SEARCHES: dict[str, Callable[[], Search]] = {
    "exact": lambda: exact,
    "dense": lambda: dense,
    "triton": _make_triton_search,
    "ivf": _make_ivf_search,
}
"""Functions that make a search, by name. An approximate search has an index, which can be rebuilt from the
state.
"""


@without_autocast
def attend(
    q: Float[Tensor, "r t h e"], found: SearchResult, state: StoreState, scale: Float[Tensor, " h"]
) -> tuple[Float[Tensor, "r t h e"], Float[Tensor, "r t h"]]:
    """Compute softmax attention over the entries found. Return the output and its log-sum-exp, which are 0
    and -inf where none was found.

    Scores are computed again from the stored keys, so that queries and the `scale` of each head get
    gradients. The store gets none.
    """
    if found.index.shape[-1] < found.score.shape[-1]:
        return _attend_to_all(q, found.score, state, scale)
    rows, heads = torch.arange(q.shape[0], device=q.device), torch.arange(q.shape[2], device=q.device)
    place = (rows.view(-1, 1, 1, 1), found.index.clamp(min=0), heads.view(-1, 1))
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = state.read_keys(place, wide).detach(), state.read_values(place, q.dtype).detach()
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
    """Combine local attention and attention over the memory, with the sigmoid of each head's `gate` as the
    share of the memory, or by a joint softmax if `gate` is None.

    Where the memory is empty, the result is local attention alone.
    """
    if gate is None:
        if local_lse is None:
            raise ValueError(
                "local_lse: expected local attention's log-sum-exp, which a joint softmax needs, got None"
            )
        return _merge_attention(local, local_lse, memory, memory_lse)[0]
    share = gate.sigmoid().expand(memory_lse.shape).masked_fill(memory_lse == -torch.inf, 0.0)
    return torch.lerp(local, memory, share.unsqueeze(-1).to(local.dtype))


def check_search(q: Tensor, state: StoreState, k: int, max_position: Tensor) -> None:
    """Raise ValueError if the shapes or k of a search are invalid."""
    if list(state.k.shape[2:]) != list(q.shape[2:]) or len(state.k) != len(q):
        raise ValueError(
            f"q: expected rows, heads and width of the store's {list(state.k.shape)}, got shape {list(q.shape)}"
        )
    if list(max_position.shape) != list(q.shape[:2]):
        raise ValueError(f"max_position: expected shape {list(q.shape[:2])}, got {list(max_position.shape)}")
    if not 0 < k <= state.size:
        raise ValueError(f"k: expected between 1 and the store's size of {state.size}, got {k}")


def _search_tiles(q: Tensor, entries: int) -> Iterator[tuple[slice, slice]]:
    """Yield the rows and heads that are searched together: all of them on a GPU or if there are few scores,
    otherwise one head at a time, so that the scores fit into the CPU's cache.
    """
    rows, tokens, heads, _ = q.shape
    if q.is_cuda or rows * heads * tokens * entries <= SCORES:
        yield slice(0, rows), slice(0, heads)
        return
    for row in range(rows):
        for head in range(heads):
            yield slice(row, row + 1), slice(head, head + 1)


def _converted_keys(
    state: StoreState, row: slice, slots: slice, head: slice, dtype: torch.dtype
) -> Iterator[Tensor]:
    """Yield the keys of some slots ``[r h n e]`` in another dtype, about `CONVERTED` numbers at once."""
    at_once = max(16, CONVERTED // max(1, state.k[row, :1, head].numel()))
    for first in range(slots.start, slots.stop, at_once):
        part = slice(first, min(first + at_once, slots.stop))
        yield state.read_keys((row, part, head), dtype).transpose(1, 2)


def _visible_entries(position: Tensor, max_position: Tensor) -> str:
    """Return how many entries of a block the queries may find: "all", "some" or "none". On a GPU always
    return "some", to avoid a synchronisation.
    """
    if position.is_cuda or not max_position.numel():
        return "some"
    if bool((position >= 0).all() & (position.max() <= max_position.min())):
        return "all"
    return "none" if not bool(((position >= 0) & (position <= max_position.max())).any()) else "some"


def _top_k_of_block(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best scores of ``[... n]`` (all n if there are fewer than k) and their indices."""
    entries = scores.shape[-1]
    size = 2 ** round(
        math.log2(max(entries / k, 1)) / 2
    )  # both rounds then sort about the same number of scores
    groups = -(-entries // size)
    if groups <= k:
        return top_k(
            scores, torch.arange(entries, device=scores.device).expand(scores.shape), min(k, entries)
        )
    grouped = F.pad(scores, (0, groups * size - entries), value=-torch.inf) if entries % size else scores
    grouped = grouped.unflatten(-1, (groups, size))
    every = torch.arange(groups, device=scores.device)
    top = top_k(grouped.amax(-1), every.expand(*scores.shape[:-1], -1), k)[1]
    chosen = grouped.gather(-2, top.unsqueeze(-1).expand(*top.shape, size)).flatten(-2)
    place = (top.unsqueeze(-1) * size + torch.arange(size, device=scores.device)).flatten(-2)
    return top_k(chosen, place, k)


def top_k(score: Tensor, index: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best scores and their indices. Of equal scores the lower index comes first, which
    torch.topk does not ensure.
    """
    if score.dtype == torch.float32:
        return unpack(pack(score, index).topk(k).values)
    order = index.argsort(dim=-1)
    order = order.gather(-1, score.gather(-1, order).argsort(dim=-1, descending=True, stable=True)[..., :k])
    return score.gather(-1, order), index.gather(-1, order)


def _softmax(score: Tensor, scale: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax weights and the log-sum-exp of scores ``[r t h n]``, in at least float32. If all
    scores of a query are hidden, neither the results nor their gradients are NaN.
    """
    score = score.to(torch.promote_types(score.dtype, torch.float32)) * scale.unsqueeze(-1)
    nothing = hidden.all(-1, keepdim=True)
    score = score.masked_fill(hidden, -torch.inf).masked_fill(nothing, 0.0)
    lse = score.logsumexp(-1, keepdim=True)
    weight = (score - lse).exp().masked_fill(nothing, 0.0)
    return weight, lse.masked_fill(nothing, -torch.inf).squeeze(-1)


def _attend_to_all(q: Tensor, mask: Tensor, state: StoreState, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `attend` over all entries, block by block. Without gradients, only the mask grows with the
    store.
    """
    whole: tuple[Tensor, Tensor] | None = None
    block = max(1, BLOCK // 256, SCORES // max(q[..., 0].numel(), 1))
    for first in range(0, state.size, block):
        slots = slice(first, first + block)
        index, wide = (slice(None), slots), torch.promote_types(q.dtype, torch.float32)
        k = state.read_keys(index, wide).detach().transpose(1, 2)
        v = state.read_values(index, q.dtype).detach().transpose(1, 2)
        score = (q.to(wide).transpose(1, 2) @ k.transpose(2, 3)).transpose(1, 2)
        weight, lse = _softmax(score, scale, mask[..., slots] == -torch.inf)
        part = (weight.to(v.dtype).transpose(1, 2) @ v).transpose(1, 2)
        whole = (part, lse) if whole is None else _merge_attention(*whole, part, lse)
    assert whole is not None
    return whole


def _merge_attention(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two attention outputs as one softmax over the keys of both. Return the output and its
    log-sum-exp.
    """
    empty = b_lse == -torch.inf
    share = (b_lse - a_lse).masked_fill(empty, -torch.inf).sigmoid()
    # This avoids logaddexp of two -inf, whose gradient is NaN.
    lse = torch.where(empty, a_lse, torch.logaddexp(a_lse, b_lse.masked_fill(empty, 0.0)))
    return torch.lerp(a, b, share.unsqueeze(-1).to(a.dtype)), lse
