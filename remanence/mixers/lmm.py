"""LMM: the neural memory alone. Other rules and nets make the baselines of it."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

from torch import Tensor

from remanence.config import MemoryConfig, Mode, ModelConfig
from remanence.layers.decoding import StepContext
from remanence.memory.neural import NeuralMemoryState
from remanence.mixers.base import ACTIVATIONS, Context, MixerDecoder, MixerOutput
from remanence.mixers.memory import Memory, MemoryDecoder, MemoryMixer
from remanence.runtime.keywords import MemoryFields, show_fields

# A matrix for a memory, and gates that start half open: a single linear layer does not run away.
MATRIX: dict[str, Any] = {
    "net": "linear", "depth": None, "expansion": None, "activation": None, "bias": None, "step_bias": 0.0
}  # fmt: skip


class LMM(MemoryMixer):
    """The neural memory alone, with changes to the model's memory if given."""

    State: ClassVar[type] = NeuralMemoryState

    @show_fields(MemoryConfig, default_of="config", omit=("dim",))
    def __init__(self, config: ModelConfig, **changes: Unpack[MemoryFields]) -> None:
        super().__init__()
        self.memory = Memory(config, **changes)

    def start(self, rows: int) -> NeuralMemoryState:
        return self.memory.start(rows)

    def forward(self, x: Tensor, state: NeuralMemoryState | None, ctx: Context) -> MixerOutput:
        return self.memory(x, state, ctx.offsets, ctx.mode)

    def decoder(self, state: NeuralMemoryState, mode: Mode) -> LMMDecoder:
        return LMMDecoder(self, state, mode)

    def activation_bytes(self, dim: int) -> float:
        own = "matrix" if self.memory.layer.config.net == "linear" else "lmm"
        return memory_bytes(ACTIVATIONS[own], self.memory) * dim


def memory_bytes(measured: float, memory: Memory) -> float:
    """What a layer leaves for backward, from what was measured with the paper's net."""
    plain = ACTIVATIONS["window"]
    return plain + max(0.0, (measured - plain) * memory.activations())


def ttt(config: ModelConfig) -> LMM:
    """TTT writes a whole net: Titans', where the model's own memories write their last layer alone."""
    if config.memory.net == "deep":
        return LMM(config, rule="ttt", net="titans", step_bias=None)
    return LMM(config, rule="ttt")


class LMMDecoder(MixerDecoder):
    def __init__(self, mixer: LMM, state: NeuralMemoryState, mode: Mode) -> None:
        self.memory = MemoryDecoder(mixer.memory, state, mode)

    def step(self, x: Tensor, now: StepContext) -> Tensor:
        return self.memory.step(x, now)

    def state(self, position: Tensor) -> NeuralMemoryState:
        return self.memory.state()

    @property
    def diverged(self) -> Tensor:
        return self.memory.diverged
