"""Read and validate the inputs of a report: files of evaluation results and folders of training runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from remanence.io.files import check_digest

UNBOUNDED = ("perplexity", "loss", "bits")
"""Words in the names of metrics whose values can be infinite."""

JSON = dict[str, Any]
"""A parsed JSON object."""


@dataclass(frozen=True)
class Row:
    """One measured value with its setting and provenance, as ``remanence eval --json`` writes it.

    JSON has no infinity, so evaluations write null instead. Null is read as inf if the metric is unbounded,
    else as NaN.
    """

    task: str
    metric: str
    value: float
    setting: JSON
    provenance: JSON
    count: int | None = None
    """Number of samples. None: not given."""
    interval: tuple[float, float] | None = None
    """95 % confidence interval. None: not given."""
    deviation: float | None = None
    """Standard deviation over training seeds. None: not given, or not finite."""
    detail: bool = False
    """Whether the row is only for plots. Tables omit it."""

    @property
    def name(self) -> str:
        """The model's name and the start of its fingerprint, or the recipe's name and the start of its
        digest.
        """
        model, recipe, name = (self.provenance.get(key) for key in ("model", "recipe", "from"))
        digest = (model.get("weights") if isinstance(model, dict) else model) or (recipe if name else None)
        return str(name or recipe or "a model") + (f" ({str(digest)[:8]})" if digest else "")

    @property
    def subject(self) -> str:
        """The name of the model or recipe, followed by the memory mode."""
        mode = self.setting.get("memory")
        return self.name + (f", memory {mode}" if mode else "")


class Run(NamedTuple):
    """A training run: the name of its folder, its config, and the logged metrics of each step."""

    name: str
    config: JSON
    lines: list[JSON]

    @property
    def model(self) -> JSON:
        """The model part of the run's config."""
        config: JSON = self.config["model"]
        return config

    def numbers(self, *names: str) -> list[float]:
        """Return a metric of all logged steps. `names` are its current and earlier names."""
        return [line[name] for line in self.lines for name in names if _is_number(line.get(name))]


class Inputs(NamedTuple):
    """All inputs of a report."""

    rows: list[Row]
    runs: list[Run]


def read(paths: Sequence[Path]) -> Inputs:
    """Read and validate all files and folders. Errors name the file and what was expected."""
    if not paths:
        raise ValueError("runs: expected files of evaluation rows or folders of training runs, got none")
    inputs, seen = Inputs([], []), set()
    for path in paths:
        if path.resolve() in seen:
            raise ValueError(f"{path}: given twice")
        seen.add(path.resolve())
        if path.is_dir():
            inputs.runs.append(_read_run(path))
        elif path.is_file():
            inputs.rows.extend(_read_rows(path))
        else:
            raise ValueError(f"{path}: no such file or folder")
    return inputs


def _read_rows(path: Path) -> list[Row]:
    """Read a file of evaluation rows."""
    data = _parse(path, _text(path))
    rows = check_digest(path, data).get("rows") if isinstance(data, dict) else data
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{path}: expected rows, as `remanence eval --json` writes them, got {_type(rows)}")
    return [_row(row, f"{path}: row {number}") for number, row in enumerate(rows, 1)]


FIELDS = {
    "task": (str, "a string"),
    "metric": (str, "a string"),
    "setting": (dict, "an object"),
    "provenance": (dict, "an object with the source of the number"),
}
"""The required fields of every row: their types, and the words that describe the types in error messages."""


def _row(row: object, location: str) -> Row:
    """Validate a parsed row and convert it to a `Row`. `location` is the file and row number for error
    messages.
    """
    if not isinstance(row, dict):
        raise ValueError(f"{location}: expected an object, got {type(row).__name__}")
    for name, (kind, words) in FIELDS.items():
        if not isinstance(row.get(name), kind):
            raise ValueError(f"{location}: {name}: expected {words}, got {row.get(name)!r}")
    value, interval, deviation, count = map(row.get, ("value", "interval", "deviation", "count"))
    if "value" not in row or not (value is None or _is_number(value)):
        got = repr(value) if "value" in row else "none"
        raise ValueError(f"{location}: value: expected a finite number, or null for an infinity, got {got}")
    if interval is not None and not (
        isinstance(interval, list) and len(interval) == 2 and all(map(_is_number, interval))
    ):
        raise ValueError(f"{location}: interval: expected two numbers, got {interval!r}")
    if deviation is not None and not (type(deviation) in (int, float) and not deviation < 0):
        raise ValueError(f"{location}: deviation: expected a number of at least 0, got {deviation!r}")
    if count is not None and type(count) is not int:
        raise ValueError(f"{location}: count: expected an integer, got {count!r}")
    if value is None:
        value = inf if any(word in row["metric"] for word in UNBOUNDED) else nan
    return Row(
        row["task"],
        row["metric"],
        float(value),
        row["setting"],
        row["provenance"],
        count=count,
        interval=None if interval is None else (interval[0], interval[1]),
        deviation=float(deviation) if deviation is not None and isfinite(deviation) else None,
        detail=row.get("detail") is True,
    )


def _read_run(folder: Path) -> Run:
    """Read the config and the logged metrics of a training run."""
    for name in ("config.json", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder}: expected a training run with its {name}, which is missing")
    path = folder / "config.json"
    config = _parse(path, _text(path))
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
        raise ValueError(f"{path}: expected a run's config with its model, got {_type(config)}")
    path = folder / "metrics.jsonl"
    complete, _, _ = _text(path).rpartition(
        "\n"
    )  # the last line may be incomplete if the run is in progress or was killed
    lines = []
    for number, text in enumerate(complete.splitlines(), 1):
        line = _parse(path, text, f" line {number}:")
        if (
            not isinstance(line, dict)
            or not _is_number(line.get("step"))
            or not _is_number(line.get("tokens"))
        ):
            raise ValueError(f"{path}: line {number}: expected an object with step and tokens")
        lines.append(line)
    if not any(_is_number(line.get("loss")) for line in lines):
        raise ValueError(f"{path}: expected at least one logged step with a loss, got none")
    return Run(folder.resolve().name, config, lines)


def _parse(path: Path, text: str, location: str = "") -> object:
    """Parse JSON text. `location` is the line for error messages."""
    try:
        parsed: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}:{location} not JSON ({error})") from None
    return parsed


def _text(path: Path) -> str:
    """Read a UTF-8 text file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text file ({error})") from None


def _type(value: object) -> str:
    """Return the name of a value's type for error messages, or "none" if the value is None or an empty list."""
    return "none" if value is None or value == [] else type(value).__name__


def _is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number. Booleans are not numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
