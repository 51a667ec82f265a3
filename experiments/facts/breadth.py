"""What does a model of facts answer? Batched, for a GPU or a CPU.

    python -m experiments.facts.breadth BOOKS --model remanence-small --wikitext wikitext-2/test.txt.xz --out rows.json
    python -m experiments.facts.breadth BOOKS --out rows.json --table

BOOKS is a folder of ``*.txt.xz`` with an ``index.json`` that names each book's split; texts are from the test books.
A text states facts between its sentences, goes on, and is asked. Answers are generated greedily. They are *leading* if
they begin with the value, and *right* if the value also ends there; *unknown* counts answers "unknown".

- *digits*: numbers of 1 to 16 digits, "The number of the silent harbor is 136.", 512 bytes after.
- *card*: the wordings of `experiments.facts.small_limits`, with numbers of 7 digits.
- *kinds*: any wording of training about any relation of training, with each kind of value.
- *held out*: wordings, relations, and words (of names and of values) that were not in training.
- *unknown*: 1, 4 or 16 facts are stated, and the question is about another name. *Right* are answers "unknown";
  `stated` counts those that begin with a stated value.
- *facts*: one of 1, 4, 16 or 64 facts is asked for, 512 bytes after the last: numbers in one wording, or any facts.
- *distance*: one number, or one of four facts of any kind, asked for after 1K bytes to 1M bytes, in one reading.
- *texts*: after 8K bytes of the test books, or of WikiText.
- *language*: bits per byte of the test books.
"""

from __future__ import annotations

import argparse
import lzma
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from experiments.facts.small_limits import OTHERS, PEOPLE, WORDS
from experiments.shared import Row, Rows, add_arguments, load, machine, table_row, table_rule
from remanence.evaluate.subject import Subject
from remanence.evaluate.task import wilson
from remanence.inference.reader import read
from remanence.io.shipped import resolve_model_path
from remanence.model import Model, State
from remanence.tasks import fact_phrases as phrases
from remanence.tasks.answers import contains_value
from remanence.tasks.fact_phrases import Fact, Relation, Vocabulary, draw_fact, fill_fact, number
from remanence.tasks.fact_words import ADJECTIVES, NOUNS
from remanence.tasks.needle import ADJECTIVES as USUAL_ADJECTIVES
from remanence.tasks.needle import NOUNS as USUAL_NOUNS
from remanence.tokenizers.tokens import ByteTokenizer

NEAR, FAR, BEFORE, ANSWER = 512, 8192, 256, 28
BRIEF = {1024: "1K", 4096: "4K", 16384: "16K", 65536: "64K", 262144: "256K", 1048576: "1M"}
ASKED = phrases.FORMS[phrases.ASKED]


KINDS = {
    "numbers": {"number"},
    "words": {"word", "two words", "colour", "animal", "job", "food", "count", "day", "month"},
    "people and cities": {"person", "place"},
}
"""The kinds of values in the part *kinds*."""


class Question(NamedTuple):
    """What one text states, which of it is asked for, and the right answer."""

    facts: tuple[Fact, ...]
    question: str
    value: str


