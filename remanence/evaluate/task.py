"""The base class of evaluation tasks: settings, units of work, and rows of results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import exp, inf, log, sqrt
from pathlib import Path
from sys import float_info
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, get_type_hints

from remanence.runtime.choices import check_choice
from remanence.runtime.overrides import parse_value

if TYPE_CHECKING:
    from remanence.evaluate.subject import Subject

Setting = dict[str, Any]
"""The settings of a unit or a row, as JSON data."""
Result = dict[str, Any]
"""A unit's result, as JSON data: it is written to a file, from which an interrupted evaluation resumes."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured value with its setting, count and confidence interval."""

    task: str
    metric: str
    value: float
    setting: Setting
    count: int | None = None
    interval: tuple[float, float] | None = None
    deviation: float | None = None
    """Standard deviation over training seeds."""
    detail: bool = False
    """Only for plots and the JSON file; tables omit it."""
    origin: Setting | None = field(default=None, compare=False)
    """Date, commit, hardware and versions of the measurement."""


class Task(ABC):
    """One evaluation of one subject.

    A subclass has a dataclass `Settings` and loads its data in the constructor, so that missing data is an error before
    anything is measured. `units` lists the units of work, `measure` measures some of them, `rows` summarises all.
    """

    name: ClassVar[str]
    Settings: ClassVar[type[Any]]
    needs: ClassVar[str] = "model"
    """"model" for a trained model, or "recipe" for a task that trains models from a recipe."""

    def __init__(self, subject: Subject, settings: Any) -> None:
        self.subject, self.settings = subject, settings
        check_unique({f"{self.name}.{each.name}": getattr(settings, each.name) for each in fields(settings)})

    @property
    def identity(self) -> Setting:
        """Settings that all units share. A result is reused only if they are equal."""
        return {"seed": self.subject.seed}

    @abstractmethod
    def units(self) -> list[list[Setting]]:
        """All units, in groups; the units of a group can be measured as one batch."""

    def cost(self, unit: Setting) -> int:
        """The approximate number of tokens that a unit reads."""
        return 1

    @abstractmethod
    def measure(self, units: list[Setting]) -> list[Result]:
        """The results of these units, which belong to one group."""

    @abstractmethod
    def rows(self, results: Sequence[tuple[Setting, Result]]) -> list[Row]:
        """The rows of the results of all units."""

    def plots(self, rows: Mapping[str, Sequence[Row]], stem: Path) -> list[Path]:
        """Plot the rows of all memory modes to files whose names start with `stem`."""
        return []

    def row(self, metric: str, value: float, setting: Setting | None = None, **facts: Any) -> Row:
        return Row(
            task=self.name, metric=metric, value=value, setting={**(setting or {}), **self.identity}, **facts
        )


class Share(TypedDict):
    """The fields of a row whose value is an accuracy."""

    value: float
    count: int
    interval: tuple[float, float]


def share(correct: float, count: int) -> Share:
    """The accuracy and its confidence interval. `correct` may be fractional, for partly correct answers."""
    return {"value": correct / count, "count": count, "interval": wilson(correct, count)}


def perplexity(loss: float) -> float:
    """The perplexity of a mean loss; infinite if it exceeds the largest float."""
    return exp(loss) if loss < log(float_info.max) else inf


def wilson(correct: float, count: int, z: float = 1.959964) -> tuple[float, float]:
    """The 95 % confidence interval of an accuracy (Wilson score interval)."""
    if count < 1 or not 0 <= correct <= count:
        raise ValueError(
            f"correct: expected 0 to count={count} correct answers, with a count of at least 1, got {correct}"
        )
    p, shrink = correct / count, 1 + z * z / count
    middle = (p + z * z / (2 * count)) / shrink
    half = z / shrink * sqrt(p * (1 - p) / count + z * z / (4 * count * count))
    return 0.0 if correct == 0 else middle - half, 1.0 if correct == count else middle + half


def configured(task: type[Task], changes: Mapping[str, str]) -> Any:
    """A task's settings with values from the command line: ``{"lengths": "1K,64K", "samples": "20"}``."""
    hints = get_type_hints(task.Settings)
    given = {}
    for name, text in changes.items():
        check_choice(f"{task.name}.{name}: setting", name, [each.name for each in fields(task.Settings)])
        given[name] = parse_value(hints[name], text, f"{task.name}.{name}")
    try:
        check_unique(given)
        return task.Settings(**given)
    except ValueError as error:
        raise ValueError(f"{task.name}.{error}") from None


def check_minimum(least: float, **values: float | tuple[float, ...] | None) -> None:
    """Raise an error for values below `least`; of a tuple, every value is checked."""
    for name, value in values.items():
        for each in value if isinstance(value, tuple) else (value,):
            if each is not None and not each >= least:  # true of NaN, too
                raise ValueError(f"{name}: expected at least {least:g}, got {each}")
        if value == ():
            raise ValueError(f"{name}: expected at least one, got none")


def check_unique(settings: Mapping[str, object]) -> None:
    """Raise an error for a value that is given twice: it would count as two samples."""
    for name, values in settings.items():
        given = values if isinstance(values, tuple) else ()
        for value in given:
            if given.count(value) > 1:
                raise ValueError(f"{name}: expected each value once, got {value} twice")
