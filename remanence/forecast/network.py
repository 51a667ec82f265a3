"""Forecasting networks, which map look-backs to forecasts. To add a network, add an entry to `NETWORKS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remanence.backbone import Backbone, State, Trace
from remanence.config import MODES, Mode
from remanence.forecast.config import NetworkConfig
from remanence.forecast.protocol import Scaler
from remanence.io.files import add_digest, check_digest, read_json, write_json
from remanence.io.tensors import aligned, opened, read_header, read_tensors, write_tensors
from remanence.runtime.choices import check_choice, short_repr
from remanence.runtime.mode import RenamedMode
from remanence.runtime.terminal import escape_controls

MODEL_TYPE = "remanence-forecast"
"""Value of `model_type` in config.json."""
WEIGHTS = "model.safetensors"
"""File name of the weights in a model folder."""
VARIANCE_EPSILON = 1e-5
"""Added to the variance of a look-back, to avoid division by zero if it is constant."""
MOVING_AVERAGE = 25
"""Window of DLinear's moving average, in rows."""


CARD = """    remanence eval {name} forecast --forecast.data=series.csv

In Python:

    from remanence.forecast import Forecaster

    forecaster = Forecaster.load("{name}")
    print(forecaster.predict("series.csv"))

The file needs the columns {channels} and at least {lookback:,} rows.

"""
"""Text of the model card that explains how to use the model."""


class WindowBatch(NamedTuple):
    """A training batch of windows. Each has one or several consecutive look-backs."""

    x: Tensor
    """Input rows ``[b rows channels]``."""
    targets: Tensor
    """Rows after each of the n look-backs ``[b n horizon channels]``."""
    first: Tensor
    """Index of the first row of each window in the series ``[b]``."""


