"""When does a memory learn to look a fact up by its name? Small models on facts in books, keys and queries begun in
different ways.

    python -m experiments.facts.addressing BOOKS --seeds 0 1 --out rows.json
    python -m experiments.facts.addressing BOOKS --out rows.json --table

BOOKS is a folder of ``*.txt.xz`` with an ``index.json`` that names each book's split. Two layers of width 128 read the
first stage of `recipes/facts.py`: facts in the plainest wording, in pieces of 2,048 bytes. Every --every steps they are
asked for one of four facts in a held-out book, with 256 bytes and more in between: giving any of the four is right one
time in four, so only what is well above that is a look-up.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from experiments.facts.distance import Facts, Texts
from experiments.shared import Row, Rows, load, machine, table_row, table_rule
from remanence.config import change
from remanence.data.prepare import prepare
from remanence.evaluate.subject import Subject
from remanence.inference.reader import read
from remanence.recipes.facts import recipe
from remanence.tokenizers.tokens import ByteTokenizer
from remanence.train.config import TrainConfig
from remanence.train.run import Run

RUNS: dict[str, dict[str, Any]] = {
    f"{mixer}, conv {conv}{', induction' * induction}": {
        "pattern": (mixer,),
        "memory": {"conv": conv, "induction": induction},
    }
    for mixer in ("lmm", "mag")
    for conv in (4, 16)
    for induction in (False, True)
}
SMALL = {"dim": 128, "num_layers": 2, "heads": 4, "ffn": 192, "window": 64}
NEVER = 10**6
"""A ramp so long that the first stage does not end."""


def config_of(name: str, seed: int, args: argparse.Namespace, tokens: Path) -> TrainConfig:
    base = recipe()
    memory = {"head_dim": 64, "forget_bias": -10.0, "threshold": 0.01, **RUNS[name]["memory"]}
    model = change(
        base.model, {**SMALL, "pattern": RUNS[name]["pattern"], "memory": {"dim": SMALL["dim"], **memory}}
    )
    return replace(
        base,
        model=model,
        data=replace(base.data, path=str(tokens), facts="numbers", weight=0.01, distance_ramp=NEVER),
        optimizer=replace(base.optimizer, lr=3e-3, schedule="cosine"),
        steps=args.steps,
        batch=args.rows,
        write_cost=0.0,
        precision="float32",
        seed=seed,
        log_every=args.every,
        save_every=NEVER,
        device="cpu",
    )


@torch.no_grad()
def asked(run: Run, books: list[torch.Tensor], texts: int) -> float:
    """The share of right answers to one of four facts, the wording that of the first stage."""
    model, rows = run.model.eval(), Texts(books, texts, seed=3)
    facts = Facts(rows, texts, 4, "direct")
    said = torch.from_numpy(facts.stated(rows, 768))
    right = facts.right(Subject(model.device, network=model, tokens=ByteTokenizer()), read(model, said).state)
    model.train()
    return sum(right) / texts


def one(name: str, what: Row, args: argparse.Namespace, tokens: Path, books: list[torch.Tensor]) -> Row:
    curve = []
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(name, what["seed"], args, tokens)
        with Run.open(config, Path(folder) / "run") as run:
            while not run.done:
                step = run.step()
                if run.progress.step % args.every == 0:
                    curve.append([run.progress.step, round(step.loss, 3), asked(run, books, args.texts)])
                    print(name, what["seed"], *curve[-1], flush=True)
    return {"what": what, **machine(torch.device("cpu")), "curve": curve}


def table(rows: list[Row]) -> str:
    """Right answers by step."""
    steps = [step for step, *_ in rows[0]["curve"]]
    lines = [table_row("run", "seed", *steps), table_rule(2 + len(steps))]
    for row in sorted(rows, key=lambda row: (list(RUNS).index(row["what"]["run"]), row["what"]["seed"])):
        cells = [f"{share:.0%}" for *_, share in row["curve"]]
        lines.append(table_row(row["what"]["run"], row["what"]["seed"], *cells))
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("books", type=Path)
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=100, help="steps between two looks")
    parser.add_argument("--rows", type=int, default=2, help="of a batch, 2,048 bytes each")
    parser.add_argument("--texts", type=int, default=48, help="that are asked, one question each")
    parser.add_argument("--out", type=Path, default=Path("addressing.json"), help="rows; not run again")
    parser.add_argument("--commit", help="of the code, where there is no repository to ask")
    parser.add_argument("--table", action="store_true", help="print what --out holds, and run nothing")
    parser.add_argument("--tiny", action="store_true", help="two steps, to try the script")
    args = parser.parse_args()
    if args.tiny:
        args.steps, args.every, args.rows, args.texts = 2, 1, 1, 2
    rows = Rows(args.out, args.commit)
    if args.table:
        print(table(rows.rows))
        return
    torch.set_num_threads(1)
    index = json.loads((args.books / "index.json").read_text())
    books = load(str(args.books), "validation")
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens"
        prepare([args.books / book["file"] for book in index if book["split"] == "train"], tokens)
        for seed in args.seeds:
            for name in args.runs:
                what = {
                    "run": name,
                    "seed": seed,
                    "steps": args.steps,
                    "rows": args.rows,
                    "texts": args.texts,
                }
                if not rows.has(what):
                    rows.add(one(name, what, args, tokens, books))


if __name__ == "__main__":
    main()
