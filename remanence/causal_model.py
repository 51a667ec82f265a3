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
        """The fields as plain data."""


@runtime_checkable
class CausalModel(Protocol):
    """The interface of a language model that sessions, generation, memory files, training and evaluation use.

    `Model` and a pretrained model with an attached memory (`remanence.attached.model.Attached`) implement it; neither
    inherits from the other.
    """

    config: Any
    """The configuration, with `vocab_size`, `dim` and `to_dict`."""
    folder: Path | None
    """The folder that the model was loaded from, which also has its tokenizer; None if there is none."""
    checkpointing: bool
    """Whether training uses activation checkpointing."""
    training: bool
    memory_mode: Mode
    """The memory mode of calls without a `memory_mode` argument."""

    @property
    def log_unigrams(self) -> Tensor | None:
        """Log frequencies of the tokens ``[v]``; None if no memory needs them."""

    @property
    def embed(self) -> nn.Embedding:
        """The token embeddings. Their weights have the dtype and the device of the model."""

    @property
    def device(self) -> torch.device: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int | None:
        """The maximum length of a text in tokens; None: unlimited."""

    @property
    def has_memory(self) -> bool: ...

    @property
    def mixers(self) -> Sequence[Mixer]:
        """The mixers of the layers; empty for a pretrained model."""

    def start(self, rows: int) -> State:
        """The state of `rows` documents before the first token."""

    def __call__(
        self,
        tokens: Tensor,
        state: State | None = None,
        *,
        mask: Tensor | None = None,
        offsets: Tensor | Sequence[int] | None = None,
        memory_mode: Mode | None = None,
    ) -> tuple[Tensor, State]:
        """The logits of the next token after each token, and the state."""

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
        """A forward pass up to the last hidden layer, with the surprise and gates of each memory."""

    def check_mode(self, mode: Mode) -> Mode:
        """Return the memory mode; raise an error if the model does not support it."""

    def logits(self, hidden: Tensor) -> Tensor:
        """The output of the language model head for hidden vectors ``[... d]``."""

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def modules(self) -> Iterator[nn.Module]: ...

    def eval(self) -> Self: ...

    def saved_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that are saved in a model folder and a checkpoint, by name."""

    def current_config(self) -> SavedConfig:
        """The configuration to save with the parameters."""

    def upgrade_config(self, saved: dict[str, Any], where: str) -> dict[str, Any]:
        """A configuration saved by an earlier version, in the present format. `where` is the file named in warnings."""

    def state_template(self) -> State:
        """The initial state of one row on the meta device: the shapes and dtypes of all tensors."""

    def state_layout(self) -> tuple[State, list[int]]:
        """A template with each distinct kind of layer once, and the index in it of each layer of the model."""

    def pretrained_tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the underlying pretrained model, if there is one."""

    def capture_unsupported_reason(self, carries: bool) -> str | None:
        """Why calls, or those that carry a state, cannot be captured as CUDA graphs; None if they can."""

    def decode_unsupported_reason(self, mode: Mode) -> str | None:
        """Why tokens cannot be decoded in place in this memory mode; None if they can."""

    def save(self, folder: str | Path) -> None:
        """Write the configuration and the parameters to a folder."""
