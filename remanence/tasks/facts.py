"""Training data for long-range recall: facts inserted into documents, with questions at short and long
distances.

A row reads *streams*. A stream is a span of a document with facts inserted between its sentences. Each fact
has one question, at a distance from a few tokens to the length of the stream. Streams continue from step to
step with the memory carried over, so a question may refer to a fact hundreds of steps earlier although each
step is short.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import cycle
from typing import NamedTuple

import numpy as np
import torch

from remanence.data import Batch, Tokens
from remanence.tasks.draw import IGNORED, ramp_progress
from remanence.tasks.needle import ADJECTIVES, KINDS, NOUNS, frame, needle
from remanence.tokenizers.tokens import Tokenizer

MAX_STEPS = 512
"""The length of the longest stream, in steps."""
SPARSE, DENSE = 32768, 340
"""The range of the number of tokens per fact. Each stream draws a value from it, uniform in the logarithm."""
FIRST = 64, 2048
"""The number of tokens per fact, and the largest distance from a fact to its question, at the first step of
the ramp.
"""
WORDING_SHARE = 0.2
"""The share of the ramp over which the wordings are introduced, one after the other."""
MAX_PENDING = 16
"""The largest average number of facts that are stated but not yet asked for. It limits the distance of
questions.
"""
MIN_DISTANCE, FAR = 48, 256
"""The smallest distance from a fact to its question in tokens, and the smallest distance of most questions."""
NEAR_SHARE = 0.2
"""The share of questions with a distance below FAR. If the fact asked for is often the last one stated, a
model learns to answer with the last value, whatever the key is.
"""
MAX_INSERTED = 0.9
"""The largest share of a step's tokens that facts, questions and distractor numbers take."""
BARE = 4096
"""There is at least one distractor, a number that belongs to no fact, per this many tokens, and one per fact."""


class Insertion(NamedTuple):
    """Tokens inserted into a stream at a position: a fact, a question with its answer, or a distractor number.
    `answers` is a mask of the answer's tokens.
    """

    position: int
    tokens: np.ndarray
    answers: np.ndarray


class Span(NamedTuple):
    """The part of a document that a stream reads: the document's index, the first token, the number of steps,
    and the ramp's progress at the stream's first step.
    """

    document: int
    start: int
    steps: int
    progress: float


