"""Evaluation of forecasts: errors over all test windows (the standard protocol), and rolling errors on a
stream.
"""

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
from remanence.forecast.plots import plot_forecasts, plot_series
from remanence.forecast.protocol import SPLITS, Protocol, compute_errors
from remanence.forecast.series import read_series
from remanence.runtime.choices import check_choice


@dataclass(frozen=True, kw_only=True)
class ForecastSettings:
    """Settings of the evaluation of forecasts.

    Attributes:
        data: a CSV file, compressed or in a .zip (``file.zip/inner.csv``), with the channels of the training
            data.
        split: name of the split that determines the test rows. Default: the split used in training, else
            7/1/2.
        missing: handling of missing values: "refuse" raises an error, "previous" repeats the value of the row
            before.
        shifts: distribution shifts in the middle of the test part for the rolling errors: "none", "level",
            "amplitude", "frequency". Default: no rolling errors. Memory mode `on` keeps writing the memory,
            `frozen` stops writing at the start of the test part, and `fresh` resets the memory before every
            look-back.
        warm: number of look-backs before the test part that the memory reads first.
        phases: number of forecasts per look-back. Each is made by a separate stream, offset by a fraction of
            a look-back.
        examples: number of windows in the plot of examples.
        windows: batch size, in windows.
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
    """Mean squared and mean absolute error, on values standardised with the training mean and deviation."""

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
        self.protocol = Protocol.from_series(found, self.split, self.network.scaler)
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
        rows = (
            self.windows.num_windows * self.windows.lookback
            if unit["shift"] is None
            else 2 * len(self.values)
        )
        return int(rows * self.network.config.channels)

    def measure(self, units: list[Setting]) -> list[Result]:
        return [
            self._measure_windows() if unit["shift"] is None else self._measure_stream(unit) for unit in units
        ]

    def _measure_windows(self) -> Result:
        """Return the errors over all test windows."""
        forecast = partial(self.network, memory_mode=self.subject.memory_mode)
        return compute_errors(forecast, self.windows, size=self.settings.windows)._asdict()

    @property
    def _shift_row(self) -> int:
        """Index of the row where the distribution shift starts: the middle of the test part."""
        start = self.protocol.borders.val
        return start + (len(self.values) - start) // 2

    def _measure_stream(self, unit: Setting) -> Result:
        """Return the mean rolling errors (mse, mae) before and after the shift, and the mse of each forecast."""
        values = SHIFTS[unit["shift"]](self.values, self._shift_row)
        start, mode = self.protocol.borders.val, self.subject.memory_mode
        rolled = roll(self.network, values, start, memory_mode=mode, warm=unit["warm"], phases=unit["phases"])
        # Forecasts whose horizon contains the shift are left out, because the shift could not be predicted.
        before = rolled.between(start, self._shift_row - self.network.config.horizon + 1)
        after = rolled.between(self._shift_row, len(values))
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
            drawn.append(self._plot_examples(list(rows), stem.with_name(f"{stem.name}.forecast.png")))
        for shift in self.settings.shifts:
            lines = {}
            for mode, own in rows.items():
                here = [row for row in own if row.detail and row.setting.get("shift") == shift]
                lines[f"memory {mode}"] = _smooth([(row.setting["row"], row.value) for row in here])
            path = stem.with_name(f"{stem.name}.forecast-{shift}.png")
            title = f"Rolling error over the test part, shift: {shift}"
            mark = None if shift == "none" else self._shift_row
            drawn.append(plot_series(path, lines, title=title, x="row", y="mean squared error", mark=mark))
        return drawn

    @torch.no_grad()
    def _plot_examples(self, modes: Sequence[Any], path: Path) -> Path:
        """Plot example windows of several channels with the forecast of every memory mode.

        Values are in the units of the data. Returns the path.
        """
        count, names = self.settings.examples, self.network.config.names
        index = torch.linspace(0, self.windows.num_windows - 1, count + 2).long()[1:-1].to(self.values.device)
        x, y = self.windows.take(index)
        found = {
            f"memory {mode}": self.network(x, self.windows.first + index, memory_mode=mode) for mode in modes
        }
        inverse = lambda each: self.protocol.scaler.inverse(each.float().cpu().numpy())
        past, truth = inverse(x), inverse(y)
        own = {name: inverse(each) for name, each in found.items()}
        panels = []
        for window in range(count):
            channel = window % len(names)
            lines = {name: each[window, :, channel] for name, each in own.items()}
            panels.append((names[channel], past[window, :, channel], truth[window, :, channel], lines))
        return plot_forecasts(
            path, panels, title=f"Forecasts of {self.network.config.horizon} rows from the test part"
        )


def _smooth(points: list[tuple[int, float]], most: int = 48) -> list[tuple[float, float]]:
    """Average neighbouring points so that at most `most` are left, because single forecasts are noisy."""
    width = -(-len(points) // most)
    return [
        (sum(at for at, _ in part) / len(part), sum(value for _, value in part) / len(part))
        for part in (points[start : start + width] for start in range(0, len(points), width))
    ]
