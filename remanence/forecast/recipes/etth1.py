"""Electricity transformer 1, hourly: seven channels; 12, 4 and 4 months for training, validation and test.

remanence train forecast/etth1 --data.path=ETTh1.csv --out out/etth1 --data.horizon=96
remanence eval out/etth1 forecast --forecast.data=ETTh1.csv --memory-mode on off frozen
"""

from remanence.forecast.recipes import forecasting
from remanence.train import TrainConfig


def recipe() -> TrainConfig:
    """Return the training configuration."""
    return forecasting("ett-hour")
