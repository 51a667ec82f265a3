"""Conversations in which facts are told, something else is read, and the facts are asked for: what a memory is to keep
for a model whose attention has lost sight of them. And the texts beside them, read on from step to step.

Names that are asked for in evaluation are never told in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import numpy as np
import torch

from remanence.data import Batch, Tokens
from remanence.tasks.draw import IGNORED, grown
from remanence.tokenizers.tokens import Tokenizer, pair_tokens

FIRST = [
    "Ada",
    "Boris",
    "Clara",
    "Diego",
    "Elena",
    "Felix",
    "Greta",
    "Hassan",
    "Irene",
    "Jonas",
    "Karin",
    "Lewis",
    "Maya",
    "Nadia",
    "Oscar",
    "Petra",
    "Quentin",
    "Rosa",
    "Samir",
    "Tessa",
    "Ursula",
    "Victor",
    "Wanda",
    "Xavier",
    "Yara",
    "Zoltan",
    "Agnes",
    "Bruno",
    "Celia",
    "Dmitri",
    "Edith",
    "Farid",
    "Gloria",
    "Hugo",
    "Ingrid",
    "Jamal",
]
LAST = [
    "Abbott",
    "Becker",
    "Castro",
    "Dalton",
    "Eriksen",
    "Fischer",
    "Garner",
    "Holloway",
    "Ivanov",
    "Jensen",
    "Keller",
    "Lindqvist",
    "Moreau",
    "Novak",
    "Okafor",
    "Palmer",
    "Quigley",
    "Romero",
    "Sanders",
    "Takeda",
    "Ulrich",
    "Vargas",
    "Whitman",
    "Yilmaz",
    "Zimmer",
    "Archer",
    "Bowen",
    "Chandra",
    "Drake",
    "Ellison",
]
HELD_OUT = 5
"""One name of so many is for evaluation alone."""


class Kind(NamedTuple):
    """What can be said of someone: the statement, which is also the answer, the question, and the values."""

    said: str
    asked: str
    values: tuple[str, ...]


def _kind(said: str, asked: str, values: str) -> Kind:
    return Kind(said, asked, tuple(value.strip() for value in values.split(",")))


KINDS = (
    _kind("{name} lives in {value}.", "Where does {name} live?",
          "Lisbon, Oslo, Prague, Dublin, Cairo, Lima, Seoul, Boston, Vienna, Athens, Nairobi, Madrid, Hanoi, Havana, "
          "Zurich, Warsaw, Denver, Kyoto, Quebec, Naples, Bergen, Tunis, Sydney, Bogota"),
    _kind("{name} works as a {value}.", "What does {name} work as?",
          "baker, pilot, nurse, lawyer, farmer, dentist, painter, plumber, teacher, singer, tailor, butcher, judge, "
          "carpenter, librarian, gardener, chemist, sailor, miner, barber, translator, surgeon, potter, clerk"),
    _kind("{name} owns a {value}.", "Which animal does {name} own?",
          "parrot, rabbit, tortoise, pony, hamster, lizard, goat, ferret, canary, donkey, pigeon, snake, goose, cat, "
          "beagle, llama, hedgehog, rooster, poodle, frog, crab, sheep, owl, mouse"),
    _kind("{name} plays the {value}.", "Which instrument does {name} play?",
          "violin, flute, trumpet, cello, guitar, piano, drums, harp, oboe, banjo, organ, clarinet, accordion, tuba, "
          "mandolin, bassoon, saxophone, lute, viola, trombone, recorder, bagpipes, ukulele, xylophone"),
    _kind("The favourite fruit of {name} is the {value}.", "What is the favourite fruit of {name}?",
          "apple, mango, cherry, plum, peach, grape, lemon, melon, papaya, apricot, banana, fig, kiwi, lime, orange, "
          "pear, pineapple, quince, raspberry, strawberry, tangerine, coconut, blueberry, pomegranate"),
    _kind("The car of {name} is {value}.", "What colour is the car of {name}?",
          "red, blue, green, yellow, black, white, silver, purple, orange, brown, pink, grey, golden, beige, "
          "maroon, violet, crimson, navy, olive"),
    _kind("{name} was born in {value}.", "In which month was {name} born?",
          "January, February, March, April, May, June, July, August, September, October, November, December"),
    _kind("{name} collects {value}.", "What does {name} collect?",
          "stamps, coins, maps, shells, clocks, dolls, knives, masks, buttons, posters, feathers, fossils, spoons, "
          "lamps, bottles, keys, postcards, medals, marbles, teapots, mirrors, hats, comics, stones"),
)  # fmt: skip


class Fact(NamedTuple):
    """Something said of a name, and how it is asked for."""

    statement: str
    question: str
    value: str


def draw_facts(
    rng: np.random.Generator, count: int, held_out: bool, kinds: Sequence[Kind] = KINDS
) -> list[Fact]:
    """Facts about as many different names: those for evaluation, or the others."""
    names = [
        (a, b) for a in range(len(FIRST)) for b in range(len(LAST)) if ((a + b) % HELD_OUT == 0) == held_out
    ]
    facts = []
    for index in rng.permutation(len(names))[:count]:
        a, b = names[index]
        name, kind = f"{FIRST[a]} {LAST[b]}", kinds[int(rng.integers(len(kinds)))]
        value = kind.values[int(rng.integers(len(kind.values)))]
        facts.append(Fact(kind.said.format(name=name, value=value), kind.asked.format(name=name), value))
    return facts


def _one_of_each() -> list[Fact]:
    """A fact of every kind, about the longest of names."""
    name = f"{max(FIRST, key=len)} {max(LAST, key=len)}"
    return [
        Fact(kind.said.format(name=name, value=value), kind.asked.format(name=name), value)
        for kind in KINDS
        for value in [max(kind.values, key=len)]
    ]


class Turns:
    """How a conversation is written: in ChatML where a tokenizer has its marks, in plain words elsewhere."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        marks = [tokenizer.encode(mark) for mark in ("<|im_start|>", "<|im_end|>")]
        self.chatml = all(len(mark) == 1 for mark in marks)

    def user(self, text: str) -> str:
        return f"<|im_start|>user\n{text}<|im_end|>\n" if self.chatml else f"\n\nUser: {text}"

    @property
    def begun(self) -> str:
        """What stands in front of an answer."""
        return "<|im_start|>assistant\n" if self.chatml else "\n\nAnswer:"

    def answer(self, text: str, ended: bool = True) -> str:
        end = "<|im_end|>\n" if self.chatml else "\n"
        return ("" if self.chatml else " ") + text + end * ended

    def question(self, fact: Fact) -> str:
        return self.user(fact.question) + self.begun

    def telling(self, facts: Sequence[Fact]) -> str:
        told = " ".join(fact.statement for fact in facts)
        return self.user(f"Please remember this. {told}") + self.begun + self.answer("I will remember it.")

    def between(self) -> tuple[str, str]:
        """What stands in front of and behind the text that is read in between."""
        opened, closed = self.user("Now read this.\n\0").split("\0")
        return opened, closed + self.begun + self.answer("I have read it.")


