"""Where a long reading stands, so that a unit of hours need not begin anew: a memory file, replaced now and then."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from remanence.inference import memfile
from remanence.io.files import remove_leftovers
from remanence.model import Model, State

EVERY = float(os.environ.get("REMANENCE_AUTOSAVE", "60"))
"""Seconds between two saves: what a kill can cost. `remanence read` uses the same."""


class Bookmark:
    """The state of the unit being measured, and what has been counted of it. Without a path nothing is saved."""

    def __init__(self, path: Path | None = None) -> None:
        self.path, self.unit, self.saved = path, "", time.monotonic()

    def find(self, model: Model, text: str = "") -> tuple[State, dict[str, Any]] | None:
        """What was saved of this unit. A file of another unit, text or model, or a damaged one, counts as none.

        `text` is a digest of what the unit reads, where that is known before it is read.
        """
        if self.path is None or not self.path.is_file():
            return None
        try:
            notes = memfile.peek(self.path)[0]["notes"]
            return (memfile.load(self.path, model), notes["counted"]) if self._is(notes, text) else None
        except ValueError:
            return None

    def _is(self, notes: dict[str, Any], text: str) -> bool:
        return notes.get("unit") == self.unit and notes.get("text") == text

    def keep(self, model: Model, state: State, counted: Callable[[], dict[str, Any]], text: str = "") -> None:
        if (
            self.path is not None
            and time.monotonic() - self.saved >= EVERY
            and not bool(state.diverged.any())
        ):
            memfile.save(self.path, model, state, {"unit": self.unit, "text": text, "counted": counted()})
            self.saved = time.monotonic()

    def remove(self) -> None:
        """The text can be recovered from it, so it is deleted as soon as it is of no use."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            remove_leftovers(self.path.parent, self.path.name)
