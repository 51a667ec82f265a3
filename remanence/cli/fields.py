"""The fields of configs and settings with their values and descriptions, as --help lists them. Imports no torch.

Descriptions are taken from the docstring of the class, under ``Attributes:``.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

WIDTH = 110
"""Of a line, in characters."""
INDENT = " " * 6


class Field(NamedTuple):
    """A dotted name, its value, and its description."""

    name: str
    value: object
    description: str


def all_fields(config: DataclassInstance, prefix: str = "") -> Iterator[Field]:
    """The fields of a dataclass, and those of the dataclasses in it."""
    descriptions = field_descriptions(type(config))
    for each in fields(config):
        value = getattr(config, each.name)
        if is_dataclass(value) and not isinstance(value, type):
            yield from all_fields(value, f"{prefix}{each.name}.")
        else:
            yield Field(prefix + each.name, value, descriptions.get(each.name, ""))


def field_descriptions(cls: type) -> dict[str, str]:
    """The description of each attribute in the docstrings of a class and its bases; several may share a line:
    ``keys, noise: ...``.
    """
    found: dict[str, str] = {}
    for part in reversed(cls.__mro__):
        _, _, listed = inspect.cleandoc(part.__doc__ or "").partition("Attributes:\n")
        for entry in re.split(r"\n(?=    \S)", listed):
            names, _, description = " ".join(entry.split()).partition(": ")
            found |= dict.fromkeys(names.split(", "), description)
    return found


def format_value(value: object) -> str:
    """A value as an override is written (`runtime/overrides.py: parse_value` reads it)."""
    if isinstance(value, tuple):
        return ",".join(map(format_value, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def format_fields(listed: Iterable[Field]) -> Iterator[str]:
    """Lines of --help: ``--name=value``, and below it the description, once for consecutive fields that share it."""
    for description, group in groupby(listed, lambda each: each.description):
        yield from (f"  --{each.name}={format_value(each.value)}" for each in group)
        yield from textwrap.wrap(description, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