class Asker:
    """A model that reads texts in which facts are stated, and answers one question about each."""

    def __init__(self, model: Model, books: bytes, seed: int) -> None:
        self.subject = Subject(model.device, network=model, tokens=ByteTokenizer())
        self.model, self.books, self.rng = model, books, np.random.default_rng(seed)
        self.trained, self.held_out = Vocabulary(), Vocabulary(held_out=True)

    def hay(self, length: int, text: bytes | None = None) -> bytes:
        """A part of a text that begins at a space."""
        text = self.books if text is None else text
        start = text.find(b" ", int(self.rng.integers(len(text) - length - 1024)))
        return text[start : start + length]

    def texts(
        self, questions: Sequence[Question], after: int, text: bytes | None = None, multiple: int = 1
    ) -> list[np.ndarray]:
        """The texts up to the questions: facts with some text before each, then `after` bytes. All have the same
        length, which is divisible by `multiple`.
        """
        made = []
        for each in questions:
            parts = []
            for fact in each.facts:
                hay = self.hay(int(self.rng.integers(16, 96)), text)
                parts += [hay[: hay.rfind(b" ")], fact.statement.encode()]
            made.append(b"".join(parts))
        longest = max(len(each) for each in made) + BEFORE + after
        longest += -longest % multiple
        return [
            np.frombuffer(
                self.hay(longest - after - len(each), text) + each + self.hay(after, text), np.uint8
            )
            for each in made
        ]

    def read(self, texts: Sequence[np.ndarray]) -> State:
        return self.subject.read(texts)

    def answered(self, questions: Sequence[Question], state: State) -> Row:
        """Ask every row of a state its question; the state is not changed."""
        said = self.subject.generate([each.question for each in questions], state, ANSWER)
        return scored([(each, text.removeprefix(" ")) for each, text in zip(questions, said, strict=True)])

    def asked(self, questions: Sequence[Question], after: int = NEAR, text: bytes | None = None) -> Row:
        """Counts of the answers to questions, `after` bytes after what is stated."""
        return self.answered(questions, self.read(self.texts(questions, after, text)))

    # Facts

    def name(self) -> str:
        return f"the {self.rng.choice(USUAL_ADJECTIVES)} {self.rng.choice(USUAL_NOUNS)}"

    def plain(self, subject: str, value: str) -> Fact:
        return fill_fact(*ASKED, subject, value, "number")

    def any_fact(
        self, relation: Relation | None = None, vocabulary: Vocabulary | None = None
    ) -> tuple[str, Fact]:
        """A fact of any relation and wording of training, and its subject."""
        vocabulary = vocabulary or self.trained
        relation = relation or phrases.draw_relation(self.rng)
        subject = vocabulary.subject(self.rng, relation.subjects)
        return subject, draw_fact(self.rng, vocabulary, relation, subject)

    def any_facts(self, count: int) -> list[Fact]:
        """Facts about different subjects."""
        found: dict[str, Fact] = {}
        while len(found) < count:
            subject, fact = self.any_fact()
            found.setdefault(subject, fact)
        return list(found.values())


def alone(fact: Fact) -> Question:
    return Question((fact,), fact.question, fact.value)


def one_of(asker: Asker, facts: Sequence[Fact]) -> Question:
    asked = facts[int(asker.rng.integers(len(facts)))]
    return Question(tuple(facts), asked.question, asked.value)


def scored(answers: Sequence[tuple[Question, str]]) -> Row:
    """Counts of a list of questions and answers, with all answers."""
    right = [said.startswith(each.value) and contains_value(said, each.value) for each, said in answers]
    stated = [any(said.startswith(fact.value) for fact in each.facts) for each, said in answers]
    low, high = wilson(sum(right), len(right))
    return {
        "count": len(answers), "right": sum(right), "interval": [round(low, 4), round(high, 4)],
        "leading": sum(said.startswith(each.value) for each, said in answers),
        "stated": sum(stated), "unknown": sum(said.startswith(phrases.UNKNOWN) for _, said in answers),
        "answers": [(each.question.strip()[-48:], each.value, said) for each, said in answers],
    }  # fmt: skip


Found = Iterator[tuple[str, Row]]


def digits(asker: Asker, count: int) -> Found:
    for size in range(1, phrases.MAX_DIGITS + 1):
        values = [number(asker.rng, size) for _ in range(count)]
        yield f"{size}", asker.asked([alone(asker.plain(asker.name(), value)) for value in values])


def card(asker: Asker, count: int) -> Found:
    def wording(stated: str, asked: str, name: str, value: str) -> Question:
        fact = Fact(stated.format(name=name, value=value), asked.format(name=name), value)
        return alone(fact)

    def seven() -> str:
        return number(asker.rng, 7)

    for title, each in OTHERS.items():
        yield title, asker.asked([wording(*each, asker.name()[4:], seven()) for _ in range(count)])
    word = asker.held_out.word
    names: dict[str, Callable[[], str]] = {
        "the harbor": lambda: f"the {asker.rng.choice(USUAL_NOUNS)}",
        "Alice Warner": lambda: str(asker.rng.choice(PEOPLE)),
        "the green bottle": lambda: f"the {word(asker.rng, ADJECTIVES)} {word(asker.rng, NOUNS)}",
    }
    for title, drawn in names.items():
        yield title, asker.asked([alone(asker.plain(drawn(), seven())) for _ in range(count)])
    for title, (each, listed) in WORDS.items():
        values = asker.rng.choice(listed.split(), count)
        yield title, asker.asked([wording(*each, asker.name()[4:], str(value)) for value in values])


