"""Does it remember? Facts stated in a book and asked for after 1K to 1M tokens and more, by models trained on pieces
of 2K.

    python -m experiments.facts.distance BOOKS --seeds 0 1 2 --jobs 6 --work out/distance --out rows.json
    python -m experiments.facts.distance BOOKS --out rows.json --table --plot distance.png

BOOKS is a folder of ``*.txt.xz`` with an ``index.json`` that names each book's split. Every run is `recipes/facts.py`
with facts that are numbers, and with another architecture and as many parameters: the same steps on the same texts.
The models then read held-out books (--split). Each text is read once, and its state is asked at every distance, so that
a text that was asked goes on as if it had not been. An answer is right if every token of it is the likeliest one, and
the likeliest token after it is no digit. Rows of earlier versions, without ``ended`` in their settings, were scored
without that token.

- *single*: one fact at the text's beginning; *keys4*, *keys16*, *keys64*: as many, of which one is asked for.
- *late*: a fact stated after so many tokens of the book, and asked for 4,096 tokens later.
- *numbers*: one fact, then as many tokens of the books' places with digits, one behind the other: what wears facts.

Facts are worded as RULER's are, or as --wording says (`remanence.tasks.facts.WORDINGS`).

Models are kept in --work, rows in --out: what is there already is not made again. With --jobs, runs share a device.
With --model, a model of bytes that is there already is asked, by its folder or by the name of one in the package.
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

from experiments.shared import Row, Rows, add_arguments, load, machine
from remanence.config import MODES, change, memorizing
from remanence.data.prepare import prepare
from remanence.evaluate.subject import Subject
from remanence.evaluate.task import wilson
from remanence.inference.reader import read
from remanence.io.files import write_json
from remanence.model import Model, State, matched, parameters
from remanence.recipes.facts import recipe
from remanence.tasks.facts import WORDINGS
from remanence.tasks.needle import draw_unused
from remanence.tokenizers.tokens import ByteTokenizer
from remanence.train import TrainConfig, fit
from remanence.train.config import PLAIN, override

SIGMOID: dict[str, Any] = {"memory": {"threshold": 0.0, "forget_bias": -14.0}}
"""Gates that never shut, and then writing costs nothing; they begin to forget a millionth."""
RUNS: dict[str, dict[str, Any]] = {  # what differs from the recipe's model
    # gates that see more than a byte: the memories stand behind a layer that mixes bytes
    "mag-context": {},
    "lmm-context": {"pattern": ("conv_window", *["lmm"] * 5)},
    "matrix-context": {"pattern": ("conv_window", *["gated_delta"] * 5)},
    "mag": {"pattern": ("mag",)},
    "lmm": {"pattern": ("lmm",)},
    "mal": {"pattern": ("mal",)},
    "mac": {"pattern": ("mac",)},
    "hybrid": {"pattern": ("window", "lmm")},
    "gated_delta": {"pattern": ("gated_delta",), **SIGMOID},
    "gated_delta-threshold": {"pattern": ("gated_delta",)},
    "window": {"pattern": ("window",)},
    "conv_window": {"pattern": ("conv_window",)},
    "conv_window-2k": {"pattern": ("conv_window",), "window": 2048},  # sees all that it is trained on
    "attention": {"pattern": ("attention",)},  # trained on pieces by themselves
    "memorizing": {"pattern": memorizing(6), "knn": {"size": 16384, "k": 32}},
    "mag-w256": {"pattern": ("mag",), "window": 256},
    "mag-conv4": {"pattern": ("mag",), "memory": {"conv": 4}},
    "mag-unrelated": {"pattern": ("mag",), "memory": {"induction": False}},  # queries and keys
    "mag-sigmoid": {"pattern": ("mag",), **SIGMOID},
    "mag-matrix": {"pattern": ("mag",), "memory": {"depth": 1}},
}
TITLES = {
    "mag-context": "MAG",
    "remanence-small": "remanence-small",
    "conv_window-2k": "window of 2K",
}
"""Of the runs in a plot, which has those without changes."""
KEYS = {"single": 1, "keys4": 4, "keys16": 16, "keys64": 64}
LATE, AROUND = 4096, 24
UNENDED = ", ends not scored"
BRIEF = {2**10 * n: f"{n}K" for n in (1, 4, 16, 64, 256)} | {2**20 * n: f"{n}M" for n in (1, 4, 10)}
TINY = {"steps": 2, "distances": [1024], "texts": 2, "runs": ["mag-context", "window"], "changes": [
    "model.dim=64", "model.num_layers=2", "model.heads=2", "model.ffn=64", "model.memory.head_dim=32",
    "data.length=512", "batch=2", "precision=float32",
]}  # fmt: skip


def config_of(name: str, seed: int, args: argparse.Namespace) -> TrainConfig:
    base = recipe()
    model = change(base.model, RUNS[name])
    if RUNS[name]:
        model = matched(model, parameters(base.model))
    data = replace(base.data, path=str(args.work / "tokens"), facts="numbers", weight=0.01)
    carry = "attention" not in model.pattern
    cost = base.write_cost if model.memory.threshold and not set(model.blocks) <= PLAIN else 0.0
    steps = args.steps or base.steps
    config = replace(base, model=model, data=data, carry=carry, write_cost=cost, steps=steps, seed=seed)
    return override(config, dict(each.removeprefix("--").split("=", 1) for each in args.changes))


def trained(name: str, seed: int, args: argparse.Namespace, device: torch.device) -> tuple[Model, Row]:
    """A run's model, which may have been trained before, and how its training went."""
    folder = args.work / "-".join([name, *args.changes, str(seed)]).replace("/", "_")
    if not (folder / "model" / "config.json").is_file():
        began = time.monotonic()
        fit(config_of(name, seed, args), folder, resume=(folder / "config.json").is_file())
        write_json(folder / "took.json", {"seconds": round(time.monotonic() - began)})
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Model.load(folder / "model", device=device, dtype=dtype).eval()
    training = {
        "parameters": parameters(model.config),
        "seconds": json.loads((folder / "took.json").read_text())["seconds"],
        "largest_gradient": max(line["gradient"] or 0 for line in lines),
        "last": {key: lines[-1][key] for key in ("loss", "step_size", "written") if key in lines[-1]},
        "losses": [round(line["loss"], 4) for line in lines][:: max(1, len(lines) // 60)],
        "config": json.loads((folder / "config.json").read_text()),
    }
    return model, training


def opened(name: str, device: torch.device) -> tuple[Model, Row]:
    """A model that is there already."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Model.load(name, device=device, dtype=dtype).eval()
    return model, {"parameters": parameters(model.config)}


class Texts:
    """Held-out books, read by every row from a place of its own on, round and round."""

    def __init__(self, books: Sequence[torch.Tensor], rows: int, seed: int) -> None:
        self.text = np.concatenate([book.numpy() for book in books])
        self.rng = np.random.default_rng(seed)
        self.places = self.rng.integers(len(self.text), size=rows)

    def take(self, count: int, rows: slice = slice(None)) -> np.ndarray:
        """The next tokens of rows ``[rows count]``."""
        places = self.places[rows]
        self.places[rows] = (places + count) % len(self.text)
        return self.text[(places[:, None] + np.arange(count)) % len(self.text)].astype(np.int64)


def around_digits(books: Sequence[torch.Tensor]) -> torch.Tensor:
    """All places of the books that have digits, with AROUND bytes on both sides, one behind the other."""
    parts = []
    for book in books:
        digits = ((book >= ord("0")) & (book <= ord("9"))).float()
        near = torch.nn.functional.max_pool1d(digits[None, None], 2 * AROUND + 1, 1, AROUND)[0, 0]
        parts.append(book[near > 0])
    return torch.cat(parts)


class Facts:
    """Facts for every row, of which one is asked for."""

    def __init__(self, texts: Texts, rows: int, keys: int, wording: str = "ruler") -> None:
        draw, book = texts.rng, ""
        self.wording = WORDINGS[wording]
        self.names = [draw_unused(book, draw, "key", keys, []) for _ in range(rows)]
        self.values = [draw_unused(book, draw, "number", keys, []) for _ in range(rows)]
        self.asked = draw.integers(keys, size=rows)

    def stated(self, texts: Texts, length: int) -> np.ndarray:
        """A stretch of the books with the facts in it ``[rows length]``, evenly spread, each after some text."""
        made = []
        for row, (names, values) in enumerate(zip(self.names, self.values, strict=True)):
            told = [
                f"{self.worded(name, value)[0]} ".encode() for name, value in zip(names, values, strict=True)
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

    def worded(self, name: str, value: str) -> tuple[str, str]:
        adjective, noun = name.split("-")
        return self.wording(adjective, noun, value)

    def right(self, subject: Subject, state: State) -> list[bool]:
        """Which rows answer: every token of the value is the likeliest, and the value ends there."""
        contexts, answers, wanted = [], [], []
        for names, values, asked in zip(self.names, self.values, self.asked, strict=True):
            contexts.append(subject.tokenizer.encode(self.worded(names[asked], values[asked])[1]))
            answers.append(subject.tokenizer.encode(f" {values[asked]}"))
            wanted.append(values[asked])
        found = subject.likelihoods(contexts, answers, state)
        return [each.states(value) for each, value in zip(found, wanted, strict=True)]


@torch.no_grad()
def measure(
    model: Model,
    kind: str,
    distances: Sequence[int],
    books: Sequence[torch.Tensor],
    rows: int,
    seed: int,
    piece: int,
    mode: Any = "on",
    wording: str = "ruler",
) -> Iterator[Row]:
    """Right answers at every distance, in one reading; for `late` a distance is what was read before the fact."""
    mode = mode if model.has_memory else "on"
    texts = Texts(books, rows, seed)
    subject = Subject(model.device, network=model, tokens=ByteTokenizer(), memory_mode=mode)
    facts = Facts(texts, rows, KEYS.get(kind, 1), wording)
    state, done = None, 0
    if kind != "late":
        begun = facts.stated(texts, max(1024, 128 * KEYS.get(kind, 1)))
        state = read(model, torch.from_numpy(begun).to(model.device), memory_mode=mode).state
    if kind == "numbers":
        texts = Texts([around_digits(books)], rows, seed)
    for distance in distances:
        while done < distance:
            count = min(piece, distance - done)
            state = read(
                model, torch.from_numpy(texts.take(count)).to(model.device), state, memory_mode=mode
            ).state
            done += count
        asked, late = state, facts
        if kind == "late":
            late = Facts(texts, rows, 1, wording)
            places = texts.places.copy()
            said = np.concatenate([late.stated(texts, 512), texts.take(LATE)], 1)
            texts.places = places
            asked = read(model, torch.from_numpy(said).to(model.device), state, memory_mode=mode).state
        assert asked is not None
        right = late.right(subject, asked)
        low, high = wilson(sum(right), rows)
        yield {
            "distance": distance,
            "right": sum(right),
            "count": rows,
            "interval": [round(low, 4), round(high, 4)],
        }


# What was found


Shares = dict[int, tuple[int, int]]


def shares(rows: list[Row]) -> dict[tuple[str, ...], Shares]:
    """Right answers and questions by distance, of all seeds together, by run with its changes, kind, wording, mode.

    Rows whose answers were scored without their ends are kept apart.
    """
    found: dict[tuple[str, ...], Shares] = {}
    order = {name: place for place, name in enumerate(RUNS)}
    for row in sorted(rows, key=lambda row: order.get(row["what"]["run"], len(order))):
        what = row["what"]
        wording = what["wording"] + ("" if what.get("ended") else UNENDED)
        key = " ".join([what["run"], *what["changes"]]), what["kind"], wording, what["mode"]
        own = found.setdefault(key, {})
        for each in row["answers"]:
            before = own.get(each["distance"], (0, 0))
            own[each["distance"]] = before[0] + each["right"], before[1] + each["count"]
    return found


def table(rows: list[Row]) -> str:
    """Right answers by distance, with 95 % intervals."""
    found = shares(rows)
    distances = sorted({distance for own in found.values() for distance in own})
    head = [
        "run",
        "facts",
        "wording",
        "memory",
        *[BRIEF.get(distance, f"{distance:,}") for distance in distances],
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for key, own in found.items():
        cells = []
        for distance in distances:
            right, count = own.get(distance, (0, 0))
            low, high = wilson(right, count) if count else (0, 0)
            cells.append(f"{right / count:.1%} ({low:.0%}-{high:.0%})" if count else "")
        lines.append("| " + " | ".join([*key, *cells]) + " |")
    return "\n".join([*lines, ""])


def plot(rows: list[Row], path: Path) -> None:
    """Right answers to single facts by distance, of the runs in TITLES if there are any."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axis = figure.subplots()
    every = shares(rows)
    shown = {run for run, *_ in every} & set(TITLES) or {run for run, *_ in every}
    asked = ("single", "ruler"), ("single", "ruler" + UNENDED)
    found = {key: own for key, own in every.items() if key[0] in shown and key[1:3] in asked}
    for color, ((run, _, wording, mode), own) in enumerate(found.items()):
        middle = [100 * right / count for right, count in own.values()]
        bounds = [[100 * bound for bound in wilson(*each)] for each in own.values()]
        around = [[m - low for m, (low, _) in zip(middle, bounds, strict=True)],
                  [high - m for m, (_, high) in zip(middle, bounds, strict=True)]]  # fmt: skip
        places = [distance * 1.03 ** (color - len(found) / 2) for distance in own]  # beside each other
        label = TITLES.get(run, run) + wording.removeprefix("ruler") + f", memory {mode}" * (mode != "on")
        axis.errorbar(
            places,
            middle,
            around,
            marker="o",
            markersize=4,
            label=label,
            linestyle="-" if mode == "on" else ":",
        )
    ticks = sorted({distance for own in found.values() for distance in own})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [BRIEF.get(tick, f"{tick:,}") for tick in ticks])
    axis.set(xlabel="tokens of a book from a fact to its question", ylabel="right answers, %", ylim=(-2, 103))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9, loc="center")
    figure.savefig(path, dpi=130)


