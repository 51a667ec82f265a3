"""Forecasts by the field's protocol: errors over all windows of the test part, and along a stream that may shift."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from remanence.evaluate.subject import Subject
from remanence.evaluate.task import Result, Row, Setting, Task, check_minimum
from remanence.forecast.network import Network
from remanence.forecast.online import SHIFTS, roll
from remanence.forecast.plots import forecasts, series
from remanence.forecast.protocol import SPLITS, Protocol, errors_of
from remanence.forecast.series import read_series
from remanence.runtime.choices import check_choice


@dataclass(frozen=True, kw_only=True)
class ForecastSettings:
    """
    Attributes:
        data: a CSV file, compressed or in a .zip (``file.zip/inner.csv``), with the channels that the network knows.
        split: which rows are tested; none: as in training.
        missing: what becomes of missing values: "refuse", or "previous" for the value of the row before.
        shifts: for rolling errors along the test part: what changes in its middle. "none", "level", "amplitude",
            "frequency"; without any, only windows are measured. The mode `on` then goes on learning, `frozen` stops
            where the test part begins, and `fresh` forgets after every look-back.
        warm: look-backs that a stream's memory has read before the test part.
        phases: streams side by side, each a part of a look-back later: so many forecasts in a look-back.
        examples: windows that are drawn.
        windows: of a batch.
    """

    data: str | None = None
    split: str | None = None
    missing: str = "refuse"
    shifts: tuple[str, ...] = ()
    warm: int = 8
    phases: int = 4
    examples: int = 3
    windows: int = 256

    def __post_init__(self) -> None:
        check_minimum(1, phases=self.phases, windows=self.windows)
        check_minimum(0, warm=self.warm, examples=self.examples)
        for shift in self.shifts:
            check_choice("shifts", shift, SHIFTS)
        if self.split is not None:
            check_choice("split", self.split, SPLITS)


class Forecast(Task):
    """The mean squared and the mean absolute error in units of the training part's standard deviation."""

    name = "forecast"
    Settings = ForecastSettings

    def __init__(self, subject: Subject, settings: ForecastSettings) -> None:
        super().__init__(subject, settings)
        if not isinstance(subject.network, Network):
            raise ValueError(
                "model: expected a forecasting network, as `remanence train forecast/csv` makes one, got "
                f"{subject.source}"
            )
        self.network = subject.network
        shape = self.network.config
        if settings.data is None:
            raise ValueError("forecast.data: expected a CSV file, got none")
        found = read_series(
            settings.data, columns=shape.names, missing=settings.missing, name="forecast.data"
        )
        split = settings.split or subject.trained.get("split")
        self.split = split if isinstance(split, str) else "7/1/2"
        self.protocol = Protocol.of(found, self.split, self.network.scaler)
        self.values = self.protocol.values.to(subject.device)
        windows = self.protocol.windows("test", shape.lookback, shape.horizon)
        self.windows = windows._replace(values=self.values)
        self.digest = hashlib.sha256(self.protocol.values.numpy().tobytes()).hexdigest()[:16]

    @property
    def identity(self) -> Setting:
        shape = self.network.config
        about = {"lookback": shape.lookback, "horizon": shape.horizon, "split": self.split}
        return {**super().identity, **about, "digest": self.digest}

    def units(self) -> list[list[Setting]]:
        s = self.settings
        streams = [{"shift": shift, "warm": s.warm, "phases": s.phases} for shift in s.shifts]
        return [[{"shift": None}], *([stream] for stream in streams)]

    def cost(self, unit: Setting) -> int:
        rows = self.windows.number * self.windows.lookback if unit["shift"] is None else 2 * len(self.values)
        return int(rows * self.network.config.channels)

    def measure(self, units: list[Setting]) -> list[Result]:
        return [self._windows() if unit["shift"] is None else self._stream(unit) for unit in units]

    def _windows(self) -> Result:
        forecast = partial(self.network, memory_mode=self.subject.mode)
        return errors_of(forecast, self.windows, size=self.settings.windows)._asdict()

    @property
    def _middle(self) -> int:
        """The row at which a stream shifts."""
        start = self.protocol.borders.val
        return start + (len(self.values) - start) // 2

    def _stream(self, unit: Setting) -> Result:
        values = SHIFTS[unit["shift"]](self.values, self._middle)
        start, mode = self.protocol.borders.val, self.subject.mode
        rolled = roll(self.network, values, start, mode=mode, warm=unit["warm"], phases=unit["phases"])
        # A forecast made before the shift whose horizon reaches behind it could not know of it: it counts as neither.
        before = rolled.between(start, self._middle - self.network.config.horizon + 1)
        after = rolled.between(self._middle, len(values))
        curve = [[int(at), float(value)] for at, value in zip(rolled.origins, rolled.mse, strict=True)]
        return {"before": before, "after": after, "curve": sorted(curve)}

    def rows(self, results: Sequence[tuple[Setting, Result]]) -> list[Row]:
        made = []
        for unit, found in results:
            if unit["shift"] is None:
                made += [self.row(name, found[name], count=found["windows"]) for name in ("mse", "mae")]
                continue
            for when in ("before", "after"):
                for name, value in zip(("mse", "mae"), found[when], strict=True):
                    made.append(self.row(f"rolling {name}", value, {**unit, "when": when}))
            made += [
                self.row("rolling mse at", value, {**unit, "row": at}, detail=True)
                for at, value in found["curve"]
            ]
        return made

    def plots(self, rows: Mapping[str, Sequence[Row]], stem: Path) -> list[Path]:
        drawn = []
        if self.settings.examples:
            drawn.append(self._examples(list(rows), stem.with_name(f"{stem.name}.forecast.png")))
        for shift in self.settings.shifts:
            lines = {}
            for mode, own in rows.items():
                here = [row for row in own if row.detail and row.setting.get("shift") == shift]
                lines[f"memory {mode}"] = _smoothed([(row.setting["row"], row.value) for row in here])
            path = stem.with_name(f"{stem.name}.forecast-{shift}.png")
            title = f"Rolling error over the test part, shift: {shift}"
            mark = None if shift == "none" else self._middle
            drawn.append(series(path, lines, title=title, x="row", y="mean squared error", mark=mark))
        return drawn

    @torch.no_grad()
    def _examples(self, modes: Sequence[Any], path: Path) -> Path:
        """Some windows with what every mode forecasts, in the data's own units; each of another channel."""
        count, names = self.settings.examples, self.network.config.names
        index = torch.linspace(0, self.windows.number - 1, count + 2).long()[1:-1].to(self.values.device)
        x, y = self.windows.take(index)
        found = {
            f"memory {mode}": self.network(x, self.windows.first + index, memory_mode=mode) for mode in modes
        }
        restored = lambda each: self.protocol.scaler.restored(each.float().cpu().numpy())
        past, truth = restored(x), restored(y)
        own = {name: restored(each) for name, each in found.items()}
        panels = []
        for window in range(count):
            channel = window % len(names)
            lines = {name: each[window, :, channel] for name, each in own.items()}
            panels.append((names[channel], past[window, :, channel], truth[window, :, channel], lines))
        return forecasts(
            path, panels, title=f"Forecasts of {self.network.config.horizon} rows from the test part"
        )


def _smoothed(points: list[tuple[int, float]], most: int = 48) -> list[tuple[float, float]]:
    """Means of neighbours, so that so many points are left: single forecasts differ more than what is to be seen."""
    width = -(-len(points) // most)
    return [
        (sum(at for at, _ in part) / len(part), sum(value for _, value in part) / len(part))
        for part in (points[start : start + width] for start in range(0, len(points), width))
    ]