class Network(nn.Module):
    """Base class of forecasting networks: ``forecast = network(x)`` maps standardised look-backs
    ``[b rows channels]`` to forecasts ``[b horizon channels]``.

    `first` is the index of the first row of each look-back in its series; it is required for a network with a
    `cycle`. A network with a memory can also read a stream of look-backs and carry its state (`read`).
    """

    title = "forecasting network"
    """Name of this kind of model in error messages."""
    log_unigrams = None
    """Always None here. Token models may store the log-frequencies of their tokens in it."""
    checkpointing = False
    """Whether activations are recomputed in the backward pass to save memory."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        self._memory_mode: Mode = "on"
        self.scaler: Scaler | None = None
        self.step_weights: Tensor
        weights = torch.ones(config.horizon)
        if config.forecast.loss == "decay":
            weights = torch.arange(1, config.horizon + 1).float().rsqrt()
        self.register_buffer("step_weights", weights / weights.mean(), persistent=False)

    def current_config(self) -> NetworkConfig:
        """Return the configuration as it is written to files."""
        return self.config

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def blocks(self) -> nn.ModuleList:
        """Blocks of the backbone. Empty if there is no backbone."""
        return nn.ModuleList()

    @property
    def has_memory(self) -> bool:
        """Whether the network has a neural memory."""
        return False

    @property
    def memory_mode(self) -> Mode:
        """The memory mode of calls that do not set `memory_mode`."""
        return self._memory_mode

    @memory_mode.setter
    def memory_mode(self, mode: Mode) -> None:
        self._memory_mode = self.check_mode(mode)

    memory = RenamedMode()

    def check_mode(self, mode: Mode) -> Mode:
        """Return the mode, or raise an error if the network does not support it. Without a memory only "on"
        is valid.
        """
        check_choice("memory_mode", mode, MODES)
        if mode != "on" and not self.has_memory:
            name = self.config.forecast.network
            raise ValueError(
                f"memory_mode: expected 'on', because the network {name!r} has no memory, got {mode!r}"
            )
        return mode

    def forward(self, x: Tensor, first: Tensor | None = None, *, memory_mode: Mode | None = None) -> Tensor:
        return self.read(x, None, first, memory_mode=memory_mode)[0][:, -1]

    def read(
        self,
        x: Tensor,
        state: State | None = None,
        first: Tensor | None = None,
        *,
        memory_mode: Mode | None = None,
    ) -> tuple[Tensor, Trace]:
        """Read rows ``[b rows channels]`` of one or several consecutive look-backs.

        Returns the forecast after each look-back ``[b n horizon channels]``, and the trace with the new
        state. If `state` is None, the memory starts empty.
        """
        c = self.config
        if x.dim() != 3 or x.shape[1] % c.lookback or not x.shape[1] or x.shape[2] != c.channels:
            raise ValueError(
                f"x: expected rows [batch, a multiple of {c.lookback}, {c.channels}], got {list(x.shape)}"
            )
        return self._read(x, state, first, self.check_mode(memory_mode or self._memory_mode))

    def _read(
        self, x: Tensor, state: State | None, first: Tensor | None, memory_mode: Mode
    ) -> tuple[Tensor, Trace]:
        """Implement `read` after its arguments were checked."""
        raise NotImplementedError

    def loss(self, batch: WindowBatch) -> tuple[Tensor, Trace]:
        """Return the training loss and the trace. The loss is averaged over all windows, forecast rows and
        channels.
        """
        forecast, trace = self.read(batch.x, None, batch.first)
        miss = forecast.float() - batch.targets
        miss = miss.square() if self.config.forecast.loss == "mse" else miss.abs()
        return (miss.mean((0, 1, 3)) * self.step_weights).mean(), trace

    def saved_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters that are written to model folders and checkpoints: all of them."""
        return self.named_parameters()

    def describe(self) -> dict[str, Any]:
        """Return the contents of ``config.json``."""
        scaler = None
        if self.scaler is not None:
            scaler = {name: values.tolist() for name, values in self.scaler._asdict().items()}
        return {
            "model_type": MODEL_TYPE,
            "remanence": add_digest({**self.config.to_dict(), "scaler": scaler}),
        }

    def card_parts(self, name: str) -> dict[str, str]:
        """Return the texts that are inserted into the model card. `name` is the model's name."""
        config = self.config
        channels = ", ".join(f"`{escape_controls(each, allowed='')}`" for each in config.names)
        return {
            "pipeline": "time-series-forecasting",
            "facts": f"a forecast of {config.horizon:,} rows from {config.lookback:,}.",
            "use": CARD.format(name=name, channels=channels, lookback=config.lookback),
            "measure": f"remanence eval {name} forecast --forecast.data=FILE.csv",
        }

    def save(self, folder: str | Path) -> None:
        """Write ``config.json`` and ``model.safetensors`` to a folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"model.{name}": parameter.detach() for name, parameter in self.named_parameters()}
        write_tensors(folder / WEIGHTS, tensors, {"format": "pt"})
        write_json(folder / "config.json", self.describe())


class LinearNetwork(Network):
    """RLinear: one linear map from look-back to horizon, shared by all channels, with instance normalisation."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__(config)
        self.time_proj = nn.Linear(config.lookback, config.horizon)

    def _read(
        self, x: Tensor, state: State | None, first: Tensor | None, memory_mode: Mode
    ) -> tuple[Tensor, Trace]:
        z, statistics = _normalize(x.unflatten(1, (-1, self.config.lookback)))
        return _denormalize(self.time_proj(z.transpose(2, 3)).transpose(2, 3), statistics), _empty_trace(x)


class DLinear(Network):
    """DLinear (Zeng et al. 2023): one linear map of the moving average and one of the remainder.

    Both are shared by all channels.
    """

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__(config)
        self.trend_proj = nn.Linear(config.lookback, config.horizon)
        self.rest_proj = nn.Linear(config.lookback, config.horizon)

    def _read(
        self, x: Tensor, state: State | None, first: Tensor | None, memory_mode: Mode
    ) -> tuple[Tensor, Trace]:
        rows = x.unflatten(1, (-1, self.config.lookback)).transpose(2, 3).flatten(1, 2)
        side = (MOVING_AVERAGE - 1) // 2
        trend = F.avg_pool1d(F.pad(rows, (side, side), mode="replicate"), MOVING_AVERAGE, 1)
        found = self.rest_proj(rows - trend) + self.trend_proj(trend)
        return found.unflatten(1, (-1, self.config.channels)).transpose(2, 3), _empty_trace(x)


