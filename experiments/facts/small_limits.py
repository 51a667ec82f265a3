"""What does `remanence-small` answer beyond the facts that it was trained on? On a CPU, a few minutes with one thread.

    OMP_NUM_THREADS=1 python -m experiments.facts.small_limits --wikitext wikitext-2/test.txt.xz --out rows.json
    python -m experiments.facts.small_limits --out rows.json --table

Every text states one fact (or several), continues with part of a book, and is asked one question. The answer is
generated greedily, up to 12 bytes. It is *leading* if it begins with the value, and *right* if the value also ends
there: "13608" is a leading answer to 136, not a right one.

- *digits*: values of 1 to 7 digits, in the wording "The number of the silent harbor is 136.".
- *wordings*: values of 7 digits, stated and asked in words that were not in training.
- *names*: the same with names of words that were not in training.
- *words*: values that are words.
- *unknown*: 1 or 4 facts are stated, and the question is about another name. `right` counts answers without a digit;
  `stated` counts answers that begin with a number that was stated under another name.
- *books*, *wikitext*: the first wording, after 8K bytes of text. WikiText has far more numbers than a novel.

The book is the one in the package (Frankenstein), 512 bytes of it between fact and question if nothing else is said.
"""

from __future__ import annotations

import argparse
import lzma
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from experiments.shared import Row, Rows, add_arguments, machine, table_row, table_rule
from remanence import Session
from remanence.evaluate.task import wilson
from remanence.io.shipped import FOLDER
from remanence.tasks.answers import contains_value
from remanence.tasks.facts import WORDINGS
from remanence.tasks.needle import ADJECTIVES, NOUNS

BOOK = FOLDER / "frankenstein.txt.xz"
NEAR, FAR, ANSWER = 512, 8192, 12
Wording = tuple[str, str]
OTHERS: dict[str, Wording] = {
    "another question": (" The number of the {name} is {value}.", " Tell me the number of the {name}:"),
    "possessive": (" The {name}'s number is {value}.", " What is the {name}'s number?"),
    "code": (" The code of the {name} is {value}.", " What is the code of the {name}?"),
    "phone number": (
        " The phone number of the {name} is {value}.",
        " What is the phone number of the {name}?",
    ),
    "value first": (" {value} is the number of the {name}.", " What is the number of the {name}?"),
    "price": (" The {name} costs {value} crowns.", " How many crowns does the {name} cost?"),
    "distance": (" It is {value} miles to the {name}.", " How many miles is it to the {name}?"),
    "remember": (" Remember that the {name} has {value} doors.", " How many doors does the {name} have?"),
}
FIRST = ("green", "broken", "lonely", "purple", "wooden", "distant")
SECOND = ("bottle", "tower", "painter", "river", "clock", "village")
PEOPLE = ("Alice Warner", "Peter Novak", "Maria Lopez", "John Carter", "Emma Fischer", "David Stone")
WORDS: dict[str, tuple[Wording, str]] = {
    "colour": (
        (" The colour of the {name} is {value}.", " What is the colour of the {name}?"),
        "red blue green yellow white black brown purple orange grey",
    ),
    "city": (
        (" The {name} is in {value}.", " Where is the {name}?"),
        "Paris London Rome Berlin Madrid Vienna Prague Dublin Oslo Cairo",
    ),
    "number": (
        (" The number of the {name} is {value}.", " What is the number of the {name}?"),
        "one two three four five six seven eight nine ten",
    ),
}


