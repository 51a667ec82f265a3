"""Your own CSV file: one column per channel and rows in temporal order. Date columns are skipped.

remanence train forecast/csv --data.path=mine.csv --out out/mine --data.horizon=96
remanence eval out/mine forecast --forecast.data=mine.csv --memory-mode on off frozen
"""

from remanence.forecast.recipes import forecasting
from remanence.train import TrainConfig


def recipe() -> TrainConfig:
    """Return the training configuration."""
    return forecasting("7/1/2")
