"""A pretrained model with memories: the model's own code runs, and hooks at its attention modules do the rest.

It satisfies `remanence.model.CausalModel`, so that sessions, memory files, training and evaluation take it as they take
a `Model`: tokens and a state in, hidden vectors and a state out.
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
from remanence.attached.reading import CALL, Call, during, read_whole, read_window
from remanence.attached.site import Site
from remanence.backbone import State, Trace
from remanence.config import MODES, Mode, change
from remanence.io.migrations import current_fields
from remanence.layers.attention import AttentionState
from remanence.model import check_tokens
from remanence.ops.checks import check_offsets, count_documents
from remanence.runtime.choices import check_choice
from remanence.runtime.mode import RenamedMode, renamed_mode
from remanence.runtime.positions import with_host_copy
from remanence.tokenizers.tokens import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


ATTENTION = "remanence"
"""What transformers calls the attention of a narrowed model."""


class Attached(nn.Module):
    """``logits, state = attached(tokens, state)``, a `CausalModel`.

    `base` is the pretrained model, whose weights are frozen; `sites` are its attention modules and what stands beside
    them. ``attached.window`` narrows attention further, or widens it again.
    """

    folder: Path | None = None

    def __init__(
        self, model: PreTrainedModel, config: AttachConfig, source: pretrained.Source | None = None
    ) -> None:
        super().__init__()
        _check_window(model, config.window)  # before anything is changed
        self.config: Any = config
        self.base, self.family = model, family_of(model)
        self.source = source or pretrained.Source(getattr(model, "name_or_path", ""))
        self._trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        if config.lora:
            add_lora(model, config.lora, config.attention or self.family.attention)
        _, modules = attention_modules(model, config.attention)
        like = self.embed.weight
        self.memories = nn.ModuleDict()
        self.sites = [Site(self, index, module) for index, module in enumerate(modules)]
        self.memories.to(like.device, like.dtype)
        self.log_unigrams = None
        self._memory_mode: Mode = "on"
        self._checkpointing = False
        self._plain = model.config._attn_implementation
        self._digest = pretrained.weights_key(model), config.base
        self.window = config.window

    def extra_repr(self) -> str:
        return f"layers={self.config.layers}, window={self.window}"

    def detach(self) -> Any:
        """The pretrained model as it was before: without hooks, LoRA and a window, and trainable where it was."""
        if not self.sites:
            raise ValueError("model: expected an attached model, got one that has been detached")
        if self._checkpointing:
            self.checkpointing = False
        self.window = None
        for site in self.sites:
            site.remove()
        self.sites = []
        remove_lora(self.base)
        for parameter in self._trainable:
            parameter.requires_grad_(True)
        return self.base

    # What was trained, and what was there before.

    def saved_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What the pretrained model did not have: all that is trained and saved."""
        for name, parameter in self.named_parameters():
            if name.startswith("memories.") or ".lora_" in name:
                yield name, parameter

    def current_config(self) -> AttachConfig:
        """The configuration with the digest of the pretrained model as it is now, should its weights have changed."""
        key = pretrained.weights_key(self.base)
        if key != self._digest[0]:
            self._digest = key, pretrained.digest(self.base)
        return replace(self.config, base=self._digest[1])

    def upgrade_config(self, saved: dict[str, Any], where: str) -> dict[str, Any]:
        """With present names, and the present digest if an earlier one is of the same pretrained model."""
        saved = current_fields("attach", saved)
        earlier = saved.get("base")
        if not pretrained.is_earlier(earlier) or not pretrained.same_base(self.base, earlier):
            return saved
        warnings.warn(
            f"{where}: its digest covers samples of the pretrained model only; save it again for one of all weights",
            stacklevel=4,
        )
        return {**saved, "base": self.current_config().base}

    def state_template(self) -> State:
        return self.start(1).map(lambda tensor: torch.empty_like(tensor, device="meta"))

    def state_layout(self) -> tuple[State, list[int]]:
        return self.state_template(), list(range(self.config.num_layers))

    def pretrained_tokenizer(self) -> Tokenizer | None:
        return self.source.own_tokenizer()

    @property
    def embed(self) -> Any:
        return self.base.get_input_embeddings()

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def mixers(self) -> list[Any]:
        """None: the layers are the pretrained model's."""
        return []

    @property
    def memory_mode(self) -> Mode:
        return self._memory_mode

    @memory_mode.setter
    def memory_mode(self, mode: Mode) -> None:
        self._memory_mode = self.check_mode(mode)

    memory = RenamedMode()

    def check_mode(self, mode: Mode) -> Mode:
        """The mode, if it is one."""
        check_choice("memory_mode", mode, MODES)
        return mode

    @property
    def has_memory(self) -> bool:
        return True

    @property
    def has_windows(self) -> bool:
        """Whether some layers see a sliding window as the model was made."""
        return any(site.own_window is not None for site in self.sites)

    @property
    def window(self) -> int | None:
        return self._window

    @window.setter
    def window(self, window: int | None) -> None:
        _check_window(self.base, window)
        self._window = window
        self.base.set_attn_implementation(self._plain if window is None else ATTENTION)

    @property
    def threshold(self) -> float:
        """The step at which neural memories pass a token over, as `MemoryConfig.threshold`. It may be set after
        training, and is saved: tokens below it then do not overwrite the memory.
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
        return self._checkpointing

    @checkpointing.setter
    def checkpointing(self, on: bool) -> None:
        before, self._checkpointing = self._checkpointing, on
        if not on:
            self.base.gradient_checkpointing_disable()
            if before:  # transformers leaves its hook at the embeddings
                self.base.disable_input_require_grads()
            return
        # What is computed again must find the call it belongs to.
        contexts = lambda: (nullcontext(), during(CALL.get()))
        self.base.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})

    def current_call(self) -> Call | None:
        """The call of this model that runs in this thread; None if the pretrained model is called by itself."""
        call = CALL.get()
        return call if call is not None and call.model is self else None

    @property
    def max_positions(self) -> int | None:
        """The longest text, for a base with learned positions; None: no limit."""
        return self.family.max_positions(self.base)

    def capture_unsupported_reason(self, carries: bool) -> str | None:
        return "a pretrained model's own code runs, which may decide on the host"

    def decode_unsupported_reason(self, mode: Mode) -> str | None:
        return "a pretrained model's own code runs, which has no decoder"

    # Reading.

    def start(self, rows: int) -> State:
        nothing = with_host_copy(torch.zeros(rows, dtype=torch.int64, device=self.device), [0] * rows)
        return State(tuple(site.start(rows) for site in self.sites), nothing)

    def start_attention(self, rows: int, site: Site) -> Any:
        """Of one layer, before anything is read."""
        _, heads, width = self.config.heads
        like = self.embed.weight
        if self._window is not None:
            return site.reach.start(rows, heads, like.detach(), width)
        none = like.new_zeros(rows, 0, heads, width, requires_grad=False)
        nothing = with_host_copy(torch.zeros(rows, dtype=torch.int64, device=like.device), [0] * rows)
        return AttentionState(none, none, nothing, nothing)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.family.logits(self.base, hidden)

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
        """Logits ``[b t v]`` of what follows each token, and the state, as `Model.forward`."""
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
        """`forward` up to the logits, as `Model.trace`; what went into each layer is there only if asked for."""
        if memory is not None:
            memory_mode = renamed_mode(memory)
        if not self.sites:
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
            nothing = self.embed(tokens)
            return Trace(nothing, state or self.start(rows), (None,) * len(self.sites), ())
        if self._window is None:
            return read_whole(self, tokens, state, mask, borders, mode, keep, layers)
        return read_window(self, tokens, state, mask, borders, mode, keep, layers)

    def _check_call(self, tokens: Tensor, state: object, mask: Any, offsets: object) -> None:
        if state is not None and (not isinstance(state, State) or len(state.blocks) != len(self.sites)):
            raise ValueError(
                f"state: expected the State this model returned, or None, got {type(state).__name__}"
            )
        if isinstance(state, State):
            for site, part in zip(self.sites, state.blocks, strict=True):
                site.check(part)
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
        """Refuse a text that is longer than learned positions."""
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
        from remanence.attached.folder import describe

        return describe(self)

    def save(self, folder: str | Path) -> None:
        """Write what is new: configuration and weights of the memories, and which model they belong to."""
        from remanence.attached.folder import save

        save(self, folder)

    def narrowed(self, state: State) -> State | None:
        """A state of this model with another window, for the window of now; None if that one was shorter: what this
        window would see was not kept.
        """
        if self._window is None:
            return state
        pairs = zip(self.sites, state.blocks, strict=True)
        shorter = [site.reach.history - part.attention.window.k.shape[1] for site, part in pairs]
        if max(shorter) > 0:
            return None
        return state._replace(
            blocks=tuple(site.narrowed(part) for site, part in zip(self.sites, state.blocks, strict=True))
        )


def _check_window(model: PreTrainedModel, window: int | None) -> None:
    """Refuse to narrow what is not known; make transformers know how, for the others."""
    if window is None:
        return
    if (reason := family_of(model).why_not_narrowed(model)) is not None:
        raise ValueError(f"window: expected None for {reason}; got {window}")
    _register()


def _register() -> None:
    """Tell transformers of attention over windows; it makes no masks for what it does not know."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attend)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, scaling: float,
    softcap: float | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers calls with queries, keys and values ``[b h t e]``, rotated."""
    site: Site = module.remanence_site  # type: ignore[assignment]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return site.attend(module, q, k, v, scaling, softcap), None
