"""The task of language modelling: a causal model, or a memory attached to one, learns to predict the next
token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from remanence.attached import folder as attached
from remanence.attached.base import is_legacy_digest, matches_digest
from remanence.attached.config import AttachConfig
from remanence.data import Batch
from remanence.folder import read_config
from remanence.model import Model, State
from remanence.train import distributed, engine, text
from remanence.train.carry import carry_in, carry_out
from remanence.train.config import TrainConfig
from remanence.train.data_config import CorpusData
from remanence.train.distributed import ProcessGroup
from remanence.train.graphed import Graphed, Graphs
from remanence.train.initial_state import InitialState
from remanence.train.loss import batch_loss, target_count
from remanence.train.sources import Source, make_source, model_folder
from remanence.train.task import TASKS, Gradients, TrainTask
from remanence.train.trainable import ModelDescription, TrainableModel

VALIDATED = 8
"""The number of batches of a validation, each as large as one part of a training step."""
ELSEWHERE = 2**62
"""Combined (xor) with the 63-bit seed to generate validation rows that differ from the training rows."""


def held_out_source(config: TrainConfig, rank: int, world_size: int) -> Source:
    """Return a source of held-out data of the run's kind, without a ramp or a curriculum.

    Raise an error if the config gives no held-out data and the kind of data cannot generate it.
    """
    data, held_out = config.data, getattr(config.data, "held_out", None)
    if held_out is None and data.kind == "text":
        return text.held_out_source(
            config, config.batch // (config.accumulate * world_size), rank, world_size
        )
    generated = held_out is None and "path" not in data.field_names()
    if held_out is None and not generated:
        wanted = f"data of kind {data.kind!r} that is not trained on, for validate_every"
        raise ValueError(f"data.held_out: expected {wanted}, got none; --data.held_out=PATH gives it")
    data = data.without_schedule()
    if isinstance(data, CorpusData):
        if held_out == data.path:
            raise ValueError(f"data.held_out: expected other data than data.path, got {held_out} for both")
        data = replace(data, path=held_out, held_out=None)
    seed = config.seed ^ ELSEWHERE if generated else config.seed
    try:
        return make_source(
            replace(config, data=data, seed=seed, validate_every=0, stop_after=0), rank, world_size
        )
    except ValueError as error:
        problem = str(error).removeprefix("data: ").removeprefix("data.path: ")
        raise ValueError(f"data.held_out: {problem}") from None


class LanguageModeling:
    """Next-token prediction on any source that yields `Batch` objects: texts, facts, generated tasks, DNA."""

    prefetch = True

    def __init__(
        self, config: TrainConfig, process_group: ProcessGroup, source: Source | None = None
    ) -> None:
        self.config, self.process_group = config, process_group
        self.source = source or make_source(config, process_group.rank, process_group.size)
        self.held_out = (
            held_out_source(config, process_group.rank, process_group.size) if config.validate_every else None
        )

    def build_model(self, resumed: bool) -> Model:
        """Load the model of `init_from`, or return a new model if there is none or the run is resumed."""
        if self.config.init_from is None or resumed:
            return Model(self.config.model)
        return Model.load(self.config.init_from, dtype=torch.float32)

    def shard(self, model: Model) -> Model:
        return distributed.shard(model, self.process_group)

    def stored_config(self, folder: Path, model: TrainableModel) -> ModelDescription:
        return read_config(folder)

    def captured_steps(self, model: Model, begins: bool) -> Graphs:
        return Graphs(model, self.config, self.process_group, begins)

    def before_step(self, model: Model, carried: State | None, number: int) -> State | None:
        return carried

    def gradients(
        self,
        model: Model,
        batches: Sequence[Batch],
        state: State | None,
        number: int,
        initial_state: InitialState | None,
        graph: Graphed | None,
        carried: State | None,
    ) -> Gradients:
        return engine.token_gradients(
            model, self.config, batches, state, number, self.process_group, initial_state, graph, carried
        )

    @torch.no_grad()
    def validate(self, model: Model) -> float:
        """Return the mean loss on the first `VALIDATED` held-out batches, which are the same at every
        validation.
        """
        assert self.held_out is not None, "there is one where validate_every is above 0"
        device, carried, total, count = self.process_group.device, None, 0.0, 0.0
        bfloat16 = self.config.precision == "bfloat16"
        model.eval()
        try:
            for number in range(VALIDATED):
                batch = self.held_out.step(number)
                carries = self.config.carry and batch.offsets is None
                state = carry_in(model, carried, batch) if carries else None
                with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
                    loss, trace, _ = batch_loss(model, batch, state, device, keep=carries, dense=False)
                carried = carry_out(model, trace.state, batch, False) if carries else None
                total, count = total + float(loss), count + target_count(batch)
        finally:
            model.train()
            distributed.reshard(model)
        total, count = self.process_group.sum_over_processes(total, count)
        return total / max(1.0, count)


class AttachedModeling(LanguageModeling):
    """Language modelling for a memory attached to a pretrained model, whose own weights stay frozen."""

    def build_model(self, resumed: bool) -> Any:
        """Load the attached model of `init_from`, with the pretrained weights in the run's precision."""
        assert self.config.init_from is not None
        narrow = torch.bfloat16 if self.config.precision == "bfloat16" else torch.float32
        return attached.load(self.config.init_from, dtype=narrow, trained=True)

    def shard(self, model: Any) -> Any:
        """Return the model unchanged: every process holds all weights, and `gradients` averages over
        processes.
        """
        return model

    def gradients(
        self,
        model: Any,
        batches: Sequence[Batch],
        state: State | None,
        number: int,
        initial_state: InitialState | None,
        graph: Graphed | None,
        carried: State | None,
    ) -> Gradients:
        """Compute the gradients of this process, and average them over all processes."""
        found = super().gradients(model, batches, state, number, initial_state, graph, carried)
        distributed.average_gradients(model, self.process_group)
        return found

    def stored_config(self, folder: Path, model: Any) -> Any:
        """Read the config in a checkpoint. If the digest of its base model has an old format, update it."""
        config = attached.read_config(folder)[0]
        earlier = is_legacy_digest(config.base) and matches_digest(model.base, config.base)
        return replace(config, base=model.config.base) if earlier else config

    def before_step(self, model: Any, carried: State | None, number: int) -> State | None:
        """Set the attention window of the step, and return the carried state adapted to that window."""
        window = self.config.window_at(number, model.config.window)
        if window != model.window:
            model.window = window
        return None if carried is None else model.fit_window(carried)


