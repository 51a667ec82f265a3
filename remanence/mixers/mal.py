"""MAL, memory as a layer (eqs 29-31 of Titans). The memory's output is added to the input of sliding-window
attention.
"""

from __future__ import annotations

from torch import Tensor

from remanence.config import Mode, ModelConfig
from remanence.layers import RMSNorm
from remanence.layers.decoding import StepContext
from remanence.mixers.base import ACTIVATIONS, Context, MixerOutput
from remanence.mixers.lmm import scaled_activation_bytes
from remanence.mixers.window_and_memory import WindowAndMemory, WindowAndMemoryDecoder, WindowAndMemoryState


class MAL(WindowAndMemory):
    """Memory as a layer: the memory reads x, and sliding-window attention reads x plus the memory's output."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.norm = RMSNorm(config.dim)

    def forward(self, x: Tensor, state: WindowAndMemoryState | None, ctx: Context) -> MixerOutput:
        m, memory, trace = self.memory(x, state and state.memory, ctx.offsets, ctx.mode)
        y, window = self.attention(self.norm(x + m), state and state.attention, ctx.offsets)
        return MixerOutput(y, WindowAndMemoryState(window, memory), trace)

    def decoder(self, state: WindowAndMemoryState, memory_mode: Mode) -> MALDecoder:
        return MALDecoder(self, state, memory_mode)

    def activation_bytes(self, dim: int) -> float:
        return scaled_activation_bytes(ACTIVATIONS["mal"], self.memory) * dim


class MALDecoder(WindowAndMemoryDecoder):
    """The decoder of `MAL`, which reads one token at a time."""

    def __init__(self, mixer: MAL, state: WindowAndMemoryState, memory_mode: Mode) -> None:
        super().__init__(mixer, state, memory_mode)
        self.mixer = mixer

    def step(self, x: Tensor, ctx: StepContext) -> Tensor:
        return self.window.step(self.mixer.norm(x + self.memory.step(x, ctx)), ctx)
