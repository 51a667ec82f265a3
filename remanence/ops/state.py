"""What a memory carries between two calls, and the gates that steer it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from remanence.runtime.positions import with_host_copy
from remanence.runtime.state import TensorTuple

Weights = tuple[Tensor, ...]
"""A memory's weights: one tensor per layer. Per head inside a net, ``[h, ...]`` as parameters, ``[r, h, ...]`` in a
state.
"""


LARGEST_LOG_STEP = 40.0
"""Of a gate in a state."""

LARGEST = 1e12
"""Weights and answers beyond this are flagged as diverged: in float32 nothing of ordinary size is left beside them."""


def within(tensor: Tensor, bound: float = LARGEST) -> Tensor:
    """Where a tensor is at most `bound` in absolute value; not where it is NaN."""
    return tensor.detach().abs() <= bound


class _Gates(NamedTuple):
    log_step: Tensor
    log_momentum: Tensor | None = None
    log_keep: Tensor | None = None


class Gates(_Gates, TensorTuple):
    """Per token and head, as logarithms: the step size (theta), the momentum (eta), and what is kept (1 - alpha).

    Logs, because products of gates become sums that cannot underflow halfway, and because -inf says exactly 0. A rule
    without momentum or without forgetting takes None there. ``[b t h]`` each.
    """

    __slots__ = ()
    minus_infinity = ("log_step", "log_momentum", "log_keep")

    def part(self, index: int | slice) -> Gates:
        """The gates at this index of the first axis."""
        return self.map(lambda gate: gate[index])

    def agrees(self, read: Tensor) -> Tensor:
        """A step is a number that float32 can hold; momentum and what is kept are at most 1, up to rounding."""
        limits = zip(self, (LARGEST_LOG_STEP, 0.01, 0.01), strict=True)
        rows = [(gate <= most).flatten(1).all(1) for gate, most in limits if gate is not None]
        return torch.stack(rows).all(0)


class RuleState(NamedTuple):
    """What a rule updates: a head's weights, and the buffers that it keeps beside them, such as momentum."""

    weights: Weights
    buffers: Weights = ()


class _MemoryState(NamedTuple):
    layers: Weights
    k: Tensor
    v: Tensor
    gates: Gates
    position: Tensor
    diverged: Tensor
    buffers: Weights = ()


class MemoryState(_MemoryState, TensorTuple):
    """One memory per row and head, wherever its document stands; returned by every call, never changed in place.

    layers
        One ``[r h p ...]`` for each of the net's weights: the weight itself and, for a rule with momentum (p = 2), its
        momentum; as they were at the start of the chunk being read (the closed form's anchor). `weights` and `momentum`
        are views of them.
    k, v, gates
        The tail: what has been read since that chunk began, ``[r c-1 h ...]``; the first ``position % chunk`` slots
        count.
    position
        Tokens read since the document began, ``[r]``. Chunk borders are counted from there, never from a call's start.
    diverged
        ``[r]``, true once a row's weights or answers have been NaN or beyond `LARGEST`, or its surprise NaN or beyond
        the square of that; and from then on.
    buffers
        Further tensors ``[r h ...]`` of the rule, as `Rule.init_state` makes them, at the start of the chunk being
        read. Empty for a `LinearRule`, whose momentum is in `layers`.
    """

    __slots__ = ()

    @property
    def weights(self) -> Weights:
        return tuple(layer[:, :, 0] for layer in self.layers)

    @property
    def momentum(self) -> Weights:
        """Empty for a rule without momentum."""
        return tuple(layer[:, :, 1] for layer in self.layers if layer.shape[2] > 1)

    @property
    def rule_state(self) -> RuleState:
        """What the rule updates, ``[r h ...]`` each."""
        return RuleState(self.weights, (*self.momentum, *self.buffers))

    @property
    def chunk(self) -> int:
        return self.k.shape[1] + 1

    def agrees(self, read: Tensor) -> Tensor:
        return (self.position >= 0) & (self.position <= read) & ~self.diverged

    def crop(self, tokens: int) -> MemoryState:
        """The state before each row's last `tokens` tokens were read. They must lie in the open chunk: the rest is
        written.
        """
        left = self.position % self.chunk - tokens
        if tokens < 0 or bool((left < 0).any()):
            most = int((self.position % self.chunk).min())
            raise ValueError(
                f"tokens: expected at most {most}, what has been read since the last full chunk, got {tokens}"
            )
        kept = torch.arange(self.chunk - 1, device=self.k.device) < left.unsqueeze(-1)

        def cut(tail: Tensor) -> Tensor:
            return torch.where(kept.view(*kept.shape, *[1] * (tail.dim() - 2)), tail, 0.0)

        return self._replace(
            k=cut(self.k), v=cut(self.v), gates=self.gates.map(cut), position=self.position - tokens
        )


def memories(node: Any) -> list[MemoryState]:
    """Every `MemoryState` in a state, in the order of the layers."""
    if isinstance(node, MemoryState):
        return [node]
    return [found for child in node for found in memories(child)] if isinstance(node, tuple) else []


def fresh(
    layers: Weights,
    buffers: Weights,
    *,
    chunk: int,
    keys: int,
    values: int,
    momentum: bool,
    forget: bool,
) -> MemoryState:
    """The state of documents of which nothing has been read, from the state's layers and buffers; `momentum` and
    `forget` say which gates there are.
    """
    first = layers[0]
    rows, heads = first.shape[:2]
    tail = lambda width: first.new_zeros(rows, chunk - 1, heads, width)
    gate = first.new_zeros(rows, chunk - 1, heads)
    return MemoryState(
        layers=layers,
        k=tail(keys),
        v=tail(values),
        gates=Gates(gate, gate if momentum else None, gate if forget else None),
        position=with_host_copy(torch.zeros(rows, dtype=torch.int64, device=first.device), [0] * rows),
        diverged=torch.zeros(rows, dtype=torch.bool, device=first.device),
        buffers=buffers,
    )
