"""The standard forecasting protocol: training, validation and test rows, standardisation, and errors.

The split borders are those of Informer and later papers. The look-back of a validation or test window may
start in the part before. The values to forecast are always inside one part.
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
"""Names of the parts of a series."""
HORIZONS = (96, 192, 336, 720)
"""The horizons that papers report. Each needs its own model."""
DAYS_PER_MONTH = 30
"""Number of days that the ETT splits count as a month."""


class Borders(NamedTuple):
    """End rows (exclusive) of the training, validation and test parts. Training starts at row 0."""

    train: int
    val: int
    test: int


def _ett_split(rows_per_day: int) -> Callable[[int], Borders]:
    """Return the split of 12, 4 and 4 months. Rows after the 20 months are not used."""
    month = DAYS_PER_MONTH * rows_per_day
    return lambda rows: Borders(12 * month, 16 * month, 20 * month)


def _ratio_split(rows: int) -> Borders:
    """Return the split of 70 % training and 20 % test, each rounded down. The rows between are for
    validation.
    """
    return Borders(int(rows * 0.7), rows - int(rows * 0.2), rows)


SPLITS: dict[str, Callable[[int], Borders]] = {
    "ett-hour": _ett_split(24),
    "ett-minute": _ett_split(24 * 4),
    "7/1/2": _ratio_split,
}
"""Splits by name. Each is a function from the number of rows to `Borders`. Add an entry for a new split."""


class Scaler(NamedTuple):
    """Mean and standard deviation ``[channels]`` of the training part. The deviation of a constant channel is
    set to 1.
    """

    mean: np.ndarray
    std: np.ndarray

    @classmethod
    def fit(cls, values: np.ndarray) -> Scaler:
        """Compute the mean and standard deviation of values ``[rows channels]``."""
        mean, std = values.mean(0), values.std(0)
        # The std of a constant channel is not exactly 0 because of rounding.
        return cls(mean, np.where(std > 1e-9 * np.maximum(1.0, np.abs(mean)), std, 1.0))

    def standardize(self, values: np.ndarray) -> np.ndarray:
        """Subtract the mean and divide by the standard deviation."""
        return (values - self.mean) / self.std

    def inverse(self, values: np.ndarray) -> np.ndarray:
        """Convert standardised values back to the units of the data."""
        return values * self.std + self.mean


class Windows(NamedTuple):
    """The windows of one part of a standardised series. A window is a look-back and the rows to forecast.

    The look-backs start at rows `first`, `first` + 1 and so on.
    """

    values: Tensor
    """The series ``[rows channels]``."""
    first: int
    """First row of the first look-back."""
    num_windows: int
    lookback: int
    horizon: int

    def take(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs ``[b rows channels]`` and targets ``[b horizon channels]`` of the windows with
        these indices.
        """
        span = torch.arange(self.lookback + self.horizon, device=index.device)
        rows = self.values[self.first + index[:, None] + span]
        return rows[:, : self.lookback], rows[:, self.lookback :]

    def to(self, device: torch.device) -> Windows:
        """Return the same windows with their values on another device."""
        return self._replace(values=self.values.to(device))


class Protocol(NamedTuple):
    """A standardised series with its scaler and its split borders."""

    values: Tensor
    """Standardised values ``[rows channels]``, float32."""
    scaler: Scaler
    borders: Borders
    names: tuple[str, ...]
    """Names of the channels."""

    @classmethod
    def from_series(cls, series: Series, split: str = "7/1/2", scaler: Scaler | None = None) -> Protocol:
        """Standardise and split a series. If `scaler` is None, it is fitted on the training part."""
        check_choice("data.split", split, SPLITS)
        rows, borders = len(series.values), SPLITS[split](len(series.values))
        if rows < borders.test:
            raise ValueError(
                f"data.split: expected at least {borders.test:,} rows for {split!r}, got {rows:,}; '7/1/2' accepts any"
            )
        scaler = scaler or Scaler.fit(series.values[: borders.train])
        values = torch.from_numpy(scaler.standardize(series.values[: borders.test]).astype(np.float32))
        return cls(values, scaler, borders, series.names)

    def windows(self, part: str, lookback: int, horizon: int) -> Windows:
        """Return all windows of a part. The first look-backs of validation and test start in the part before."""
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
    """Mean squared and mean absolute error on standardised values, and the number of windows."""

    mse: float
    mae: float
    windows: int


Forecast = Callable[[Tensor, Tensor], Tensor]
"""A function from look-backs ``[b rows channels]`` and the indices of their first rows ``[b]`` to forecasts
``[b horizon channels]``.
"""


@torch.no_grad()
def compute_errors(forecast: Forecast, windows: Windows, *, every: int = 1, size: int = 256) -> Errors:
    """Return the errors of a forecast, averaged over windows, forecast rows and channels.

    Only every n-th window is used if `every` is n. `size` is the batch size in windows. The last batch may be
    smaller, but every window has the same weight.
    """
    found = []
    chosen = torch.arange(0, windows.num_windows, every, device=windows.values.device)
    for index in chosen.split(size):
        x, y = windows.take(index)
        miss = forecast(x, windows.first + index).float() - y
        found.append(torch.stack([miss.square().sum(), miss.abs().sum()]))
    # Transfer to the host once, and sum there in float64, which not every device supports.
    total = torch.stack(found).cpu().double().sum(0)
    mse, mae = (total / (len(chosen) * windows.horizon * windows.values.shape[1])).tolist()
    return Errors(mse, mae, len(chosen))
