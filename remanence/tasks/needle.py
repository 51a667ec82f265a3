"""Needle in a haystack: values with keys are hidden in a text and asked for at its end.

`Needle` draws rows of bytes for training. `KINDS` are the kinds of RULER, for evaluation with any tokenizer.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from remanence.data import Batch
from remanence.tasks.answers import Answer, contains_value
from remanence.tasks.draw import answer_batch, rank_rows, step_rng
from remanence.tasks.haystack import Haystack, hide, max_tokens


class Needle:
    """Training rows of bytes: named numbers at random positions between plain sentences, one of which is
    asked for at the end.

    The last bytes of a row are the answer, and only they are targets. Every row has exactly `length` bytes.
    """

    HAY = (
        "Rain fell on the hills until the evening. ",
        "A cart went slowly down the road. ",
        "Nobody had closed the window upstairs. ",
        "The river was high for that time of the year. ",
        "They ate bread and spoke of other things. ",
        "It was said that the winter would be long. ",
    )
    """The sentences between the needles."""
    NAMES = (
        "amber", "birch", "cedar", "delta", "ember", "fjord", "grove",
        "heron", "ivory", "jade", "karst", "lotus", "maple",
    )  # fmt: skip
    """The names of the numbers."""
    DIGITS = 4
    """The number of digits of each number."""

    def __init__(
        self, length: int, batch: int, pairs: int, seed: int, rank: int = 0, world_size: int = 1
    ) -> None:
        if pairs > len(self.NAMES):
            raise ValueError(f"pairs: expected at most {len(self.NAMES)} needles, got {pairs}")
        longest = pairs * len(self._needle("amber", "0000")) + len(self._question("amber")) + self.DIGITS
        if length < longest:
            fits = f"at least {longest} bytes for {pairs} needles and the question"
            raise ValueError(f"length: expected {fits}, got {length}")
        self.length, self.batch, self.pairs = length, batch, pairs
        self.seed, self.rank, self.world_size = seed, rank, world_size

    @staticmethod
    def _needle(name: str, number: str) -> str:
        """Return the sentence that states a number."""
        return f"The number of {name} is {number}. "

    @staticmethod
    def _question(name: str) -> str:
        """Return the question about a number."""
        return f"What is the number of {name}? "

    def row(self, rng: np.random.Generator) -> bytes:
        """Draw a row: sentences with needles between them, cut at the beginning, then the question and the
        answer.
        """
        names = rng.permutation(self.NAMES)[: self.pairs]
        numbers = [f"{rng.integers(10**self.DIGITS):0{self.DIGITS}d}" for _ in names]
        queried = int(rng.integers(self.pairs))
        end = self._question(names[queried]) + numbers[queried]
        needles = [self._needle(name, number) for name, number in zip(names, numbers, strict=True)]
        num_bytes = self.length - len(end) - sum(map(len, needles))
        hay = [str(rng.choice(self.HAY)) for _ in range(num_bytes // min(map(len, self.HAY)) + 1)]
        while hay and sum(map(len, hay)) - len(hay[0]) >= num_bytes:
            hay.pop(0)
        hay[:1] = [part[sum(map(len, hay)) - num_bytes :] for part in hay[:1]]
        for needle in needles:
            hay.insert(int(rng.integers(min(1, len(hay)), len(hay) + 1)), needle)
        return ("".join(hay) + end).encode()

    def step(self, number: int) -> Batch:
        """Return the batch of a step."""
        rng = step_rng(self.seed, number)
        rows = [np.frombuffer(self.row(rng), np.uint8) for _ in range(self.batch * self.world_size)]
        return answer_batch(rows[rank_rows(self.batch, self.rank)], [self.DIGITS] * self.batch)


NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""The repeated text that RULER uses as a haystack where it uses no essays."""


class Kind(NamedTuple):
    """A needle task of RULER: whether the haystack is an essay, the type of value, and the numbers of keys,
    of queried keys, and of values per key.
    """

    essay: bool
    value: str
    keys: int = 1
    queried: int = 1
    values: int = 1

    @property
    def answers(self) -> int:
        """The number of values in a full answer."""
        return self.queried * self.values


KINDS = {
    "pk": Kind(False, "number"),
    "n": Kind(True, "number"),
    "w": Kind(True, "uuid"),
    "multikey": Kind(True, "number", keys=4),
    "multiquery": Kind(True, "number", keys=4, queried=4),
    "multivalue": Kind(True, "number", values=4),
}
"""RULER's S-NIAH-1, 2 and 3 under their names in table 2 of the Titans paper, and three tasks with several
needles.
"""

_ADJECTIVES = (
    "amber ancient bold brisk calm clever curious dusty eager faint fierce frosty gentle golden hollow "
    "humble icy jolly keen lively lofty merry mighty narrow noble pale plain proud quick quiet rapid "
    "rusty sharp silent silver steep swift tame vivid"
)
_NOUNS = (
    "anchor anvil badger barrel beacon bridge candle canyon castle cedar comet copper dragon engine "
    "falcon feather forest garden glacier hammer harbor island kettle ladder lantern magnet marble "
    "meadow mirror needle orchard otter pebble puzzle raven saddle teapot temple thunder tunnel valley "
    "violin walnut whistle willow window zephyr"
)
ADJECTIVES, NOUNS = _ADJECTIVES.split(), _NOUNS.split()
"""The words that keys are made of."""


