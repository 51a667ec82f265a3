"""Configuration of forecasting networks, as frozen dataclasses. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from remanence.config import ModelConfig
from remanence.runtime.choices import check_choice, short_repr

LOSSES = ("mse", "mae", "decay")
"""Names of the training losses."""
MAX_SIZE = 2**20
"""Upper limit of every integer field in this module."""


@dataclass(frozen=True, kw_only=True)
class ForecastConfig:
    """Configuration of a forecasting network, except its backbone, which `ModelConfig` describes.

    Attributes:
        network: "memory", "linear" or "dlinear" (an entry of `remanence.forecast.network.NETWORKS`).
        patch, stride: network "memory" only: number of rows per patch, and number of rows between the starts
            of two patches.
        linear: network "memory" only: add a linear map from look-back to horizon to the output of the memory.
            In our experiments this increased the errors.
        cycle: network "memory" only: length of a season in rows, such as 24 for the days of hourly data. A
            learned seasonal pattern is subtracted from the input and added to the forecast. 0: no season.
        dropout: network "memory" only: dropout on tokens and features during training.
        history: network "memory" only: number of earlier look-backs that the memory reads before each
            training window. The forecast after each of them is part of the loss. 0: every window starts with
            an empty memory, as in the standard protocol.
        loss: "mse", "mae", or "decay" (the absolute error with weight 1 / sqrt(n) for the n-th forecast row).
    """

    network: str = "memory"
    patch: int = 16
    stride: int = 8
    linear: bool = False
    cycle: int = 0
    dropout: float = 0.2
    history: int = 0
    loss: str = "decay"

    def __post_init__(self) -> None:
        if not isinstance(self.network, str):
            raise ValueError(f"forecast.network: expected a name, got {short_repr(self.network)}")
        check_choice("forecast.loss", self.loss, LOSSES)
        for name, least in (("patch", 1), ("stride", 1), ("cycle", 0), ("history", 0)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= MAX_SIZE:
                raise ValueError(
                    f"forecast.{name}: expected an integer of at least {least}, got {short_repr(value)}"
                )
        if self.stride > self.patch:
            raise ValueError(
                f"forecast.stride: expected at most patch={self.patch}, or values would be skipped, got {self.stride}"
            )
        if type(self.linear) is not bool:
            raise ValueError(f"forecast.linear: expected true or false, got {short_repr(self.linear)}")
        if type(self.dropout) not in (int, float) or not 0 <= self.dropout < 1:
            raise ValueError(
                f"forecast.dropout: expected at least 0 and below 1, got {short_repr(self.dropout)}"
            )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ForecastConfig:
        """Build the configuration from parsed JSON. Unknown fields raise an error."""
        for name in data:
            check_choice("ForecastConfig field", name, [each.name for each in fields(cls)])
        return cls(**data)


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """Complete configuration of a forecasting network."""

    forecast: ForecastConfig
    model: ModelConfig
    """Configuration of the backbone."""
    lookback: int
    """Number of rows that a forecast is computed from."""
    horizon: int
    """Number of rows to forecast."""
    names: tuple[str, ...]
    """Names of the channels."""

    def __post_init__(self) -> None:
        for name in ("lookback", "horizon"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= MAX_SIZE:
                raise ValueError(f"{name}: expected an integer of at least 1, got {short_repr(value)}")
        if not self.names or not all(isinstance(name, str) for name in self.names):
            raise ValueError(f"names: expected the names of the channels, got {short_repr(self.names)}")
        if self.forecast.network == "memory" and self.forecast.patch > self.lookback:
            raise ValueError(
                f"forecast.patch: expected at most the look-back of {self.lookback}, got {self.forecast.patch}"
            )

    @property
    def channels(self) -> int:
        """Number of channels."""
        return len(self.names)

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as JSON data."""
        return {**asdict(self), "model": self.model.to_dict(), "names": list(self.names)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> NetworkConfig:
        """Build the configuration from parsed JSON and check the type of every field."""
        parts = {"forecast": ForecastConfig, "model": ModelConfig}
        for each in fields(cls):
            wanted = dict if each.name in parts else list if each.name == "names" else object
            if not isinstance(data.get(each.name), wanted):
                raise ValueError(
                    f"{each.name}: expected a field of a forecasting network, got {short_repr(data.get(each.name))}"
                )
        built: dict[str, Any] = {name: part.from_dict(data[name]) for name, part in parts.items()}  # type: ignore[attr-defined]
        return cls(lookback=data["lookback"], horizon=data["horizon"], names=tuple(data["names"]), **built)


@dataclass(frozen=True, kw_only=True)
class TrainFields:
    """Fields that forecasting adds to `TrainConfig`.

    Attributes:
        forecast: only for data.kind=forecast: the forecasting network around the backbone `model`.
    """

    forecast: ForecastConfig = field(default_factory=ForecastConfig)
