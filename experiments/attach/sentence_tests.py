"""Measure a memory of sentences: facts are stated, part of a held-out book is read, every fact is asked.

    python -m experiments.attach.sentence_tests MODEL --base BASE.gguf --cache CACHE --rows rows.json

`CACHE` is the folder that `experiments.attach.sentences prepare` wrote. Answers are greedy and correct if they contain
the value; the answer to a question about what was never stated is correct if it says "I don't know".
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from experiments.attach.chats import SYSTEM, Asked, Test
from experiments.attach.sentences import Source
from remanence.attached.folder import load
from remanence.config import Mode
from remanence.inference.generate import Generation, Sampling
from remanence.inference.reader import read
from remanence.io.files import write_json
from remanence.model import State

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
    Cell("held out", 20, 4000, 10),
    Cell("passages", 20, 4000, 20),
    Cell("reversed", 20, 4000, 24),
    Cell("updates", 20, 4000, 20),
    Cell("unknown", 20, 4000, 10),
    Cell("as written", 20, 4000, 10),
    Cell("trained", 20, 4000, 10),
    Cell("held out", 60, 4000, 4),
    Cell("held out", 200, 4000, 2),
    Cell("held out", 20, 1000, 10),
    Cell("held out", 20, 64000, 5),
    Cell("held out", 20, 256000, 2),
    Cell("held out", 20, 4000, 10, "frozen"),
    Cell("held out", 20, 4000, 10, "fresh"),
    Cell("held out", 20, 4000, 10, "off"),
]
"""Facts per conversation, tokens in between, and conversations."""


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
            asked.append(Asked(question, value, "as written", said[-1]))
    groups = [" ".join(said[n : n + 4]) for n in range(0, count, 4)]
    return Test(groups, [asked[n] for n in rng.permutation(count)])


def user(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def conversation(source: Source, cell: Cell, number: int) -> tuple[list[int], list[Asked]]:
    """The tokens of a conversation up to its questions, and the questions."""
    rng = np.random.default_rng([11, number, cell.facts])
    test = (
        as_written(rng, cell.facts)
        if cell.kind == "as written"
        else source.chats.test(rng, cell.kind, cell.facts)
    )
    front = source.encode(SYSTEM + "".join(f"{user(each)}Okay.<|im_end|>\n" for each in test.said))
    opened, closed = (
        source.encode("<|im_start|>user\nHere is a chapter.\n"),
        source.encode("<|im_end|>\n<|im_start|>assistant\nI have read it.<|im_end|>\n"),
    )
    start = int(rng.integers(max(1, len(source.held_books) - cell.distance)))
    book = source.held_books[start : start + cell.distance].tolist()
    return [*front, *opened, *book, *closed], test.questions


@torch.no_grad()
def score(model: Any, source: Source, cell: Cell, *, batch: int, examples: int = 6) -> dict[str, Any]:
    """The row of one cell, with some wrong answers."""
    began = time.time()
    drawn = [conversation(source, cell, n) for n in range(cell.conversations)]
    longest = max(len(ids) for ids, _ in drawn)
    ids = torch.tensor([each + [0] * (longest - len(each)) for each, _ in drawn], device=model.device)
    mask = torch.tensor([[True] * len(each) + [False] * (longest - len(each)) for each, _ in drawn]).to(
        ids.device
    )
    states: list[State] = []
    for n in range(0, len(drawn), 10):
        own = None if bool(mask[n : n + 10].all()) else mask[n : n + 10]
        states.append(read(model, ids[n : n + 10], mask=own, memory_mode=cell.mode).state)
    state, read_in = State.concat(states), time.time() - began
    asked = [(n, q) for n, (_, questions) in enumerate(drawn) for q in questions]
    texts: list[str] = []
    for n in range(0, len(asked), batch):
        some = asked[n : n + batch]
        texts += Generation(
            model, [user(q.text) for _, q in some], Sampling(max_tokens=28, temperature=0.0, stop=("<|im_end|>", "\n")),
            tokenizer=model.pretrained_tokenizer(), state=state.rows([row for row, _ in some]), memory_mode=cell.mode,
        ).run().texts  # fmt: skip
    unknown = [is_unknown(text) for text in texts]
    correct = [
        own if not q.value else q.value.lower() in text.lower()
        for (_, q), text, own in zip(asked, texts, unknown, strict=True)
    ]
    labels: dict[str, list[int]] = {}
    for (_, q), ok in zip(asked, correct, strict=True):
        labels.setdefault(q.label, []).append(int(ok))
    wrong = [
        {"question": q.text, "value": q.value, "answer": text.strip(), "statement": q.statement}
        for (_, q), text, ok in zip(asked, texts, correct, strict=True)
        if not ok
    ]
    return {
        **cell._asdict(),
        "correct": sum(correct), "questions": len(correct),
        "labels": {name: [sum(own), len(own)] for name, own in labels.items()},
        "wrongly_unknown": sum(u for (_, q), u in zip(asked, unknown, strict=True) if q.value),
        "seconds": [round(read_in, 1), round(time.time() - began, 1)],
        "examples": wrong[:examples],
    }  # fmt: skip


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
    parser.add_argument(
        "--recalled", type=int, help="number of recalled sentences instead of the model's own"
    )
    parser.add_argument("--examples", type=int, default=6)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    model = load(args.model, base=args.base, device=torch.device(args.device), dtype=dtype).eval()
    if args.recalled:
        object.__setattr__(model.sentences, "recalled", args.recalled)
    source, rows, began = Source(args.cache), [], time.time()
    for number in range(len(CELLS)) if args.cells is None else args.cells:
        cell = CELLS[number]
        if args.conversations:
            cell = cell._replace(conversations=args.conversations)
        if time.time() - began > args.seconds:
            break
        rows.append(score(model, source, cell, batch=args.batch, examples=args.examples))
        own = rows[-1]
        print(f"{cell.kind} {cell.facts} {cell.distance} {cell.mode}: {own['correct']} of {own['questions']} "
              f"{own['labels']}, wrongly unknown {own['wrongly_unknown']}, {own['seconds']} s", flush=True)  # fmt: skip
        args.rows.parent.mkdir(parents=True, exist_ok=True)
        write_json(args.rows, {"model": str(args.model), "rows": rows})


if __name__ == "__main__":
    main()
