"""A mixer with attention only: over all earlier tokens (Transformer++), or over a sliding window."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from remanence.config import Mode, ModelConfig
from remanence.layers.attention import Attention, AttentionState
from remanence.layers.decoding import StepContext, WindowDecoder
from remanence.mixers.base import ACTIVATIONS, Context, Mixer, MixerDecoder, MixerOutput


def sliding_window(config: ModelConfig) -> Attention:
    """Create the sliding-window attention for a model. Its state keeps ``chunk - 1`` additional old tokens,
    so that as many tokens can be cropped as from the open chunk of a memory.
    """
    slack = config.memory.chunk - 1
    return Attention(config.dim, config.heads, config.window, config.persistent, config.rotary, slack=slack)


def keys_seen(attention: Attention, length: int, persistent: int) -> float:
    """The approximate mean number of keys per query in a text of `length` tokens. `persistent` is the number
    of persistent tokens.
    """
    return length / 2 if attention.window is None else min(length / 2, attention.window + persistent)


class AttentionMixer(Mixer):
    """Attention over a sliding window (`sliding`), or over all earlier tokens."""

    State: ClassVar[type] = AttentionState

    def __init__(self, config: ModelConfig, sliding: bool) -> None:
        super().__init__()
        full = lambda: Attention(config.dim, config.heads, None, 0, config.rotary)
        self.attention = sliding_window(config) if sliding else full()
        self.dim, self.persistent = config.dim, config.persistent

    def start(self, rows: int) -> AttentionState:
        return self.attention.start(rows)

    def forward(self, x: Tensor, state: AttentionState | None, ctx: Context) -> MixerOutput:
        y, state = self.attention(x, state, ctx.offsets)
        return MixerOutput(y, state)

    def decoder(self, state: AttentionState, memory_mode: Mode) -> AttentionDecoder:
        return AttentionDecoder(self.attention, state)

    def capture_unsupported_reason(self, carries: bool) -> str | None:
        return "the state of full attention grows" if carries and self.attention.window is None else None

    @property
    def window_size(self) -> int:
        return self.attention.window or 0

    def flops(self, length: int) -> float:
        return super().flops(length) + 12.0 * self.dim * keys_seen(self.attention, length, self.persistent)

    def activation_bytes(self, dim: int) -> float:
        return ACTIVATIONS["window" if self.attention.window else "attention"] * dim


class AttentionDecoder(MixerDecoder):
    """The decoder of `AttentionMixer`, which reads one token at a time."""

    def __init__(self, attention: Attention, state: AttentionState) -> None:
        self.window = WindowDecoder(attention, state)
        self.remaining_capacity = self.window.capacity_left

    def step(self, x: Tensor, ctx: StepContext) -> Tensor:
        return self.window.step(x, ctx)

    def state(self, position: Tensor) -> AttentionState:
        return self.window.state(position)
