"""BABILong's training texts from short to long: stories with all their questions, alone, then in ever more hay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

import numpy as np
import torch

from remanence.core.tokens import Tokenizer, pair_tokens
from remanence.data import Batch
from remanence.tasks.babilong import HAYSTACK_ROWS, PROMPT, Story
from remanence.tasks.draw import IGNORED
from remanence.tasks.haystack import Haystack

Needles = list[np.ndarray]
"""What a text tells in order: facts, and questions with their answers. Tokens to be answered are held as ``~token``."""


class Curriculum:
    """Rows of `length` tokens, filled with texts of the lengths of a curriculum; of 0, stories without hay.

    A text is a story up to one of its questions, whose answer ends it. In half of them the questions before it are
    asked and answered on the way, as in bAbI: they are most of what there is to learn from. Texts shorter than a row
    follow each other in it, so that a memory also meets what others have left in it. A text longer than a row is read
    over several steps, with the state carried.

    Every length has an equal part of the steps. In its part, half of the rows have it, and the others one that is drawn
    from those up to it. A step's batch depends on the seed and the step alone.
    """

    def __init__(
        self,
        stories: Mapping[str, Sequence[Story]],
        sentences: Iterable[str],
        tokenizer: Tokenizer,
        length: int,
        curriculum: Sequence[int],
        steps: int,
        batch: int,
        seed: int,
        rank: int = 0,
    ) -> None:
        self.tokenizer, self.length, self.curriculum, self.steps = tokenizer, length, curriculum, steps
        self.batch, self.seed, self.rank = batch, seed, rank
        self.round = max(1, max(curriculum) // length)
        """Steps after which the rows draw their lengths anew."""
        self.fact = cache(lambda text: np.array(tokenizer.encode(f" {text}"), np.int32))
        self.question = cache(self._question)
        self.told = {task: _with_earlier(own) for task, own in stories.items()}
        sizes = {task: np.array([self._size(own) for own in told]) for task, told in self.told.items()}
        self.fitting: dict[int, list[tuple[str, np.ndarray]]] = {}
        for each in sorted(set(curriculum)):
            room = each or length
            for task, own in sizes.items():
                if own.min() > room:
                    name = "curriculum" if each else "length"
                    wanted = f"at least {own.min()}, for the shortest story of {task}"
                    raise ValueError(f"data.{name}: expected {wanted}, got {room}")
            self.fitting[each] = [(task, np.flatnonzero(own <= room)) for task, own in sizes.items()]
        least = max(length, *curriculum)
        self.hay = Haystack.of("data.books", sentences, tokenizer, least, HAYSTACK_ROWS)

    def step(self, number: int) -> Batch:
        rows, begins = zip(*[self._row(number, row) for row in range(self.batch)], strict=True)
        read = np.stack(rows).astype(np.int64)
        answers, tokens = read < 0, np.where(read < 0, ~read, read)
        targets = np.where(answers, tokens, IGNORED)[:, 1:]
        return Batch(
            torch.from_numpy(tokens[:, :-1].copy()),
            torch.from_numpy(targets.copy()),
            None,
            None,
            torch.tensor(begins),
        )

    def _row(self, number: int, row: int) -> tuple[np.ndarray, bool]:
        """A row's tokens of one step with the one behind them, and whether a text begins with the first of them."""
        length, size = self._length_of(number, row), self.length
        first = number - number % max(1, length // size)  # the step in which the text began
        rng = self._rng(first, row)
        if length > size:
            tokens, start = self._text(length, rng), (number - first) * size
        elif length:
            tokens, start = np.concatenate([self._text(length, rng) for _ in range(size // length)]), 0
        else:
            tokens, start = self._stories(rng), 0
        cut = tokens[start : start + size + 1]
        return np.pad(cut, (0, size + 1 - len(cut))), number == first

    def _length_of(self, number: int, row: int) -> int:
        first = number - number % self.round
        stage = min(first * len(self.curriculum) // self.steps, len(self.curriculum) - 1)
        rng = self._rng(first, row, 1)
        return self.curriculum[stage if rng.random() < 0.5 else int(rng.integers(stage + 1))]

    def _rng(self, number: int, row: int, use: int = 0) -> np.random.Generator:
        counter = [0, use, self.rank * self.batch + row, 2]  # `train/begin.py` has a 1 in the last place
        return np.random.Generator(np.random.Philox(key=[self.seed, number], counter=counter))

    def _draw(self, length: int, rng: np.random.Generator) -> Needles:
        task, indices = self.fitting[length][rng.integers(len(self.fitting[length]))]
        return self._needles(self.told[task][indices[rng.integers(len(indices))]], bool(rng.random() < 0.5))

    def _text(self, length: int, rng: np.random.Generator) -> np.ndarray:
        """Exactly so many tokens: a story in hay, its last question at the end."""
        needles = self._draw(length, rng)
        room = length - sum(map(len, needles))
        borders = self.hay.borders
        first = int(borders[self.hay.begin(room, rng)])
        hay = self.hay.tokens[first : first + room]
        depths = first + (np.sort(rng.random(len(needles) - 1)) * room).astype(
            np.int64
        )  # of floats it is slow
        places = borders[np.searchsorted(borders, depths, "right") - 1] - first
        parts, last = [], 0
        for place, needle in zip([*places.tolist(), room], needles, strict=True):
            parts += [hay[last:place], needle]
            last = place
        return np.concatenate(parts)

    def _stories(self, rng: np.random.Generator) -> np.ndarray:
        """A row of stories without hay, and hay behind the last that has room."""
        needles: Needles = []
        have = 0
        while have + sum(map(len, more := self._draw(0, rng))) <= self.length:
            needles += more
            have += sum(map(len, more))
        start = int(self.hay.borders[self.hay.begin(self.length - have, rng)])
        return np.concatenate([*needles, self.hay.tokens[start : start + self.length - have]])

    def _needles(self, told: Sequence[Story], every: bool) -> Needles:
        """The last story's facts and question; with `every`, the earlier questions where they were asked."""
        found: Needles = []
        known = 0
        for story in told if every else told[-1:]:
            found += [self.fact(fact) for fact in story.facts[known:]]
            found.append(self.question(story.query, story.answer))
            known = len(story.facts)
        return found

    def _question(self, query: str, answer: str) -> np.ndarray:
        prompt, end = pair_tokens(self.tokenizer, PROMPT, f" {answer}\n")
        return np.array([*self.tokenizer.encode(query), *prompt, *[~token for token in end]], np.int32)

    def _size(self, told: Sequence[Story]) -> int:
        return sum(map(len, self._needles(told, True)))


def _with_earlier(stories: Sequence[Story]) -> list[list[Story]]:
    """Every question with those that were asked before it in the same story."""
    found: list[list[Story]] = []
    for story in stories:
        last = found[-1] if found else []
        goes_on = bool(last) and last[-1].facts == story.facts[: len(last[-1].facts)]
        found.append([*last, story] if goes_on else [story])
    return found
