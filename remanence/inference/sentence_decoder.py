"""Decoding of answers of a `SentenceModel`, one token at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from remanence.attached.sentences.call import with_answer_tokens
from remanence.attached.sentences.model import SentenceModel
from remanence.attached.sentences.segments import ANSWER, Position
from remanence.backbone import State
from remanence.config import Mode
from remanence.inference.attached_decoder import AttachedDecoder
from remanence.inference.decoder import DECODERS, unsupported
from remanence.runtime.positions import positions_of


class SentenceDecoder:
    """Decodes a `SentenceModel` token by token, as `remanence.inference.decoder.Decoder`.

    While all rows are in open answers, the pretrained model and the adapter are decoded in place. A step in which an
    answer ends, and other text, call the model.
    """

    is_faster_on_cpu = True

    def __init__(
        self,
        model: SentenceModel,
        state: State,
        memory_mode: Mode | None = None,
        graph: bool | None = None,
    ) -> None:
        if (reason := unsupported(model, memory_mode)) is not None:  # type: ignore[arg-type]
            raise ValueError(f"model: expected one that can be decoded in place, but {reason}")
        self.model, self.wanted = model, graph
        self.memory_mode = model.check_mode(memory_mode or model.memory_mode)
        model._check(state, len(state.position))
        self._begin(state)

    @staticmethod
    def layers_unsupported_reason(model: Any) -> str | None:
        return AttachedDecoder.layers_unsupported_reason(model.attached)

    def _begin(self, state: State) -> None:
        """Continue from a state."""
        self.before, own = state, state.blocks[-1]
        self.places = [Position(*scan[:-1]) for scan in own.scan.tolist()]
        self.positions = positions_of(state.position)
        self.tokens: list[list[int]] = [[] for _ in self.positions]
        self.inner: AttachedDecoder | None = None
        if own.answer is not None and all(place.part == ANSWER for place in self.places):
            adapter = self.model.adapter
            self.inner = AttachedDecoder(
                self.model.attached,
                own.answer,
                "on",
                self.wanted,
                context=adapter.active,
                own_hooks=[hook.id for hook in adapter.hooks],
            )

    def _continues(self, row: int, token: int) -> bool:
        """Whether a token belongs to the open answer of a row."""
        at = self.positions[row] + len(self.tokens[row])
        return self.model.segmenter.answer_length(np.array([token]), at, self.places[row]) > 0

    @torch.no_grad()
    def step(self, tokens: Tensor, active: Tensor | None = None) -> Tensor:
        """Read one token ``[b]`` of each active row and return the logits of the next token ``[b v]``, as
        `Decoder.step`.
        """
        ids = tokens.tolist()
        on = [True] * len(ids) if active is None else active.tolist()
        reading = [row for row, reads in enumerate(on) if reads]
        if self.inner is None or not all(self._continues(row, ids[row]) for row in reading):
            mask = None if all(on) else active
            trace = self.model.trace(
                tokens.unsqueeze(1),
                self.state,
                mask=None if mask is None else mask.unsqueeze(1),
                memory_mode=self.memory_mode,
            )
            self._begin(trace.state)
            return self.model.logits(trace.hidden)[:, 0]
        logits = self.inner.step(tokens, active)
        for row in reading:
            self.tokens[row].append(ids[row])
        return logits

    @property
    def diverged(self) -> Tensor:
        """Whether a memory of each row has diverged ``[b]``: no memory of sentences does."""
        return torch.zeros(len(self.tokens), dtype=torch.bool, device=self.model.device)

    @property
    @torch.no_grad()
    def state(self) -> State:
        """The state after all steps so far."""
        if self.inner is None or not any(self.tokens):
            return self.before
        return with_answer_tokens(self.model, self.before, self.tokens, self.inner.state)

    @torch.no_grad()
    def rows(self, index: list[int]) -> State:
        """The state of some rows after all steps so far."""
        before = self.before.rows(index)
        if self.inner is None or not any(self.tokens):
            return before
        tokens = [self.tokens[row] for row in index]
        return with_answer_tokens(self.model, before, tokens, self.inner.rows(index))


DECODERS[SentenceModel] = SentenceDecoder
