"""The feed-forward layer of a block."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from remanence.layers.linear import Linear, project
from remanence.ops.triton import layer
from remanence.runtime.module import Module


class SwiGLU(Module):
    """The SwiGLU feed-forward layer: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (Linear(dim, hidden) for _ in range(2))
        self.down = Linear(hidden, dim)

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        gate, up = project(x, self.gate, self.up)
        return self.down(layer.swiglu(gate, up) if layer.is_supported(gate) else F.silu(gate) * up)
