"""Types of arguments that several commands use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import tyro

Device = Literal["auto", "cpu", "cuda", "mps"]
"""Device names; "auto" is the first of cuda, mps and cpu that is present."""
Mode = Literal["on", "off", "frozen", "fresh"]
Folder = tyro.conf.Positional[Path]
"""A path given as a positional argument."""


@contextmanager
def errors_name_option(field: str, option: str) -> Iterator[None]:
    """Context manager that rewrites errors about a config field so that they name the command-line option
    instead.
    """
    try:
        yield
    except ValueError as error:
        if not str(error).startswith(f"{field}:"):
            raise
        raise ValueError(f"{option}{str(error).removeprefix(field)}") from None
