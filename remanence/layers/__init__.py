"""Small parts that more than one room uses: projections, normalisation, feed-forward, rotary angles, the short convolution,
features of keys, gates that keep their bias.

Every parameter may have one axis more in front: the weights of several layers at once, each for its equal share of the rows,
which stand one behind the other (`remanence.mixers.wavefront`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from itertools import pairwise
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from remanence.core.state import carry_on
from remanence.ops import layer_cpu
from remanence.ops.triton import layer

P, T = ParamSpec("P"), TypeVar("T")


def kept(make: Callable[P, T]) -> Callable[P, T]:
    """A function of sizes that is asked the same again and again, by every layer: its last results are kept. Not while torch
    looks on only for shapes: a tensor without numbers must not stay.
    """
    remembered = lru_cache(maxsize=16)(torch.inference_mode(False)(make))

    @wraps(make)
    def ask(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling() or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return make(*args, **kwargs)
        return remembered(*args, **kwargs)

    return ask


class Linear(nn.Linear):
    """A projection without a bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Float[Tensor, "b t inputs"]) -> Float[Tensor, "b t outputs"]:
        if self.weight.dim() == 2:
            return F.linear(x, self.weight)
        if hasattr(self.weight, "gradient_sum") and torch.is_grad_enabled():
            return _projected(x, self)[0]
        stacked = x.reshape(len(self.weight), -1, x.shape[-1])
        return torch.bmm(stacked, self.weight.mT).view(*x.shape[:-1], self.out_features)


def project(x: Float[Tensor, "b t d"], *projections: Linear) -> tuple[Tensor, ...]:
    """Several projections of the same x. On a GPU their gradients are added up inside the products, not by other kernels."""
    if len(projections) < 2 or not x.is_cuda or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return tuple(projection(x) for projection in projections)
    return _projected(x, *projections)


def _projected(x: Tensor, *projections: Linear) -> tuple[Tensor, ...]:
    dtype = operand(x)
    sums = tuple(getattr(projection.weight, "gradient_sum", None) for projection in projections)
    return _Projected.apply(x.to(dtype), sums, *[projection.weight.to(dtype) for projection in projections])


class _Projected(torch.autograd.Function):
    """A weight may say where its gradients are added up (`gradient_sum`, which gives the tensor): there they are, and autograd
    gets none. On a GPU that is part of the product, so that each step's gradient is neither rounded nor written and read again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sums: tuple[Callable[[], Tensor] | None, ...], *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.sums = sums
        ctx.set_materialize_grads(False)
        stacked = _stacked(x, weights[0])
        with torch.autocast(x.device.type, enabled=False):
            if weights[0].dim() == 2:
                return tuple(F.linear(x, weight) for weight in weights)
            return tuple(torch.bmm(stacked, weight.mT).view(*x.shape[:-1], weight.shape[-2]) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        x, *weights = ctx.saved_tensors
        inputs, total = _stacked(x, weights[0]), None
        found: list[Tensor | None] = []
        wanted, _, *wants = ctx.needs_input_grad
        for weight, grad, wants_this, gradient_sum in zip(weights, grads, wants, ctx.sums, strict=True):
            found.append(None)
            if grad is None:
                continue
            g = _stacked(grad, weight)
            if wants_this and gradient_sum is None:
                found[-1] = g.mT @ inputs
            elif wants_this:
                _add_products(gradient_sum(), g.mT, inputs)
            if not wanted:
                continue
            if total is None:
                total = g @ weight
            elif weight.dim() == 2:
                total.addmm_(g, weight)
            else:
                total.baddbmm_(g, weight)
        return None if total is None else total.view_as(x), None, *found


def _add_products(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, ``[n i o]`` each; on a GPU without a rounding in between, as the product itself adds in float32."""
    if total.dtype == a.dtype:
        total.baddbmm_(a, b)
    elif a.is_cuda and total.dtype == torch.float32:
        torch.ops.aten.baddbmm.dtype_out(total, a, b, torch.float32, out=total)
    else:
        total += a @ b


