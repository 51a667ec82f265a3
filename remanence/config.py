"""What a model is made of, as frozen data: validated when made, saved with every checkpoint. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


def _positive(**fields: float | None) -> None:
    for name, value in fields.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name}: expected a positive number, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """One neural memory layer.

    The net, the rule and the chunk decide which function the memory computes; the defaults are the NeurIPS paper's (two
    layers, expansion 4, GELU, ``x + LN(...)``, chunk 16). The gates' biases are the ones that trained stably when measured:
    docs/paper.md.

    Attributes:
        dim: width of the model the layer stands in.
        heads: independent memories side by side. Default: as many as make a head 64 wide.
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
        _positive(dim=self.dim, heads=self.heads, head_dim=self.head_dim, chunk=self.chunk)
        if self.conv < 0:
            raise ValueError(f"conv: expected a kernel of 1 or more, or 0 for none, got {self.conv!r}")
        if self.heads is None:
            width = self.head_dim or min(64, self.dim)
            object.__setattr__(self, "heads", max(1, self.dim // width))
        assert self.heads is not None
        if self.head_dim is None:
            if self.dim % self.heads:
                raise ValueError(f"heads: expected a divisor of dim={self.dim}, got {self.heads} (or give head_dim too)")
            object.__setattr__(self, "head_dim", self.dim // self.heads)

    @property
    def inner(self) -> int:
        """Width of all heads together."""
        assert self.heads is not None and self.head_dim is not None
        return self.heads * self.head_dim
