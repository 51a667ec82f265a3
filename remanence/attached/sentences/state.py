"""The state of a memory of sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from remanence.backbone import State
from remanence.runtime.state import TensorTuple


class _SentenceState(NamedTuple):
    keys: Tensor
    ids: Tensor
    spans: Tensor
    length: Tensor
    hidden: Tensor
    recent: Tensor
    scan: Tensor
    pending: Tensor
    skipped: Tensor
    answer: State | None = None


class SentenceState(_SentenceState, TensorTuple):
    """The sentences that a row has stored, and where its scan is.

    keys, ids, spans
        For each sentence its key ``[r n e]``, its tokens ``[r n l]`` (padded with -1), and its first and last position
        (exclusive) ``[r n 2]``, in the order in which they were read.
    length
        The number of sentences of each row ``[r]``; the entries behind it are padding.
    hidden
        Hidden states of the last tokens, the newest last ``[r h d]``, from which keys and queries are computed.
    recent
        The last tokens, the newest last ``[r w]``; -1 before the start of the document.
    scan
        The fields of `segments.Position`, then the number of tokens in `pending` ``[r s]``.
    pending
        The tokens of an open answer, which the pretrained model reads when the answer has ended ``[r p]``.
    skipped
        The number of tokens that the pretrained model no longer sees, because sentences were removed ``[r]``. For it,
        the text begins behind them.
    answer
        The pretrained model's state within an open answer. It can be computed from the other fields and is not saved;
        None if it has not been computed.
    """

    __slots__ = ()

    def variable(self) -> tuple[str, ...]:
        """The fields whose second axis may have any length."""
        return ("keys", "ids", "spans", "pending")

    def transient(self) -> tuple[str, ...]:
        """The fields that are not saved, as they can be computed from the others."""
        return ("answer",)

    def saved(self) -> SentenceState:
        """The state without transient fields, and without the padding that rows have beside longer ones."""
        sentences, pending = int(self.length.max()), int(self.scan[:, -1].max())
        return self._replace(
            keys=self.keys[:, :sentences].contiguous(),
            ids=self.ids[:, :sentences].contiguous(),
            spans=self.spans[:, :sentences].contiguous(),
            pending=self.pending[:, :pending].contiguous(),
            answer=None,
        )

    def lag(self) -> Tensor:
        """The number of tokens that the pretrained model has not read, or no longer sees ``[r]``."""
        return self.scan[:, -1] + self.skipped

    def agrees(self, read: Tensor) -> Tensor:
        """Whether the state of each row is consistent with having read this many tokens ``[r]``."""
        size = self.keys.shape[1]
        if self.ids.shape[1] != size or self.spans.shape[1] != size:
            return torch.zeros_like(read, dtype=torch.bool)
        inside = torch.arange(size, device=read.device) < self.length.unsqueeze(-1)
        start, end = self.spans.unbind(-1)
        known = (
            (start >= 0) & (start < end) & (end - start <= self.ids.shape[2]) & (end <= read.unsqueeze(-1))
        )
        pending, longest = self.scan[:, -1], self.pending.shape[1]
        positions = ((self.scan >= 0) & (self.scan <= torch.clamp(read, min=16).unsqueeze(-1) + 1)).all(1)
        return (
            (known | ~inside).all(1) & positions & (self.length >= 0) & (self.length <= size)
            & (pending >= 0) & (pending <= longest) & (self.skipped >= 0) & (pending + self.skipped <= read)
        )  # fmt: skip

    @classmethod
    def concat(cls, states: Sequence[SentenceState]) -> SentenceState:
        """One state with the rows of all states. Shorter rows are padded."""
        joined = {}
        for name in cls._fields[:-1]:
            parts = [getattr(state, name) for state in states]
            if name in states[0].variable():
                longest, value = max(part.shape[1] for part in parts), -1 if name in ("ids", "pending") else 0
                inner = (0, 0) * (parts[0].dim() - 2)
                parts = [F.pad(part, (*inner, 0, longest - part.shape[1]), value=value) for part in parts]
            joined[name] = torch.cat(parts)
        answers = [state.answer for state in states if state.answer is not None]
        known = len(answers) == len(states)
        return cls(**joined, answer=State.concat(answers) if known else None)
