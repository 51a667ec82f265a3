"""Training. `fit` trains a model from a config in a run folder; a run can be interrupted at any time and
resumed.

`Run` does the same, one step at a time.
"""

from remanence.train.config import OptimizerConfig, TrainConfig, override
from remanence.train.data_config import (
    DATA_KINDS,
    BabilongData,
    CorpusData,
    DataConfig,
    DocumentsData,
    FactDialoguesData,
    FactsData,
    NeedleData,
    PackedData,
    RecallData,
    TextData,
)
from remanence.train.export import TRAINED, export, run_config
from remanence.train.papers import pretraining
from remanence.train.run import Run, TrainingError, fit, resolve_config
from remanence.train.sources import SOURCES, register_data
from remanence.train.task import TASKS, TrainTask
from remanence.verticals import moved_attribute

__all__ = [
    "DATA_KINDS",
    "SOURCES",
    "TASKS",
    "TRAINED",
    "BabilongData",
    "CorpusData",
    "DataConfig",
    "DocumentsData",
    "FactDialoguesData",
    "FactsData",
    "NeedleData",
    "OptimizerConfig",
    "PackedData",
    "RecallData",
    "Run",
    "TextData",
    "TrainConfig",
    "TrainTask",
    "TrainingError",
    "export",
    "fit",
    "override",
    "pretraining",
    "register_data",
    "resolve_config",
    "run_config",
]


def __getattr__(name: str) -> object:
    return moved_attribute(__name__, name)
