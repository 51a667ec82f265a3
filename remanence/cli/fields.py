"""Lists the fields of configs and settings with their values and descriptions, for --help. Imports no torch.

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
"""Maximum length of a line of help, in characters."""
INDENT = " " * 6
"""Indentation of descriptions."""


class Field(NamedTuple):
    """The dotted name of a field, its value, and its description."""

    name: str
    value: object
    description: str


def all_fields(config: DataclassInstance, prefix: str = "") -> Iterator[Field]:
    """Yield the fields of a dataclass and of all dataclasses nested in it. `prefix` is put before the names."""
    descriptions = field_descriptions(type(config))
    for each in fields(config):
        value = getattr(config, each.name)
        if is_dataclass(value) and not isinstance(value, type):
            yield from all_fields(value, f"{prefix}{each.name}.")
        else:
            yield Field(prefix + each.name, value, descriptions.get(each.name, ""))


def field_descriptions(cls: type) -> dict[str, str]:
    """Return the description of each attribute from the docstrings of a class and its bases. Several
    attributes may share an entry: ``keys, noise: ...``.
    """
    found: dict[str, str] = {}
    for part in reversed(cls.__mro__):
        _, _, listed = inspect.cleandoc(part.__doc__ or "").partition("Attributes:\n")
        for entry in re.split(r"\n(?=    \S)", listed):
            names, _, description = " ".join(entry.split()).partition(": ")
            found |= dict.fromkeys(names.split(", "), description)
    return found


def format_value(value: object) -> str:
    """Return a value in the form in which it is written on the command line (`runtime/overrides.py:
    parse_value` reads it).
    """
    if isinstance(value, tuple):
        return ",".join(map(format_value, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def format_fields(listed: Iterable[Field]) -> Iterator[str]:
    """Yield lines for --help: ``--name=value``, and below it the description. Consecutive fields with the
    same description show it once.
    """
    for description, group in groupby(listed, lambda each: each.description):
        yield from (f"  --{each.name}={format_value(each.value)}" for each in group)
        yield from textwrap.wrap(description, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
