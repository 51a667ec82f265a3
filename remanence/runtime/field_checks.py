"""Checks of config fields, which may come from files and hold anything that JSON can express. Imports no torch."""

from __future__ import annotations

from math import nextafter

from remanence.runtime.choices import short_repr

MOST = 2**31 - 1
"""The largest size: torch can represent the product of two of them as an integer."""
ABOVE_0 = nextafter(0.0, 1.0)
LARGE = 1e15
"""The largest number that is not a size: integers up to it are exact as floats."""


def check_integers(least: int, **fields: object) -> None:
    """Check that fields are integers from `least` to `MOST`."""
    for name, value in fields.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}: expected an integer of at least {least}, got {short_repr(value)}")
        if value > MOST:
            raise ValueError(f"{name}: expected an integer of at most {MOST:,}, got {short_repr(value)}")


def check_optional_integers(least: int, **fields: object) -> None:
    check_integers(least, **{name: value for name, value in fields.items() if value is not None})


def is_number(value: object, low: float, high: float) -> bool:
    """Whether a value is a number from low to high; NaN and infinity are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def check_names(**fields: object) -> None:
    """Check that fields are strings. Whether an entry has the name is checked where it is looked up."""
    for name, value in fields.items():
        if not isinstance(value, str):
            raise ValueError(f"{name}: expected a name, got {short_repr(value)}")
