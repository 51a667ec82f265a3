"""Registration of `remanence.forecast` with the core package. Does not import torch."""

from remanence.verticals import Vertical

VERTICAL = Vertical(
    name="forecast",
    data_configs={"forecast": "remanence.forecast.data_config:ForecastData"},
    sources={"forecast": "remanence.forecast.task:make_window_source"},
    tasks={"forecast": "remanence.forecast.task:ForecastTask"},
    train_fields="remanence.forecast.config:TrainFields",
    evaluations={"forecast": "remanence.forecast.evaluation:Forecast"},
    models={"remanence-forecast": "remanence.forecast.network:load_network"},
    moved={
        "remanence.series": "",
        "remanence.series.config": "remanence.forecast.config",
        "remanence.series.network": "remanence.forecast.network",
        "remanence.series.online": "remanence.forecast.online",
        "remanence.data.series": "remanence.forecast.series",
        "remanence.tasks.forecast": "remanence.forecast.protocol",
        "remanence.evaluate.forecast": "remanence.forecast.evaluation",
        "remanence.train.windows": "remanence.forecast.task",
        "remanence.train:forecasting": "remanence.forecast.recipes:forecasting",
        "remanence.train.papers:forecasting": "remanence.forecast.recipes:forecasting",
    },
)
"""Data kind, training task, evaluation and model type that this package adds to the core package."""
