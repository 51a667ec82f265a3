"""Keeps the weights with the lowest validation loss of a run, and decides when to stop early.

When a run is resumed, the earlier validation losses are read from its metrics.
"""

from __future__ import annotations

import json
from math import inf, isfinite
from pathlib import Path

import torch

from remanence.io.tensors import read_tensors, write_tensors
from remanence.train.distributed import ProcessGroup, gather_tensor, shard_like
from remanence.train.trainable import TrainableModel

BEST = "best.safetensors"
"""The file in the run folder that holds the weights with the lowest validation loss."""


class Validation:
    """The validation losses of a run, up to the step that it resumes from."""

    def __init__(
        self, run: Path, step: int, stop_after: int, process_group: ProcessGroup | None = None
    ) -> None:
        self.path, self.stop_after, self.process_group = (
            run / BEST,
            stop_after,
            process_group or ProcessGroup(torch.device("cpu")),
        )
        self.history: list[tuple[int, float]] = []
        lines = run / "metrics.jsonl"
        for line in (
            lines.read_text(encoding="utf-8", errors="replace").splitlines() if lines.is_file() else ()
        ):
            try:
                found = json.loads(line)
                at, value = found["step"], found["validation"]
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # an incomplete line, or a step without validation
            if at <= step:
                self.history.append(
                    (at, inf if value is None else value)
                )  # null stands for a loss that is not finite

    @property
    def best(self) -> tuple[int, float] | None:
        """The step and the value of the lowest loss (the first of equal ones), or None before any validation."""
        return min(self.history, key=lambda each: each[1], default=None)

    @property
    def stopped(self) -> bool:
        """Whether the last `stop_after` validations had no lower loss than an earlier one."""
        if not self.stop_after or self.best is None:
            return False
        return sum(step > self.best[0] for step, _ in self.history) >= self.stop_after

    def add(self, step: int, value: float, model: TrainableModel) -> None:
        """Record a validation loss, and save the weights if it is the lowest.

        All processes must call this method.
        """
        value = value if isfinite(value) else inf
        self.history.append((step, value))
        if self.best == (step, value) and isfinite(value):
            weights = {
                name: gather_tensor(parameter.detach()) for name, parameter in model.saved_parameters()
            }
            self.process_group.run_on_rank0(lambda: write_tensors(self.path, weights, {"step": str(step)}))

    @torch.no_grad()
    def restore(self, model: TrainableModel) -> None:
        """Load the weights with the lowest validation loss into the model, if they were saved."""
        if self.best is None or not self.path.is_file():
            return
        stored = read_tensors(self.path)
        if stored.metadata.get("step") == str(self.best[0]):
            for name, parameter in model.saved_parameters():
                parameter.copy_(shard_like(stored.tensors[name].to(parameter.dtype), parameter))