def _stacked(x: Tensor, weight: Tensor) -> Tensor:
    """Tokens ``[b*t d]`` for a plain weight, ``[n b*t d]`` for several layers'."""
    return x.flatten(0, -2) if weight.dim() == 2 else x.reshape(len(weight), -1, x.shape[-1])


def shared(weight: Tensor, plain: int, x: Tensor) -> Tensor:
    """A weight of `plain` axes as it is, or several layers' so shaped that each meets its own share of x's rows, once x's first
    axis is split into shares.
    """
    return weight if weight.dim() == plain else weight.view(len(weight), *[1] * (x.dim() - plain), *weight.shape[1:])


class RMSNorm(nn.Module):
    """Scale to unit mean square over the last axis, with a learned gain."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Float[Tensor, "... width"], dtype: torch.dtype | None = None) -> Float[Tensor, "... width"]:
        """In x's dtype, or another."""
        dtype = dtype or x.dtype
        if layer.fits(x, channels=self.width):
            return layer.rms_norm(x, self.weight, self.eps, dtype)
        if self.weight.dim() == 1:
            return F.rms_norm(x, (self.width,), self.weight.to(x.dtype), self.eps).to(dtype)
        parts = F.rms_norm(x, (self.width,), None, self.eps).unflatten(0, (len(self.weight), -1))
        return (parts * shared(self.weight.to(x.dtype), 1, x)).flatten(0, 1).to(dtype)

    def gated(self, x: Float[Tensor, "b t h width"], gate: Float[Tensor, "b t inner"]) -> Float[Tensor, "b t inner"]:
        """Per head, times SiLU of a gate."""
        if layer.fits(x, width=self.width) and layer.fits(gate):
            return layer.gated_norm(x, gate, self.weight, self.eps)
        if layer_cpu.fits(x):
            return layer_cpu.gated_norm(x, gate, self.weight, self.eps)
        return self(x).flatten(-2) * F.silu(gate)


def unit(x: Tensor) -> Tensor:
    """x at length 1 over its last axis; computed in float32 at least, returned in x's dtype. Below 1e-6 it fades to zero."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-12)).to(x.dtype)


def operand(x: Tensor) -> torch.dtype:
    """x's dtype as autocast's products take it: what is cast once for all of them is not cast by autocast for each, and back."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if x.dtype == torch.float32 and torch.is_autocast_enabled(device) else x.dtype


