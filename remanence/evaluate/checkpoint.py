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

SAVE_INTERVAL = float(os.environ.get("REMANENCE_AUTOSAVE", "60"))
"""Seconds between two saves. `remanence read` uses the same interval."""


class ReadingCheckpoint:
    """A memory file that stores the state and the partial results of the unit being measured.

    Nothing is saved if `path` is None.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path, self.unit, self.saved_at = path, "", time.monotonic()

    def load(self, model: CausalModel, text_digest: str = "") -> tuple[State, Setting] | None:
        """Return the saved state and partial results of the current unit, or None if there are none.

        None is also returned if the file is damaged or belongs to another unit, text or model. `text_digest` is a
        digest of the text, or "" if the text is not known before reading.
        """
        if self.path is None or not self.path.is_file():
            return None
        try:
            notes = memfile.read_file(self.path)[0]["notes"]
            return (
                (memfile.load(self.path, model), notes["counted"])
                if self._matches(notes, text_digest)
                else None
            )
        except ValueError:
            return None

    def _matches(self, notes: Setting, text_digest: str) -> bool:
        """Whether the notes in a saved file are those of the current unit and of this text digest."""
        return notes.get("unit") == self.unit and notes.get("text") == text_digest

    def save(
        self, model: CausalModel, state: State, partial_results: Callable[[], Setting], text_digest: str = ""
    ) -> None:
        """Save the state and what `partial_results` returns, at most once every `SAVE_INTERVAL` seconds.

        A diverged state is not saved.
        """
        if (
            self.path is not None
            and time.monotonic() - self.saved_at >= SAVE_INTERVAL
            and not bool(state.diverged.any())
        ):
            memfile.save(
                self.path,
                model,
                state,
                {"unit": self.unit, "text": text_digest, "counted": partial_results()},
            )
            self.saved_at = time.monotonic()

    def remove(self) -> None:
        """Delete the file when it is no longer needed, because the text could be recovered from it."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            remove_leftovers(self.path.parent, self.path.name)
