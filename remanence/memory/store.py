"""The store of the kNN memory: key-value pairs of past tokens, as an explicit state. Search is in `search.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeVar

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

StoreDtype = Literal["auto", "int8"]
"""The dtype of stored keys and values: the model's, or int8 with a scale for each vector."""
StoreDevice = Literal["auto", "cpu"]
"""The device of stored keys and values: the model's, or the host."""
STORE_DEVICES: tuple[StoreDevice, ...] = ("auto", "cpu")
"""All values of `StoreDevice`."""
STORE_DTYPES: tuple[StoreDtype, ...] = ("auto", "int8")
"""All values of `StoreDtype`."""


def quantize(x: Float[Tensor, "*a e"]) -> tuple[Int[Tensor, "*a e"], Float[Tensor, "*a"]]:
    """Round vectors to int8: the largest absolute value of each becomes 127. Return the integers, and the float32
    factor of each vector with which they are multiplied to get the vectors back.
    """
    x = x.float()
    scale = x.abs().amax(-1) / 127
    steps = x / scale.where(scale > 0, 1.0).unsqueeze(-1)
    return steps.round().clamp(-127, 127).to(torch.int8), scale


def dequantize(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return stored vectors in a dtype; `scale` is the second result of `quantize`, or None for floats."""
    if scale is None:
        return x.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    return (x.to(wide) * scale.to(wide).unsqueeze(-1)).to(dtype)


EMPTY = (0, 0, -1, 0, 0, 0)
"""What an empty slot contains in each of `StoreState.entries`."""


class _StoreState(NamedTuple):
    k: Tensor
    v: Tensor
    position: Tensor
    importance: Tensor
    written: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


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
    k_scale, v_scale
        The factors of int8 keys and values ``[r size h]``, float32 (see `quantize`); None for floats.
    """

    __slots__ = ()

    def read_keys(self, index: Any, dtype: torch.dtype) -> Tensor:
        """The keys at an index of the axes ``[r size h]``, in a floating-point dtype, on the device of `position`."""
        return dequantize(*self._at(index, self.k, self.k_scale), dtype)

    def read_values(self, index: Any, dtype: torch.dtype) -> Tensor:
        """The values at an index of the axes ``[r size h]``, as `read_keys`."""
        return dequantize(*self._at(index, self.v, self.v_scale), dtype)

    def _at(self, index: Any, x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Stored vectors and their factors at an index, on the device of `position`."""
        if isinstance(index, tuple):
            index = tuple(part.to(x.device) if isinstance(part, Tensor) else part for part in index)
        move = lambda tensor: tensor[index].to(self.position.device, non_blocking=True)
        return move(x), None if scale is None else move(scale)

    def dequantized(self) -> StoreState:
        """Return the state with keys and values as float32, if they are int8; else the state itself."""
        if self.k_scale is None:
            return self
        k, v = self.read_keys((), torch.float32), self.read_values((), torch.float32)
        return self._replace(k=k, v=v, k_scale=None, v_scale=None)

    @property
    def entries(self) -> tuple[Tensor, ...]:
        """The tensors with one element per slot: `k`, `v`, `position`, `importance`, and the factors if there are."""
        scales = () if self.k_scale is None or self.v_scale is None else (self.k_scale, self.v_scale)
        return (self.k, self.v, self.position, self.importance, *scales)

    def with_entries(self, entries: Sequence[Tensor], written: Tensor) -> StoreState:
        """Return the state with other `entries`."""
        k, v, position, importance, *scales = entries
        k_scale, v_scale = scales or (None, None)
        return self._replace(
            k=k, v=v, position=position, importance=importance, written=written, k_scale=k_scale, v_scale=v_scale
        )  # fmt: skip

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
        longer = [
            F.pad(x, [0, 0] * (x.dim() - 2) + [0, more], value=EMPTY[index])
            for index, x in enumerate(self.entries)
        ]
        return self.with_entries(longer, self.written)

    def agrees(self, read: Tensor) -> Tensor:
        """Whether the state of each row is consistent with having read this many tokens ``[r]``."""
        inside = ((self.position >= -1) & (self.position < read.unsqueeze(-1))).all(1)
        return inside & (self.written >= 0) & (self.written <= read)


class HostStoreState(StoreState):
    """A `StoreState` whose keys and values stay in the memory of the host, pinned if the model is on a GPU. A search
    copies a block of them to the device of `position` at a time, attention only those that were found.
    """

    __slots__ = ()
    host = ("k", "v", "k_scale", "v_scale")

    def enlarge(self, size: int) -> StoreState:
        larger = super().enlarge(size)
        return larger if larger is self else _pinned(larger)

    def clone(self) -> HostStoreState:
        return _pinned(super().clone())


HostState = TypeVar("HostState", bound=StoreState)


def _pinned(state: HostState) -> HostState:
    """Return a state whose host tensors are in pinned memory, if its other tensors are on a GPU."""
    if not state.position.is_cuda:
        return state
    tensors = {name: getattr(state, name) for name in state.host}
    return state._replace(**{name: x.pin_memory() for name, x in tensors.items() if x is not None})


class Store:
    """A store of a given size, and how it evicts entries. Its entries are in a `StoreState`.

    evict
        "oldest": a ring buffer. "importance": the entry of lowest importance, stored or new, is dropped; of equally
        important entries, the older one. Importance halves every `half_life` tokens (None: never). It decays at the
        same rate for all entries, so their order stays the same. The store therefore always holds the most important
        of all entries, however they are split into calls. Entries are kept in the order
        in which they were written, so each call copies the whole store.
    dtype
        "auto": keys and values are stored in the dtype in which they are given. "int8": see `quantize`.
    device
        "auto": keys and values are on the device of the model. "cpu": see `HostStoreState`.
    """

    def __init__(
        self, size: int, heads: int, width: int, evict: Evict = "oldest", *,
        half_life: float | None = None, dtype: StoreDtype = "auto", device: StoreDevice = "auto",
    ) -> None:  # fmt: skip
        for name, value in (("size", size), ("heads", heads), ("width", width)):
            least = 0 if name == "size" else 1  # size 0: the store is always empty
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}")
        check_choice("evict", evict, EVICTIONS)
        if half_life is not None and not half_life > 0:
            raise ValueError(f"half_life: expected a number of tokens above 0, or None, got {half_life!r}")
        check_choice("store_dtype", dtype, STORE_DTYPES)
        self.size, self.heads, self.width, self.evict, self.half_life = size, heads, width, evict, half_life
        check_choice("store_device", device, STORE_DEVICES)
        self.dtype, self.device = dtype, device

    def with_size(self, size: int) -> Store:
        """Return a store like this one with another size."""
        return Store(
            size, self.heads, self.width, self.evict,
            half_life=self.half_life, dtype=self.dtype, device=self.device,
        )  # fmt: skip

    def start(self, rows: int, like: Tensor) -> StoreState:
        """Return the state of `rows` empty stores, on the device of `like`, and in its dtype unless the store has one
        of its own.
        """
        slots, device = (rows, self.size), like.device
        dtype = like.dtype if self.dtype == "auto" else torch.int8
        on_host = self.device == "cpu"
        home = torch.device("cpu") if on_host and not like.is_meta else device
        k, v = (torch.zeros(*slots, self.heads, self.width, dtype=dtype, device=home) for _ in range(2))
        scales: tuple[Tensor | None, ...] = (None, None)
        if self.dtype == "int8":
            scales = tuple(k.new_zeros(k.shape[:3], dtype=torch.float32) for _ in scales)
        position = torch.full(slots, -1, dtype=torch.int64, device=device)
        importance = torch.zeros(slots, dtype=torch.float32, device=device)
        written = torch.zeros(rows, dtype=torch.int64, device=device)
        if on_host:
            return _pinned(HostStoreState(k, v, position, importance, written, *scales))
        return StoreState(k, v, position, importance, written, *scales)

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
        scales: tuple[Tensor, ...] = ()
        if self.dtype == "int8":
            (k, k_scale), (v, v_scale) = quantize(k), quantize(v)
            scales = k_scale, v_scale
        new = (k.to(state.k.dtype), v.to(state.v.dtype), position, importance.to(torch.float32), *scales)
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
        for old, entries in zip(state.entries, new, strict=True):
            at = row.to(old.device), slot.to(old.device)
            shaped = real.view(*real.shape, *[1] * (old.dim() - 2)).to(old.device)
            old[at] = torch.where(shaped, entries[row, place].to(old.device), old[at])
        return state._replace(written=state.written + count)

    def _add_best(
        self, state: StoreState, new: tuple[Tensor, ...], mask: Tensor | None, count: Tensor
    ) -> StoreState:
        """Return a state with the most important of the stored and new entries, in the order in which they
        were written, with empty slots last.
        """
        position, importance = (
            torch.cat([old, entries], 1) for old, entries in zip(state[2:4], new[2:4], strict=True)
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
        for before, entries, nothing in zip(state.entries, new, EMPTY, strict=False):
            shape, home = [*place.shape, *[1] * (before.dim() - 2)], before.device
            held = before[row.to(home), old.to(home)]
            is_old = (place < self.size).view(shape).to(home)
            chosen = torch.where(is_old, held, entries[row, offered].to(home))
            kept.append(chosen.masked_fill(empty.view(shape).to(home), nothing))
        return state.with_entries(kept, state.written + count)

    def check_dtype(self, state: StoreState) -> None:
        """Raise ValueError if keys and values of the state are int8 and the store's are not, or the reverse."""
        if (state.k_scale is None) != (self.dtype == "auto"):
            expected = "floating-point" if self.dtype == "auto" else "int8"
            got = str(state.k.dtype).removeprefix("torch.")
            raise ValueError(f"state: expected a store of {expected} keys and values, got {got}")

    def _check(self, state: StoreState, k: Tensor, v: Tensor, position: Tensor) -> None:
        """Raise ValueError if the shapes of the new entries or of the state do not fit this store."""
        want = [state.k.shape[0], position.shape[-1], self.heads, self.width]
        for name, tensor, shape in (("k", k, want), ("v", v, want), ("position", position, want[:2])):
            if list(tensor.shape) != shape:
                raise ValueError(f"{name}: expected shape {shape}, got {list(tensor.shape)}")
        self.check_dtype(state)
        if list(state.k.shape[1:]) != [self.size, self.heads, self.width]:
            size = [self.size, self.heads, self.width]
            raise ValueError(
                f"state: expected a store of size, heads, width {size}, got {list(state.k.shape[1:])}"
            )
