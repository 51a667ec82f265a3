"""Memory nets: functions with weights that map a query to an answer.

A net is any object with ``init`` and ``apply``; custom nets run on the generic path. ``MLP`` also has a fast closed
form (closed_form).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from remanence.ops.state import Weights

LAYER_NORM_EPS = 1e-5
"""The epsilon of the memory's LayerNorm, inside the square root."""


@runtime_checkable
class Net(Protocol):
    """A memory net: initial weights, and answers given weights.

    A net with slow parameters of its own (for example, a learned gain) needs a method ``parameters()``, so that they
    get gradients. It should not be an `nn.Module`: ``nn.Module.apply(fn)`` of an enclosing module would call this
    `apply`.
    """

    def init(self, heads: int, width: int, generator: torch.Generator | None = None) -> Weights:
        """Initial float32 weights, a tuple of tensors ``[heads, ...]``."""
        ...

    def apply(self, weights: Weights, x: Tensor) -> Tensor:
        """The answers ``[... e]`` of one head (its weights without the heads axis) to x ``[... e]``."""
        ...


@dataclass(frozen=True, kw_only=True)
class MLP:
    """A multi-layer perceptron memory, ``x + LN(W ... act(W x))`` by default, as in the paper.

    ``norm=False`` is the plain residual net, which is unstable with more than one layer (docs/paper.md). With
    ``residual=False`` and depth 1 as well, it is a matrix, the memory of linear attention and DeltaNet. The LayerNorm
    has no gain. A bias is one more row of its layer's weight.
    """

    depth: int = 2
    expansion: float = 4.0
    activation: Literal["gelu", "silu"] = "gelu"
    residual: bool = True
    norm: bool = True
    bias: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.depth <= 4:
            raise ValueError(f"depth: expected 1, 2, 3 or 4 layers, got {self.depth!r}")
        if not 0 < self.expansion < math.inf:
            raise ValueError(f"expansion: expected a positive number, got {self.expansion!r}")
        if self.activation not in ("gelu", "silu"):
            raise ValueError(f"activation: expected 'gelu' or 'silu', got {self.activation!r}")

    @property
    def linear(self) -> bool:
        """Whether answers are linear in the weights, so that the token-exact rule can be computed in parallel."""
        return self.depth == 1 and not self.norm

    @property
    def rectangular(self) -> bool:
        """Whether the widths of keys and values may differ."""
        return self.linear and not self.residual

    def widths(self, width: int, values: int | None = None) -> list[int]:
        """The width of the input and of each layer's output; `values` defaults to `width`."""
        return [
            width,
            *[max(1, round(self.expansion * width))] * (self.depth - 1),
            width if values is None else values,
        ]

    def shapes(self, width: int, values: int | None = None) -> list[tuple[int, int]]:
        """The shape of each layer's weight, for one head."""
        return [(a + self.bias, b) for a, b in pairwise(self.widths(width, values))]

    def init(
        self, heads: int, width: int, generator: torch.Generator | None = None, *, values: int | None = None
    ) -> Weights:
        """Normally distributed weights that preserve the scale of activations: variance 1 / inputs, and 4 / inputs
        after an activation, which halves small inputs. If activations shrank from layer to layer, the final LayerNorm
        would multiply gradients by up to 1 / sqrt(eps).
        """
        weights = []
        for layer, (rows, columns) in enumerate(self.shapes(width, values)):
            inputs = rows - self.bias
            weight = torch.randn(heads, rows, columns, generator=generator) * (
                (2.0 if layer else 1.0) / math.sqrt(inputs)
            )
            if self.bias:
                weight[:, -1] = 0.0
            weights.append(weight)
        return tuple(weights)

    def apply(self, weights: Weights, x: Tensor) -> Tensor:
        y = x
        for layer, weight in enumerate(weights):
            if layer:
                y = ACTIVATIONS[self.activation](y)
            y = y @ weight[:-1] + weight[-1] if self.bias else y @ weight
        if self.norm:
            y = layer_norm(y)
        return x + y if self.residual else y


@dataclass(frozen=True, kw_only=True)
class Deep:
    """A deep memory with stable dynamics, ``phi(x) (A + W)``: only W is written at test time.

    phi are the first layers, learned in training: each adds SwiGLU features to the unit key and normalises the sum to
    length 1. W, the last layer, starts at zero and decays towards zero. A is a learned matrix that is never written or
    forgotten and does not enter the surprise. With the rule ``gated_delta`` an update is
    ``gamma (I - beta phi' phi) W + beta phi' v``: for any text and any gates, neither a difference between two states
    nor a gradient can grow.

    `NeuralMemory` computes phi; the operator gets phi(k) as keys and the net `fast`. With depth 1, phi(x) = x and the
    memory is a matrix.
    """

    depth: int = 2
    expansion: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.depth <= 4:
            raise ValueError(f"depth: expected 1, 2, 3 or 4 layers, got {self.depth!r}")
        if not 0 < self.expansion < math.inf:
            raise ValueError(f"expansion: expected a positive number, got {self.expansion!r}")

    @property
    def fast(self) -> MLP:
        """The net of the fast weights W, which are written at test time: a matrix."""
        return MLP(depth=1, norm=False, residual=False)

    def hidden(self, width: int) -> int:
        """The number of gated features in each of the first layers."""
        return max(1, round(self.expansion * width))


def overflow_scale(x: Tensor) -> Tensor:
    """Factors that limit rows to 1e12: LayerNorm ignores a row's scale, but float32 squares overflow at 1e19."""
    return (1e12 / x.detach().abs().amax(-1, keepdim=True)).clamp(max=1.0)


def layer_norm(x: Tensor) -> Tensor:
    """LayerNorm without gain, written out: the third derivative of torch's is wrong, and double backward needs it."""
    x = x * overflow_scale(x)
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + LAYER_NORM_EPS)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "silu": F.silu}

NETS: dict[str, Any] = {
    "deep": Deep(),
    "titans": MLP(),
    "residual": MLP(norm=False),
    "linear": MLP(depth=1, norm=False, residual=False),
}
