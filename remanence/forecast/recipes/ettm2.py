"""Electricity transformer 2, by the quarter of an hour: seven channels, 12, 4 and 4 months.

remanence train forecast/ettm2 --data.path=ETTm2.csv --out out/ettm2 --data.horizon=96
remanence eval out/ettm2 forecast --forecast.data=ETTm2.csv --memory-mode on off frozen
"""

from remanence.forecast.recipes import forecasting
from remanence.train import TrainConfig


def recipe() -> TrainConfig:
    return forecasting("ett-minute", steps=1500)
