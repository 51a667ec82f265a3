"""MAG, memory as a gate (eqs 26-28 of Titans). Sliding-window attention and the memory read the same input,
and the memory's output gates the output of attention.
"""

from __future__ import annotations

from torch import Tensor

from remanence.config import Mode, ModelConfig
from remanence.layers.decoding import StepContext
from remanence.mixers.base import ACTIVATIONS, Context, MixerOutput
from remanence.mixers.lmm import scaled_activation_bytes
from remanence.mixers.window_and_memory import (
    Join,
    WindowAndMemory,
    WindowAndMemoryDecoder,
    WindowAndMemoryState,
)


class MAG(WindowAndMemory):
    """Memory as a gate: the output of sliding-window attention, gated by the output of the memory."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.join = Join(config.dim)

    def forward(self, x: Tensor, state: WindowAndMemoryState | None, ctx: Context) -> MixerOutput:
        y, window = self.attention(x, state and state.attention, ctx.offsets)
        m, memory, trace = self.memory(x, state and state.memory, ctx.offsets, ctx.mode)
        return MixerOutput(self.join(y, m), WindowAndMemoryState(window, memory), trace)

    def decoder(self, state: WindowAndMemoryState, memory_mode: Mode) -> MAGDecoder:
        return MAGDecoder(self, state, memory_mode)

    def activation_bytes(self, dim: int) -> float:
        return scaled_activation_bytes(ACTIVATIONS["mag"], self.memory) * dim


class MAGDecoder(WindowAndMemoryDecoder):
    """The decoder of `MAG`, which reads one token at a time."""

    def __init__(self, mixer: MAG, state: WindowAndMemoryState, memory_mode: Mode) -> None:
        super().__init__(mixer, state, memory_mode)
        self.mixer = mixer

    def step(self, x: Tensor, ctx: StepContext) -> Tensor:
        return self.mixer.join(self.window.step(x, ctx), self.memory.step(x, ctx))
