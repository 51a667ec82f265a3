"""The folder in which memories of the user are kept between chats, by the conventions of the platform."""

from __future__ import annotations

import os
import sys
from pathlib import Path

VARIABLE = "REMANENCE_DATA"
"""The environment variable that names another folder."""


def data_folder() -> Path:
    """Return the folder for the user's data: that in `VARIABLE`, else ``remanence`` in XDG_DATA_HOME or
    ``~/.local/share``; on macOS in ``~/Library/Application Support``, on Windows in LOCALAPPDATA.
    """
    if own := os.environ.get(VARIABLE):
        return Path(own).expanduser()
    try:
        home = Path.home()
    except RuntimeError:
        raise ValueError(
            f"{VARIABLE}: expected a folder for the memory, as this user has no home folder; got none"
        ) from None
    standard = {"darwin": home / "Library" / "Application Support", "win32": home / "AppData" / "Local"}
    variable = "LOCALAPPDATA" if sys.platform == "win32" else "XDG_DATA_HOME"
    given = Path(os.environ.get(variable, ""))
    base = given if given.is_absolute() else standard.get(sys.platform, home / ".local" / "share")
    return base / "remanence"


def make_data_folder() -> Path:
    """Return `data_folder`. If it does not exist, it is made so that only the user can read it."""
    folder = data_folder()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{VARIABLE}: expected a folder that can be made, got {folder} ({error.strerror or error})"
        ) from None
    return folder
