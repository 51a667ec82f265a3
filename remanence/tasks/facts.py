"""Facts planted in books and asked for later, near and far: training data for a memory that has to keep them.

A row reads *streams*: stretches of documents between whose sentences facts are stated, each of which is asked for once,
at a distance from a few tokens to a whole stream. Streams go on from step to step with the memory carried, so that what
is asked may lie hundreds of steps back, while a step stays short.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import cycle
from typing import NamedTuple

import numpy as np
import torch

from remanence.core.tokens import Tokenizer
from remanence.data import Batch, Tokens
from remanence.tasks.draw import IGNORED
from remanence.tasks.needle import ADJECTIVES, KINDS, NOUNS, frame, needle

PIECES = 512
"""The longest stream, in steps."""
SPARSE, DENSE = 32768, 340
"""Tokens for each fact: a stream's own number is drawn between them, evenly in the logarithm."""
FIRST = 140, 2048
"""Tokens for each fact, and the greatest distance of its question, in the streams that a run begins with."""
HELD = 16
"""Facts that a memory should have to hold at a time: a question comes after at most so many others were stated."""
NEAREST, FAR = 48, 256
"""Tokens from a fact to its question, at least; of most questions."""
NEAR = 0.2
"""The share of questions that may come nearer than FAR. Where the fact asked for is often the last one that was stated, a
model learns to answer with the last one and never to look at the key.
"""
SHARE = 0.9
"""Of a step's tokens, what facts and questions may take."""


class Event(NamedTuple):
    """What is said at a place of a stream: a fact, or its question with the answer, which a full stop follows."""

    place: int
    tokens: np.ndarray
    answer: int

    @property
    def answers(self) -> np.ndarray:
        """Which of its tokens are the answer."""
        after = len(self.tokens) - np.arange(len(self.tokens)) - 1
        return (after > 0) & (after <= self.answer)


class Stream(NamedTuple):
    """A stretch of a document, and for each of its pieces what is said between its sentences, in order."""

    document: int
    start: int
    events: list[list[Event]]