class Facts:
    """Batches ``[batch, length]`` of streams. A batch depends only on the step, for any number of processes.

    Every token is a target. The tokens of answers have loss weight 1, all others `weight`. The period after a
    number is part of the answer: numbers have one to seven digits, and the model has to learn where each
    ends. With `answer_end=False` the period has the weight of the text, as in runs of earlier versions.
    During the first `distance_ramp` steps the text between facts and questions grows from a few tokens to its
    full length, and its weight grows from 0. Without this ramp, few models learn to look up a fact.
    """

    def __init__(
        self,
        data: Tokens,
        length: int,
        batch: int,
        weight: float,
        distance_ramp: int = 0,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        answer_end: bool = True,
    ) -> None:
        self.data, self.length, self.batch = data, length, batch
        self.weight, self.distance_ramp = weight, distance_ramp
        self.answer_end = answer_end
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.tokenizer: Tokenizer = data.tokenizer
        if length < (least := 512):
            raise ValueError(
                f"length: expected at least {least} tokens, for facts between sentences, got {length}"
            )
        if not (data.lengths > 2 * length).any():
            raise ValueError(f"data: expected a document of more than {2 * length:,} tokens, got none")
        texts = (self.tokenizer.decode([token]) for token in range(self.tokenizer.vocabulary))
        self.ends_sentence = np.array([text.endswith((".", "\n")) for text in texts])
        self.stream_ends: list[list[int]] = [[] for _ in range(batch)]
        self._insertions = lru_cache(2 * batch)(self._draw_insertions)

    def locate(self, row: int, number: int) -> tuple[int, int]:
        """Return the stream that a row reads at a step, and the step within the stream."""
        ends = self.stream_ends[row]
        while not ends or ends[-1] <= number:
            ends.append((ends[-1] if ends else 0) + self._span(row, len(ends)).steps)
        stream = bisect_right(ends, number)
        return stream, number - (ends[stream - 1] if stream else 0)

    def _rng(self, row: int, stream: int, purpose: int) -> np.random.Generator:
        """Return a random generator for a stream of a row. `purpose` separates independent uses."""
        global_row = self.rank * self.batch + row
        return np.random.Generator(
            np.random.Philox(key=[self.seed, global_row * 2**32 + stream], counter=[0, 0, 0, purpose])
        )

    def _span(self, row: int, stream: int) -> Span:
        """Draw the part of a document that a stream reads."""
        rng = self._rng(row, stream, 0)
        available = np.maximum(self.data.lengths // self.length - 1, 0)
        document = int(rng.choice(len(available), p=available / available.sum()))
        progress = ramp_progress(self.stream_ends[row][stream - 1] if stream else 0, self.distance_ramp)
        steps = min(int(available[document]), int(_log_uniform(rng, 1, MAX_STEPS) ** progress))
        start = int(rng.integers(int(self.data.lengths[document]) - steps * self.length))
        return Span(document, start, steps, progress)

    def _draw_insertions(self, row: int, stream: int) -> list[list[Insertion]]:
        """Return the insertions of each step of a stream, in order."""
        rng, span = self._rng(row, stream, 1), self._span(row, stream)
        full, (first_spacing, first_reach) = float(_log_uniform(rng, DENSE, SPARSE)), FIRST
        spacing = first_spacing ** (1 - span.progress) * full**span.progress
        reach = first_reach ** (1 - span.progress) * (MAX_PENDING * full) ** span.progress
        total = span.steps * self.length
        positions = np.sort(rng.integers(total, size=max(1, round(total / spacing))))
        is_near, count = rng.random(len(positions)) < NEAR_SHARE, len(positions)
        near, far = _log_uniform(rng, MIN_DISTANCE, FAR, count), _log_uniform(rng, FAR, reach, count)
        distances = np.where(is_near, near, far)
        # A key is used again only long after its question.
        keys = cycle(rng.permutation(len(ADJECTIVES) * len(NOUNS)).tolist())
        num_wordings = min(len(WORDINGS), 1 + int(len(WORDINGS) * span.progress**0.5 / WORDING_SHARE))
        found: list[list[Insertion]] = [[] for _ in range(span.steps)]
        tokens_left = np.full(span.steps, MAX_INSERTED * self.length)
        for fact_position, question_position in zip(
            positions.tolist(), (positions + distances).tolist(), strict=True
        ):
            if question_position >= total:
                continue
            pair = self._fact(rng, next(keys), num_wordings, fact_position, question_position)
            for insertion in pair:
                tokens_left[insertion.position // self.length] -= len(insertion.tokens)
            if (
                min(tokens_left[fact_position // self.length], tokens_left[question_position // self.length])
                < 0
            ):
                for insertion in pair:
                    tokens_left[insertion.position // self.length] += len(insertion.tokens)
                continue
            for insertion in pair:
                found[insertion.position // self.length].append(insertion)
        for position in rng.integers(total, size=max(count, total // BARE)).tolist():
            tokens = np.array(self.tokenizer.encode(_distractor(rng)), np.int64)
            if tokens_left[position // self.length] >= len(tokens):
                tokens_left[position // self.length] -= len(tokens)
                found[position // self.length].append(
                    Insertion(position, tokens, np.zeros(len(tokens), bool))
                )
        return [sorted(each, key=lambda insertion: insertion.position) for each in found]

    def _fact(
        self, rng: np.random.Generator, key: int, num_wordings: int, position: int, question_position: int
    ) -> tuple[Insertion, Insertion]:
        """Return a fact stated at `position`, and its question at `question_position`, in one of the first
        `num_wordings` wordings.
        """
        texts = (*_word_fact(rng, key, num_wordings), ".")
        parts = [np.array(self.tokenizer.encode(text), np.int64) for text in texts]
        stated, question, answer, stop = parts
        marks = np.repeat([False, True, self.answer_end], [len(question), len(answer), len(stop)])
        return (
            Insertion(position, stated, np.zeros(len(stated), bool)),
            Insertion(question_position, np.concatenate([question, answer, stop]), marks),
        )

    def piece(self, row: int, number: int) -> tuple[np.ndarray, np.ndarray, bool]:
        """Return the ``length + 1`` tokens of a row at a step, a mask of the answers, and whether the row
        begins a stream.
        """
        stream, step_of_stream = self.locate(row, number)
        span, insertions = self._span(row, stream), self._insertions(row, stream)[step_of_stream]
        # Insertions replace the last tokens of the document's piece.
        size = self.length + 1 - sum(len(insertion.tokens) for insertion in insertions)
        begin = span.start + step_of_stream * self.length
        text = self.data.piece(span.document, begin, begin + size).astype(np.int64)
        # The last token is used only as a target, so nothing is inserted before it.
        borders = np.append(np.flatnonzero(self.ends_sentence[text[:-2]]) + 1, size - 1)
        parts, masks, text_read = [], [], 0
        for insertion in insertions:
            wanted = insertion.position % self.length * size // self.length
            border = int(borders[np.searchsorted(borders, wanted)])
            parts += [text[text_read:border], insertion.tokens]
            masks += [np.zeros(border - text_read, bool), insertion.answers]
            text_read = border
        tokens = np.concatenate([*parts, text[text_read:]])
        return tokens, np.concatenate([*masks, np.zeros(size - text_read, bool)]), step_of_stream == 0

    def step(self, number: int) -> Batch:
        """Return the batch of a step."""
        rows = [self.piece(row, number) for row in range(self.batch)]
        text = torch.from_numpy(np.stack([tokens for tokens, _, _ in rows]))
        answers = torch.from_numpy(np.stack([mask for _, mask, _ in rows]))[:, 1:]
        weights = torch.where(answers, 1.0, self.weight * ramp_progress(number, self.distance_ramp))
        targets = text[:, 1:].where(weights > 0, IGNORED)
        begins = torch.tensor([begins for _, _, begins in rows])
        return Batch(text[:, :-1].contiguous(), targets, None, None, begins, weights)


def _direct(adjective: str, noun: str, value: str) -> tuple[str, str]:
    """Return a fact in which the value follows the name directly, and its question."""
    return f" The {adjective} {noun}: {value}.", f" The {adjective} {noun}:"


def _repeated(adjective: str, noun: str, value: str) -> tuple[str, str]:
    """Return a fact as a full sentence, and the beginning of the same sentence as its question."""
    return f" The number of the {adjective} {noun} is {value}.", f" The number of the {adjective} {noun} is"


def _as_question(adjective: str, noun: str, value: str) -> tuple[str, str]:
    """Return a fact as a full sentence, and a question in almost the same words."""
    stated = f" The number of the {adjective} {noun} is {value}."
    return stated, f" What is the number of the {adjective} {noun}?"


def _reordered(adjective: str, noun: str, value: str) -> tuple[str, str]:
    """Return a fact and a question whose words are in a different order."""
    name = f"{adjective} {noun}".title()
    return f" {name} has the number {value}.", f" Which number has {name}?"


def _ruler(adjective: str, noun: str, value: str) -> tuple[str, str]:
    """Return a fact and a question in RULER's wording."""
    name = f"{adjective}-{noun}"
    _, question, begun = frame(KINDS["n"], [name])
    return f" {needle('number', name, value)}", question + begun


WORDINGS = {
    "direct": _direct,
    "repeated": _repeated,
    "asked": _as_question,
    "turned": _reordered,
    "ruler": _ruler,
}
"""Wordings of a fact and its question, in order of difficulty: first the name directly before the value, then
the same words farther apart, then a question in other words.
"""


def _word_fact(rng: np.random.Generator, key: int, num_wordings: int) -> tuple[str, str, str]:
    """Return a fact, its question and its answer, in one of the first `num_wordings` wordings."""
    # Values may be short: a first digit, which has no digit before it, teaches the model where to look.
    digits = int(rng.integers(1, 8))
    value = str(rng.integers(10 ** (digits - 1), 10**digits))
    wording = list(WORDINGS.values())[int(rng.integers(num_wordings))]
    stated, question = wording(ADJECTIVES[key // len(NOUNS)], NOUNS[key % len(NOUNS)], value)
    return stated, question, f" {value}"


NUMBERS = (
    " CHAPTER {n}.", " In {n}.", " No. {n}.", " [{n}]", " ({n})", " It was {n}.", " {n} miles.", " {n} men.",
    " At {n} o'clock.", " Page {n}.", " {n},{m} pounds.", " {n}.", " {n}:{m}.", " The {n}th.", " Vol. {n}, p. {m}.",
    " {n} and {m} years.", " House {n}, Room {m}.", " January {n}, {m}.",
)  # fmt: skip
"""Templates of distractors: numbers that belong to no fact. Books have few numbers. A memory trained on facts
and books alone stores every digit, and overwrites the facts within a million tokens.
"""


def _distractor(rng: np.random.Generator) -> str:
    """Return a distractor with random numbers."""
    n, m = (int(10 ** rng.uniform(0, 5)) for _ in range(2))
    return NUMBERS[int(rng.integers(len(NUMBERS)))].format(n=n, m=m)


def _log_uniform(rng: np.random.Generator, low: float, high: float, size: int | None = None) -> np.ndarray:
    """Draw integers from `low` to `high`, uniform in the logarithm: an array of `size` integers, or a single
    one if it is None.
    """
    return np.asarray(np.exp(rng.uniform(np.log(low), np.log(high + 1), size))).astype(np.int64)
