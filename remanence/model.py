"""A language model: tokens -> embedding -> `Backbone` -> head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import log
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from remanence.backbone import Backbone, Schedule, State, Trace, memories
from remanence.causal_model import CausalModel, SavedConfig
from remanence.config import Mode, ModelConfig, ModelFields, change
from remanence.io.migrations import current_name
from remanence.mixers import Mixer, Text
from remanence.runtime.keywords import show_fields
from remanence.runtime.mode import RenamedMode, renamed_mode
from remanence.runtime.module import Module, alteration_reason, check_transforms

__all__ = [
    "CausalModel",
    "Model",
    "SavedConfig",
    "Schedule",
    "State",
    "Trace",
    "check_tokens",
    "matched",
    "memories",
    "parameters",
]


class _CallSettings(TypedDict):
    """Arguments of `Model.trace` that are passed on to the backbone unchanged."""

    mask: Tensor | None
    offsets: Tensor | Sequence[int] | None
    memory_mode: Mode | None


class Model(Module):
    """A language model: ``logits, state = Model(config)(tokens, state)``.

    Pass ``state=None`` at the start of a document, and the returned state in the following calls.

    ``model.memory_mode``, ``model.checkpointing`` and ``model.schedule`` are those of its `Backbone`: the default
    memory mode ("on", "off", "frozen", "fresh"), activation checkpointing, and the order in which layers read segments.
    ``model.folder`` is the folder that the model was loaded from, with its tokenizer, or None.

    For texts of different lengths, pass a ``mask=`` that is true for tokens and false for padding, or pack the
    documents into one row and pass ``offsets=``. `reset_parameters` initialises all parameters again, for example after
    ``to_empty`` from the meta device.
    """

    folder: Path | None = None
    """The folder that the model was loaded from; None if it was not loaded."""

    @show_fields(ModelConfig, default_of="config")
    def __init__(self, config: ModelConfig, **fields: Unpack[ModelFields]) -> None:
        super().__init__()
        if not isinstance(config, ModelConfig):
            raise ValueError(f"config: expected a ModelConfig, as preset('tiny') makes one, got {config!r}")
        self.config = change(config, fields)
        c = self.config
        self.embed = nn.Embedding(c.vocab_size, c.dim)
        self.backbone = Backbone(c)
        self.head = None if c.tie else nn.Linear(c.dim, c.vocab_size, bias=False)
        # Token frequencies of the training data; saved with the model, not trained by gradients.
        needed = any(mixer.needs_unigrams for mixer in self.backbone.mixers)
        self.log_unigrams = nn.Parameter(torch.empty(c.vocab_size), requires_grad=False) if needed else None
        self.reset_own_parameters()
        self.register_load_state_dict_pre_hook(_rename)

    def reset_own_parameters(self) -> None:
        """Initialise embedding and head so that logits have unit variance at any width."""
        nn.init.normal_(self.embed.weight, std=self.config.dim**-0.5)
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=self.config.dim**-0.5)
        if self.log_unigrams is not None:
            nn.init.constant_(self.log_unigrams, -log(self.config.vocab_size))

    @property
    def blocks(self) -> nn.ModuleList:
        return self.backbone.blocks

    @property
    def mixers(self) -> list[Mixer]:
        """The mixer of each block, in the order of the layers."""
        return self.backbone.mixers

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_positions(self) -> int | None:
        """None, because texts may have any length."""
        return None

    @property
    def memory_mode(self) -> Mode:
        """The memory mode of calls without a `memory_mode` argument."""
        return self.backbone.memory_mode

    @memory_mode.setter
    def memory_mode(self, mode: Mode) -> None:
        self.backbone.memory_mode = mode

    memory = RenamedMode()
    """Deprecated name of `memory_mode`."""

    def check_mode(self, mode: Mode) -> Mode:
        """Return the mode; raise an error if the model does not support it (without a memory, only "on" is)."""
        return self.backbone.check_mode(mode)

    @property
    def schedule(self) -> Schedule:
        """The order in which layers that read by segments are computed; see `remanence.backbone.Schedule`."""
        return self.backbone.schedule

    @schedule.setter
    def schedule(self, schedule: Schedule) -> None:
        self.backbone.schedule = schedule

    @property
    def checkpointing(self) -> bool:
        """Whether training uses activation checkpointing."""
        return self.backbone.checkpointing

    @checkpointing.setter
    def checkpointing(self, on: bool) -> None:
        self.backbone.checkpointing = on

    @property
    def has_memory(self) -> bool:
        """Whether any layer has a memory."""
        return self.backbone.has_memory

    def start(self, rows: int) -> State:
        """Return the initial state of `rows` documents, before the first token."""
        return self.backbone.start(rows)

    def forward(
        self,
        tokens: Int[Tensor, "b t"],
        state: State | None = None,
        *,
        mask: Bool[Tensor, "b t"] | None = None,
        offsets: Int[Tensor, " r+1"] | Sequence[int] | None = None,
        memory_mode: Mode | None = None,
        memory: Mode | None = None,
    ) -> tuple[Float[Tensor, "b t v"], State]:
        """Return the logits of the next token after each token ``[b t v]``, and the new state.

        Args:
            tokens: token ids.
            state: None at the start of a document; otherwise the state that the previous call returned.
            mask: true for tokens, false for padding, which may be anywhere. Padding does not change the state; its
                logits are those of a zero vector.
            offsets: for documents packed into a single row: 0 and the end of each document.
            memory_mode: the memory mode of this call. None means ``model.memory_mode``.
            memory: deprecated: use `memory_mode`.
        """
        if memory is not None:
            memory_mode = renamed_mode(
                memory, level=5
            )  # the caller is 5 frames up, because nn.Module adds frames
        trace = self.trace(tokens, state, mask=mask, offsets=offsets, memory_mode=memory_mode)
        return self.logits(trace.hidden), trace.state

    def logits(self, hidden: Float[Tensor, "... d"]) -> Float[Tensor, "... v"]:
        """Return the logits ``[... v]`` for hidden vectors ``[... d]``."""
        return F.linear(hidden, self.embed.weight) if self.head is None else self.head(hidden)

    def trace(
        self,
        tokens: Int[Tensor, "b t"],
        state: State | None = None,
        *,
        mask: Bool[Tensor, "b t"] | None = None,
        offsets: Int[Tensor, " r+1"] | Sequence[int] | None = None,
        memory_mode: Mode | None = None,
        keep: bool = True,
        memory: Mode | None = None,
    ) -> Trace:
        """Run the model without the head and return a `Trace`, which also has the surprise and gates of each
        memory. The arguments are those of `forward` and of `Backbone.trace`.
        """
        if memory is not None:
            memory_mode = renamed_mode(memory)
        if self.has_memory:
            check_transforms()
        tokens = check_tokens(tokens, mask, self.vocab_size)
        text = Text(tokens, self.log_unigrams, self.logits)
        settings = _CallSettings(mask=mask, offsets=offsets, memory_mode=memory_mode)
        x, known = self.embed(tokens), type(self.backbone).forward is Backbone.forward
        if known and alteration_reason([self.backbone]) is None:
            return self.backbone.trace(x, state, keep=keep, text=text, **settings)
        # The backbone has hooks, or its class overrides `forward`, which may return only hidden vectors and state.
        extra = {"keep": keep, "text": text, "traced": True} if known else {}
        hidden, after, *rest = self.backbone(x, state, **settings, **extra)
        return Trace(hidden, after, *rest) if rest else Trace(hidden, after, (None,) * len(self.blocks), ())

    def saved_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the name and value of each parameter that is saved in model folders and checkpoints: all of
        them.
        """
        return self.named_parameters()

    def current_config(self) -> ModelConfig:
        """Return the configuration to save with the parameters."""
        return self.config

    def upgrade_config(self, saved: dict[str, Any], where: str) -> dict[str, Any]:
        """Return a saved configuration with default values for the fields that the file does not have.
        `where` is not used.
        """
        return upgrade_config(saved)

    def state_template(self) -> State:
        """Return the initial state of one row on the meta device, which has shapes and dtypes but no data."""
        return state_template(self.config, self.embed.weight.dtype)

    def state_layout(self) -> tuple[State, list[int]]:
        """Return a template state in which each kind of layer occurs at most twice, and the index in it of
        each layer.
        """
        return state_layout(self.config)

    def pretrained_tokenizer(self) -> None:
        """Return None, because there is no underlying pretrained model."""

    def capture_unsupported_reason(self, carries: bool) -> str | None:
        """Return the reason why calls cannot be captured as CUDA graphs, or None if they can. `carries` is
        whether the calls also pass a state on.
        """
        reasons = (mixer.capture_unsupported_reason(carries) for mixer in self.mixers)
        return next((reason for reason in reasons if reason is not None), None)

    def decode_unsupported_reason(self, memory_mode: Mode) -> str | None:
        """Return the reason why tokens cannot be decoded in place in this memory mode, or None if they can."""
        reasons = (mixer.decode_unsupported_reason(memory_mode) for mixer in self.mixers)
        return next((reason for reason in reasons if reason is not None), None)

    def describe(self) -> dict[str, Any]:
        """Return the content of ``config.json`` for this model."""
        from remanence.folder import describe

        return describe(self.config, self.embed.weight.dtype)

    def save(self, folder: str | Path) -> None:
        """Write ``config.json`` and ``model.safetensors``, without the tokenizer."""
        from remanence.folder import save_model

        save_model(self, folder)

    @classmethod
    def load(
        cls, folder: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> Model:
        """Load a model that `save`, or ``save_pretrained`` of `remanence.hf`, wrote. `dtype` is by default
        the saved one; the results are then bit-identical to those of the saved model.
        """
        from remanence.folder import load_model

        return load_model(folder, device=device, dtype=dtype)


def check_tokens(tokens: Tensor, mask: object, vocab_size: int) -> Tensor:
    """Return the token ids with padding replaced by 0. Raises an error if they are not integers ``[b t]`` or,
    on the CPU, if an id is outside the vocabulary.
    """
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32):
        got = f"{list(tokens.shape)} {tokens.dtype}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(f"tokens: expected integers [batch, tokens], got {got}")
    if isinstance(mask, Tensor) and mask.shape == tokens.shape and mask.dtype == torch.bool:
        tokens = tokens.masked_fill(~mask, 0)
    if tokens.device.type == "cpu" and tokens.numel() and not torch.compiler.is_compiling():
        low, high = (int(x) for x in tokens.aminmax())
        if low < 0 or high >= vocab_size:
            wrong = low if low < 0 else high
            raise ValueError(
                f"tokens: expected numbers from 0 to {vocab_size - 1} (the vocabulary), got {wrong}"
            )
    return tokens


