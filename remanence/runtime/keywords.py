"""The fields of configs as keyword arguments: an editor completes them, and a type checker refuses others.

They are those of `remanence.config`'s classes, none of which has to be given; a test compares both. A model's own are
beside its config.
"""

from __future__ import annotations

from typing import Literal, TypedDict


class MemoryFields(TypedDict, total=False):
    """Of `MemoryConfig`."""

    dim: int
    heads: int | None
    head_dim: int | None
    net: str
    depth: int | None
    expansion: float | None
    activation: Literal["gelu", "silu"] | None
    bias: bool | None
    rule: str
    anchor: Literal["chunk", "token"] | None
    chunk: int
    conv: int
    induction: bool
    step_bias: float | None
    momentum_bias: float
    forget_bias: float
    threshold: float


class KnnFields(TypedDict, total=False):
    """Of `KnnConfig`."""

    k: int
    size: int
    fuse: Literal["gate", "joint"]
    search: str
    write: str
    fraction: float
    neighbours: int
    evict: Literal["oldest", "importance"]
    half_life: float | None
    shared: bool
