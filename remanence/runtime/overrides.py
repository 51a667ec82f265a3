"""Config fields changed on the command line, such as ``--model.memory.net=titans``: split, parse and apply
them. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from remanence.runtime.choices import check_choice, did_you_mean

Override = tuple[str, str]
"""A dotted name and the text of its new value: ``("optimizer.lr", "3e-4")``."""
Overrides = tuple[Override, ...]
Changes = dict[str, str]
"""Overrides by name: the dotted name and the text of its new value."""

K = 1024
EXPECTED = {int: "an integer (1K is 1,024, 1M is 1K times 1K)", float: "a number", bool: "true or false"}
"""Descriptions of the types for error messages."""
BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
"""The texts accepted for a boolean."""


def split_overrides(args: Sequence[str], options: Iterable[str], owner: str) -> tuple[list[str], Overrides]:
    """Separate a command's own arguments from ``--field=value`` overrides, and return both.

    `options` are the names of the command's own options, without dashes. `owner` is what the fields belong
    to, for error messages.
    """
    own = {"-h", *(f"--{name}" for name in options)}
    rest, overrides = [], []
    for argument in args:
        name, equals, value = argument.partition("=")
        if not argument.startswith("-") or name in own:
            rest.append(argument)
        elif name.startswith("--") and equals:
            overrides.append((name[2:], value))
        else:
            hint = did_you_mean(name, sorted(own))
            raise ValueError(f"{argument}: expected --field=value for a field of {owner}{hint}")
    return rest, tuple(overrides)


def split_prefix(overrides: Iterable[Override], prefix: str) -> tuple[Changes, list[Override]]:
    """Return the overrides whose names begin with `prefix`, with the prefix removed, and the other overrides."""
    inside, others = {}, []
    for name, value in overrides:
        if name.startswith(prefix):
            inside[name.removeprefix(prefix)] = value
        else:
            others.append((name, value))
    return inside, others


def by_owner(overrides: Iterable[Override], settings: Mapping[str, Collection[str]]) -> Mapping[str, Changes]:
    """Group overrides by owner. `settings` maps each owner to the names of its settings.

    ``--owner.setting=value`` applies to one owner. ``--setting=value`` applies to every owner that has this
    setting and no value of its own. If a setting is given twice, the last value is used.
    """
    own: dict[str, Changes] = {owner: {} for owner in settings}
    shared: dict[str, Changes] = {owner: {} for owner in settings}
    for dotted, value in overrides:
        owner, dot, name = dotted.partition(".")
        if dot:
            check_choice(f"--{dotted}: task", owner, settings)
            own[owner][name] = value
            continue
        owners = [each for each, names in settings.items() if dotted in names]
        if not owners:
            check_choice(
                f"--{dotted}: setting",
                dotted,
                sorted({name for names in settings.values() for name in names}),
            )
        for each in owners:
            shared[each][dotted] = value
    return {owner: {**shared[owner], **own[owner]} for owner in settings}


def apply_overrides(config: Any, overrides: Mapping[str, str]) -> dict[str, Any]:
    """Return ``config.to_dict()`` with dotted fields changed. `config` is a dataclass that may contain other
    dataclasses.
    """
    data: dict[str, Any] = config.to_dict()
    for dotted, text in overrides.items():
        *path, last = dotted.split(".")
        owner, inside = config, data
        for name in path:
            _check_field(owner, name, dotted)
            owner, inside = getattr(owner, name), inside[name]
            if not is_dataclass(owner):
                raise ValueError(f"{dotted}: expected a field, got something inside {name!r}, which has none")
        _check_field(owner, last, dotted)
        inside[last] = parse_value(get_type_hints(type(owner))[last], text, dotted)
    return data


def differences(ours: Any, theirs: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted name and both values of every field in which two configs, given as plain data, differ."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for name in sorted({*ours, *theirs}):
            yield from differences(ours.get(name), theirs.get(name), f"{path}.{name}" if path else name)
    elif ours != theirs:
        yield path, ours, theirs


def _check_field(owner: Any, name: str, dotted: str) -> None:
    """Raise ValueError if the dataclass `owner` has no field `name`. `dotted` is the full name to show."""
    check_choice(f"{dotted}: field of {type(owner).__name__}", name, [each.name for each in fields(owner)])


def parse_value(kind: Any, text: str, name: str) -> Any:
    """Parse text as the type `kind`: a number, a boolean, one of several words, None, or a tuple of these
    separated by commas.

    `name` is the argument name to show in error messages.
    """
    origin, options = get_origin(kind), get_args(kind)
    if origin is tuple:
        return tuple(parse_value(options[0], part.strip(), name) for part in text.split(",") if part.strip())
    if origin is Literal:
        check_choice(name, text, options)
        return text
    if origin in (Union, UnionType):
        if NoneType in options and text.lower() == "none":
            return None
        *others, last = [option for option in options if option is not NoneType]
        for option in others:
            with suppress(ValueError):
                return parse_value(option, text, name)
        return parse_value(last, text, name)
    try:
        if kind is bool:
            return BOOLEANS[text.lower()]
        if kind is int:
            return parse_length(text)
        if kind in (float, str):
            return kind(text)
    except (ValueError, KeyError):
        pass
    raise ValueError(f"{name}: expected {EXPECTED.get(kind, getattr(kind, '__name__', kind))}, got {text!r}")


def parse_length(text: str) -> int:
    """Parse an integer such as 4096, 4K or 1M."""
    factor = {"K": K, "M": K * K}.get(text[-1:].upper(), 1)
    return int(text if factor == 1 else text[:-1]) * factor


def format_length(length: float, separator: str = "") -> str:
    """Format a length as 4K or 1M, or as the plain number if it is not a multiple of 1K."""
    for unit, size in (("M", K * K), ("K", K)):
        if length >= size and length % size == 0:
            return f"{int(length // size)}{unit}"
    return f"{length:{separator}.0f}"
