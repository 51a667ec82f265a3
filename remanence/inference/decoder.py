"""One token after the other, as fast as the device goes: a model's state in fixed buffers, written in place.

A step has fixed shapes and decides everything on the device, so that nothing waits for the host and, on CUDA, the whole
of it is one captured graph. Each mixer brings its own decoder. The state comes in and goes out as the ordinary `State`,
and is the caller's own both times.
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
from remanence.runtime.module import Watch, altered, described, modules_of, ours, overridden


def unsupported(model: Model, memory_mode: Mode | None = None) -> str | None:
    """Why a `Decoder` cannot run this model in this mode, in words; None if it can."""
    mode = memory_mode or model.memory_mode
    if mode == "fresh":
        return "memories that begin anew at every segment are not decoded in place"
    if torch.is_autocast_enabled(model.embed.weight.device.type):
        return "autocast is on, and decoding runs in the dtype of the weights"
    if (reason := model.decode_unsupported_reason(mode)) is not None:
        return reason
    if (name := overridden(model, "decode_unsupported_reason", ("forward", "trace"))) is not None:
        return f"{type(model).__name__} overrides {name} and not decode_unsupported_reason"
    if not ours(model.backbone):
        return f"{type(model.backbone).__name__} is a backbone of another class"
    if (reason := altered([model.backbone])) is not None:
        return reason
    reasons = (ForwardDecoder.unsupported(block.mixer) for block in model.blocks if not in_place(block))  # type: ignore[arg-type]
    return next((reason for reason in reasons if reason is not None), None)


def in_place(block: Any) -> bool:
    """Whether the decoder of a block's mixer computes what a call of the block does: nothing in it is overridden,
    replaced or hooked. If not, the block is called.
    """
    mixer, modules = block.mixer, modules_of(block)
    known = described(mixer, "decoder")
    if type(mixer).decoder is Mixer.decoder:  # which calls the mixer
        known = set(modules_of(mixer))
    elif overridden(mixer, "decoder") is not None:
        return False
    return altered(modules) is None and all(ours(module) or module in known for module in modules)


class Decoder:
    """``logits = Decoder(model, state).step(tokens)``, token after token; ``.state`` says where it stands.

    `memory_mode` is that of all its steps, by default the model's. `graph` says whether a step is captured as
    a CUDA graph: by default on CUDA, if the steps of all layers can be. The weights must stay where they are;
    persistent tokens are read once.
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
        self.model, self.mode = model, model.check_mode(memory_mode or model.memory_mode)
        self.device = model.embed.weight.device
        if graph and self.device.type != "cuda":
            raise ValueError(f"graph: expected None or False for a model on {self.device.type}, got True")
        self.wanted = graph
        self._check(state)
        self._begin(state)

    def _check(self, state: State) -> None:
        if not isinstance(state, State):
            raise ValueError(
                f"state: expected the State that this model returned, got {type(state).__name__}"
            )
        self.model.backbone.check_state(state)

    @torch.no_grad()
    def _begin(self, state: State) -> None:
        self.watch = Watch(self.model)
        self.called = None if unsupported(self.model, self.mode) is None else state
        pairs = zip(self.model.blocks, state.blocks, strict=True) if self.called is None else ()
        self.decoders = [_decoder(block, part, self.mode) for block, part in pairs]
        fixed = self.device.type == "cuda" and all(decoder.is_capturable for decoder in self.decoders)
        self.captures = (fixed if self.wanted is None else self.wanted) and altered(
            self.watch.modules
        ) is None
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
        """Read one token ``[b]`` of each row that is active ``[b]`` (all, if None); logits ``[b v]`` of what follows
        it.

        Rows that are not active stay as they are, and their logits mean nothing.
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
        """A step by a call of the model, which has come to have hooks or modules that no decoder honours."""
        mask = None if active is None else active.unsqueeze(1)
        with torch.autocast(self.device.type, enabled=False):
            trace = self.model.trace(tokens.unsqueeze(1), state, mask=mask, memory_mode=self.mode)
            self.called = trace.state
            return self.model.logits(trace.hidden)[:, 0]

    def _forward(self) -> Tensor:
        text = Text(self.tokens.unsqueeze(1), self.model.log_unigrams, self.model.logits)
        now = StepContext(self.position, self.active, {}, text)
        block: Any
        with torch.autocast(self.device.type, enabled=False):  # in the dtype of the weights, whoever asks
            x = self.model.embed(self.tokens).unsqueeze(1)
            for block, decoder in zip(self.model.blocks, self.decoders, strict=True):
                if isinstance(decoder, ForwardDecoder) and decoder.mixer is block:
                    x = decoder.step(x, now)
                else:
                    x = block.residual_ffn(x, decoder.step(block.norm_mixer(x, matmul_dtype(x)), now))
            hidden = self.model.backbone.norm(x)
            for decoder in self.decoders:
                decoder.finish(hidden, now)
            self.position += self.active
            return self.model.logits(hidden)[:, 0]

    def _capture(self) -> None:
        """Everything is run before it is captured, for what is loaded or compiled on first use; with no row active, so
        that nothing changes.
        """
        self.active.fill_(False)
        self.graph, self.logits = capture(self._forward, self.device)

    @property
    def diverged(self) -> Tensor:
        """Per row ``[b]``, as the state's; not one that is about to show in the next token's answers."""
        if self.called is not None:
            return self.called.diverged
        flags = [flag for decoder in self.decoders if (flag := decoder.diverged) is not None]
        return torch.stack(flags).any(0) if flags else torch.zeros_like(self.active)

    @property
    @torch.no_grad()
    def state(self) -> State:
        """The state after all steps so far, to go on with anywhere."""
        if self.called is not None:
            return self.called
        return State(tuple(decoder.state(self.position) for decoder in self.decoders), self.position.clone())


def _decoder(block: Any, state: Any, mode: Mode) -> MixerDecoder:
    return block.mixer.decoder(state, mode) if in_place(block) else ForwardDecoder(block, state, mode)
