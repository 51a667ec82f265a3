"""The short causal convolution. Its state is its last inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from remanence.layers.norm import l2_normalize
from remanence.ops import layer_cpu
from remanence.ops.triton import layer
from remanence.runtime.module import is_unmodified
from remanence.runtime.state import roll_history


class ShortConv(nn.Module):
    """A causal depthwise convolution over tokens. Its state is its last inputs. With kernel 0, it is the
    identity.

    The state holds `slack` more inputs than the kernel needs, so that up to `slack` tokens can be removed
    from it.
    """

    def __init__(self, width: int, kernel: int, slack: int = 0) -> None:
        super().__init__()
        self.width, self.kernel = width, kernel
        self.history = kernel - 1 + slack if kernel else 0
        self.weight = nn.Parameter(torch.empty(width, kernel)) if kernel else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            bound = 1 / math.sqrt(self.kernel)
            nn.init.uniform_(self.weight, -bound, bound)

    def start(self, rows: int, like: Tensor) -> Float[Tensor, "r past width"]:
        """Return the state at the start of `rows` documents: zeros, in the dtype and on the device of `like`."""
        return like.new_zeros(rows, self.history, self.width)

    def forward(
        self,
        x: Float[Tensor, "b t width"],
        past: Float[Tensor, "r past width"],
        offsets: Sequence[int] | None = None,
    ) -> tuple[Float[Tensor, "b t width"], Float[Tensor, "r past width"]]:
        """Return the convolution of x, and the new state. `past` has the inputs just before x (zeros at a
        document's start), one row per document.
        """
        if self.weight is None or x.shape[1] == 0:
            return x, past
        lead = self.kernel - 1
        before = past[:, self.history - lead :].to(x.dtype)
        if offsets is None:
            return self._convolve(torch.cat([before, x], 1)), self.advance(x, past, None)
        # Each document is preceded by its own past, so that one convolution over the whole row never mixes documents.
        pieces = [torch.cat([before[row], x[0, a:b]]) for row, (a, b) in enumerate(pairwise(offsets))]
        kept = [torch.arange(a, b) + lead * row for row, (a, b) in enumerate(pairwise(offsets))]
        y = self._convolve(torch.cat(pieces).unsqueeze(0)).index_select(1, torch.cat(kept).to(x.device))
        return y, self.advance(x, past, offsets)

    def convolve_heads(
        self,
        x: Float[Tensor, "b t width"],
        past: Float[Tensor, "r past width"],
        offsets: Sequence[int] | None,
        heads: int,
        *,
        normalize: bool = False,
    ) -> tuple[Float[Tensor, "b t h e"], Float[Tensor, "r past width"]]:
        """Apply `forward` and SiLU, and split the result into heads. With `normalize`, every head is scaled
        to unit length. Also return the new state.
        """
        if (
            offsets is None
            and self.weight is not None
            and layer.is_supported(x, width=self.width // heads, taps=self.kernel)
            and is_unmodified(self, ShortConv)
        ):
            return layer.short_conv(x, past, self.weight, heads, normalize)
        if (
            offsets is None
            and self.weight is not None
            and layer_cpu.is_supported(x)
            and is_unmodified(self, ShortConv)
        ):
            return layer_cpu.short_conv(x, past, self.weight, heads, normalize), self.advance(x, past, None)
        y, past = self(x, past, offsets)
        y = F.silu(y).unflatten(-1, (heads, self.width // heads))
        return l2_normalize(y) if normalize else y, past

    def advance(
        self,
        x: Float[Tensor, "b t width"],
        past: Float[Tensor, "r past width"],
        offsets: Sequence[int] | None,
    ) -> Tensor:
        """Return only the new state, the same as `forward` returns."""
        if offsets is None:
            return layer_cpu.roll_history(past, x) if layer_cpu.is_supported(x) else roll_history(past, x)
        return torch.cat(
            [roll_history(past[row : row + 1], x[:, a:b]) for row, (a, b) in enumerate(pairwise(offsets))]
        )

    def _convolve(self, x: Tensor) -> Tensor:
        """Convolve ``[b t+kernel-1 width]`` to ``[b t width]``. This uses conv2d, because the backward pass
        of torch's depthwise conv1d is 2.5 x slower on a CPU.
        """
        assert self.weight is not None
        weight = self.weight.to(x.dtype).flatten(0, -2)[:, None, None]
        if self.weight.dim() == 2:
            return F.conv2d(x.mT.unsqueeze(2), weight, groups=self.width).squeeze(2).mT
        groups = len(self.weight)
        # The channels of stacked layers are separate groups.
        channels = x.unflatten(0, (groups, -1)).permute(1, 0, 3, 2).flatten(1, 2).unsqueeze(2)
        y = F.conv2d(channels, weight, groups=len(weight)).squeeze(2).unflatten(1, (groups, -1))
        return y.permute(1, 0, 3, 2).flatten(0, 1)
