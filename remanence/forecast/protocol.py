"""Forecasting by the field's standard protocol: which rows train, validate and test, in which units, and how errors are
counted.

The borders are those of Informer and everything after it. Windows of the validation and test parts may look back into
the part before; no forecast is trained, validated or tested on a value of another part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from remanence.forecast.series import Series
from remanence.runtime.choices import check_choice

PARTS = ("train", "val", "test")
HORIZONS = (96, 192, 336, 720)
"""What the field reports, each by a model of its own."""
MONTH = 30
"""Days, in the splits of ETT."""


class Borders(NamedTuple):
    """The rows whose values a part forecasts: from 0, to the end of training, of validation and of testing."""

    train: int
    val: int
    test: int


def _months(rows_per_day: int) -> Callable[[int], Borders]:
    """12, 4 and 4 months; what comes after them is not used."""
    month = MONTH * rows_per_day
    return lambda rows: Borders(12 * month, 16 * month, 20 * month)


def _shares(rows: int) -> Borders:
    """The first 7 and the last 2 of 10 parts, each rounded down; validation gets what is left between them."""
    return Borders(int(rows * 0.7), rows - int(rows * 0.2), rows)


SPLITS: dict[str, Callable[[int], Borders]] = {
    "ett-hour": _months(24),
    "ett-minute": _months(24 * 4),
    "7/1/2": _shares,
}
"""How many rows each part has, from the number of all rows. A new split is an entry."""


class Scaler(NamedTuple):
    """Mean and standard deviation of the training part, per channel; one that is constant there keeps its unit."""

    mean: np.ndarray
    std: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray) -> Scaler:
        mean, std = values.mean(0), values.std(0)
        # Rounding leaves a little where all values are the same.
        return cls(mean, np.where(std > 1e-9 * np.maximum(1.0, np.abs(mean)), std, 1.0))

    def standardized(self, values: np.ndarray) -> np.ndarray:
        return (values - self.mean) / self.std

    def restored(self, values: np.ndarray) -> np.ndarray:
        return values * self.std + self.mean


class Windows(NamedTuple):
    """A part's windows over the standardised series ``[rows channels]``: their look-backs begin at `first`, `first` + 1
    and so on.
    """

    values: Tensor
    first: int
    number: int
    lookback: int
    horizon: int

    def take(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs ``[b rows channels]`` and targets ``[b horizon channels]`` of windows by number."""
        span = torch.arange(self.lookback + self.horizon, device=index.device)
        rows = self.values[self.first + index[:, None] + span]
        return rows[:, : self.lookback], rows[:, self.lookback :]

    def to(self, device: torch.device) -> Windows:
        return self._replace(values=self.values.to(device))


class Protocol(NamedTuple):
    """A series in standard units, with its borders."""

    values: Tensor
    """``[rows channels]``, float32."""
    scaler: Scaler
    borders: Borders
    names: tuple[str, ...]

    @classmethod
    def of(cls, series: Series, split: str = "7/1/2", scaler: Scaler | None = None) -> Protocol:
        """The protocol on a series; `scaler` if a model brings its own."""
        check_choice("data.split", split, SPLITS)
        rows, borders = len(series.values), SPLITS[split](len(series.values))
        if rows < borders.test:
            raise ValueError(
                f"data.split: expected at least {borders.test:,} rows for {split!r}, got {rows:,}; '7/1/2' takes any"
            )
        scaler = scaler or Scaler.of(series.values[: borders.train])
        values = torch.from_numpy(scaler.standardized(series.values[: borders.test]).astype(np.float32))
        return cls(values, scaler, borders, series.names)

    def windows(self, part: str, lookback: int, horizon: int) -> Windows:
        """All windows of a part. Those of validation and test begin in the part before."""
        check_choice("part", part, PARTS)
        index = PARTS.index(part)
        start = 0 if index == 0 else self.borders[index - 1] - lookback
        number = self.borders[index] - start - lookback - horizon + 1
        if number < 1 or start < 0:
            rows = self.borders[index] - (0 if index == 0 else self.borders[index - 1])
            raise ValueError(
                f"data: expected at least {lookback + horizon if index == 0 else horizon} rows to {part} with a "
                f"look-back of {lookback} and a horizon of {horizon}, got {rows}"
            )
        return Windows(self.values, start, number, lookback, horizon)


class Errors(NamedTuple):
    """The mean squared and the mean absolute error, in standard units, and the number of windows."""

    mse: float
    mae: float
    windows: int


Forecast = Callable[[Tensor, Tensor], Tensor]
"""From look-backs ``[b rows channels]`` and the numbers of their first rows ``[b]`` to what follows each,
``[b horizon channels]``.
"""


@torch.no_grad()
def errors_of(forecast: Forecast, windows: Windows, *, every: int = 1, size: int = 256) -> Errors:
    """Over all windows, or every n-th, and all steps and channels. The last batch is as long as what is left, and every
    window counts the same.
    """
    found = []
    chosen = torch.arange(0, windows.number, every, device=windows.values.device)
    for index in chosen.split(size):
        x, y = windows.take(index)
        miss = forecast(x, windows.first + index).float() - y
        found.append(torch.stack([miss.square().sum(), miss.abs().sum()]))
    # On the host once, and in float64, which not every device has.
    total = torch.stack(found).cpu().double().sum(0)
    mse, mae = (total / (len(chosen) * windows.horizon * windows.values.shape[1])).tolist()
    return Errors(mse, mae, len(chosen))
