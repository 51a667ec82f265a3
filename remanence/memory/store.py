"""The kNN memory's store: key-value pairs of tokens read, as explicit state. State in, state out; searching is
`search.py`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from remanence.runtime.choices import check_choice
from remanence.runtime.state import TensorTuple

Evict = Literal["oldest", "importance"]
EVICTIONS: tuple[Evict, ...] = ("oldest", "importance")


class _StoreState(NamedTuple):
    k: Tensor
    v: Tensor
    position: Tensor
    importance: Tensor
    written: Tensor


class StoreState(_StoreState, TensorTuple):
    """One store per row, wherever its document stands; returned by every call, never changed in place.

    k, v
        The stored pairs ``[r size h e]``, detached. Keys are not rotated (a place in the store is no place in the text)
        and are of unit length (they stay comparable while the weights that made them change).
    position
        Each entry's token, counted from its document's start, ``[r size]``; -1 is an empty slot.
    importance
        What eviction by importance goes by, ``[r size]``, float32.
    written
        Entries ever offered to each row, ``[r]``. Where the oldest are evicted, the next one's slot is
        ``written % size``.
    """

    __slots__ = ()

    @property
    def size(self) -> int:
        return self.k.shape[1]

    def widened(self, size: int) -> StoreState:
        """With empty slots behind, so many in all. Only of a store that was never full: in a ring that was, the next
        entry's slot depends on the size.
        """
        more = size - self.size
        if not more:
            return self
        k, v = (F.pad(x, (0, 0, 0, 0, 0, more)) for x in (self.k, self.v))
        position = F.pad(self.position, (0, more), value=-1)
        return StoreState(k, v, position, F.pad(self.importance, (0, more)), self.written)

    def agrees(self, read: Tensor) -> Tensor:
        inside = ((self.position >= -1) & (self.position < read.unsqueeze(-1))).all(1)
        return inside & (self.written >= 0) & (self.written <= read)


class Store:
    """How a store of a given size takes in new entries.

    evict
        "oldest": a ring. "importance": what is worth least goes, or does not come in; among equals the older. An
        entry's worth halves every `half_life` tokens (None: never); as all halve alike, their order stays, and the
        store always holds the best of everything it was given, whatever the calls it came in. The entries stand in the
        order of their writing, so each call copies the whole store.
    """

    def __init__(
        self, size: int, heads: int, width: int, evict: Evict = "oldest", *, half_life: float | None = None
    ) -> None:
        for name, value in (("size", size), ("heads", heads), ("width", width)):
            least = 0 if name == "size" else 1  # a store of 0 holds nothing
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}")
        check_choice("evict", evict, EVICTIONS)
        if half_life is not None and not half_life > 0:
            raise ValueError(f"half_life: expected a number of tokens above 0, or None, got {half_life!r}")
        self.size, self.heads, self.width, self.evict, self.half_life = size, heads, width, evict, half_life

    def resized(self, size: int) -> Store:
        """The same with another size."""
        return Store(size, self.heads, self.width, self.evict, half_life=self.half_life)

    def start(self, rows: int, like: Tensor) -> StoreState:
        """Empty stores, on `like`'s device and in its dtype."""
        k, v = (
            like.new_zeros(rows, self.size, self.heads, self.width, requires_grad=False) for _ in range(2)
        )
        position = torch.full((rows, self.size), -1, dtype=torch.int64, device=like.device)
        importance = torch.zeros(rows, self.size, dtype=torch.float32, device=like.device)
        return StoreState(
            k, v, position, importance, torch.zeros(rows, dtype=torch.int64, device=like.device)
        )

    @torch.no_grad()
    def add(
        self,
        state: StoreState,
        k: Float[Tensor, "r t h e"],
        v: Float[Tensor, "r t h e"],
        position: Int[Tensor, "r t"],
        importance: Float[Tensor, "r t"] | None = None,
        mask: Bool[Tensor, "r t"] | None = None,
        *,
        reuse: bool = False,
    ) -> StoreState:
        """The state after more entries, in the order given; those that `mask` leaves out are not written, in their rows
        only.

        `reuse` gives up the old state: a ring then writes into its tensors and does not copy the store for a few
        entries.
        """
        self._check(state, k, v, position)
        if importance is None:
            importance = torch.ones(position.shape, dtype=torch.float32, device=position.device)
        new = (k.to(state.k.dtype), v.to(state.v.dtype), position, importance.to(torch.float32))
        if k.shape[1] == 0 or self.size == 0:
            return state
        count = torch.full_like(state.written, k.shape[1]) if mask is None else mask.sum(1)
        if self.evict == "importance":
            return self._add_best(state, new, mask, count)
        return self._add_newest(state if reuse else state.clone(), new, mask, count)

    def _add_newest(
        self, state: StoreState, new: tuple[Tensor, ...], mask: Tensor | None, count: Tensor
    ) -> StoreState:
        """Into the ring, in place. Each row writes the same number of slots, the last of which is its newest entry's::

        slots   . . o o n n n .       n new    o one too many for this row's count: it is given what it holds
        """
        rows, given = new[2].shape
        most = min(given, self.size)
        place = torch.arange(given, device=count.device).expand(rows, -1)
        if mask is not None:
            place = mask.to(torch.uint8).argsort(dim=1, stable=True)  # what is written last, in its order
        place = place[:, given - most :]
        behind = torch.arange(most - 1, -1, -1, device=count.device)
        slot = (state.written + count).unsqueeze(-1) - 1 - behind
        slot = slot.remainder(self.size)
        real = behind < count.unsqueeze(-1)
        row = torch.arange(rows, device=count.device).unsqueeze(-1)
        for old, entries in zip(state[:4], new, strict=True):
            shaped = real.view(*real.shape, *[1] * (old.dim() - 2))
            old[row, slot] = torch.where(shaped, entries[row, place], old[row, slot])
        return state._replace(written=state.written + count)

    def _add_best(
        self, state: StoreState, new: tuple[Tensor, ...], mask: Tensor | None, count: Tensor
    ) -> StoreState:
        """Of all that is stored or offered, what is worth most, in the order of writing, the empty slots last."""
        position, importance = (
            torch.cat([old, entries], 1) for old, entries in zip(state[2:4], new[2:], strict=True)
        )
        real = position >= 0
        if mask is not None:
            real[:, self.size :] &= mask
        # log2(importance x 2^(-age / half_life)), less what is the same for all at any time. Zero importance is still
        # an entry.
        worth = importance.double().clamp(min=torch.finfo(torch.float32).tiny).log2()
        if self.half_life is not None:
            worth = worth + position / self.half_life
        worth = worth.masked_fill(~real, -torch.inf)
        newest_first = worth.flip(1).argsort(dim=1, descending=True, stable=True)[:, : self.size]
        place = worth.shape[1] - 1 - newest_first
        nowhere = worth.shape[1]
        place = place.masked_fill(~real.gather(1, place), nowhere).sort(1).values
        empty = place == nowhere
        place = place.masked_fill(empty, 0)
        old = place.clamp(max=self.size - 1)
        offered = (place - self.size).clamp(min=0)
        row = torch.arange(len(place), device=place.device).unsqueeze(-1)
        kept = []
        for before, entries, nothing in zip(state[:4], new, (0, 0, -1, 0), strict=True):
            shape = [*place.shape, *[1] * (before.dim() - 2)]
            chosen = torch.where((place < self.size).view(shape), before[row, old], entries[row, offered])
            kept.append(chosen.masked_fill(empty.view(shape), nothing))
        kept.append(state.written + count)
        return StoreState(*kept)

    def _check(self, state: StoreState, k: Tensor, v: Tensor, position: Tensor) -> None:
        want = [state.k.shape[0], position.shape[-1], self.heads, self.width]
        for name, tensor, shape in (("k", k, want), ("v", v, want), ("position", position, want[:2])):
            if list(tensor.shape) != shape:
                raise ValueError(f"{name}: expected shape {shape}, got {list(tensor.shape)}")
        if list(state.k.shape[1:]) != [self.size, self.heads, self.width]:
            size = [self.size, self.heads, self.width]
            raise ValueError(
                f"state: expected a store of size, heads, width {size}, got {list(state.k.shape[1:])}"
            )
