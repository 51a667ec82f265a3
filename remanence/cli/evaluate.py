"""The command that evaluates a model or a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import tyro

from remanence.cli.arguments import Device, Folder, Mode
from remanence.cli.progress import Progress
from remanence.runtime.overrides import by_owner, format_length, split_prefix
from remanence.runtime.terminal import echo
from remanence.verticals import evaluations

if TYPE_CHECKING:
    from rich.table import Table

    from remanence.evaluate import Row, Subject, Task

MODEL_TASKS = ("lm", "wikitext", "lambada", "niah", "babilong", "recall", "commonsense", *evaluations())
"""Names of the tasks that measure a model, for --help, which does not import the tasks."""
RECIPE_PREFIX = "recipe."
"""Prefix of overrides that change a field of the recipe's config, in place of a task name."""
HIDDEN_SETTINGS = ("memory", "digest", "stories", "seed")
"""Settings that the table does not show. The JSON file has them."""
QUICK_SETTINGS: dict[str, dict[str, str]] = {
    "lm": {"max_tokens": "32K"},
    "niah": {"lengths": "1K,4K", "depths": "0,0.5,1", "samples": "1", "batch": "3"},
}
"""Settings of the quick version of a task, which runs unless --full is given: about a minute for a model of
preset `tiny` on two cores.
"""
LIMITING_SETTINGS = {"lm": ("max_tokens", "every"), "niah": ("kinds", "lengths", "depths", "samples")}
"""Settings of a task that limit how much is measured. If one of them is given, `QUICK_SETTINGS` does not apply."""
LENGTH_SETTINGS = ("length", "window", "from", "before", "max_tokens")
"""Settings that are lengths in tokens."""


