"""A sliding window behind a short convolution: attention with what a memory's layer has beside its memory."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from torch import Tensor

from remanence.config import Mode, ModelConfig
from remanence.core.state import TensorTuple, take_back
from remanence.layers import ShortConv
from remanence.layers.attention import AttentionState
from remanence.mixers.attention import AttentionMixer
from remanence.mixers.base import Context, ForwardDecoder, MixerDecoder, MixerOutput


class _ConvWindowState(NamedTuple):
    attention: AttentionState
    past: Tensor


class ConvWindowState(_ConvWindowState, TensorTuple):
    """The window's state, and the last inputs of the convolution ``[r s d]``."""

    __slots__ = ()

    def crop(self, tokens: int) -> ConvWindowState:
        return ConvWindowState(self.attention.crop(tokens), take_back(self.past, tokens))


class ConvWindow(AttentionMixer):
    """Attention over a sliding window of x + conv(x), with the memory's kernel.

    A memory's keys and values pass a convolution, so that each token knows those just before it. Attention without one
    needs a layer for that, and thousands of steps to learn it: a baseline of memories is fairer with one.
    """

    State: ClassVar[type] = ConvWindowState

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, sliding=True)
        self.conv = ShortConv(config.dim, config.memory.conv, config.memory.chunk - 1)

    def start(self, rows: int) -> ConvWindowState:
        return ConvWindowState(
            super().start(rows), self.conv.start(rows, self.attention.k_proj.weight.detach())
        )

    def forward(self, x: Tensor, state: ConvWindowState | None, ctx: Context) -> MixerOutput:
        rows = len(x) if ctx.offsets is None else len(ctx.offsets) - 1
        past = self.conv.start(rows, x) if state is None else state.past
        nearby, past = self.conv(x, past, ctx.offsets)
        y, attention, _ = super().forward(x + nearby, state and state.attention, ctx)
        return MixerOutput(y, ConvWindowState(attention, past))

    def decoder(self, state: ConvWindowState, mode: Mode) -> MixerDecoder:
        return ForwardDecoder(self, state, mode)
