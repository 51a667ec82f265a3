"""A CSV file of one's own: a column for each channel, rows in the order of time, a date is left out.

remanence train forecast/csv --data.path=mine.csv --out out/mine --data.horizon=96
remanence eval out/mine forecast --forecast.data=mine.csv --memory-mode on off frozen
"""

from remanence.forecast.recipes import forecasting
from remanence.train import TrainConfig


def recipe() -> TrainConfig:
    return forecasting("7/1/2")
