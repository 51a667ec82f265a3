"""The interface of a model that can be trained, saved and resumed: a language model or a vertical's network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from remanence.model import State


class ModelDescription(Protocol):
    """A model's configuration."""

    def to_dict(self) -> dict[str, Any]: ...


class TrainableModel(Protocol):
    """What checkpoints, validation, the optimizer and export need of a model. The training task needs more of it."""

    @property
    def config(self) -> ModelDescription: ...

    @property
    def device(self) -> torch.device: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def saved_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that a folder and a checkpoint hold, by name."""
        ...

    def describe(self) -> dict[str, Any]:
        """The content of a model folder's config.json."""
        ...

    def save(self, folder: Path) -> None: ...

    def start(self, rows: int) -> State:
        """The state of rows at a document's start. Called only where rows carry a state from step to step."""
        ...
