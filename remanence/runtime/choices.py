"""Error messages about wrong names and values in user input and files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from reprlib import Repr

LONGEST = 100
"""The number of characters of a wrong value to show. Longer wrong names are not compared with known names."""

_short = Repr()
_short.maxstring = _short.maxother = _short.maxlong = LONGEST


def short_repr(value: object) -> str:
    """Return a shortened `repr` of a value on one line, for error messages."""
    return _short.repr(value)


def check_choice(
    argument: str, name: object, names: Iterable[str], families: Mapping[str, Sequence[str]] | None = None
) -> None:
    """Raise ValueError if `name` is not one of `names`, and suggest the name that was probably meant.

    `argument` is the argument name to show. `families` maps a name to several known names, which are then
    suggested together.
    """
    names = list(names)
    if name not in names:
        hint = did_you_mean(name, names, families)
        raise ValueError(f"{argument}: expected one of {', '.join(names)}, got {short_repr(name)}{hint}")


def did_you_mean(
    name: object, names: Iterable[str], families: Mapping[str, Sequence[str]] | None = None
) -> str:
    """Return the end of an error message that suggests the nearest known name, or "" if none is near."""
    families = families or {}
    short = isinstance(name, str) and len(name) <= LONGEST
    near = get_close_matches(str(name).lower(), [*names, *families], n=1, cutoff=0.5) if short else []
    meant = families.get(near[0], near) if near else []
    return f"; did you mean {' or '.join(map(repr, meant))}?" if meant else ""