class SwiGLU(nn.Module):
    """The feed-forward layer: two projections up, one through SiLU as the other's gate, and one down."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (Linear(dim, hidden) for _ in range(2))
        self.down = Linear(hidden, dim)

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        gate, up = project(x, self.gate, self.up)
        return self.down(layer.swiglu(gate, up) if layer.fits(gate) else F.silu(gate) * up)


class Rotary:
    """Turns each pair of channels of ``[r t h e]`` by its token's position. Angles in float64: in float32 they are off by 0.04
    at two million.
    """

    def __init__(self, position: Int[Tensor, "#r t"], width: int, base: float, dtype: torch.dtype) -> None:
        self.dtype = dtype if dtype == torch.float64 else torch.float32
        half = torch.arange(width // 2, dtype=torch.float64, device=position.device) / (width // 2)
        angles = position.unsqueeze(-1) * base**-half
        self.cos, self.sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def __call__(self, x: Float[Tensor, "r t h e"]) -> Float[Tensor, "r t h e"]:
        if layer.fits(x, width=x.shape[-1]):
            return layer.rotary(x, self.cos, self.sin)
        (a, b), cos, sin = x.to(self.dtype).chunk(2, -1), self.cos.unsqueeze(-2), self.sin.unsqueeze(-2)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


@kept
def from_start(length: int, times: int, width: int, base: float, dtype: torch.dtype, device: torch.device) -> Rotary:
    """`Rotary` of the positions 0 to length - 1, so many times over; made once for all layers and calls that begin there."""
    position = torch.arange(length, device=device).repeat(times).unsqueeze(0)
    return Rotary(position, width, base, dtype)


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
            return layer.short_conv(x, past, self.weight, heads, at_length_one)
        if offsets is None and self.weight is not None and layer_cpu.fits(x):
            return layer_cpu.short_conv(x, past, self.weight, heads, at_length_one), self.advance(x, past, None)
        y, past = self(x, past, offsets)
        y = F.silu(y).unflatten(-1, (heads, self.width // heads))
        return unit(y) if at_length_one else y, past

    def advance(
        self, x: Float[Tensor, "b t width"], past: Float[Tensor, "r past width"], offsets: Sequence[int] | None
    ) -> Tensor:
        """Only the inputs to carry on, as `forward` would return them."""
        if offsets is None:
            return layer_cpu.carry_on(past, x) if layer_cpu.fits(x) else carry_on(past, x)
        return torch.cat([carry_on(past[row : row + 1], x[:, a:b]) for row, (a, b) in enumerate(pairwise(offsets))])

    def _convolve(self, x: Tensor) -> Tensor:
        """``[b t+kernel-1 width]`` to ``[b t width]``. As a flat image: torch's one-dimensional depthwise backward is 2.5 x
        slower on a CPU.
        """
        assert self.weight is not None
        weight = self.weight.to(x.dtype).flatten(0, -2)[:, None, None]
        if self.weight.dim() == 2:
            return F.conv2d(x.mT.unsqueeze(2), weight, groups=self.width).squeeze(2).mT
        groups = len(self.weight)
        channels = x.unflatten(0, (groups, -1)).permute(1, 0, 3, 2).flatten(1, 2).unsqueeze(2)  # each layer's are its own
        y = F.conv2d(channels, weight, groups=len(weight)).squeeze(2).unflatten(1, (groups, -1))
        return y.permute(1, 0, 3, 2).flatten(0, 1)


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
        if layer.fits(x, width=self.width, features=self.hidden):
            for up, down in self.layers:
                x = layer.lift(x, up, down)
            return x
        if layer_cpu.fits(x):
            for up, down in self.layers:
                x = layer_cpu.lift(x, up, down)
            return x
        with torch.autocast(x.device.type, enabled=False):
            for up, down in self.layers:
                gate, value = (math.sqrt(self.width) * by_heads(x, up)).chunk(2, -1)
                x = unit(x + by_heads(unit(F.silu(gate) * value), down))
        return x


def by_heads(
    x: Float[Tensor, "b t h i"], weight: Tensor, base: Float[Tensor, "b t h o"] | None = None
) -> Float[Tensor, "b t h o"]:
    """Each head times its own matrix ``[h i o]``, added to `base` if given."""
    if layer.fits(x, width=x.shape[-1]) and (base is None or base.dtype == x.dtype):
        return layer.by_heads(x, weight, base)
    weight = weight.to(x.dtype)
    if weight.dim() == 3:
        y = torch.einsum("bthi,hio->btho", x, weight)
    else:
        y = torch.einsum("gbthi,ghio->gbtho", x.unflatten(0, (len(weight), -1)), weight).flatten(0, 1)
    return y if base is None else base + y


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
            if self.weight.dim() == 2:
                logits = F.linear(wide, self.weight.to(wide.dtype)) * scale + self.bias.to(wide.dtype)
            else:
                parts = wide.unflatten(0, (len(self.weight), -1))
                products = torch.einsum("gbtd,god->gbto", parts, self.weight.to(wide.dtype))
                logits = products.flatten(0, 1) * scale
                logits = (logits.unflatten(0, (len(self.bias), -1)) + shared(self.bias.to(wide.dtype), 1, wide)).flatten(0, 1)
        return logits.unflatten(-1, (len(self.biases), self.heads)).unbind(-2)

    def logs(self, x: Float[Tensor, "b t d"], flipped: Sequence[bool]) -> tuple[Float[Tensor, "b t h"], ...]:
        """Log sigmoid of each gate's logits, of their negatives where flipped."""
        if layer.fits(x, gates=self.bias.shape[-1]):
            return layer.log_gates(x, self.weight, self.bias, self.heads, flipped)
        if layer_cpu.fits(x):
            return layer_cpu.log_gates(x, self.weight, self.bias, self.heads, flipped)
        return tuple(F.logsigmoid(-logit if flip else logit) for logit, flip in zip(self(x), flipped, strict=True))
