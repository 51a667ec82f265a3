"""Where each token stands: from a call's tokens to one row per document, behind what that document had already read,
and back.

    state's tail     the call's tokens            padding
    [ k k k ]        [ k k k k k k k k k k ]      [ 0 0 ]        one row, cut into chunks of c from its left end

Chunk borders count from the document's start, so a row begins with the tail of its open chunk. Padding stands at the
right, where the closed form's triangles keep it from everything before it, and a chunk that is not complete never
changes the state.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from remanence.ops.state import LARGEST, Gates, MemoryState, Weights, within
from remanence.runtime.positions import advance_position, positions_of


class Layout:
    """One call's arrangement. `offsets` are the packed documents' borders in the only batch row; None means a row each.

    `replay` keeps the tail's places among the queries, for a tier that goes through every token of a row again.
    """

    def __init__(
        self,
        batch: int,
        tokens: int,
        state: MemoryState,
        chunk: int,
        offsets: list[int] | None,
        *,
        replay: bool = False,
    ) -> None:
        self.batch, self.tokens, self.chunk = batch, tokens, chunk
        self.tails = [position % chunk for position in positions_of(state.position)]
        self.equal = offsets is None
        if offsets is None:
            self.starts, self.counts = [row * tokens for row in range(batch)], [tokens] * batch
        else:
            self.starts, self.counts = offsets[:-1], [b - a for a, b in pairwise(offsets)]
        self.totals = [tail + count for tail, count in zip(self.tails, self.counts, strict=True)]
        longest = max(self.totals)
        self.chunks = max(1, -(-longest // chunk))
        # A single chunk is not padded: while decoding, the closed form is only as large as what has been read of it.
        self.length = longest if self.chunks == 1 else self.chunks * chunk
        self.uniform = offsets is None and len(set(self.tails)) == 1
        self.lead = self.tails[0] if self.uniform and self.chunks == 1 and not replay else 0
        self.device = state.position.device

    def rows(self, tail: Tensor, x: Tensor) -> Tensor:
        """The call's ``[b t ...]`` behind the state's ``[r c-1 ...]``, as ``[r length ...]``."""
        if self.uniform:
            x = torch.cat([tail[:, : self.tails[0]], x], 1) if self.tails[0] else x
            return _pad(x, self.length)
        index = torch.full((len(self.tails), self.length), -1)
        first = tail.shape[0] * tail.shape[1]
        for row, (kept, start, count) in enumerate(zip(self.tails, self.starts, self.counts, strict=True)):
            index[row, :kept] = torch.arange(kept) + row * tail.shape[1]
            index[row, kept : kept + count] = torch.arange(count) + first + start
        return pick(torch.cat([tail.flatten(0, 1), x.flatten(0, 1)]), index)

    def rows_backward(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """From the gradient of `rows` ``[r length ...]`` to those of the state's tail and of the call's tokens."""
        tail = grad.new_zeros(len(self.tails), self.chunk - 1, *grad.shape[2:])
        for row, kept in enumerate(self.tails):
            tail[row, :kept] = grad[row, :kept]
        return tail, self._back(grad, 0)

    def queries(self, q: Tensor) -> Tensor:
        """Like `rows`, but without the tail's slots if a call lies in one chunk: their answers are not needed."""
        if self.lead:
            return q
        return self.rows(q.new_zeros(len(self.tails), self.chunk - 1, *q.shape[2:]), q)

    def back(self, y: Tensor) -> Tensor:
        """From what `queries` arranged to the call's ``[b t ...]``. Each is the other's backward."""
        return self._back(y, self.lead)

    def _back(self, y: Tensor, lead: int) -> Tensor:
        if self.uniform:
            start = self.tails[0] - lead
            return y if y.shape[1] == self.tokens else y[:, start : start + self.tokens]
        index = torch.empty(self.batch * self.tokens, dtype=torch.int64)
        for row, (kept, start, count) in enumerate(zip(self.tails, self.starts, self.counts, strict=True)):
            index[start : start + count] = torch.arange(count) + row * self.length + kept
        return pick(y.flatten(0, 1), index.view(self.batch, self.tokens))

    def tail(self, x: Tensor) -> Tensor:
        """What is left open at each row's end, ``[r length ...]`` to ``[r c-1 ...]``."""
        if self.uniform:
            complete = self.totals[0] // self.chunk * self.chunk
            left = x[:, complete : self.totals[0]]
            # Never a view: a state would keep all of a call's rows, and go on with other roundings than after it was
            # saved.
            whole = left.shape[1] == self.chunk - 1
            return left.clone(memory_format=torch.contiguous_format) if whole else _pad(left, self.chunk - 1)
        index = torch.full((len(self.tails), self.chunk - 1), -1)
        for row, total in enumerate(self.totals):
            complete = total // self.chunk * self.chunk
            index[row, : total - complete] = torch.arange(complete, total) + row * self.length
        return pick(x.flatten(0, 1), index)

    def tail_backward(self, grad: Tensor, into: Tensor) -> None:
        """Add the gradient of `tail` ``[r c-1 ...]`` to that of the rows it was cut from."""
        for row, total in enumerate(self.totals):
            first = total // self.chunk * self.chunk
            into[row, first:total] += grad[row, : total - first]

    def complete(self) -> Tensor:
        """``[n r]``: which chunks are whole, and so change the state."""
        totals = torch.tensor(self.totals, device=self.device)
        ends = torch.arange(1, self.chunks + 1, device=self.device) * self.chunk
        return ends.unsqueeze(-1) <= totals

    def _any(self, tokens: Tensor) -> Tensor:
        """Whether it is true ``[b t]`` of any token of a document, ``[r]``."""
        if self.equal:
            return tokens.any(1)
        return torch.stack([part.any() for part in tokens[0].split(self.counts)])

    @property
    def folds(self) -> bool:
        """Whether any chunk is completed, that is, whether the call changes a state's layers at all."""
        return any(total >= self.chunk for total in self.totals)

    def next_state(
        self,
        state: MemoryState,
        layers: Weights,
        k: Tensor,
        v: Tensor,
        gates: Gates,
        outputs: tuple[Tensor, Tensor],
        buffers: Weights = (),
    ) -> MemoryState:
        """The state after the call, from its rows ``[r length ...]``. It is flagged where the new layers or buffers, or
        an output ``[b t ...]`` of a document's own tokens, are too large (`state.py: LARGEST`). Padding does not count:
        how long it is depends on the other documents of the call.
        """
        bad = state.diverged
        for tensor, bound in zip(outputs, (LARGEST, LARGEST**2), strict=True):
            bad = bad | self._any(~within(tensor, bound).flatten(2).all(2))
        for tensor in (*layers, *buffers) if self.folds else ():
            bad = bad | ~within(tensor).flatten(1).all(1)
        position = advance_position(
            state.position, self.tokens if self.equal else torch.tensor(self.counts, device=self.device)
        )
        return MemoryState(layers, self.tail(k), self.tail(v), gates.map(self.tail), position, bad, buffers)


