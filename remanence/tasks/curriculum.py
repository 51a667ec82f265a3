"""BABILong training texts with a length curriculum: first stories alone, then stories in longer and longer
haystacks.
"""

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
"""The facts and the questions with answers of a text, in order, as tokens. Tokens of answers, which are
targets, are stored as ``~token``.
"""


class Curriculum:
    """Rows filled with texts whose lengths follow a curriculum. Length 0 means stories without a haystack.

    A text is a story up to one of its questions and ends with the answer. In half of the texts the earlier
    questions of the story are also asked and answered where they occur, as in bAbI; they provide most of the
    training signal.

    Each length of the curriculum is the row length for an equal part of the steps (for 0, the shortest other
    length is). Half of the rows are one text of this length. The others are filled with texts of a length
    drawn from those up to the current one, so that the memory also meets content left by earlier texts. Every
    step has `tokens` tokens, so shorter rows mean more rows. A batch depends only on the seed and the step.
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
        sizes = {task: np.array([self._size(own) for own in groups]) for task, groups in self.stories.items()}
        self.fitting: dict[int, list[tuple[str, np.ndarray]]] = {}
        for length in sorted({length or self.shortest for length in curriculum}):
            for task, own in sizes.items():
                if own.min() > length:
                    wanted = f"at least {own.min()}, for the shortest story of {task}"
                    raise ValueError(f"data.curriculum: expected {wanted}, got {length}")
            self.fitting[length] = [(task, np.flatnonzero(own <= length)) for task, own in sizes.items()]
        self.hay = Haystack.from_sentences("data.books", sentences, tokenizer, longest, HAYSTACK_ROWS)

    def step(self, number: int) -> Batch:
        """Return the batch of a step."""
        stage = min(number * len(self.curriculum) // self.steps, len(self.curriculum) - 1)
        size = self.curriculum[stage] or self.shortest
        rows = self.tokens // size
        encoded = np.stack([self._row(stage, size, number, self.rank * rows + row) for row in range(rows)])
        tokens = np.where(encoded < 0, ~encoded, encoded).astype(np.int64)
        targets = np.full_like(tokens, IGNORED)
        targets[:, :-1] = np.where(encoded < 0, tokens, IGNORED)[:, 1:]
        return plain_batch(tokens, targets)

    def _row(self, stage: int, size: int, number: int, row: int) -> np.ndarray:
        """Draw one row of `size` tokens."""
        counter = [0, 0, row, 2]  # `train/initial_state.py` uses 1 in the last place
        rng = np.random.Generator(np.random.Philox(key=[self.seed, number], counter=counter))
        length = self.curriculum[stage if rng.random() < 0.5 else int(rng.integers(stage + 1))]
        if not length:
            return self._stories(size, rng)
        return np.concatenate([self._text(length, rng) for _ in range(size // length)])

    def _draw(self, length: int, rng: np.random.Generator) -> Needles:
        """Draw a story that fits into `length` tokens, and return its facts and questions."""
        task, indices = self.fitting[length][rng.integers(len(self.fitting[length]))]
        return self._needles(
            self.stories[task][indices[rng.integers(len(indices))]], bool(rng.random() < 0.5)
        )

    def _text(self, length: int, rng: np.random.Generator) -> np.ndarray:
        """Return a story in a haystack, `length` tokens in all, with its last question at the end."""
        needles = self._draw(length, rng)
        num_tokens = length - sum(map(len, needles))
        borders = self.hay.borders
        first = int(borders[self.hay.draw_start(num_tokens, rng)])
        hay = self.hay.tokens[first : first + num_tokens]
        depths = first + (np.sort(rng.random(len(needles) - 1)) * num_tokens).astype(
            np.int64
        )  # integers, as searching with floats is slow
        places = borders[np.searchsorted(borders, depths, "right") - 1] - first
        parts, last = [], 0
        for place, needle in zip([*places.tolist(), num_tokens], needles, strict=True):
            parts += [hay[last:place], needle]
            last = place
        return np.concatenate(parts)

    def _stories(self, size: int, rng: np.random.Generator) -> np.ndarray:
        """Return a row of stories without a haystack. The space after the last story is filled with book
        text.
        """
        needles: Needles = []
        num_tokens = size
        while (needed := sum(map(len, more := self._draw(size, rng)))) <= num_tokens:
            needles += more
            num_tokens -= needed
        start = int(self.hay.borders[self.hay.draw_start(num_tokens, rng)])
        return np.concatenate([*needles, self.hay.tokens[start : start + num_tokens]])

    def _needles(self, stories: Sequence[Story], all_questions: bool) -> Needles:
        """Return the facts and the question of the last story. With `all_questions`, the earlier questions are
        included at their places.
        """
        found: Needles = []
        num_facts = 0
        for story in stories if all_questions else stories[-1:]:
            found += [self.fact(fact) for fact in story.facts[num_facts:]]
            found.append(self.question(story.query, story.answer))
            num_facts = len(story.facts)
        return found

    def _question(self, query: str, answer: str) -> np.ndarray:
        """Return the tokens of a question and its answer. The answer's tokens are stored as ``~token``."""
        prompt, end = pair_tokens(self.tokenizer, PROMPT, f" {answer}\n")
        return np.array([*self.tokenizer.encode(query), *prompt, *[~token for token in end]], np.int32)

    def _size(self, stories: Sequence[Story]) -> int:
        """Return the number of tokens of a story with all its questions."""
        return sum(map(len, self._needles(stories, True)))


def _group_questions(stories: Sequence[Story]) -> list[list[Story]]:
    """Return, for every question, a list of the earlier questions of its story and the question itself."""
    groups: list[list[Story]] = []
    for story in stories:
        previous = groups[-1] if groups else []
        same_story = bool(previous) and previous[-1].facts == story.facts[: len(previous[-1].facts)]
        groups.append([*previous, story] if same_story else [story])
    return groups
