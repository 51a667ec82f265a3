"""The command that writes a report of evaluations and training runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from remanence.runtime.terminal import echo


@dataclass(frozen=True)
class Report:
    """Write evaluation results and training runs as one document with tables and plots, in Markdown and HTML."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Files that `eval --json` wrote, and folders of training runs."""
    out: Path = Path("report.md")
    """Markdown file. Its plots and an HTML page with the same content are written beside it."""
    force: bool = False
    """Overwrite files that are not earlier reports."""

    def run(self) -> None:
        from remanence.report import write

        for path in write(self.runs, self.out, force=self.force):
            echo(str(path))
