"""Small parts that more than one room uses: normalisation, feed-forward, rotary angles, the short convolution, features of keys,
gates that keep their bias.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from remanence.ops import layer
from remanence.ops.state import carry_on


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

    def gated(self, x: Float[Tensor, "b t h width"], gate: Float[Tensor, "b t inner"]) -> Float[Tensor, "b t inner"]:
        """Per head, times SiLU of a gate."""
        if layer.fits(x, width=self.width) and layer.fits(gate):
            return layer.gated_norm(x, gate, self.weight, self.eps)
        return self(x).flatten(-2) * F.silu(gate)


def unit(x: Tensor) -> Tensor:
    """x at length 1 over its last axis; computed in float32 at least, returned in x's dtype. Below 1e-6 it fades to zero."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-12)).to(x.dtype)


def operand(x: Tensor) -> Tensor:
    """x as autocast's products take it: cast once for all of them, where autocast would cast it for each, and back."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if x.dtype == torch.float32 and torch.is_autocast_enabled(device) else x


class SwiGLU(nn.Module):
    """The feed-forward layer: two projections up, one through SiLU as the other's gate, and one down."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Rotary:
    """Turns each pair of channels of ``[r t h e]`` by its token's position. Angles in float64: in float32 they are off by 0.04
    at two million.
    """

    def __init__(self, position: Int[Tensor, "#r t"], width: int, base: float, dtype: torch.dtype) -> None:
        self.dtype = dtype if dtype == torch.float64 else torch.float32
        half = torch.arange(width // 2, dtype=torch.float64, device=position.device) / (width // 2)
        angles = (position.unsqueeze(-1) * base**-half).unsqueeze(-2)
        self.cos, self.sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def __call__(self, x: Float[Tensor, "r t h e"]) -> Float[Tensor, "r t h e"]:
        a, b = x.to(self.dtype).chunk(2, -1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], -1).to(x.dtype)


class ShortConv(nn.Module):
    """A causal depthwise convolution over tokens that carries its last inputs from call to call. Kernel 0: nothing happens.

    `slack` more inputs than the kernel needs are kept, so that as many tokens can be taken back.
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
        return like.new_zeros(rows, self.history, self.width)

    def forward(
        self, x: Float[Tensor, "b t width"], past: Float[Tensor, "r past width"], offsets: Sequence[int] | None = None
    ) -> tuple[Float[Tensor, "b t width"], Float[Tensor, "r past width"]]:
        """`past` are the inputs just before these, zeros at a document's start; packed documents have a row of it each."""
        if self.weight is None or x.shape[1] == 0:
            return x, past
        lead = self.kernel - 1
        before = past[:, self.history - lead :].to(x.dtype)
        if offsets is None:
            return self._convolve(torch.cat([before, x], 1)), self.advance(x, past, None)
        # Each document is led by its own past, so that one convolution over the whole row never mixes two of them.
        pieces = [torch.cat([before[row], x[0, a:b]]) for row, (a, b) in enumerate(pairwise(offsets))]
        kept = [torch.arange(a, b) + lead * row for row, (a, b) in enumerate(pairwise(offsets))]
        y = self._convolve(torch.cat(pieces).unsqueeze(0)).index_select(1, torch.cat(kept).to(x.device))
        return y, self.advance(x, past, offsets)

    def activated(
        self,
        x: Float[Tensor, "b t width"],
        past: Float[Tensor, "r past width"],
        offsets: Sequence[int] | None,
        heads: int,
        *,
        at_length_one: bool = False,
    ) -> tuple[Float[Tensor, "b t h e"], Float[Tensor, "r past width"]]:
        """`forward`, SiLU, and perhaps `unit`, by heads."""
        if offsets is None and self.weight is not None and layer.fits(x, width=self.width // heads, taps=self.kernel):
            return layer.short_conv(x, past, self.weight, heads, at_length_one), self.advance(x, past, None)
        y, past = self(x, past, offsets)
        y = F.silu(y).unflatten(-1, (heads, self.width // heads))
        return unit(y) if at_length_one else y, past

    def advance(
        self, x: Float[Tensor, "b t width"], past: Float[Tensor, "r past width"], offsets: Sequence[int] | None
    ) -> Tensor:
        """Only the inputs to carry on, as `forward` would return them."""
        if offsets is None:
            return carry_on(past, x)
        return torch.cat([carry_on(past[row : row + 1], x[:, a:b]) for row, (a, b) in enumerate(pairwise(offsets))])

    def _convolve(self, x: Tensor) -> Tensor:
        """``[b t+kernel-1 width]`` to ``[b t width]``. As a flat image: torch's one-dimensional depthwise backward is 2.5 x
        slower on a CPU.
        """
        assert self.weight is not None
        weight = self.weight.to(x.dtype)[:, None, None]
        return F.conv2d(x.mT.unsqueeze(2), weight, groups=self.width).squeeze(2).mT


class Features(nn.Module):
    """Unit keys to unit features of the same width, per head: the slow layers of a deep memory, which training moves and no text.

    Each layer adds gated features (SwiGLU's, `hidden` of them at length 1, projected back) to what it was given, and brings the
    sum back to length 1. The way back starts at zero: an untrained deep memory is a matrix.
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
        return [(getattr(self, f"up{index}"), getattr(self, f"down{index}")) for index in range(self.depth)]

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for up, down in self.layers:
                device = "meta" if up.is_meta else "cpu"  # the same numbers on every device
                up.copy_(torch.randn(up.shape, device=device) / math.sqrt(self.width))
                down.zero_()

    def forward(self, x: Float[Tensor, "b t h width"]) -> Float[Tensor, "b t h width"]:
        dtype = x.dtype
        if layer.fits(x, width=self.width, features=self.hidden):
            for up, down in self.layers:
                x = layer.lift(x, up, down)
            return x
        with torch.autocast(x.device.type, enabled=False):
            for up, down in self.layers:
                gate, value = (math.sqrt(self.width) * torch.einsum("bthi,hio->btho", x, up.to(dtype))).chunk(2, -1)
                added = torch.einsum("btho,hoi->bthi", unit(F.silu(gate) * value), down.to(dtype))
                x = unit(x + added)
        return x


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

    def logs(self, x: Float[Tensor, "b t d"], flipped: Sequence[bool]) -> tuple[Float[Tensor, "b t h"], ...]:
        """Log sigmoid of each gate's logits, of their negatives where flipped."""
        if layer.fits(x, gates=len(self.bias)):
            return layer.log_gates(x, self.weight, self.bias, self.heads, flipped)
        return tuple(F.logsigmoid(-logit if flip else logit) for logit, flip in zip(self(x), flipped, strict=True))
