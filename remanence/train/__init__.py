"""Training: one function, `fit`, from a config to a run folder that can be killed at any moment and taken up again."""

from remanence.train.config import DataConfig, OptimizerConfig, TrainConfig, override
from remanence.train.engine import TrainingError, export, fit, run_config
from remanence.train.papers import pretraining

__all__ = [
    "DataConfig",
    "OptimizerConfig",
    "TrainConfig",
    "TrainingError",
    "export",
    "fit",
    "override",
    "pretraining",
    "run_config",
]
