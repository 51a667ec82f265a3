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
"""The result of a unit, as JSON data. It is written to a file, from which an interrupted evaluation resumes."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured value with its setting, the number of samples and a confidence interval."""

    task: str
    """Name of the evaluation task."""
    metric: str
    value: float
    setting: Setting
    """Settings under which the value was measured."""
    count: int | None = None
    """Number of samples, such as questions or tokens. None: does not apply."""
    interval: tuple[float, float] | None = None
    """95 % confidence interval. None: not computed."""
    deviation: float | None = None
    """Standard deviation over training seeds. None: fewer than two seeds."""
    detail: bool = False
    """Whether the row is only for plots and the JSON file. Tables omit it."""
    origin: Setting | None = field(default=None, compare=False)
    """Date, commit, hardware and versions of the measurement."""


class Task(ABC):
    """One evaluation task for one subject (a model or a recipe).

    A subclass has a dataclass `Settings`, and loads its data in the constructor, so that missing data raises
    an error before anything is measured. `units` lists the units of work, `measure` measures some of them,
    and `rows` summarises the results of all units.
    """

    name: ClassVar[str]
    """Name on the command line."""
    Settings: ClassVar[type[Any]]
    """Dataclass of the task's settings."""
    needs: ClassVar[str] = "model"
    """The subject that the task needs: "model" (a trained model) or "recipe" (from which it trains models)."""

    def __init__(self, subject: Subject, settings: Any) -> None:
        self.subject, self.settings = subject, settings
        check_unique({f"{self.name}.{each.name}": getattr(settings, each.name) for each in fields(settings)})

    @property
    def identity(self) -> Setting:
        """Settings that all units share. A saved result is reused only if they are equal."""
        return {"seed": self.subject.seed}

    @abstractmethod
    def units(self) -> list[list[Setting]]:
        """Return the settings of all units, in groups. The units of a group can be measured as one batch."""

    def cost(self, unit: Setting) -> int:
        """Return the approximate number of tokens that a unit reads, for the progress display."""
        return 1

    @abstractmethod
    def measure(self, units: list[Setting]) -> list[Result]:
        """Measure these units, which belong to one group, and return one result per unit."""

    @abstractmethod
    def rows(self, results: Sequence[tuple[Setting, Result]]) -> list[Row]:
        """Summarise the results of all units as rows."""

    def plots(self, rows: Mapping[str, Sequence[Row]], stem: Path) -> list[Path]:
        """Plot the rows, given by memory mode, to files whose names start with `stem`. Returns their paths."""
        return []

    def row(self, metric: str, value: float, setting: Setting | None = None, **facts: Any) -> Row:
        """Build a row of this task. The shared settings (`identity`) are added to `setting`; `facts` are
        other fields of `Row`.
        """
        return Row(
            task=self.name, metric=metric, value=value, setting={**(setting or {}), **self.identity}, **facts
        )


class Share(TypedDict):
    """The fields of a row whose value is an accuracy, with a 95 % confidence interval."""

    value: float
    count: int
    interval: tuple[float, float]


def share(correct: float, count: int) -> Share:
    """Return the accuracy and its confidence interval. `correct` may be fractional, for partly correct
    answers.
    """
    return {"value": correct / count, "count": count, "interval": wilson(correct, count)}


def perplexity(loss: float) -> float:
    """Return the perplexity of a mean loss in nats, or infinity if it exceeds the largest float."""
    return exp(loss) if loss < log(float_info.max) else inf


def wilson(correct: float, count: int, z: float = 1.959964) -> tuple[float, float]:
    """Return the 95 % confidence interval of an accuracy (Wilson score interval)."""
    if count < 1 or not 0 <= correct <= count:
        raise ValueError(
            f"correct: expected 0 to count={count} correct answers, with a count of at least 1, got {correct}"
        )
    p, shrink = correct / count, 1 + z * z / count
    middle = (p + z * z / (2 * count)) / shrink
    half = z / shrink * sqrt(p * (1 - p) / count + z * z / (4 * count * count))
    return 0.0 if correct == 0 else middle - half, 1.0 if correct == count else middle + half


def configured(task: type[Task], changes: Mapping[str, str]) -> Any:
    """Return a task's settings with values from the command line, for example
    ``{"lengths": "1K,64K", "samples": "20"}``.
    """
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
    """Raise an error for values below `least`, and for empty tuples. Every value of a tuple is checked; None
    is allowed.
    """
    for name, value in values.items():
        for each in value if isinstance(value, tuple) else (value,):
            if each is not None and not each >= least:  # NaN also raises an error
                raise ValueError(f"{name}: expected at least {least:g}, got {each}")
        if value == ():
            raise ValueError(f"{name}: expected at least one, got none")


def check_unique(settings: Mapping[str, object]) -> None:
    """Raise an error for a value that a tuple contains twice, because it would count as two samples."""
    for name, values in settings.items():
        given = values if isinstance(values, tuple) else ()
        for value in given:
            if given.count(value) > 1:
                raise ValueError(f"{name}: expected each value once, got {value} twice")
