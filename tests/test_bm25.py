"""BM25 against its formula, and what it ranks first."""

import math

import pytest

from remanence.evaluate.bm25 import Bm25


def test_scores_are_those_of_the_formula():
    texts = ["the cat sat on the mat", "A cat!", "dogs bark at night"]
    own = Bm25(texts)
    mean, idf = (6 + 2 + 4) / 3, math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))
    expected = [idf * 2.5 / (1 + 1.5 * (0.25 + 0.75 * n / mean)) for n in (6, 2)]
    assert own.scores("Cat?") == pytest.approx([*expected, 0.0])


def test_the_best_texts_keep_their_order():
    texts = ["rain in spring", "the blue key is lost", "snow", "a key"]
    assert Bm25(texts).top("where is the blue key", 2) == [1, 3]
    assert Bm25(texts).top("blue", 10) == [0, 1, 2, 3], "no more than there are"
    assert Bm25([]).top("blue", 3) == [] and Bm25([""]).scores("blue") == [0.0]
