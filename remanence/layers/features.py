"""Features of keys: the first layers of a deep memory, which are trained but not updated at test time."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from remanence.layers.norm import l2_normalize
from remanence.ops import layer_cpu
from remanence.ops.triton import layer
from remanence.runtime.module import assign


class Features(nn.Module):
    """A map from unit keys to unit features of the same width, for each head. These are the first layers of a
    deep memory, which are trained but not updated at test time.

    Each layer is residual: ``x <- normalize(x + normalize(SwiGLU(x)) @ down)`` with `hidden` gated features.
    `down` is initialised to zero, so an untrained deep memory is linear.
    """

    def __init__(self, heads: int, width: int, hidden: int, depth: int = 1) -> None:
        super().__init__()
        self.heads, self.width, self.hidden, self.depth = heads, width, hidden, depth
        for index in range(depth):
            self.register_parameter(f"up{index}", nn.Parameter(torch.empty(heads, width, 2 * hidden)))
            self.register_parameter(f"down{index}", nn.Parameter(torch.empty(heads, hidden, width)))
        self.reset_parameters()

    @property
    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """The parameters (up, down) of each layer."""
        return [(getattr(self, f"up{index}"), getattr(self, f"down{index}")) for index in range(self.depth)]

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for up, down in self.layers:
                device = "meta" if up.is_meta else "cpu"  # the same numbers on every device
                assign(up, torch.randn(up.shape, device=device) / math.sqrt(self.width))
                down.zero_()

    def forward(self, x: Float[Tensor, "b t h width"]) -> Float[Tensor, "b t h width"]:
        if layer.is_supported(x, width=self.width, features=self.hidden):
            for up, down in self.layers:
                x = layer.key_features(x, up, down)
            return x
        if layer_cpu.is_supported(x):
            for up, down in self.layers:
                x = layer_cpu.key_features(x, up, down)
            return x
        with torch.autocast(x.device.type, enabled=False):
            for up, down in self.layers:
                gate, value = (math.sqrt(self.width) * per_head_matmul(x, up)).chunk(2, -1)
                x = l2_normalize(x + per_head_matmul(l2_normalize(F.silu(gate) * value), down))
        return x


def per_head_matmul(
    x: Float[Tensor, "b t h i"], weight: Tensor, base: Float[Tensor, "b t h o"] | None = None
) -> Float[Tensor, "b t h o"]:
    """Return the product of each head with its own matrix ``[h i o]``, added to `base` if that is given."""
    if layer.is_supported(x, width=x.shape[-1]) and (base is None or base.dtype == x.dtype):
        return layer.per_head_matmul(x, weight, base)
    weight = weight.to(x.dtype)
    if weight.dim() == 3:
        # The weight is flattened and unflattened so that its gradient has the same strides even with a single head.
        # Otherwise DDP warns.
        weight = weight.flatten(0, 1).unflatten(0, weight.shape[:2])
        y = torch.einsum("bthi,hio->btho", x, weight)
    else:
        y = torch.einsum("gbthi,ghio->gbtho", x.unflatten(0, (len(weight), -1)), weight).flatten(0, 1)
    return y if base is None else base + y