@dataclass(frozen=True)
class Eval:
    """Evaluate a model on tasks: {tasks}.

    The tasks ablate and depth train models from a recipe instead.

    --task.setting=value changes a setting of one task, --setting=value changes it in every task that has it, and
    --recipe.field=value changes a field of the recipe. The settings are listed below. With --json, an
    interrupted evaluation continues when it is started again.
    """

    OPTIONS: ClassVar = ("memory-mode", "memory_mode", "json", "device", "seed", "full", "help")
    OVERRIDES_OF: ClassVar = "a task"

    model: Folder
    """Model folder; for ablate and depth the name or path of a recipe."""
    tasks: tyro.conf.Positional[tuple[str, ...]]
    """Tasks to evaluate."""
    memory_mode: tuple[Mode, ...] = ("on",)
    """Modes of the neural memory: on, off, frozen, fresh. With off and others, the differences to off are shown."""
    json: Path | None = None
    """File for the results. Plots, training runs and partial results are written beside it."""
    device: Device = "auto"
    """Device to run on."""
    seed: int = 0
    """Random seed of the evaluation data."""
    full: bool = False
    """Run lm and niah in full. Without it, and unless settings limit them, lm reads the first 32K tokens of each file
    and niah has 18 needles in at most 4K tokens.
    """
    overrides: tyro.conf.Suppress[tuple[tuple[str, str], ...]] = ()

    @staticmethod
    def list_fields() -> Iterator[str]:
        """The lines of --help that list the settings of all tasks."""
        from remanence.cli.fields import all_fields, format_fields
        from remanence.evaluate import TASKS

        for name, task in TASKS.items():
            yield f"settings of {name}:"
            yield from format_fields(all_fields(task.Settings(), f"{name}."))

    def run(self) -> None:
        """Run the evaluation, print the tables, and write results and plots."""
        from remanence.evaluate import TASKS, configured, provenance, write_rows

        self._check()
        recipe, others = split_prefix(self.overrides, RECIPE_PREFIX)
        names = {name: TASKS[name].Settings.__dataclass_fields__ for name in self.tasks}
        given = by_owner(others, names)
        limits = {name: self._quick_settings(name, own) for name, own in given.items()}
        settings = {name: configured(TASKS[name], limits[name] | own) for name, own in given.items()}
        subject = self._subject(recipe)
        tasks = [TASKS[name](subject, settings[name]) for name in self.tasks]
        rows = self._measure(subject, tasks)
        origin = provenance(subject)
        for task in tasks:
            _print_table(
                table([row for row in rows if row.task == task.name and not row.detail], self.memory_mode)
            )
        for name, own in limits.items():
            if own:
                limits_text = ", ".join(f"{setting}={value}" for setting, value in own.items())
                echo(f"{name}: limited to {limits_text}; --full runs all", error=True)
        if self.json is not None:
            write_rows(self.json, rows, origin)
            plots = _plots(tasks, rows, self.memory_mode, self.json)
            echo(f"{self.json}: {len(rows)} rows" + "".join(f"; {path}" for path in plots))

    def _quick_settings(self, name: str, given: Mapping[str, str]) -> dict[str, str]:
        """Return the settings of the quick version of a task; empty with --full, or if settings that limit
        the task were given.
        """
        if (
            self.full
            or name not in QUICK_SETTINGS
            or any(setting in given for setting in LIMITING_SETTINGS[name])
        ):
            return {}
        return {setting: value for setting, value in QUICK_SETTINGS[name].items() if setting not in given}

    def _check(self) -> None:
        """Raise an error for wrong arguments, before anything is loaded."""
        from remanence.evaluate import TASKS
        from remanence.evaluate.run import check_target
        from remanence.runtime.choices import check_choice

        if not self.tasks:
            raise ValueError(f"tasks: expected at least one of {', '.join(TASKS)}, got none")
        for name in self.tasks:
            check_choice("task", name, TASKS)
            if self.tasks.count(name) > 1:
                raise ValueError(f"tasks: expected each task once, got {name} twice")
        if self.json is not None:
            check_target(self.json)
        if self.seed < 0:
            raise ValueError(f"--seed: expected an integer from 0 on, got {self.seed}")
        if not self.memory_mode or len(set(self.memory_mode)) < len(self.memory_mode):
            modes = " ".join(self.memory_mode) or "none"
            raise ValueError(f"--memory-mode: expected one or more modes, each once, got {modes}")

    def _subject(self, overrides: Mapping[str, str]) -> Subject:
        """Return the subject of the evaluation: the model of a folder, or a recipe with some fields changed."""
        from remanence.evaluate import TASKS, Subject
        from remanence.recipes import find_recipe, load_recipe
        from remanence.runtime.device import resolve
        from remanence.train import override

        source, json = self.model, self.json
        needs = {TASKS[name].needs for name in self.tasks}
        if len(needs) > 1:
            hint = "evaluate them one after the other"
            raise ValueError(f"tasks: expected tasks of a model or tasks of a recipe, got both; {hint}")
        folder = json.with_name(f"{json.stem}.runs") if json is not None else None
        shared: dict[str, Any] = {"seed": self.seed, "folder": folder}
        device = resolve(self.device)
        if needs == {"recipe"}:
            if source.is_dir():
                expected = "expected a recipe, such as recall, for tasks that train models"
                raise ValueError(f"model: {expected}, got the folder {source}")
            recipe = override(load_recipe(source), overrides)
            return Subject(device, recipe=recipe, source=find_recipe(source), **shared)
        if overrides:
            name = f"--{RECIPE_PREFIX}{next(iter(overrides))}"
            raise ValueError(f"{name}: expected a task that trains models by a recipe, got {source}")
        return Subject.load(source, device, **shared)

    def _measure(self, subject: Subject, tasks: Sequence[Task]) -> list[Row]:
        """Run all tasks in all memory modes, show progress, and return the result rows."""
        from remanence.evaluate import evaluate
        from remanence.evaluate.run import journal_path

        journal = None if self.json is None else journal_path(self.json)
        with Progress() as progress:
            bar = progress.add()

            def show(name: str, done: int, total: int) -> None:
                if not bar.name:
                    bar.begin(name, total, done)
                bar.rename(name)
                bar.update(done)

            try:
                return evaluate(subject, tasks, self.memory_mode, journal=journal, show=show)
            except KeyboardInterrupt:
                if journal is not None:
                    echo(
                        f"{journal}: partial results are saved; the same command continues",
                        error=True,
                    )
                raise