class Sample(NamedTuple):
    """The tokens of a text up to the question, the beginning of the answer, the right values, and wrong
    values to choose from.
    """

    text: np.ndarray
    prompt: str
    right: list[str]
    wrong: list[str]


def draw_sample(
    name: str, length: int, depth: float, *, hay: Haystack, choices: int, rng: np.random.Generator
) -> Sample:
    """Draw a sample of the kind `name`. Its text and prompt together have exactly `length` tokens.

    The first needle is at `depth` (0 to 1), others at random depths. There are `choices` values to choose
    from, right and wrong ones together.
    """
    kind = KINDS[name]
    keys = draw_unused(hay.text, rng, "key", kind.keys, [])
    values = draw_unused(hay.text, rng, kind.value, kind.keys * kind.values, [])
    by_key = {key: values[index * kind.values : (index + 1) * kind.values] for index, key in enumerate(keys)}
    queried = keys[: kind.queried]
    right = [value for key in queried for value in by_key[key]]
    wrong = [value for value in values if value not in right]
    wrong += draw_unused(hay.text, rng, kind.value, choices - len(right) - len(wrong), values)
    head, question, prompt = frame(kind, queried)
    needles = [needle(kind.value, key, value) for key in keys for value in by_key[key]]
    start, end = hay.encode(head), hay.encode(question)
    num_tokens = length - sum(map(len, (start, end, hay.encode(prompt))))
    min_length = length - num_tokens + sum(max_tokens(hay.encode, needle) for needle in needles)
    if min_length > length:
        raise ValueError(
            f"niah.lengths: expected at least {min_length} tokens for the kind {name}, got {length}"
        )
    depths = [depth, *(float(drawn) for drawn in rng.random(len(needles) - 1))]
    if kind.values > 1:  # the answer lists the values in the order of the text
        right = [value for _, value in sorted(zip(depths, right, strict=True))]
    middle = hide(hay, needles, depths, num_tokens, rng)
    text = np.concatenate([np.array(start, np.int32), middle, np.array(end, np.int32)])
    return Sample(text, prompt, right, wrong)


def needle(value_type: str, key: str, value: str) -> str:
    """Return the sentence that states a value. `value_type` is the type of value."""
    return f"One of the special magic {value_type}s for {key} is: {value}."


def frame(kind: Kind, queried: Sequence[str]) -> tuple[str, str, str]:
    """Return the text before the haystack, the question after it, and the beginning of the answer."""
    many = kind.answers > 1
    noun, verb = (f"{kind.value}s", "are") if many else (kind.value, "is")
    query = ", ".join(queried[:-1]) + ", and " * (len(queried) > 1) + queried[-1]
    head = (
        f"{'Some' if many else 'A'} special magic {noun} {verb} hidden within the following text. "
        f"Make sure to memorize it. I will quiz you about the {noun} afterwards.\n"
    )
    subject = f"the special magic {noun} for {query} mentioned in the provided text"
    return head, f"\nWhat {'are all' if many else 'is'} {subject}?", f" T{subject[1:]} {verb}"


def draw_unused(
    text: str, rng: np.random.Generator, type_name: str, count: int, excluded: Sequence[str]
) -> list[str]:
    """Draw `count` different keys or values of the type `type_name` that are neither in `text` nor in `excluded`."""
    drawn_values: list[str] = []
    while len(drawn_values) < count:
        if type_name == "key":
            drawn = f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
        elif type_name == "number":
            drawn = str(rng.integers(10**6, 10**7))
        else:
            drawn = str(uuid.UUID(bytes=rng.bytes(16), version=4))
        if drawn not in text and drawn not in drawn_values and drawn not in excluded:
            drawn_values.append(drawn)
    return drawn_values


def options(sample: Sample) -> list[str]:
    """Return the texts whose likelihoods `score` needs: all right values as one answer, then each value
    alone.
    """
    return [f" {', '.join(sample.right)}", *(f" {value}" for value in (*sample.right, *sample.wrong))]


def score(sample: Sample, answer: Answer) -> dict[str, float | str | list[str]]:
    """Return the shares of the right values that are in the generated text ("said"), are the most likely text
    ("likeliest"), and are among the most likely choices ("chosen").

    For the first two, a value must also end in the right place: "41702835" does not state 4170283.
    """
    joined, *single = answer.options
    best = Answer(answer.text, single).ranked[: len(sample.right)]
    return {
        "said": sum(contains_value(answer.text, value) for value in sample.right) / len(sample.right),
        "likeliest": float(joined.states(sample.right[-1])),
        "chosen": sum(index < len(sample.right) for index in best) / len(sample.right),
        "answer": answer.text,
        "right": sample.right,
    }
