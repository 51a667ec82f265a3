"""What a model is made of, as frozen data: validated when made, saved with every checkpoint. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Literal


def _whole(least: int, **fields: object) -> None:
    for name, value in fields.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ValueError(f"{name}: expected a whole number of at least {least}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """One neural memory layer.

    The net, the rule and the chunk decide which function the memory computes; the defaults are the NeurIPS paper's (two
    layers, expansion 4, GELU, ``x + LN(...)``, chunk 16). The gates' biases are the ones that trained stably when measured:
    docs/paper.md.

    Attributes:
        dim: width of the model the layer stands in.
        heads: independent memories side by side. Default: the divisor of dim that makes a head nearest to 64 wide.
        head_dim: width of each. Default: dim / heads.
        net: name of an entry of `remanence.ops.NETS`, yours included.
        depth, expansion, activation, bias: changes to that entry, where given.
        rule: name of an entry of `remanence.ops.RULES`.
        anchor: change to that entry. Default: "token" (exact) for a net linear in its weights, else the rule's own.
        chunk: tokens that share the gradient's anchor.
        conv: kernel of the causal depthwise convolution on q, k and v; 0 for none.
        step_bias, momentum_bias, forget_bias: where the gates start, before the sigmoid.
    """

    dim: int
    heads: int | None = None
    head_dim: int | None = None
    net: str = "titans"
    depth: int | None = None
    expansion: float | None = None
    activation: Literal["gelu", "silu"] | None = None
    bias: bool | None = None
    rule: str = "titans"
    anchor: Literal["chunk", "token"] | None = None
    chunk: int = 16
    conv: int = 4
    step_bias: float = -4.0
    momentum_bias: float = 0.0
    forget_bias: float = -5.0

    def __post_init__(self) -> None:
        _whole(1, dim=self.dim, heads=self.heads, head_dim=self.head_dim, chunk=self.chunk, depth=self.depth)
        _whole(0, conv=self.conv)
        if self.heads is not None and self.head_dim is None and self.dim % self.heads:
            raise ValueError(f"heads: expected a divisor of dim={self.dim}, got {self.heads} (or give head_dim too)")
        if self.anchor not in (None, "chunk", "token"):
            raise ValueError(f"anchor: expected 'chunk', 'token' or None, got {self.anchor!r}")
        for name in ("step_bias", "momentum_bias", "forget_bias"):
            if not isfinite(getattr(self, name)):
                raise ValueError(f"{name}: expected a finite number, got {getattr(self, name)!r}")

    @property
    def shape(self) -> tuple[int, int]:
        """Memory heads and the width of each, as given or as the defaults make them."""
        if self.heads is not None:
            return self.heads, self.head_dim or self.dim // self.heads
        if self.head_dim is not None:
            return max(1, self.dim // self.head_dim), self.head_dim
        divisors = [heads for heads in range(1, self.dim + 1) if self.dim % heads == 0]
        heads = min(divisors, key=lambda heads: abs(self.dim // heads - 64))
        return heads, self.dim // heads

    @property
    def inner(self) -> int:
        """Width of all heads together."""
        heads, width = self.shape
        return heads * width
