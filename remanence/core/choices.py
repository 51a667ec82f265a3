"""Names that a person may get wrong."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def check_choice(what: str, name: object, names: Iterable[str]) -> None:
    """Refuse a name that is not among the known ones, and say which one was probably meant."""
    names = list(names)
    if name not in names:
        near = get_close_matches(str(name), names, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{what}: expected one of {', '.join(names)}, got {name!r}{hint}")
