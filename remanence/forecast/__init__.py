"""Forecasts of time series: networks with a neural memory, baselines, training, evaluation, and `Forecaster`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remanence.forecast.forecaster import Forecaster as Forecaster

__all__ = ["Forecaster"]


def __getattr__(name: str) -> Any:
    """`Forecaster`, imported when it is used: what is registered in `vertical.py` is read without torch."""
    if name == "Forecaster":
        from remanence.forecast.forecaster import Forecaster

        return Forecaster
    raise AttributeError(f"module 'remanence.forecast' has no attribute {name!r}")
