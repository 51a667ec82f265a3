"""The use of 862 lanes in the San Francisco Bay, by the hour. Not measured here: the data was not at hand.

remanence train forecast/traffic --data.path=traffic.csv --out out/traffic --data.horizon=96
remanence eval out/traffic forecast --forecast.data=traffic.csv --memory-mode on off frozen
"""

from dataclasses import replace

from remanence.forecast.recipes import forecasting
from remanence.train import TrainConfig


def recipe() -> TrainConfig:
    return replace(forecasting("7/1/2", steps=3000), batch=8)
