"""Electricity transformer 2, every 15 minutes: 7 channels; 12, 4 and 4 months for training, validation and test.

remanence train forecast/ettm2 --data.path=ETTm2.csv --out out/ettm2 --data.horizon=96
remanence eval out/ettm2 forecast --forecast.data=ETTm2.csv --memory-mode on off frozen
"""

from remanence.forecast.recipes import forecasting
from remanence.train import TrainConfig


def recipe() -> TrainConfig:
    """Return the training configuration."""
    return forecasting("ett-minute", steps=1500)
