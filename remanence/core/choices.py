"""Names and values that a person or a file may get wrong."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from reprlib import Repr

LONGEST = 100
"""Characters of a wrong value that an error shows, and of a wrong name that others are compared with."""

_short = Repr()
_short.maxstring = _short.maxother = _short.maxlong = LONGEST


def brief(value: object) -> str:
    """A value as an error shows it: on one line, and not the whole of a list with a million entries."""
    return _short.repr(value)


def check_choice(what: str, name: object, names: Iterable[str]) -> None:
    """Refuse a name that is not among the known ones, and say which one was probably meant."""
    names = list(names)
    if name not in names:
        short = isinstance(name, str) and len(name) <= LONGEST
        near = get_close_matches(str(name), names, n=1, cutoff=0.5) if short else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{what}: expected one of {', '.join(names)}, got {brief(name)}{hint}")
