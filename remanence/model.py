"""A language model: tokens -> embedding -> `Backbone` -> head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import log
from pathlib import Path
from typing import Any, Protocol, Unpack, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from remanence.backbone import Backbone, Schedule, State, Trace, memories
from remanence.config import Mode, ModelConfig, ModelFields, change
from remanence.io.migrations import current_name
from remanence.mixers import Mixer, Text
from remanence.runtime.keywords import show_fields
from remanence.runtime.mode import RenamedMode, renamed_mode
from remanence.runtime.module import Module, altered, check_transforms

__all__ = [
    "CausalModel",
    "Model",
    "Schedule",
    "State",
    "Trace",
    "check_tokens",
    "matched",
    "memories",
    "parameters",
]


@runtime_checkable
class CausalModel(Protocol):
    """What sessions, generation, memory files, training and evaluation need of a language model. `Model` and a
    pretrained model with a memory (`remanence.attached.model.Attached`) satisfy it; neither inherits from the other.
    """

    config: Any
    """Has `vocabulary`, `dim` and `to_dict`."""
    folder: Path | None
    """Where it was loaded from, with its tokenizer."""
    checkpointing: bool
    training: bool
    log_unigrams: Any
    """Log frequencies of tokens, where a memory needs them; else None."""

    @property
    def embed(self) -> Any:
        """The token embeddings, whose weights have the model's dtype and device."""

    @property
    def device(self) -> torch.device: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int | None:
        """The longest text; None: no limit."""

    @property
    def has_memory(self) -> bool: ...

    @property
    def mixers(self) -> list[Any]:
        """Its layers that are our own mixers; none in a pretrained model."""

    def start(self, rows: int) -> State: ...

    def __call__(
        self, tokens: Tensor, state: State | None = None, **settings: Any
    ) -> tuple[Tensor, State]: ...

    def trace(
        self,
        tokens: Tensor,
        state: State | None = None,
        *,
        mask: Tensor | None = None,
        offsets: Any = None,
        memory_mode: Mode | None = None,
        keep: bool = True,
    ) -> Trace: ...

    memory_mode: Mode
    """Of calls that give none. Sessions and generations always give theirs."""

    def check_mode(self, mode: Mode) -> Mode:
        """The mode; an error if the model does not have it."""

    def logits(self, hidden: Tensor) -> Tensor: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def modules(self) -> Iterator[nn.Module]: ...

    def eval(self) -> Any: ...

    def saved_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What a folder, a checkpoint and a fingerprint hold."""

    def current_config(self) -> Any:
        """The configuration as it is saved now."""

    def upgrade_config(self, saved: dict[str, Any], where: str) -> dict[str, Any]:
        """A configuration that an earlier version saved, as this one would save it; warnings name the file `where`."""

    def state_template(self) -> State:
        """The state of one row at the start, on the meta device."""

    def state_layout(self) -> tuple[State, list[int]]:
        """The same of few layers, and for each layer of the model the one among them with the same tensors."""

    def pretrained_tokenizer(self) -> Any:
        """The tokenizer of the pretrained model inside; None without one."""

    def capture_unsupported_reason(self, carries: bool) -> str | None: ...

    def decode_unsupported_reason(self, mode: Mode) -> str | None: ...

    def save(self, folder: str | Path) -> None: ...


class Model(Module):
    """``logits, state = Model(config)(tokens, state)``: pass None at a document's start, and what you got afterwards.

    ``model.memory_mode``, ``model.checkpointing`` and ``model.schedule`` are those of its `Backbone`: what becomes of
    the memories ("on", "off", "frozen", "fresh") in calls that do not say, whether activations are computed again in
    backward, and how layers read segments. ``model.folder`` is where it was loaded from, with its tokenizer, or None.

    Texts of different lengths: pass ``mask=``, true where a token counts, or pack the documents into one row and pass
    ``offsets=``. `reset_parameters` initialises the model again, as after ``to_empty`` from the meta device.
    """

    folder: Path | None = None

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
        # Counted from what a model is trained on, saved with it, and never trained.
        rare = any(mixer.needs_unigrams for mixer in self.backbone.mixers)
        self.log_unigrams = nn.Parameter(torch.empty(c.vocab_size), requires_grad=False) if rare else None
        self.reset_own_parameters()
        self.register_load_state_dict_pre_hook(_rename)

    def reset_own_parameters(self) -> None:
        """Unit logits at first, whatever the width."""
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
        return self.backbone.mixers

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_positions(self) -> int | None:
        return None

    @property
    def memory_mode(self) -> Mode:
        return self.backbone.memory_mode

    @memory_mode.setter
    def memory_mode(self, mode: Mode) -> None:
        self.backbone.memory_mode = mode

    memory = RenamedMode()

    def check_mode(self, mode: Mode) -> Mode:
        """The mode, if this model has it; a model without a memory has "on" alone."""
        return self.backbone.check_mode(mode)

    @property
    def schedule(self) -> Schedule:
        return self.backbone.schedule

    @schedule.setter
    def schedule(self, schedule: Schedule) -> None:
        self.backbone.schedule = schedule

    @property
    def checkpointing(self) -> bool:
        return self.backbone.checkpointing

    @checkpointing.setter
    def checkpointing(self, on: bool) -> None:
        self.backbone.checkpointing = on

    @property
    def has_memory(self) -> bool:
        return self.backbone.has_memory

    def start(self, rows: int) -> State:
        """The state of `rows` documents of which nothing has been read."""
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
        """Logits of what follows each token, and the state.

        Args:
            tokens: numbers below the vocabulary.
            state: None at a document's start, then what the call before returned.
            mask: true where a token counts. Padding, wherever it stands, is not read; its logits are those of a
                zero vector.
            offsets: for documents packed one behind the other in a single row: 0, each one's end, the last being t.
            memory_mode: of this call; None: ``model.memory_mode``.
            memory: deprecated: use `memory_mode`.
        """
        if memory is not None:
            memory_mode = renamed_mode(memory, level=5)  # through the calls of nn.Module
        trace = self.trace(tokens, state, mask=mask, offsets=offsets, memory_mode=memory_mode)
        return self.logits(trace.hidden), trace.state

    def logits(self, hidden: Float[Tensor, "... d"]) -> Float[Tensor, "... v"]:
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
        """`forward` up to the logits, with what each memory did beside it: `Backbone.trace`."""
        if memory is not None:
            memory_mode = renamed_mode(memory)
        if self.has_memory:
            check_transforms()
        tokens = check_tokens(tokens, mask, self.vocab_size)
        text = Text(tokens, self.log_unigrams, self.logits)
        settings: dict[str, Any] = {"mask": mask, "offsets": offsets, "memory_mode": memory_mode}
        x, known = self.embed(tokens), type(self.backbone).forward is Backbone.forward
        if known and altered([self.backbone]) is None:
            return self.backbone.trace(x, state, keep=keep, text=text, **settings)
        if known:
            settings.update(keep=keep, text=text, traced=True)
        # For its hooks, or another `forward`, which may return less than a trace.
        hidden, after, *seen = self.backbone(x, state, **settings)
        return Trace(hidden, after, *seen) if seen else Trace(hidden, after, (None,) * len(self.blocks), ())

    def saved_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What a folder and a checkpoint hold: here, everything."""
        return self.named_parameters()

    def current_config(self) -> ModelConfig:
        return self.config

    def upgrade_config(self, saved: dict[str, Any], where: str) -> dict[str, Any]:
        """With the fields that are newer than the file, by default."""
        return upgraded(saved)

    def state_template(self) -> State:
        return state_template(self.config, self.embed.weight.dtype)

    def state_layout(self) -> tuple[State, list[int]]:
        return state_layout(self.config)

    def pretrained_tokenizer(self) -> None:
        return None

    def capture_unsupported_reason(self, carries: bool) -> str | None:
        """Why calls cannot be captured as CUDA graphs, for rows that carry a state or begin; None if they can."""
        reasons = (mixer.capture_unsupported_reason(carries) for mixer in self.mixers)
        return next((reason for reason in reasons if reason is not None), None)

    def decode_unsupported_reason(self, mode: Mode) -> str | None:
        """Why tokens cannot be decoded in place in this mode; None if they can."""
        reasons = (mixer.decode_unsupported_reason(mode) for mixer in self.mixers)
        return next((reason for reason in reasons if reason is not None), None)

    def describe(self) -> dict[str, Any]:
        """The configuration as a folder's config.json has it."""
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
        """The model that `save` (or ``save_pretrained`` of `remanence.hf`) wrote, in the dtype it was saved in or
        another: in the same one it computes the same to the last bit.
        """
        from remanence.folder import load_model

        return load_model(folder, device=device, dtype=dtype)


