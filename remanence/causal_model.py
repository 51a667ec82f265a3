"""The interface of a language model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

from remanence.backbone import State, Trace
from remanence.config import Mode
from remanence.mixers import Mixer
from remanence.tokenizers.tokens import Tokenizer


class SavedConfig(Protocol):
    """A configuration that can be written to a file."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as data that can be written as JSON."""


@runtime_checkable
class CausalModel(Protocol):
    """The interface of a language model that sessions, generation, memory files, training and evaluation use.

    `Model` and a pretrained model with an attached memory (`remanence.attached.model.Attached`) implement it; neither
    inherits from the other.
    """

    config: Any
    """The configuration, with `vocab_size`, `dim` and `to_dict`."""
    folder: Path | None
    """The folder that the model was loaded from, which also holds its tokenizer; None if it was not loaded.
    """
    checkpointing: bool
    """Whether training uses activation checkpointing."""
    training: bool
    """Whether the model is in training mode."""
    memory_mode: Mode
    """The memory mode of calls without a `memory_mode` argument."""

    @property
    def log_unigrams(self) -> Tensor | None:
        """Logarithms of the token frequencies ``[v]``; None if no memory needs them."""

    @property
    def embed(self) -> nn.Embedding:
        """The token embeddings. Their weights have the dtype and the device of the model."""

    @property
    def device(self) -> torch.device: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int | None:
        """The largest number of tokens that a text may have; None if there is no limit."""

    @property
    def has_memory(self) -> bool: ...

    @property
    def mixers(self) -> Sequence[Mixer]:
        """The mixers of the layers; empty for a pretrained model."""

    def start(self, rows: int) -> State:
        """Return the initial state of `rows` documents, before the first token."""

    def __call__(
        self,
        tokens: Tensor,
        state: State | None = None,
        *,
        mask: Tensor | None = None,
        offsets: Tensor | Sequence[int] | None = None,
        memory_mode: Mode | None = None,
    ) -> tuple[Tensor, State]:
        """Return the logits of the next token after each token ``[b t v]``, and the new state."""

    def trace(
        self,
        tokens: Tensor,
        state: State | None = None,
        *,
        mask: Tensor | None = None,
        offsets: Tensor | Sequence[int] | None = None,
        memory_mode: Mode | None = None,
        keep: bool = True,
    ) -> Trace:
        """Run the model up to the last hidden layer and return a `Trace`, which also has the surprise and
        gates of each memory.
        """

    def check_mode(self, mode: Mode) -> Mode:
        """Return the memory mode; raise an error if the model does not support it."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits ``[... v]`` that the language model head computes from hidden vectors ``[...
        d]``.
        """

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def modules(self) -> Iterator[nn.Module]: ...

    def eval(self) -> Self: ...

    def saved_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the name and value of each parameter that is saved in model folders and checkpoints."""

    def current_config(self) -> SavedConfig:
        """Return the configuration to save with the parameters."""

    def upgrade_config(self, saved: dict[str, Any], where: str) -> dict[str, Any]:
        """Convert a configuration saved by an earlier version to the present format. `where` is the file name
        to show in warnings.
        """

    def state_template(self) -> State:
        """Return the initial state of one row on the meta device, which has the shape and dtype of every
        tensor but no data.
        """

    def state_layout(self) -> tuple[State, list[int]]:
        """Return a template state in which each distinct kind of layer occurs once, and for each layer of the
        model its index in that template.
        """

    def pretrained_tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer of the underlying pretrained model, or None if there is none."""

    def capture_unsupported_reason(self, carries: bool) -> str | None:
        """Return the reason why calls cannot be captured as CUDA graphs, or None if they can. `carries` is
        whether the calls also pass a state on.
        """

    def decode_unsupported_reason(self, memory_mode: Mode) -> str | None:
        """Return the reason why tokens cannot be decoded in place in this memory mode, or None if they can."""

    def save(self, folder: str | Path) -> None:
        """Write the configuration and the parameters to a folder."""
