"""The interface between the training loop and a training task, and the registry of tasks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from remanence.model import State, Trace
from remanence.train.config import TrainConfig
from remanence.train.distributed import World
from remanence.train.initial_state import InitialState
from remanence.train.sources import Source
from remanence.train.trainable import ModelDescription
from remanence.verticals import Registry, train_tasks


class Gradients(NamedTuple):
    """The result of forward and backward of a step, whose gradients are in the parameters.

    `loss` is this process's share of the step's loss, `tokens` the number of tokens or values that all processes have
    read, `trace` the trace of the last part. `answers` is the loss of targets with weight 1, where others have less.
    """

    loss: Tensor | float
    tokens: int
    trace: Trace
    answers: float | None = None


class Steps(Protocol):
    """Chooses which steps are replayed as a CUDA graph: None, or what `TrainTask.gradients` gets as `graph`."""

    def of(self, batches: Any, carried: State | None) -> Any: ...


class TrainTask(Protocol):
    """One kind of training, for one run. A new one is an entry of `TASKS`, by its ``data.kind``.

    It is made with ``Task(config, world, source)``: `source` is given where it stands in for the config's.

    Attributes:
        source: where batches come from.
        prefetch: whether a thread may draw the next batch while a GPU computes this one's gradients.
    """

    source: Source
    prefetch: bool

    def __init__(self, config: TrainConfig, world: World, source: Source | None = None) -> None: ...

    def build_model(self, resumed: bool) -> Any:
        """The model before the first step. A resumed run then gets its weights from a checkpoint."""
        ...

    def shard(self, model: Any) -> Any:
        """The model with its weights distributed over all processes."""
        ...

    def stored_config(self, folder: Path, model: Any) -> ModelDescription:
        """The config of the model in a checkpoint, to be compared with ``model.config``."""
        ...

    def captured_steps(self, model: Any, begins: bool) -> Steps:
        """Which steps are captured; `begins` if documents may begin in a state other than the learned one."""
        ...

    def before_step(self, model: Any, carried: State | None, number: int) -> State | None:
        """Called before each step, with the state that rows carry; returns it, changed if the model has changed."""
        ...

    def gradients(
        self,
        model: Any,
        batches: Sequence[Any],
        state: State | None,
        number: int,
        initial_state: InitialState | None,
        graph: Any,
        carried: State | None,
    ) -> Gradients:
        """Forward and backward of all parts of a step."""
        ...

    def validate(self, model: Any) -> float:
        """The loss on held-out data: the lower the better."""
        ...


TASKS: Registry[type[TrainTask]] = Registry(train_tasks())
"""Tasks by kind of data. Kinds that are not here are language modelling, on batches of their entry of `SOURCES`."""
