"""Attention that takes one token at a time, its keys and values in fixed buffers: what a decoder needs of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remanence.layers.attention import Attention, AttentionState, SegmentAttention, SegmentState
from remanence.layers.softmax import masked_softmax
from remanence.ops import decode

LEAST = 256
"""Tokens that full attention has room for at first. When it is full, the decoder begins again with room for twice as
many.
"""


class StepContext(NamedTuple):
    """One decoded token: the tokens each row has read ``[r]``, which rows read one now ``[r]``, what the layers share,
    and the tokens themselves (`mixers/base.py: Text`).
    """

    position: Tensor
    active: Tensor
    shared: dict[Any, Any]
    text: Any = None

    def once(self, *key: Any, make: Callable[[], Any]) -> Any:
        if key not in self.shared:
            self.shared[key] = make()
        return self.shared[key]


def make_buffers(prefix: tuple[Tensor, Tensor], rows: int, count: int) -> tuple[Tensor, Tensor]:
    """Buffers for keys and values ``[r p+count h e]``, the persistent ones in front."""
    k, v = (x.new_zeros(rows, x.shape[0] + count, *x.shape[1:]) for x in prefix)
    for buffer, x in zip((k, v), prefix, strict=True):
        buffer[:, : x.shape[0]] = x
    return k, v


class WindowDecoder:
    """Attention over what was read last. Keys and values lie in a ring, a token at its position modulo the ring's size:
    keys are rotated already, so their order does not matter.
    """

    def __init__(self, layer: Attention, state: AttentionState) -> None:
        self.layer, self.begun, self.slack = layer, state.position.clone(), state.slack.clone()
        rows, past = state.k.shape[:2]
        self.size = past + 1 if layer.window else 2 * max(past, LEAST // 2)
        self.room = None if layer.window else self.size - past
        prefix = layer.prefix(state.k)
        self.lead = prefix[0].shape[0]
        self.k, self.v = make_buffers(prefix, rows, self.size)
        for buffer, x in ((self.k, state.k), (self.v, state.v)):
            buffer[self._last(state.position, past)] = x.detach()

    def _last(self, position: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Where the last `count` tokens are, the newest last."""
        token = position.unsqueeze(-1) + torch.arange(-count, 0, device=position.device)
        return torch.arange(len(position), device=position.device).unsqueeze(
            -1
        ), self.lead + token % self.size

    def _mask(self, position: Tensor) -> Tensor:
        position = position.unsqueeze(-1)
        age = (position - torch.arange(self.size, device=position.device)) % self.size
        seen = (age <= position) & (age < (self.layer.window or self.size))
        return torch.cat([seen.new_ones(len(seen), self.lead), seen], 1)

    def step(self, x: Tensor, now: StepContext) -> Tensor:
        return self.layer.out(self.attend(x, now)[0])

    def attend(
        self, x: Tensor, now: StepContext, *, lse: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`step` up to where heads are joined, and the token's query and key, not rotated, and value ``[r 1 h e]``.
        With `lse`, the log-sum-exp stands behind the output.
        """
        layer, shape = self.layer, (self.size, self.lead, self.layer.window)
        q, (k, v) = layer.queries(x), layer.pairs(x)
        turn = now.once(
            layer.width, layer.rotary, make=lambda: layer.turn(now.position.unsqueeze(-1), q.dtype)
        )
        slot = now.once("slot", *shape, make=lambda: self.lead + now.position % self.size)
        mask = now.once("mask", *shape, make=lambda: self._mask(now.position))
        decode.write_slots(self.k, slot, turn(k)[:, 0], now.active)
        decode.write_slots(self.v, slot, v[:, 0], now.active)
        return masked_softmax(turn(q), self.k, self.v, mask.unsqueeze(1), lse=lse), q, k, v

    def state(self, position: Tensor) -> AttentionState:
        full = self.layer.window is None
        where = self._last(position, int(position.max()) if full else self.size - 1)
        slack = position if full else (self.slack + position - self.begun).clamp(max=self.layer.slack)
        return AttentionState(self.k[where], self.v[where], position.clone(), slack.clone())


class SegmentDecoder:
    """MAC's attention: buffers for what was retrieved and for the tokens of a whole segment, from the left."""

    def __init__(self, layer: SegmentAttention, state: SegmentState) -> None:
        self.layer, self.size = layer, layer.segment
        prefix = layer.prefix(state.tokens[0])
        self.lead = prefix[0].shape[0]
        self.k, self.v = make_buffers(prefix, len(state.position), 2 * self.size)
        for first, pair in zip(self._firsts, (state.retrieved, state.tokens), strict=True):
            for buffer, x in zip((self.k, self.v), pair, strict=True):
                buffer[:, first : first + self.size - 1] = x.detach()

    @property
    def _firsts(self) -> tuple[int, int]:
        return self.lead, self.lead + self.size

    def _mask(self, place: Tensor, retrieved: bool) -> Tensor:
        seen = torch.arange(self.size, device=place.device) <= place.unsqueeze(-1)
        return torch.cat([seen.new_ones(len(seen), self.lead), seen & retrieved, seen], 1)

    def step(self, x: Tensor, retrieved: Tensor | None, now: StepContext) -> Tensor:
        layer, shape = self.layer, (self.size, self.lead)
        place = now.once("place", self.size, make=lambda: now.position % self.size)
        q = layer.queries(x)
        turn = now.once(
            "segment", layer.width, layer.rotary, make=lambda: layer.turn(place.unsqueeze(-1), q.dtype)
        )
        mask = now.once("segment mask", *shape, make=lambda: self._mask(place, retrieved is not None))
        for first, source in zip(self._firsts, (retrieved, x), strict=True):
            k, v = (torch.zeros_like(q),) * 2 if source is None else layer.pairs(source)
            decode.write_slots(self.k, first + place, turn(k)[:, 0], now.active)
            decode.write_slots(self.v, first + place, v[:, 0], now.active)
        return layer.out(masked_softmax(turn(q), self.k, self.v, mask.unsqueeze(1)))

    def state(self, position: Tensor) -> SegmentState:
        place = position % self.size
        held = (torch.arange(self.size - 1, device=place.device) < place.unsqueeze(-1))[..., None, None]
        cut = lambda x, first: torch.where(held, x[:, first : first + self.size - 1], 0.0)
        retrieved, tokens = ((cut(self.k, first), cut(self.v, first)) for first in self._firsts)
        return SegmentState(retrieved, tokens, place)
