"""Forecasting networks: look-backs in, forecasts out. `NETWORKS` holds them by name; a new one is an entry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remanence.backbone import Backbone, State, Trace
from remanence.config import MODES, Mode
from remanence.forecast.config import Shape
from remanence.forecast.protocol import Scaler
from remanence.io.files import read_json, sealed, unsealed, write_json
from remanence.io.tensors import aligned, opened, read_header, read_tensors, write_tensors
from remanence.runtime.choices import check_choice, short_repr
from remanence.runtime.mode import RenamedMode
from remanence.runtime.terminal import shown

KIND = "remanence-forecast"
"""What a folder's config.json calls itself."""
WEIGHTS = "model.safetensors"
EPSILON = 1e-5
"""Added to a look-back's variance: a constant one is divided by nearly nothing otherwise."""
AVERAGED = 25
"""Rows of DLinear's moving average."""


CARD = """    remanence eval {name} forecast --forecast.data=series.csv

In Python:

    from remanence.forecast import Forecaster

    forecaster = Forecaster.load("{name}")
    print(forecaster.predict("series.csv"))

A file has the columns {channels}, and at least {lookback:,} rows.

"""


class WindowBatch(NamedTuple):
    """What a step trains on: rows read ``[b rows channels]``, of one look-back or several behind one another; what
    follows each of them ``[b n horizon channels]``; the number of the first row ``[b]``.
    """

    x: Tensor
    targets: Tensor
    first: Tensor


