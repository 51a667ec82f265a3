"""Attention for decoding: one token at a time, with keys and values in buffers of fixed shape."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from remanence.layers.attention import Attention, AttentionState, SegmentAttention, SegmentState
from remanence.layers.softmax import masked_softmax
from remanence.ops import decode

INITIAL_CAPACITY = 256
"""The initial capacity of the buffers of full attention, in tokens. When they are full, the decoder starts
again with twice the capacity.
"""

Value = TypeVar("Value")


class StepContext(NamedTuple):
    """The context of one decoding step: `position` ``[r]``, the number of tokens that each row has read;
    `active` ``[r]``, true for rows that read a token in this step; `shared`, values that the layers share;
    and `text`, the tokens themselves (`mixers/base.py: Text`).
    """

    position: Tensor
    active: Tensor
    shared: dict[Hashable, Any]
    text: Any = None

    def cached(self, *key: Hashable, make: Callable[[], Value]) -> Value:
        """Return the shared value of this key. The first layer that needs it computes it with `make`."""
        if key not in self.shared:
            self.shared[key] = make()
        return self.shared[key]


def make_buffers(prefix: tuple[Tensor, Tensor], rows: int, count: int) -> tuple[Tensor, Tensor]:
    """Return buffers for keys and values ``[r p+count h e]`` that begin with the keys and values ``[p h e]``
    of the persistent tokens.
    """
    k, v = (x.new_zeros(rows, x.shape[0] + count, *x.shape[1:]) for x in prefix)
    for buffer, x in zip((k, v), prefix, strict=True):
        buffer[:, : x.shape[0]] = x
    return k, v


class WindowDecoder:
    """Sliding-window or full attention, one token at a time. Keys and values are in a ring buffer, where the
    slot of a token is its position modulo the buffer's size. Keys are already rotated, so their order in the
    buffer does not matter.
    """

    def __init__(self, layer: Attention, state: AttentionState) -> None:
        self.layer, self.slack = layer, state.slack.clone()
        self.start_position = state.position.clone()
        rows, past = state.k.shape[:2]
        self.size = past + 1 if layer.window else 2 * max(past, INITIAL_CAPACITY // 2)
        self.capacity_left = None if layer.window else self.size - past
        prefix = layer.persistent_keys_values(state.k)
        self.persistent = prefix[0].shape[0]
        self.k, self.v = make_buffers(prefix, rows, self.size)
        for buffer, x in ((self.k, state.k), (self.v, state.v)):
            buffer[self._ring_index(state.position, past)] = x.detach()

    def _ring_index(self, position: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the row and slot indices of the last `count` tokens, the newest last."""
        token = position.unsqueeze(-1) + torch.arange(-count, 0, device=position.device)
        return torch.arange(len(position), device=position.device).unsqueeze(
            -1
        ), self.persistent + token % self.size

    def _mask(self, position: Tensor) -> Tensor:
        """Return a mask ``[r p+size]`` of the slots that a token at this position attends to."""
        position = position.unsqueeze(-1)
        age = (position - torch.arange(self.size, device=position.device)) % self.size
        seen = (age <= position) & (age < (self.layer.window or self.size))
        return torch.cat([seen.new_ones(len(seen), self.persistent), seen], 1)

    def step(self, x: Tensor, ctx: StepContext) -> Tensor:
        """Return the output ``[r 1 d]`` for one token per row, after storing its key and value."""
        return self.layer.project_output(self.attend(x, ctx)[0])

    def attend(
        self, x: Tensor, ctx: StepContext, *, lse: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the output of `step` before its projection, then the token's query, key (both not rotated)
        and value ``[r 1 h e]``. With `lse`, the log-sum-exp is appended to the output.
        """
        layer, shape = self.layer, (self.size, self.persistent, self.layer.window)
        q, (k, v) = layer.queries(x), layer.keys_values(x)
        rotary = ctx.cached(
            layer.width, layer.rotary_base, make=lambda: layer.rotary(ctx.position.unsqueeze(-1), q.dtype)
        )
        slot = ctx.cached("slot", *shape, make=lambda: self.persistent + ctx.position % self.size)
        mask = ctx.cached("mask", *shape, make=lambda: self._mask(ctx.position))
        decode.write_slots(self.k, slot, rotary(k)[:, 0], ctx.active)
        decode.write_slots(self.v, slot, v[:, 0], ctx.active)
        return masked_softmax(rotary(q), self.k, self.v, mask.unsqueeze(1), lse=lse), q, k, v

    def state(self, position: Tensor) -> AttentionState:
        """Return the contents of the buffers as an `AttentionState`, for rows at these positions."""
        full = self.layer.window is None
        where = self._ring_index(position, int(position.max()) if full else self.size - 1)
        slack = (
            position if full else (self.slack + position - self.start_position).clamp(max=self.layer.slack)
        )
        return AttentionState(self.k[where], self.v[where], position.clone(), slack.clone())


class SegmentDecoder:
    """Attention within the segments of MAC, one token at a time. The buffers hold the keys and values of the
    retrieved vectors and of the tokens of one segment.
    """

    def __init__(self, layer: SegmentAttention, state: SegmentState) -> None:
        self.layer, self.size = layer, layer.segment
        prefix = layer.persistent_keys_values(state.tokens[0])
        self.persistent = prefix[0].shape[0]
        self.k, self.v = make_buffers(prefix, len(state.position), 2 * self.size)
        for first, pair in zip(self._first_slots, (state.retrieved, state.tokens), strict=True):
            for buffer, x in zip((self.k, self.v), pair, strict=True):
                buffer[:, first : first + self.size - 1] = x.detach()

    @property
    def _first_slots(self) -> tuple[int, int]:
        """The first slots of the retrieved vectors and of the tokens in the buffers."""
        return self.persistent, self.persistent + self.size

    def _mask(self, place: Tensor, retrieved: bool) -> Tensor:
        """Return a mask ``[r p+2*size]`` of the slots that a token at this place in its segment attends to."""
        seen = torch.arange(self.size, device=place.device) <= place.unsqueeze(-1)
        return torch.cat([seen.new_ones(len(seen), self.persistent), seen & retrieved, seen], 1)

    def step(self, x: Tensor, retrieved: Tensor | None, ctx: StepContext) -> Tensor:
        """Return the output ``[r 1 d]`` for one token per row, after storing its key and value. `retrieved`
        is None if nothing was retrieved for it.
        """
        layer, shape = self.layer, (self.size, self.persistent)
        place = ctx.cached("place", self.size, make=lambda: ctx.position % self.size)
        q = layer.queries(x)
        rotary = ctx.cached(
            "segment", layer.width, layer.rotary_base, make=lambda: layer.rotary(place.unsqueeze(-1), q.dtype)
        )
        mask = ctx.cached("segment mask", *shape, make=lambda: self._mask(place, retrieved is not None))
        for first, source in zip(self._first_slots, (retrieved, x), strict=True):
            k, v = (torch.zeros_like(q),) * 2 if source is None else layer.keys_values(source)
            decode.write_slots(self.k, first + place, rotary(k)[:, 0], ctx.active)
            decode.write_slots(self.v, first + place, v[:, 0], ctx.active)
        return layer.project_output(masked_softmax(rotary(q), self.k, self.v, mask.unsqueeze(1)))

    def state(self, position: Tensor) -> SegmentState:
        """Return the contents of the buffers as a `SegmentState`, for rows at these positions in the text."""
        place = position % self.size
        held = (torch.arange(self.size - 1, device=place.device) < place.unsqueeze(-1))[..., None, None]
        cut = lambda x, first: torch.where(held, x[:, first : first + self.size - 1], 0.0)
        retrieved, tokens = ((cut(self.k, first), cut(self.v, first)) for first in self._first_slots)
        return SegmentState(retrieved, tokens, place)
