"""The state of a memory between two calls, and the gates of its tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from remanence.runtime.positions import with_host_copy
from remanence.runtime.state import TensorTuple

Weights = tuple[Tensor, ...]
"""The weights of a memory, one tensor per layer. Their shape has no leading axes inside a net (one head), is
``[h, ...]`` for parameters, and ``[r, h, ...]`` in a state.
"""


MAX_LOG_STEP = 40.0
"""The largest logarithm of a step size in a valid state."""

DIVERGENCE_LIMIT = 1e12
"""Weights and answers with larger absolute values are flagged as diverged. In float32, adding a number of
ordinary size to them changes nothing.
"""


def is_within(tensor: Tensor, bound: float = DIVERGENCE_LIMIT) -> Tensor:
    """Return a mask in the shape of the tensor, true where the absolute value is at most `bound`. It is false
    for NaN.
    """
    return tensor.detach().abs() <= bound


class _Gates(NamedTuple):
    log_step: Tensor
    log_momentum: Tensor | None = None
    log_keep: Tensor | None = None


class Gates(_Gates, TensorTuple):
    """Logarithms of the gates ``[b t h]`` of each token and head: step size (theta), momentum (eta) and retention
    (1 - alpha).

    For a rule with `forget_channels`, `log_keep` is ``[b t h f]``, with a value for each channel of the keys.

    With logarithms, products of gates become sums and do not underflow. A log of -inf is a gate of exactly 0.
    `log_momentum` is None for a rule without momentum, and `log_keep` is None for a rule without forgetting.
    """

    __slots__ = ()
    minus_infinity = ("log_step", "log_momentum", "log_keep")

    def select(self, index: int | slice) -> Gates:
        """Return the gates at this index of the first axis."""
        return self.map(lambda gate: gate[index])

    def agrees(self, read: Tensor) -> Tensor:
        """Whether the gates of each row are in range: momentum and retention at most 1, up to rounding."""
        limits = zip(self, (MAX_LOG_STEP, 0.01, 0.01), strict=True)
        rows = [(gate <= most).flatten(1).all(1) for gate, most in limits if gate is not None]
        return torch.stack(rows).all(0)


class RuleState(NamedTuple):
    """The tensors that a rule updates.

    weights
        The weights of the memory net, one tensor per layer.
    buffers
        Tensors of any shape that the rule keeps beside the weights from one update to the next, as an optimizer does:
        momentum, for example. `Rule.init_state` returns their initial values. They are not parameters, and like the
        weights they are different for each document and head.
    """

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
    """The state of one memory per row and head; returned by every call, never changed in place.

    layers
        One tensor ``[r h p ...]`` for each of the net's weights. It holds the weight and, for a rule with momentum
        (p = 2), its momentum, at the start of the incomplete chunk. `weights` and `momentum` are views of them.
    k, v, gates
        The tail: keys, values and gates of the incomplete chunk, ``[r c-1 h ...]``. Only the first
        ``position % chunk`` slots are used.
    position
        The number of tokens of the document so far, ``[r]``. Chunk borders are counted from the start of the document,
        not from the start of a call.
    diverged
        ``[r]``, true from the first time that a row's weights or answers are NaN or beyond `DIVERGENCE_LIMIT`, or its
        surprise is NaN or beyond the square of that.
    buffers
        Other tensors ``[r h ...]`` of the rule, as returned by `Rule.init_state`, at the start of the incomplete chunk.
        Empty for a `LinearRule`, whose momentum is in `layers`.
    """

    __slots__ = ()

    @property
    def weights(self) -> Weights:
        """The weights ``[r h ...]`` at the start of the incomplete chunk."""
        return tuple(layer[:, :, 0] for layer in self.layers)

    @property
    def momentum(self) -> Weights:
        """The momentum ``[r h ...]`` at the start of the incomplete chunk. Empty for a rule without momentum."""
        return tuple(layer[:, :, 1] for layer in self.layers if layer.shape[2] > 1)

    @property
    def rule_state(self) -> RuleState:
        """The tensors that the rule updates, ``[r h ...]`` each."""
        return RuleState(self.weights, (*self.momentum, *self.buffers))

    @property
    def chunk(self) -> int:
        """The number of tokens in a chunk."""
        return self.k.shape[1] + 1

    def agrees(self, read: Tensor) -> Tensor:
        """Whether the position of each row is possible in a document of which `read` tokens have been read,
        and the row has not diverged.
        """
        return (self.position >= 0) & (self.position <= read) & ~self.diverged

    def crop(self, tokens: int) -> MemoryState:
        """Return the state without the last `tokens` tokens of each row. These tokens must be in the
        incomplete chunk, because earlier tokens are already written to the weights.
        """
        left = self.position % self.chunk - tokens
        if tokens < 0 or bool((left < 0).any()):
            most = int((self.position % self.chunk).min())
            raise ValueError(
                f"tokens: expected at most {most}, the tokens since the last complete chunk, got {tokens}"
            )
        kept = torch.arange(self.chunk - 1, device=self.k.device) < left.unsqueeze(-1)

        def cut(tail: Tensor) -> Tensor:
            return torch.where(kept.view(*kept.shape, *[1] * (tail.dim() - 2)), tail, 0.0)

        return self._replace(
            k=cut(self.k), v=cut(self.v), gates=self.gates.map(cut), position=self.position - tokens
        )


def memories(node: Any) -> list[MemoryState]:
    """Return a list of all `MemoryState` objects in a nested state, in the order of the layers."""
    if isinstance(node, MemoryState):
        return [node]
    return [found for child in node for found in memories(child)] if isinstance(node, tuple) else []


def initial_state(
    layers: Weights,
    buffers: Weights,
    *,
    chunk: int,
    keys: int,
    values: int,
    momentum: bool,
    forget: bool,
    forget_channels: bool = False,
) -> MemoryState:
    """Return a state at position 0 with these layers and buffers. `keys` and `values` are the widths of keys
    and values. `momentum` and `forget` tell whether the rule has these gates, and `forget_channels` whether the
    latter has a value for each channel of the keys.
    """
    first = layers[0]
    rows, heads = first.shape[:2]
    tail = lambda width: first.new_zeros(rows, chunk - 1, heads, width)
    gate = first.new_zeros(rows, chunk - 1, heads)
    return MemoryState(
        layers=layers,
        k=tail(keys),
        v=tail(values),
        gates=Gates(
            gate, gate if momentum else None, (tail(keys) if forget_channels else gate) if forget else None
        ),
        position=with_host_copy(torch.zeros(rows, dtype=torch.int64, device=first.device), [0] * rows),
        diverged=torch.zeros(rows, dtype=torch.bool, device=first.device),
        buffers=buffers,
    )
