"""Split calls whose rows are at different positions where each row's segments end, and join the results
again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class SegmentPart(NamedTuple):
    """Part of a call's tokens, with at most one segment of each row.

    `where` is a slice of the token axis, or an index into the flattened call. `offsets` are the row borders
    if the part is packed, else None. `counts` is the number of tokens of each row.
    """

    where: slice | Tensor
    offsets: list[int] | None
    counts: list[int]


class SegmentSplit:
    """A call ``[b t ...]`` split where its rows' segments of `size` tokens end. `opened` is the number of
    tokens that each row has already read of its current segment.

    If all rows are at the same place, the parts are slices of the call. Otherwise each part is packed: its
    rows are concatenated.
    """

    def __init__(self, x: Tensor, offsets: list[int] | None, opened: list[int], size: int) -> None:
        self.x, (self.batch, self.tokens) = x, x.shape[:2]
        self.parts: list[SegmentPart] = []
        self.slices: dict[int, Tensor] = {}  # one split, as each slice's gradient would be call-sized
        self.uniform = offsets is None and len(set(opened)) == 1
        if self.uniform:
            borders = [0, *range(size - opened[0], self.tokens, size), self.tokens]
            for a, b in itertools.pairwise(borders):
                self.parts.append(SegmentPart(slice(a, b), None, [b - a] * self.batch))
            self.slices = dict(
                zip(borders, x.split([part.counts[0] for part in self.parts], 1), strict=False)
            )
            return
        starts = offsets or [row * self.tokens for row in range(self.batch + 1)]
        counts = [b - a for a, b in itertools.pairwise(starts)]
        steps = max(1, *[-(-(place + count) // size) for place, count in zip(opened, counts, strict=True)])
        for step in range(steps):
            index: list[int] = []
            borders = [0]
            for start, count, place in zip(starts, counts, opened, strict=False):
                first, last = max(0, step * size - place), min(count, (step + 1) * size - place)
                index.extend(range(start + first, start + last))
                borders.append(len(index))
            here = [b - a for a, b in itertools.pairwise(borders)]
            self.parts.append(
                SegmentPart(torch.tensor(index, dtype=torch.int64, device=x.device), borders, here)
            )

    def __iter__(self) -> Iterator[SegmentPart]:
        return iter(self.parts)

    def take(self, part: SegmentPart, x: Tensor | None = None) -> Tensor:
        """Return a part of the call, or of another tensor with the same rows and tokens."""
        if isinstance(part.where, slice):
            return self.slices[part.where.start] if x is None else x[:, part.where]
        return (self.x if x is None else x).flatten(0, 1).index_select(0, part.where).unsqueeze(0)

    def join(self, pieces: list[Tensor]) -> Tensor:
        """Join one result per part and return them in the order of the call's tokens."""
        joined = torch.cat(pieces, 1)
        if self.uniform:
            return joined
        order = torch.cat([part.where for part in self.parts if isinstance(part.where, Tensor)])
        return joined[0].index_select(0, order.argsort()).unflatten(0, (self.batch, self.tokens))
