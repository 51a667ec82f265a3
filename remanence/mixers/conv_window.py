"""A sliding window behind a short convolution: attention with what a memory's layer has beside its memory."""

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
    """The window's state, and the last inputs of the convolution ``[r s d]``."""

    __slots__ = ()

    def crop(self, tokens: int) -> ConvWindowState:
        return ConvWindowState(self.attention.crop(tokens), rewind(self.past, tokens))


class ConvWindow(Mixer):
    """Attention over a sliding window of x + conv(x), with the memory's kernel.

    A memory's keys and values pass a convolution, so that each token knows those just before it. Attention without one
    needs a layer for that, and thousands of steps to learn it: a baseline of memories is fairer with one.
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

    def decoder(self, state: ConvWindowState, mode: Mode) -> ConvWindowDecoder:
        return ConvWindowDecoder(self, state)

    def capture_unsupported_reason(self, carries: bool) -> str | None:
        return None

    @property
    def reach(self) -> int:
        return self.attention.window or 0

    def flops(self, length: int) -> float:
        return super().flops(length) + 12.0 * self.dim * keys_seen(self.attention, length, self.persistent)


class ConvWindowDecoder(MixerDecoder):
    def __init__(self, mixer: ConvWindow, state: ConvWindowState) -> None:
        self.conv, self.past = mixer.conv, state.past.clone()
        self.window = WindowDecoder(mixer.attention, state.attention)
        self.room = self.window.capacity_left

    def step(self, x: Tensor, now: StepContext) -> Tensor:
        nearby, past = self.conv(x, self.past)
        overwrite_rows((self.past,), (past,), now.active)
        return self.window.step(x + nearby, now)

    def state(self, position: Tensor) -> ConvWindowState:
        return ConvWindowState(self.window.state(position), self.past.clone())
