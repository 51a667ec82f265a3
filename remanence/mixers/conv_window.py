"""Sliding-window attention after a short convolution. This baseline has the same convolution as the memory
layers.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from torch import Tensor

from remanence.config import Mode, ModelConfig
from remanence.layers import ShortConv
from remanence.layers.attention import AttentionState
from remanence.layers.decoding import StepContext, WindowDecoder
from remanence.mixers.attention import keys_seen, sliding_window
from remanence.mixers.base import Context, Mixer, MixerDecoder, MixerOutput
from remanence.ops.decode import overwrite_rows
from remanence.runtime.state import TensorTuple, rewind


class _ConvWindowState(NamedTuple):
    attention: AttentionState
    past: Tensor


class ConvWindowState(_ConvWindowState, TensorTuple):
    """The state of `ConvWindow`: the state of the sliding window, and the last inputs of the convolution
    ``[r s d]``.
    """

    __slots__ = ()

    def crop(self, tokens: int) -> ConvWindowState:
        return ConvWindowState(self.attention.crop(tokens), rewind(self.past, tokens))


class ConvWindow(Mixer):
    """Attention over a sliding window, applied to x + conv(x). The convolution is as long as that of the
    memory.

    The keys and values of a memory pass through a convolution over the preceding tokens. Attention without a
    convolution needs an additional layer and thousands of training steps to learn the same. The comparison
    with memories is fairer if both have one.
    """

    State: ClassVar[type] = ConvWindowState

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.conv = ShortConv(config.dim, config.memory.conv, config.memory.chunk - 1)
        self.attention = sliding_window(config)
        self.dim, self.persistent = config.dim, config.persistent

    def start(self, rows: int) -> ConvWindowState:
        past = self.conv.start(rows, self.attention.k_proj.weight.detach())
        return ConvWindowState(self.attention.start(rows), past)

    def forward(self, x: Tensor, state: ConvWindowState | None, ctx: Context) -> MixerOutput:
        rows = len(x) if ctx.offsets is None else len(ctx.offsets) - 1
        nearby, past = self.conv(x, self.conv.start(rows, x) if state is None else state.past, ctx.offsets)
        y, window = self.attention(x + nearby, state and state.attention, ctx.offsets)
        return MixerOutput(y, ConvWindowState(window, past))

    def decoder(self, state: ConvWindowState, memory_mode: Mode) -> ConvWindowDecoder:
        return ConvWindowDecoder(self, state)

    def capture_unsupported_reason(self, carries: bool) -> str | None:
        return None

    @property
    def window_size(self) -> int:
        return self.attention.window or 0

    def flops(self, length: int) -> float:
        return super().flops(length) + 12.0 * self.dim * keys_seen(self.attention, length, self.persistent)


class ConvWindowDecoder(MixerDecoder):
    """The decoder of `ConvWindow`, which reads one token at a time."""

    def __init__(self, mixer: ConvWindow, state: ConvWindowState) -> None:
        self.conv, self.past = mixer.conv, state.past.clone()
        self.window = WindowDecoder(mixer.attention, state.attention)
        self.remaining_capacity = self.window.capacity_left

    def step(self, x: Tensor, ctx: StepContext) -> Tensor:
        nearby, past = self.conv(x, self.past)
        overwrite_rows((self.past,), (past,), ctx.active)
        return self.window.step(x + nearby, ctx)

    def state(self, position: Tensor) -> ConvWindowState:
        return ConvWindowState(self.window.state(position), self.past.clone())
