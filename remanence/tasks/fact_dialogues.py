"""Training data for a memory next to a short attention window: conversations that state facts, then a text
longer than the window, then questions about the facts. Other rows of a batch read texts that continue from
step to step.

The names in evaluation facts never occur in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import numpy as np
import torch

from remanence.data import Batch, Tokens
from remanence.tasks.draw import IGNORED, ramp_progress
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
"""First names of the persons in facts."""
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
"""Last names of the persons in facts."""
HELD_OUT = 5
"""One in this many names is used in evaluation only."""


class Kind(NamedTuple):
    """A kind of fact about a person: a template of the statement, which is also the answer, a template of the
    question, and the possible values.
    """

    statement: str
    question: str
    values: tuple[str, ...]


def _kind(statement: str, question: str, values: str) -> Kind:
    """Make a `Kind` from its templates and a comma-separated list of values."""
    return Kind(statement, question, tuple(value.strip() for value in values.split(",")))


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
"""The kinds of facts."""


class Fact(NamedTuple):
    """A statement about a person, the question about it, and the value that answers the question."""

    statement: str
    question: str
    value: str


def draw_facts(
    rng: np.random.Generator, count: int, held_out: bool, kinds: Sequence[Kind] = KINDS
) -> list[Fact]:
    """Draw `count` facts about different persons. `held_out` selects the names reserved for evaluation
    instead of training.
    """
    names = [
        (a, b) for a in range(len(FIRST)) for b in range(len(LAST)) if ((a + b) % HELD_OUT == 0) == held_out
    ]
    facts = []
    for index in rng.permutation(len(names))[:count]:
        a, b = names[index]
        name, kind = f"{FIRST[a]} {LAST[b]}", kinds[int(rng.integers(len(kinds)))]
        value = kind.values[int(rng.integers(len(kind.values)))]
        facts.append(
            Fact(kind.statement.format(name=name, value=value), kind.question.format(name=name), value)
        )
    return facts


def _longest_facts() -> list[Fact]:
    """Return the longest possible fact of every kind."""
    name = f"{max(FIRST, key=len)} {max(LAST, key=len)}"
    return [
        Fact(kind.statement.format(name=name, value=value), kind.question.format(name=name), value)
        for kind in KINDS
        for value in [max(kind.values, key=len)]
    ]


class Turns:
    """The text format of a conversation: ChatML if the tokenizer has its special tokens, else plain text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        marks = [tokenizer.encode(mark) for mark in ("<|im_start|>", "<|im_end|>")]
        self.chatml = all(len(mark) == 1 for mark in marks)

    def user(self, text: str) -> str:
        """Return a user's turn with this text."""
        return f"<|im_start|>user\n{text}<|im_end|>\n" if self.chatml else f"\n\nUser: {text}"

    @property
    def answer_prefix(self) -> str:
        """The text before each answer."""
        return "<|im_start|>assistant\n" if self.chatml else "\n\nAnswer:"

    def answer(self, text: str, ended: bool = True) -> str:
        """Return the text of an answer after `answer_prefix`, with its end mark unless `ended` is False."""
        end = "<|im_end|>\n" if self.chatml else "\n"
        return ("" if self.chatml else " ") + text + end * ended

    def question(self, fact: Fact) -> str:
        """Return the user's question about a fact, up to the start of the answer."""
        return self.user(fact.question) + self.answer_prefix

    def statements(self, facts: Sequence[Fact]) -> str:
        """Return a user's turn that states the facts, and the reply to it."""
        stated = " ".join(fact.statement for fact in facts)
        return (
            self.user(f"Please remember this. {stated}")
            + self.answer_prefix
            + self.answer("I will remember it.")
        )

    def reading(self) -> tuple[str, str]:
        """Return the text before and the text after the document that is read between the facts and the
        questions.
        """
        opened, closed = self.user("Now read this.\n\0").split("\0")
        return opened, closed + self.answer_prefix + self.answer("I have read it.")


