"""LMM: the neural memory alone. With other rules and nets it is one of the baselines, such as DeltaNet."""

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

# A single matrix as the memory's net. It does not diverge with gates that start half open.
LINEAR_MEMORY: MemoryFields = {
    "net": "linear", "depth": None, "expansion": None, "activation": None, "bias": None, "step_bias": 0.0
}  # fmt: skip


class LMM(MemoryMixer):
    """The neural memory alone. `changes` are fields of `MemoryConfig` that replace those of the model's memory."""

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
        kind = "matrix" if self.memory.layer.config.net == "linear" else "lmm"
        return memory_bytes(ACTIVATIONS[kind], self.memory) * dim


def memory_bytes(measured: float, memory: Memory) -> float:
    """Bytes of activations per token and unit of width of a layer with a memory. `measured` is the number for the
    paper's net, which is scaled to the net of this memory.
    """
    without = ACTIVATIONS["window"]
    return without + max(0.0, (measured - without) * memory.relative_activations())


def linear_baseline(rule: str) -> Callable[[ModelConfig], LMM]:
    """A function that makes an LMM whose memory is one matrix, updated by a rule such as "delta"."""
    fields: MemoryFields = {**LINEAR_MEMORY, "rule": rule}
    return partial(LMM, **fields)


def ttt(config: ModelConfig) -> LMM:
    """TTT (test-time training) as an LMM. It writes all layers of the net, so a deep memory, which writes only its last
    layer, is replaced by Titans' net.
    """
    if config.memory.net == "deep":
        return LMM(config, rule="ttt", net="titans", step_bias=None)
    return LMM(config, rule="ttt")


class LMMDecoder(MixerDecoder):
    """LMM, one token at a time."""

    def __init__(self, mixer: LMM, state: NeuralMemoryState, mode: Mode) -> None:
        self.memory = MemoryDecoder(mixer.memory, state, mode)

    def step(self, x: Tensor, now: StepContext) -> Tensor:
        return self.memory.step(x, now)

    def state(self, position: Tensor) -> NeuralMemoryState:
        return self.memory.state()

    @property
    def diverged(self) -> Tensor:
        return self.memory.diverged
