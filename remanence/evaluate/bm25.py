"""BM25, the ranking function of text search, as a baseline for memories."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence


class Bm25:
    """Okapi BM25 over some texts, with the usual constants. Words are compared in lower case.

    Args:
        texts: the texts to rank.
        k1: how much further occurrences of a word count.
        b: how much long texts are discounted, from 0 to 1.
    """

    def __init__(self, texts: Sequence[str], *, k1: float = 1.5, b: float = 0.75) -> None:
        self.k1, self.b = k1, b
        self.counts = [Counter(_words(text)) for text in texts]
        self.lengths = [count.total() for count in self.counts]
        self.mean_length = sum(self.lengths) / max(1, len(texts))
        found = Counter(word for count in self.counts for word in count)
        self.idf = {word: math.log(1 + (len(texts) - n + 0.5) / (n + 0.5)) for word, n in found.items()}

    def scores(self, query: str) -> list[float]:
        """The score of every text for a query; 0 for a text that has none of its words."""
        asked, scores = _words(query), []
        for count, length in zip(self.counts, self.lengths, strict=True):
            scale = self.k1 * (1 - self.b + self.b * length / max(self.mean_length, 1e-9))
            some = (word for word in asked if word in count)
            scores.append(sum(self.idf[w] * count[w] * (self.k1 + 1) / (count[w] + scale) for w in some))
        return scores

    def top(self, query: str, k: int) -> list[int]:
        """The indices of the `k` best texts, in their original order."""
        scores = self.scores(query)
        return sorted(sorted(range(len(scores)), key=lambda n: -scores[n])[:k])


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
