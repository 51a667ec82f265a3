"""Facts planted in books and asked for later, near and far: training data for a memory that has to keep them.

A row reads *streams*: stretches of documents between whose sentences facts are stated, each of which is asked for once,
at a distance from a few tokens to a whole stream. Streams go on from step to step with the memory carried, so that what
is asked may lie hundreds of steps back, while a step stays short.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import torch

from remanence.data import Batch, Tokens
from remanence.tasks.draw import IGNORED, grown
from remanence.tasks.needle import ADJECTIVES, KINDS, NOUNS, frame, needle
from remanence.tokenizers.tokens import Tokenizer

PIECES = 512
"""The longest stream, in steps."""
SPARSE, DENSE = 32768, 340
"""Tokens for each fact: a stream's own number is drawn between them, evenly in the logarithm."""
FIRST = 64, 2048
"""Tokens for each fact, and the greatest distance of its question, in the streams that a run begins with."""
WORDED = 0.2
"""The share of the ramp in which the wordings come in, one after the other."""
HELD = 16
"""Facts that a memory should have to hold at a time: a question comes after at most so many others were stated."""
NEAREST, FAR = 48, 256
"""Tokens from a fact to its question, at least; of most questions."""
NEAR = 0.2
"""The share of questions that may come nearer than FAR. Where the fact asked for is often the last that was stated, a
model learns to answer with the last one and never to look at the key.
"""
SHARE = 0.9
"""Of a step's tokens, what facts, questions and bare numbers may take."""
BARE = 4096
"""Tokens for each number that belongs to no fact, at most; where facts are denser, there are as many as facts."""


class Event(NamedTuple):
    """What is said at a place of a stream, a fact or its question and answer; and which of its tokens are answers."""

    place: int
    tokens: np.ndarray
    answers: np.ndarray


class Stretch(NamedTuple):
    """Part of a document that a stream reads, in pieces; and how far the task had grown when it began."""

    document: int
    start: int
    pieces: int
    grown: float


class Facts:
    """Pieces of streams, ``[batch, length]``: a function of the step, on any number of processes.

    Every token is a target; one that is no answer's counts `weight` times as much as one that is. The period after a
    number is part of the answer: numbers have one to seven digits, and a model has to learn where each ends. With
    `ends=False` it counts as text, as in runs of earlier versions, which are resumed with it. Over the first `ramp`
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
        ends: bool = True,
    ) -> None:
        self.data, self.length, self.batch, self.weight, self.ramp = data, length, batch, weight, ramp
        self.counted_ends = ends
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
        self._events = lru_cache(2 * batch)(self._draw)

    def locate(self, row: int, number: int) -> tuple[int, int]:
        """Which of its streams a row reads at a step, and which piece of it."""
        ends = self.ends[row]
        while not ends or ends[-1] <= number:
            ends.append((ends[-1] if ends else 0) + self._stretch(row, len(ends)).pieces)
        stream = bisect_right(ends, number)
        return stream, number - (ends[stream - 1] if stream else 0)

    def _rng(self, row: int, stream: int, what: int) -> np.random.Generator:
        own = self.rank * self.batch + row
        return np.random.Generator(
            np.random.Philox(key=[self.seed, own * 2**32 + stream], counter=[0, 0, 0, what])
        )

    def _stretch(self, row: int, stream: int) -> Stretch:
        rng = self._rng(row, stream, 0)
        room = np.maximum(self.data.lengths // self.length - 1, 0)
        document = int(rng.choice(len(room), p=room / room.sum()))
        share = grown(self.ends[row][stream - 1] if stream else 0, self.ramp)
        pieces = min(int(room[document]), int(_log_uniform(rng, 1, PIECES) ** share))
        start = int(rng.integers(int(self.data.lengths[document]) - pieces * self.length))
        return Stretch(document, start, pieces, share)

    def _draw(self, row: int, stream: int) -> list[list[Event]]:
        """What is said in each piece of a stream, in order."""
        rng, own = self._rng(row, stream, 1), self._stretch(row, stream)
        full, (near, short) = float(_log_uniform(rng, DENSE, SPARSE)), FIRST
        every = near ** (1 - own.grown) * full**own.grown
        reach = short ** (1 - own.grown) * (HELD * full) ** own.grown
        total = own.pieces * self.length
        places = np.sort(rng.integers(total, size=max(1, round(total / every))))
        nearer = rng.random(len(places)) < NEAR
        distances = np.where(
            nearer, _log_uniform(rng, NEAREST, FAR, len(places)), _log_uniform(rng, FAR, reach, len(places))
        )
        # A key comes again long after its fact was asked for.
        keys = cycle(rng.permutation(len(ADJECTIVES) * len(NOUNS)).tolist())
        known = min(len(WORDINGS), 1 + int(len(WORDINGS) * own.grown**0.5 / WORDED))
        events: list[list[Event]] = [[] for _ in range(own.pieces)]
        left = np.full(own.pieces, SHARE * self.length)
        for told, asked in zip(places.tolist(), (places + distances).tolist(), strict=True):
            if asked >= total:
                continue
            pair = self._fact(rng, next(keys), known, told, asked)
            for event in pair:
                left[event.place // self.length] -= len(event.tokens)
            if min(left[told // self.length], left[asked // self.length]) < 0:
                for event in pair:
                    left[event.place // self.length] += len(event.tokens)
                continue
            for event in pair:
                events[event.place // self.length].append(event)
        for place in rng.integers(total, size=max(len(places), total // BARE)).tolist():
            tokens = np.array(self.tokenizer.encode(_bare(rng)), np.int64)
            if left[place // self.length] >= len(tokens):
                left[place // self.length] -= len(tokens)
                events[place // self.length].append(Event(place, tokens, np.zeros(len(tokens), bool)))
        return [sorted(each, key=lambda event: event.place) for each in events]

    def _fact(
        self, rng: np.random.Generator, key: int, known: int, place: int, asked: int
    ) -> tuple[Event, Event]:
        """A fact that is stated at a place, and its question at another."""
        texts = (*_worded(rng, key, known), ".")
        parts = [np.array(self.tokenizer.encode(text), np.int64) for text in texts]
        stated, question, answer, stop = parts
        marks = np.repeat([False, True, self.counted_ends], [len(question), len(answer), len(stop)])
        return (
            Event(place, stated, np.zeros(len(stated), bool)),
            Event(asked, np.concatenate([question, answer, stop]), marks),
        )

    def piece(self, row: int, number: int) -> tuple[np.ndarray, np.ndarray, bool]:
        """A row's tokens at a step and one more, which of them are answers, and whether its stream begins."""
        stream, at = self.locate(row, number)
        own, events = self._stretch(row, stream), self._events(row, stream)[at]
        # What is said takes the place of the piece's last tokens.
        room = self.length + 1 - sum(len(event.tokens) for event in events)
        begin = own.start + at * self.length
        hay = self.data.piece(own.document, begin, begin + room).astype(np.int64)
        # The last token is a target alone, so nothing is said there.
        borders = np.append(np.flatnonzero(self.closing[hay[:-2]]) + 1, room - 1)
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
        weights = torch.where(answers, 1.0, self.weight * grown(number, self.ramp))
        targets = text[:, 1:].where(weights > 0, IGNORED)
        begins = torch.tensor([begins for _, _, begins in rows])
        return Batch(text[:, :-1].contiguous(), targets, None, None, begins, weights)


