"""Checks of config fields. Configs may come from files, so a field can hold any JSON value. Imports no torch."""

from __future__ import annotations

from math import nextafter

from remanence.runtime.choices import short_repr

MOST = 2**31 - 1
"""The largest size allowed in a config. The product of two sizes still fits into torch's integers."""
ABOVE_0 = nextafter(0.0, 1.0)
"""The smallest number above 0, as the lower bound of fields that must be positive."""
LARGE = 1e15
"""The largest allowed value of a number that is not a size. Integers up to it are exact as floats."""


def check_integers(least: int, **fields: object) -> None:
    """Check that fields are integers from `least` to `MOST`."""
    for name, value in fields.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}: expected an integer of at least {least}, got {short_repr(value)}")
        if value > MOST:
            raise ValueError(f"{name}: expected an integer of at most {MOST:,}, got {short_repr(value)}")


def check_optional_integers(least: int, **fields: object) -> None:
    """Check that fields are None or integers from `least` to `MOST`."""
    check_integers(least, **{name: value for name, value in fields.items() if value is not None})


def is_number(value: object, low: float, high: float) -> bool:
    """Whether a value is a number from `low` to `high`. NaN, infinity and booleans are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def check_names(**fields: object) -> None:
    """Check that fields are strings. Whether the name exists is checked where it is looked up."""
    for name, value in fields.items():
        if not isinstance(value, str):
            raise ValueError(f"{name}: expected a name, got {short_repr(value)}")
