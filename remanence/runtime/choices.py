"""Names and values that a person or a file may get wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from reprlib import Repr

LONGEST = 100
"""Characters of a wrong value that an error shows, and of a wrong name that others are compared with."""

_short = Repr()
_short.maxstring = _short.maxother = _short.maxlong = LONGEST


def short_repr(value: object) -> str:
    """A value as an error shows it: on one line, and not the whole of a list with a million entries."""
    return _short.repr(value)


def check_choice(
    what: str, name: object, names: Iterable[str], families: Mapping[str, Sequence[str]] | None = None
) -> None:
    """Refuse a name that is not among the known ones, and say which one was probably meant.

    `families` are names that stand for several of the known ones, which are then suggested together.
    """
    names = list(names)
    if name not in names:
        hint = did_you_mean(name, names, families)
        raise ValueError(f"{what}: expected one of {', '.join(names)}, got {short_repr(name)}{hint}")


def did_you_mean(
    name: object, names: Iterable[str], families: Mapping[str, Sequence[str]] | None = None
) -> str:
    """The end of an error about a wrong name: the nearest known one, or nothing if none is near."""
    families = families or {}
    short = isinstance(name, str) and len(name) <= LONGEST
    near = get_close_matches(str(name).lower(), [*names, *families], n=1, cutoff=0.5) if short else []
    meant = families.get(near[0], near) if near else []
    return f"; did you mean {' or '.join(map(repr, meant))}?" if meant else ""
