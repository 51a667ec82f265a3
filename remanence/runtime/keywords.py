"""The fields of configs as keyword arguments.

Type checkers and editors read the `TypedDict` classes; `help()` reads the signature that `show_fields` makes.
The fields are the same as those of the classes in `remanence.config`, which a test checks. The `TypedDict` of
a model's fields is next to the model's config.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Literal, TypedDict, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Function = TypeVar("Function", bound=Callable[..., object])


class DefaultOf:
    """A placeholder in a signature for a default that is defined elsewhere: ``window: int = <from config>``."""

    def __init__(self, source: str) -> None:
        self.source = source

    def __repr__(self) -> str:
        return f"<from {self.source}>"


def show_fields(
    *configs: type[DataclassInstance],
    default_of: str | None = None,
    defaults: Mapping[str, object] | None = None,
    omit: tuple[str, ...] = (),
) -> Callable[[Function], Function]:
    """Return a decorator that makes the signature of a function with ``**fields`` list the dataclasses' fields.

    Args:
        configs: the dataclasses whose fields are listed.
        default_of: the name of the object that defines the defaults; None if the dataclasses do.
        defaults: defaults that differ from those of the dataclass.
        omit: fields that are not listed.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        for field in (field for config in configs for field in fields(config) if field.name not in omit):
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            if default_of is not None:
                default = DefaultOf(default_of)
            default = (defaults or {}).get(field.name, default)
            own.append(
                inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=field.type
                )
            )
        setattr(function, "__signature__", signature.replace(parameters=own))  # noqa: B010
        return function

    return decorate


class MemoryFields(TypedDict, total=False):
    """The fields of `MemoryConfig`."""

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
    """The fields of `KnnConfig`."""

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
    store_dtype: Literal["auto", "int8"]
    store_device: Literal["auto", "cpu"]


class SentenceFields(TypedDict, total=False):
    """The fields of `SentenceConfig` whose names no other memory has."""

    key_dim: int
    recalled: int
    longest: int
    shortest: int
    query: int
    answer: int
    rank: int


class AttachFields(MemoryFields, KnnFields, SentenceFields, total=False):
    """The fields of the memory that `attach` adds: those of `MemoryConfig`; with ``kind="knn"`` of `KnnConfig`,
    with ``kind="sentences"`` of `SentenceConfig`.
    """
