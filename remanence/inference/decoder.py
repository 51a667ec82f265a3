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
from remanence.layers.decoding import StepContext
from remanence.mixers import Text
from remanence.model import Model
from remanence.runtime.graphs import capture


def unsupported(model: Model, memory: Mode | None = None) -> str | None:
    """Why a `Decoder` cannot run this model in this mode, in words; None if it can."""
    if (memory or model.memory) == "fresh":
        return "memories that begin anew at every segment are not decoded in place"
    if torch.is_autocast_enabled(model.embed.weight.device.type):
        return "autocast is on, and decoding runs in the dtype of the weights"
    return model.undecodable(memory or model.memory)


class Decoder:
    """``logits = Decoder(model, state).step(tokens)``, token after token; ``.state`` says where it stands.

    `memory` is the mode for all of its steps, the model's own unless given. `graph` says whether a step is captured as
    a CUDA graph: by default on CUDA, if the steps of all layers can be. The weights must stay where they are;
    persistent tokens are read once.
    """

    def __init__(
        self, model: Model, state: State, memory: Mode | None = None, graph: bool | None = None
    ) -> None:
        reason = unsupported(model, memory)
        if reason is not None:
            raise ValueError(f"model: expected one that can be decoded in place, but {reason}")
        self.model, self.mode = model, model.backbone.check_mode(memory or model.memory)
        self.device = model.embed.weight.device
        if graph and self.device.type != "cuda":
            raise ValueError(f"graph: expected None or False for a model on {self.device.type}, got True")
        self._check(state)
        self._begin(state)
        fixed = all(decoder.captured for decoder in self.decoders)
        self.captures = (self.device.type == "cuda" and fixed) if graph is None else graph

    def _check(self, state: State) -> None:
        if not isinstance(state, State):
            raise ValueError(
                f"state: expected the State that this model returned, got {type(state).__name__}"
            )
        self.model.backbone.check_state(state)

    @torch.no_grad()
    def _begin(self, state: State) -> None:
        pairs = zip(self.model.mixers, state.blocks, strict=True)
        self.decoders = [mixer.decoder(part, self.mode) for mixer, part in pairs]
        self.position = state.position.clone()
        self.tokens, self.active = (
            torch.zeros_like(self.position),
            torch.zeros_like(self.position, dtype=torch.bool),
        )
        self.room = min((decoder.room for decoder in self.decoders if decoder.room is not None), default=None)
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
        if self.room is not None:
            if self.room == 0:
                self._begin(self.state)
            self.room -= 1
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

    def _forward(self) -> Tensor:
        text = Text(self.tokens.unsqueeze(1), self.model.log_unigrams, self.model.logits)
        now = StepContext(self.position, self.active, {}, text)
        block: Any
        with torch.autocast(self.device.type, enabled=False):  # in the dtype of the weights, whoever asks
            x = self.model.embed(self.tokens).unsqueeze(1)
            for block, decoder in zip(self.model.blocks, self.decoders, strict=True):
                x = x + decoder.step(block.norm_mixer(x), now)
                x = x + block.ffn(block.norm_ffn(x))
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
        flags = [flag for decoder in self.decoders if (flag := decoder.diverged) is not None]
        return torch.stack(flags).any(0) if flags else torch.zeros_like(self.active)

    @property
    @torch.no_grad()
    def state(self) -> State:
        """The state after all steps so far, to go on with anywhere."""
        return State(tuple(decoder.state(self.position) for decoder in self.decoders), self.position.clone())
