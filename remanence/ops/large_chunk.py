"""The large-chunk rule: one update per chunk, with momentum and weight rows of fixed norm, as in LaCT (Zhang et al.,
"Test-Time Training Done Right", arXiv 2505.23884).

    G = sum_i theta_i grad loss(f(k_i), v_i)            at the weights of the chunk's start
    S <- mean_i(eta_i) S - G                            momentum across chunks
    W <- W + S, then every row is scaled to the norm it had at the document's start

Everything else (reference backend, streaming, packed documents, memory files, decoding, the layer) works for any
`Rule` and `Net` and needs no code here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from remanence.ops.nets import NETS
from remanence.ops.rules import RULES, Loss, Rule
from remanence.ops.state import Gates, RuleState, Weights


@dataclass(frozen=True, kw_only=True)
class SwiGLU:
    """A SwiGLU memory net, ``(silu(x A) * (x B)) C``, whose hidden width is `expansion` times the width of x."""

    expansion: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.expansion < math.inf:
            raise ValueError(f"expansion: expected a positive number, got {self.expansion!r}")

    def init(self, heads: int, width: int, generator: torch.Generator | None = None) -> Weights:
        hidden = max(1, round(self.expansion * width))
        shapes = (width, hidden), (width, hidden), (hidden, width)
        return tuple(torch.randn(heads, *shape, generator=generator) / shape[0] ** 0.5 for shape in shapes)

    def apply(self, weights: Weights, x: Tensor) -> Tensor:
        a, b, c = weights
        return (F.silu(x @ a) * (x @ b)) @ c


@dataclass(frozen=True, kw_only=True)
class LargeChunk(Rule):
    """A rule with one update per chunk and with momentum. Weight rows keep their norm, which bounds the weights.

    read
        "chunk": all queries of a chunk are answered from the weights at its start (cheaper, and as in LaCT).
        "token": each query is answered from the weights after an update with the chunk's tokens so far.
    loss
        The inner loss, as in `Rule`; LaCT uses "dot". LaCT's other optimizer, Muon, is not implemented.

    A row is ``W[i]``, the weights of one input. Rows that are zero at the start of a document are not normalised.
    """

    read: Literal["token", "chunk"] = "chunk"
    loss: str | Loss = "dot"

    momentum = True
    granularity = "chunk"

    def init_state(self, weights: Weights) -> Weights:
        """Return zero momentum for each weight, then the norms of the rows of each weight."""
        return (
            *[torch.zeros_like(weight) for weight in weights],
            *[_row_norms(weight) for weight in weights],
        )

    def update(self, state: RuleState, gradients: Weights, gates: Gates) -> RuleState:
        count = len(gradients)
        past, norms = state.buffers[:count], state.buffers[count:]
        assert gates.log_momentum is not None
        eta = gates.log_momentum.exp().mean()
        momentum = tuple(eta * old - now for old, now in zip(past, gradients, strict=True))
        moved = [weight + change for weight, change in zip(state.weights, momentum, strict=True)]
        weights = tuple(_scale_rows(weight, norm) for weight, norm in zip(moved, norms, strict=True))
        return RuleState(weights, (*momentum, *norms))


def _row_norms(weight: Tensor) -> Tensor:
    """Return the norm of each row. The derivative of a norm of 0 is defined as 0."""
    square = weight.square().sum(-1, keepdim=True)
    return torch.where(square > 0, square.where(square > 0, 1.0).sqrt(), 0.0)


def _scale_rows(weight: Tensor, norm: Tensor) -> Tensor:
    """Return the weight with its rows scaled to these norms. Rows whose current or wanted norm is 0 stay
    unchanged.
    """
    now = _row_norms(weight)
    fixed = (norm > 0) & (now > 0)
    return torch.where(fixed, weight * (norm / now.where(fixed, 1.0)), weight)


NETS["swiglu"] = SwiGLU()
RULES["large_chunk"] = LargeChunk()
