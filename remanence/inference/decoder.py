"""Fast decoding of one token at a time, with the state of the model in fixed buffers that are updated in place.

A step has fixed shapes and makes all decisions on the device. The host never waits and, on CUDA, a whole step can be
captured as one graph. Each mixer provides its own decoder. The state is passed in and returned as an ordinary `State`,
which shares no memory with the buffers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from remanence.backbone import State
from remanence.config import Mode
from remanence.layers import matmul_dtype
from remanence.layers.decoding import StepContext
from remanence.mixers import Mixer, MixerDecoder, Text
from remanence.mixers.base import ForwardDecoder
from remanence.model import Model
from remanence.runtime.graphs import capture
from remanence.runtime.mode import renamed_mode
from remanence.runtime.module import (
    Watch,
    alteration_reason,
    is_package_module,
    modules_covered_by,
    modules_of,
    overridden_method,
)

DECODERS: dict[type, Any] = {}
"""For each class of model, the class that decodes it token by token, in place."""


def decoder_class(model: object) -> Any:
    """The class that decodes a model token by token, in place; None if there is none."""
    return next((DECODERS[kind] for kind in type(model).__mro__ if kind in DECODERS), None)


def unsupported(model: Model, memory_mode: Mode | None = None) -> str | None:
    """Return the reason why a `Decoder` cannot run this model in this memory mode, or None if it can."""
    if (kind := decoder_class(model)) is None:
        return f"no decoder is known for {type(model).__name__}"
    mode = memory_mode or model.memory_mode
    if mode == "fresh":
        return "memories that are reset at every segment are not decoded in place"
    if torch.is_autocast_enabled(model.embed.weight.device.type):
        return "autocast is on, and decoding runs in the dtype of the weights"
    if (reason := model.decode_unsupported_reason(mode)) is not None:
        return reason
    if (name := overridden_method(model, "decode_unsupported_reason", ("forward", "trace"))) is not None:
        return f"{type(model).__name__} overrides {name} and not decode_unsupported_reason"
    found: str | None = kind.layers_unsupported_reason(model)
    return found


def _layers_unsupported_reason(model: Model) -> str | None:
    """Why the layers of a `Model` cannot be decoded in place; None if they can."""
    if not is_package_module(model.backbone):
        return f"{type(model.backbone).__name__} is a backbone of another class"
    if (reason := alteration_reason([model.backbone])) is not None:
        return reason
    reasons = (ForwardDecoder.unsupported(block.mixer) for block in model.blocks if not in_place(block))  # type: ignore[arg-type]
    return next((reason for reason in reasons if reason is not None), None)


def in_place(block: Any) -> bool:
    """Whether the decoder of a block's mixer computes the same as a call of the block: nothing in the block
    is overridden, replaced or hooked. Otherwise the decoder calls the block.
    """
    mixer, modules = block.mixer, modules_of(block)
    known = modules_covered_by(mixer, "decoder")
    if type(mixer).decoder is Mixer.decoder:  # the default decoder calls the mixer
        known = set(modules_of(mixer))
    elif overridden_method(mixer, "decoder") is not None:
        return False
    return alteration_reason(modules) is None and all(
        is_package_module(module) or module in known for module in modules
    )


class Decoder:
    """Decodes token by token: ``logits = Decoder(model, state).step(tokens)``; ``.state`` is the state after all steps.

    Args:
        model: a `Model` for which `unsupported` returns None. Its weights must stay at the same addresses; persistent
            tokens are read only once.
        state: the state to continue from.
        memory_mode: the memory mode of all steps. None means ``model.memory_mode``.
        graph: whether to capture a step as a CUDA graph. None means on CUDA, if the steps of all layers can
            be captured.
        memory: deprecated: use `memory_mode`.
    """

    def __init__(
        self,
        model: Model,
        state: State,
        memory_mode: Mode | None = None,
        graph: bool | None = None,
        *,
        memory: Mode | None = None,
    ) -> None:
        if memory is not None:
            memory_mode = renamed_mode(memory)
        reason = unsupported(model, memory_mode)
        if reason is not None:
            raise ValueError(f"model: expected one that can be decoded in place, but {reason}")
        self.model, self.memory_mode = model, model.check_mode(memory_mode or model.memory_mode)
        self.device = model.embed.weight.device
        if graph and self.device.type != "cuda":
            raise ValueError(f"graph: expected None or False for a model on {self.device.type}, got True")
        self.wanted = graph
        self._check(state)
        self._begin(state)

    is_faster_on_cpu = False
    """Whether decoding in place takes less time than calling the model on a CPU too."""

    @staticmethod
    def layers_unsupported_reason(model: Any) -> str | None:
        """Why the layers of a model cannot be decoded in place; None if they can."""
        return _layers_unsupported_reason(model)

    def _make_decoders(self, state: State) -> list[MixerDecoder]:
        """The decoders of all layers, with buffers made from a state."""
        pairs = zip(self.model.blocks, state.blocks, strict=True)
        return [_decoder(block, part, self.memory_mode) for block, part in pairs]

    def _altered(self) -> bool:
        """Whether the modules of the model may run code that a captured graph would not run."""
        return alteration_reason(self.watch.modules) is not None

    def _check(self, state: State) -> None:
        """Raise an error if the state does not belong to the model."""
        if not isinstance(state, State):
            raise ValueError(
                f"state: expected the State that this model returned, got {type(state).__name__}"
            )
        self.model.backbone.check_state(state)

    @torch.no_grad()
    def _begin(self, state: State) -> None:
        """Create the decoders of all layers and their buffers from a state. Called again when a buffer is
        full or the model's hooks or modules have changed.
        """
        self.watch = Watch(self.model)
        self.called = None if unsupported(self.model, self.memory_mode) is None else state
        self.decoders = [] if self.called is not None else self._make_decoders(state)
        fixed = self.device.type == "cuda" and all(decoder.is_capturable for decoder in self.decoders)
        self.captures = (fixed if self.wanted is None else self.wanted) and not self._altered()
        self.position = state.position.clone()
        self.tokens, self.active = (
            torch.zeros_like(self.position),
            torch.zeros_like(self.position, dtype=torch.bool),
        )
        self.remaining_capacity = min(
            (
                decoder.remaining_capacity
                for decoder in self.decoders
                if decoder.remaining_capacity is not None
            ),
            default=None,
        )
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def step(self, tokens: Tensor, active: Tensor | None = None) -> Tensor:
        """Read one token ``[b]`` of each active row and return the logits of the next token ``[b v]``.

        `active` ``[b]`` is true for active rows; None means all. Inactive rows keep their state, and their logits are
        meaningless.
        """
        for name, x, dtype in (("tokens", tokens, torch.int64), ("active", active, torch.bool)):
            if x is None and name == "active":
                continue
            if not isinstance(x, Tensor) or x.shape != self.position.shape or x.dtype != dtype:
                got = f"{list(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(
                    f"{name}: expected {dtype} of shape {list(self.position.shape)}, one per row, got {got}"
                )
        if self.remaining_capacity == 0 or self.watch.changed():
            self._begin(self.state)
        if self.called is not None:
            return self._call(tokens, active, self.called)
        if self.remaining_capacity is not None:
            self.remaining_capacity -= 1
        if self.captures and self.graph is None:
            self._capture()
        self.tokens.copy_(tokens)
        if active is None:
            self.active.fill_(True)
        else:
            self.active.copy_(active)
        if self.graph is None:
            return self._forward()
        self.graph.replay()
        return self.logits.clone()

    def _call(self, tokens: Tensor, active: Tensor | None, state: State) -> Tensor:
        """Run a step by calling the model. Used when hooks or modules were added that the decoders would
        ignore.
        """
        mask = None if active is None else active.unsqueeze(1)
        with torch.autocast(self.device.type, enabled=False):
            trace = self.model.trace(tokens.unsqueeze(1), state, mask=mask, memory_mode=self.memory_mode)
            self.called = trace.state
            return self.model.logits(trace.hidden)[:, 0]

    def _forward(self) -> Tensor:
        """Run one step on the tokens in the buffers and return the logits ``[b v]``."""
        text = Text(self.tokens.unsqueeze(1), self.model.log_unigrams, self.model.logits)
        ctx = StepContext(self.position, self.active, {}, text)
        block: Any
        with torch.autocast(self.device.type, enabled=False):  # use the dtype of the weights
            x = self.model.embed(self.tokens).unsqueeze(1)
            for block, decoder in zip(self.model.blocks, self.decoders, strict=True):
                if isinstance(decoder, ForwardDecoder) and decoder.mixer is block:
                    x = decoder.step(x, ctx)
                else:
                    x = block.residual_ffn(x, decoder.step(block.norm_mixer(x, matmul_dtype(x)), ctx))
            hidden = self.model.backbone.norm(x)
            for decoder in self.decoders:
                decoder.finish(hidden, ctx)
            self.position += self.active
            return self.model.logits(hidden)[:, 0]

    def _capture(self) -> None:
        """Capture a step as a CUDA graph. `capture` runs the step first, to load and compile everything; no
        row is active then, so that no state changes.
        """
        self.active.fill_(False)
        self.graph, self.logits = capture(self._forward, self.device)

    @property
    def diverged(self) -> Tensor:
        """Whether the memory of each row has diverged ``[b]``. Divergence caused by the last token may only
        show after the next step.
        """
        if self.called is not None:
            return self.called.diverged
        flags = [flag for decoder in self.decoders if (flag := decoder.diverged) is not None]
        return torch.stack(flags).any(0) if flags else torch.zeros_like(self.active)

    @property
    @torch.no_grad()
    def state(self) -> State:
        """The state after all steps so far."""
        if self.called is not None:
            return self.called
        return State(tuple(decoder.state(self.position) for decoder in self.decoders), self.position.clone())

    def rows(self, index: list[int]) -> State:
        """The state of some rows after all steps so far."""
        return self.state.rows(index)


def _decoder(block: Any, state: Any, memory_mode: Mode) -> MixerDecoder:
    """Return the mixer's own decoder for a block, or one that calls the whole block if the former would
    ignore changes.
    """
    return (
        block.mixer.decoder(state, memory_mode)
        if in_place(block)
        else ForwardDecoder(block, state, memory_mode)
    )


DECODERS[Model] = Decoder
