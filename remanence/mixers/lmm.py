"""LMM: a mixer with a neural memory only. With other update rules and networks, it is one of the baselines,
such as DeltaNet.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar, Unpack

from torch import Tensor

from remanence.config import MemoryConfig, Mode, ModelConfig
from remanence.layers.decoding import StepContext
from remanence.memory.neural import NeuralMemoryState
from remanence.mixers.base import ACTIVATIONS, Context, MixerDecoder, MixerOutput
from remanence.mixers.memory import Memory, MemoryDecoder, MemoryMixer
from remanence.runtime.keywords import MemoryFields, show_fields

# Settings of a memory whose network is a single matrix. It does not diverge when its step-size gates start at 0.5
# (`step_bias` 0).
LINEAR_MEMORY: MemoryFields = {
    "net": "linear", "depth": None, "expansion": None, "activation": None, "bias": None, "step_bias": 0.0
}  # fmt: skip


class LMM(MemoryMixer):
    """A neural memory without attention. `changes` are fields of `MemoryConfig` that replace those of
    `config.memory`.
    """

    State: ClassVar[type] = NeuralMemoryState

    @show_fields(MemoryConfig, default_of="config", omit=("dim",))
    def __init__(self, config: ModelConfig, **changes: Unpack[MemoryFields]) -> None:
        super().__init__()
        self.memory = Memory(config, **changes)

    def start(self, rows: int) -> NeuralMemoryState:
        return self.memory.start(rows)

    def forward(self, x: Tensor, state: NeuralMemoryState | None, ctx: Context) -> MixerOutput:
        return self.memory(x, state, ctx.offsets, ctx.mode)

    def decoder(self, state: NeuralMemoryState, memory_mode: Mode) -> LMMDecoder:
        return LMMDecoder(self, state, memory_mode)

    def activation_bytes(self, dim: int) -> float:
        kind = "matrix" if self.memory.layer.config.net == "linear" else "lmm"
        return scaled_activation_bytes(ACTIVATIONS[kind], self.memory) * dim


def scaled_activation_bytes(paper_bytes: float, memory: Memory) -> float:
    """Bytes of activations per token and unit of width, of a layer with a memory. `paper_bytes` is the measured
    number for the paper's network; it is scaled to the size of this memory's network.
    """
    without = ACTIVATIONS["window"]
    return without + max(0.0, (paper_bytes - without) * memory.relative_activations())


def linear_baseline(rule: str) -> Callable[[ModelConfig], LMM]:
    """Return a function that creates an LMM whose memory is one matrix, updated by a rule such as "delta"."""
    fields: MemoryFields = {**LINEAR_MEMORY, "rule": rule}
    return partial(LMM, **fields)


def ttt(config: ModelConfig) -> LMM:
    """Create the baseline TTT (test-time training) as an LMM. TTT updates all layers of the network. A "deep"
    memory updates only its last layer, so it is replaced by the "titans" network.
    """
    if config.memory.net == "deep":
        return LMM(config, rule="ttt", net="titans", step_bias=None)
    return LMM(config, rule="ttt")


class LMMDecoder(MixerDecoder):
    """The decoder of `LMM`, which reads one token at a time."""

    def __init__(self, mixer: LMM, state: NeuralMemoryState, memory_mode: Mode) -> None:
        self.memory = MemoryDecoder(mixer.memory, state, memory_mode)

    def step(self, x: Tensor, ctx: StepContext) -> Tensor:
        return self.memory.step(x, ctx)

    def state(self, position: Tensor) -> NeuralMemoryState:
        return self.memory.state()

    @property
    def diverged(self) -> Tensor:
        return self.memory.diverged