def _direct(adjective: str, noun: str, value: str) -> tuple[str, str]:
    return f" The {adjective} {noun}: {value}.", f" The {adjective} {noun}:"


def _repeated(adjective: str, noun: str, value: str) -> tuple[str, str]:
    return f" The number of the {adjective} {noun} is {value}.", f" The number of the {adjective} {noun} is"


def _asked(adjective: str, noun: str, value: str) -> tuple[str, str]:
    stated = f" The number of the {adjective} {noun} is {value}."
    return stated, f" What is the number of the {adjective} {noun}?"


def _turned(adjective: str, noun: str, value: str) -> tuple[str, str]:
    name = f"{adjective} {noun}".title()
    return f" {name} has the number {value}.", f" Which number has {name}?"


def _ruler(adjective: str, noun: str, value: str) -> tuple[str, str]:
    name = f"{adjective}-{noun}"
    _, question, begun = frame(KINDS["n"], [name])
    return f" {needle('number', name, value)}", question + begun


WORDINGS = {"direct": _direct, "repeated": _repeated, "asked": _asked, "turned": _turned, "ruler": _ruler}
"""How a fact and its question are worded, the easiest to look up first: the name right in front of the value, then the
same words farther apart, then other words in the question.
"""


def _worded(rng: np.random.Generator, key: int, known: int) -> tuple[str, str, str]:
    """A fact, its question and its answer, in one of the first `known` wordings."""
    # Short values too: all that is learned from a digit is where to look, if no other one goes before it.
    digits = int(rng.integers(1, 8))
    value = str(rng.integers(10 ** (digits - 1), 10**digits))
    wording = list(WORDINGS.values())[int(rng.integers(known))]
    stated, question = wording(ADJECTIVES[key // len(NOUNS)], NOUNS[key % len(NOUNS)], value)
    return stated, question, f" {value}"


NUMBERS = (
    " CHAPTER {n}.", " In {n}.", " No. {n}.", " [{n}]", " ({n})", " It was {n}.", " {n} miles.", " {n} men.",
    " At {n} o'clock.", " Page {n}.", " {n},{m} pounds.", " {n}.", " {n}:{m}.", " The {n}th.", " Vol. {n}, p. {m}.",
    " {n} and {m} years.", " House {n}, Room {m}.", " January {n}, {m}.",
)  # fmt: skip
"""How a number stands in a text that is no fact's. A book has few of them, so that a memory that was trained on facts
and books alone writes every digit it meets, and in a million tokens its facts are written over.
"""


def _bare(rng: np.random.Generator) -> str:
    n, m = (int(10 ** rng.uniform(0, 5)) for _ in range(2))
    return NUMBERS[int(rng.integers(len(NUMBERS)))].format(n=n, m=m)


def _log_uniform(rng: np.random.Generator, low: float, high: float, size: int | None = None) -> Any:
    """Whole numbers from low to high, evenly in the logarithm."""
    return np.exp(rng.uniform(np.log(low), np.log(high + 1), size)).astype(np.int64)
