"""The common base class of `MAG` and `MAL`, which have a sliding window and a memory; and `Join`, the gate of
`MAC` and `MAG`.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from remanence.config import Mode, ModelConfig
from remanence.layers import Module, RMSNorm
from remanence.layers.attention import AttentionState
from remanence.layers.decoding import WindowDecoder
from remanence.memory.neural import NeuralMemoryState
from remanence.mixers.attention import keys_seen, sliding_window
from remanence.mixers.base import MixerDecoder
from remanence.mixers.memory import Memory, MemoryDecoder, MemoryMixer
from remanence.ops.triton import layer
from remanence.runtime.module import is_unmodified
from remanence.runtime.state import TensorTuple


class _WindowAndMemoryState(NamedTuple):
    attention: AttentionState
    memory: NeuralMemoryState


class WindowAndMemoryState(_WindowAndMemoryState, TensorTuple):
    """The state of a layer with a sliding window and a memory."""

    __slots__ = ()

    def crop(self, tokens: int) -> WindowAndMemoryState:
        return WindowAndMemoryState(self.attention.crop(tokens), self.memory.crop(tokens))


class WindowAndMemory(MemoryMixer):
    """The base class of mixers with sliding-window attention and a memory. Subclasses define how they are
    combined.
    """

    State: ClassVar[type] = WindowAndMemoryState

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dim, self.persistent = config.dim, config.persistent
        self.attention = sliding_window(config)
        self.memory = Memory(config)

    def start(self, rows: int) -> WindowAndMemoryState:
        return WindowAndMemoryState(self.attention.start(rows), self.memory.start(rows))

    @property
    def window_size(self) -> int:
        return self.attention.window or 0

    def flops(self, length: int) -> float:
        seen = keys_seen(self.attention, length, self.persistent)
        return super().flops(length) + 12.0 * self.dim * seen


class WindowAndMemoryDecoder(MixerDecoder):
    """The base class of decoders with a window and a memory. Subclasses define how they are combined."""

    def __init__(self, mixer: WindowAndMemory, state: WindowAndMemoryState, memory_mode: Mode) -> None:
        self.window = WindowDecoder(mixer.attention, state.attention)
        self.memory = MemoryDecoder(mixer.memory, state.memory, memory_mode)
        self.remaining_capacity = self.window.capacity_left

    def state(self, position: Tensor) -> WindowAndMemoryState:
        return WindowAndMemoryState(self.window.state(position), self.memory.state())

    @property
    def diverged(self) -> Tensor:
        return self.memory.diverged


class Join(Module):
    """The operator ⊗ of the Titans paper: the output of attention times the sigmoid of the memory's output.
    Both are first normalised with learned gains. If the memory's output is zero, the factor is 0.5.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_memory = RMSNorm(dim), RMSNorm(dim)

    def forward(self, y: Float[Tensor, "b t d"], m: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        a, b = self.norm_attention, self.norm_memory
        fused = layer.is_supported(y, channels=a.width) and layer.is_supported(m)
        if fused and is_unmodified(a, RMSNorm) and is_unmodified(b, RMSNorm):
            return layer.sigmoid_gated_norm(y, m, a.weight, b.weight, a.eps)
        return a(y) * torch.sigmoid(b(m))
