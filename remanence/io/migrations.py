"""What earlier versions called things, and what they are called now: one table for everything that reads old names."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, TypeVar

FIELDS: dict[str, str] = {
    "train.start": "train.init_from",
    "train.begin": "train.initial_state",
    "train.begin_share": "train.initial_state_share",
    "data.ramp": "data.distance_ramp",
    "data.ends": "data.answer_end",
    "subject.place": "subject.device",
    "model.vocabulary": "model.vocab_size",
    "model.depth": "model.num_layers",
    "attach.vocabulary": "attach.vocab_size",
    "attach.depth": "attach.num_layers",
}
"""Fields of configs in files, on the command line and in calls: old dotted name, new dotted name. The first part is the
config that has the field.
"""

VALUES: dict[str, dict[str, str]] = {
    "data.kind": {"told": "fact_dialogues"},
    "train.initial_state": {"passed": "neighbor"},
}
"""Values of fields: old value, new value, by the field's dotted name."""

FLAT_DATA: dict[str, Any] = {
    "path": None,
    "held_out": None,
    "length": 256,
    "pairs": 8,
    "rounds": 2,
    "keys": 32,
    "noise": 16,
    "share": 0.5,
    "weight": 0.1,
    "ramp": 0,
    "ends": True,
    "books": None,
    "tasks": ("qa1", "qa2", "qa3", "qa4", "qa5"),
    "curriculum": (),
    "horizon": 96,
    "split": "7/1/2",
    "columns": (),
    "missing": "refuse",
    "reverse_complement": False,
}
"""The fields, with defaults, that `data` had for every kind before each kind had a class. Files have all of them."""

OPTIONAL: dict[str, tuple[str, ...]] = {"train": ("forecast",)}
"""Fields that a vertical adds to a config. Every run's file has them, also where the vertical is not present."""

Class = TypeVar("Class", bound=type)


def current_field(owner: str, name: str) -> str:
    """The present name of a field of the config `owner`. A dotted name is a field of one of its parts."""
    if f"{owner}.{name}" in FIELDS:
        return FIELDS[f"{owner}.{name}"].removeprefix(f"{owner}.")
    part, dot, rest = name.partition(".")
    return f"{part}.{current_field(part, rest)}" if dot else name


def current_fields(owner: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` with present names, as a file is read. Where both names are given, the old one counts: it was given on
    purpose.
    """
    old = {name: value for name, value in given.items() if current_field(owner, name) != name}
    return {name: value for name, value in given.items() if name not in old} | {
        current_field(owner, name): value for name, value in old.items()
    }


def renamed_fields(owner: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` with present names, as a call is made: an old name is used with a warning. Its value, if that has an old
    name as well, is a part of the same warning.
    """
    found = dict(given)
    for name, value in given.items():
        if (current := current_field(owner, name)) == name:
            continue
        found[name] = current_value(f"{owner}.{current}", value, warn=False)
        if found[name] is value:
            warn_deprecated(name, current)
        else:
            warn_deprecated(f"{name}={value!r}", f"{current}={found[name]!r}")
    return current_fields(owner, found)


def warn_deprecated(old: str, new: str) -> None:
    """Warn that `old` is deprecated, at the line outside of this package that uses it."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(OUR_FRAMES):
        frame, level = frame.f_back, level + 1
    warnings.warn(f"{old} is deprecated: use {new}", DeprecationWarning, stacklevel=level)


OUR_FRAMES = ("remanence.", "dataclasses")
"""How the modules begin that pass a name on from the caller."""


def current_value(field: str, value: Any, *, warn: bool = True) -> Any:
    """The present name of a field's value, with a warning if it has changed."""
    old = VALUES.get(field, {})
    if not isinstance(value, str) or value not in old:
        return value
    if warn:
        warn_deprecated(f"{field}={value!r}", repr(old[value]))
    return old[value]


def without_absent(owner: str, given: Mapping[str, Any], present: Sequence[str]) -> dict[str, Any]:
    """`given` without the fields of verticals that are not there."""
    absent = set(OPTIONAL[owner]) - set(present)
    return {name: value for name, value in given.items() if name not in absent}


def first_fields(owner: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """`given`, and the configs in it, with the names of the first version. Digests are made of these, so that they do
    not change with a name.
    """
    first = {new: old for old, new in FIELDS.items()}
    first_values = {(field, new): old for field, names in VALUES.items() for old, new in names.items()}
    found: dict[str, Any] = {}
    for name, value in given.items():
        dotted = f"{owner}.{name}"
        if isinstance(value, Mapping):
            value = first_fields(name, value)
        elif isinstance(value, str):
            value = first_values.get((dotted, value), value)
        found[first.get(dotted, name).removeprefix(f"{owner}.")] = value
    if owner == "train" and "data" in found:
        found["data"] = _first_data(found["data"])
    return found


def _first_data(given: Mapping[str, Any]) -> dict[str, Any]:
    """The data section with the fields of all kinds. Two were written only where they were used."""
    everywhere = {name: value for name, value in FLAT_DATA.items() if name not in ("held_out", "ends")}
    return {**everywhere, **given}


def accepts_old_names(owner: str) -> Callable[[Class], Class]:
    """A class decorator for a config: old names work as keyword arguments and can be read as attributes, with a
    warning.
    """

    def decorate(cls: Class) -> Class:
        made = cls.__init__  # type: ignore[misc]

        @wraps(made)
        def init(self: Any, *args: Any, **given: Any) -> None:
            made(self, *args, **renamed_fields(owner, given))

        cls.__init__ = init  # type: ignore[misc]
        present = [field.name for field in fields(cls)] if is_dataclass(cls) else []
        for dotted in FIELDS:
            prefix, _, name = dotted.rpartition(".")
            if prefix == owner and current_field(owner, name) in present:
                setattr(cls, name, _renamed_attribute(name, current_field(owner, name)))
        return cls

    return decorate


def _renamed_attribute(old: str, new: str) -> property:
    def read(self: object) -> object:
        warn_deprecated(old, new)
        return getattr(self, new)

    return property(read)


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
