"""What `remanence eval` does: tasks and their settings from words, progress, a table, and files. Imported only when it runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from math import isclose
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from remanence.cli.train_commands import read_recipe
from remanence.config import Mode, known
from remanence.core.device import resolve
from remanence.evaluate import TASKS, Row, Subject, Task, configured, evaluate, provenance, write_rows
from remanence.evaluate.run import check_target, journal_path
from remanence.evaluate.task import told
from remanence.recipes import find_recipe
from remanence.train import override


def evaluate_model(
    source: Path,
    names: Sequence[str],
    changes: Sequence[tuple[str, str]],
    modes: Sequence[Mode],
    json: Path | None,
    device: str,
    seed: int,
) -> None:
    """Measure, print the table, write rows and plots. Interrupted, the same command goes on where it was, if it has --json."""
    if not names:
        raise ValueError(f"tasks: expected at least one of {', '.join(TASKS)}, got none")
    for name in names:
        known("task", name, TASKS)
        if names.count(name) > 1:
            raise ValueError(f"tasks: expected each task once, got {name} twice")
    if json is not None:
        check_target(json)
    if seed < 0:
        raise ValueError(f"--seed: expected a whole number from 0 on, got {seed}")
    if not modes or len(set(modes)) < len(modes):
        raise ValueError(f"--memory: expected one or more modes, each once, got {' '.join(modes) or 'none'}")
    fields = {name.removeprefix(RECIPE): value for name, value in changes if name.startswith(RECIPE)}
    given = _given(names, [change for change in changes if not change[0].startswith(RECIPE)])
    settings = {name: configured(TASKS[name], given[name]) for name in names}
    subject = _subject(source, {TASKS[name].needs for name in names}, device, seed, json, fields)
    tasks = [TASKS[name](subject, settings[name]) for name in names]
    with Shown() as shown:
        try:
            rows = evaluate(subject, tasks, modes, journal=json and journal_path(json), show=shown.update)
        except KeyboardInterrupt:
            if json is not None:
                print(f"{journal_path(json)}: what was measured is kept; the same command goes on from there", file=sys.stderr)
            raise
    origin = provenance(subject)
    for task in tasks:
        _console().print(table([row for row in rows if row.task == task.name and not row.detail], modes))
    if json is not None:
        write_rows(json, rows, origin)
        drawn = _plots(tasks, rows, modes, json)
        print(f"{json}: {len(rows)} rows" + "".join(f"; {path}" for path in drawn))


RECIPE = "recipe."
"""What a change of the recipe's config begins with, instead of a task's name."""


def _subject(
    source: Path, needs: set[str], device: str, seed: int, json: Path | None, changes: Mapping[str, str] | None = None
) -> Subject:
    if len(needs) > 1:
        raise ValueError("tasks: expected tasks of a model or tasks of a recipe, got both; evaluate them one after the other")
    fields: dict[str, Any] = {"seed": seed, "folder": json.with_name(f"{json.stem}.runs") if json is not None else None}
    place = resolve(device)
    if needs == {"recipe"}:
        if source.is_dir():
            raise ValueError(f"model: expected a recipe, such as recall, for tasks that train models, got the folder {source}")
        return Subject(place, recipe=override(read_recipe(source), dict(changes or {})), source=find_recipe(source), **fields)
    if changes:
        raise ValueError(f"--{RECIPE}{next(iter(changes))}: expected a task that trains models by a recipe, got {source}")
    return Subject.load(source, place, **fields)


def _given(names: Sequence[str], changes: Sequence[tuple[str, str]]) -> dict[str, dict[str, str]]:
    """Settings by task: --task.setting=value is one task's, --setting=value every named task's that has it and is not told
    its own. Of a setting given more than once the last counts.
    """
    own: dict[str, dict[str, str]] = {name: {} for name in names}
    shared: dict[str, dict[str, str]] = {name: {} for name in names}
    for dotted, value in changes:
        task, dot, name = dotted.partition(".")
        if dot:
            known(f"--{dotted}: task", task, names)
            own[task][name] = value
            continue
        owners = [each for each in names if dotted in TASKS[each].Settings.__dataclass_fields__]
        if not owners:
            all_names = sorted({field for each in names for field in TASKS[each].Settings.__dataclass_fields__})
            known(f"--{dotted}: setting", dotted, all_names)
        for each in owners:
            shared[each][dotted] = value
    return {name: {**shared[name], **own[name]} for name in names}


def _plots(tasks: Sequence[Task], rows: Sequence[Row], modes: Sequence[Mode], json: Path) -> list[Path]:
    found = []
    for task in tasks:
        own: Mapping[str, list[Row]] = {
            mode: [row for row in rows if row.task == task.name and row.setting["memory"] == mode] for mode in modes
        }
        found += task.plots(own, json.with_name(json.stem))
    return found


def _console() -> Console:
    """As wide as the terminal; where there is none, wide enough that no number is cut."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def table(rows: Sequence[Row], modes: Sequence[Mode]) -> Table:
    """One task's numbers: a line each, what varies between them as columns and what does not as the title; then a column for
    each mode of the memory, and what the memory is worth: the difference to `off`.
    """
    settings = [{key: value for key, value in row.setting.items() if key not in HIDDEN} for row in rows]
    keys = list(dict.fromkeys(key for setting in settings for key in setting))
    common = {key: settings[0].get(key) for key in keys if all(setting.get(key) == settings[0].get(key) for setting in settings)}
    varying = [key for key in keys if key not in common]
    fixed = ", ".join(f"{key} {_told(key, value)}" for key, value in common.items() if value is not None)
    made = Table(title=escape(f"{rows[0].task}: {fixed}" if fixed else rows[0].task), title_justify="left")
    for key in ("metric", *varying):
        made.add_column(key, no_wrap=True)
    for mode in modes:
        made.add_column(f"memory {mode}", justify="right", no_wrap=True)
    others = [mode for mode in modes if mode != "off" and "off" in modes]
    for mode in others:
        made.add_column(f"{mode} - off", justify="right", no_wrap=True)
    lines: dict[tuple[str, ...], dict[str, Row]] = {}
    for row, setting in zip(rows, settings, strict=True):
        place = (row.metric, *("" if setting.get(key) is None else _told(key, setting[key]) for key in varying))
        lines.setdefault(place, {})[row.setting["memory"]] = row
    for place, by_mode in lines.items():
        worth = [_worth(by_mode[mode], by_mode["off"]) if {mode, "off"} <= set(by_mode) else "" for mode in others]
        made.add_row(*(escape(name) for name in place), *(_cell(by_mode.get(mode)) for mode in modes), *worth)
    return made


