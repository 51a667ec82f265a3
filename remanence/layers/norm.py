"""RMSNorm and L2 normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from remanence.layers.linear import broadcast_stacked
from remanence.ops import layer_cpu
from remanence.ops.triton import layer
from remanence.runtime.module import is_unmodified


class RMSNorm(nn.Module):
    """Root mean square normalisation over the last axis, with a learned gain."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(
        self, x: Float[Tensor, "... width"], dtype: torch.dtype | None = None
    ) -> Float[Tensor, "... width"]:
        """Return x normalised over the last axis, in its own dtype or in the given one."""
        dtype = dtype or x.dtype
        if layer.is_supported(x, channels=self.width):
            return layer.rms_norm(x, self.weight, self.eps, dtype)
        if self.weight.dim() == 1:
            return F.rms_norm(x, (self.width,), self.weight.to(x.dtype), self.eps).to(dtype)
        parts = F.rms_norm(x, (self.width,), None, self.eps).unflatten(0, (len(self.weight), -1))
        return (parts * broadcast_stacked(self.weight.to(x.dtype), 1, x)).flatten(0, 1).to(dtype)

    def normalize_gated(
        self, x: Float[Tensor, "b t h width"], gate: Float[Tensor, "b t inner"]
    ) -> Float[Tensor, "b t inner"]:
        """Normalise each head of x, concatenate the heads, and multiply by SiLU of the gate."""
        if (
            layer.is_supported(x, width=self.width)
            and layer.is_supported(gate)
            and is_unmodified(self, RMSNorm)
        ):
            return layer.gated_norm(x, gate, self.weight, self.eps)
        if layer_cpu.is_supported(x) and is_unmodified(self, RMSNorm):
            return layer_cpu.gated_norm(x, gate, self.weight, self.eps)
        return self(x).flatten(-2) * F.silu(gate)


def l2_normalize(x: Tensor) -> Tensor:
    """Divide x by its L2 norm over the last axis, computed in at least float32 and returned in the dtype of
    x. Vectors shorter than about 1e-6 stay shorter than 1.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-12)).to(x.dtype)