def _rename(model: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Rename weights that have names of an earlier version. Called by PyTorch before it loads a state dict."""
    for name in [name for name in state_dict if name.startswith(prefix)]:
        current = prefix + current_name(name.removeprefix(prefix))
        if current != name:
            state_dict[current] = state_dict.pop(name)


def upgrade_config(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved configuration with default values for newer fields. A configuration that is not of a
    `Model` is returned unchanged.
    """
    try:
        return ModelConfig.from_dict(dict(saved)).to_dict()
    except (ValueError, TypeError):
        return dict(saved)


def state_template(config: ModelConfig, dtype: torch.dtype | None = None) -> State:
    """Return the initial state of one row on the meta device, where large stores take no memory."""
    with torch.device("meta"):
        return Model(config).to(dtype).start(1)


def state_layout(config: ModelConfig) -> tuple[State, list[int]]:
    """Return the template state and the layer indices of `CausalModel.state_layout`, given only a
    configuration.
    """
    small, places = config.condensed()
    return state_template(small), places


def parameters(config: ModelConfig) -> int:
    """Return the number of parameters of a model with this configuration, without allocating them."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Model(config).parameters())


def matched(config: ModelConfig, target: int | None = None) -> ModelConfig:
    """Return the configuration with the feed-forward width changed so that the model has about `target` parameters. By
    default, `target` is the size of a Transformer with the same configuration.

    Hybrids have both attention and memory: at equal feed-forward width, variants would differ in size by up to two
    thirds. Widths are multiples of 16, as fast matrix products on a GPU require (others took 4 times as long on an
    H200).
    """
    if target is None:
        target = parameters(change(config, {"pattern": ("attention",)}))
    per_unit = 3 * config.dim * config.num_layers
    rest = parameters(config) - per_unit * config.hidden
    ffn = 16 * round((target - rest) / per_unit / 16)
    if ffn < 16:
        raise ValueError(
            f"target: expected more than the {rest:,} parameters outside the feed-forward networks, got {target:,}"
        )
    return change(config, {"ffn": ffn})
