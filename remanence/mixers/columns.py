"""The tokens of a call in columns, so that the segments of rows that stand at different places begin side by side."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from remanence.layers.attention import AttentionOutput
from remanence.ops.layout import gather_or_zero


class SegmentSpan(NamedTuple):
    """One segment of every row: its number, its columns with a token of the call in any row, and the rows that have
    ended the segment before it (None: no row has).
    """

    segment: int
    first: int
    last: int
    ended: Tensor | None


class SegmentColumns:
    """A call's tokens in columns behind their rows' open segments, so that all rows' segments begin at the same
    columns::

    row 0    [ o o o x ] [ x x x x ] [ x . . . ]        o read before, x the call's
    row 1    [ o x x x ] [ x x . . ] [ . . . . ]
    """

    def __init__(
        self, local: AttentionOutput, lead: list[int], offsets: list[int] | None, window: int
    ) -> None:
        tokens, self.window, self.lead = local.q.shape[1], window, lead
        self.counts = [tokens] * len(lead) if offsets is None else [b - a for a, b in pairwise(offsets)]
        self.totals = [a + b for a, b in zip(lead, self.counts, strict=True)]
        self.segments = max(1, -(-max(self.totals) // window))
        self.tokens, self.device = tokens, local.q.device
        self.uniform = len(set(lead)) == 1 and len(set(self.counts)) == 1
        self._lead, self._total = (
            torch.tensor(numbers, device=self.device) for numbers in (lead, self.totals)
        )
        self.parts = [part for part in map(self._part, range(self.segments)) if part is not None]

    def _part(self, index: int) -> SegmentSpan | None:
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

    def columns(self, old: Tensor, new: Tensor) -> Tensor:
        """Open segments ``[r w ...]`` and the call's rows ``[r t ...]`` as ``[r columns ...]``."""
        new = new.to(old.dtype)
        if self.uniform:
            return self._filled(torch.cat([old[:, : self.lead[0]], new], 1))
        both = torch.cat([old.flatten(0, 1), new.flatten(0, 1)])
        return gather_or_zero(both, torch.tensor([self._places(row) for row in range(len(self.lead))]))

    def queries(self, q: Tensor) -> Tensor:
        return self.columns(q.new_zeros(len(self.lead), self.window, *q.shape[2:]), q)

    def _places(self, row: int) -> list[int]:
        before, behind = row * self.window, len(self.lead) * self.window + row * self.tokens
        index = [*range(before, before + self.lead[row]), *range(behind, behind + self.counts[row])]
        return index + [-1] * (self.segments * self.window - len(index))

    def _filled(self, x: Tensor) -> Tensor:
        return F.pad(x, [0, 0] * (x.dim() - 2) + [0, self.segments * self.window - x.shape[1]])

    def live(self, column: Tensor) -> Tensor:
        """Which columns are tokens of the call ``[r columns]``."""
        return (column >= self._lead.unsqueeze(-1)) & (column < self._total.unsqueeze(-1))

    def back(self, found: list[Tensor], spans: list[tuple[int, int]]) -> Tensor:
        """What was found in each part, its columns given, as the call's rows ``[r t ...]``."""
        joined = torch.cat(found, 1)
        if self.uniform:
            return joined
        place = {column: index for index, column in enumerate(c for span in spans for c in range(*span))}
        index = torch.full((len(self.lead), self.tokens), -1)
        for row, (lead, count) in enumerate(zip(self.lead, self.counts, strict=True)):
            index[row, :count] = (
                torch.tensor([place[lead + i] for i in range(count)], dtype=torch.int64)
                + row * joined.shape[1]
            )
        return gather_or_zero(joined.flatten(0, 1), index)

    def left(self, x: Tensor) -> Tensor:
        """Each row's last segment ``[r w ...]``, which stays open. Never a view, which keeps a whole call."""
        last = [max(0, -(-total // self.window) - 1) for total in self.totals]
        if len(set(last)) == 1:
            return x[:, last[0] * self.window : (last[0] + 1) * self.window].clone()
        pieces = [x[row, index * self.window : (index + 1) * self.window] for row, index in enumerate(last)]
        return torch.stack(pieces)