class Asker:
    """A model that reads a text with facts in it and is asked."""

    def __init__(self, model: str, seed: int) -> None:
        torch.set_num_threads(1)
        self.session, self.rng = Session(model), np.random.default_rng(seed)
        self.book = lzma.decompress(BOOK.read_bytes())

    def name(self) -> str:
        return f"{self.rng.choice(ADJECTIVES)} {self.rng.choice(NOUNS)}"

    def number(self, digits: int = 7) -> str:
        return str(self.rng.integers(10 ** (digits - 1), 10**digits))

    def ask(self, stated: str, question: str, length: int = NEAR, text: bytes | None = None) -> str:
        """The answer to a question, `length` bytes of a text after what is stated; without the space before it."""
        text = self.book if text is None else text
        start = int(self.rng.integers(len(text) - length - NEAR))
        hay = text[start : start + NEAR + length].decode(errors="ignore")
        cut = hay.find(" ", NEAR // 2)
        session = self.session.fork()
        session.read(hay[:cut] + stated + hay[cut : cut + length])
        return session.generate(question, max_tokens=ANSWER, temperature=0).removeprefix(" ")


def scored(answers: list[tuple[str, str]]) -> Row:
    """Counts of a list of values and answers, with all answers."""
    right = [said.startswith(value) and contains_value(said, value) for value, said in answers]
    low, high = wilson(sum(right), len(right))
    return {
        "count": len(answers),
        "leading": sum(said.startswith(value) for value, said in answers),
        "right": sum(right),
        "interval": [round(low, 4), round(high, 4)],
        "answers": answers,
    }


def told_as(wording: Wording, name: str, value: str) -> tuple[str, str]:
    stated, question = wording
    return stated.format(name=name, value=value), question.format(name=name)


def trained_as(name: str, value: str) -> tuple[str, str]:
    return WORDINGS["asked"](*name.split(), value)


def digits(asker: Asker, count: int) -> Iterator[tuple[str, Row]]:
    for number in range(1, 8):
        values = [asker.number(number) for _ in range(count)]
        yield (
            f"{number} digits",
            scored([(value, asker.ask(*trained_as(asker.name(), value))) for value in values]),
        )


def wordings(asker: Asker, count: int) -> Iterator[tuple[str, Row]]:
    for title, wording in OTHERS.items():
        values = [asker.number() for _ in range(count)]
        yield (
            title,
            scored([(value, asker.ask(*told_as(wording, asker.name(), value))) for value in values]),
        )


def names(asker: Asker, count: int) -> Iterator[tuple[str, Row]]:
    draw = asker.rng.choice
    kinds: dict[str, Callable[[], str]] = {
        "the green bottle": lambda: f"{draw(FIRST)} {draw(SECOND)}",
        "the harbor": lambda: str(draw(NOUNS)),
    }
    wording = " The number of the {name} is {value}.", " What is the number of the {name}?"
    for title, drawn in kinds.items():
        values = [asker.number() for _ in range(count)]
        yield title, scored([(value, asker.ask(*told_as(wording, drawn(), value))) for value in values])
    wording = " The number of {name} is {value}.", " What is the number of {name}?"
    values = [asker.number() for _ in range(count)]
    yield (
        "Alice Warner",
        scored([(value, asker.ask(*told_as(wording, str(draw(PEOPLE)), value))) for value in values]),
    )


def words(asker: Asker, count: int) -> Iterator[tuple[str, Row]]:
    for title, (wording, listed) in WORDS.items():
        values = [str(asker.rng.choice(listed.split())) for _ in range(count)]
        yield (
            title,
            scored([(value, asker.ask(*told_as(wording, asker.name(), value))) for value in values]),
        )


def unknown(asker: Asker, count: int) -> Iterator[tuple[str, Row]]:
    for facts in (1, 4):
        answers, among = [], 0
        for _ in range(count):
            taken: dict[str, str] = {}
            while len(taken) < facts + 1:
                taken[asker.name()] = asker.number()
            *stated, (other, _) = taken.items()
            said = asker.ask("".join(trained_as(*fact)[0] for fact in stated), trained_as(other, "")[1])
            among += any(said.startswith(value) for _, value in stated)
            answers.append((", ".join(value for _, value in stated), said))
        right = sum(not re.search(r"\d", said) for _, said in answers)
        low, high = wilson(right, count)
        yield (
            f"{facts} stated",
            {
                "count": count,
                "right": right,
                "interval": [round(low, 4), round(high, 4)],
                "stated": among,
                "answers": answers,
            },
        )


def far(asker: Asker, count: int, text: bytes | None = None) -> Iterator[tuple[str, Row]]:
    values = [asker.number() for _ in range(count)]
    asked = [(value, trained_as(asker.name(), value)) for value in values]
    yield f"{FAR:,} bytes", scored([(value, asker.ask(*each, FAR, text)) for value, each in asked])


COUNTS = {"digits": 24, "wordings": 16, "names": 16, "words": 10, "unknown": 24, "books": 12, "wikitext": 12}


def table(rows: list[Row]) -> str:
    lines = [table_row("part", "what", "of", "leading", "right", "95 %", "a stated number"), table_rule(7)]
    for row in rows:
        what, low_high = row["what"], [f"{100 * bound:.0f}" for bound in row["interval"]]
        cells = row["count"], row.get("leading", ""), row["right"], "-".join(low_high), row.get("stated", "")
        lines.append(table_row(what["part"], row["title"], *cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="remanence-small", help="a model's folder or the name of one in the package"
    )
    parser.add_argument("--parts", nargs="+", choices=COUNTS, default=list(COUNTS))
    parser.add_argument(
        "--wikitext", type=Path, help="WikiText as .txt or .txt.xz, for the part of that name"
    )
    parser.add_argument("--seed", type=int, default=0)
    add_arguments(parser, "small_limits.json")
    args = parser.parse_args()
    counts = dict.fromkeys(COUNTS, 2) if args.tiny else COUNTS
    rows = Rows(args.out, args.commit, args.merge or ())
    if rows.shown(args, table, lambda *_: parser.error("--plot: expected no plot, this script has none")):
        return
    if "wikitext" in args.parts and args.wikitext is None:
        parser.error(
            "--wikitext: expected a file of WikiText for the part wikitext, got none; --parts leaves it out"
        )
    made = {
        "digits": digits,
        "wordings": wordings,
        "names": names,
        "words": words,
        "unknown": unknown,
        "books": far,
    }
    for part in args.parts:
        what = {"part": part, "model": args.model, "seed": args.seed, "count": counts[part]}
        if any(row["what"].items() >= what.items() for row in rows.rows):
            continue
        began, asker = time.monotonic(), Asker(args.model, args.seed)
        if part == "wikitext":
            opened = lzma.open if args.wikitext.suffix == ".xz" else open
            with opened(args.wikitext, "rb") as file:
                found = list(far(asker, counts[part], file.read()))
        else:
            found = list(made[part](asker, counts[part]))
        took = round(time.monotonic() - began, 1)
        for title, row in found:
            own = {"what": {**what, "title": title}, "title": title, **machine(torch.device("cpu")), **row}
            rows.add({**own, "part_seconds": took, "threads": torch.get_num_threads()})
        print(f"{part}: {took:.0f} s", flush=True)
    print(table(rows.rows))


if __name__ == "__main__":
    main()