class _Conversation(NamedTuple):
    """A conversation as tokens: those before and after the document and, for each fact, those of the question
    and answer with a mask that marks the value's tokens.
    """

    before: np.ndarray
    after: np.ndarray
    questions: list[tuple[np.ndarray, np.ndarray]]

    @property
    def size(self) -> int:
        """The number of tokens, not counting the document."""
        return len(self.before) + len(self.after) + sum(len(tokens) for tokens, _ in self.questions)


class FactDialogues:
    """Batches ``[rows, length]`` in which some rows are conversations, drawn anew at every step, and the
    others are documents, read in consecutive pieces with the memory carried from step to step.

    A conversation states up to `facts` facts, reads a document, and asks a question about each fact.
    Conversations follow each other until the row is full. During the first `distance_ramp` steps all rows are
    conversations, the document between facts and questions grows from `MIN_DISTANCE` tokens to its full
    length, and the loss weight of its tokens grows from 0. The memory thus first learns to retrieve facts at
    short distances, and then not to overwrite them.

    Every token is a target. The tokens of values in answers have loss weight 1, all others `weight`. With
    several `lengths` (a curriculum), each is used for an equal part of the steps; longer rows mean fewer
    rows. A batch depends only on the seed and the step.
    """

    MAX_PIECES = 8
    """The number of consecutive pieces that a row reads of one document before it moves on to another."""
    MIN_DISTANCE = 16
    """The smallest number of document tokens between facts and questions."""

    def __init__(
        self, data: Tokens, lengths: Sequence[int], tokens: int, steps: int, *, facts: int, share: float,
        weight: float, distance_ramp: int = 0, seed: int = 0, rank: int = 0, world_size: int = 1,
    ) -> None:  # fmt: skip
        self.data, self.tokenizer, self.turns = data, data.tokenizer, Turns(data.tokenizer)
        self.lengths, self.tokens, self.steps = tuple(lengths), tokens, steps
        self.facts, self.share, self.weight, self.distance_ramp = facts, share, weight, distance_ramp
        self.seed, self.rank, self.world_size = seed, rank, world_size
        longest = max(self.lengths)
        if tokens % longest:
            raise ValueError(
                f"data.curriculum: expected divisors of a step's {tokens} tokens (batch x data.length), got {longest}"
            )
        if not (data.lengths > longest + 1).any():
            raise ValueError(f"data: expected a document of more than {longest + 1:,} tokens, got none")
        longest_conversation = max(
            talk.size for fact in _longest_facts() if (talk := self._conversation([fact], inf))
        )
        if (share or distance_ramp) and longest_conversation + self.MIN_DISTANCE > min(self.lengths):
            raise ValueError(
                f"data.length (or the shortest of data.curriculum): expected at least "
                f"{longest_conversation + self.MIN_DISTANCE} tokens, for a conversation about one fact, got "
                f"{min(self.lengths)}"
            )

    def stage(self, number: int) -> tuple[int, int]:
        """Return the row length at a step, and the first step with this row length."""
        part = min(number * len(self.lengths) // self.steps, len(self.lengths) - 1)
        while part and self.lengths[part] == self.lengths[part - 1]:
            part -= 1
        return self.lengths[part], -(-part * self.steps // len(self.lengths))

    def _rng(self, number: int, row: int, purpose: int) -> np.random.Generator:
        """Return a random generator for a step and row. `purpose` separates independent uses."""
        return np.random.Generator(np.random.Philox(key=[self.seed, number], counter=[0, 0, row, purpose]))

    def _encode(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer.encode(text), np.int64)

    def _question_tokens(self, fact: Fact) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a question and its answer, and a mask of the value's tokens."""
        start = self.turns.answer(fact.statement.removesuffix(f" {fact.value}."), ended=False)
        prompt, value = pair_tokens(self.tokenizer, self.turns.question(fact) + start, f" {fact.value}")
        rest = self.tokenizer.encode(self.turns.answer(fact.statement).removeprefix(f"{start} {fact.value}"))
        is_value = np.repeat([False, True, False], [len(prompt), len(value), len(rest)])
        return np.array([*prompt, *value, *rest], np.int64), is_value

    def _conversation(self, facts: Sequence[Fact], max_tokens: float) -> _Conversation | None:
        """Return a conversation about as many of the facts as fit into `max_tokens`, or None if none fits."""
        opening, closing = self.turns.reading()
        after, questions = self._encode(closing), [self._question_tokens(fact) for fact in facts]
        count = len(facts)
        while count:
            statements = self._encode(self.turns.statements(facts[:count]))
            found = _Conversation(
                np.concatenate([statements, self._encode(opening)]), after, questions[:count]
            )
            if found.size + self.MIN_DISTANCE <= max_tokens:
                return found
            count = min(count - 1, int(count * max_tokens / (found.size + self.MIN_DISTANCE)))
        return None

    def _random_piece(self, rng: np.random.Generator, length: int) -> np.ndarray:
        """Return `length` consecutive tokens of a randomly chosen document."""
        num_starts = np.maximum(self.data.lengths - length, 0)
        document = int(rng.choice(len(num_starts), p=num_starts / num_starts.sum()))
        start = int(rng.integers(num_starts[document]))
        return self.data.piece(document, start, start + length).astype(np.int64)

    def _dialogue_row(self, number: int, row: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ``length + 1`` tokens of conversations followed by text, and a mask of the values' tokens in
        answers.
        """
        rng, share = self._rng(number, row, 4), ramp_progress(number, self.distance_ramp)
        parts: list[np.ndarray] = []
        masks: list[np.ndarray] = []
        tokens_left = length + 1
        while True:
            count = int(rng.integers(1, self.facts + 1, 2).max())  # favours large numbers
            talk = self._conversation(draw_facts(rng, count, held_out=False), tokens_left)
            if talk is None:
                break
            longest = int((tokens_left - talk.size - self.MIN_DISTANCE) * share)
            distance = self.MIN_DISTANCE + int(rng.integers(longest + 1))
            order = rng.permutation(len(talk.questions))
            questions, values = zip(*[talk.questions[index] for index in order], strict=True)
            parts += [talk.before, self._random_piece(rng, distance), talk.after, *questions]
            masks += [np.zeros(len(talk.before) + distance + len(talk.after), bool), *values]
            tokens_left -= talk.size + distance
        if tokens_left:
            parts.append(self._random_piece(rng, tokens_left))
            masks.append(np.zeros(tokens_left, bool))
        return np.concatenate(parts), np.concatenate(masks)

    def _document_row(self, number: int, row: int, length: int, first: int) -> tuple[np.ndarray, bool]:
        """Return the next ``length + 1`` tokens of a row's document, and whether the row begins a document.
        `first` is the first step with this row length.
        """
        pieces = int(min(self.MAX_PIECES, (self.data.lengths.max() - 1) // length))
        turn, piece = divmod(number - first + row, pieces)
        rng = self._rng(turn, row, 5 + first)
        num_starts = np.maximum(self.data.lengths - pieces * length - 1, 0)
        if not num_starts.any():  # the longest documents fit exactly
            num_starts = (self.data.lengths > pieces * length).astype(np.int64)
        document = int(rng.choice(len(num_starts), p=num_starts / num_starts.sum()))
        start = int(rng.integers(num_starts[document])) + piece * length
        return self.data.piece(document, start, start + length + 1).astype(
            np.int64
        ), piece == 0 or number in (first, self.distance_ramp)

    def step(self, number: int) -> Batch:
        """Return the batch of a step."""
        length, first = self.stage(number)
        rows = self.tokens // length
        growth, total = ramp_progress(number, self.distance_ramp), rows * self.world_size
        dialogues = total if growth < 1 else max(round(self.share * total), self.share > 0)
        read, answers, begins = [], [], []
        for row in range(rows):
            global_row = self.rank * rows + row
            if global_row < dialogues:
                tokens, mask = self._dialogue_row(number, global_row, length)
                begin = True
            else:
                tokens, begin = self._document_row(number, global_row, length, first)
                mask = np.zeros(len(tokens), bool)
            read.append(tokens)
            answers.append(mask)
            begins.append(begin)
        text = torch.from_numpy(np.stack(read))
        weights = torch.where(torch.from_numpy(np.stack(answers))[:, 1:], 1.0, self.weight * growth)
        targets = text[:, 1:].where(weights > 0, IGNORED)
        return Batch(text[:, :-1].contiguous(), targets, None, None, torch.tensor(begins), weights)
