"""Small parts that more than one room uses: normalisation, the short convolution, gates that keep their bias."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Scale to unit mean square over the last axis, with a learned gain."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Float[Tensor, "... width"]) -> Float[Tensor, "... width"]:
        return F.rms_norm(x, (self.width,), self.weight.to(x.dtype), self.eps)


def unit(x: Tensor) -> Tensor:
    """x at length 1 over its last axis; computed in float32 at least, returned in x's dtype. Below 1e-6 it fades to zero."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-12)).to(x.dtype)


class ShortConv(nn.Module):
    """A causal depthwise convolution over tokens that carries its last inputs from call to call. Kernel 0: nothing happens."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.width, self.kernel = width, kernel
        self.weight = nn.Parameter(torch.empty(width, kernel)) if kernel else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            bound = 1 / math.sqrt(self.kernel)
            nn.init.uniform_(self.weight, -bound, bound)

    def start(self, rows: int, like: Tensor) -> Float[Tensor, "r past width"]:
        return like.new_zeros(rows, max(0, self.kernel - 1), self.width)

    def forward(
        self, x: Float[Tensor, "b t width"], past: Float[Tensor, "r past width"], offsets: Sequence[int] | None = None
    ) -> tuple[Float[Tensor, "b t width"], Float[Tensor, "r past width"]]:
        """`past` are the inputs just before these, zeros at a document's start; packed documents have a row of it each."""
        if self.weight is None or x.shape[1] == 0:
            return x, past
        keep = self.kernel - 1
        before = past.to(x.dtype)
        if offsets is None:
            joined = torch.cat([before, x], 1)
            return self._convolve(joined), joined[:, joined.shape[1] - keep :].to(past.dtype)
        # Each document is led by its own past, so that one convolution over the whole row never mixes two of them.
        pieces, ends = [], []
        for row, (a, b) in enumerate(pairwise(offsets)):
            piece = torch.cat([before[row], x[0, a:b]])
            ends.append(piece[piece.shape[0] - keep :])
            pieces.append(piece)
        kept = [torch.arange(a, b) + keep * row for row, (a, b) in enumerate(pairwise(offsets))]
        y = self._convolve(torch.cat(pieces).unsqueeze(0)).index_select(1, torch.cat(kept).to(x.device))
        return y, torch.stack(ends).to(past.dtype)

    def _convolve(self, x: Tensor) -> Tensor:
        """``[b t+kernel-1 width]`` to ``[b t width]``. As a flat image: torch's one-dimensional depthwise backward is 2.5 x
        slower on a CPU.
        """
        assert self.weight is not None
        weight = self.weight.to(x.dtype)[:, None, None]
        return F.conv2d(x.mT.unsqueeze(2), weight, groups=self.width).squeeze(2).mT


class GateProjection(nn.Module):
    """Several gates per head as logits of the input, float32 (or float64) whatever the rest runs in.

    The input counts at unit mean square: a large one must not slam every gate open or shut, where a memory runs away.
    Not an nn.Linear on purpose: initialisers that zero every Linear's bias (Hugging Face's does) would open a memory's gates.
    """

    def __init__(self, dim: int, heads: int, biases: Sequence[float]) -> None:
        super().__init__()
        self.heads, self.biases = heads, tuple(biases)
        self.weight = nn.Parameter(torch.empty(len(self.biases) * heads, dim))
        self.bias = nn.Parameter(torch.empty(len(self.biases) * heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        with torch.no_grad():
            self.bias.copy_(torch.tensor(self.biases).repeat_interleave(self.heads))

    def forward(self, x: Float[Tensor, "b t d"]) -> tuple[Float[Tensor, "b t h"], ...]:
        wide = x if x.dtype == torch.float64 else x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(wide, self.weight.to(wide.dtype)) * scale + self.bias.to(wide.dtype)
        return logits.unflatten(-1, (len(self.biases), self.heads)).unbind(-2)
