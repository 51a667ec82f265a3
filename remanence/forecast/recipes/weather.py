"""Weather in Jena, every ten minutes of a year: 21 channels, the first 7 of 10 parts to train, the last 2 to test.

remanence train forecast/weather --data.path=weather.csv --out out/weather --data.horizon=96
remanence eval out/weather forecast --forecast.data=weather.csv --memory-mode on off frozen
"""

from remanence.forecast.recipes import forecasting
from remanence.train import TrainConfig


def recipe() -> TrainConfig:
    return forecasting("7/1/2", steps=1500)
