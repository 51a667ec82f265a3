"""Time series forecasting: networks with a neural memory, baselines, training, evaluation, and `Forecaster`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remanence.forecast.forecaster import Forecaster as Forecaster

__all__ = ["Forecaster"]


def __getattr__(name: str) -> type[Forecaster]:
    """Import `Forecaster` on first use, so that importing `remanence.forecast.vertical` does not import
    torch.
    """
    if name == "Forecaster":
        from remanence.forecast.forecaster import Forecaster

        return Forecaster
    raise AttributeError(f"module 'remanence.forecast' has no attribute {name!r}")
