"""Batches that depend only on the step, so that any step can be reproduced with any number of processes.

Documents are shuffled again for every epoch.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from remanence.data.own import OwnTokens
from remanence.data.shards import Tokens


class Batch(NamedTuple):
    """A training batch. `tokens` and `targets` are ``[b t]``; targets of -100 are ignored.

    `offsets` are the borders of packed documents, or None. `mask` is False at padding, or None without
    padding. `begins` marks rows that start a document, or is None if all do. `weights` are the loss weights
    of the targets, or None if all are 1.
    """

    tokens: Tensor
    targets: Tensor
    offsets: list[int] | None = None
    mask: Tensor | None = None
    begins: Tensor | None = None
    weights: Tensor | None = None


def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    """Return the shuffled order of `count` documents in an epoch."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(count)


class Packed:
    """Documents packed into rows of equal length, without padding. Only the remainder of each epoch is left
    out.

    A batch is one packed row ``[1 b*t]`` with the borders of documents and rows as offsets, so that no state
    crosses them.
    """

    def __init__(
        self,
        data: Tokens | OwnTokens,
        length: int,
        batch: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.data, self.length, self.batch, self.seed, self.rank, self.world_size = (
            data,
            length,
            batch,
            seed,
            rank,
            world_size,
        )
        self.rows = int((data.lengths.sum() - 1) // length)
        self.per_epoch = self.rows // (batch * world_size)
        if self.per_epoch < 1:
            raise ValueError(
                f"data: expected {batch * world_size * length + 1:,} tokens for one step, "
                f"got {int(data.lengths.sum()):,}"
            )

    @lru_cache(maxsize=2)  # noqa: B019  # two epochs' orders, for as long as this lives
    def _stream(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the order of the documents in an epoch, and the position in tokens at which each of them
        ends.
        """
        order = _order(self.seed, epoch, len(self.data))
        return order, np.cumsum(self.data.lengths[order])

    def step(self, number: int) -> Batch:
        """Return the batch of a step."""
        epoch, inside = divmod(number, self.per_epoch)
        order, ends = self._stream(epoch)
        first = (inside * self.world_size + self.rank) * self.batch
        tokens, targets, offsets = [], [], [0]
        for row in range(first, first + self.batch):
            text, borders = self._read(order, ends, row * self.length, self.length + 1)
            tokens.append(text[:-1])
            target = text[1:].copy()
            for border in borders:  # the first token of the next document is not a target
                if 0 < border <= self.length:
                    target[border - 1] = -100
                if 0 < border < self.length:
                    offsets.append(len(tokens) * self.length - self.length + border)
            targets.append(target)
            offsets.append(len(tokens) * self.length)
        joined = [torch.from_numpy(np.concatenate(part)).unsqueeze(0) for part in (tokens, targets)]
        return Batch(joined[0], joined[1], offsets, None, None)

    def _read(
        self, order: np.ndarray, ends: np.ndarray, start: int, count: int
    ) -> tuple[np.ndarray, list[int]]:
        """Return `count` tokens of the shuffled stream from `start` on, and the positions at which documents
        begin in them.
        """
        index = int(np.searchsorted(ends, start, "right"))
        pieces, borders, have = [], [], 0
        while have < count:
            document = int(order[index])
            skip = start + have - (int(ends[index]) - int(self.data.lengths[document]))
            piece = self.data.piece(document, skip, skip + count - have)
            if skip == 0:
                borders.append(have)
            pieces.append(piece.astype(np.int64))
            have += len(piece)
            index += 1
        return np.concatenate(pieces), borders


class Documents:
    """Whole documents in order: each row reads one document to its end in pieces, with the memory carried,
    then the next.

    Documents are shuffled and assigned to rows again for every epoch. A row that has finished its documents
    continues with the next epoch while others still read. `begins` marks rows that start a document, where
    the state must be reset. The last piece of a document is padded.
    """

    def __init__(
        self,
        data: Tokens | OwnTokens,
        length: int,
        batch: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.data, self.length, self.batch, self.seed, self.rank, self.world_size = (
            data,
            length,
            batch,
            seed,
            rank,
            world_size,
        )
        if len(data) < batch * world_size:
            fewer = (
                f"--batch={len(data) // world_size} reads so many at once, "
                if len(data) >= world_size
                else ""
            )
            raise ValueError(
                f"data: expected at least {batch * world_size} documents, one for each row, got {len(data)}; {fewer}"
                "`remanence train --text FILE` cuts a text into as many as it needs, and --data.kind=packed "
                "--carry=false reads rows of any"
            )
        # For each row, the step after the last step of each epoch.
        self.ends: list[list[int]] = [[] for _ in range(batch)]
        self._shuffled = lru_cache(8)(lambda epoch: _order(seed, epoch, len(data)))
        self._dealt = lru_cache(2 * batch)(self._deal)

    def _deal(self, row: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the documents of a row in an epoch, and the cumulative number of their pieces."""
        own = self._shuffled(epoch)[self.rank * self.batch + row :: self.batch * self.world_size]
        return own, np.cumsum(np.maximum(1, -(-(self.data.lengths[own] - 1) // self.length)))

    def locate(self, row: int, number: int) -> tuple[int, int]:
        """Return the document that a row reads at a step, and the index of the piece within the document."""
        ends = self.ends[row]
        while not ends or ends[-1] <= number:
            ends.append((ends[-1] if ends else 0) + int(self._dealt(row, len(ends))[1][-1]))
        epoch = bisect_right(ends, number)
        own, pieces = self._dealt(row, epoch)
        inside = number - (ends[epoch - 1] if epoch else 0)
        index = int(np.searchsorted(pieces, inside, "right"))
        return int(own[index]), inside - (int(pieces[index - 1]) if index else 0)

    def step(self, number: int) -> Batch:
        """Return the batch of a step."""
        tokens = torch.zeros(self.batch, self.length, dtype=torch.int64)
        targets, begins = torch.full_like(tokens, -100), torch.zeros(self.batch, dtype=torch.bool)
        mask = torch.zeros_like(tokens, dtype=torch.bool)
        for row in range(self.batch):
            document, piece = self.locate(row, number)
            start = piece * self.length
            text = self.data.piece(document, start, start + self.length + 1).astype(np.int64)
            inputs = text[: self.length] if len(text) == 1 else text[:-1]
            tokens[row, : len(inputs)] = torch.from_numpy(inputs)
            targets[row, : len(text) - 1] = torch.from_numpy(text[1:])
            mask[row, : len(inputs)] = True
            begins[row] = piece == 0
        return Batch(tokens, targets, None, mask, begins)