class MemoryNetwork(Network):
    """A backbone with neural memory over patches of the series. Every channel is a separate sequence.

    Each look-back is normalised (reversible instance normalisation) and cut into overlapping patches. Each
    patch is projected to a token, to which position and channel embeddings are added. A linear head maps the
    features of all tokens to the horizon. If `linear` is set, a linear map of the values is added and the
    head is initialised to zero, so that training starts as `LinearNetwork`.
    """

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__(config)
        f, dim = config.forecast, config.model.dim
        self.tokens = (config.lookback - f.patch) // f.stride + 2
        self.patch_proj = nn.Linear(f.patch, dim)
        self.position = nn.Parameter(0.02 * torch.randn(self.tokens, dim))
        self.channel = nn.Parameter(torch.zeros(config.channels, dim))
        self.backbone = Backbone(config.model)
        self.dropout = nn.Dropout(f.dropout)
        self.head_proj = nn.Linear(self.tokens * dim, config.horizon)
        self.time_proj = nn.Linear(config.lookback, config.horizon) if f.linear else None
        self.season = nn.Parameter(torch.zeros(f.cycle, config.channels)) if f.cycle else None
        if f.linear:
            nn.init.zeros_(self.head_proj.weight)
            nn.init.zeros_(self.head_proj.bias)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.backbone.blocks

    @property
    def has_memory(self) -> bool:
        return self.backbone.has_memory

    def _read(
        self, x: Tensor, state: State | None, first: Tensor | None, memory_mode: Mode
    ) -> tuple[Tensor, Trace]:
        c, f = self.config, self.config.forecast
        windows = x.unflatten(1, (-1, c.lookback))
        ahead = None
        if self.season is not None:
            behind, ahead = self._seasons(windows, first)
            windows = windows - behind
        z, statistics = _normalize(windows)
        rows = z.permute(0, 3, 1, 2)  # [b channels n rows]
        padded = torch.cat([rows, rows[..., -1:].expand(*rows.shape[:-1], f.stride)], -1)
        tokens = self.patch_proj(padded.unfold(-1, f.patch, f.stride)) + self.position
        tokens = tokens + self.channel[:, None, None]
        documents = self.dropout(tokens).flatten(0, 1).flatten(1, 2)  # one sequence per channel and batch row
        self.backbone.checkpointing = self.checkpointing
        trace = self.backbone.trace(documents, state, memory_mode=memory_mode)
        features = trace.hidden.unflatten(1, (-1, self.tokens)).flatten(2)
        found = self.head_proj(self.dropout(features)).unflatten(0, rows.shape[:2])  # [b channels n horizon]
        if self.time_proj is not None:
            found = found + self.time_proj(rows)
        forecast = _denormalize(found.permute(0, 2, 3, 1), statistics)
        return forecast if ahead is None else forecast + ahead, trace

    def _seasons(self, windows: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the learned season at the rows of each look-back ``[b n rows channels]``, and at the rows to
        forecast ``[b n horizon channels]``.
        """
        c = self.config
        assert self.season is not None
        if first is None:
            raise ValueError(
                "first: expected the index of each look-back's first row, because the network has a cycle, got None"
            )
        starts = first[:, None] + c.lookback * torch.arange(windows.shape[1], device=first.device)
        span = torch.arange(c.lookback + c.horizon, device=first.device)
        found = self.season[(starts[..., None] + span) % len(self.season)]
        return found[:, :, : c.lookback], found[:, :, c.lookback :]


NETWORKS: dict[str, Callable[[NetworkConfig], Network]] = {
    "memory": MemoryNetwork,
    "linear": LinearNetwork,
    "dlinear": DLinear,
}
"""Networks by name (`forecast.network`). Add an entry for a new network."""


def make_network(config: NetworkConfig) -> Network:
    """Build a network with random weights."""
    check_choice("forecast.network", config.forecast.network, NETWORKS)
    return NETWORKS[config.forecast.network](config)


def is_network(folder: Path) -> bool:
    """Whether the config.json of a folder describes a forecasting network."""
    path = folder / "config.json"
    return path.is_file() and read_json(path).get("model_type") == MODEL_TYPE


def read_network_config(folder: Path) -> NetworkConfig:
    """Read the configuration of a saved network."""
    return _read_config(folder)[0]


def _read_config(folder: Path) -> tuple[NetworkConfig, Scaler | None]:
    """Read the configuration and the scaler of a saved network. The scaler is None if none was saved."""
    path = folder / "config.json"
    data = read_json(path)
    kind, own = data.get("model_type"), data.get("remanence")
    if kind != MODEL_TYPE or not isinstance(own, dict):
        raise ValueError(f"{path}: expected a forecasting network ({MODEL_TYPE}), got {short_repr(kind)}")
    fields = check_digest(path, own)
    scaler = fields.pop("scaler", None)
    try:
        shape = NetworkConfig.from_dict(fields)
        return shape, None if scaler is None else _parse_scaler(scaler, shape)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _parse_scaler(data: Mapping[str, Sequence[float]], shape: NetworkConfig) -> Scaler:
    """Convert a parsed scaler and check its shape and values."""
    try:
        found = Scaler(*(np.array(data[name], dtype=np.float64) for name in Scaler._fields))
    except (TypeError, ValueError, KeyError):
        found = None
    if found is None or any(part.shape != (shape.channels,) or not np.isfinite(part).all() for part in found):
        raise ValueError(
            f"scaler: expected a mean and std for {shape.channels} channels, got {short_repr(data)}"
        )
    return found


def load_network(folder: str | Path, *, device: torch.device | str = "cpu") -> Network:
    """Load a network that was written by `Network.save`. The files are validated before the network is built."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"model: expected a folder with config.json and {WEIGHTS}, got {folder}")
    shape, scaler = _read_config(folder)
    with torch.device("meta"):
        network = make_network(shape)
    with opened(folder / WEIGHTS) as file:
        found = {name.removeprefix("model."): entry for name, entry in read_header(file).entries.items()}
        wanted = dict(network.named_parameters())
        for name in sorted({*found, *wanted}):
            shapes = [list(side[name].shape) if name in side else None for side in (wanted, found)]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"{folder / WEIGHTS}: {short_repr(name)}: expected shape {shapes[0]}, got {short_repr(shapes[1])}"
                )
        tensors = {
            name.removeprefix("model."): aligned(tensor.float())
            for name, tensor in read_tensors(file).tensors.items()
        }
    network = make_network(shape)
    network.load_state_dict(tensors)
    network.scaler = scaler
    return network.to(device)


def _normalize(x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Normalise windows ``[b n rows channels]`` over their rows.

    Returns the normalised windows, and the pair (mean, standard deviation), each ``[b n 1 channels]``.
    """
    mean = x.mean(2, keepdim=True)
    std = (x.var(2, keepdim=True, unbiased=False) + VARIANCE_EPSILON).sqrt()
    return (x - mean) / std, (mean, std)


def _denormalize(x: Tensor, statistics: tuple[Tensor, Tensor]) -> Tensor:
    """Undo `_normalize`, given the pair (mean, standard deviation)."""
    return x * statistics[1] + statistics[0]


def _empty_trace(x: Tensor) -> Trace:
    """Return the trace of a network without memories."""
    return Trace(x, State((), torch.zeros(0, dtype=torch.int64, device=x.device)), (), ())