class Network(nn.Module):
    """``forecast = network(x)``: standardised look-backs ``[b rows channels]`` in, what follows them out,
    ``[b horizon channels]``.

    `first` is the number of the first row of each look-back in its series: a network with a `cycle` needs it. A
    network with a memory reads a stream, too (`read`): look-back after look-back, with a state that goes on.
    """

    title = "forecasting network"
    """What an error calls it."""
    log_unigrams = None
    """What token models with a store of rare tokens count."""
    checkpointing = False

    def __init__(self, config: Shape) -> None:
        super().__init__()
        self.config = config
        self._memory_mode: Mode = "on"
        self.scaler: Scaler | None = None
        self.step_weights: Tensor
        weights = torch.ones(config.horizon)
        if config.forecast.loss == "decay":
            weights = torch.arange(1, config.horizon + 1).float().rsqrt()
        self.register_buffer("step_weights", weights / weights.mean(), persistent=False)

    def current_config(self) -> Shape:
        """Its configuration, as files describe it."""
        return self.config

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def blocks(self) -> nn.ModuleList:
        return nn.ModuleList()

    @property
    def has_memory(self) -> bool:
        return False

    @property
    def memory_mode(self) -> Mode:
        """Of calls that give none."""
        return self._memory_mode

    @memory_mode.setter
    def memory_mode(self, mode: Mode) -> None:
        self._memory_mode = self.check_mode(mode)

    memory = RenamedMode()

    def check_mode(self, mode: Mode) -> Mode:
        """The mode, if this network has it; a network without a memory has "on" alone."""
        check_choice("memory_mode", mode, MODES)
        if mode != "on" and not self.has_memory:
            name = self.config.forecast.network
            raise ValueError(
                f"memory_mode: expected 'on', as the network {name!r} has no memory, got {mode!r}"
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
        """Rows ``[b rows channels]`` of one look-back or of several behind one another: the forecast at the end of each
        ``[b n horizon channels]``, and what the memories did, with their state.
        """
        c = self.config
        if x.dim() != 3 or x.shape[1] % c.lookback or not x.shape[1] or x.shape[2] != c.channels:
            raise ValueError(
                f"x: expected rows [batch, a multiple of {c.lookback}, {c.channels}], got {list(x.shape)}"
            )
        return self._read(x, state, first, self.check_mode(memory_mode or self._memory_mode))

    def _read(self, x: Tensor, state: State | None, first: Tensor | None, mode: Mode) -> tuple[Tensor, Trace]:
        raise NotImplementedError

    def loss(self, batch: WindowBatch) -> tuple[Tensor, Trace]:
        """The mean error as the config counts it, over all windows, steps and channels."""
        forecast, trace = self.read(batch.x, None, batch.first)
        miss = forecast.float() - batch.targets
        miss = miss.square() if self.config.forecast.loss == "mse" else miss.abs()
        return (miss.mean((0, 1, 3)) * self.step_weights).mean(), trace

    def saved_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What a folder and a checkpoint hold: everything."""
        return self.named_parameters()

    def describe(self) -> dict[str, Any]:
        """``config.json``."""
        scaler = None
        if self.scaler is not None:
            scaler = {name: values.tolist() for name, values in self.scaler._asdict().items()}
        return {"model_type": KIND, "remanence": sealed({**self.config.to_dict(), "scaler": scaler})}

    def card_parts(self, name: str) -> dict[str, str]:
        """What a model card says of it."""
        config = self.config
        channels = ", ".join(f"`{shown(each, keep='')}`" for each in config.names)
        return {
            "pipeline": "time-series-forecasting",
            "facts": f"a forecast of {config.horizon:,} rows from {config.lookback:,}.",
            "use": CARD.format(name=name, channels=channels, lookback=config.lookback),
            "measure": f"remanence eval {name} forecast --forecast.data=FILE.csv",
        }

    def save(self, folder: str | Path) -> None:
        """Write ``config.json`` and ``model.safetensors``."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"model.{name}": parameter.detach() for name, parameter in self.named_parameters()}
        write_tensors(folder / WEIGHTS, tensors, {"format": "pt"})
        write_json(folder / "config.json", self.describe())


class Linear(Network):
    """One linear map from look-back to horizon for all channels, in each look-back's own units: RLinear."""

    def __init__(self, config: Shape) -> None:
        super().__init__(config)
        self.time_proj = nn.Linear(config.lookback, config.horizon)

    def _read(self, x: Tensor, state: State | None, first: Tensor | None, mode: Mode) -> tuple[Tensor, Trace]:
        z, own = _normalized(x.unflatten(1, (-1, self.config.lookback)))
        return _restored(self.time_proj(z.transpose(2, 3)).transpose(2, 3), own), _nothing(x)


class DLinear(Network):
    """Zeng et al. 2023: the moving average and what is left of it, each with a linear map that all channels share."""

    def __init__(self, config: Shape) -> None:
        super().__init__(config)
        self.trend_proj = nn.Linear(config.lookback, config.horizon)
        self.rest_proj = nn.Linear(config.lookback, config.horizon)

    def _read(self, x: Tensor, state: State | None, first: Tensor | None, mode: Mode) -> tuple[Tensor, Trace]:
        rows = x.unflatten(1, (-1, self.config.lookback)).transpose(2, 3).flatten(1, 2)
        side = (AVERAGED - 1) // 2
        trend = F.avg_pool1d(F.pad(rows, (side, side), mode="replicate"), AVERAGED, 1)
        found = self.rest_proj(rows - trend) + self.trend_proj(trend)
        return found.unflatten(1, (-1, self.config.channels)).transpose(2, 3), _nothing(x)


class MemoryNetwork(Network):
    """The backbone between patches and forecasts. Every channel is a document of its own.

    A look-back in its own units (reversible instance normalisation) is cut into overlapping patches, which are the
    tokens; each also says where in the look-back it stands, and which channel it is of. The features of all its tokens
    together are mapped to the horizon, if asked beside a linear map of the values. With that, the network begins as
    `Linear` does: the memory's share is zero at first.
    """

    def __init__(self, config: Shape) -> None:
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

    def _read(self, x: Tensor, state: State | None, first: Tensor | None, mode: Mode) -> tuple[Tensor, Trace]:
        c, f = self.config, self.config.forecast
        windows = x.unflatten(1, (-1, c.lookback))
        ahead = None
        if self.season is not None:
            behind, ahead = self._seasons(windows, first)
            windows = windows - behind
        z, own = _normalized(windows)
        rows = z.permute(0, 3, 1, 2)  # [b channels n rows]
        padded = torch.cat([rows, rows[..., -1:].expand(*rows.shape[:-1], f.stride)], -1)
        tokens = self.patch_proj(padded.unfold(-1, f.patch, f.stride)) + self.position
        tokens = tokens + self.channel[:, None, None]
        documents = (
            self.dropout(tokens).flatten(0, 1).flatten(1, 2)
        )  # a document for each channel of each row
        self.backbone.checkpointing = self.checkpointing
        trace = self.backbone.trace(documents, state, memory_mode=mode)
        features = trace.hidden.unflatten(1, (-1, self.tokens)).flatten(2)
        found = self.head_proj(self.dropout(features)).unflatten(0, rows.shape[:2])  # [b channels n horizon]
        if self.time_proj is not None:
            found = found + self.time_proj(rows)
        forecast = _restored(found.permute(0, 2, 3, 1), own)
        return forecast if ahead is None else forecast + ahead, trace

    def _seasons(self, windows: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        """The learned season of the rows of each window, and of those that follow it."""
        c = self.config
        assert self.season is not None
        if first is None:
            raise ValueError(
                "first: expected the numbers of the look-backs' first rows, as there is a cycle, got None"
            )
        starts = first[:, None] + c.lookback * torch.arange(windows.shape[1], device=first.device)
        span = torch.arange(c.lookback + c.horizon, device=first.device)
        found = self.season[(starts[..., None] + span) % len(self.season)]
        return found[:, :, : c.lookback], found[:, :, c.lookback :]


NETWORKS: dict[str, Callable[[Shape], Network]] = {
    "memory": MemoryNetwork,
    "linear": Linear,
    "dlinear": DLinear,
}


def make_network(config: Shape) -> Network:
    check_choice("forecast.network", config.forecast.network, NETWORKS)
    return NETWORKS[config.forecast.network](config)


def is_network(folder: Path) -> bool:
    """Whether a folder holds a forecasting network; any other model's config is somebody else's to judge."""
    path = folder / "config.json"
    return path.is_file() and read_json(path).get("model_type") == KIND


def read_shape(folder: Path) -> Shape:
    return _described(folder)[0]


def _described(folder: Path) -> tuple[Shape, Scaler | None]:
    path = folder / "config.json"
    data = read_json(path)
    kind, own = data.get("model_type"), data.get("remanence")
    if kind != KIND or not isinstance(own, dict):
        raise ValueError(f"{path}: expected a forecasting network ({KIND}), got {short_repr(kind)}")
    fields = unsealed(path, own)
    scaler = fields.pop("scaler", None)
    try:
        shape = Shape.from_dict(fields)
        return shape, None if scaler is None else _scaler(scaler, shape)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _scaler(data: Any, shape: Shape) -> Scaler:
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
    """The network that `Network.save` wrote. What is in the files is judged before anything is built."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"model: expected a folder with config.json and {WEIGHTS}, got {folder}")
    shape, scaler = _described(folder)
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


def _normalized(x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Windows ``[b n rows channels]`` in units of their own, and these units."""
    mean = x.mean(2, keepdim=True)
    std = (x.var(2, keepdim=True, unbiased=False) + EPSILON).sqrt()
    return (x - mean) / std, (mean, std)


def _restored(x: Tensor, own: tuple[Tensor, Tensor]) -> Tensor:
    return x * own[1] + own[0]


def _nothing(x: Tensor) -> Trace:
    """What a network without memories has to tell."""
    return Trace(x, State((), torch.zeros(0, dtype=torch.int64, device=x.device)), (), ())
