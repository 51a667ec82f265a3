"""What `remanence.forecast` registers. Imports no torch."""

from remanence.verticals import Kind, Vertical

VERTICAL = Vertical(
    name="forecast",
    kinds={
        "forecast": Kind(
            source="remanence.forecast.task:window_source",
            task="remanence.forecast.task:ForecastTask",
            fields=("path", "horizon", "split", "columns", "missing"),
            sections=("forecast",),
            fixed={"init_from": None, "accumulate": 1, "carry": False, "begin": "fresh", "write_cost": 0.0},
            causal=False,
            recorded=("split",),
        ),
    },
    config_fields={
        "data": "remanence.forecast.config:DataFields",
        "train": "remanence.forecast.config:TrainFields",
    },
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
