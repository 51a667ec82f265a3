"""Electricity transformer 1, every 15 minutes: 7 channels; 12, 4 and 4 months for training, validation and test.

remanence train forecast/ettm1 --data.path=ETTm1.csv --out out/ettm1 --data.horizon=96
remanence eval out/ettm1 forecast --forecast.data=ETTm1.csv --memory-mode on off frozen
"""

from remanence.forecast.recipes import forecasting
from remanence.train import TrainConfig


def recipe() -> TrainConfig:
    """Return the training configuration."""
    return forecasting("ett-minute", steps=1500)
