"""Training on windows of a time series: what a step reads, the network that is made for it, and its step."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from remanence.backbone import State, Trace
from remanence.forecast.config import ForecastConfig, Shape
from remanence.forecast.network import Network, WindowBatch, make_network, read_shape
from remanence.forecast.protocol import Protocol, errors_of
from remanence.forecast.series import Series, read_series
from remanence.runtime.device import resolve
from remanence.runtime.graphs import capture
from remanence.tasks.draw import step_rng
from remanence.train.config import TrainConfig
from remanence.train.distributed import World, average_gradients
from remanence.train.initial_state import InitialState
from remanence.train.sources import Source, make_source
from remanence.train.task import Gradients

VALIDATED = 2048
"""About as many windows of the validation part are looked at, evenly spaced: neighbours differ in a single row."""


class Forecasting:
    """A source of windows in a shuffled order, anew for every epoch, all of them on the device that trains."""

    def __init__(
        self, config: TrainConfig, batch: int, series: Series | None = None, rank: int = 0, world: int = 1
    ) -> None:
        data: Any = config.data
        own: ForecastConfig = config.forecast  # type: ignore[attr-defined]  # a field of this vertical
        self.config, self.batch, self.rank, self.world = config, batch, rank, world
        if series is None:
            if data.path is None:
                raise ValueError(
                    "data.path: expected a CSV file with the columns' names in its first line, got none"
                )
            series = read_series(data.path, columns=data.columns, missing=data.missing, name="data.path")
        self.protocol = Protocol.of(series, data.split)
        device = resolve(config.device)
        span = (own.history + 1) * data.length
        self.train = self.protocol.windows("train", span, data.horizon).to(device)
        self.val = self.protocol.windows("val", data.length, data.horizon).to(device)
        self.shape = Shape(
            forecast=own,
            model=config.model,
            lookback=data.length,
            horizon=data.horizon,
            names=series.names,
        )
        self._order = lru_cache(2)(self._shuffled)

    @property
    def digest(self) -> str:
        """Of the series, as the run sees it."""
        values = hashlib.sha256(repr((self.protocol.names, self.protocol.borders)).encode())
        values.update(self.protocol.values.numpy().tobytes())
        return values.hexdigest()[:32]

    def _shuffled(self, epoch: int) -> Tensor:
        order = step_rng(self.config.seed, epoch).permutation(self.train.number)
        return torch.from_numpy(order).to(self.train.values.device)

    def step(self, number: int) -> WindowBatch:
        """This process's windows of a step. Epochs follow one another without a gap, so that every step has as many."""
        first = (number * self.world + self.rank) * self.batch
        pieces, at, end = [], first, first + self.batch
        while at < end:
            epoch, inside = divmod(at, self.train.number)
            pieces.append(self._order(epoch)[inside : inside + end - at])
            at += len(pieces[-1])
        index = torch.cat(pieces)
        x, rest = self.train.take(index)
        lookback, horizon = self.shape.lookback, self.shape.horizon
        rows = torch.cat([x[:, lookback:], rest], 1)
        targets = rows.unfold(1, horizon, lookback).transpose(2, 3)
        return WindowBatch(x, targets, self.train.first + index)

    def network(self) -> Network:
        network = make_network(self.shape)
        network.scaler = self.protocol.scaler
        return network

    def validate(self, network: Network) -> float:
        """The mean squared error on the validation part."""
        network.eval()
        try:
            return errors_of(network, self.val, every=-(-self.val.number // VALIDATED)).mse
        finally:
            network.train()


def window_source(config: TrainConfig, batch: int, rank: int, world: int) -> Forecasting:
    """The source of the kind "forecast"."""
    return Forecasting(config, batch, None, rank, world)


class ForecastTask:
    """The `remanence.train.TrainTask` of forecasting networks."""

    prefetch = False
    """The data is on the device that trains."""

    def __init__(self, config: TrainConfig, world: World, source: Source | None = None) -> None:
        self.config, self.world = config, world
        self.source: Any = source or make_source(config, world.rank, world.size)

    def build_model(self, resumed: bool) -> Network:
        return self.source.network()

    def shard(self, model: Network) -> Network:
        """Every process has all weights; `gradients` averages over processes."""
        return model

    def stored_config(self, folder: Path, model: Network) -> Shape:
        return read_shape(folder)

    def captured_steps(self, model: Network, begins: bool) -> Captured:
        return Captured(model, self.config)

    def before_step(self, model: Network, carried: State | None, number: int) -> State | None:
        return carried

    def gradients(
        self,
        model: Network,
        batches: Sequence[WindowBatch],
        state: State | None,
        number: int,
        initial_state: InitialState | None,
        graph: Captured | None,
        carried: State | None,
    ) -> Gradients:
        """Dropout is a function of the step and the process, so that a resumed run draws the same."""
        torch.manual_seed((self.config.seed * 1_000_003 + number + self.world.rank * 2**32) % 2**63)
        (batch,) = batches
        if graph is not None:
            loss, trace = graph(batch)
        else:
            bfloat16 = self.config.precision == "bfloat16"
            with torch.autocast(model.device.type, torch.bfloat16, enabled=bfloat16):
                loss, trace = model.loss(batch)
            loss.backward()
        average_gradients(model, self.world)
        # All processes have as many windows, so that the mean of their losses is the loss of the step.
        return Gradients(loss.detach() / self.world.size, batch.x.numel() * self.world.size, trace)

    def validate(self, model: Network) -> float:
        """Every process validates all windows. They agree on the mean, as rounding may differ between devices."""
        return self.world.total(self.source.validate(model))[0] / self.world.size


class Captured:
    """Forward and backward of a step as a CUDA graph, where there is CUDA and the config does not forbid it."""

    EAGER = 2
    """Steps before the capture: kernels are built."""

    def __init__(self, network: Network, config: TrainConfig) -> None:
        self.network, self.config, self.steps = network, config, 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.wanted = network.device.type == "cuda" and config.graph is not False

    def of(self, batches: list[WindowBatch], _: object = None) -> Captured | None:
        self.steps += 1
        if self.graph is None and self.wanted and self.steps > self.EAGER:
            self._capture(batches[0])
        return None if self.graph is None else self

    def _capture(self, batch: WindowBatch) -> None:
        self.batch = WindowBatch(*(part.clone() for part in batch))

        def step() -> tuple[Tensor, Trace]:
            self.network.zero_grad(set_to_none=True)
            bfloat16 = self.config.precision == "bfloat16"
            with torch.autocast("cuda", torch.bfloat16, enabled=bfloat16, cache_enabled=False):
                loss, trace = self.network.loss(self.batch)
            loss.backward()
            return loss.detach(), trace._replace(state=trace.state.map(Tensor.detach))

        try:
            self.graph, self.found = capture(step, self.network.device)
        except RuntimeError as error:  # the step runs as well without
            if self.config.graph:
                raise ValueError(f"graph: expected a step that can be captured, but {error}") from None
            logging.getLogger("remanence").info("training steps: launched by the host: %s", error)
            self.wanted = False
            return
        self.grads = [parameter.grad for parameter in self.network.parameters()]

    def __call__(self, batch: WindowBatch) -> tuple[Tensor, Trace]:
        assert self.graph is not None
        for held, part in zip(self.batch, batch, strict=True):
            held.copy_(part, non_blocking=True)
        self.graph.replay()
        for parameter, grad in zip(self.network.parameters(), self.grads, strict=True):
            parameter.grad = grad
        return self.found
