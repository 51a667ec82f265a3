"""What a run reads: anything that gives a step's batch, as a function of the step. A new kind is a new entry of `SOURCES`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from remanence.data import Batch, Documents, Packed, Tokens
from remanence.train.config import TrainConfig


class Source(Protocol):
    def step(self, number: int) -> Batch: ...


class Recall:
    """Rounds of the same pairs, each in another order, with noise in between; from the second on, values are to be told.

    Tokens: keys, as many values, kinds of noise. With two rounds, a pair and its question are about a row apart.
    """

    def __init__(
        self,
        length: int,
        batch: int,
        pairs: int,
        rounds: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        *,
        keys: int = 32,
        noise: int = 16,
    ) -> None:
        if pairs > keys:
            raise ValueError(f"pairs: expected at most {keys}, the number of keys, got {pairs}")
        if rounds < 2 or length < 2 * pairs * rounds:
            raise ValueError(f"length: expected at least {2 * pairs * rounds} for {rounds} rounds of {pairs} pairs, got {length}")
        self.length, self.batch, self.pairs, self.rounds = length, batch, pairs, rounds
        self.seed, self.rank, self.world, self.keys, self.noise = seed, rank, world, keys, noise
        rest = length - 2 * pairs * rounds
        self.starts = [turn * 2 * pairs + turn * rest // (rounds - 1) for turn in range(rounds)]

    @property
    def vocabulary(self) -> int:
        return 2 * self.keys + self.noise

    def step(self, number: int) -> Batch:
        chance = np.random.Generator(np.random.Philox(key=[self.seed, number]))
        rows, n = self.batch * self.world, self.pairs
        tokens = chance.integers(2 * self.keys, self.vocabulary, (rows, self.length))
        keys = chance.random((rows, self.keys)).argsort(1)[:, :n]
        values = chance.integers(self.keys, 2 * self.keys, (rows, n))
        targets = np.full_like(tokens, -100)
        for start in self.starts:
            order, end = chance.random((rows, n)).argsort(1), start + 2 * n
            tokens[:, start:end:2] = np.take_along_axis(keys, order, 1)
            tokens[:, start + 1 : end : 2] = np.take_along_axis(values, order, 1)
            if start:
                targets[:, start:end:2] = tokens[:, start + 1 : end : 2]
        own = slice(self.rank * self.batch, (self.rank + 1) * self.batch)
        return Batch(torch.from_numpy(tokens[own]), torch.from_numpy(targets[own]), None, None, None)


def _shards(config: TrainConfig) -> Tokens:
    if config.data.path is None:
        raise ValueError("data.path: expected a folder made by `remanence data prepare`, got none")
    data = Tokens(config.data.path)
    if data.vocabulary > config.model.vocabulary:
        raise ValueError(f"model.vocabulary: expected at least the data's {data.vocabulary}, got {config.model.vocabulary}")
    return data


def _recall(config: TrainConfig, batch: int, rank: int, world: int) -> Source:
    data = config.data
    kinds = {"keys": data.keys, "noise": data.noise}
    source = Recall(data.length, batch, data.pairs, data.rounds, config.seed, rank, world, **kinds)
    if config.model.vocabulary < source.vocabulary:
        raise ValueError(f"model.vocabulary: expected at least the task's {source.vocabulary}, got {config.model.vocabulary}")
    return source


SOURCES: dict[str, Callable[[TrainConfig, int, int, int], Source]] = {
    "packed": lambda config, batch, rank, world: Packed(_shards(config), config.data.length, batch, config.seed, rank, world),
    "documents": lambda config, batch, rank, world: Documents(
        _shards(config), config.data.length, batch, config.seed, rank, world
    ),
    "recall": _recall,
}
