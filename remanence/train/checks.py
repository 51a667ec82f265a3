"""Checks of configuration fields against their annotations and ranges. This module does not import torch."""

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
"""The words that error messages use for types."""


def check_types(config: DataclassInstance) -> None:
    """Raise an error if the value of a field of a dataclass does not match its type annotation."""
    hints = get_type_hints(type(config))
    for field in fields(config):
        value = getattr(config, field.name)
        if not _fits(hints[field.name], value):
            raise ValueError(f"{field.name}: expected {_describe(hints[field.name])}, got {value!r}")


def _fits(hint: object, value: object) -> bool:
    """Whether a value matches a type annotation.

    Floats must be finite, and integers are accepted as floats.
    """
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
    """Describe a type annotation in words, for error messages."""
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
    """Raise an error if a value is outside of [low, high]."""
    for name, value in values.items():
        if not low <= value <= high:
            raise ValueError(f"{name}: expected a number from {low:g} to {high:g}, got {value!r}")


def check_positive(**values: float) -> None:
    """Raise an error if a value is not above 0."""
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"{name}: expected a number above 0, got {value!r}")
