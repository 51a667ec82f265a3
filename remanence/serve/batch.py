"""The rows of answers that are generated together, and their states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from remanence.config import Mode
from remanence.inference.decoder import Decoder
from remanence.inference.generate import decoder_for
from remanence.model import CausalModel, State

T = TypeVar("T")


class Batch(Generic[T]):
    """Rows of one memory mode that read one token each at a time: ``logits = batch.step(tokens, continues)``.

    The states are in the buffers of a decoder, if the model has one that is faster than calls of the model. A row that
    is dropped keeps its place in the buffers until rows join, or half of the places are unused.

    Attributes:
        rows: what belongs to each row.
        steps: number of steps since rows joined.
    """

    def __init__(self, model: CausalModel, memory_mode: Mode) -> None:
        self.model, self.memory_mode = model, memory_mode
        self.rows: list[T] = []
        self.steps = 0
        self._places: list[int] = []
        """The place of each row in the state."""
        self._size = 0
        """The number of places."""
        self._state: State | None = None
        self._decoder: Decoder | None = None

    def states(self, index: Sequence[int]) -> State:
        """The states of some rows, as the rows of one state."""
        places = [self._places[row] for row in index]
        if self._decoder is not None:
            return self._decoder.rows(places)
        assert self._state is not None
        return self._state if places == list(range(self._size)) else self._state.rows(places)

    def join(self, rows: Sequence[T], states: Sequence[State]) -> None:
        """Add rows, each with its state."""
        own = [self.states(range(len(self.rows)))] if self.rows else []
        self._begin([*self.rows, *rows], State.concat([*own, *states]))
        self.steps = 0

    def keep(self, on: Sequence[bool]) -> None:
        """Keep the rows whose entry is true."""
        if all(on):
            return
        index = [row for row, keeps in enumerate(on) if keeps]
        rows = [self.rows[row] for row in index]
        if not rows:
            self.rows, self._places, self._state, self._decoder = [], [], None, None
        elif self._decoder is None or 2 * len(rows) <= self._size:
            self._begin(rows, self.states(index))
        else:
            self.rows, self._places = rows, [self._places[row] for row in index]

    def _begin(self, rows: list[T], state: State) -> None:
        """Continue with these rows, whose states are those of `state`."""
        self.rows, self._places, self._size = rows, list(range(len(rows))), len(rows)
        self._decoder = decoder_for(self.model, state, self.memory_mode)
        self._state = state if self._decoder is None else None

    def step(self, tokens: Sequence[int], continues: Sequence[bool]) -> tuple[Tensor, list[bool]]:
        """Read one token in each row for which `continues` is true. Returns the logits of all rows ``[b v]`` on the
        CPU, which have a meaning for these rows only, and whether the memory of each row has diverged.
        """
        self.steps += 1
        read, active = [0] * self._size, [False] * self._size
        for place, token, on in zip(self._places, tokens, continues, strict=True):
            read[place], active[place] = token, on
        device = self.model.device
        ids = torch.tensor(read, device=device)
        mask = None if all(active) else torch.tensor(active, device=device)
        if self._decoder is not None:
            logits, diverged = self._decoder.step(ids, mask), self._decoder.diverged
        else:
            mask = None if mask is None else mask.unsqueeze(-1)
            trace = self.model.trace(ids.unsqueeze(-1), self._state, mask=mask, memory_mode=self.memory_mode)
            logits, diverged = self.model.logits(trace.hidden[:, -1]), trace.state.diverged
            self._state = trace.state
        flags = diverged.tolist()
        return logits[self._places].cpu(), [flags[place] for place in self._places]
