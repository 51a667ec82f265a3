"""The interface between the training loop and a training task, and the registry of tasks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from remanence.model import State, Trace
from remanence.train.config import TrainConfig
from remanence.train.distributed import ProcessGroup
from remanence.train.initial_state import InitialState
from remanence.train.sources import Source
from remanence.train.trainable import ModelDescription
from remanence.verticals import Registry, train_tasks


class Gradients(NamedTuple):
    """The result of the forward and backward pass of a step. The gradients themselves are in the parameters.

    `loss` is this process's share of the step's loss, `tokens` the number of tokens or values that all
    processes have read, and `trace` the trace of the last part. `answers` is the mean loss of the targets
    with weight 1, if other targets have a lower weight, else None.
    """

    loss: Tensor | float
    tokens: int
    trace: Trace
    answers: float | None = None


class Steps(Protocol):
    """Chooses which steps are replayed as a CUDA graph."""

    def select_graph(self, batches: Any, carried: State | None) -> Any:
        """Return the argument `graph` of `TrainTask.gradients` for a step, or None if the step is not
        captured.
        """
        ...


class TrainTask(Protocol):
    """The part of a training run that depends on the kind of data. To add a task, enter it in `TASKS` by
    ``data.kind``.

    A run creates its task as ``Task(config, process_group, source)``. If `source` is not None, it replaces the source
    that the config names.

    Attributes:
        source: the source of batches.
        prefetch: whether a thread may prepare the next batch while the GPU computes the current gradients.
    """

    source: Source
    prefetch: bool

    def __init__(
        self, config: TrainConfig, process_group: ProcessGroup, source: Source | None = None
    ) -> None: ...

    def build_model(self, resumed: bool) -> Any:
        """Return the model before the first step.

        If `resumed`, its weights are loaded from a checkpoint later.
        """
        ...

    def shard(self, model: Any) -> Any:
        """Return the model with its weights distributed over all processes."""
        ...

    def stored_config(self, folder: Path, model: Any) -> ModelDescription:
        """Return the config of the model in a checkpoint, to be compared with ``model.config``."""
        ...

    def captured_steps(self, model: Any, begins: bool) -> Steps:
        """Return the object that chooses the steps to capture as a CUDA graph.

        `begins` is whether documents may begin in a state other than the learned one.
        """
        ...

    def before_step(self, model: Any, carried: State | None, number: int) -> State | None:
        """Prepare the model for a step.

        Return the state that rows carry, adapted if the model was changed.
        """
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
        """Run the forward and backward pass of all parts of a step."""
        ...

    def validate(self, model: Any) -> float:
        """Return the loss on held-out data; lower is better."""
        ...


TASKS: Registry[type[TrainTask]] = Registry(train_tasks())
"""The task of each kind of data.

Kinds without an entry use language modelling on the batches of their source.
"""
