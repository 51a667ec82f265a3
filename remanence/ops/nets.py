"""What a memory is: its weights and what they answer. Knows no time.

A net is any object with ``init`` and ``apply``; a user's own takes the generic path. ``MLP`` also has a closed form
(closed_form), which is where the speed is.
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

EPS = 1e-5
"""Of the memory's own LayerNorm, inside the square root."""


@runtime_checkable
class Net(Protocol):
    """A memory: how its weights start and what they answer.

    If it has slow parameters of its own (a learned gain, say), give it a method ``parameters()``: they then get their
    gradients. Keep it a plain object inside a layer: ``nn.Module.apply(fn)`` walks all submodules, and would meet this
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
    """A multi-layer perceptron memory: ``x + LN(W ... act(W x))``, the paper's, unless told otherwise.

    norm=False is the plain residual net, which is unstable with more than one layer (docs/paper.md); with
    residual=False too and depth 1 it is a matrix, the memory of linear attention and DeltaNet. The LayerNorm has no
    gain: one would have to be declared slow or fast. A bias is one more row of its layer's weight.
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
        """Whether the answer is linear in the weights, so that the token-exact rule can run in parallel."""
        return self.depth == 1 and not self.norm

    @property
    def rectangular(self) -> bool:
        """Whether values may have another width than keys."""
        return self.linear and not self.residual

    def widths(self, width: int, values: int | None = None) -> list[int]:
        """The width after each layer, the input's first; values are as wide as keys unless given."""
        return [
            width,
            *[max(1, round(self.expansion * width))] * (self.depth - 1),
            width if values is None else values,
        ]

    def shapes(self, width: int, values: int | None = None) -> list[tuple[int, int]]:
        """The shape of each layer's weight, one head's."""
        return [(a + self.bias, b) for a, b in pairwise(self.widths(width, values))]

    def init(
        self, heads: int, width: int, generator: torch.Generator | None = None, *, values: int | None = None
    ) -> Weights:
        """Normal, such that each layer keeps its input's scale: variance 1 / inputs, and 4 / inputs after an
        activation, which halves what is small. Anything that shrinks from layer to layer would meet LN at up to
        1/sqrt(eps) times the gradient.
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
            y = normalise(y)
        return x + y if self.residual else y


@dataclass(frozen=True, kw_only=True)
class Deep:
    """A deep memory that is steady by design: ``phi(x) (A + W)``, of which reading writes W alone.

    phi are the first layers, learned in training: each adds SwiGLU features to the unit key and brings it back to
    length 1. W, the last layer, starts at zero and forgets towards zero; A is what training left there, which surprise
    never sees and nothing forgets. With the rule ``gated_delta`` a write is then
    ``gamma (I - beta phi' phi) W + beta phi' v``: for any text and any gates neither a difference of states nor its
    adjoint ever grows.

    A layer's, not the operator's, which is given phi(k) for keys and the net `fast`. depth 1: phi(x) is x, a matrix.
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
        """What is written: a matrix."""
        return MLP(depth=1, norm=False, residual=False)

    def hidden(self, width: int) -> int:
        """Gated features in each of the first layers."""
        return max(1, round(self.expansion * width))


def shrink(x: Tensor) -> Tensor:
    """1 for rows up to 1e12, less beyond: LayerNorm ignores a row's scale, but float32 squares overflow at 1e19."""
    return (1e12 / x.detach().abs().amax(-1, keepdim=True)).clamp(max=1.0)


def normalise(x: Tensor) -> Tensor:
    """LayerNorm without gain, written out: torch's own has a wrong third derivative, which a second backward needs."""
    x = x * shrink(x)
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "silu": F.silu}

NETS: dict[str, Any] = {
    "deep": Deep(),
    "titans": MLP(),
    "residual": MLP(norm=False),
    "linear": MLP(depth=1, norm=False, residual=False),
}
