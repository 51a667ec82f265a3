"""Configuration of time series as training data. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from remanence.train.checks import check_positive
from remanence.train.data_config import DataConfig


@dataclass(frozen=True, kw_only=True)
class ForecastData(DataConfig):
    """Windows of a time series: each is a look-back and the rows to forecast after it.

    Attributes:
        path: a CSV file with the columns' names in its first line.
        length: number of rows in the look-back.
        horizon: number of rows to forecast.
        split: name of the split into training, validation and test rows, from
            `remanence.forecast.protocol.SPLITS`.
        columns: names of the columns to read. Default: all except dates and the index.
        missing: how missing values are handled: "refuse" raises an error, "previous" repeats the value of the
            row before.
    """

    kind: str = "forecast"
    path: str | None = None
    horizon: int = 96
    split: str = "7/1/2"
    columns: tuple[str, ...] = ()
    missing: Literal["refuse", "previous"] = "refuse"
    causal_lm: ClassVar[bool] = False
    train_fields: ClassVar[tuple[str, ...]] = ("forecast",)
    required: ClassVar[Mapping[str, object]] = {
        "init_from": None,
        "accumulate": 1,
        "carry": False,
        "initial_state": "fresh",
        "write_cost": 0.0,
    }
    recorded: ClassVar[tuple[str, ...]] = ("split",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(horizon=self.horizon)
