"""Progress of long work on stderr: bars on a terminal, and otherwise a plain line from time to time."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from remanence.runtime.terminal import echo, escaped_output

if TYPE_CHECKING:
    from rich.progress import Progress as Bars


class Progress:
    """Shows progress: ``with Progress() as progress: bar = progress.add("reading", total)``, then
    ``bar.update(done, note)``.

    steps
        Show the position as the number of steps done, instead of in percent.
    every
        Minimum number of seconds between two plain lines of a bar; 0 prints a line for every update.
    last
        Print the plain line of a finished bar even if fewer than `every` seconds have passed.
    keep
        Leave finished bars on the terminal.
    visible
        False shows nothing at all.
    """

    def __init__(
        self,
        *,
        steps: bool = False,
        every: float = 10.0,
        last: bool = False,
        keep: bool = False,
        visible: bool = True,
    ) -> None:
        from remanence.cli.console import Console

        self.steps, self.every, self.last = steps, every, last
        console = Console(error=True)
        self.plain = visible and not console.is_terminal
        self.bars: Bars | None = None
        self.open = ExitStack()
        if visible and console.is_terminal:
            from rich.progress import BarColumn, Progress, TimeRemainingColumn

            texts = "{task.fields[position]}", "{task.fields[note]}"
            columns = ("{task.description}", BarColumn(), *texts, TimeRemainingColumn())
            self.bars = Progress(*columns, console=console, transient=not keep)

    def __enter__(self) -> Progress:
        if self.bars is not None:
            self.open.enter_context(self.bars)
            # While it shows bars, rich prints all other output too, and would interpret escape sequences in it.
            self.open.enter_context(escaped_output())
        return self

    def __exit__(self, *_: object) -> None:
        self.open.close()

    def add(self, name: str = "", total: float | None = None, title: str | None = None) -> Bar:
        """Add a bar. Plain lines begin with `name`; on a terminal, `title` is shown instead if it is given. A
        `total` of None means unknown.
        """
        return Bar(self, name, total, title or name)


class Bar:
    """One progress bar, or one series of plain lines, of a `Progress`."""

    def __init__(self, progress: Progress, name: str, total: float | None, title: str) -> None:
        self.progress, self.name, self.total, self.first = progress, name, total, 0.0
        self.begun = self.printed = time.monotonic()
        if progress.bars is not None:
            self.task = progress.bars.add_task(title, total=total, position="", note="")

    def begin(self, name: str, total: float | None, done: float = 0.0) -> None:
        """Restart the bar for other work, of which `done` may be finished already. The time of the last plain
        line is kept.
        """
        self.name, self.total, self.first, self.begun = name, total, done, time.monotonic()
        if self.progress.bars is not None:
            self.progress.bars.reset(self.task, description=name, total=total, completed=int(done))

    def rename(self, name: str) -> None:
        """Change the name for the next part of the same work."""
        if name != self.name:
            self.name = name
            if self.progress.bars is not None:
                self.progress.bars.update(self.task, description=name)

    @property
    def elapsed(self) -> float:
        """Seconds since the work began."""
        return time.monotonic() - self.begun

    def update(self, done: float, note: str = "", *, total: float | None = None) -> None:
        """Show that `done` of `total` is finished, with a note. `total` changes the bar's total if it is
        given.
        """
        self.total = self.total if total is None else total
        if self.progress.bars is not None:
            fields: dict[str, Any] = {"position": self._position(done, short=True), "note": note}
            self.progress.bars.update(self.task, completed=done, total=self.total, **fields)
        if not self.progress.plain:
            return
        now = time.monotonic()
        if now - self.printed >= self.progress.every or (self.progress.last and done == self.total):
            self.printed = now
            parts = filter(None, (self._position(done), note, self._remaining(done, now)))
            echo(f"{self.name}: {', '.join(parts)}", error=True)

    def _position(self, done: float, *, short: bool = False) -> str:
        """Return the position as text: steps, percent, or empty if the total is unknown. `short` is the form
        for bars.
        """
        if self.total is None:
            return ""
        if not self.progress.steps:
            return f"{100 * done / max(self.total, 1):{'3' if short else ''}.0f} %"
        return f"{done:.0f}/{self.total:.0f}" if short else f"step {done:.0f} of {self.total:.0f}"

    def _remaining(self, done: float, now: float) -> str:
        """Return the estimated remaining time as text; empty if it cannot be estimated."""
        if self.total is None or done <= self.first:
            return ""
        return f"{(now - self.begun) * (self.total - done) / (done - self.first):.0f} s left"
