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
def errors_name_option(field: str, option: str) -> Iterator[None]:
    """In this context, an error about a field of a config names the command-line option instead."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith(f"{field}:"):
            raise
        raise ValueError(f"{option}{str(error).removeprefix(field)}") from None
