"""What a run reads: anything that gives a step's batch, as a function of the step. A new kind is a new entry of `SOURCES`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from remanence.config import known
from remanence.core.tokens import ByteTokenizer, Tokenizer, load_tokenizer, pair_tokens
from remanence.data import Batch, Documents, Packed, Tokens
from remanence.data.babi import ALL, PROMPT, Story, placed, read
from remanence.data.texts import Hay, Texts
from remanence.train.config import TrainConfig

HAY = 256
"""Rows that the text around BABILong's facts is enough for, if there is so much of it."""


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


class Needle:
    """Numbers with names, hidden at random places of plain sentences, one of which is asked for at the end. Bytes.

    The row's last bytes are the answer, and only they are to be told. Every row is exactly as long as asked.
    """

    HAY = (
        "Rain fell on the hills until the evening. ",
        "A cart went slowly down the road. ",
        "Nobody had closed the window upstairs. ",
        "The river was high for that time of the year. ",
        "They ate bread and spoke of other things. ",
        "It was said that the winter would be long. ",
    )
    NAMES = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "ivory", "jade", "karst", "lotus", "maple")
    DIGITS = 4

    def __init__(self, length: int, batch: int, pairs: int, seed: int, rank: int = 0, world: int = 1) -> None:
        if pairs > len(self.NAMES):
            raise ValueError(f"pairs: expected at most {len(self.NAMES)} needles, got {pairs}")
        longest = pairs * len(self._needle("amber", "0000")) + len(self._question("amber")) + self.DIGITS
        if length < longest:
            raise ValueError(f"length: expected at least {longest} bytes for {pairs} needles and the question, got {length}")
        self.length, self.batch, self.pairs, self.seed, self.rank, self.world = length, batch, pairs, seed, rank, world

    @staticmethod
    def _needle(name: str, number: str) -> str:
        return f"The number of {name} is {number}. "

    @staticmethod
    def _question(name: str) -> str:
        return f"What is the number of {name}? "

    def row(self, chance: np.random.Generator) -> bytes:
        """Hay with needles between its sentences, cut at its beginning, then the question and the answer."""
        names = chance.permutation(self.NAMES)[: self.pairs]
        numbers = [f"{chance.integers(10**self.DIGITS):0{self.DIGITS}d}" for _ in names]
        asked = int(chance.integers(self.pairs))
        end = self._question(names[asked]) + numbers[asked]
        needles = [self._needle(name, number) for name, number in zip(names, numbers, strict=True)]
        room = self.length - len(end) - sum(map(len, needles))
        hay = [str(chance.choice(self.HAY)) for _ in range(room // min(map(len, self.HAY)) + 1)]
        while hay and sum(map(len, hay)) - len(hay[0]) >= room:
            hay.pop(0)
        hay[:1] = [part[sum(map(len, hay)) - room :] for part in hay[:1]]
        for needle in needles:
            hay.insert(int(chance.integers(min(1, len(hay)), len(hay) + 1)), needle)
        return ("".join(hay) + end).encode()

    def step(self, number: int) -> Batch:
        chance = np.random.Generator(np.random.Philox(key=[self.seed, number]))
        rows = np.stack([np.frombuffer(self.row(chance), np.uint8) for _ in range(self.batch * self.world)]).astype(np.int64)
        targets = np.full_like(rows, -100)
        targets[:, -self.DIGITS - 1 : -1] = rows[:, -self.DIGITS :]
        own = slice(self.rank * self.batch, (self.rank + 1) * self.batch)
        return Batch(torch.from_numpy(rows[own]), torch.from_numpy(targets[own]), None, None, None)


class Babilong:
    """bAbI's training stories hidden in books as BABILong's test hides others, each with its question and, at the row's end, the
    answer and a line's end: only these are to be told. Every row is exactly as long as asked.
    """

    def __init__(
        self,
        stories: Mapping[str, Sequence[Story]],
        sentences: Iterable[str],
        tokenizer: Tokenizer,
        length: int,
        batch: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.tokenizer, self.length, self.batch, self.seed, self.rank, self.world = tokenizer, length, batch, seed, rank, world
        self.encode = cache(tokenizer.encode)  # bAbI says the same few sentences again and again
        self.stories = []
        for task, own in stories.items():
            sizes = [story.size(self.encode) + sum(map(len, self._end(story))) for story in own]
            if min(sizes) > length:
                raise ValueError(f"data.length: expected at least {min(sizes)}, for the shortest story of {task}, got {length}")
            self.stories.append([story for story, size in zip(own, sizes, strict=True) if size <= length])
        self.hay = Hay.of("data.books", sentences, tokenizer, length, HAY)

    def _end(self, story: Story) -> tuple[list[int], list[int]]:
        return pair_tokens(self.tokenizer, PROMPT, f" {story.answer}\n")

    def row(self, chance: np.random.Generator) -> tuple[np.ndarray, int]:
        """Tokens, and how many of them, the last, are the answer."""
        own = self.stories[chance.integers(len(self.stories))]
        story = own[chance.integers(len(own))]
        prompt, answer = self._end(story)
        end = [*self.encode(story.asked), *prompt, *answer]
        return np.concatenate([placed(story, self.hay, self.length - len(end), chance), end]), len(answer)

    def step(self, number: int) -> Batch:
        chance = np.random.Generator(np.random.Philox(key=[self.seed, number]))
        drawn = [self.row(chance) for _ in range(self.batch * self.world)][self.rank * self.batch : (self.rank + 1) * self.batch]
        rows = np.stack([tokens for tokens, _ in drawn]).astype(np.int64)
        targets = np.full_like(rows, -100)
        for row, (tokens, answer) in enumerate(drawn):
            targets[row, -answer - 1 : -1] = tokens[-answer:]
        return Batch(torch.from_numpy(rows), torch.from_numpy(targets), None, None, None)


def tokenizer_of(source: Source) -> Tokenizer | None:
    """What a source's tokens mean; a task of made-up symbols has none."""
    return source.data.tokenizer if isinstance(source, Packed | Documents) else getattr(source, "tokenizer", None)


def corpus(source: Source, steps: int = 64, piece: int = 2**24) -> Iterator[torch.Tensor]:
    """All tokens that a source reads from, in pieces; of a task that is made up as it goes, its first steps'."""
    if isinstance(source, Packed | Documents):
        for shard in source.data.shards:
            for start in range(0, len(shard), piece):
                yield torch.from_numpy(shard[start : start + piece].astype(np.int64))
    else:
        for step in range(steps):
            yield source.step(step).tokens


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


def _needle(config: TrainConfig, batch: int, rank: int, world: int) -> Source:
    if config.model.vocabulary < 256:
        raise ValueError(f"model.vocabulary: expected at least 256, for bytes, got {config.model.vocabulary}")
    return Needle(config.data.length, batch, config.data.pairs, config.seed, rank, world)


def model_folder(start: str) -> Path:
    if not (Path(start) / "config.json").is_file():
        raise ValueError(f"start: expected a model's folder, with its config.json, got {start}")
    return Path(start)


def _babilong(config: TrainConfig, batch: int, rank: int, world: int) -> Source:
    data = config.data
    for task in data.tasks:
        known("data.tasks", task, ALL)
    if not data.tasks:
        raise ValueError("data.tasks: expected at least one, got none")
    tokenizer = ByteTokenizer() if config.start is None else load_tokenizer(model_folder(config.start))
    if tokenizer.vocabulary > config.model.vocabulary:
        raise ValueError(
            f"model.vocabulary: expected at least the tokenizer's {tokenizer.vocabulary}, got {config.model.vocabulary}"
        )
    stories = {task: read("data.path", data.path, task, "train") for task in data.tasks}
    books = Texts("data.books", data.books, "a text to hide stories in: a file, a folder or hf:NAME")
    return Babilong(stories, books.sentences(), tokenizer, data.length, batch, config.seed, rank, world)


SOURCES: dict[str, Callable[[TrainConfig, int, int, int], Source]] = {
    "packed": lambda config, batch, rank, world: Packed(_shards(config), config.data.length, batch, config.seed, rank, world),
    "documents": lambda config, batch, rank, world: Documents(
        _shards(config), config.data.length, batch, config.seed, rank, world
    ),
    "recall": _recall,
    "needle": _needle,
    "babilong": _babilong,
}
