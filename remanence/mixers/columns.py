"""Arranges the tokens of a call in a matrix in which the segments of all rows begin at the same columns."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from remanence.layers.attention import AttentionOutput
from remanence.ops.layout import gather_or_zero


class SegmentSpan(NamedTuple):
    """One segment of all rows."""

    segment: int
    """The index of the segment."""
    first: int
    """The first column that contains a token of the call in any row."""
    last: int
    """The end of the columns that contain tokens of the call: the last of them plus 1."""
    ended: Tensor | None
    """Whether each row has completed the previous segment ``[r]``; None if no row has."""


class SegmentColumns:
    """The open segment of each row followed by the row's tokens of the call, arranged so that the segments of
    all rows begin at the same columns::

        row 0    [ o o o x ] [ x x x x ] [ x . . . ]        o read before, x token of the call, . padding
        row 1    [ o x x x ] [ x x . . ] [ . . . . ]

    `lead` is the number of tokens in each row's open segment, `window` the number of tokens in a segment.
    """

    def __init__(
        self, local: AttentionOutput, lead: list[int], offsets: list[int] | None, window: int
    ) -> None:
        tokens, self.window, self.lead = local.q.shape[1], window, lead
        self.counts = [tokens] * len(lead) if offsets is None else [b - a for a, b in pairwise(offsets)]
        self.totals = [a + b for a, b in zip(lead, self.counts, strict=True)]
        self.segments = max(1, -(-max(self.totals) // window))
        self.tokens, self.device = tokens, local.q.device
        self.is_uniform = len(set(lead)) == 1 and len(set(self.counts)) == 1
        self._lead, self._total = (
            torch.tensor(numbers, device=self.device) for numbers in (lead, self.totals)
        )
        self.spans = [part for part in map(self._span, range(self.segments)) if part is not None]

    def _span(self, index: int) -> SegmentSpan | None:
        """The span of segment `index`; None if no row has a token of the call in it."""
        begin, end = index * self.window, (index + 1) * self.window
        spans = [(max(a, begin), min(b, end)) for a, b in zip(self.lead, self.totals, strict=True)]
        spans = [span for span in spans if span[0] < span[1]]
        if not spans:
            return None
        over = index > 0 and any(total > begin for total in self.totals)
        return SegmentSpan(
            index,
            min(span[0] for span in spans),
            max(span[1] for span in spans),
            self._total > begin if over else None,
        )

    def align(self, old: Tensor, new: Tensor) -> Tensor:
        """Join open segments, `old` ``[r w ...]``, and rows of the call, `new` ``[r t ...]``, to
        ``[r columns ...]``.
        """
        new = new.to(old.dtype)
        if self.is_uniform:
            return self._pad(torch.cat([old[:, : self.lead[0]], new], 1))
        both = torch.cat([old.flatten(0, 1), new.flatten(0, 1)])
        return gather_or_zero(both, torch.tensor([self._source_index(row) for row in range(len(self.lead))]))

    def queries(self, q: Tensor) -> Tensor:
        """Arrange the queries of the call ``[r t ...]`` in columns ``[r columns ...]``, with zeros for
        earlier tokens.
        """
        return self.align(q.new_zeros(len(self.lead), self.window, *q.shape[2:]), q)

    def _source_index(self, row: int) -> list[int]:
        """For each column of a row, the index of its token in the concatenation of all flattened open
        segments and all flattened rows of the call; -1 for padding.
        """
        before, behind = row * self.window, len(self.lead) * self.window + row * self.tokens
        index = [*range(before, before + self.lead[row]), *range(behind, behind + self.counts[row])]
        return index + [-1] * (self.segments * self.window - len(index))

    def _pad(self, x: Tensor) -> Tensor:
        """Pad the columns of x ``[r columns ...]`` with zeros to whole segments."""
        return F.pad(x, [0, 0] * (x.dim() - 2) + [0, self.segments * self.window - x.shape[1]])

    def is_call_token(self, column: Tensor) -> Tensor:
        """Whether each of the given columns contains a token of the call ``[r columns]``."""
        return (column >= self._lead.unsqueeze(-1)) & (column < self._total.unsqueeze(-1))

    def to_call_rows(self, found: list[Tensor], spans: list[tuple[int, int]]) -> Tensor:
        """Arrange results `found` for ranges of columns, `spans`, as rows of the call ``[r t ...]``."""
        joined = torch.cat(found, 1)
        if self.is_uniform:
            return joined
        place = {column: index for index, column in enumerate(c for span in spans for c in range(*span))}
        index = torch.full((len(self.lead), self.tokens), -1)
        for row, (lead, count) in enumerate(zip(self.lead, self.counts, strict=True)):
            index[row, :count] = (
                torch.tensor([place[lead + i] for i in range(count)], dtype=torch.int64)
                + row * joined.shape[1]
            )
        return gather_or_zero(joined.flatten(0, 1), index)

    def open_segment(self, x: Tensor) -> Tensor:
        """The last segment of each row ``[r w ...]``, which stays open after the call. The result is a copy,
        because a view would keep the whole call in memory.
        """
        last = [max(0, -(-total // self.window) - 1) for total in self.totals]
        if len(set(last)) == 1:
            return x[:, last[0] * self.window : (last[0] + 1) * self.window].clone()
        pieces = [x[row, index * self.window : (index + 1) * self.window] for row, index in enumerate(last)]
        return torch.stack(pieces)