HIDDEN = ("memory", "digest", "stories", "seed")
"""Parts of a setting that the table leaves out: the JSON file has them."""
LENGTHS = ("length", "window", "from", "before", "max_tokens")


def _told(key: str, value: Any) -> str:
    return told(value) if key in LENGTHS and isinstance(value, int) else str(value)


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row.deviation is not None:
        return f"{row.value:.4g} ± {row.deviation:.2g}"
    if row.interval is None:
        return f"{row.value:.4g}" if row.value < 1e4 else f"{row.value:.3e}"
    return f"{row.value:.1%} ({100 * row.interval[0]:.0f}-{100 * row.interval[1]:.0f})"


def _worth(row: Row, off: Row) -> str:
    """A difference, in points where the values are shown in percent."""
    same = isclose(row.value, off.value, rel_tol=1e-12)  # means of equal numbers may differ in their last digit
    difference = 0.0 if same else row.value - off.value
    return f"{difference:+.3g}" if row.interval is None else f"{100 * difference:+.1f} points"


class Shown:
    """Progress: a bar on a terminal, a plain line every ten seconds elsewhere."""

    def __init__(self) -> None:
        self.console, self.said, self.begun = Console(stderr=True), time.monotonic(), time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"), TimeRemainingColumn())
        self.bar = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self.task = self.bar.add_task("", total=None)
        self.what = ""

    def __enter__(self) -> Shown:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def update(self, what: str, done: int, total: int) -> None:
        if what != self.what:
            self.what, self.begun = what, time.monotonic()
            self.bar.reset(self.task, description=what, total=total)
        self.bar.update(self.task, completed=done)
        if not self.console.is_terminal and time.monotonic() - self.said > 10:
            self.said = time.monotonic()
            print(f"{what}: {100 * done / max(total, 1):.0f} %", file=sys.stderr, flush=True)
