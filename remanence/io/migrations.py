"""What earlier versions called things, and what they are called now: one table for everything that reads old names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from operator import attrgetter
from typing import Any, TypeVar

FIELDS: dict[str, str] = {
    "train.start": "train.init_from",
    "subject.place": "subject.device",
}
"""Fields of configs in files, on the command line and in calls: old dotted name, new dotted name."""

OPTIONAL: dict[str, tuple[str, ...]] = {
    "train": ("forecast",),
    "data": ("horizon", "split", "columns", "missing", "reverse_complement"),
}
"""Fields that a vertical adds to a config. Every run's file has them, also where the vertical is not present."""

Class = TypeVar("Class", bound=type)


def current_field(owner: str, name: str) -> str:
    """The present name of a field, dotted or not, of the config `owner`."""
    return FIELDS.get(f"{owner}.{name}", f"{owner}.{name}").removeprefix(f"{owner}.")


def current_fields(owner: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` with present names. Where both names are given, the old one counts: it was given on purpose."""
    old = {name: value for name, value in given.items() if current_field(owner, name) != name}
    return {name: value for name, value in given.items() if name not in old} | {
        current_field(owner, name): value for name, value in old.items()
    }


def without_absent(owner: str, given: Mapping[str, Any], present: Sequence[str]) -> dict[str, Any]:
    """`given` without the fields of verticals that are not there."""
    absent = set(OPTIONAL[owner]) - set(present)
    return {name: value for name, value in given.items() if name not in absent}


def first_fields(owner: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` with the names of the first version. Digests are made of these, so that they do not change with a
    name.
    """
    first = {new: old for old, new in FIELDS.items()}
    return {
        first.get(f"{owner}.{name}", name).removeprefix(f"{owner}."): value for name, value in given.items()
    }


def accepts_old_names(owner: str) -> Callable[[Class], Class]:
    """A class decorator for a config: old names work as keyword arguments and can be read as attributes."""

    def decorate(cls: Class) -> Class:
        made = cls.__init__  # type: ignore[misc]

        @wraps(made)
        def init(self: Any, *args: Any, **given: Any) -> None:
            made(self, *args, **current_fields(owner, given))

        cls.__init__ = init  # type: ignore[misc]
        for dotted in FIELDS:
            prefix, _, name = dotted.rpartition(".")
            if prefix == owner:
                setattr(cls, name, property(attrgetter(current_field(owner, name))))
        return cls

    return decorate


STATE_FIELDS = {"query_history": "asked", "token_importance": "worth"}
"""Fields of states: present name, and the name in memory files and checkpoints, which is that of version 0.1."""


def stored_field(name: str) -> str:
    """The name that a state's field has in files."""
    return STATE_FIELDS.get(name, name)


TENSORS = {
    "blocks.": "backbone.blocks.",  # 0.1: a model's layers were its own, not its backbone's
    "norm.": "backbone.norm.",
}
"""How a parameter's name began, and how it begins now."""

PREFIXES = ("model.", "exp_avg.", "exp_avg_sq.")
"""What may stand in front of a parameter's name in a file."""


def current_name(name: str) -> str:
    """A parameter's name as it is now, with what a file has in front of it."""
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
    name = name.removeprefix(prefix)
    for old, new in TENSORS.items():
        if name.startswith(old):
            return prefix + new + name.removeprefix(old)
    return prefix + name


def first_name(name: str) -> str:
    """A parameter's name as version 0.1 wrote it: fingerprints are made of these, so that memory files stay valid."""
    for old, new in TENSORS.items():
        if name.startswith(new):
            return old + name.removeprefix(new)
    return name
