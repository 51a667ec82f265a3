"""The command that writes a report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from remanence.runtime.terminal import say


@dataclass(frozen=True)
class Report:
    """Evaluations and training runs as one document, Markdown and HTML: the papers' numbers beside ours, with plots."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Files that `eval --json` wrote, and folders of training runs."""
    out: Path = Path("report.md")
    """Markdown to write; its pictures and the same as an HTML page are written beside it."""
    force: bool = False
    """Overwrite documents that no report wrote."""

    def run(self) -> None:
        from remanence.report import write

        for path in write(self.runs, self.out, force=self.force):
            say(str(path))
