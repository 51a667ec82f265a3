"""How a forecasting network is built around its backbone, as frozen data. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from remanence.config import ModelConfig
from remanence.runtime.choices import check_choice, short_repr

LOSSES = ("mse", "mae", "decay")
MOST = 2**20
"""Of any size here."""


@dataclass(frozen=True, kw_only=True)
class ForecastConfig:
    """A forecasting network, but for its backbone.

    Attributes:
        network: name of an entry of `remanence.forecast.network.NETWORKS`: "memory", "linear" or "dlinear".
        patch, stride: memory: values of a token, and how far the next one begins behind it.
        linear: memory: whether a linear map from look-back to horizon stands beside the memory. It made errors larger.
        cycle: memory: rows after which a season comes again, as 24 for a day of hours; a learned season is taken out in
            front and put back behind. 0: none.
        dropout: memory: on tokens and on features, in training.
        history: memory: how many look-backs before its own a window's memory has read in training, each forecasting
            as well. 0: every window begins with an empty memory, which is the field's protocol.
        loss: "mse", "mae", or "decay": absolute errors, of which the n-th step counts as 1 / sqrt(n).
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
            if type(value) is not int or not least <= value <= MOST:
                raise ValueError(
                    f"forecast.{name}: expected an integer of at least {least}, got {short_repr(value)}"
                )
        if self.stride > self.patch:
            raise ValueError(
                f"forecast.stride: expected at most patch={self.patch}, or values would be left out, got {self.stride}"
            )
        if type(self.linear) is not bool:
            raise ValueError(f"forecast.linear: expected true or false, got {short_repr(self.linear)}")
        if type(self.dropout) not in (int, float) or not 0 <= self.dropout < 1:
            raise ValueError(
                f"forecast.dropout: expected at least 0 and below 1, got {short_repr(self.dropout)}"
            )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ForecastConfig:
        for name in data:
            check_choice("ForecastConfig field", name, [each.name for each in fields(cls)])
        return cls(**data)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """All that a network is made from: its config, its backbone's, what it reads and what it forecasts."""

    forecast: ForecastConfig
    model: ModelConfig
    lookback: int
    horizon: int
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in ("lookback", "horizon"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= MOST:
                raise ValueError(f"{name}: expected an integer of at least 1, got {short_repr(value)}")
        if not self.names or not all(isinstance(name, str) for name in self.names):
            raise ValueError(f"names: expected the names of the channels, got {short_repr(self.names)}")
        if self.forecast.network == "memory" and self.forecast.patch > self.lookback:
            raise ValueError(
                f"forecast.patch: expected at most the look-back of {self.lookback}, got {self.forecast.patch}"
            )

    @property
    def channels(self) -> int:
        return len(self.names)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "model": self.model.to_dict(), "names": list(self.names)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Shape:
        """From a file, where each field may be anything that JSON can say."""
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
    """
    Attributes:
        forecast: with data.kind=forecast: the network, of which `model` is the backbone.
    """

    forecast: ForecastConfig = field(default_factory=ForecastConfig)
