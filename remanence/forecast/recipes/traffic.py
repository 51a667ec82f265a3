"""Hourly use of 862 lanes in the San Francisco Bay area. We have no results: the data was not available.

remanence train forecast/traffic --data.path=traffic.csv --out out/traffic --data.horizon=96
remanence eval out/traffic forecast --forecast.data=traffic.csv --memory-mode on off frozen
"""

from dataclasses import replace

from remanence.forecast.recipes import forecasting
from remanence.train import TrainConfig


def recipe() -> TrainConfig:
    """Return the training configuration."""
    return replace(forecasting("7/1/2", steps=3000), batch=8)
