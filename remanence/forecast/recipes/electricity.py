"""The consumption of 321 customers, by the hour. Not measured here: the data was not at hand.

remanence train forecast/electricity --data.path=electricity.csv --out out/electricity --data.horizon=96
remanence eval out/electricity forecast --forecast.data=electricity.csv --memory-mode on off frozen
"""

from dataclasses import replace

from remanence.forecast.recipes import forecasting
from remanence.train import TrainConfig


def recipe() -> TrainConfig:
    return replace(forecasting("7/1/2", steps=3000), batch=16)
