"""The store of the kNN memory: key-value pairs of past tokens, as an explicit state. Search is in `search.py`."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from remanence.runtime.choices import check_choice
from remanence.runtime.state import TensorTuple

Evict = Literal["oldest", "importance"]
"""The entry that is dropped from a full store: the oldest, or the one of lowest importance."""
EVICTIONS: tuple[Evict, ...] = ("oldest", "importance")
"""All values of `Evict`."""


class _StoreState(NamedTuple):
    k: Tensor
    v: Tensor
    position: Tensor
    importance: Tensor
    written: Tensor


class StoreState(_StoreState, TensorTuple):
    """The state of one store per row. Rows may be at different positions of their documents.

    k, v
        The stored pairs ``[r size h e]``, detached. Keys are not rotated, as slots are not positions in the text, and
        have unit length, so that they stay comparable while the projections are trained.
    position
        Position of the token of each entry in its document, ``[r size]``; -1 for an empty slot.
    importance
        Importance of each entry, ``[r size]``, float32: eviction by importance drops the lowest.
    written
        Number of entries ever added to each row, ``[r]``. If the oldest entry is evicted, the next entry's slot is
        ``written % size``.
    """

    __slots__ = ()

    @property
    def size(self) -> int:
        """The number of slots."""
        return self.k.shape[1]

    def enlarge(self, size: int) -> StoreState:
        """Return the state with empty slots appended, up to `size` slots. This is valid only for a store that
        was never full, because the next slot of a ring buffer that was full depends on its size.
        """
        more = size - self.size
        if not more:
            return self
        k, v = (F.pad(x, (0, 0, 0, 0, 0, more)) for x in (self.k, self.v))
        position = F.pad(self.position, (0, more), value=-1)
        return StoreState(k, v, position, F.pad(self.importance, (0, more)), self.written)

    def agrees(self, read: Tensor) -> Tensor:
        """Whether the state of each row is consistent with having read this many tokens ``[r]``."""
        inside = ((self.position >= -1) & (self.position < read.unsqueeze(-1))).all(1)
        return inside & (self.written >= 0) & (self.written <= read)


class Store:
    """A store of a given size, and how it evicts entries. Its entries are in a `StoreState`.

    evict
        "oldest": a ring buffer. "importance": the entry of lowest importance, stored or new, is dropped; of equally
        important entries, the older one. Importance halves every `half_life` tokens (None: never). It decays at the
        same rate for all entries, so their order stays the same. The store therefore always holds the most important
        of all entries, however they are split into calls. Entries are kept in the order
        in which they were written, so each call copies the whole store.
    """

    def __init__(
        self, size: int, heads: int, width: int, evict: Evict = "oldest", *, half_life: float | None = None
    ) -> None:
        for name, value in (("size", size), ("heads", heads), ("width", width)):
            least = 0 if name == "size" else 1  # size 0: the store is always empty
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}")
        check_choice("evict", evict, EVICTIONS)
        if half_life is not None and not half_life > 0:
            raise ValueError(f"half_life: expected a number of tokens above 0, or None, got {half_life!r}")
        self.size, self.heads, self.width, self.evict, self.half_life = size, heads, width, evict, half_life

    def with_size(self, size: int) -> Store:
        """Return a store like this one with another size."""
        return Store(size, self.heads, self.width, self.evict, half_life=self.half_life)

    def start(self, rows: int, like: Tensor) -> StoreState:
        """Return the state of `rows` empty stores, on the device and in the dtype of `like`."""
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
        """Return the state after adding new entries in the given order. Entries where `mask` is false are not
        written.

        With `reuse`, the old state may be overwritten: a ring buffer is then changed in place and not copied.
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
        """Write into the ring, in place. Each row writes the same number of slots, the last of which is for its newest
        entry::

        slots   . . o o n n n .       n: new entry    o: more than this row's count, written with its old content
        """
        rows, given = new[2].shape
        most = min(given, self.size)
        place = torch.arange(given, device=count.device).expand(rows, -1)
        if mask is not None:
            place = mask.to(torch.uint8).argsort(dim=1, stable=True)  # unmasked entries last, in their order
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
        """Return a state with the most important of the stored and new entries, in the order in which they
        were written, with empty slots last.
        """
        position, importance = (
            torch.cat([old, entries], 1) for old, entries in zip(state[2:4], new[2:], strict=True)
        )
        real = position >= 0
        if mask is not None:
            real[:, self.size :] &= mask
        # log2(importance * 2^(-age / half_life)) up to a constant that is the same for all entries. Entries of zero
        # importance are kept above empty slots.
        priority = importance.double().clamp(min=torch.finfo(torch.float32).tiny).log2()
        if self.half_life is not None:
            priority = priority + position / self.half_life
        priority = priority.masked_fill(~real, -torch.inf)
        newest_first = priority.flip(1).argsort(dim=1, descending=True, stable=True)[:, : self.size]
        place = priority.shape[1] - 1 - newest_first
        nowhere = priority.shape[1]
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
        """Raise ValueError if the shapes of the new entries or of the state do not fit this store."""
        want = [state.k.shape[0], position.shape[-1], self.heads, self.width]
        for name, tensor, shape in (("k", k, want), ("v", v, want), ("position", position, want[:2])):
            if list(tensor.shape) != shape:
                raise ValueError(f"{name}: expected shape {shape}, got {list(tensor.shape)}")
        if list(state.k.shape[1:]) != [self.size, self.heads, self.width]:
            size = [self.size, self.heads, self.width]
            raise ValueError(
                f"state: expected a store of size, heads, width {size}, got {list(state.k.shape[1:])}"
            )
