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
    """Pairs at the start, noise, then every key again in another order: its value is to be told.

    Tokens: keys, as many values, sixteen kinds of noise. The distance from a pair to its question is about the row's length.
    """

    KEYS, NOISE = 32, 16

    def __init__(self, length: int, batch: int, pairs: int, seed: int, rank: int = 0, world: int = 1) -> None:
        if length < 4 * pairs or pairs > self.KEYS:
            raise ValueError(f"length: expected at least {4 * pairs} for {pairs} pairs (at most {self.KEYS}), got {length}")
        self.length, self.batch, self.pairs, self.seed, self.rank, self.world = length, batch, pairs, seed, rank, world

    @property
    def vocabulary(self) -> int:
        return 2 * self.KEYS + self.NOISE

    def step(self, number: int) -> Batch:
        chance = np.random.Generator(np.random.Philox(key=[self.seed, number]))
        rows, n = self.batch * self.world, self.pairs
        tokens = chance.integers(2 * self.KEYS, self.vocabulary, (rows, self.length))
        keys = chance.random((rows, self.KEYS)).argsort(1)[:, :n]
        values = chance.integers(self.KEYS, 2 * self.KEYS, (rows, n))
        order = chance.random((rows, n)).argsort(1)
        tokens[:, 0 : 2 * n : 2], tokens[:, 1 : 2 * n : 2] = keys, values
        asked = self.length - 2 * n
        tokens[:, asked::2] = np.take_along_axis(keys, order, 1)
        tokens[:, asked + 1 :: 2] = np.take_along_axis(values, order, 1)
        targets = np.full_like(tokens, -100)
        targets[:, asked::2] = tokens[:, asked + 1 :: 2]
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
    source = Recall(config.data.length, batch, config.data.pairs, config.seed, rank, world)
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