def make_task(config: TrainConfig, process_group: ProcessGroup, source: Source | None = None) -> TrainTask:
    """Create the task of a run: the registered one of its kind of data, or else language modelling."""
    if config.data.kind in TASKS:
        return TASKS[config.data.kind](config, process_group, source)
    attaches = config.init_from is not None and attached.is_attached(config.init_from)
    return (AttachedModeling if attaches else LanguageModeling)(config, process_group, source)


def resolve_start(config: TrainConfig) -> TrainConfig:
    """Return the config with the model config of the folder `init_from`, if any, and with its absolute path."""
    if config.init_from is None:
        if config.windows:
            raise ValueError(
                "windows: expected init_from=, the folder of an attached model, beside it, got none"
            )
        return config
    folder = model_folder(config.init_from)
    if attached.is_attached(folder):
        described = attached.read_config(folder)[0]
        _check_windows(config.windows, described)
        own = described.outline()
    elif config.windows:
        raise ValueError(f"windows: expected an attached model to begin from, got {config.init_from}")
    else:
        own = read_config(folder)
    return replace(config, init_from=str(folder.resolve()), model=own)


def _check_windows(windows: tuple[int, ...], model: AttachConfig) -> None:
    """Raise an error for `windows` if the attention of the attached model has no window, as its state is then a
    different one.
    """
    own = model.window
    if windows and own is None:
        raise ValueError(
            f"windows: expected none (--windows=), as this model's attention is not narrowed, got {windows}"
        )
