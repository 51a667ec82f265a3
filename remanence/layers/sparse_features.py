"""Sparse features of keys: a wide expansion of which only the largest few are kept."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from remanence.layers.features import per_head_matmul
from remanence.layers.norm import l2_normalize
from remanence.runtime.module import assign


class SparseFeatures(nn.Module):
    """A map from unit keys to wide, sparse features of length at most 1, for each head.

    A key is multiplied by an expansion matrix, and the `keep` largest products z are kept, as ``relu(z - s / 2)`` with
    s the smallest of them, then divided by the length of the whole. The expansion is trained, or random and
    fixed. Gradients flow through the products that are kept.
    """

    def __init__(self, heads: int, width: int, features: int, keep: int, *, learned: bool = True) -> None:
        super().__init__()
        self.heads, self.width, self.features, self.keep = heads, width, features, keep
        self.learned = learned
        self.expansion = nn.Parameter(torch.empty(heads, width, features), requires_grad=learned)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        device = "meta" if self.expansion.is_meta else "cpu"  # the same numbers on every device
        assign(self.expansion, torch.randn(self.expansion.shape, device=device))

    def forward(self, x: Float[Tensor, "b t h width"]) -> Float[Tensor, "b t h features"]:
        with torch.autocast(x.device.type, enabled=False):
            products = per_head_matmul(x, self.expansion if self.learned else self.expansion.detach())
            largest, index = products.topk(self.keep, -1)
            kept = l2_normalize(torch.relu(largest - 0.5 * largest[..., -1:]))
        return torch.zeros_like(products).scatter(-1, index, kept)
