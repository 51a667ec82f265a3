"""The layout of a call: from batched or packed tokens to one row per document, and back.

    state's tail     the call's tokens            padding
    [ k k k ]        [ k k k k k k k k k k ]      [ 0 0 ]        one row, split into chunks of c from the left

Chunk borders are counted from the start of the document, so a row starts with the tail of the incomplete chunk. Padding
is on the right, where causality keeps it from affecting other tokens, and an incomplete chunk never changes the state.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from remanence.ops.state import DIVERGENCE_LIMIT, Gates, MemoryState, Weights, is_within
from remanence.runtime.positions import advance_position, positions_of


class Layout:
    """The layout of one call, for backends that read positions on the host. `offsets` are the offsets of
    packed documents, or None if each batch row is one document.

    With `recomputes_tail`, rows of queries always keep slots for the tail, for a backend that recomputes every token
    of a row.
    """

    def __init__(
        self,
        batch: int,
        tokens: int,
        state: MemoryState,
        chunk: int,
        offsets: list[int] | None,
        *,
        recomputes_tail: bool = False,
    ) -> None:
        self.batch, self.tokens, self.chunk = batch, tokens, chunk
        self.tails = [position % chunk for position in positions_of(state.position)]
        self.is_batch = offsets is None
        if offsets is None:
            self.starts, self.counts = [row * tokens for row in range(batch)], [tokens] * batch
        else:
            self.starts, self.counts = offsets[:-1], [b - a for a, b in pairwise(offsets)]
        self.totals = [tail + count for tail, count in zip(self.tails, self.counts, strict=True)]
        longest = max(self.totals)
        self.chunks = max(1, -(-longest // chunk))
        # A single chunk is not padded, so that decoding computes only with the tokens so far.
        self.length = longest if self.chunks == 1 else self.chunks * chunk
        self.is_uniform = offsets is None and len(set(self.tails)) == 1
        self.query_offset = (
            self.tails[0] if self.is_uniform and self.chunks == 1 and not recomputes_tail else 0
        )
        self.device = state.position.device

    def rows_with_tail(self, tail: Tensor, x: Tensor) -> Tensor:
        """Return rows ``[r length ...]`` with the state's tail ``[r c-1 ...]``, followed by the call's tokens
        ``[b t ...]``.
        """
        if self.is_uniform:
            x = torch.cat([tail[:, : self.tails[0]], x], 1) if self.tails[0] else x
            return _pad_right(x, self.length)
        index = torch.full((len(self.tails), self.length), -1)
        first = tail.shape[0] * tail.shape[1]
        for row, (kept, start, count) in enumerate(zip(self.tails, self.starts, self.counts, strict=True)):
            index[row, :kept] = torch.arange(kept) + row * tail.shape[1]
            index[row, kept : kept + count] = torch.arange(count) + first + start
        return gather_or_zero(torch.cat([tail.flatten(0, 1), x.flatten(0, 1)]), index)

    def rows_with_tail_backward(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the tail and of the call's tokens, from the gradient of the result of
        `rows_with_tail` ``[r length ...]``.
        """
        tail = grad.new_zeros(len(self.tails), self.chunk - 1, *grad.shape[2:])
        for row, kept in enumerate(self.tails):
            tail[row, :kept] = grad[row, :kept]
        return tail, self._to_batch(grad, 0)

    def query_rows(self, q: Tensor) -> Tensor:
        """Apply `rows_with_tail` to queries, with zeros as the tail. Return q unchanged if all tokens are in
        one chunk and no slots for the tail are needed.
        """
        if self.query_offset:
            return q
        return self.rows_with_tail(q.new_zeros(len(self.tails), self.chunk - 1, *q.shape[2:]), q)

    def to_batch(self, y: Tensor) -> Tensor:
        """Return the call's tokens ``[b t ...]`` from rows in the layout of `query_rows`. Each of the two
        functions is the backward of the other.
        """
        return self._to_batch(y, self.query_offset)

    def _to_batch(self, y: Tensor, offset: int) -> Tensor:
        """Compute `to_batch` for rows that lack the first `offset` slots."""
        if self.is_uniform:
            start = self.tails[0] - offset
            return y if y.shape[1] == self.tokens else y[:, start : start + self.tokens]
        index = torch.empty(self.batch * self.tokens, dtype=torch.int64)
        for row, (kept, start, count) in enumerate(zip(self.tails, self.starts, self.counts, strict=True)):
            index[start : start + count] = torch.arange(count) + row * self.length + kept
        return gather_or_zero(y.flatten(0, 1), index.view(self.batch, self.tokens))

    def next_tail(self, x: Tensor) -> Tensor:
        """Return the tail of the next state ``[r c-1 ...]``: the incomplete chunk at the end of each row ``[r
        length ...]``.
        """
        if self.is_uniform:
            complete = self.totals[0] // self.chunk * self.chunk
            left = x[:, complete : self.totals[0]]
            # This is a copy: a view would keep all rows of the call in memory, and its strides could change the
            # rounding of later calls.
            is_full = left.shape[1] == self.chunk - 1
            return (
                left.clone(memory_format=torch.contiguous_format)
                if is_full
                else _pad_right(left, self.chunk - 1)
            )
        index = torch.full((len(self.tails), self.chunk - 1), -1)
        for row, total in enumerate(self.totals):
            complete = total // self.chunk * self.chunk
            index[row, : total - complete] = torch.arange(complete, total) + row * self.length
        return gather_or_zero(x.flatten(0, 1), index)

    def next_tail_backward(self, grad: Tensor, into: Tensor) -> None:
        """Add the gradient of the result of `next_tail` ``[r c-1 ...]`` to the gradient of its rows, `into`,
        in place.
        """
        for row, total in enumerate(self.totals):
            first = total // self.chunk * self.chunk
            into[row, first:total] += grad[row, : total - first]

    def complete_chunks(self) -> Tensor:
        """Return a mask ``[n r]``, true for chunks that are complete and therefore change the state."""
        totals = torch.tensor(self.totals, device=self.device)
        ends = torch.arange(1, self.chunks + 1, device=self.device) * self.chunk
        return ends.unsqueeze(-1) <= totals

    def _any_per_document(self, tokens: Tensor) -> Tensor:
        """Return whether a mask ``[b t]`` is true for any token of each document: ``[r]``."""
        if self.is_batch:
            return tokens.any(1)
        return torch.stack([part.any() for part in tokens[0].split(self.counts)])

    @property
    def completes_chunk(self) -> bool:
        """Whether the call completes at least one chunk, and therefore changes the layers of the state."""
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
        """Return the state after the call, from its keys, values and gates as rows ``[r length ...]``.
        `outputs` are the answers and the surprise ``[b t ...]``. `diverged` is set where the new layers or
        buffers, or an output for a token of the document, exceed `state.py: DIVERGENCE_LIMIT`. Padding is
        ignored, because its length depends on the other documents of the call.
        """
        bad = state.diverged
        for tensor, bound in zip(outputs, (DIVERGENCE_LIMIT, DIVERGENCE_LIMIT**2), strict=True):
            bad = bad | self._any_per_document(~is_within(tensor, bound).flatten(2).all(2))
        for tensor in (*layers, *buffers) if self.completes_chunk else ():
            bad = bad | ~is_within(tensor).flatten(1).all(1)
        position = advance_position(
            state.position, self.tokens if self.is_batch else torch.tensor(self.counts, device=self.device)
        )
        return MemoryState(
            layers, self.next_tail(k), self.next_tail(v), gates.map(self.next_tail), position, bad, buffers
        )


