"""Approximate search by faiss's inverted files, for stores too large to be searched exactly; an extra.

An index is made from the state and only ever points into it: scores, positions and limits are the state's own, so that
a stale index can miss an entry but never return a wrong one. What was written since the index was made is searched
exactly.
"""

from __future__ import annotations

import logging
import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from remanence.memory.search import Found, best, check, exact
from remanence.memory.store import StoreState

log = logging.getLogger(__name__)

SMALLEST = 2**14
"""Entries below which exact search takes about as long, and finds all."""
SAMPLED = 32
"""Queries on which a new index is compared with exact search."""


class _Indexed(NamedTuple):
    position: Tensor
    """What stood in each slot when the index was made, ``[size]``."""
    heads: list[Any]
    sample: Tensor
    """Slots whose keys are compared, to know another document's store from this one, and their keys."""
    keys: Tensor


class InvertedFile:
    """A search with one index per row and head, each made anew when a quarter of its entries have changed.

    Attributes:
        probes: share of an index's cells that a query looks into.
        recall: share of exact search's entries that were found, on queries sampled when an index was last made;
            None before.
    """

    def __init__(self, probes: float = 1 / 16) -> None:
        self.probes = probes
        self._rows: dict[int, _Indexed] = {}
        self.recall: float | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copied or sent elsewhere without its indices, which are made anew from the state."""
        return {"probes": self.probes, "_rows": {}, "recall": self.recall}

    @torch.no_grad()
    def __call__(
        self, q: Float[Tensor, "r t h e"], state: StoreState, k: int, limit: Int[Tensor, "r t"]
    ) -> Found:
        check(q, state, k, limit)
        _faiss()
        made = [row for row in range(len(q)) if self._refresh(row, state)]
        found = self._search(q, state, k, limit)
        if made and q.shape[1]:
            self._measure(q, state, k, limit, found, made)
        return found

    def _refresh(self, row: int, state: StoreState) -> bool:
        """Make a row's index if it has none that fits; whether one was made."""
        position = state.position[row].to("cpu", copy=True)  # kept, while the state may be written to
        entries = int((position >= 0).sum())
        old = self._rows.get(row)
        if old is not None and len(old.position) < len(position):  # a store that has been given more slots
            more = torch.full((len(position) - len(old.position),), -1, device=position.device)
            old = self._rows[row] = old._replace(position=torch.cat([old.position, more]))
        if entries < SMALLEST:
            self._rows.pop(row, None)
            return False
        if old is not None and len(old.position) == len(position):
            same = position == old.position
            kept = same[old.sample]
            known = torch.equal(state.k[row, old.sample.to(state.k.device)].cpu()[kept], old.keys[kept])
            if known and int((~same).sum()) * 4 <= entries:
                return False
        slots = (position >= 0).nonzero().squeeze(-1)
        keys = state.k[row].float().cpu()
        heads = [self._build(keys[slots, head], slots) for head in range(keys.shape[1])]
        sample = slots[torch.linspace(0, len(slots) - 1, 64, device=slots.device).long()]
        self._rows[row] = _Indexed(position, heads, sample, state.k[row, sample.to(state.k.device)].cpu())
        return True

    def _build(self, keys: Tensor, slots: Tensor) -> Any:
        faiss, width = _faiss(), keys.shape[1]
        cells = int(2 * math.sqrt(len(keys)))
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(width), width, cells, faiss.METRIC_INNER_PRODUCT)
        # The least faiss asks for: an index does not live long.
        index.cp.max_points_per_centroid, index.cp.niter = (
            39,
            6,
        )
        data = keys.contiguous().numpy()
        index.train(data)
        index.add_with_ids(data, slots.numpy())
        index.nprobe = max(1, round(cells * self.probes))
        return index

    def _search(self, q: Tensor, state: StoreState, k: int, limit: Tensor) -> Found:
        """Row by row: what the index finds and is still there, and what has come since."""
        scores, indices = [], []
        for row in range(len(q)):
            one, asked, bound = state.rows(slice(row, row + 1)), q[row : row + 1], limit[row : row + 1]
            indexed = self._rows.get(row)
            if indexed is None:
                score, index = exact(asked, one, k, bound)
                scores.append(score)
                indices.append(index)
                continue
            made = indexed.position.to(q.device)
            unchanged = (one.position[0] == made) & (made >= 0)
            # Asking for more than k leaves enough where some are beyond a query's limit, or gone.
            slots = self._ask(indexed, asked[0], min(2 * k, state.size)).to(q.device)
            old = self._score(asked[0], one, slots, unchanged, bound[0])
            new = one._replace(position=one.position.masked_fill(unchanged, -1))
            score, index = exact(asked, new, k, bound)
            score, index = best(
                torch.cat([score[0], old], -1), torch.cat([index[0], slots], -1).clamp(min=0), k
            )
            scores.append(score.unsqueeze(0))
            indices.append(index.masked_fill(score == -torch.inf, -1).unsqueeze(0))
        return Found(torch.cat(scores), torch.cat(indices))

    def _ask(self, indexed: _Indexed, q: Tensor, k: int) -> Tensor:
        found = [
            index.search(q[:, head].float().cpu().contiguous().numpy(), k)[1]
            for head, index in enumerate(indexed.heads)
        ]
        return torch.stack([torch.from_numpy(slots) for slots in found], 1)

    def _score(self, q: Tensor, one: StoreState, slots: Tensor, unchanged: Tensor, limit: Tensor) -> Tensor:
        """Of slots ``[t h k]`` by the state's own keys; -inf where an entry is gone or beyond the limit."""
        place = slots.clamp(min=0)
        dtype = torch.promote_types(q.dtype, torch.float32)
        keys = one.k[0][place, torch.arange(q.shape[1], device=q.device).view(-1, 1)].to(dtype)
        score = (keys @ q.to(dtype).unsqueeze(-1)).squeeze(-1)
        good = (slots >= 0) & unchanged[place] & (one.position[0][place] <= limit.view(-1, 1, 1))
        return score.masked_fill(~good, -torch.inf)

    def _measure(
        self, q: Tensor, state: StoreState, k: int, limit: Tensor, found: Found, made: list[int]
    ) -> None:
        some = torch.linspace(0, q.shape[1] - 1, min(SAMPLED, q.shape[1]), device=q.device).long()
        rows = torch.tensor(made, device=q.device)
        truth = exact(q[rows][:, some], state.rows(rows), k, limit[rows][:, some])
        self.recall = recall(found.index[rows][:, some], truth.index)
        log.info("ivf: recall %.3f of exact search's %d on %d sampled queries", self.recall, k, len(some))


def _faiss() -> Any:
    try:
        import faiss
    except ImportError:
        raise ImportError("search 'ivf' needs faiss: pip install 'remanence[knn]'") from None
    return faiss


def recall(found: Int[Tensor, "*a k"], truth: Int[Tensor, "*a k"]) -> float:
    """Share of the slots in `truth` that are in `found` too."""
    hit = (truth.unsqueeze(-1) == found.unsqueeze(-2)).any(-1) & (truth >= 0)
    return float(hit.sum() / (truth >= 0).sum().clamp(min=1))
