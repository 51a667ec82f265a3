"""One layer of a model: a mixer and a feed-forward network."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from remanence.config import ModelConfig
from remanence.layers import Module, RMSNorm, SwiGLU, matmul_dtype
from remanence.mixers import MIXERS
from remanence.mixers.base import Context, Mixer, MixerOutput
from remanence.runtime.choices import check_choice
from remanence.runtime.state import TensorTuple


class Block(Module):
    """One pre-norm layer: a mixer over tokens and a feed-forward network, each with a residual connection."""

    mixer: Mixer

    def __init__(self, name: str, config: ModelConfig) -> None:
        super().__init__()
        check_choice("pattern", name, MIXERS, {"titans": ("mac", "mag", "mal", "lmm")})
        self.norm_mixer, self.norm_ffn = RMSNorm(config.dim), RMSNorm(config.dim)
        self.mixer = MIXERS[name](config)
        self.ffn = SwiGLU(config.dim, config.hidden)

    def forward(self, x: Float[Tensor, "b t d"], state: TensorTuple | None, ctx: Context) -> MixerOutput:
        y, after, trace = self.mixer(self.norm_mixer(x, matmul_dtype(x)), state, ctx)
        return MixerOutput(self.residual_ffn(x, y), after, trace)

    def start(self, rows: int) -> TensorTuple:
        """Return the initial state of the mixer for `rows` documents."""
        return self.mixer.start(rows)

    def residual_ffn(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the output of the layer, given its input x and the output y of its mixer, all ``[b t d]``."""
        x = x + y
        # A compiled feed-forward network supports the weights of one layer only. The wavefront schedule stacks the
        # weights of several layers; in that case `forward` is called directly, which is not compiled.
        feed = self.ffn if self.ffn.gate.weight.dim() == 2 else self.ffn.forward
        return x + feed(self.norm_ffn(x, matmul_dtype(x)))