class _Conversation(NamedTuple):
    """What is said before a text is read and right behind it, and of every fact its question and answer, with marks."""

    told: np.ndarray
    behind: np.ndarray
    asked: list[tuple[np.ndarray, np.ndarray]]

    @property
    def size(self) -> int:
        return len(self.told) + len(self.behind) + sum(len(tokens) for tokens, _ in self.asked)


class FactDialogues:
    """Rows ``[rows, length]``: some are filled with conversations, begun anew with every step; the others read texts
    on, piece by piece, their memory carried, and leave them after some pieces.

    In a conversation up to `facts` facts are told, tokens of a text are read, and every fact is asked for; then the
    next begins, as long as the row has room. Over the first `ramp` steps the text in between grows from next to
    nothing: a memory then finds what it was told before it has learned to pass over what is not worth keeping, and
    learns that from there. All rows are conversations until then, in which the text does not count at first.

    Every token is a target; one that need not be remembered counts `weight` times as much as one that must. With a
    curriculum of lengths each has an equal part of the steps, in the fewer rows the longer they are. A batch depends on
    the seed and the step alone.
    """

    CARRIED = 8
    """Pieces that a row reads of a text before it leaves it."""
    NEAREST = 16
    """Tokens that are read between telling and asking, at least."""

    def __init__(
        self, data: Tokens, lengths: Sequence[int], tokens: int, steps: int, *, facts: int, share: float,
        weight: float, ramp: int = 0, seed: int = 0, rank: int = 0, world: int = 1,
    ) -> None:  # fmt: skip
        self.data, self.tokenizer, self.turns = data, data.tokenizer, Turns(data.tokenizer)
        self.lengths, self.tokens, self.steps = tuple(lengths), tokens, steps
        self.facts, self.share, self.weight, self.ramp = facts, share, weight, ramp
        self.seed, self.rank, self.world = seed, rank, world
        longest = max(self.lengths)
        if tokens % longest:
            raise ValueError(
                f"data.curriculum: expected divisors of a step's {tokens} tokens (batch x data.length), got {longest}"
            )
        if not (data.lengths > longest + 1).any():
            raise ValueError(f"data: expected a document of more than {longest + 1:,} tokens, got none")
        one = max(said.size for fact in _one_of_each() if (said := self._conversation([fact], inf)))
        if (share or ramp) and one + self.NEAREST > min(self.lengths):
            raise ValueError(
                f"data.length (or the shortest of data.curriculum): expected at least "
                f"{one + self.NEAREST} tokens, for a conversation about one fact, got "
                f"{min(self.lengths)}"
            )

    def stage(self, number: int) -> tuple[int, int]:
        """The length of a step's rows, and the step that it began with."""
        part = min(number * len(self.lengths) // self.steps, len(self.lengths) - 1)
        while part and self.lengths[part] == self.lengths[part - 1]:
            part -= 1
        return self.lengths[part], -(-part * self.steps // len(self.lengths))

    def _rng(self, number: int, row: int, what: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=[self.seed, number], counter=[0, 0, row, what]))

    def _encode(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer.encode(text), np.int64)

    def _asked(self, fact: Fact) -> tuple[np.ndarray, np.ndarray]:
        """A question and its answer, and which of their tokens are to be known: the value's."""
        begun = self.turns.answer(fact.statement.removesuffix(f" {fact.value}."), ended=False)
        prompt, value = pair_tokens(self.tokenizer, self.turns.question(fact) + begun, f" {fact.value}")
        rest = self.tokenizer.encode(self.turns.answer(fact.statement).removeprefix(f"{begun} {fact.value}"))
        known = np.repeat([False, True, False], [len(prompt), len(value), len(rest)])
        return np.array([*prompt, *value, *rest], np.int64), known

    def _conversation(self, facts: Sequence[Fact], room: float) -> _Conversation | None:
        """Facts told, and then asked for; as many of them as there is room for, if there is any."""
        opened, closed = self.turns.between()
        behind, asked = self._encode(closed), [self._asked(fact) for fact in facts]
        count = len(facts)
        while count:
            told = np.concatenate([self._encode(self.turns.telling(facts[:count])), self._encode(opened)])
            size = len(told) + len(behind) + sum(len(tokens) for tokens, _ in asked[:count])
            if size + self.NEAREST <= room:
                return _Conversation(told, behind, asked[:count])
            count = min(count - 1, int(count * room / (size + self.NEAREST)))
        return None

    def _piece(self, rng: np.random.Generator, length: int) -> np.ndarray:
        """Some tokens of some text."""
        room = np.maximum(self.data.lengths - length, 0)
        document = int(rng.choice(len(room), p=room / room.sum()))
        start = int(rng.integers(room[document]))
        return self.data.piece(document, start, start + length).astype(np.int64)

    def _told(self, number: int, row: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Conversations of exactly ``length + 1`` tokens, with a text behind the last."""
        rng, share = self._rng(number, row, 4), grown(number, self.ramp)
        parts: list[np.ndarray] = []
        marks: list[np.ndarray] = []
        room = length + 1
        while True:
            count = int(rng.integers(1, self.facts + 1, 2).max())  # many more often than few
            said = self._conversation(draw_facts(rng, count, held_out=False), room)
            if said is None:
                break
            reading = self.NEAREST + int(rng.integers(int((room - said.size - self.NEAREST) * share) + 1))
            order = rng.permutation(len(said.asked))
            asked, known = zip(*[said.asked[index] for index in order], strict=True)
            parts += [said.told, self._piece(rng, reading), said.behind, *asked]
            marks += [np.zeros(len(said.told) + reading + len(said.behind), bool), *known]
            room -= said.size + reading
        if room:
            parts.append(self._piece(rng, room))
            marks.append(np.zeros(room, bool))
        return np.concatenate(parts), np.concatenate(marks)

    def _read(self, number: int, row: int, length: int, first: int) -> tuple[np.ndarray, bool]:
        """A row's piece of its text and one token more, and whether it begins there."""
        pieces = int(min(self.CARRIED, (self.data.lengths.max() - 1) // length))
        turn, piece = divmod(number - first + row, pieces)
        rng = self._rng(turn, row, 5 + first)
        room = np.maximum(self.data.lengths - pieces * length - 1, 0)
        if not room.any():  # the longest documents just fit
            room = (self.data.lengths > pieces * length).astype(np.int64)
        document = int(rng.choice(len(room), p=room / room.sum()))
        start = int(rng.integers(room[document])) + piece * length
        return self.data.piece(document, start, start + length + 1).astype(
            np.int64
        ), piece == 0 or number in (first, self.ramp)

    def step(self, number: int) -> Batch:
        length, first = self.stage(number)
        rows = self.tokens // length
        growth, total = grown(number, self.ramp), rows * self.world
        talks = total if growth < 1 else max(round(self.share * total), self.share > 0)
        read, answers, begins = [], [], []
        for row in range(rows):
            own = self.rank * rows + row
            if own < talks:
                tokens, marks = self._told(number, own, length)
                begin = True
            else:
                tokens, begin = self._read(number, own, length, first)
                marks = np.zeros(len(tokens), bool)
            read.append(tokens)
            answers.append(marks)
            begins.append(begin)
        text = torch.from_numpy(np.stack(read))
        weights = torch.where(torch.from_numpy(np.stack(answers))[:, 1:], 1.0, self.weight * growth)
        targets = text[:, 1:].where(weights > 0, IGNORED)
        return Batch(text[:, :-1].contiguous(), targets, None, None, torch.tensor(begins), weights)
