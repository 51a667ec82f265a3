"""Approximate search with faiss's inverted file index (IVF), for stores too large for exact search. It needs
the extra `knn`.

An index is built from the state and holds only slots of it. Scores, positions and limits are computed from
the state, so that an outdated index can miss an entry but never return a wrong one. Entries written since the
index was built are searched exactly.
"""

from __future__ import annotations

import logging
import math
from types import ModuleType
from typing import NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from remanence.memory.search import SearchResult, check_search, exact, top_k
from remanence.memory.store import StoreState

log = logging.getLogger(__name__)

MIN_ENTRIES = 2**14
"""The number of entries below which exact search is about as fast, so that no index is built."""
SAMPLED_QUERIES = 32
"""The number of queries on which a new index is compared with exact search."""


class _Index(Protocol):
    """An index of faiss. `search` returns the scores and ids of the k best entries for each query."""

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]: ...


class _RowIndex(NamedTuple):
    """The indices of one row.

    position
        The position stored in each slot when the indices were built, ``[size]``.
    heads
        One index per head.
    sample, keys
        Some slots and their keys. They are compared to notice that the row now has the store of another document.
    """

    position: Tensor
    heads: list[_Index]
    sample: Tensor
    keys: Tensor


class IvfSearch:
    """A search with one index per row and head, rebuilt when a quarter of its entries have changed.

    Attributes:
        probes: fraction of the cells of an index that a query searches.
        recall: fraction of the entries of exact search that were found, on queries sampled when an index was last
            built; None before.
    """

    def __init__(self, probes: float = 1 / 16) -> None:
        self.probes = probes
        self._rows: dict[int, _RowIndex] = {}
        self.recall: float | None = None

    def __getstate__(self) -> dict[str, object]:
        """Return the attributes without indices, because copies and unpickled objects rebuild them from the
        state.
        """
        return {"probes": self.probes, "_rows": {}, "recall": self.recall}

    @torch.no_grad()
    def __call__(
        self, q: Float[Tensor, "r t h e"], state: StoreState, k: int, max_position: Int[Tensor, "r t"]
    ) -> SearchResult:
        check_search(q, state, k, max_position)
        _faiss()
        built = [row for row in range(len(q)) if self._refresh(row, state)]
        found = self._search(q, state, k, max_position)
        if built and q.shape[1]:
            self._measure(q, state, k, max_position, found, built)
        return found

    def _refresh(self, row: int, state: StoreState) -> bool:
        """Build the indices of a row if it has none or they are outdated. Return whether they were built."""
        position = state.position[row].to("cpu", copy=True)  # a copy: the state may be written in place
        entries = int((position >= 0).sum())
        old = self._rows.get(row)
        if old is not None and len(old.position) < len(position):  # the store was enlarged
            more = torch.full((len(position) - len(old.position),), -1, device=position.device)
            old = self._rows[row] = old._replace(position=torch.cat([old.position, more]))
        if entries < MIN_ENTRIES:
            self._rows.pop(row, None)
            return False
        if old is not None and len(old.position) == len(position):
            same = position == old.position
            kept = same[old.sample]
            known = torch.equal(_sampled_keys(state, row, old.sample)[kept], old.keys[kept])
            if known and int((~same).sum()) * 4 <= entries:
                return False
        slots = (position >= 0).nonzero().squeeze(-1)
        keys = state.read_keys(row, torch.float32).cpu()
        heads = [self._build(keys[slots, head], slots) for head in range(keys.shape[1])]
        sample = slots[torch.linspace(0, len(slots) - 1, 64, device=slots.device).long()]
        self._rows[row] = _RowIndex(position, heads, sample, _sampled_keys(state, row, sample))
        return True

    def _build(self, keys: Tensor, slots: Tensor) -> _Index:
        """Return a new index of the keys ``[n e]`` of one head, with their slots ``[n]`` as ids."""
        faiss, width = _faiss(), keys.shape[1]
        cells = int(2 * math.sqrt(len(keys)))
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(width), width, cells, faiss.METRIC_INNER_PRODUCT)
        # Training is kept short, because an index is soon rebuilt: faiss accepts no fewer points per centroid.
        index.cp.max_points_per_centroid, index.cp.niter = (
            39,
            6,
        )
        data = keys.contiguous().numpy()
        index.train(data)
        index.add_with_ids(data, slots.numpy())
        index.nprobe = max(1, round(cells * self.probes))
        return index

    def _search(self, q: Tensor, state: StoreState, k: int, max_position: Tensor) -> SearchResult:
        """Search row by row: unchanged entries with the index, and entries written since it was built
        exactly.
        """
        scores, indices = [], []
        for row in range(len(q)):
            one, asked, bound = state.rows(slice(row, row + 1)), q[row : row + 1], max_position[row : row + 1]
            indexed = self._rows.get(row)
            if indexed is None:
                score, index = exact(asked, one, k, bound)
                scores.append(score)
                indices.append(index)
                continue
            built = indexed.position.to(q.device)
            unchanged = (one.position[0] == built) & (built >= 0)
            # More than k entries are requested, because some may be after a query's `max_position` or overwritten.
            slots = self._search_index(indexed, asked[0], min(2 * k, state.size)).to(q.device)
            old = self._score(asked[0], one, slots, unchanged, bound[0])
            new = one._replace(position=one.position.masked_fill(unchanged, -1))
            score, index = exact(asked, new, k, bound)
            score, index = top_k(
                torch.cat([score[0], old], -1), torch.cat([index[0], slots], -1).clamp(min=0), k
            )
            scores.append(score.unsqueeze(0))
            indices.append(index.masked_fill(score == -torch.inf, -1).unsqueeze(0))
        return SearchResult(torch.cat(scores), torch.cat(indices))

    def _search_index(self, indexed: _RowIndex, q: Tensor, k: int) -> Tensor:
        """Return the slots ``[t h k]`` that the indices find for the queries of one row, -1 where fewer than
        k are found.
        """
        found = [
            index.search(q[:, head].float().cpu().contiguous().numpy(), k)[1]
            for head, index in enumerate(indexed.heads)
        ]
        return torch.stack([torch.from_numpy(slots) for slots in found], 1)

    def _score(
        self, q: Tensor, one: StoreState, slots: Tensor, unchanged: Tensor, max_position: Tensor
    ) -> Tensor:
        """Return the scores of slots ``[t h k]``, computed with the keys of the state. They are -inf for
        entries that were overwritten or are after `max_position`.
        """
        place = slots.clamp(min=0)
        dtype = torch.promote_types(q.dtype, torch.float32)
        keys = one.read_keys((0, place, torch.arange(q.shape[1], device=q.device).view(-1, 1)), dtype)
        score = (keys @ q.to(dtype).unsqueeze(-1)).squeeze(-1)
        good = (slots >= 0) & unchanged[place] & (one.position[0][place] <= max_position.view(-1, 1, 1))
        return score.masked_fill(~good, -torch.inf)

    def _measure(
        self,
        q: Tensor,
        state: StoreState,
        k: int,
        max_position: Tensor,
        found: SearchResult,
        built: list[int],
    ) -> None:
        """Set `recall` by comparing the result with exact search, on some queries of the rows whose indices
        were just built.
        """
        some = torch.linspace(0, q.shape[1] - 1, min(SAMPLED_QUERIES, q.shape[1]), device=q.device).long()
        rows = torch.tensor(built, device=q.device)
        truth = exact(q[rows][:, some], state.rows(rows), k, max_position[rows][:, some])
        self.recall = recall(found.index[rows][:, some], truth.index)
        log.info("ivf: recall %.3f of exact search's %d on %d sampled queries", self.recall, k, len(some))


def _sampled_keys(state: StoreState, row: int, sample: Tensor) -> Tensor:
    """Return the keys of some slots of a row, on the CPU."""
    return state.read_keys((row, sample.to(state.k.device)), torch.float32).cpu()


def _faiss() -> ModuleType:
    """Return the module faiss, or raise an ImportError that says how to install it."""
    try:
        import faiss
    except ImportError:
        raise ImportError("search 'ivf' needs faiss: pip install 'remanence[knn]'") from None
    return faiss


def recall(found: Int[Tensor, "*a k"], truth: Int[Tensor, "*a k"]) -> float:
    """Return the fraction of the slots in `truth` that are also in `found`. Slots of -1 in `truth` are not
    counted.
    """
    hit = (truth.unsqueeze(-1) == found.unsqueeze(-2)).any(-1) & (truth >= 0)
    return float(hit.sum() / (truth >= 0).sum().clamp(min=1))
