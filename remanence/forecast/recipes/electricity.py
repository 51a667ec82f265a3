"""Hourly electricity consumption of 321 customers. We have no results, because the data was not available.

remanence train forecast/electricity --data.path=electricity.csv --out out/electricity --data.horizon=96
remanence eval out/electricity forecast --forecast.data=electricity.csv --memory-mode on off frozen
"""

from dataclasses import replace

from remanence.forecast.recipes import forecasting
from remanence.train import TrainConfig


def recipe() -> TrainConfig:
    """Return the training configuration."""
    return replace(forecasting("7/1/2", steps=3000), batch=16)