class SyncFreeLayout:
    """A `Layout` that never waits for the device (no synchronisation). Positions and indices stay on the
    device, where they are computed, and shapes are large enough for any position in a chunk, so a row may end
    with a chunk without tokens.

    With `aligned`, the caller guarantees that every row is at a chunk border, so that nothing has to be
    rearranged.
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
        self.is_uniform = offsets is None and aligned
        longest = tokens if offsets is None else max(b - a for a, b in pairwise(offsets))
        self.length = longest + (0 if aligned else chunk - 1)
        self.completes_chunk = self.length >= chunk
        self.counts: Tensor | int = tokens
        if self.is_uniform:
            self.totals = torch.full((self.count,), tokens, device=self.device)
            return
        if offsets is None:
            self.starts = torch.arange(self.count, device=self.device) * tokens
        else:
            places = _device_tensor(tuple(offsets), self.device)
            self.starts, self.counts = places[:-1], places.diff()
        self.tails = torch.zeros_like(self.starts) if aligned else state.position % chunk
        self.totals = self.tails + self.counts
        self.source_index, self.slot_index = self._source_index(), self._slot_index()

    def rows_with_tail(self, tail: Tensor, x: Tensor) -> Tensor:
        """Return rows ``[r length ...]`` with the state's tail ``[r c-1 ...]``, followed by the call's tokens
        ``[b t ...]``.
        """
        if self.is_uniform:
            return x
        both = torch.cat([x.flatten(0, 1), tail.to(x.dtype).flatten(0, 1)])
        return _GatherInjective.apply(both, self.source_index.flatten(), self.slot_index.flatten()).view(
            *self.source_index.shape, *x.shape[2:]
        )

    def query_rows(self, q: Tensor) -> Tensor:
        """Apply `rows_with_tail` to queries, with zeros as the tail."""
        return self.rows_with_tail(q.new_zeros(self.count, self.chunk - 1, *q.shape[2:]), q)

    def to_batch(self, y: Tensor) -> Tensor:
        """Return the call's tokens ``[b t ...]`` from rows ``[r length ...]``."""
        if self.is_uniform:
            return y
        tokens = self.batch * self.tokens
        index = torch.where(self.source_index < tokens, self.source_index, -1).flatten()
        return _GatherInjective.apply(y.flatten(0, 1), self.slot_index[:tokens], index).view(
            self.batch, self.tokens, *y.shape[2:]
        )

    def _source_index(self) -> Tensor:
        """Return an index ``[r length]`` with the token of each slot of the rows, or -1 for an empty slot.
        Tail slots are numbered after all tokens of the call.
        """
        place = torch.arange(self.length, device=self.device)
        tails, totals, row = (
            x.unsqueeze(-1) for x in (self.tails, self.totals, torch.arange(self.count, device=self.device))
        )
        new = torch.where(place < totals, self.starts.unsqueeze(-1) + place - tails, -1)
        return torch.where(place < tails, self.batch * self.tokens + row * (self.chunk - 1) + place, new)

    def _slot_index(self) -> Tensor:
        """Return the inverse of `_source_index`: the slot in the flattened rows ``[r length]`` of each token
        and then of each tail slot, or -1 if it is not used.
        """
        token = torch.arange(self.batch * self.tokens, device=self.device)
        row = torch.searchsorted(self.starts + self.counts, token, right=True)
        tokens = row * self.length + self.tails[row] + token - self.starts[row]
        slot = torch.arange(self.chunk - 1, device=self.device)
        first = torch.arange(self.count, device=self.device).unsqueeze(-1) * self.length
        return torch.cat([tokens, torch.where(slot < self.tails.unsqueeze(-1), first + slot, -1).flatten()])

    def next_tail(self, x: Tensor) -> Tensor:
        """Return the tail of the next state ``[r c-1 ...]``: the incomplete chunk at the end of each row ``[r
        length ...]``.
        """
        if self.is_uniform:
            return _pad_right(x[:, self.tokens // self.chunk * self.chunk :], self.chunk - 1)
        place = (self.totals // self.chunk * self.chunk).unsqueeze(-1) + torch.arange(
            self.chunk - 1, device=self.device
        )
        row = torch.arange(self.count, device=self.device).unsqueeze(-1)
        return gather_or_zero(
            x.flatten(0, 1), torch.where(place < self.totals.unsqueeze(-1), place + row * self.length, -1)
        )


class _GatherInjective(torch.autograd.Function):
    """Compute `gather_or_zero` for an index without repetitions, so that its backward is a gather with the
    inverse index.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return gather_or_zero(x, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gather_or_zero(grad, ctx.saved_tensors[0]), None, None


def _device_tensor(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return integers as a tensor on a device. The tensor is cached and shared by all layers, because each
    copy from the host synchronises.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    ):
        return torch.tensor(numbers, device=device)  # a fake tensor must not be cached
    return _cached_device_tensor(numbers, device)


@lru_cache(maxsize=16)
def _cached_device_tensor(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, device=device)


def to_rows(x: Tensor, offsets: list[int] | None) -> tuple[Tensor, Tensor | None]:
    """Return one padded row per document ``[r longest ...]`` from ``[b t ...]`` or packed ``[1 t ...]``, and
    the index with which `from_rows` undoes this (None if `offsets` is None and nothing was changed).
    """
    if offsets is None:
        return x, None
    counts = [b - a for a, b in pairwise(offsets)]
    longest = max(counts)
    index = torch.full((len(counts), longest), -1)
    back = torch.empty(offsets[-1], dtype=torch.int64)
    for row, (start, count) in enumerate(zip(offsets, counts, strict=False)):
        index[row, :count] = torch.arange(count) + start
        back[start : start + count] = torch.arange(count) + row * longest
    return gather_or_zero(x[0], index), back.to(x.device)


def from_rows(rows: Tensor, back: Tensor | None) -> Tensor:
    """Undo `to_rows`, given the index that it returned."""
    return rows if back is None else rows.flatten(0, 1).index_select(0, back).unsqueeze(0)


def pad_to_mask(packed: Tensor, mask: Tensor) -> Tensor:
    """Place packed tokens ``[1 tokens ...]`` where the mask ``[b t]`` is true. Return ``[b t ...]`` with
    zeros elsewhere.
    """
    index = mask.flatten().cumsum(0).mul(mask.flatten()).view_as(mask)
    zero = packed.new_zeros(1, *packed.shape[2:])
    return torch.cat([zero, packed[0]]).index_select(0, index.flatten()).view(*mask.shape, *packed.shape[2:])


def _pad_right(x: Tensor, length: int) -> Tensor:
    """Append zeros to the second axis of x, up to the given length."""
    missing = length - x.shape[1]
    return F.pad(x, [0, 0] * (x.dim() - 2) + [0, missing]) if missing else x


def gather_or_zero(rows: Tensor, index: Tensor) -> Tensor:
    """Return ``rows[index]``, with zeros where the index is -1."""
    zero = rows.new_zeros(1, *rows.shape[1:])
    picked = torch.cat([rows, zero]).index_select(0, index.flatten().to(rows.device) % (rows.shape[0] + 1))
    return picked if index.dim() == 1 else picked.view(*index.shape, *rows.shape[1:])


def gates_with_tail(layout: Layout | SyncFreeLayout, state: MemoryState, gates: Gates) -> Gates:
    """Apply `rows_with_tail` to each gate and its tail in the state. Gates that the rule does not use stay
    None.
    """
    pairs = zip(state.gates, gates, strict=True)
    return Gates._make(
        [
            layout.rows_with_tail(old, new) if old is not None and new is not None else None
            for old, new in pairs
        ]
    )
