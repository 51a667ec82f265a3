"""Saves the state of a long reading from time to time, so that an interrupted unit of work can resume."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from remanence.evaluate.task import Setting
from remanence.inference import memfile
from remanence.io.files import remove_leftovers
from remanence.model import CausalModel, State

EVERY = float(os.environ.get("REMANENCE_AUTOSAVE", "60"))
"""Seconds between two saves. `remanence read` uses the same."""


class Bookmark:
    """A memory file with the state and the counts of the unit that is measured. Without a path, nothing is saved."""

    def __init__(self, path: Path | None = None) -> None:
        self.path, self.unit, self.saved = path, "", time.monotonic()

    def find(self, model: CausalModel, text: str = "") -> tuple[State, Setting] | None:
        """The saved state and counts of this unit; None if the file is damaged or of another unit, text or model.

        `text` is a digest of the text, if it is known before reading.
        """
        if self.path is None or not self.path.is_file():
            return None
        try:
            notes = memfile.read_file(self.path)[0]["notes"]
            return (memfile.load(self.path, model), notes["counted"]) if self._matches(notes, text) else None
        except ValueError:
            return None

    def _matches(self, notes: Setting, text: str) -> bool:
        return notes.get("unit") == self.unit and notes.get("text") == text

    def keep(self, model: CausalModel, state: State, counts: Callable[[], Setting], text: str = "") -> None:
        if (
            self.path is not None
            and time.monotonic() - self.saved >= EVERY
            and not bool(state.diverged.any())
        ):
            memfile.save(self.path, model, state, {"unit": self.unit, "text": text, "counted": counts()})
            self.saved = time.monotonic()

    def remove(self) -> None:
        """Delete the file as soon as it is not needed: the text could be recovered from it."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            remove_leftovers(self.path.parent, self.path.name)
