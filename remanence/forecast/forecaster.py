"""Forecasts from Python: fit a table, an array or a file, predict what follows, draw it, save it."""

from __future__ import annotations

import tempfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from remanence.config import Mode, change
from remanence.forecast.network import Network, load_network
from remanence.forecast.online import Rolled, roll
from remanence.forecast.protocol import SPLITS, Errors, Protocol, Scaler, errors_of
from remanence.forecast.recipes import forecasting
from remanence.forecast.series import FILLS, Series, read_series
from remanence.forecast.task import Forecasting
from remanence.io.files import replacing_folder
from remanence.runtime.choices import check_choice
from remanence.runtime.device import resolve
from remanence.runtime.mode import renamed_mode
from remanence.train import TrainConfig, fit


class Forecaster:
    """``Forecaster(horizon=96).fit(frame).predict(frame)``: a forecast of every column, in its own units.

    Args:
        horizon: rows that are forecast.
        lookback: rows that a forecast is made from.
        split: which rows train and which choose the best weights; the last part is left for `score`.
        seed: the same seed gives the same weights on the same machine.
        device: "auto", "cpu", "cuda" or "mps".
        missing: what becomes of missing values: "refuse", or "previous" for the value of the row before.
        config: a whole training run instead, as `remanence.forecast.recipes.forecasting` makes one.
        **changes: of the run's steps, batch and so on, or of its `remanence.forecast.config.ForecastConfig`.
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
        check_choice("missing", missing, FILLS)
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

    def fit(self, data: Any, out: str | Path | None = None, *, resume: bool = False) -> Forecaster:
        """Train on a DataFrame, an array ``[rows channels]`` or a CSV file. `out` keeps the run, as `remanence train`
        does, and `resume` goes on with one that was interrupted, given the same data.
        """
        series = self._read(data)
        source = Forecasting(self.config, self.config.batch, series)
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
        if self.network is None:
            raise ValueError(
                "forecaster: expected one that was fitted or loaded, got one that was not; call fit first"
            )
        return self.network

    @property
    def names(self) -> tuple[str, ...]:
        """Of the channels."""
        return self.fitted.config.names

    @torch.no_grad()
    def predict(
        self, data: Any, *, first: int | None = None, memory_mode: Mode = "on", memory: Mode | None = None
    ) -> np.ndarray:
        """The `horizon` rows that follow the last row of `data` ``[horizon channels]``, in the data's own units.

        Only the last `lookback` rows are read. `first` is the number of the data's first row in the series that was
        fitted, counted from 0: a network with a `cycle` needs it.
        """
        if memory is not None:
            memory_mode = renamed_mode(memory)
        network, shape = self.fitted, self.fitted.config
        series = self._read(data)
        rows = len(series.values)
        if rows < shape.lookback:
            raise ValueError(f"data: expected at least the look-back's {shape.lookback} rows, got {rows}")
        x = self._standardized(series)[-shape.lookback :].unsqueeze(0)
        if first is None and shape.forecast.cycle:
            raise ValueError(
                "first: expected the number of the data's first row, as there is a cycle, got None"
            )
        begins = torch.tensor([(first or 0) + rows - shape.lookback], device=network.device)
        found = network.eval()(x, begins, memory_mode=memory_mode)[0]
        return self._scaler.restored(found.float().cpu().double().numpy())

    def score(self, data: Any, *, part: str = "test") -> Errors:
        """Mean squared and mean absolute error over all windows of a part of the series, in units of the training
        part's standard deviation.
        """
        shape = self.fitted.config
        protocol = Protocol.of(self._read(data), self.config.data.split, self._scaler)
        windows = protocol.windows(part, shape.lookback, shape.horizon).to(self.fitted.device)
        return errors_of(self.fitted.eval(), windows)

    def roll(
        self,
        data: Any,
        start: int,
        *,
        memory_mode: Mode = "on",
        warm: int = 8,
        phases: int = 4,
        memory: Mode | None = None,
    ) -> Rolled:
        """Errors of forecasts along a stream, from row `start` on: `remanence.forecast.online.roll`. With memory mode
        "on" the network goes on learning from what it reads.
        """
        if memory is not None:
            memory_mode = renamed_mode(memory)
        values = self._standardized(self._read(data))
        return roll(self.fitted, values, start, mode=memory_mode, warm=warm, phases=phases)

    def plot(self, data: Any, path: str | Path, *, channels: tuple[str, ...] = (), truth: Any = None) -> Path:
        """Draw the end of `data` and the forecast of what follows it as a PNG file; with `truth`, also what came."""
        from remanence.forecast.plots import forecasts

        for name in channels:
            check_choice("channels", name, self.names)
        found, past = self.predict(data, first=0), self._read(data).values[-self.fitted.config.lookback :]
        came = np.full_like(found, np.nan)
        if truth is not None:
            rows = self._read(truth).values[: len(found)]
            came[: len(rows)] = rows
        index = [self.names.index(name) for name in channels] or range(min(4, len(self.names)))
        panels = [(self.names[i], past[:, i], came[:, i], {"forecast": found[:, i]}) for i in index]
        return forecasts(Path(path), panels, title=f"The {len(found)} rows that follow")

    def save(self, folder: str | Path) -> None:
        """Write a new folder with ``config.json`` and ``model.safetensors``."""
        folder = Path(folder)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(
                f"folder: expected a new or empty folder, got {folder}; nothing is ever overwritten"
            )
        network = self.fitted
        folder.parent.mkdir(parents=True, exist_ok=True)
        with replacing_folder(folder) as temporary:
            network.save(temporary)

    @classmethod
    def load(cls, folder: str | Path, *, device: str = "auto", split: str = "7/1/2") -> Forecaster:
        """What `save` wrote, or a run of `remanence train`: it forecasts the same to the last bit."""
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
        scaler = self.fitted.scaler
        if scaler is None:
            raise ValueError(
                "forecaster: expected a network with the training part's mean and std, got one without"
            )
        return scaler

    def _read(self, data: Any) -> Series:
        """The series; once fitted, the channels by their names, or as many columns as there were."""
        missing = self.config.data.missing
        if self.network is None:
            return read_series(data, columns=self.config.data.columns, missing=missing)
        named = isinstance(data, str | Path | Series) or hasattr(data, "columns")
        found = read_series(data, columns=self.names if named else (), missing=missing)
        if len(found.names) != len(self.names):
            raise ValueError(
                f"data: expected {len(self.names)} columns, as were fitted, got {len(found.names)}"
            )
        return found

    def _standardized(self, series: Series) -> torch.Tensor:
        values = self._scaler.standardized(series.values).astype(np.float32)
        return torch.from_numpy(values).to(self.fitted.device)
