"""Python interface for forecasting: fit on a table, an array or a file, then predict, score, plot and save."""

from __future__ import annotations

import tempfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from remanence.config import Mode, change
from remanence.forecast.network import Network, load_network
from remanence.forecast.online import RollingErrors, roll
from remanence.forecast.protocol import SPLITS, Errors, Protocol, Scaler, compute_errors
from remanence.forecast.recipes import forecasting
from remanence.forecast.series import MISSING_POLICIES, Series, SeriesLike, read_series
from remanence.forecast.task import WindowSource
from remanence.io.files import replacing_folder
from remanence.runtime.choices import check_choice
from remanence.runtime.device import resolve
from remanence.runtime.mode import renamed_mode
from remanence.train import TrainConfig, fit


class Forecaster:
    """Forecasts every column of a table: ``Forecaster(horizon=96).fit(frame).predict(frame)``.

    Args:
        horizon: number of rows to forecast.
        lookback: number of rows that a forecast is computed from.
        split: name of the split into rows for training, for validation (early stopping), and for test
            (`score`).
        seed: the same seed gives the same weights on the same machine.
        device: "auto", "cpu", "cuda" or "mps".
        missing: handling of missing values: "refuse" raises an error, "previous" repeats the value of the row
            before.
        config: a complete training configuration, such as `remanence.forecast.recipes.forecasting` returns.
            It replaces `horizon`, `lookback` and `split`.
        **changes: fields of the training configuration (steps, batch, ...) or of its
            `remanence.forecast.config.ForecastConfig`.
    """

    def __init__(
        self,
        horizon: int = 96,
        lookback: int = 96,
        *,
        split: str = "7/1/2",
        seed: int = 0,
        device: str = "auto",
        missing: str = "refuse",
        config: TrainConfig | None = None,
        **changes: Any,
    ) -> None:
        check_choice("split", split, SPLITS)
        check_choice("missing", missing, MISSING_POLICIES)
        run: Any = config or forecasting(split, lookback=lookback, horizon=horizon)
        known = [each.name for part in (run, run.forecast) for each in fields(part)]
        for name in changes:
            check_choice(name, name, known)
        own = {name: changes.pop(name) for name in list(changes) if hasattr(run.forecast, name)}
        model = change(run.model, changes.pop("model", {}))
        data = replace(run.data, missing=missing)
        shared = {"seed": seed, "device": device, **changes}
        self.config: Any = replace(
            run, model=model, data=data, forecast=replace(run.forecast, **own), **shared
        )
        self.network: Network | None = None

    def fit(self, data: SeriesLike, out: str | Path | None = None, *, resume: bool = False) -> Forecaster:
        """Train on a DataFrame, an array ``[rows channels]`` or a CSV file. Returns the forecaster itself.

        `out` is the folder of the run, as in `remanence train`; None uses a temporary folder. `resume`
        continues an interrupted run in this folder on the same data.
        """
        series = self._read(data)
        source = WindowSource(self.config, self.config.batch, series)
        config = None if resume else self.config
        if out is None:
            with tempfile.TemporaryDirectory() as folder:
                self.network = fit(config, Path(folder) / "run", source=source)
        else:
            self.network = fit(config, out, resume=resume, source=source)
        assert self.network is not None
        self.network.eval()
        return self

    @property
    def fitted(self) -> Network:
        """The trained network. Raises an error before `fit` or `load`."""
        if self.network is None:
            raise ValueError(
                "forecaster: expected a fitted or loaded forecaster, got one that is not fitted; call fit first"
            )
        return self.network

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the channels."""
        return self.fitted.config.names

    @torch.no_grad()
    def predict(
        self,
        data: SeriesLike,
        *,
        first: int | None = None,
        memory_mode: Mode = "on",
        memory: Mode | None = None,
    ) -> np.ndarray:
        """Return the forecast ``[horizon channels]`` of the rows after the last row of `data`, in the units
        of the data.

        Only the last `lookback` rows are read. `first` is the index of the first row of `data` in the series
        that the network was fitted on; it is required for a network with a `cycle`. `memory` is the old name
        of `memory_mode`.
        """
        if memory is not None:
            memory_mode = renamed_mode(memory)
        network, shape = self.fitted, self.fitted.config
        series = self._read(data)
        rows = len(series.values)
        if rows < shape.lookback:
            raise ValueError(f"data: expected at least the look-back's {shape.lookback} rows, got {rows}")
        x = self._standardize(series)[-shape.lookback :].unsqueeze(0)
        if first is None and shape.forecast.cycle:
            raise ValueError(
                "first: expected the index of the first row of data, because the network has a cycle, got None"
            )
        begins = torch.tensor([(first or 0) + rows - shape.lookback], device=network.device)
        found = network.eval()(x, begins, memory_mode=memory_mode)[0]
        return self._scaler.inverse(found.float().cpu().double().numpy())

    def score(self, data: SeriesLike, *, part: str = "test") -> Errors:
        """Return the mean squared and mean absolute error over all windows of a part of the series.

        Errors are on standardised values (training mean 0, standard deviation 1). `part` is "train", "val" or
        "test".
        """
        shape = self.fitted.config
        protocol = Protocol.from_series(self._read(data), self.config.data.split, self._scaler)
        windows = protocol.windows(part, shape.lookback, shape.horizon).to(self.fitted.device)
        return compute_errors(self.fitted.eval(), windows)

    def roll(
        self,
        data: SeriesLike,
        start: int,
        *,
        memory_mode: Mode = "on",
        warm: int = 8,
        phases: int = 4,
        memory: Mode | None = None,
    ) -> RollingErrors:
        """Return the errors of rolling forecasts from row `start` on; see `remanence.forecast.online.roll`.

        In memory mode "on" the memory is written while it reads the stream. `memory` is the old name of
        `memory_mode`.
        """
        if memory is not None:
            memory_mode = renamed_mode(memory)
        values = self._standardize(self._read(data))
        return roll(self.fitted, values, start, memory_mode=memory_mode, warm=warm, phases=phases)

    def plot(
        self,
        data: SeriesLike,
        path: str | Path,
        *,
        channels: tuple[str, ...] = (),
        truth: SeriesLike | None = None,
    ) -> Path:
        """Plot the end of `data` and the forecast after it as a PNG file, and return its path.

        `channels` are the names of the channels to plot (default: the first four). `truth` holds the true
        values after `data`; None: they are not plotted.
        """
        from remanence.forecast.plots import plot_forecasts

        for name in channels:
            check_choice("channels", name, self.names)
        found, past = self.predict(data, first=0), self._read(data).values[-self.fitted.config.lookback :]
        came = np.full_like(found, np.nan)
        if truth is not None:
            rows = self._read(truth).values[: len(found)]
            came[: len(rows)] = rows
        index = [self.names.index(name) for name in channels] or range(min(4, len(self.names)))
        panels = [(self.names[i], past[:, i], came[:, i], {"forecast": found[:, i]}) for i in index]
        return plot_forecasts(Path(path), panels, title=f"Forecast of the next {len(found)} rows")

    def save(self, folder: str | Path) -> None:
        """Write a new folder with ``config.json`` and ``model.safetensors``."""
        folder = Path(folder)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(
                f"folder: expected a new or empty folder, got {folder}; existing files are not overwritten"
            )
        network = self.fitted
        folder.parent.mkdir(parents=True, exist_ok=True)
        with replacing_folder(folder) as temporary:
            network.save(temporary)

    @classmethod
    def load(cls, folder: str | Path, *, device: str = "auto", split: str = "7/1/2") -> Forecaster:
        """Load a folder written by `save` or `remanence train`. Forecasts are bit-identical to those before saving."""
        folder = Path(folder)
        inner = folder / "model"
        network = load_network(inner if (inner / "config.json").is_file() else folder, device=resolve(device))
        shape = network.config
        run: Any = forecasting(split, lookback=shape.lookback, horizon=shape.horizon)
        run = replace(run, model=shape.model, forecast=shape.forecast, device=device)
        made = cls(config=run, device=device)
        made.network = network.eval()
        return made

    @property
    def _scaler(self) -> Scaler:
        """Mean and standard deviation of the training data. Raises an error if the network has none."""
        scaler = self.fitted.scaler
        if scaler is None:
            raise ValueError(
                "forecaster: expected a network that stores the mean and std of its training data, got one without"
            )
        return scaler

    def _read(self, data: SeriesLike) -> Series:
        """Read data as a series.

        After fitting, the fitted channels are selected by name. For data without names, the number of columns
        is checked.
        """
        missing = self.config.data.missing
        if self.network is None:
            return read_series(data, columns=self.config.data.columns, missing=missing)
        named = isinstance(data, str | Path | Series) or hasattr(data, "columns")
        found = read_series(data, columns=self.names if named else (), missing=missing)
        if len(found.names) != len(self.names):
            raise ValueError(
                f"data: expected {len(self.names)} columns, as in the fitted data, got {len(found.names)}"
            )
        return found

    def _standardize(self, series: Series) -> torch.Tensor:
        """Return the standardised values ``[rows channels]`` on the network's device."""
        values = self._scaler.standardize(series.values).astype(np.float32)
        return torch.from_numpy(values).to(self.fitted.device)
