"""Types of arguments that several commands have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import tyro

Device = Literal["auto", "cpu", "cuda", "mps"]
Mode = Literal["on", "off", "frozen", "fresh"]
Folder = tyro.conf.Positional[Path]


@contextmanager
def naming(field: str, option: str) -> Iterator[None]:
    """Inside, an error about a config's field names the option that it was given by."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith(f"{field}:"):
            raise
        raise ValueError(f"{option}{str(error).removeprefix(field)}") from None
