"""A haystack: real sentences in which facts or needles are hidden, cut to an exact number of tokens."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import numpy as np

from remanence.tokenizers.tokens import Tokenizer

SPARE = 16
"""The number of tokens kept free after an excerpt, because a sentence may have a few tokens fewer when it
comes first.
"""

Encode = Callable[[str], list[int]]
"""A function that encodes a text as tokens."""


class Haystack:
    """Sentences and their tokens, from which an excerpt with an exact number of tokens can be cut.

    Each sentence is encoded with a space before it, except the first sentence of a text. `borders` are the
    positions in `tokens` at which sentences begin and end.
    """

    def __init__(self, sentences: list[str], tokens: np.ndarray, borders: np.ndarray, encode: Encode) -> None:
        self.sentences, self.tokens, self.borders, self.encode = sentences, tokens, borders, encode
        self.subsets: dict[int, Haystack] = {}

    @classmethod
    def from_sentences(
        cls, name: str, sentences: Iterable[str], tokenizer: Tokenizer, min_tokens: int, num_rows: int = 2
    ) -> Haystack:
        """Make a haystack with text for `num_rows` rows of `min_tokens` tokens, so that excerpts can begin at
        different sentences.

        `name` is the setting that the sentences come from, for error messages. Raises ValueError if there are
        fewer than `min_tokens` tokens.
        """
        tokens, borders, used = array("i"), array("q", [0]), []
        for sentence in sentences:
            tokens.extend(tokenizer.encode(" " + sentence))
            borders.append(len(tokens))
            used.append(sentence)
            if len(tokens) >= num_rows * min_tokens:
                break
        if len(tokens) < min_tokens:
            raise ValueError(
                f"{name}: expected a text of at least {min_tokens:,} tokens, got {len(tokens):,}"
            )
        return cls(used, np.array(tokens, np.int32), np.array(borders, np.int64), tokenizer.encode)

    def subset(self, min_tokens: int) -> Haystack:
        """Return the haystack that `from_sentences` makes for `min_tokens` tokens. A short text thus does not
        depend on longer ones in the same evaluation.
        """
        if min_tokens not in self.subsets:
            count = min(int(np.searchsorted(self.borders, 2 * min_tokens)), len(self.sentences))
            end = int(self.borders[count])
            cut = self.sentences[:count], self.tokens[:end], self.borders[: count + 1]
            self.subsets[min_tokens] = Haystack(*cut, self.encode)
        return self.subsets[min_tokens]

    @cached_property
    def text(self) -> str:
        """All sentences, joined by spaces."""
        return " ".join(self.sentences)

    def draw_start(self, count: int, rng: np.random.Generator) -> int:
        """Draw the index of a sentence that is followed by at least `count` tokens."""
        last = int(np.searchsorted(self.borders[:-1], len(self.tokens) - count - SPARE, "right"))
        return int(rng.integers(max(1, last)))

    def excerpt(self, first: int, count: int, *, leading_space: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return `count` tokens starting at the sentence `first`, and the sentence borders within them.
        `leading_space` tells whether the first sentence has a space before it.
        """
        first_sentence = np.array(self.encode(" " * leading_space + self.sentences[first]), np.int32)
        after = int(self.borders[first + 1])
        tokens = np.concatenate(
            [first_sentence, self.tokens[after : after + max(0, count - len(first_sentence))]]
        )[:count]
        borders = np.concatenate([[0], self.borders[first + 1 :] - after + len(first_sentence)])
        return tokens, borders[borders <= count]


def max_tokens(encode: Encode, sentence: str) -> int:
    """Return the maximum number of tokens of a sentence: with a space before it, or as the first of a text."""
    return max(len(encode(" " + sentence)), len(encode(sentence)))


def hide(
    hay: Haystack, needles: Sequence[str], depths: Sequence[float], size: int, rng: np.random.Generator
) -> np.ndarray:
    """Return exactly `size` tokens of the haystack with each needle at the sentence border nearest to its
    depth (0 is the beginning, 1 the end).
    """
    order = sorted(range(len(needles)), key=lambda index: depths[index])
    needle_tokens = [np.array(hay.encode(" " + needles[index]), np.int32) for index in order]
    first = hay.draw_start(size - sum(map(len, needle_tokens)), rng)
    for leading in (False, True):  # whether the text begins with a needle
        if leading:
            needle_tokens[0] = np.array(hay.encode(needles[order[0]]), np.int32)
        text, borders = hay.excerpt(first, size - sum(map(len, needle_tokens)), leading_space=leading)
        positions = [int(borders[np.abs(borders - depths[index] * len(text)).argmin()]) for index in order]
        if not positions or positions[0]:
            break
    if leading:
        positions[0] = 0
    parts, last = [], 0
    for position, needle in zip(positions, needle_tokens, strict=True):
        parts += [text[last:position], needle]
        last = position
    return np.concatenate([*parts, text[last:]])
