"""An experiment: its settings, its units of work, and rows of results. A new one is an entry of `TASKS`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import exp, inf, log, sqrt
from pathlib import Path
from sys import float_info
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints

from remanence.runtime.choices import check_choice
from remanence.runtime.overrides import parse_value

if TYPE_CHECKING:
    from remanence.evaluate.subject import Subject

Setting = dict[str, Any]
"""What a unit or a row depends on, as plain data."""
Result = dict[str, Any]
"""A unit's result, as plain data: it is written to a file and read back when an evaluation goes on."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One number: what was measured, in which setting, and how certain it is."""

    task: str
    metric: str
    value: float
    setting: Setting
    count: int | None = None
    interval: tuple[float, float] | None = None
    deviation: float | None = None
    """Of several trainings."""
    detail: bool = False
    """One of many, for a plot and the file: a table leaves it out."""
    origin: Setting | None = field(default=None, compare=False)
    """When, where and by what it was measured."""


class Task(ABC):
    """One experiment on one subject.

    A subclass has its settings, a dataclass named `Settings`, and prepares its data when it is made: data that is
    missing or too short is an error before anything is measured. It lists its units, measures some, and makes rows of
    all.
    """

    name: ClassVar[str]
    Settings: ClassVar[type[Any]]
    needs: ClassVar[str] = "model"
    """What is evaluated: "model", a folder, or "recipe", from which models are trained."""

    def __init__(self, subject: Subject, settings: Any) -> None:
        self.subject, self.settings = subject, settings
        each_once({f"{self.name}.{each.name}": getattr(settings, each.name) for each in fields(settings)})

    @property
    def identity(self) -> Setting:
        """What every unit depends on beside its own setting."""
        return {"seed": self.subject.seed}

    @abstractmethod
    def units(self) -> list[list[Setting]]:
        """All units, in groups; units of one group can be measured side by side."""

    def cost(self, unit: Setting) -> int:
        """About how many tokens a unit reads."""
        return 1

    @abstractmethod
    def measure(self, units: list[Setting]) -> list[Result]:
        """The results of some units of one group."""

    @abstractmethod
    def rows(self, results: Sequence[tuple[Setting, Result]]) -> list[Row]:
        """The rows of all units together."""

    def plots(self, rows: Mapping[str, Sequence[Row]], stem: Path) -> list[Path]:
        """Pictures of the rows of every memory mode, in files whose names begin with `stem`."""
        return []

    def row(self, metric: str, value: float, setting: Setting | None = None, **facts: Any) -> Row:
        return Row(
            task=self.name, metric=metric, value=value, setting={**(setting or {}), **self.identity}, **facts
        )


def share(right: float, count: int) -> dict[str, Any]:
    """A row's value, count and interval for so many right answers (parts of one count in part)."""
    return {"value": right / count, "count": count, "interval": wilson(right, count)}


def perplexity(loss: float) -> float:
    """Of a mean loss; infinite where a number cannot hold it."""
    return exp(loss) if loss < log(float_info.max) else inf


def wilson(right: float, count: int, z: float = 1.959964) -> tuple[float, float]:
    """The 95 % interval of a share, by Wilson's score: inside 0 and 1, and not empty when all answers are right."""
    if count < 1 or not 0 <= right <= count:
        raise ValueError(
            f"right: expected from 0 to count={count} right answers of at least one, got {right}"
        )
    p, shrink = right / count, 1 + z * z / count
    middle = (p + z * z / (2 * count)) / shrink
    half = z / shrink * sqrt(p * (1 - p) / count + z * z / (4 * count * count))
    return 0.0 if right == 0 else middle - half, 1.0 if right == count else middle + half


def configured(task: type[Task], changes: Mapping[str, str]) -> Any:
    """A task's settings with some changed, given as text: ``{"lengths": "1K,64K", "samples": "20"}``."""
    hints = get_type_hints(task.Settings)
    given = {}
    for name, text in changes.items():
        check_choice(f"{task.name}.{name}: setting", name, [each.name for each in fields(task.Settings)])
        given[name] = parse_value(hints[name], text, f"{task.name}.{name}")
    try:
        each_once(given)
        return task.Settings(**given)
    except ValueError as error:
        raise ValueError(f"{task.name}.{error}") from None


def at_least(least: float, **values: Any) -> None:
    """Refuse settings that are smaller than they can be; of several numbers, every one."""
    for name, value in values.items():
        for each in value if isinstance(value, tuple) else (value,):
            if each is not None and not each >= least:  # nor is it nan
                raise ValueError(f"{name}: expected at least {least:g}, got {each}")
        if value == ():
            raise ValueError(f"{name}: expected at least one, got none")


def each_once(settings: Mapping[str, Any]) -> None:
    """Refuse values that are given twice: they would count as two samples."""
    for name, values in settings.items():
        for index, value in enumerate(values if isinstance(values, tuple) else ()):
            if value in values[:index]:
                raise ValueError(f"{name}: expected each value once, got {value} twice")
