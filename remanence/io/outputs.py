"""Create the folders that commands write their files to."""

from __future__ import annotations

from pathlib import Path


def make_folder(argument: str, path: Path) -> None:
    """Create the parent folders of the file `path`. `argument` is the argument name to show in error messages."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"{argument}: expected a folder that can be made, got {path.parent} ({reason})"
        ) from None