# The command


def fan_out(args: argparse.Namespace) -> None:
    """Every run and seed in a process of its own, so many at a time; then their rows together."""
    own = {
        name: value
        for name, value in vars(args).items()
        if name not in ("books", "runs", "seeds", "jobs", "out")
    }
    given = [str(args.books)]
    for name, value in own.items():
        if value not in (None, False, []):
            values = [] if value is True else value if isinstance(value, list) else [value]
            given += [f"--{name.replace('_', '-')}", *map(str, values)]
    waiting = [(name, seed, args.work / f"{name}-{seed}.json") for seed in args.seeds for name in args.runs]
    parts, running = [part for *_, part in waiting], dict[str, subprocess.Popen[bytes]]()
    while waiting or running:
        for name, process in [*running.items()]:
            if process.poll() is not None:
                del running[name]
                if process.returncode:
                    print(f"{name}: ended with exit code {process.returncode}", file=sys.stderr)
        while waiting and len(running) < args.jobs:
            name, seed, part = waiting.pop(0)
            own_arguments = ["--runs", name, "--seeds", str(seed), "--out", str(part)]
            command = [sys.executable, "-m", __spec__.name, *given, *own_arguments]
            running[f"{name} {seed}"] = subprocess.Popen(command)
        time.sleep(0.5)
    Rows(args.out, args.commit, [part for part in parts if part.exists()]).save()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("books", type=Path, help="a folder of books with an index.json")
    parser.add_argument("--runs", nargs="+", default=["mag-context", "conv_window-2k"], choices=list(RUNS))
    parser.add_argument("--model", help="ask this one, and train none")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, help="of training; the recipe's")
    parser.add_argument("--changes", nargs="*", default=[], help="to the recipe: optimizer.lr=1e-3 batch=8")
    parser.add_argument(
        "--kinds",
        nargs="+",
        default=["single", "keys4", "keys16", "late"],
        choices=[*KEYS, "late", "numbers"],
    )
    parser.add_argument("--modes", nargs="+", default=["on"], choices=MODES)
    parser.add_argument("--wording", default="ruler", choices=list(WORDINGS))
    parser.add_argument("--distances", nargs="+", type=int, default=[2**n for n in (10, 12, 14, 16)])
    parser.add_argument("--texts", type=int, default=100, help="each with one question")
    parser.add_argument("--piece", type=int, default=8192, help="tokens read in one call")
    parser.add_argument("--split", default="test", help="of the books that are read")
    parser.add_argument("--jobs", type=int, default=1, help="runs that share the device")
    parser.add_argument(
        "--work", type=Path, default=Path("out/distance"), help="folder for tokens and models"
    )
    add_arguments(parser, "distance.json")
    if "--tiny" in sys.argv:
        parser.set_defaults(**TINY)
    args = parser.parse_args()
    rows = Rows(args.out, args.commit, args.merge or ())
    if rows.shown(args, table, plot):
        return
    if args.model:
        args.runs = [args.model]
    elif not (args.work / "tokens" / "tokens.json").is_file():  # of --jobs, the processes share it
        index = json.loads((args.books / "index.json").read_text())
        trained_on = [args.books / book["file"] for book in index if book["split"] == "train"]
        prepare(trained_on, args.work / "tokens")
    if args.jobs > 1 and not args.model:
        fan_out(args)
        return
    device, began = torch.device("cuda" if torch.cuda.is_available() else "cpu"), time.monotonic()
    books = load(str(args.books), args.split)
    settings = {
        name: getattr(args, name) for name in ("steps", "changes", "wording", "distances", "texts", "split")
    }
    settings["ended"] = True
    for seed in args.seeds:
        for run in args.runs:
            asked = [
                {"run": run, "seed": seed, "kind": kind, "mode": mode, **settings}
                for kind in args.kinds
                for mode in args.modes
            ]
            asked = [what for what in asked if not rows.has(what)]
            if not asked or time.monotonic() - began > args.seconds:
                continue
            model, training = opened(run, device) if args.model else trained(run, seed, args, device)
            for what in asked:
                if time.monotonic() - began > args.seconds or (what["mode"] != "on" and not model.has_memory):
                    continue
                start = time.monotonic()
                kind, mode = what["kind"], what["mode"]
                found = list(
                    measure(
                        model,
                        kind,
                        args.distances,
                        books,
                        args.texts,
                        seed + 1,
                        args.piece,
                        mode,
                        args.wording,
                    )
                )
                took = round(time.monotonic() - start, 1)
                rows.add(
                    {"what": what, **machine(device), "seconds": took, "answers": found, "training": training}
                )
                told = " ".join(f"{each['distance']}:{each['right'] / each['count']:.0%}" for each in found)
                print(f"{run} {seed} {kind} {mode}: {told}   {took:.0f} s", flush=True)


if __name__ == "__main__":
    main()
