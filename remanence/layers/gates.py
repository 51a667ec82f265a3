"""Gates of a memory: step size, momentum and forgetting."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from remanence.layers.linear import broadcast_stacked
from remanence.ops import layer_cpu
from remanence.ops.triton import layer
from remanence.runtime.module import assign, is_unmodified


class GateProjection(nn.Module):
    """A linear projection of the input to the logits of several gates per head. It is always computed in
    float32 (or float64).

    The input is scaled to unit mean square, because large inputs would saturate the gates, and the memory
    could diverge. This is not an nn.Linear, because initialisers that set the bias of every Linear to zero
    (as Hugging Face's does) would open the gates. `biases` has the initial bias of each gate.
    """

    def __init__(self, dim: int, heads: int, biases: Sequence[float]) -> None:
        super().__init__()
        self.heads, self.biases = heads, tuple(biases)
        self.weight = nn.Parameter(torch.empty(len(self.biases) * heads, dim))
        self.bias = nn.Parameter(torch.empty(len(self.biases) * heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        assign(self.bias, torch.tensor(self.biases).repeat_interleave(self.heads))

    def forward(self, x: Float[Tensor, "b t d"]) -> tuple[Float[Tensor, "b t h"], ...]:
        """Return the logits ``[b t h]`` of each gate."""
        wide = x if x.dtype == torch.float64 else x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        with torch.autocast(x.device.type, enabled=False):
            if self.weight.dim() == 2:
                logits = F.linear(wide, self.weight.to(wide.dtype)) * scale + self.bias.to(wide.dtype)
            else:
                parts = wide.unflatten(0, (len(self.weight), -1))
                products = torch.einsum("gbtd,god->gbto", parts, self.weight.to(wide.dtype))
                logits = products.flatten(0, 1) * scale
                logits = (
                    logits.unflatten(0, (len(self.bias), -1))
                    + broadcast_stacked(self.bias.to(wide.dtype), 1, wide)
                ).flatten(0, 1)
        return logits.unflatten(-1, (len(self.biases), self.heads)).unbind(-2)

    def log_sigmoids(
        self, x: Float[Tensor, "b t d"], flipped: Sequence[bool]
    ) -> tuple[Float[Tensor, "b t h"], ...]:
        """Return the log of the sigmoid of each gate's logits, or the log of one minus the sigmoid where
        `flipped` is true.
        """
        if layer.is_supported(x, gates=self.bias.shape[-1]) and is_unmodified(self, GateProjection):
            return layer.log_gates(x, self.weight, self.bias, self.heads, flipped)
        if layer_cpu.is_supported(x) and is_unmodified(self, GateProjection):
            return layer_cpu.log_gates(x, self.weight, self.bias, self.heads, flipped)
        return tuple(
            F.logsigmoid(-logit if flip else logit) for logit, flip in zip(self(x), flipped, strict=True)
        )
