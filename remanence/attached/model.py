"""The class `Attached`: a pretrained model with memories. The code of the pretrained model runs unchanged,
and hooks on its attention modules call the memories.

`Attached` satisfies the protocol `remanence.model.CausalModel`, so sessions, memory files, training and
evaluation work as with a `Model`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from remanence.attached import base as pretrained
from remanence.attached.config import AttachConfig
from remanence.attached.families import add_lora, attention_modules, family_of, remove_lora
from remanence.attached.layer import AttachedLayer, windowed_attention
from remanence.attached.reading import (
    CURRENT_CALL,
    Call,
    read_full_attention,
    read_windowed,
    set_current_call,
)
from remanence.attached.store import AttachedKnn
from remanence.backbone import State, Trace
from remanence.config import MODES, Mode, change
from remanence.io.migrations import current_fields
from remanence.mixers import Mixer
from remanence.model import check_tokens
from remanence.ops.checks import check_offsets, count_documents
from remanence.runtime.choices import check_choice
from remanence.runtime.deprecation import renamed_attribute
from remanence.runtime.mode import RenamedMode, renamed_mode
from remanence.runtime.module import alteration_reason, modules_of
from remanence.runtime.positions import with_host_copy
from remanence.tokenizers.tokens import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


ATTENTION = "remanence"
"""The name under which `windowed_attention` is registered in transformers."""


class Attached(nn.Module):
    """A pretrained model with memories: ``logits, state = attached(tokens, state)``.

    `base` is the pretrained model, whose weights are frozen. `attached_layers` holds an `AttachedLayer` for
    each of its attention modules. The attention window can be changed at any time: ``attached.window = 256``.
    """

    folder: Path | None = None
    """The folder from which the model was loaded; None if it was not loaded."""
    sites = renamed_attribute("sites", "attached_layers")

    def __init__(
        self, model: PreTrainedModel, config: AttachConfig, source: pretrained.PretrainedSource | None = None
    ) -> None:
        super().__init__()
        _check_window(model, config.window)  # raise before the model is changed
        self.config = config
        self.base, self.family = model, family_of(model)
        self.source = source or pretrained.PretrainedSource(getattr(model, "name_or_path", ""))
        self._trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        if config.lora:
            add_lora(model, config.lora, config.attention or self.family.attention)
        _, modules = attention_modules(model, config.attention)
        like = self.embed.weight
        self.memories = nn.ModuleDict()
        self.attached_layers = [AttachedLayer(self, index, module) for index, module in enumerate(modules)]
        self.memories.to(like.device, like.dtype)
        self.log_unigrams = None
        self._memory_mode: Mode = "on"
        self._checkpointing = False
        self._base_attention = model.config._attn_implementation
        self._digest = pretrained.weights_key(model), config.base
        self.window = config.window

    def extra_repr(self) -> str:
        return f"layers={self.config.layers}, window={self.window}"

    def detach(self) -> PreTrainedModel:
        """Undo `attach` and return the pretrained model: remove hooks, LoRA and the window, and make the same
        parameters trainable as before.
        """
        if not self.attached_layers:
            raise ValueError("model: expected an attached model, got one that has been detached")
        if self._checkpointing:
            self.checkpointing = False
        self.window = None
        for layer in self.attached_layers:
            layer.remove()
        self.attached_layers = []
        remove_lora(self.base)
        for parameter in self._trainable:
            parameter.requires_grad_(True)
        return self.base

    # Parameters and configuration.

    def saved_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the names and parameters of memories and LoRA. Only these are trained and saved."""
        for name, parameter in self.named_parameters():
            if name.startswith("memories.") or ".lora_" in name:
                yield name, parameter

    def current_config(self) -> AttachConfig:
        """The configuration with the current digest of the pretrained model, whose weights may have changed."""
        key = pretrained.weights_key(self.base)
        if key != self._digest[0]:
            self._digest = key, pretrained.digest(self.base)
        return replace(self.config, base=self._digest[1])

    def upgrade_config(self, saved: dict[str, Any], where: str) -> dict[str, Any]:
        """Convert the fields of a saved configuration to current names. If its digest is in the earlier
        format and matches the pretrained model, replace it by the current digest and warn. `where` is the
        file name to show in the warning.
        """
        saved = AttachConfig.upgraded(current_fields("attach", saved))
        earlier = saved.get("base")
        if not pretrained.is_legacy_digest(earlier) or not pretrained.matches_digest(self.base, earlier):
            return saved
        warnings.warn(
            f"{where}: its digest covers samples of the pretrained model only; save it again for one of all weights",
            stacklevel=4,
        )
        return {**saved, "base": self.current_config().base}

    def state_template(self) -> State:
        """The initial state of one document on the meta device, for its structure, shapes and dtypes."""
        return self.start(1).map(lambda tensor: torch.empty_like(tensor, device="meta"))

    def state_layout(self) -> tuple[State, list[int]]:
        """The `state_template`, and for each layer the index of its part in it. Here, each layer has its own
        part.
        """
        return self.state_template(), list(range(self.config.num_layers))

    def pretrained_tokenizer(self) -> Tokenizer | None:
        """Load the tokenizer of the pretrained model; None if there is none."""
        return self.source.load_native_tokenizer()

    @property
    def embed(self) -> nn.Embedding:
        """The input embeddings of the pretrained model."""
        return self.base.get_input_embeddings()  # type: ignore[return-value]

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def mixers(self) -> list[Mixer]:
        """An empty list: the layers of a pretrained model are not mixers."""
        return []

    @property
    def memory_mode(self) -> Mode:
        """The memory mode of calls that do not specify one."""
        return self._memory_mode

    @memory_mode.setter
    def memory_mode(self, mode: Mode) -> None:
        self._memory_mode = self.check_mode(mode)

    memory = RenamedMode()

    def check_mode(self, mode: Mode) -> Mode:
        """Return the mode; raise a ValueError if there is no such mode."""
        check_choice("memory_mode", mode, MODES)
        return mode

    @property
    def has_memory(self) -> bool:
        return True

    @property
    def has_windows(self) -> bool:
        """Whether any layer of the pretrained model itself has a sliding window."""
        return any(layer.native_window is not None for layer in self.attached_layers)

    @property
    def window(self) -> int | None:
        """Number of tokens that attention sees, including the current one; None: the attention of the
        pretrained model. A kNN store holds what has left the window.
        """
        return self._window

    @window.setter
    def window(self, window: int | None) -> None:
        _check_window(self.base, window)
        self._window = window
        for layer in self.attached_layers:
            layer.set_window(window)
        self.base.set_attn_implementation(self._base_attention if window is None else ATTENTION)

    @property
    def threshold(self) -> float:
        """The step size below which a token is not written to neural memories (`MemoryConfig.threshold`). It
        can be set after training, and is saved with the model.
        """
        return self.config.memory.threshold

    @threshold.setter
    def threshold(self, threshold: float) -> None:
        if self.config.kind != "neural":
            raise ValueError("threshold: expected a neural memory, got a store, which has no gates")
        memory = change(self.config.memory, {"threshold": threshold})
        self.config = replace(self.config, memory=memory)
        for layer in self.memories.values():
            layer.layer.config = memory  # type: ignore[union-attr]

    @property
    def checkpointing(self) -> bool:
        """Whether activation checkpointing is used: backward recomputes the activations of each layer."""
        return self._checkpointing

    @checkpointing.setter
    def checkpointing(self, on: bool) -> None:
        before, self._checkpointing = self._checkpointing, on
        if not on:
            self.base.gradient_checkpointing_disable()
            if before:  # transformers does not remove its hook on the embeddings
                self.base.disable_input_require_grads()
            return
        # When a layer is recomputed in backward, `CURRENT_CALL` must be the call that it belongs to.
        contexts = lambda: (nullcontext(), set_current_call(CURRENT_CALL.get()))
        self.base.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})

    def current_call(self) -> Call | None:
        """The running call of this model in this thread; None if the pretrained model was called directly."""
        call = CURRENT_CALL.get()
        return call if call is not None and call.model is self else None

    @property
    def max_positions(self) -> int | None:
        """The number of learned positions, which limits the length of a text; None: no limit."""
        return self.family.max_positions(self.base)

    def capture_unsupported_reason(self, carries: bool) -> str | None:
        return "the code of a pretrained model may branch on values"

    def decode_unsupported_reason(self, memory_mode: Mode) -> str | None:
        if self._window is None:
            return "the state of a pretrained model without a window grows"
        if self.config.kind == "knn":
            return "a kNN store of a pretrained model has no decoder"
        memories = list(self.memories.values())
        if (reason := alteration_reason(modules_of(*memories))) is not None:
            return reason
        reasons = (memory.decode_unsupported_reason() for memory in memories)  # type: ignore[operator]
        return next((reason for reason in reasons if reason is not None), None)

    # Forward pass.

    def start(self, rows: int) -> State:
        """The initial state of `rows` documents."""
        zero = with_host_copy(torch.zeros(rows, dtype=torch.int64, device=self.device), [0] * rows)
        return State(tuple(layer.start(rows) for layer in self.attached_layers), zero)

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits ``[... v]`` of hidden vectors ``[... d]``, soft-capped if the pretrained model caps them
        (Gemma).
        """
        logits = self.base.get_output_embeddings()(hidden)
        cap = self.family.logit_cap(self.base.config)
        return logits if cap is None else (logits / cap).tanh() * cap

    def forward(
        self,
        tokens: Tensor,
        state: State | None = None,
        *,
        mask: Tensor | None = None,
        offsets: Tensor | Sequence[int] | None = None,
        memory_mode: Mode | None = None,
        memory: Mode | None = None,
    ) -> tuple[Tensor, State]:
        """Compute the logits of the next token at each position ``[b t v]``, and the new state, as
        `Model.forward`.
        """
        if memory is not None:
            memory_mode = renamed_mode(memory, level=5)  # through the calls of nn.Module
        trace = self.trace(tokens, state, mask=mask, offsets=offsets, memory_mode=memory_mode)
        return self.logits(trace.hidden), trace.state

    def trace(
        self,
        tokens: Tensor,
        state: State | None = None,
        *,
        mask: Tensor | None = None,
        offsets: Tensor | Sequence[int] | None = None,
        memory_mode: Mode | None = None,
        keep: bool = True,
        layers: bool = False,
        memory: Mode | None = None,
    ) -> Trace:
        """Run `forward` without the logits, as `Model.trace`. Return the inputs of the layers only if
        `layers` is set.
        """
        if memory is not None:
            memory_mode = renamed_mode(memory)
        if not self.attached_layers:
            raise ValueError("model: expected an attached model, got one that has been detached")
        tokens = check_tokens(tokens, mask, self.vocab_size)
        self._check_call(tokens, state, mask, offsets)
        mode = self._memory_mode if memory_mode is None else self.check_mode(memory_mode)
        if mask is not None and bool(mask.all()):
            mask = None
        rows = len(tokens) if offsets is None else count_documents(offsets)
        borders = check_offsets(
            offsets, tokens.shape[0], tokens.shape[1], rows if state is None else len(state.position)
        )
        self._check_length(tokens, state, mask, borders)
        if not tokens.numel():
            return Trace(
                self.embed(tokens), state or self.start(rows), (None,) * len(self.attached_layers), ()
            )
        if self._window is None:
            return read_full_attention(self, tokens, state, mask, borders, mode, keep, layers)
        return read_windowed(self, tokens, state, mask, borders, mode, keep, layers)

    def check_state(self, state: object) -> None:
        """Raise a ValueError for a state of another model, or of this one with another window."""
        if not isinstance(state, State) or len(state.blocks) != len(self.attached_layers):
            raise ValueError(
                f"state: expected the State this model returned, or None, got {type(state).__name__}"
            )
        for layer, part in zip(self.attached_layers, state.blocks, strict=True):
            layer.check(part)

    def _check_call(self, tokens: Tensor, state: object, mask: object, offsets: object) -> None:
        """Raise a ValueError for a state of another model, a mask of a wrong shape or dtype, or both mask and
        offsets.
        """
        if state is not None:
            self.check_state(state)
        if mask is None:
            return
        if offsets is not None:
            raise ValueError(
                "offsets: expected None beside a mask, got both; a mask already says where each document lies"
            )
        if not isinstance(mask, Tensor) or mask.shape != tokens.shape or mask.dtype != torch.bool:
            got = f"{list(mask.shape)} {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(
                f"mask: expected booleans of shape {list(tokens.shape)}, true where a token counts, got {got}"
            )

    def _check_length(
        self, tokens: Tensor, state: State | None, mask: Tensor | None, borders: list[int] | None
    ) -> None:
        """Raise a ValueError if a text, including the tokens read before, has more tokens than learned
        positions.
        """
        limit = self.max_positions
        if limit is None:
            return
        new = torch.tensor(tokens.shape[1]) if mask is None else mask.sum(1).cpu()
        new = new if borders is None else torch.tensor(borders).diff()
        longest = int((new + (0 if state is None else state.position.cpu())).max())
        if longest > limit:
            raise ValueError(
                f"tokens: expected texts of at most {limit:,} tokens, the learned positions of "
                f"{self.base.config.model_type}, got {longest:,}"
            )

    def describe(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        from remanence.attached.folder import describe

        return describe(self)

    def save(self, folder: str | Path) -> None:
        """Write the configuration, the new parameters, and the name and digest of the pretrained model."""
        from remanence.attached.folder import save

        save(self, folder)

    def fit_window(self, state: State) -> State | None:
        """Convert a state that this model made with a larger window to the current window. Attention drops old
        tokens, which a kNN store takes. None if the state has a smaller window, because it lacks tokens that the
        current window sees.
        """
        if self._window is None:
            return state
        blocks = []
        for layer, part in zip(self.attached_layers, state.blocks, strict=True):
            assert layer.window_spec is not None
            history = layer.window_spec.history
            if history > part.attention.window.k.shape[1]:
                return None
            memory = part.memory
            if isinstance(layer.memory, AttachedKnn):
                memory = layer.memory.fit_window(memory)
            blocks.append(part._replace(attention=part.attention.shorten(history), memory=memory))
        return state._replace(blocks=tuple(blocks))


def _check_window(model: PreTrainedModel, window: int | None) -> None:
    """Raise a ValueError if a model cannot have a window; otherwise register `windowed_attention` in
    transformers. Does nothing if `window` is None.
    """
    if window is None:
        return
    if (reason := family_of(model).window_unsupported_reason(model)) is not None:
        raise ValueError(f"window: expected None for {reason}; got {window}")
    from transformers import AttentionInterface

    # transformers computes no masks for attention functions that are not its own.
    AttentionInterface.register(ATTENTION, windowed_attention)