Eval.__doc__ = (Eval.__doc__ or "").format(tasks=", ".join(MODEL_TASKS))


def _plots(tasks: Sequence[Task], rows: Sequence[Row], modes: Sequence[Mode], json: Path) -> list[Path]:
    """Write the plots of all tasks beside the JSON file and return their paths."""
    paths = []
    for task in tasks:
        rows_by_mode: dict[str, list[Row]] = {mode: [] for mode in modes}
        for row in rows:
            if row.task == task.name:
                rows_by_mode[row.setting["memory"]].append(row)
        paths += task.plots(rows_by_mode, json.with_name(json.stem))
    return paths


def _print_table(table: Table) -> None:
    """Print a table as wide as the terminal; without a terminal, wide enough that no number is cut."""
    from remanence.cli.console import Console

    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table)


def table(rows: Sequence[Row], modes: Sequence[Mode]) -> Table:
    """Return a table of one task's results. Settings that vary are columns; the others are in the title.

    There is one column for each memory mode and, if "off" is among them, one for the difference of each mode to "off".
    """
    from rich.table import Table

    settings = [
        {key: value for key, value in row.setting.items() if key not in HIDDEN_SETTINGS} for row in rows
    ]
    keys = list(dict.fromkeys(key for setting in settings for key in setting))
    varying = [key for key in keys if any(each.get(key) != settings[0].get(key) for each in settings)]
    common = {key: value for key, value in settings[0].items() if key not in varying and value is not None}
    fixed = ", ".join(f"{key} {_format_setting(key, value)}" for key, value in common.items())
    built = Table(title=f"{rows[0].task}: {fixed}" if fixed else rows[0].task, title_justify="left")
    for key in ("metric", *varying):
        built.add_column(key, no_wrap=True)
    others = [mode for mode in modes if mode != "off" and "off" in modes]
    for title in (*(f"memory {mode}" for mode in modes), *(f"{mode} - off" for mode in others)):
        built.add_column(title, justify="right", no_wrap=True)
    lines: dict[tuple[str, ...], dict[str, Row]] = {}
    for row, setting in zip(rows, settings, strict=True):
        cells = ("" if setting.get(key) is None else _format_setting(key, setting[key]) for key in varying)
        lines.setdefault((row.metric, *cells), {})[row.setting["memory"]] = row
    for labels, by_mode in lines.items():
        differences = [_format_difference(by_mode.get(mode), by_mode.get("off")) for mode in others]
        built.add_row(*labels, *(_format_result(by_mode.get(mode)) for mode in modes), *differences)
    return built


def _format_setting(key: str, value: Any) -> str:
    """Return the value of a setting as text; lengths are shortened, as in 4K."""
    return format_length(value) if key in LENGTH_SETTINGS and isinstance(value, int) else str(value)


def _format_result(row: Row | None) -> str:
    """Return the value of a result as text, with its deviation or confidence interval if it has one; empty
    for None.
    """
    if row is None:
        return ""
    if row.deviation is not None:
        return f"{row.value:.4g} ± {row.deviation:.2g}"
    if row.interval is None:
        return f"{row.value:.4g}" if row.value < 1e4 else f"{row.value:.3e}"
    return f"{row.value:.1%} ({100 * row.interval[0]:.0f}-{100 * row.interval[1]:.0f})"


def _format_difference(row: Row | None, off: Row | None) -> str:
    """Return the difference to memory off as text, in points where values are shown in percent; empty if
    either is missing.
    """
    if row is None or off is None:
        return ""
    # Means that should be equal may differ in the last digit.
    are_equal = isclose(row.value, off.value, rel_tol=1e-12)
    difference = 0.0 if are_equal else row.value - off.value
    return f"{difference:+.3g}" if row.interval is None else f"{100 * difference:+.1f} points"
