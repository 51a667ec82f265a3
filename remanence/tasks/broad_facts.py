"""Training data for long-range recall of many kinds of facts, in many wordings: `remanence.tasks.facts` with the
phrases of `remanence.tasks.fact_phrases`, and questions about what was never stated.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from remanence.data import Tokens
from remanence.tasks import fact_phrases as phrases
from remanence.tasks.fact_phrases import Fact, Relation, Vocabulary
from remanence.tasks.fact_words import HELD_OUT, MONTHS
from remanence.tasks.facts import (
    BARE,
    FAR,
    MAX_INSERTED,
    MIN_DISTANCE,
    NEAR_SHARE,
    Facts,
    Insertion,
    _distractor,
    _log_uniform,
)

SPACINGS = (160, 1024), (1024, 32768)
"""Two ranges of the number of tokens per fact. Each stream draws one of them, then a value, uniform in the
logarithm.
"""
FIRST_SPACING, FIRST_REACH = 80, 1536
"""The number of tokens per fact, and the largest distance from a fact to its question, at the first step of the
ramp.
"""
PENDING = 1, 16
"""The range of the average number of facts that are stated but not yet asked for, uniform in the logarithm."""
MANY_PENDING, MANY_SHARE = 64, 0.15
"""The average number of such facts in a share of the streams."""
WORDING_SHARE = 0.3
"""The share of the ramp over which the forms of facts, long numbers, and questions about what was not stated are
introduced.
"""
FIRST_NUMBERS = 0.9
"""The share of values that are numbers at the first step; it falls to what it is by chance over the same part of the
ramp. A model learns to look up short numbers first: with all kinds of values from the start, a small model had not
learned to look up a name after 250 steps, in which it learned it with numbers alone.
"""
UNKNOWN_SHARE = 0.12
"""The share of questions about something that was not stated. The answer is `fact_phrases.UNKNOWN`."""
STATED_SUBJECT = 0.25
"""The share of these questions that are about another relation of a subject that was stated."""
SHARED_SUBJECT = 0.15
"""The share of facts about a subject of which another fact was stated before."""
ARTICLE_SHARE = 0.3
"""The share of streams with passages as in an encyclopedia, full of names and numbers that are no answers."""
ARTICLE_SPACING = 400
"""The number of tokens per such passage."""
MIN_COUNT, MOST_COMMON = 3, 8192
"""The smallest count of a word of the corpus that is used in facts, and the largest number of such words."""
COUNTED = 1 << 22
"""The number of tokens of the corpus in which words are counted."""


class Stated(NamedTuple):
    """A fact of a stream that is stated and not asked for yet: its subject, its relation, and when it is asked for."""

    subject: str
    relation: Relation | None
    question_position: int


class BroadFacts(Facts):
    """Batches of streams as of `Facts`, with facts of many kinds.

    Values are numbers of 1 to 16 digits, words and names; subjects are things and persons; statements and questions
    are drawn independently from many wordings. Some questions are about subjects that were not stated, or about
    another relation of a subject that was. Their answer is "unknown".
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
        super().__init__(data, length, batch, weight, distance_ramp, seed, rank, world_size, answer_end)
        self.vocabulary = Vocabulary(common_words(data))

    def _draw_insertions(self, row: int, stream: int) -> list[list[Insertion]]:
        """Return the insertions of each step of a stream, in order."""
        rng, span = self._rng(row, stream, 1), self._span(row, stream)
        full = float(_log_uniform(rng, *SPACINGS[int(rng.integers(len(SPACINGS)))]))
        pending = MANY_PENDING if rng.random() < MANY_SHARE else float(_log_uniform(rng, *PENDING))
        articles = rng.random() < ARTICLE_SHARE * span.progress**0.5
        spacing = FIRST_SPACING ** (1 - span.progress) * full**span.progress
        reach = FIRST_REACH ** (1 - span.progress) * max(2.0 * FAR, pending * full) ** span.progress
        total = span.steps * self.length
        drawing = _Drawing(rng, self.vocabulary, span.progress)
        positions = np.sort(rng.integers(total, size=max(1, round(total / spacing))))
        near = _log_uniform(rng, MIN_DISTANCE, FAR, len(positions))
        far = _log_uniform(rng, FAR, reach, len(positions))
        distances = np.where(rng.random(len(positions)) < NEAR_SHARE, near, far)
        found: list[list[Insertion]] = [[] for _ in range(span.steps)]
        tokens_left = np.full(span.steps, int(MAX_INSERTED * self.length))

        def insert(*insertions: Insertion) -> bool:
            """Insert all of these, if there is space."""
            steps = [insertion.position // self.length for insertion in insertions]
            for step, insertion in zip(steps, insertions, strict=True):
                tokens_left[step] -= len(insertion.tokens)
            if fits := min(tokens_left[steps]) >= 0:
                for step, insertion in zip(steps, insertions, strict=True):
                    found[step].append(insertion)
            else:
                for step, insertion in zip(steps, insertions, strict=True):
                    tokens_left[step] += len(insertion.tokens)
            return bool(fits)

        for position, question_position in zip(
            positions.tolist(), (positions + distances).tolist(), strict=True
        ):
            if question_position >= total:
                continue
            fact, stated = drawing.fact(position, question_position)
            question = self._question(fact, question_position)
            if stated is None:  # about something unknown
                insert(question)
            elif insert(self._plain(fact.statement, position), question):
                drawing.state(stated)
        for position in rng.integers(total, size=max(len(positions), total // BARE)).tolist():
            insert(self._plain(_distractor(rng), position))
        if articles:
            for position in rng.integers(total, size=total // ARTICLE_SPACING).tolist():
                insert(self._plain(passage(rng, self.vocabulary), position))
        return [sorted(each, key=lambda insertion: insertion.position) for each in found]

    def _plain(self, text: str, position: int) -> Insertion:
        """Return a text without answers as an insertion."""
        tokens = np.array(self.tokenizer.encode(text), np.int64)
        return Insertion(position, tokens, np.zeros(len(tokens), bool))

    def _question(self, fact: Fact, position: int) -> Insertion:
        """Return a question with its answer as an insertion."""
        parts = [self.tokenizer.encode(text) for text in (fact.question, f" {fact.value}", ".")]
        marks = np.repeat([False, True, self.answer_end], [len(part) for part in parts])
        return Insertion(position, np.array([token for part in parts for token in part], np.int64), marks)


class _Drawing:
    """Draws the facts of a stream in the order of their positions, so that no question has two answers."""

    def __init__(self, rng: np.random.Generator, vocabulary: Vocabulary, progress: float) -> None:
        self.rng, self.vocabulary = rng, vocabulary
        forms = len(phrases.SHARES)
        introduced = progress**0.5 / WORDING_SHARE
        self.forms = min(forms, 1 + int(forms * introduced))
        self.unknown_share = UNKNOWN_SHARE * min(1.0, introduced)
        longer = phrases.MAX_DIGITS - phrases.SHORT_DIGITS
        self.numbers = FIRST_NUMBERS * max(0.0, 1 - introduced)
        self.max_digits = phrases.SHORT_DIGITS + int(longer * min(1.0, introduced))
        self.known: dict[str, list[Stated]] = {}
        self.recent: list[Stated] = []
        self.taken_until: dict[str, int] = {}

    def fact(self, position: int, question_position: int) -> tuple[Fact, Stated | None]:
        """Draw a fact, or a question about something that is not stated before `question_position`."""
        rng, unknown = self.rng, bool(self.rng.random() < self.unknown_share)
        form = phrases.draw_form(rng, self.forms)
        relation = phrases.draw_relation(rng, form, self.numbers)
        share = STATED_SUBJECT if unknown else SHARED_SUBJECT
        subject = None
        if form == phrases.ANY and rng.random() < share:
            subject = self._stated_subject(position, relation)
        if subject is None:
            subject = self._new_subject(relation, position)
        fact = phrases.draw_fact(rng, self.vocabulary, relation, subject, form, self.max_digits)
        if unknown:
            self.taken_until[subject] = max(question_position, self.taken_until.get(subject, 0))
            return fact._replace(value=phrases.UNKNOWN), None
        return fact, Stated(subject, None if form == phrases.DIRECT else relation, question_position)

    def state(self, stated: Stated) -> None:
        """Note that a fact is stated."""
        self.known.setdefault(stated.subject, []).append(stated)
        self.recent = [*self.recent[-15:], stated]
        until = self.taken_until.get(stated.subject, 0)
        self.taken_until[stated.subject] = max(until, stated.question_position)

    def _new_subject(self, relation: Relation, position: int) -> str:
        """Draw a subject of which nothing is stated. If there are none left, one whose questions are all asked."""
        for _ in range(20):
            subject = self.vocabulary.subject(self.rng, relation.subjects)
            if subject not in self.taken_until:
                return subject
        while self.taken_until.get(subject, -1) >= position:
            subject = f"{subject} {int(self.rng.integers(2, 100))}"
        return subject

    def _stated_subject(self, position: int, relation: Relation) -> str | None:
        """Return a subject of a recent fact of which nothing similar to a relation is stated."""
        if not self.recent:
            return None
        subject = self.recent[int(self.rng.integers(len(self.recent)))].subject
        if relation.subjects != "any" and (relation.subjects == "thing") != subject.startswith("the "):
            return None
        before = self.known[subject]
        if any(each.relation is None or phrases.similar(each.relation, relation) for each in before):
            return None
        return subject


def common_words(data: Tokens) -> list[str]:
    """Return the common words of a corpus that are written in small letters, without those held out for tests."""
    counts: Counter[str] = Counter()
    left = COUNTED
    for document in range(len(data.lengths)):
        size = min(left, int(data.lengths[document]))
        text = data.tokenizer.decode(data.piece(document, 0, size).tolist())
        counts.update(re.findall(r"(?<=[a-z,] )[a-z]{4,10}(?=[ ,.;])", text))
        left -= size
        if left <= 0:
            break
    excluded = HELD_OUT | {phrases.UNKNOWN}
    words = [word for word, count in counts.items() if count >= MIN_COUNT and word not in excluded]
    return sorted(words, key=lambda word: (-counts[word], word))[:MOST_COMMON]


SENTENCES = (
    "In {y} , {p} was appointed as director of the {w} Institute in {c} .",
    "{p} ( {y} \N{EN DASH} {y} ) was a {j} and politician from {c} .",
    "The population was {n} at the {y} census , and {n} in {y} .",
    "It reached number {m} on the {w} chart and sold {n} copies in its first week .",
    "The {w} Canal is {n} @.@ {m} kilometres ( {n} mi ) long .",
    "On {m} {M} {y} , the ship left {c} with {n} men and {m} guns .",
    "{w} scored {m} goals in {m} games , and {p} {m} in {m} .",
    "About {n} @,@ {k} people live in {c} , of whom {m} @.@ {m} % are under {m} .",
    "The battle cost {n} dead and {n} wounded ; {p} lost an arm .",
    "Species of {w} are found between {n} and {n} m above sea level .",
    "The building has {m} storeys , was designed by {p} , and cost $ {n} million .",
    "The series ran for {m} episodes from {M} {y} to {M} {y} .",
    "Route {m} begins at {w} and runs {n} miles north to {c} .",
    "{p} won the race in {m} : {m} @.@ {m} , ahead of {p} .",
    "= = {w} = =", "= = = {y} \N{EN DASH} {y} = = =",
    "The film received {m} % positive reviews , based on {n} reviews .",
    "ISBN {N} .", "Tel. {N} , Fax {N} .", "( {w} et al. , {y} , pp. {n} \N{EN DASH} {n} )", "No. {N} / {m}",
    "{n} , {n} , {n} and {n} .",
    "The {w} was {m} years old in {y} , and the {w} {m} .", "{p} said that {c} had {n} houses and {m} churches .",
)  # fmt: skip
"""Templates of sentences as in an encyclopedia: {p} a person, {c} a city, {w} a word, {j} an occupation, {y} a year,
{M} a month, and numbers of one to two ({m}), three ({k}), any ({n}) and many ({N}) digits.
"""


def passage(rng: np.random.Generator, vocabulary: Vocabulary) -> str:
    """Draw one to three sentences as in an encyclopedia."""
    slots: dict[str, Callable[[], str]] = {
        "p": lambda: vocabulary.person(rng),
        "c": lambda: vocabulary.place(rng),
        "w": lambda: phrases.capitalized(vocabulary.value(rng, "word")),
        "j": lambda: vocabulary.value(rng, "job"),
        "y": lambda: str(rng.integers(1400, 2030)),
        "M": lambda: vocabulary.word(rng, MONTHS),
        "m": lambda: str(rng.integers(1, 100)),
        "k": lambda: f"{rng.integers(1000):03d}",
        "n": lambda: str(int(10 ** rng.uniform(0, 5))),
        "N": lambda: phrases.number(rng, int(rng.integers(6, 14))),
    }
    count = int(rng.integers(1, 4))
    templates = [SENTENCES[int(index)] for index in rng.integers(len(SENTENCES), size=count)]
    return " " + " ".join(
        re.sub(r"\{(\w)\}", lambda match: slots[match[1]](), template) for template in templates
    )
