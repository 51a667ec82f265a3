"""Checks of configuration fields against their annotations and ranges. Imports no torch."""

from __future__ import annotations

from dataclasses import fields
from math import isfinite
from typing import TYPE_CHECKING, Literal, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

NAMES = {
    int: "an integer",
    float: "a finite number",
    bool: "true or false",
    str: "a text",
    type(None): "none",
}


def check_types(config: DataclassInstance) -> None:
    """Check every field of a dataclass against its annotation, which a file or a caller may have ignored."""
    hints = get_type_hints(type(config))
    for field in fields(config):
        value = getattr(config, field.name)
        if not _fits(hints[field.name], value):
            raise ValueError(f"{field.name}: expected {_describe(hints[field.name])}, got {value!r}")


def _fits(hint: object, value: object) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return value in inner
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        hints = inner[:1] * len(value) if inner[-1:] == (...,) else inner
        return len(value) == len(hints) and all(map(_fits, hints, value))
    if origin is not None:  # a union
        return any(_fits(option, value) for option in inner)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
    assert isinstance(hint, type)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def _describe(hint: object) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin is tuple:
        number = "several" if inner[-1] is ... else str(len(inner))
        return f"{number}, each {_describe(inner[0])}"
    if origin is not None:
        return " or ".join(map(_describe, inner))
    assert isinstance(hint, type)
    return NAMES.get(hint, hint.__name__)


def check_between(low: float, high: float, **values: float) -> None:
    for name, value in values.items():
        if not low <= value <= high:
            raise ValueError(f"{name}: expected a number from {low:g} to {high:g}, got {value!r}")


def check_positive(**values: float) -> None:
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"{name}: expected a number above 0, got {value!r}")