class DeviceLayout:
    """`Layout`'s arrangement where nothing is asked of the device: how far each row stands in its chunk is a tensor
    there, and shapes allow for any of it. A row may end with a chunk that holds no token.

    `aligned` is the caller's word that every row stands at a chunk's border, which spares the rearrangement.
    """

    def __init__(
        self,
        batch: int,
        tokens: int,
        state: MemoryState,
        chunk: int,
        offsets: list[int] | None,
        aligned: bool,
    ) -> None:
        self.batch, self.tokens, self.chunk, self.aligned = batch, tokens, chunk, aligned
        self.device, self.count = state.position.device, len(state.position)
        self.uniform = offsets is None and aligned
        longest = tokens if offsets is None else max(b - a for a, b in pairwise(offsets))
        self.length = longest + (0 if aligned else chunk - 1)
        self.folds = self.length >= chunk
        self.counts: Tensor | int = tokens
        if self.uniform:
            self.totals = torch.full((self.count,), tokens, device=self.device)
            return
        if offsets is None:
            self.starts = torch.arange(self.count, device=self.device) * tokens
        else:
            places = _on_device(tuple(offsets), self.device)
            self.starts, self.counts = places[:-1], places.diff()
        self.tails = torch.zeros_like(self.starts) if aligned else state.position % chunk
        self.totals = self.tails + self.counts
        self.there, self.here = self._there(), self._here()

    def rows(self, tail: Tensor, x: Tensor) -> Tensor:
        """The call's ``[b t ...]`` behind the state's ``[r c-1 ...]``, as ``[r length ...]``."""
        if self.uniform:
            return x
        both = torch.cat([x.flatten(0, 1), tail.to(x.dtype).flatten(0, 1)])
        return _Moved.apply(both, self.there.flatten(), self.here.flatten()).view(
            *self.there.shape, *x.shape[2:]
        )

    def queries(self, q: Tensor) -> Tensor:
        return self.rows(q.new_zeros(self.count, self.chunk - 1, *q.shape[2:]), q)

    def back(self, y: Tensor) -> Tensor:
        """From ``[r length ...]`` to the call's ``[b t ...]``."""
        if self.uniform:
            return y
        tokens = self.batch * self.tokens
        there = torch.where(self.there < tokens, self.there, -1).flatten()
        return _Moved.apply(y.flatten(0, 1), self.here[:tokens], there).view(
            self.batch, self.tokens, *y.shape[2:]
        )

    def _there(self) -> Tensor:
        """``[r length]``: the index of the call's token (then of the tail's slots) at each slot of a row; -1: none."""
        place = torch.arange(self.length, device=self.device)
        tails, totals, row = (
            x.unsqueeze(-1) for x in (self.tails, self.totals, torch.arange(self.count, device=self.device))
        )
        new = torch.where(place < totals, self.starts.unsqueeze(-1) + place - tails, -1)
        return torch.where(place < tails, self.batch * self.tokens + row * (self.chunk - 1) + place, new)

    def _here(self) -> Tensor:
        """The way back: where in the rows ``[r length]`` each token and each slot of the tail stands; -1: nowhere."""
        token = torch.arange(self.batch * self.tokens, device=self.device)
        row = torch.searchsorted(self.starts + self.counts, token, right=True)
        tokens = row * self.length + self.tails[row] + token - self.starts[row]
        slot = torch.arange(self.chunk - 1, device=self.device)
        first = torch.arange(self.count, device=self.device).unsqueeze(-1) * self.length
        return torch.cat([tokens, torch.where(slot < self.tails.unsqueeze(-1), first + slot, -1).flatten()])

    def tail(self, x: Tensor) -> Tensor:
        """What is left open at each row's end, ``[r length ...]`` to ``[r c-1 ...]``."""
        if self.uniform:
            return _pad(x[:, self.tokens // self.chunk * self.chunk :], self.chunk - 1)
        place = (self.totals // self.chunk * self.chunk).unsqueeze(-1) + torch.arange(
            self.chunk - 1, device=self.device
        )
        row = torch.arange(self.count, device=self.device).unsqueeze(-1)
        return pick(
            x.flatten(0, 1), torch.where(place < self.totals.unsqueeze(-1), place + row * self.length, -1)
        )


class _Moved(torch.autograd.Function):
    """`pick`, of what stands at no more than one place: its gradient is picked back, not added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, here: Tensor) -> Tensor:
        ctx.save_for_backward(here)
        return pick(x, there)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return pick(grad, ctx.saved_tensors[0]), None, None


def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Copied once for all the layers that read the same documents: each copy from the host waits for the device."""
    if (
        torch.compiler.is_compiling()
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    ):
        return torch.tensor(numbers, device=device)  # a tensor without numbers must not be kept
    return _copied(numbers, device)


@lru_cache(maxsize=16)
def _copied(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, device=device)


def to_rows(x: Tensor, offsets: list[int] | None) -> tuple[Tensor, Tensor | None]:
    """``[b t ...]`` or packed ``[1 t ...]`` to one padded row per document ``[r longest ...]``, and the index back."""
    if offsets is None:
        return x, None
    counts = [b - a for a, b in pairwise(offsets)]
    longest = max(counts)
    index = torch.full((len(counts), longest), -1)
    back = torch.empty(offsets[-1], dtype=torch.int64)
    for row, (start, count) in enumerate(zip(offsets, counts, strict=False)):
        index[row, :count] = torch.arange(count) + start
        back[start : start + count] = torch.arange(count) + row * longest
    return pick(x[0], index), back.to(x.device)


def from_rows(rows: Tensor, back: Tensor | None) -> Tensor:
    """Undo `to_rows`."""
    return rows if back is None else rows.flatten(0, 1).index_select(0, back).unsqueeze(0)


def repad(packed: Tensor, mask: Tensor) -> Tensor:
    """``[1 tokens ...]`` back to where the mask is true, zeros elsewhere."""
    index = mask.flatten().cumsum(0).mul(mask.flatten()).view_as(mask)
    zero = packed.new_zeros(1, *packed.shape[2:])
    return torch.cat([zero, packed[0]]).index_select(0, index.flatten()).view(*mask.shape, *packed.shape[2:])


def _pad(x: Tensor, length: int) -> Tensor:
    missing = length - x.shape[1]
    return F.pad(x, [0, 0] * (x.dim() - 2) + [0, missing]) if missing else x


def pick(rows: Tensor, index: Tensor) -> Tensor:
    """``rows[index]``, with zeros where the index is -1."""
    zero = rows.new_zeros(1, *rows.shape[1:])
    picked = torch.cat([rows, zero]).index_select(0, index.flatten().to(rows.device) % (rows.shape[0] + 1))
    return picked if index.dim() == 1 else picked.view(*index.shape, *rows.shape[1:])


def gates_rows(layout: Layout | DeviceLayout, state: MemoryState, gates: Gates) -> Gates:
    pairs = zip(state.gates, gates, strict=True)
    return Gates._make(
        [layout.rows(old, new) if old is not None and new is not None else None for old, new in pairs]
    )
