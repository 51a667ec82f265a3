"""The interface of a model that can be trained, saved and resumed: a language model or a vertical's network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from remanence.model import State


class ModelDescription(Protocol):
    """The configuration of a model."""

    def to_dict(self) -> dict[str, Any]: ...


class TrainableModel(Protocol):
    """The methods of a model that checkpoints, validation, the optimizer and export use.

    Training tasks need more.
    """

    @property
    def config(self) -> ModelDescription: ...

    @property
    def device(self) -> torch.device: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def saved_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the name and the parameter for all parameters that are saved in model folders and
        checkpoints.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Return the content of the model folder's config.json."""
        ...

    def save(self, folder: Path) -> None:
        """Write the model to a folder."""
        ...

    def start(self, rows: int) -> State:
        """Return the state of `rows` rows at the start of a document.

        Only used if rows carry a state between steps.
        """
        ...