def kinds(asker: Asker, count: int) -> Found:
    for title, wanted in KINDS.items():
        relations = [each for each in phrases.NAMED + phrases.SPOKEN if set(each.values) <= wanted]
        drawn = asker.rng.integers(len(relations), size=count)
        yield title, asker.asked([alone(asker.any_fact(relations[int(index)])[1]) for index in drawn])
    for form, title in ((phrases.DIRECT, "the name, then the value"), (phrases.RULER, "RULER")):
        facts = [draw_fact(asker.rng, asker.trained, phrases.draw_relation(asker.rng, form),
                           asker.trained.thing(asker.rng), form) for _ in range(count)]  # fmt: skip
        yield title, asker.asked([alone(fact) for fact in facts])


def held_out(asker: Asker, count: int) -> Found:
    def pick(listed: Sequence[str]) -> str:
        return listed[int(asker.rng.integers(len(listed)))]

    old, new = (
        (phrases.STATEMENTS, phrases.QUESTIONS),
        (phrases.HELD_OUT_STATEMENTS, phrases.HELD_OUT_QUESTIONS),
    )
    for title, statements, questions in (
        ("statements", new[0], old[1]),
        ("questions", old[0], new[1]),
        ("both", *new),
    ):
        facts = []
        for _ in range(count):
            relation = phrases.NAMED[int(asker.rng.integers(len(phrases.NAMED)))]
            subject = asker.trained.subject(asker.rng, relation.subjects)
            value = asker.trained.value(asker.rng, pick(relation.values))
            facts.append(fill_fact(pick(statements), pick(questions), subject, value, relation.name))
        yield title, asker.asked([alone(fact) for fact in facts])
    for relation in phrases.HELD_OUT_RELATIONS:
        yield (
            f"relation {relation.name}",
            asker.asked([alone(asker.any_fact(relation)[1]) for _ in range(max(2, count // 4))]),
        )
    yield "words", asker.asked([alone(asker.any_fact(None, asker.held_out)[1]) for _ in range(count)])


def unknown(asker: Asker, count: int) -> Found:
    for facts in (1, 4, 16):
        questions = []
        for _ in range(count):
            names = list(dict.fromkeys(asker.name() for _ in range(facts + 8)))[: facts + 1]
            other, *stated = [asker.plain(name, number(asker.rng, 7)) for name in names]
            questions.append(Question(tuple(stated), other.question, phrases.UNKNOWN))
        yield f"{facts} numbers", asker.asked(questions)
        questions = []
        for _ in range(count):
            other, *stated = asker.any_facts(facts + 1)
            questions.append(Question(tuple(stated), other.question, phrases.UNKNOWN))
        yield f"{facts} of any kind", asker.asked(questions)


def facts(asker: Asker, count: int) -> Found:
    for size in (1, 4, 16, 64):
        questions = []
        for _ in range(count):
            names = list(dict.fromkeys(asker.name() for _ in range(size + 32)))[:size]
            questions.append(one_of(asker, [asker.plain(name, number(asker.rng, 7)) for name in names]))
        yield f"one of {size} numbers", asker.asked(questions)
        yield (
            f"one of {size} of any kind",
            asker.asked([one_of(asker, asker.any_facts(size)) for _ in range(count)]),
        )


def distance(asker: Asker, count: int, furthest: int, deadline: float) -> Found:
    other = asker.plain("the harbor", "0")
    sets = {
        "one number": [alone(asker.plain(asker.name(), number(asker.rng, 7))) for _ in range(count)],
        "one of four of any kind": [one_of(asker, asker.any_facts(4)) for _ in range(count)],
        "unknown": [Question((asker.plain(asker.name(), "5"),), other.question, phrases.UNKNOWN)
                    for _ in range(count // 4 + 1)],
    }  # fmt: skip
    questions = [question for each in sets.values() for question in each]
    state, done = asker.read(asker.texts(questions, NEAR, multiple=1024)), NEAR
    books = np.frombuffer(asker.books, np.uint8)
    places = asker.rng.integers(len(books), size=len(questions))
    for far, brief in BRIEF.items():
        while done < min(far, furthest) and time.monotonic() < deadline:
            size = min(65536, far - done)  # of whole pieces, which a GPU reads as one graph
            piece = books[(places[:, None] + np.arange(size)) % len(books)].astype(np.int64)
            state = read(asker.model, torch.from_numpy(piece).to(asker.model.device), state).state
            places, done = places + size, done + size
        if done < far:
            break
        begun = 0
        for title, each in sets.items():
            rows = list(range(begun, begun := begun + len(each)))
            yield f"{title} after {brief}", asker.answered(each, state.rows(rows))


def texts(asker: Asker, count: int, wikitext: bytes | None) -> Found:
    for title, text in (("books", None), ("WikiText", wikitext)):
        if title == "WikiText" and text is None:
            continue
        numbers = [alone(asker.plain(asker.name(), number(asker.rng, 7))) for _ in range(count)]
        yield f"8K of {title}, number", asker.asked(numbers, FAR, text)
        yield (
            f"8K of {title}, any kind",
            asker.asked([one_of(asker, asker.any_facts(1)) for _ in range(count)], FAR, text),
        )


def language(asker: Asker, count: int) -> Found:
    """Bits per byte of the first 8K bytes of parts of the books."""
    starts = asker.rng.integers(len(asker.books) - FAR - 1, size=count)
    rows = np.stack(
        [np.frombuffer(asker.books, np.uint8)[start : start + FAR + 1] for start in starts.tolist()]
    )
    losses, _ = asker.subject.losses(torch.from_numpy(rows.astype(np.int64)))
    yield "books", {"count": count, "bits": round(float(losses.double().mean()) / math.log(2), 4)}


COUNTS = {
    "digits": 48, "card": 48, "kinds": 96, "held out": 96, "unknown": 64, "facts": 96, "texts": 64, "language": 16,
    "distance": 24,
}  # fmt: skip
"""The number of questions of every row of a part."""


def table(rows: list[Row]) -> str:
    """Right answers of all models, side by side."""
    models = list(dict.fromkeys(row["what"]["model"] for row in rows))
    by_title: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        what = row["what"]
        cell = f"{row['right']} of {row['count']}" if "right" in row else f"{row['bits']:.2f} bits"
        if "leading" in row and row["leading"] > row["right"]:
            cell += f" ({row['leading']} leading)"
        if what["part"] == "unknown":
            cell += f" ({row['stated']} stated)"
        elif row.get("unknown") and "unknown" not in row["title"]:
            cell += f" ({row['unknown']} unknown)"
        by_title.setdefault((what["part"], row["title"]), {})[what["model"]] = cell
    lines = [table_row("part", "what", *models), table_rule(len(models) + 2)]
    lines += [table_row(*key, *(cells.get(model, "") for model in models)) for key, cells in by_title.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("books", type=Path)
    parser.add_argument(
        "--model", default="remanence-small", help="a model's folder or the name of one in the package"
    )
    parser.add_argument("--name", help="the model's name in the table; default: --model")
    parser.add_argument("--parts", nargs="+", choices=COUNTS, default=list(COUNTS))
    parser.add_argument("--wikitext", type=Path, help="WikiText as .txt or .txt.xz")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scale", type=float, default=1.0, help="ask this times as many questions")
    parser.add_argument("--furthest", type=int, default=1048576, help="the longest distance")
    parser.add_argument("--seed", type=int, default=0)
    add_arguments(parser, "breadth.json")
    args = parser.parse_args()
    rows = Rows(args.out, args.commit, args.merge or ())
    if rows.shown(args, table, lambda *_: parser.error("--plot: expected no plot, this script has none")):
        return
    device, began = torch.device(args.device), time.monotonic()
    books = b"\n\n".join(book.numpy().tobytes() for book in load(str(args.books), "test"))
    wikitext = None
    if args.wikitext is not None:
        opened = lzma.open if args.wikitext.suffix == ".xz" else open
        with opened(args.wikitext, "rb") as file:
            wikitext = file.read()
    model = Model.load(resolve_model_path(args.model), device=device).eval()
    furthest = 4096 if args.tiny else args.furthest
    made: dict[str, Callable[[Asker, int], Found]] = {
        "digits": digits, "card": card, "kinds": kinds, "held out": held_out, "unknown": unknown, "facts": facts,
        "language": language, "texts": lambda asker, count: texts(asker, count, wikitext),
        "distance": lambda asker, count: distance(asker, count, furthest, began + args.seconds),
    }  # fmt: skip
    for part in args.parts:
        count = 2 if args.tiny else max(2, round(COUNTS[part] * args.scale))
        what = {"part": part, "model": args.name or args.model, "seed": args.seed, "count": count}
        if any(row["what"].items() >= what.items() for row in rows.rows):
            continue
        started, asker = time.monotonic(), Asker(model, books, args.seed)
        for title, row in made[part](asker, count):
            own = {"what": {**what, "title": title}, "title": title, **machine(device), **row}
            rows.add({**own, "seconds": round(time.monotonic() - began, 1)})
            if time.monotonic() - began > args.seconds:
                print(f"stopped after {args.seconds:.0f} s", flush=True)
                return
        print(f"{part}: {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
