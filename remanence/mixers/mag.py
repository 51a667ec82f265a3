"""MAG, memory as a gate (eqs 26-28): sliding attention and the memory have the same input; the memory's output gates
that of attention.
"""

from __future__ import annotations

from torch import Tensor

from remanence.config import Mode, ModelConfig
from remanence.layers.decoding import StepContext
from remanence.mixers.base import ACTIVATIONS, Context, MixerOutput
from remanence.mixers.lmm import memory_bytes
from remanence.mixers.window_and_memory import (
    Join,
    WindowAndMemory,
    WindowAndMemoryDecoder,
    WindowAndMemoryState,
)


class MAG(WindowAndMemory):
    """Memory as a gate."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.join = Join(config.dim)

    def forward(self, x: Tensor, state: WindowAndMemoryState | None, ctx: Context) -> MixerOutput:
        y, window = self.attention(x, state and state.attention, ctx.offsets)
        m, memory, trace = self.memory(x, state and state.memory, ctx.offsets, ctx.mode)
        return MixerOutput(self.join(y, m), WindowAndMemoryState(window, memory), trace)

    def decoder(self, state: WindowAndMemoryState, mode: Mode) -> MAGDecoder:
        return MAGDecoder(self, state, mode)

    def activation_bytes(self, dim: int) -> float:
        return memory_bytes(ACTIVATIONS["mag"], self.memory) * dim


class MAGDecoder(WindowAndMemoryDecoder):
    """MAG, one token at a time."""

    def __init__(self, mixer: MAG, state: WindowAndMemoryState, mode: Mode) -> None:
        super().__init__(mixer, state, mode)
        self.mixer = mixer

    def step(self, x: Tensor, now: StepContext) -> Tensor:
        return self.mixer.join(self.window.step(x, now), self.memory.step(x, now))
