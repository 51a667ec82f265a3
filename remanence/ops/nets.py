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
        """Return the initial float32 weights, a tuple of tensors ``[heads, ...]``."""
        ...

    def apply(self, weights: Weights, x: Tensor) -> Tensor:
        """Return the answers ``[... e]`` of one head to x ``[... e]``. The weights have no heads axis."""
        ...


@dataclass(frozen=True, kw_only=True)
class MLP:
    """A multi-layer perceptron memory, ``x + LN(W ... act(W x))`` by default, as in the paper.

    ``norm=False`` is the plain residual net, which is unstable with more than one layer (docs/paper.md). With
    ``residual=False`` and depth 1 as well, it is a matrix, the memory of linear attention and DeltaNet. The LayerNorm
    has no gain. A bias is one more row of its layer's weight.
    """

    depth: int = 2
    """The number of layers, 1 to 4."""
    expansion: float = 4.0
    """The width of the hidden layers as a multiple of the head width."""
    activation: Literal["gelu", "silu"] = "gelu"
    """The activation function between layers."""
    residual: bool = True
    """Whether the input x is added to the output."""
    norm: bool = True
    """Whether the output of the last layer is normalised by LayerNorm."""
    bias: bool = False
    """Whether each layer has a bias."""

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
        """Return the width of the input, then the width of each layer's output. `values` is the width of the
        last output and defaults to `width`.
        """
        return [
            width,
            *[max(1, round(self.expansion * width))] * (self.depth - 1),
            width if values is None else values,
        ]

    def shapes(self, width: int, values: int | None = None) -> list[tuple[int, int]]:
        """Return the shape of each layer's weight, for one head."""
        return [(a + self.bias, b) for a, b in pairwise(self.widths(width, values))]

    def init(
        self, heads: int, width: int, generator: torch.Generator | None = None, *, values: int | None = None
    ) -> Weights:
        """Return normally distributed weights that preserve the scale of activations. Their variance is 1 /
        inputs in the first layer and 4 / inputs after an activation, because activations halve small inputs.
        If the scale shrank from layer to layer, the final LayerNorm would multiply gradients by up to 1 /
        sqrt(eps).
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


def is_matrix(net: object) -> bool:
    """Whether a memory net is a matrix: its answers are ``x @ W``."""
    return isinstance(net, MLP) and net.rectangular and not net.bias


@dataclass(frozen=True, kw_only=True)
class Deep:
    """A deep memory with stable dynamics, ``phi(x) (A + W)``. Only W is written at test time.

    phi stands for the first layers, which are learned in training. Each of them adds SwiGLU features to the
    unit key and normalises the sum to length 1. W, the last layer, starts at zero and decays towards zero. A
    is a learned matrix that is never written or forgotten and has no influence on the surprise. With the rule
    ``gated_delta`` an update is ``gamma (I - beta phi' phi) W + beta phi' v``. Therefore, for any text and
    any gates, neither a difference between two states nor a gradient can grow.

    `NeuralMemory` computes phi. The operator receives phi(k) as keys and `fast` as the net. With depth 1,
    phi(x) = x and the memory is a matrix.
    """

    depth: int = 2
    """The number of layers including W, 1 to 4."""
    expansion: float = 1.0
    """The number of gated features as a multiple of the head width."""

    def __post_init__(self) -> None:
        if not 1 <= self.depth <= 4:
            raise ValueError(f"depth: expected 1, 2, 3 or 4 layers, got {self.depth!r}")
        if not 0 < self.expansion < math.inf:
            raise ValueError(f"expansion: expected a positive number, got {self.expansion!r}")

    @property
    def fast(self) -> MLP:
        """The net of the fast weights W, which are written at test time. It is a single matrix."""
        return MLP(depth=1, norm=False, residual=False)

    def features(self, width: int) -> int:
        """Return the number of features of a key, for heads of this width."""
        return width

    def hidden(self, width: int) -> int:
        """Return the number of gated features in each of the first layers, for heads of this width."""
        return max(1, round(self.expansion * width))


@dataclass(frozen=True, kw_only=True)
class Sparse:
    """A memory of wide, sparse features, ``phi(x) (A + W)``, as `Deep` but for phi: the `keep` largest of many products
    of the key (`remanence.layers.SparseFeatures`).

    Keys that are merely similar share few features, so a matrix of them holds many more pairs than one of the keys
    themselves, and a write touches `keep` rows. phi does not depend on the state and is at most of length 1, so an
    update contracts as in `Deep`.
    """

    expansion: float = 8.0
    """The number of features as a multiple of the head width."""
    keep: int = 32
    """How many features are not zero."""
    learned: bool = True
    """Whether the expansion is trained, or random and fixed."""

    def __post_init__(self) -> None:
        if not 0 < self.expansion < math.inf:
            raise ValueError(f"expansion: expected a positive number, got {self.expansion!r}")
        if self.keep < 1:
            raise ValueError(f"keep: expected at least 1, got {self.keep!r}")

    @property
    def fast(self) -> MLP:
        """The net of the fast weights W, which are written at test time. It is a single matrix."""
        return MLP(depth=1, norm=False, residual=False)

    def features(self, width: int) -> int:
        """Return the number of features of a key, for heads of this width: at least `keep`."""
        return max(self.keep, round(self.expansion * width))


@runtime_checkable
class FeatureNet(Protocol):
    """A net of which only a last matrix is written, at features of the keys that `NeuralMemory` computes. The operator
    receives the features as keys, and `fast` as the net.
    """

    @property
    def fast(self) -> MLP: ...

    def features(self, width: int) -> int: ...


def overflow_scale(x: Tensor) -> Tensor:
    """Return a factor for each row that limits its absolute values to 1e12. LayerNorm does not depend on a
    row's scale, but the square of a float32 overflows at 1e19.
    """
    return (1e12 / x.detach().abs().amax(-1, keepdim=True)).clamp(max=1.0)


def layer_norm(x: Tensor) -> Tensor:
    """Compute LayerNorm without gain from elementary operations. Double backward needs its third derivative,
    which is wrong in torch's own LayerNorm.
    """
    x = x * overflow_scale(x)
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + LAYER_NORM_EPS)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "silu": F.silu}
"""The activation functions of `MLP`, by name."""

NETS: dict[str, Any] = {
    "deep": Deep(),
    "sparse": Sparse(),
    "sparse_random": Sparse(learned=False),
    "titans": MLP(),
    "residual": MLP(norm=False),
    "linear": MLP(depth=1, norm=False, residual=False),
}
"""The memory nets that a configuration can name."""
