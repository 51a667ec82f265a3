"""Associative recall: key-value pairs that are shown once and asked for later, with noise tokens in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from remanence.data import Batch
from remanence.tasks.draw import HELD_OUT, IGNORED, plain_batch, rank_rows, step_rng


class Recall:
    """Rows with several rounds of the same key-value pairs, each in another order, with noise between the
    rounds. The values are targets in all rounds but the first.

    The token ids are the keys, then as many values, then the noise tokens, in this order. The first round is at the
    start of the row and the last one at its end. So with two rounds, a key is asked for about ``length - 2 * pairs``
    tokens after its pair was shown, give or take the difference in order.

    Args:
        length: number of tokens of a row.
        batch: number of rows of a batch in one process.
        pairs: number of key-value pairs of a row.
        rounds: number of times that all pairs are listed in a row.
        keys: number of different keys, and of different values.
        noise: number of different noise tokens.
    """

    def __init__(
        self,
        length: int,
        batch: int,
        pairs: int,
        rounds: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        *,
        keys: int = 32,
        noise: int = 16,
    ) -> None:
        if pairs > keys:
            raise ValueError(f"pairs: expected at most {keys}, the number of keys, got {pairs}")
        min_length = 2 * pairs * rounds
        if rounds < 2 or length < min_length:
            raise ValueError(
                f"length: expected at least {min_length} for {rounds} rounds of {pairs} pairs, got {length}"
            )
        self.length, self.batch, self.pairs, self.rounds = length, batch, pairs, rounds
        self.seed, self.rank, self.world_size, self.keys, self.noise = seed, rank, world_size, keys, noise
        self.starts = [
            index * 2 * pairs + index * (length - min_length) // (rounds - 1) for index in range(rounds)
        ]

    @property
    def vocabulary(self) -> int:
        """The number of token ids."""
        return vocabulary(self.keys, self.noise)

    def step(self, number: int) -> Batch:
        """Return the batch of a step."""
        rng = step_rng(self.seed, number)
        rows, n = self.batch * self.world_size, self.pairs
        tokens = rng.integers(2 * self.keys, self.vocabulary, (rows, self.length))
        keys = rng.random((rows, self.keys)).argsort(1)[:, :n]
        values = rng.integers(self.keys, 2 * self.keys, (rows, n))
        targets = np.full_like(tokens, IGNORED)
        for start in self.starts:
            order, end = rng.random((rows, n)).argsort(1), start + 2 * n
            tokens[:, start:end:2] = np.take_along_axis(keys, order, 1)
            tokens[:, start + 1 : end : 2] = np.take_along_axis(values, order, 1)
            if start:
                targets[:, start:end:2] = tokens[:, start + 1 : end : 2]
        own_rows = rank_rows(self.batch, self.rank)
        return plain_batch(tokens[own_rows], targets[own_rows])


def vocabulary(keys: int, noise: int) -> int:
    """Return the number of token ids: keys, as many values, and noise tokens."""
    return 2 * keys + noise


class Questions(NamedTuple):
    """Evaluation texts ``[b t]``, and the pairs asked for after them ``[b 2n]``: a key, its value, the next
    key, and so on.
    """

    text_tokens: Tensor
    pairs: Tensor

    @property
    def keys(self) -> Tensor:
        """The keys asked for ``[b n]``."""
        return self.pairs[:, ::2]

    @property
    def values(self) -> Tensor:
        """The right values ``[b n]``."""
        return self.pairs[:, 1::2]


def held_out(pairs: int, distance: int, texts: int, seed: int, *, keys: int, noise: int) -> Questions:
    """Draw texts that no training run reads. Each pair is asked for `distance` tokens after it was shown, up
    to the order of the pairs.
    """
    task = Recall(distance + 2 * pairs, texts, pairs, 2, seed + HELD_OUT, keys=keys, noise=noise)
    tokens = task.step(0).tokens
    return Questions(tokens[:, :distance], tokens[:, distance:])


def score(questions: Questions, all_answers: Tensor, single_answers: Sequence[Tensor]) -> dict[str, int]:
    """Count the right answers with all keys asked one after the other ("all"), and with each key asked alone
    ("one"); "count" is the number of questions.

    `all_answers` is the most likely token after each token of `questions.pairs`. `single_answers` has one column
    per key.
    """
    values = questions.values
    return {
        "all": int((all_answers[:, ::2] == values).sum()),
        "one": int((torch.cat(list(single_answers), 1) == values).sum()),
        "count": values.numel(),
    }
