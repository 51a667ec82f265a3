"""Does it remember? Facts stated in a book and asked for after 1K to 1M tokens and more, by models trained on pieces
of 2K.

    remanence data prepare BOOKS/train --out TOKENS
    python benchmarks/distance.py TOKENS BOOKS/test --runs mag window --seeds 0 1 2 --models out/models --out rows.json

Every run is `recipes/facts.py` with another architecture and as many parameters: the same steps on the same texts. The
models then read held-out books. Each text is read once, and its state is asked at every distance, so that a text that
was asked goes on as if it had not been. An answer is right if every token of it is the likeliest one.

- *single*: one fact at the text's beginning; *keys4*, *keys16*, *keys64*: as many, of which one is asked for.
- *late*: a fact stated after so many tokens of the book, and asked for 4,096 tokens later.

Models are kept in --models, rows in --out: what is there already is not made again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from remanence.config import change, memorizing
from remanence.core.files import write_json
from remanence.core.tokens import ByteTokenizer
from remanence.evaluate.subject import Subject
from remanence.evaluate.task import wilson
from remanence.inference.reader import read
from remanence.model import Model, State, matched, parameters
from remanence.recipes.facts import recipe
from remanence.tasks.needle import KINDS, frame, needle, unused
from remanence.train import TrainConfig, fit
from remanence.train.config import PLAIN, override

SIGMOID: dict[str, Any] = {"memory": {"threshold": 0.0, "forget_bias": -14.0}}
"""Gates that never shut, and then writing costs nothing; they begin to forget a millionth."""
RUNS: dict[str, dict[str, Any]] = {  # what differs from the recipe's model
    "mag": {},
    "lmm": {"pattern": ("lmm",)},
    "mal": {"pattern": ("mal",)},
    "mac": {"pattern": ("mac",)},
    "hybrid": {"pattern": ("window", "lmm")},
    "gated_delta": {"pattern": ("gated_delta",), **SIGMOID},
    "gated_delta-threshold": {"pattern": ("gated_delta",)},
    "window": {"pattern": ("window",)},
    "conv_window": {"pattern": ("conv_window",)},
    "attention": {"pattern": ("attention",)},  # trained on pieces by themselves
    "memorizing": {"pattern": memorizing(6), "knn": {"size": 16384, "k": 32}},
    "mag-w256": {"window": 256},
    "mag-sigmoid": SIGMOID,
    "mag-matrix": {"memory": {"depth": 1}},
}
KEYS = {"single": 1, "keys4": 4, "keys16": 16, "keys64": 64}
LATE = 4096


def config_of(name: str, seed: int, args: argparse.Namespace) -> TrainConfig:
    base = recipe()
    model = change(base.model, RUNS[name])
    if RUNS[name]:
        model = matched(model, parameters(base.model))
    data = replace(base.data, path=str(args.tokens))
    carry = "attention" not in model.pattern
    cost = base.write_cost if model.memory.threshold and not set(model.blocks) <= PLAIN else 0.0
    steps = args.steps or base.steps
    config = replace(base, model=model, data=data, carry=carry, write_cost=cost, steps=steps, seed=seed)
    return override(config, dict(each.removeprefix("--").split("=", 1) for each in args.changes))


def trained(
    name: str, seed: int, args: argparse.Namespace, device: torch.device
) -> tuple[Model, dict[str, Any]]:
    """A run's model, which may have been trained before, and how its training went."""
    folder = args.models / f"{name}-{seed}"
    if not (folder / "model" / "config.json").is_file():
        began = time.monotonic()
        fit(config_of(name, seed, args), folder, resume=(folder / "config.json").is_file())
        write_json(folder / "took.json", {"seconds": round(time.monotonic() - began)})
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    about = {
        "config": json.loads((folder / "config.json").read_text()),
        "losses": [line["loss"] for line in lines][:: max(1, len(lines) // 60)],
        "largest_gradient": max(line["gradient"] or 0 for line in lines),
        "seconds": json.loads((folder / "took.json").read_text())["seconds"],
    }
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Model.load(folder / "model", device=device, dtype=dtype).eval(), about


class Texts:
    """Held-out books, read by every row from a place of its own on, round and round."""

    def __init__(self, folder: Path, rows: int, seed: int) -> None:
        books = [np.frombuffer(path.read_bytes(), np.uint8) for path in sorted(folder.glob("*.txt"))]
        self.text = np.concatenate(books)
        self.rng = np.random.default_rng(seed)
        self.places = self.rng.integers(len(self.text), size=rows)

    def take(self, count: int, rows: slice = slice(None)) -> np.ndarray:
        """The next tokens of rows ``[rows count]``."""
        places = self.places[rows]
        self.places[rows] = (places + count) % len(self.text)
        return self.text[(places[:, None] + np.arange(count)) % len(self.text)].astype(np.int64)


class Facts:
    """Facts for every row, of which one is asked for."""

    def __init__(self, texts: Texts, rows: int, keys: int) -> None:
        draw, book = texts.rng, ""
        self.names = [unused(book, draw, "key", keys, []) for _ in range(rows)]
        self.values = [unused(book, draw, "number", keys, []) for _ in range(rows)]
        self.asked = draw.integers(keys, size=rows)

    def stated(self, texts: Texts, length: int) -> np.ndarray:
        """A stretch of the books with the facts in it ``[rows length]``, evenly spread, each after some text."""
        made = []
        for row, (names, values) in enumerate(zip(self.names, self.values, strict=True)):
            told = [
                f" {needle('number', name, value)} ".encode()
                for name, value in zip(names, values, strict=True)
            ]
            room = length - sum(map(len, told))
            cuts = [room * (index + 1) // (len(told) + 1) for index in range(len(told))]
            hay = texts.take(room, slice(row, row + 1))[0].astype(np.uint8).tobytes()
            parts, before = [], 0
            for cut, each in zip(cuts, told, strict=True):
                parts += [hay[before:cut], each]
                before = cut
            made.append(np.frombuffer(b"".join([*parts, hay[before:]]), np.uint8))
        return np.stack(made).astype(np.int64)

    def right(self, subject: Subject, state: State) -> list[bool]:
        """Which rows answer: every token of the value is the likeliest."""
        contexts, answers = [], []
        for names, values, asked in zip(self.names, self.values, self.asked, strict=True):
            _, question, begun = frame(KINDS["n"], [names[asked]])
            contexts.append(subject.tokenizer.encode(question + begun))
            answers.append(subject.tokenizer.encode(f" {values[asked]}"))
        return [each.greedy for each in subject.likelihoods(contexts, answers, state)]


@torch.no_grad()
def measure(
    model: Model,
    kind: str,
    distances: Sequence[int],
    rows: int,
    seed: int,
    args: argparse.Namespace,
    mode: Any = "on",
) -> Iterator[dict[str, Any]]:
    """Right answers at every distance, in one reading; for `late` a distance is what was read before the fact."""
    texts, subject = (
        Texts(args.books, rows, seed),
        Subject(model.device, network=model, tokens=ByteTokenizer()),
    )
    model.memory = mode if model.has_memory else "on"
    facts = Facts(texts, rows, KEYS.get(kind, 1))
    size, done = args.piece, 0
    state = None
    if kind != "late":
        begun = facts.stated(texts, max(1024, 128 * KEYS[kind]))
        state = read(model, torch.from_numpy(begun).to(model.device)).state
    for distance in distances:
        while done < distance:
            count = min(size, distance - done)
            state = read(model, torch.from_numpy(texts.take(count)).to(model.device), state).state
            done += count
        asked, late = state, facts
        if kind == "late":
            late = Facts(texts, rows, 1)
            places = texts.places.copy()
            said = np.concatenate([late.stated(texts, 512), texts.take(LATE)], 1)
            texts.places = places
            asked = read(model, torch.from_numpy(said).to(model.device), state).state
        assert asked is not None
        right = late.right(subject, asked)
        low, high = wilson(sum(right), rows)
        yield {
            "kind": kind, "mode": mode, "distance": distance, "right": sum(right), "count": rows,
            "share": sum(right) / rows, "interval": [round(low, 4), round(high, 4)],
        }  # fmt: skip


def about(device: torch.device, commit: str | None) -> dict[str, Any]:
    """What a result depends on beside its settings."""
    if commit is None:
        found = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        )
        commit = found.stdout.strip() or None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"command": " ".join(sys.argv), "commit": commit, "device": name, "torch": torch.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tokens", type=Path, help="training books, made by `remanence data prepare`")
    parser.add_argument("books", type=Path, help="a folder of held-out books, *.txt")
    parser.add_argument("--runs", nargs="+", default=["mag", "window"], choices=list(RUNS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, help="of training; the recipe's")
    parser.add_argument("--changes", nargs="*", default=[], help="to the recipe: optimizer.lr=1e-3 batch=8")
    parser.add_argument("--kinds", nargs="+", default=["single", "keys4", "keys16", "late"])
    parser.add_argument("--modes", nargs="+", default=["on"])
    parser.add_argument("--distances", nargs="+", type=int, default=[2**n for n in (10, 12, 14, 16)])
    parser.add_argument("--rows", type=int, default=100, help="texts, each with one question")
    parser.add_argument("--piece", type=int, default=8192, help="tokens read in one call")
    parser.add_argument("--models", type=Path, default=Path("out/distance"))
    parser.add_argument("--out", type=Path, default=Path("distance.json"))
    parser.add_argument("--commit")
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing after so long")
    args = parser.parse_args()
    device, began = torch.device("cuda" if torch.cuda.is_available() else "cpu"), time.monotonic()
    rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    done = {(row["run"], row["seed"], row["kind"], row["mode"], row["distance"]) for row in rows}
    for seed in args.seeds:
        for name in args.runs:
            if time.monotonic() - began > args.seconds:
                continue
            model, training = trained(name, seed, args, device)
            for kind in args.kinds:
                for mode in args.modes:
                    wanted = [d for d in args.distances if (name, seed, kind, mode, d) not in done]
                    if not wanted or time.monotonic() - began > args.seconds:
                        continue
                    start = time.monotonic()
                    found = []
                    for row in measure(model, kind, args.distances, args.rows, seed + 1, args, mode):
                        found.append({"run": name, "seed": seed, **row})
                    rows += found
                    shares = " ".join(f"{row['distance']}:{row['share']:.0%}" for row in found)
                    took = time.monotonic() - start
                    print(f"{name} {seed} {kind} {mode}: {shares}   {took:.0f} s", flush=True)
            trainings = json.loads(args.out.read_text())["training"] if args.out.exists() else {}
            training |= {"parameters": parameters(model.config)}
            trainings[f"{name}-{seed}"] = training
            write_json(args.out, {**about(device, args.commit), "training": trainings, "rows": rows})


if __name__ == "__main__":
    main()
