"""Measure a memory of sentences: facts are stated, part of a held-out book is read, every fact is asked.

    python -m experiments.attach.sentence_tests MODEL --base BASE.gguf --cache CACHE --rows rows.json

`CACHE` is the folder that `experiments.attach.sentences prepare` wrote. Answers are greedy and correct if they contain
the value; the answer to a question about what was never stated is correct if it says "I don't know".
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from experiments.attach.chats import SYSTEM, Asked, Test, in_format
from experiments.attach.sentences import Source
from remanence.attached.folder import load
from remanence.config import Mode
from remanence.inference.generate import Generation, Sampling
from remanence.inference.reader import read
from remanence.io.files import write_json
from remanence.model import State

FREE = json.loads((Path(__file__).parent / "facts" / "free_test.json").read_text())
DAILY = json.loads((Path(__file__).parent / "facts" / "daily.json").read_text())
FIRST = ["Alwin", "Bettina", "Corin", "Delphine", "Egbert", "Femke", "Gunnar", "Hedda", "Ignaz", "Jolanda", "Kasimir",
         "Liselotte", "Magnus", "Nele", "Ottilie", "Pascal", "Quirin", "Runa", "Severin", "Thekla"]  # fmt: skip
LAST = [
    "Ashdown",
    "Brackwater",
    "Coldwell",
    "Duskin",
    "Everhart",
    "Fennimore",
    "Greystone",
    "Hollander",
    "Inglewood",
]


class Cell(NamedTuple):
    """One row of the results. A mode "off" is the pretrained model with the same window."""

    kind: str
    facts: int
    distance: int
    conversations: int
    mode: Mode = "on"


CELLS = [
    Cell("as written", 20, 4000, 10),
    Cell("held out", 20, 4000, 10),
    Cell("reversed", 20, 4000, 50),
    Cell("free", 0, 4000, 50),
    Cell("passages", 0, 4000, 30),
    Cell("trained", 20, 4000, 10),
    Cell("updates", 20, 4000, 25),
    Cell("unknown", 20, 4000, 10),
    Cell("free unknown", 0, 4000, 50),
    Cell("general", 20, 4000, 4),
    Cell("asked before", 20, 4000, 10),
    Cell("notes", 20, 4000, 10),
    Cell("held out", 60, 4000, 4),
    Cell("held out", 200, 4000, 2),
    Cell("held out", 20, 1000, 10),
    Cell("held out", 20, 64000, 10),
    Cell("held out", 20, 256000, 10),
    Cell("held out", 20, 4000, 10, "frozen"),
    Cell("held out", 20, 4000, 10, "fresh"),
    Cell("held out", 20, 4000, 10, "off"),
    Cell("free", 0, 4000, 50, "frozen"),
    Cell("free", 0, 4000, 50, "off"),
]
"""Kind of questions, facts per conversation, tokens in between, and conversations.

"free" are conversations written by an author who had not seen the data for training (`facts/free_test.json`); "asked
before": every question was asked once already, without an answer; "notes": facts stated as plain text instead of
messages; "general": questions that need no memory.
"""


def as_written(rng: np.random.Generator, count: int) -> Test:
    """Facts of 40 everyday kinds, stated in a fixed wording, of which training has none in this form."""
    said, asked, seen = [], [], set()
    while len(asked) < count:
        kind = DAILY[int(rng.integers(len(DAILY)))]
        some = kind["subjects"]
        pick = lambda options: str(options[int(rng.integers(len(options)))])
        subject = f"{pick(FIRST)} {pick(LAST)}" if some == "person" else pick(some)
        fill = lambda text, y="", subject=subject: text.replace("{x}", subject).replace("{y}", y)
        capital = lambda text: text[0].upper() + text[1:]
        question, value = capital(fill(kind["question"])), pick(kind["values"])
        if question not in seen:
            seen.add(question)
            said.append(capital(fill(kind["statement"], value)))
            asked.append(Asked(question, (value,), "as written", said[-1]))
    groups = [" ".join(said[n : n + 4]) for n in range(0, count, 4)]
    return Test(groups, [asked[n] for n in rng.permutation(count)])


def user(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def free(number: int, *, unknown: bool) -> Test:
    """A conversation of `facts/free_test.json`, with its questions or with those whose answer was never stated."""
    own = FREE[number % len(FREE)]
    if unknown:
        return Test(own["said"], [Asked(text, (), "unknown") for text in own["unknown"]])
    said = " / ".join(own["said"])
    return Test(
        own["said"], [Asked(q["text"], tuple(q["values"]), q["kind"], said) for q in own["questions"]]
    )


GENERAL = dict(
    line.split(" = ")
    for line in """What is the capital of Spain? = madrid