class Facts:
    """Pieces of streams, ``[batch, length]``: a function of the step, on any number of processes.

    Every token is a target; one that is no answer's counts `weight` times as much as one that is. Over the first `ramp`
    steps, streams grow from facts and questions with hardly a text between them, and the text's weight from 0: few
    models learn to look up a fact if they meet it only in a long text.
    """

    def __init__(
        self,
        data: Tokens,
        length: int,
        batch: int,
        weight: float,
        ramp: int = 0,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.data, self.length, self.batch, self.weight, self.ramp = data, length, batch, weight, ramp
        self.seed, self.rank, self.world = seed, rank, world
        self.tokenizer: Tokenizer = data.tokenizer
        if length < (least := 512):
            raise ValueError(
                f"length: expected at least {least} tokens, for facts between sentences, got {length}"
            )
        if not (data.lengths > 2 * length).any():
            raise ValueError(f"data: expected a document of more than {2 * length:,} tokens, got none")
        texts = (self.tokenizer.decode([token]) for token in range(self.tokenizer.vocabulary))
        self.closing = np.array([text.endswith((".", "\n")) for text in texts])
        self.ends: list[list[int]] = [[] for _ in range(batch)]
        self._streams = lru_cache(2 * batch)(self._draw)

    def locate(self, row: int, number: int) -> tuple[int, int]:
        """Which of its streams a row reads at a step, and which piece of it."""
        ends = self.ends[row]
        while not ends or ends[-1] <= number:
            ends.append((ends[-1] if ends else 0) + len(self._streams(row, len(ends)).events))
        stream = bisect_right(ends, number)
        return stream, number - (ends[stream - 1] if stream else 0)

    def _draw(self, row: int, index: int) -> Stream:
        """One stream: its stretch, and where its facts are stated and asked for."""
        own = self.rank * self.batch + row
        rng = np.random.Generator(np.random.Philox(key=[self.seed, own * 2**32 + index]))
        room = np.maximum(self.data.lengths // self.length - 1, 0)
        document = int(rng.choice(len(room), p=room / room.sum()))
        begun = self.ends[row][index - 1] if index else 0
        grown = self._grown(begun)
        pieces = min(int(room[document]), int(_log_uniform(rng, 1, PIECES) ** grown))
        start = int(rng.integers(int(self.data.lengths[document]) - pieces * self.length))
        full, (near, short) = _log_uniform(rng, DENSE, SPARSE), FIRST
        every = near ** (1 - grown) * full**grown
        reach = int(short ** (1 - grown) * (HELD * full) ** grown)
        total = pieces * self.length
        places = np.sort(rng.integers(total, size=max(1, round(total / every))))
        # A key comes again long after its fact was asked for.
        keys = cycle(rng.permutation(len(ADJECTIVES) * len(NOUNS)).tolist())
        events: list[list[Event]] = [[] for _ in range(pieces)]
        used = np.zeros(pieces, int)
        for place in places.tolist():
            near = rng.random() < NEAR
            asked = place + _log_uniform(rng, *((NEAREST, FAR) if near else (FAR, reach)))
            if asked >= total:
                continue
            told, question = self._fact(rng, next(keys), place, asked)
            after = used.copy()
            for event in (told, question):
                after[event.place // self.length] += len(event.tokens)
            if after.max() > SHARE * self.length:
                continue
            used = after
            for event in (told, question):
                events[event.place // self.length].append(event)
        return Stream(document, start, [sorted(each, key=lambda event: event.place) for each in events])

    def _grown(self, step: int) -> float:
        """How far the first steps have grown into the task, from 0 to 1: slowly, then fast."""
        return min(1.0, step / self.ramp) ** 2 if self.ramp else 1.0

    def _fact(self, rng: np.random.Generator, key: int, place: int, asked: int) -> tuple[Event, Event]:
        """A fact and its question, in RULER's words or in plainer ones. No other fact of the stream has its key."""
        adjective, noun = ADJECTIVES[key // len(NOUNS)], NOUNS[key % len(NOUNS)]
        digits = int(rng.integers(4, 8))
        value = str(rng.integers(10 ** (digits - 1), 10**digits))
        form = int(rng.integers(6))
        if form < 2:
            name = f"{adjective}-{noun}"
            _, question, begun = frame(KINDS["n"], [name])
            told, question = f" {needle('number', name, value)}", question + begun
        elif form == 2:
            name = f"{adjective} {noun}"
            told, question = f" The number of the {name} is {value}.", f" What is the number of the {name}?"
        elif form == 3:
            name = f"{adjective} {noun}".title()
            told, question = f" {name} has the number {value}.", f" Which number has {name}?"
        else:  # word by word as it was stated, which is learned first
            name = f"{adjective} {noun}"
            question = f" The number of the {name} is"
            told = f"{question} {value}."
        answer = self.tokenizer.encode(f" {value}")
        spoken = [*self.tokenizer.encode(question), *answer, *self.tokenizer.encode(".")]
        return (
            Event(place, np.array(self.tokenizer.encode(told), np.int64), 0),
            Event(asked, np.array(spoken, np.int64), len(answer)),
        )

    def piece(self, row: int, number: int) -> tuple[np.ndarray, np.ndarray, bool]:
        """A row's tokens at a step and one more, which of them are answers, and whether its stream begins."""
        index, at = self.locate(row, number)
        stream = self._streams(row, index)
        events = stream.events[at]
        # What is said takes the place of the piece's last tokens.
        room = self.length + 1 - sum(len(event.tokens) for event in events)
        begin = stream.start + at * self.length
        hay = self.data.piece(stream.document, begin, begin + room).astype(np.int64)
        borders = np.append(np.flatnonzero(self.closing[hay]) + 1, room)
        parts, marks, read = [], [], 0
        for event in events:
            wanted = event.place % self.length * room // self.length
            border = int(borders[np.searchsorted(borders, wanted)])
            parts += [hay[read:border], event.tokens]
            marks += [np.zeros(border - read, bool), event.answers]
            read = border
        tokens = np.concatenate([*parts, hay[read:]])
        return tokens, np.concatenate([*marks, np.zeros(room - read, bool)]), at == 0

    def step(self, number: int) -> Batch:
        rows = [self.piece(row, number) for row in range(self.batch)]
        text = torch.from_numpy(np.stack([tokens for tokens, _, _ in rows]))
        answers = torch.from_numpy(np.stack([marks for _, marks, _ in rows]))[:, 1:]
        weights = torch.where(answers, 1.0, self.weight * self._grown(number))
        targets = text[:, 1:].where(weights > 0, IGNORED)
        begins = torch.tensor([begins for _, _, begins in rows])
        return Batch(text[:, :-1].contiguous(), targets, None, None, begins, weights)


def _log_uniform(rng: np.random.Generator, low: int, high: int) -> int:
    """A whole number from low to high, evenly in the logarithm."""
    return int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))
