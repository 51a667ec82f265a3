"""What a report is made from: files of evaluation rows and folders of training runs, all read and checked first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any, NamedTuple

from remanence.io.files import unsealed

UNBOUNDED = ("perplexity", "loss", "bits")
"""Words of metrics that can be infinite."""


@dataclass(frozen=True)
class Row:
    """One number: what was measured, in which setting, where it comes from, and which file and row it was read from.

    JSON has no infinity, and evaluations write null: such a value is inf where a metric can be that large, else NaN.
    """

    task: str
    metric: str
    value: float
    setting: dict[str, Any]
    provenance: dict[str, Any]
    location: str
    count: int | None = None
    interval: tuple[float, float] | None = None
    deviation: float | None = None
    detail: bool = False

    @property
    def name(self) -> str:
        """The name of what was evaluated: the model's with its weights, or the recipe's with its digest."""
        model, recipe, name = (self.provenance.get(key) for key in ("model", "recipe", "from"))
        digest = (model.get("weights") if isinstance(model, dict) else model) or (recipe if name else None)
        return str(name or recipe or "a model") + (f" ({str(digest)[:8]})" if digest else "")

    @property
    def subject(self) -> str:
        """What was evaluated: its name, and the mode of its memory."""
        mode = self.setting.get("memory")
        return self.name + (f", memory {mode}" if mode else "")


class Run(NamedTuple):
    """A training run: its config, and a line for every logged step."""

    name: str
    config: dict[str, Any]
    lines: list[dict[str, Any]]

    def values(self, name: str, kinds: tuple[type, ...]) -> list[Any]:
        """One metric of all logged steps that have it."""
        return [line[name] for line in self.lines if isinstance(line.get(name), kinds)]


class Found(NamedTuple):
    rows: list[Row]
    runs: list[Run]


def read(paths: Sequence[Path]) -> Found:
    """Every file and folder; the first thing wrong with one of them is an error that names it."""
    if not paths:
        raise ValueError("runs: expected files of evaluation rows or folders of training runs, got none")
    found, seen = Found([], []), set()
    for path in paths:
        if path.resolve() in seen:
            raise ValueError(f"{path}: given twice")
        seen.add(path.resolve())
        if path.is_dir():
            found.runs.append(_run(path))
        elif path.is_file():
            found.rows.extend(_rows(path))
        else:
            raise ValueError(f"{path}: no such file or folder")
    return found


def _json(path: Path, text: str, where: str = "") -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}:{where} not JSON ({error})") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text file ({error})") from None


def _rows(path: Path) -> list[Row]:
    data = _json(path, _text(path))
    rows = unsealed(path, data).get("rows") if isinstance(data, dict) else data
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{path}: expected rows, as `remanence eval --json` writes them, got {_kind(rows)}")
    return [_row(row, f"{path}: row {number}") for number, row in enumerate(rows, 1)]


def _value(row: dict[str, Any]) -> float:
    if row["value"] is not None:
        return float(row["value"])
    return inf if any(word in row["metric"] for word in UNBOUNDED) else nan


def _kind(value: Any) -> str:
    return "none" if value is None or value == [] else type(value).__name__


FIELDS = {
    "task": (str, "a text"),
    "metric": (str, "a text"),
    "setting": (dict, "an object"),
    "provenance": (dict, "an object that says where the number comes from"),
}
"""Fields that every row has: their types, and what an error says was expected."""


def _row(row: Any, location: str) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"{location}: expected an object, got {type(row).__name__}")
    for name, (kind, words) in FIELDS.items():
        if not isinstance(row.get(name), kind):
            raise ValueError(f"{location}: {name}: expected {words}, got {row.get(name)!r}")
    if "value" not in row or not (row["value"] is None or _number(row["value"])):
        got = repr(row["value"]) if "value" in row else "none"
        raise ValueError(f"{location}: value: expected a finite number, or null for an infinity, got {got}")
    interval = row.get("interval")
    if interval is not None and not _is_interval(interval):
        raise ValueError(f"{location}: interval: expected two numbers, got {interval!r}")
    deviation = row.get("deviation")
    if deviation is not None and not (type(deviation) in (int, float) and not deviation < 0):
        raise ValueError(f"{location}: deviation: expected a number from 0 on, got {deviation!r}")
    count = row.get("count")
    if count is not None and type(count) is not int:
        raise ValueError(f"{location}: count: expected a whole number, got {count!r}")
    return Row(
        row["task"],
        row["metric"],
        _value(row),
        row["setting"],
        row["provenance"],
        location,
        count=count,
        interval=None if interval is None else (interval[0], interval[1]),
        # Infinite values have no deviation.
        deviation=float(deviation) if deviation is not None and isfinite(deviation) else None,
        detail=row.get("detail") is True,
    )


def _is_interval(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_number, value))


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)


def _run(folder: Path) -> Run:
    for name in ("config.json", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder}: expected a training run with its {name}, which is missing")
    path = folder / "config.json"
    config = _json(path, _text(path))
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
        raise ValueError(f"{path}: expected a run's config with its model, got {_kind(config)}")
    path = folder / "metrics.jsonl"
    # The metrics of a run that goes on, or was killed, may end with half a line.
    complete, _, _ = _text(path).rpartition("\n")
    lines = [_json(path, line, f" line {number}:") for number, line in enumerate(complete.splitlines(), 1)]
    for number, line in enumerate(lines, 1):
        if not isinstance(line, dict) or not _number(line.get("step")) or not _number(line.get("tokens")):
            raise ValueError(f"{path}: line {number}: expected an object with step and tokens")
    if not any(_number(line.get("loss")) for line in lines):
        raise ValueError(f"{path}: expected at least one logged step with a loss, got none")
    return Run(folder.resolve().name, config, lines)
