"""BABILong training texts with a length curriculum: stories alone, then in longer and longer haystacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

import numpy as np

from remanence.data import Batch
from remanence.tasks.babilong import HAYSTACK_ROWS, PROMPT, Story
from remanence.tasks.draw import IGNORED, plain_batch
from remanence.tasks.haystack import Haystack
from remanence.tokenizers.tokens import Tokenizer, pair_tokens

Needles = list[np.ndarray]
"""What a text tells in order: facts, and questions with their answers. Tokens to be answered are held as ``~token``."""


class Curriculum:
    """Rows filled with texts of the lengths of a curriculum; of 0, stories without hay.

    A text is a story up to one of its questions, whose answer ends it. In half of them the questions before it are
    asked and answered on the way, as in bAbI: they are most of what there is to learn from.

    Every length has an equal part of the steps, in which it is the length of the rows (0 has the shortest other one's).
    Half of the rows are one text of it, the others filled with texts of a length that is drawn from those up to it, so
    that a memory also meets what other texts have left in it. Every step has `tokens` tokens, in the more rows the
    shorter they are. Its batch depends on the seed and the step alone.
    """

    def __init__(
        self,
        stories: Mapping[str, Sequence[Story]],
        sentences: Iterable[str],
        tokenizer: Tokenizer,
        curriculum: Sequence[int],
        tokens: int,
        steps: int,
        seed: int,
        rank: int = 0,
    ) -> None:
        self.tokenizer, self.curriculum, self.tokens, self.steps = tokenizer, curriculum, tokens, steps
        self.seed, self.rank = seed, rank
        self.shortest = min((length for length in curriculum if length), default=tokens)
        longest = max(self.shortest, *curriculum)
        if tokens % longest:
            wanted = f"divisors of a step's {tokens} tokens (batch x data.length of a process)"
            raise ValueError(f"data.curriculum: expected {wanted}, got {longest}")
        self.fact = cache(lambda text: np.array(tokenizer.encode(f" {text}"), np.int32))
        self.question = cache(self._question)
        self.stories = {task: _group_questions(own) for task, own in stories.items()}
        sizes = {task: np.array([self._size(own) for own in told]) for task, told in self.stories.items()}
        self.fitting: dict[int, list[tuple[str, np.ndarray]]] = {}
        for room in sorted({length or self.shortest for length in curriculum}):
            for task, own in sizes.items():
                if own.min() > room:
                    wanted = f"at least {own.min()}, for the shortest story of {task}"
                    raise ValueError(f"data.curriculum: expected {wanted}, got {room}")
            self.fitting[room] = [(task, np.flatnonzero(own <= room)) for task, own in sizes.items()]
        self.hay = Haystack.of("data.books", sentences, tokenizer, longest, HAYSTACK_ROWS)

    def step(self, number: int) -> Batch:
        stage = min(number * len(self.curriculum) // self.steps, len(self.curriculum) - 1)
        size = self.curriculum[stage] or self.shortest
        rows = self.tokens // size
        read = np.stack([self._row(stage, size, number, self.rank * rows + row) for row in range(rows)])
        tokens = np.where(read < 0, ~read, read).astype(np.int64)
        targets = np.full_like(tokens, IGNORED)
        targets[:, :-1] = np.where(read < 0, tokens, IGNORED)[:, 1:]
        return plain_batch(tokens, targets)

    def _row(self, stage: int, size: int, number: int, row: int) -> np.ndarray:
        counter = [0, 0, row, 2]  # `train/initial_state.py` has a 1 in the last place
        rng = np.random.Generator(np.random.Philox(key=[self.seed, number], counter=counter))
        length = self.curriculum[stage if rng.random() < 0.5 else int(rng.integers(stage + 1))]
        if not length:
            return self._stories(size, rng)
        return np.concatenate([self._text(length, rng) for _ in range(size // length)])

    def _draw(self, length: int, rng: np.random.Generator) -> Needles:
        task, indices = self.fitting[length][rng.integers(len(self.fitting[length]))]
        return self._needles(
            self.stories[task][indices[rng.integers(len(indices))]], bool(rng.random() < 0.5)
        )

    def _text(self, length: int, rng: np.random.Generator) -> np.ndarray:
        """A story in a haystack, `length` tokens in all, with its last question at the end."""
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

    def _stories(self, size: int, rng: np.random.Generator) -> np.ndarray:
        """A row of stories without a haystack, filled up with book text."""
        needles: Needles = []
        room = size
        while (needed := sum(map(len, more := self._draw(size, rng)))) <= room:
            needles += more
            room -= needed
        start = int(self.hay.borders[self.hay.begin(room, rng)])
        return np.concatenate([*needles, self.hay.tokens[start : start + room]])

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


def _group_questions(stories: Sequence[Story]) -> list[list[Story]]:
    """Every question, together with the earlier questions of its story."""
    found: list[list[Story]] = []
    for story in stories:
        last = found[-1] if found else []
        goes_on = bool(last) and last[-1].facts == story.facts[: len(last[-1].facts)]
        found.append([*last, story] if goes_on else [story])
    return found
