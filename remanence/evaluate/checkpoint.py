"""Save the state while a long text is read, so that an interrupted unit of work can resume."""

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
"""Seconds between two saves. `remanence read` uses the same interval."""


class Bookmark:
    """A memory file that stores the state and the partial results of the unit being measured.

    Nothing is saved if `path` is None.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path, self.unit, self.saved = path, "", time.monotonic()

    def find(self, model: CausalModel, text: str = "") -> tuple[State, Setting] | None:
        """Return the saved state and partial results of the current unit, or None if there are none.

        None is also returned if the file is damaged or belongs to another unit, text or model. `text` is a
        digest of the text, or "" if the text is not known before reading.
        """
        if self.path is None or not self.path.is_file():
            return None
        try:
            notes = memfile.read_file(self.path)[0]["notes"]
            return (memfile.load(self.path, model), notes["counted"]) if self._matches(notes, text) else None
        except ValueError:
            return None

    def _matches(self, notes: Setting, text: str) -> bool:
        """Whether the notes in a saved file are those of the current unit and of this text digest."""
        return notes.get("unit") == self.unit and notes.get("text") == text

    def keep(self, model: CausalModel, state: State, counts: Callable[[], Setting], text: str = "") -> None:
        """Save the state and the partial results that `counts` returns, at most once every `EVERY` seconds.

        A diverged state is not saved.
        """
        if (
            self.path is not None
            and time.monotonic() - self.saved >= EVERY
            and not bool(state.diverged.any())
        ):
            memfile.save(self.path, model, state, {"unit": self.unit, "text": text, "counted": counts()})
            self.saved = time.monotonic()

    def remove(self) -> None:
        """Delete the file when it is no longer needed, because the text could be recovered from it."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            remove_leftovers(self.path.parent, self.path.name)
