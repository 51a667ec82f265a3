"""The fields of configs and settings with their values and meanings, for people to read. Imports no torch.

What a field means is in the docstring of its class, under ``Attributes:``.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from itertools import groupby
from typing import Any, NamedTuple

WIDTH = 110
"""Of a line, in characters."""
INDENT = " " * 6


class Field(NamedTuple):
    """A dotted name, its value, and what it means."""

    name: str
    value: Any
    meaning: str


def all_fields(config: Any, prefix: str = "") -> Iterator[Field]:
    """The fields of a dataclass, and those of the dataclasses in it."""
    told = meanings(type(config))
    for each in fields(config):
        value = getattr(config, each.name)
        if is_dataclass(value):
            yield from all_fields(value, f"{prefix}{each.name}.")
        else:
            yield Field(prefix + each.name, value, told.get(each.name, ""))


def meanings(cls: type[Any]) -> dict[str, str]:
    """What the docstrings of a class and its bases say of each attribute; several may share a line:
    ``keys, noise: ...``.
    """
    found: dict[str, str] = {}
    for part in reversed(cls.__mro__):
        _, _, listed = inspect.cleandoc(part.__doc__ or "").partition("Attributes:\n")
        for entry in re.split(r"\n(?=    \S)", listed):
            names, _, meaning = " ".join(entry.split()).partition(": ")
            found |= dict.fromkeys(names.split(", "), meaning)
    return found


def shown(value: Any) -> str:
    """A value as an override is written (`runtime/overrides.py: parse_value` reads it)."""
    if isinstance(value, tuple):
        return ",".join(map(shown, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def described(listed: Iterable[Field]) -> Iterator[str]:
    """Lines: ``--name=value`` of each, and below it the meaning, once for neighbours that share it."""
    for meaning, group in groupby(listed, lambda each: each.meaning):
        yield from (f"  --{each.name}={shown(each.value)}" for each in group)
        yield from textwrap.wrap(meaning, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
