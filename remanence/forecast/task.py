"""Training of forecasting networks: the source of windows, the training task, and steps captured as CUDA
graphs.
"""

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
from remanence.forecast.config import ForecastConfig, NetworkConfig
from remanence.forecast.data_config import ForecastData
from remanence.forecast.network import Network, WindowBatch, make_network, read_network_config
from remanence.forecast.protocol import Protocol, compute_errors
from remanence.forecast.series import Series, read_series
from remanence.runtime.device import resolve
from remanence.runtime.graphs import capture
from remanence.tasks.draw import step_rng
from remanence.train.config import TrainConfig
from remanence.train.distributed import ProcessGroup, average_gradients
from remanence.train.initial_state import InitialState
from remanence.train.sources import Source, make_source
from remanence.train.task import Gradients

VALIDATION_WINDOWS = 2048
"""Maximum number of validation windows used. They are evenly spaced, because neighbouring windows differ in
only one row.
"""


class WindowSource:
    """Training windows of a series, shuffled every epoch. The whole series is held on the training device."""

    def __init__(
        self,
        config: TrainConfig,
        batch: int,
        series: Series | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        data = config.data
        assert isinstance(data, ForecastData)
        forecast: ForecastConfig = config.forecast  # type: ignore[attr-defined]  # from `TrainFields`
        self.config, self.batch, self.rank, self.world_size = config, batch, rank, world_size
        if series is None:
            if data.path is None:
                raise ValueError(
                    "data.path: expected a CSV file with the columns' names in its first line, got none"
                )
            series = read_series(data.path, columns=data.columns, missing=data.missing, name="data.path")
        self.protocol = Protocol.from_series(series, data.split)
        device = resolve(config.device)
        span = (forecast.history + 1) * data.length
        self.train = self.protocol.windows("train", span, data.horizon).to(device)
        self.val = self.protocol.windows("val", data.length, data.horizon).to(device)
        self.shape = NetworkConfig(
            forecast=forecast,
            model=config.model,
            lookback=data.length,
            horizon=data.horizon,
            names=series.names,
        )
        self._order = lru_cache(2)(self._shuffle)

    @property
    def digest(self) -> str:
        """Digest of the standardised series, its channel names and its split borders."""
        values = hashlib.sha256(repr((self.protocol.names, self.protocol.borders)).encode())
        values.update(self.protocol.values.numpy().tobytes())
        return values.hexdigest()[:32]

    def _shuffle(self, epoch: int) -> Tensor:
        """Return the random order of the training windows in an epoch."""
        order = step_rng(self.config.seed, epoch).permutation(self.train.num_windows)
        return torch.from_numpy(order).to(self.train.values.device)

    def step(self, number: int) -> WindowBatch:
        """Return the batch of a step for this process.

        A batch may contain windows of two epochs, so that all batches have the same size.
        """
        first = (number * self.world_size + self.rank) * self.batch
        pieces, at, end = [], first, first + self.batch
        while at < end:
            epoch, inside = divmod(at, self.train.num_windows)
            pieces.append(self._order(epoch)[inside : inside + end - at])
            at += len(pieces[-1])
        index = torch.cat(pieces)
        x, rest = self.train.take(index)
        lookback, horizon = self.shape.lookback, self.shape.horizon
        rows = torch.cat([x[:, lookback:], rest], 1)
        targets = rows.unfold(1, horizon, lookback).transpose(2, 3)
        return WindowBatch(x, targets, self.train.first + index)

    def network(self) -> Network:
        """Build a new network for this data, with the scaler of the training part."""
        network = make_network(self.shape)
        network.scaler = self.protocol.scaler
        return network

    def validate(self, network: Network) -> float:
        """Return the mean squared error on the validation part."""
        network.eval()
        try:
            return compute_errors(network, self.val, every=-(-self.val.num_windows // VALIDATION_WINDOWS)).mse
        finally:
            network.train()


def make_window_source(config: TrainConfig, batch: int, rank: int, world_size: int) -> WindowSource:
    """Build the training source for data.kind=forecast."""
    return WindowSource(config, batch, None, rank, world_size)


class ForecastTask:
    """The implementation of `remanence.train.TrainTask` for forecasting networks."""

    prefetch = False
    """Whether batches are loaded in advance. Not needed, because the data is already on the training device."""

    def __init__(
        self, config: TrainConfig, process_group: ProcessGroup, source: Source | None = None
    ) -> None:
        self.config, self.process_group = config, process_group
        self.source: Any = source or make_source(config, process_group.rank, process_group.size)

    def build_model(self, resumed: bool) -> Network:
        return self.source.network()

    def shard(self, model: Network) -> Network:
        """Return the model unchanged. Every process has all weights, and `gradients` averages over processes."""
        return model

    def stored_config(self, folder: Path, model: Network) -> NetworkConfig:
        """Return the configuration of the network in a checkpoint."""
        return read_network_config(folder)

    def captured_steps(self, model: Network, begins: bool) -> CapturedStep:
        """Return the object that captures training steps as a CUDA graph."""
        return CapturedStep(model, self.config)

    def before_step(self, model: Network, carried: State | None, number: int) -> State | None:
        """Return the carried state unchanged."""
        return carried

    def gradients(
        self,
        model: Network,
        batches: Sequence[WindowBatch],
        state: State | None,
        number: int,
        initial_state: InitialState | None,
        graph: CapturedStep | None,
        carried: State | None,
    ) -> Gradients:
        """Run the forward and backward pass. Returns the loss, the number of input values and the trace.

        Dropout is seeded by step and rank, so that a resumed run repeats it. `graph` is the captured step, or
        None to run without a CUDA graph.
        """
        torch.manual_seed((self.config.seed * 1_000_003 + number + self.process_group.rank * 2**32) % 2**63)
        (batch,) = batches
        if graph is not None:
            loss, trace = graph(batch)
        else:
            bfloat16 = self.config.precision == "bfloat16"
            with torch.autocast(model.device.type, torch.bfloat16, enabled=bfloat16):
                loss, trace = model.loss(batch)
            loss.backward()
        average_gradients(model, self.process_group)
        # All processes have the same number of windows, so the loss of the step is the mean over processes.
        return Gradients(
            loss.detach() / self.process_group.size, batch.x.numel() * self.process_group.size, trace
        )

    def validate(self, model: Network) -> float:
        """Return the validation error, averaged over processes.

        Each process validates the same windows; only rounding may differ.
        """
        return self.process_group.sum_over_processes(self.source.validate(model))[0] / self.process_group.size


class CapturedStep:
    """The forward and backward pass of a training step as a CUDA graph.

    It is used on CUDA devices unless the config disables it.
    """

    EAGER = 2
    """Number of steps that run without a graph before the capture, while kernels are compiled."""

    def __init__(self, network: Network, config: TrainConfig) -> None:
        self.network, self.config, self.steps = network, config, 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.wanted = network.device.type == "cuda" and config.graph is not False

    def select_graph(self, batches: list[WindowBatch], _: object = None) -> CapturedStep | None:
        """Return this object if the step is captured, or None if it must run without a graph.

        Capture happens here, after `EAGER` steps.
        """
        self.steps += 1
        if self.graph is None and self.wanted and self.steps > self.EAGER:
            self._capture(batches[0])
        return None if self.graph is None else self

    def _capture(self, batch: WindowBatch) -> None:
        """Capture the step. If this fails, steps run without a graph, or an error is raised if the config
        requires it.
        """
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
        except RuntimeError as error:  # training continues without a graph
            if self.config.graph:
                raise ValueError(f"graph: expected a step that can be captured, but {error}") from None
            logging.getLogger("remanence").info("training steps: launched by the host: %s", error)
            self.wanted = False
            return
        self.grads = [parameter.grad for parameter in self.network.parameters()]

    def __call__(self, batch: WindowBatch) -> tuple[Tensor, Trace]:
        """Run the captured step on a batch. Returns the loss and the trace, and sets the gradients."""
        assert self.graph is not None
        for held, part in zip(self.batch, batch, strict=True):
            held.copy_(part, non_blocking=True)
        self.graph.replay()
        for parameter, grad in zip(self.network.parameters(), self.grads, strict=True):
            parameter.grad = grad
        return self.found
