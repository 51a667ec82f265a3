"""Training: `fit` goes from a config to a run folder that can be killed at any moment and taken up again.

`Run` is the same one step at a time.
"""

from remanence.train.config import DataConfig, OptimizerConfig, TrainConfig, override
from remanence.train.export import TRAINED, export, run_config
from remanence.train.papers import forecasting, pretraining
from remanence.train.run import Run, TrainingError, fit, resolve_config
from remanence.train.sources import SOURCES

__all__ = [
    "SOURCES",
    "TRAINED",
    "DataConfig",
    "OptimizerConfig",
    "Run",
    "TrainConfig",
    "TrainingError",
    "export",
    "fit",
    "forecasting",
    "override",
    "pretraining",
    "resolve_config",
    "run_config",
]
