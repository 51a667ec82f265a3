"""Weather in Jena, every ten minutes of a year: 21 channels; 70 % for training, the last 20 % for test.

remanence train forecast/weather --data.path=weather.csv --out out/weather --data.horizon=96
remanence eval out/weather forecast --forecast.data=weather.csv --memory-mode on off frozen
"""

from remanence.forecast.recipes import forecasting
from remanence.train import TrainConfig


def recipe() -> TrainConfig:
    """Return the training configuration."""
    return forecasting("7/1/2", steps=1500)
