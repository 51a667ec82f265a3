"""Electricity transformer 2, hourly: seven channels; 12, 4 and 4 months for training, validation and test.

remanence train forecast/etth2 --data.path=ETTh2.csv --out out/etth2 --data.horizon=96
remanence eval out/etth2 forecast --forecast.data=ETTh2.csv --memory-mode on off frozen
"""

from dataclasses import replace

from remanence.forecast.recipes import forecasting
from remanence.train import TrainConfig


def recipe() -> TrainConfig:
    """Return the training configuration."""
    config = forecasting("ett-hour", steps=300)
    return replace(config, optimizer=replace(config.optimizer, lr=3e-4))
