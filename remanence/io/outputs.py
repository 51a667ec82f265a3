"""Where a command writes its files."""

from __future__ import annotations

from pathlib import Path


def make_folder(what: str, path: Path) -> None:
    """Make the folder that the file `path` is to be written to, and those around it. `what` is the argument that an
    error names.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"{what}: expected a folder that can be made, got {path.parent} ({reason})"
        ) from None