def check_tokens(tokens: Tensor, mask: object, vocab_size: int) -> Tensor:
    """The tokens, where they count, if they are of the vocabulary; 0 as padding, which may be any number."""
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


def _rename(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Weights of an earlier version, by the names of this one."""
    for name in [name for name in state_dict if name.startswith(prefix)]:
        current = prefix + current_name(name.removeprefix(prefix))
        if current != name:
            state_dict[current] = state_dict.pop(name)


def upgraded(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A saved configuration with the fields that are newer, by default; as it is if it is not one of ours."""
    try:
        return ModelConfig.from_dict(dict(saved)).to_dict()
    except (ValueError, TypeError):
        return dict(saved)


def state_template(config: ModelConfig, dtype: torch.dtype | None = None) -> State:
    """The state of one row at the start on the meta device: a store is not allocated only to be compared with."""
    with torch.device("meta"):
        return Model(config).to(dtype).start(1)


def state_layout(config: ModelConfig) -> tuple[State, list[int]]:
    """`CausalModel.state_layout` of a configuration."""
    small, places = config.condensed()
    return state_template(small), places


def parameters(config: ModelConfig) -> int:
    """How many parameters a model of this configuration has; nothing is allocated."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Model(config).parameters())


def matched(config: ModelConfig, target: int | None = None) -> ModelConfig:
    """The same with a feed-forward width that gives `target` parameters, by default those of a Transformer of the same
    preset.

    Hybrids carry attention and memory; variants compared at equal width of the feed-forward would differ by up to two
    thirds. Widths are multiples of 16, which matrix products on a GPU need to be fast (others took 4 times as long on
    an H200).
    """
    if target is None:
        target = parameters(change(config, {"pattern": ("attention",)}))
    per_unit = 3 * config.dim * config.num_layers
    rest = parameters(config) - per_unit * config.hidden
    ffn = 16 * round((target - rest) / per_unit / 16)
    if ffn < 16:
        raise ValueError(
            f"target: expected more than {rest:,}, what this model has without a feed-forward, got {target:,}"
        )
    return change(config, {"ffn": ffn})
