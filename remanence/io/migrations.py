"""Names used by earlier versions and their current names: one table for all code that reads old names."""

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
"""Renamed config fields, from old to new dotted name. They apply to files, the command line and calls. The
first part of a name is the config that has the field.
"""

VALUES: dict[str, dict[str, str]] = {
    "data.kind": {"told": "fact_dialogues"},
    "train.initial_state": {"passed": "neighbor"},
}
"""Renamed values of fields: for each field's dotted name, the old and the new value."""

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
"""The fields of `data`, with defaults, from before each kind of data had its own class. Old files contain all
of them.
"""

OPTIONAL: dict[str, tuple[str, ...]] = {"train": ("forecast",)}
"""Config fields that belong to an optional part of the package (a vertical). Every run's file contains them,
even if that part is not installed.
"""

Class = TypeVar("Class", bound=type)


def current_field(owner: str, name: str) -> str:
    """Return the current name of a field of the config `owner`. A dotted name refers to a field of a nested
    config.
    """
    if f"{owner}.{name}" in FIELDS:
        return FIELDS[f"{owner}.{name}"].removeprefix(f"{owner}.")
    part, dot, rest = name.partition(".")
    return f"{part}.{current_field(part, rest)}" if dot else name


def current_fields(owner: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` with current field names, for values read from a file. If a field is given under both
    names, the value under the old name is used, because it was set explicitly.
    """
    old = {name: value for name, value in given.items() if current_field(owner, name) != name}
    return {name: value for name, value in given.items() if name not in old} | {
        current_field(owner, name): value for name, value in old.items()
    }


def renamed_fields(owner: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` with current field names, for the arguments of a call, and warn about every old name. If
    the value also has an old name, the same warning covers both.
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
    """Issue a DeprecationWarning for `old` that points at the first line of code outside this package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(OUR_FRAMES):
        frame, level = frame.f_back, level + 1
    warnings.warn(f"{old} is deprecated: use {new}", DeprecationWarning, stacklevel=level)


OUR_FRAMES = ("remanence.", "dataclasses")
"""Prefixes of the modules that are skipped when looking for the caller's line."""


def current_value(field: str, value: Any, *, warn: bool = True) -> Any:
    """Return the current name of a field's value. Issues a warning if the name has changed, unless `warn` is
    False.
    """
    old = VALUES.get(field, {})
    if not isinstance(value, str) or value not in old:
        return value
    if warn:
        warn_deprecated(f"{field}={value!r}", repr(old[value]))
    return old[value]


def without_absent(owner: str, given: Mapping[str, Any], present: Sequence[str]) -> dict[str, Any]:
    """Return `given` without the fields of verticals that are not installed. `present` are the names of the
    fields that exist.
    """
    absent = set(OPTIONAL[owner]) - set(present)
    return {name: value for name, value in given.items() if name not in absent}


def first_fields(owner: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given`, including nested configs, with the names that version 0.1 used. Digests are computed
    from these names, so that renaming a field does not change them.
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
    """Return the data section with the fields of all kinds added. Two fields are left out, because old
    versions wrote them only where they were used.
    """
    everywhere = {name: value for name, value in FLAT_DATA.items() if name not in ("held_out", "ends")}
    return {**everywhere, **given}


def accepts_old_names(owner: str) -> Callable[[Class], Class]:
    """Return a class decorator for the config `owner`. Old field names then work as keyword arguments and as
    readable attributes, with a warning.
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
    """Return a property that reads the attribute `new` and warns that `old` is deprecated."""

    def read(self: object) -> object:
        warn_deprecated(old, new)
        return getattr(self, new)

    return property(read)


STATE_FIELDS = {"query_history": "asked", "token_importance": "worth"}
"""Fields of states: the current name, and the name used in memory files and checkpoints, which is the name of
version 0.1.
"""


def stored_field(name: str) -> str:
    """Return the name that a state's field has in files."""
    return STATE_FIELDS.get(name, name)


TENSORS = {
    "blocks.": "backbone.blocks.",  # in version 0.1 the layers belonged to the model, not to its backbone
    "norm.": "backbone.norm.",
}
"""Renamed parameters: the old and the new beginning of the name."""

PREFIXES = ("model.", "exp_avg.", "exp_avg_sq.")
"""Prefixes that a file may put before a parameter's name."""


def current_name(name: str) -> str:
    """Return the current name of a parameter. A prefix from `PREFIXES` is kept."""
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
    name = name.removeprefix(prefix)
    for old, new in TENSORS.items():
        if name.startswith(old):
            return prefix + new + name.removeprefix(old)
    return prefix + name


def first_name(name: str) -> str:
    """Return the name that version 0.1 gave to a parameter. Fingerprints are computed from these names, so
    that memory files stay valid.
    """
    for old, new in TENSORS.items():
        if name.startswith(new):
            return old + name.removeprefix(new)
    return name