Who wrote Hamlet? = shakespeare
How many legs has a spider? = eight|8
What is the capital of Italy? = rome
What is 6 plus 7? = 13|thirteen
Which planet do we live on? = earth
What colour is grass? = green
What is frozen water called? = ice
In which country is Berlin? = germany
Who was the first president of the United States? = washington
What is the capital of Russia? = moscow
How many days has a week? = seven|7
What is H2O? = water
Which animal says meow? = cat
What is the capital of Egypt? = cairo
Which language is spoken in Portugal? = portuguese
What is the largest ocean? = pacific
Who painted Guernica? = picasso
What is the opposite of early? = late
Translate "house" into Spanish. = casa""".splitlines()
)
"""Questions that need no memory, of which training has none, with texts that an answer contains."""


def drawn_test(source: Source, cell: Cell, number: int, rng: np.random.Generator) -> Test:
    """What is stated in a conversation, and its questions."""
    if cell.kind == "as written":
        return as_written(rng, cell.facts)
    if cell.kind in ("free", "free unknown"):
        return free(number, unknown=cell.kind == "free unknown")
    kind = cell.kind if cell.kind in ("passages", "trained", "updates", "reversed", "unknown") else "held out"
    test = source.chats.test(rng, kind, cell.facts)
    if cell.kind == "general":
        test = test._replace(
            questions=[Asked(text, tuple(known.split("|")), "general") for text, known in GENERAL.items()]
        )
    return test


def conversation(source: Source, cell: Cell, number: int) -> tuple[list[int], list[Asked]]:
    """The tokens of a conversation up to its questions, and the questions."""
    rng = np.random.default_rng([11, number, cell.facts])
    test = drawn_test(source, cell, number, rng)
    if cell.kind == "notes":
        front = source.encode(source.bos + "".join(f"{each}\n" for each in test.said))
    else:
        front = source.encode(SYSTEM + "".join(f"{user(each)}Okay.<|im_end|>\n" for each in test.said))
    opened, closed = (
        source.encode("<|im_start|>user\nHere is a chapter.\n"),
        source.encode("<|im_end|>\n<|im_start|>assistant\nI have read it.<|im_end|>\n"),
    )
    start = int(rng.integers(max(1, len(source.held_books) - cell.distance)))
    book = source.held_books[start : start + cell.distance].tolist()
    asked = test.questions if cell.kind == "asked before" else []
    again = source.encode("".join(f"{user(q.text)}One moment.<|im_end|>\n" for q in asked))
    return [*front, *opened, *book, *closed, *again], test.questions


@torch.no_grad()
def read_all(model: Any, texts: list[list[int]], mode: Mode, rows: int) -> State:
    """The state of each conversation, read in batches of `rows`."""
    states = []
    for start in range(0, len(texts), rows):
        some = texts[start : start + rows]
        longest = max(map(len, some))
        ids = torch.tensor([each + [0] * (longest - len(each)) for each in some], device=model.device)
        mask = torch.tensor(
            [[True] * len(each) + [False] * (longest - len(each)) for each in some], device=model.device
        )
        states.append(read(model, ids, mask=None if bool(mask.all()) else mask, memory_mode=mode).state)
    return State.concat(states)


@torch.no_grad()
def answer_all(
    model: Any, state: State, asked: list[tuple[int, Asked]], mode: Mode, batch: int
) -> Iterator[str]:
    """The greedy answers to questions, each with the number of its row."""
    tokenizer, vocabulary = model.pretrained_tokenizer(), model.source.load_tokenizer().get_vocab()
    stop = (in_format("<|im_end|>", vocabulary), "\n")
    for start in range(0, len(asked), batch):
        some = asked[start : start + batch]
        yield from Generation(
            model, [in_format(user(q.text), vocabulary) for _, q in some],
            Sampling(max_tokens=28, temperature=0.0, stop=stop), tokenizer=tokenizer,
            state=state.rows([row for row, _ in some]), memory_mode=mode,
        ).run().texts  # fmt: skip


def score(
    model: Any, source: Source, cells: list[Cell], *, batch: int, rows: int, examples: int
) -> list[dict[str, Any]]:
    """The rows of cells with the same mode, which are measured together: conversations that several of them have are
    read once.
    """
    began, mode = time.time(), cells[0].mode
    texts: dict[tuple[int, ...], int] = {}
    asked: list[tuple[int, Asked]] = []
    counts = []
    for cell in cells:
        before = len(asked)
        for number in range(cell.conversations):
            ids, questions = conversation(source, cell, number)
            row = texts.setdefault(tuple(ids), len(texts))
            asked += [(row, q) for q in questions]
        counts.append(len(asked) - before)
    state = read_all(model, [list(ids) for ids in texts], mode, rows)
    reading = time.time() - began
    # Questions in the order of their lengths, so that few tokens of a batch are padding.
    order = sorted(range(len(asked)), key=lambda n: len(asked[n][1].text))
    answers = dict(zip(order, answer_all(model, state, [asked[n] for n in order], mode, batch), strict=True))
    seconds = [round(reading, 1), round(time.time() - began, 1)]
    found, place = [], 0
    for cell, count in zip(cells, counts, strict=True):
        own = [(asked[n][1], answers[n]) for n in range(place, place + count)]
        place += count
        found.append(result(cell, own, examples) | {"seconds": seconds})
    return found


def result(cell: Cell, answers: list[tuple[Asked, str]], examples: int) -> dict[str, Any]:
    """The row of a cell, with some wrong answers."""
    correct = [
        any(value.lower() in text.lower() for value in q.values) if q.values else is_unknown(text)
        for q, text in answers
    ]
    labels: dict[str, list[int]] = {}
    for (q, _), ok in zip(answers, correct, strict=True):
        labels.setdefault(q.label, []).append(int(ok))
    wrong = [
        {"question": q.text, "values": q.values, "answer": text.strip(), "statement": q.statement}
        for (q, text), ok in zip(answers, correct, strict=True)
        if not ok
    ]
    return {
        **cell._asdict(), "correct": sum(correct), "questions": len(correct),
        "labels": {name: [sum(own), len(own)] for name, own in labels.items()},
        "wrongly_unknown": sum(is_unknown(text) for q, text in answers if q.values),
        "examples": wrong[:examples],
    }  # fmt: skip


def summary(row: dict[str, Any]) -> str:
    cell = f"{row['kind']} {row['facts']} {row['distance']} {row['mode']}"
    rest = f"{row['labels']}, wrongly unknown {row['wrongly_unknown']}, {row['seconds']} s"
    return f"{cell}: {row['correct']} of {row['questions']} {rest}"


def is_unknown(text: str) -> bool:
    return "don't know" in text.lower() or "do not know" in text.lower()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--cells", type=int, nargs="*", help="numbers of the cells to measure; default: all")
    parser.add_argument("--conversations", type=int, help="number of conversations of each cell")
    parser.add_argument("--scale", type=float, default=1.0, help="multiply the numbers of conversations")
    parser.add_argument(
        "--recalled", type=int, help="number of recalled sentences instead of the model's own"
    )
    parser.add_argument("--examples", type=int, default=6)
    parser.add_argument(
        "--batch", type=int, default=512, help="number of questions that are answered together"
    )
    parser.add_argument("--rows-at-once", type=int, default=50, help="conversations that are read together")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    model = load(args.model, base=args.base, device=torch.device(args.device), dtype=dtype).eval()
    if args.recalled:
        object.__setattr__(model.sentences, "recalled", args.recalled)
    source, rows, began = Source(args.cache), [], time.time()
    chosen = [CELLS[n] for n in (range(len(CELLS)) if args.cells is None else args.cells)]
    if args.conversations:
        chosen = [cell._replace(conversations=args.conversations) for cell in chosen]
    scaled = [max(1, round(args.scale * cell.conversations)) for cell in chosen]
    chosen = [cell._replace(conversations=n) for cell, n in zip(chosen, scaled, strict=True)]
    group = lambda cell: (max(cell.distance, 4000), MODES.index(cell.mode), cell.distance)
    for _, own in groupby(sorted(chosen, key=group), key=lambda cell: group(cell)[:2]):
        if time.time() - began > args.seconds:
            break
        cells = list(own)
        parts = args.rows_at_once if cells[0].distance < 10000 else 10
        for row in score(model, source, cells, batch=args.batch, rows=parts, examples=args.examples):
            rows.append(row)
            print(summary(row), flush=True)
        args.rows.parent.mkdir(parents=True, exist_ok=True)
        write_json(args.rows, {"model": str(args.model), "rows": rows})


MODES = ("on", "frozen", "off", "fresh")

if __name__ == "__main__":
    main()
