"""DNA: a genome read base by base, and classes of sequences by models that began from it or from scratch.

    python -m experiments.dna.run DATA --jobs 8 --work out/dna --out dna.json
    python -m experiments.dna.run DATA --out dna.json --table --plot dna.png

DATA is a folder. Below it lie one genome (``*.fna.gz``), GUE's tasks (folders with train, dev and test ``.csv.xz``) and
single tables (``*.test.csv.xz``). Models of equal size are trained on the first 80 % of the genome (`dna/pretrain`).

- *genome*: each then reads the whole genome in one pass, its state carried: bits per base of every stretch of it, with
  the memory on, off, frozen and fresh (64 stretches side by side). Only the last 20 % are held out. Markov models read
  the same.
- *classes*: fine-tuned (`dna/classify`) from that model and from scratch, on GUE's tasks and on the tables, of which
  80 / 10 / 10 % become train, dev and test: those are not comparable to anyone's numbers. The model of the best step on
  dev, by Matthews' correlation, is the one that is tested, with the memory on, off and frozen. Rows are trained on
  either strand by chance; at last come runs on one strand alone, and with the next base in the loss.

Workers (--jobs) share a device and take runs from one list, whose order is that of importance; with --seconds no run
begins later. Rows that --out has are not made again.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import lzma
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.shared import Row, Rows, add_arguments, bits_of, machine, table_row, table_rule
from remanence.config import Mode, change
from remanence.dna.alphabet import BASES, base_tokens, reverse_complement
from remanence.dna.evaluation import label_scores
from remanence.dna.fasta import read_records
from remanence.dna.labelled import Labelled, read_labelled
from remanence.dna.task import classification_scores, confusion
from remanence.evaluate.subject import Subject
from remanence.evaluate.task import wilson
from remanence.io.files import replacing
from remanence.model import Model, matched, parameters
from remanence.recipes import load_recipe
from remanence.tasks.markov import Mixture
from remanence.train import TrainConfig, fit
from remanence.train.config import DataConfig, OptimizerConfig, override
from remanence.train.run import Run

RUNS: dict[str, dict[str, Any]] = {  # what differs from the recipe's model; all have as many parameters
    "lmm": {},
    "window": {"pattern": ("window",), "window": 512},
    "lmm-induction": {"memory": {"induction": True, "conv": 16}},
    "mag": {"pattern": ("mag",)},
    "hybrid": {"pattern": ("window", "lmm")},
}
TITLES = {
    "lmm": "LMM",
    "window": "window of 512",
    "lmm-induction": "LMM, keys begin as the query before",
    "mag": "MAG",
    "hybrid": "window and LMM layers",
}
SHARE = 0.8
"""Of the genome, what models are trained on."""
ORDERS = (2, 3, 4, 6, 8, 12)
MODES: tuple[Mode, ...] = ("on", "off", "frozen", "fresh")
SIDE_BY_SIDE = 64
LOOKS = 12
"""How often a fine-tuning is looked at on dev."""
PUBLISHED = {
    "prom_core_all": {"DNABERT-2": 69.37, "NT-2500M-multi": 70.33},
    "prom_300_tata": {"DNABERT-2": 71.59, "NT-2500M-multi": 79.43},
    "tf/0": {"DNABERT-2": 71.99, "NT-2500M-multi": 66.64},
}
"""MCC x 100 on the same test sets: table 4 of the DNABERT-2 paper, as its authors' repository shows it. That table has
no HyenaDNA, whose numbers on GUE we have not seen at their source.
"""
BESIDE = ("DNABERT-2", "NT-2500M-multi")
TINY = {"runs": ["lmm", "window"], "seeds": [0], "every": 4096, "most": 20_000, "piece": 4096, "pretrain_steps": 4,
        "steps": 4, "samples": 64, "changes": ["model.dim=32", "model.num_layers=1", "model.heads=2", "model.ffn=64",
        "model.memory.head_dim=16", "batch=4", "precision=float32"]}  # fmt: skip


# Data


def genome_of(data: Path) -> np.ndarray:
    found = sorted(
        path for pattern in ("*.fna.gz", "*.fna", "*.fa.gz", "*.fa") for path in data.rglob(pattern)
    )
    if not found:
        raise SystemExit(f"{data}: expected a genome, *.fna.gz, got none")
    return np.concatenate(
        [base_tokens(piece) for record in read_records(found[0]) for piece in record.pieces]
    )


def tasks_of(data: Path, work: Path) -> dict[str, Path]:
    """GUE's tasks, and the tables as they were split again."""
    found = {}
    for path in sorted(data.rglob("train.csv*")):
        parts = path.parent.parts
        found[parts[-1] if len(parts[-1]) > 1 else "/".join(parts[-2:])] = path.parent
    again = {
        path.name.split(".")[0]: work / "again" / path.name.split(".")[0]
        for path in data.rglob("*.test.csv*")
    }
    return {**found, **dict(sorted(again.items()))}


def prepare(data: Path, work: Path, most: int | None) -> None:
    """The genome's first part as FASTA, and the tables split again, by chance but always the same way."""
    work.mkdir(parents=True, exist_ok=True)
    bases = genome_of(data)[:most]
    text = np.frombuffer(BASES.encode(), np.uint8)[bases[: int(SHARE * len(bases))]].tobytes()
    with replacing(work / "train.fna") as temporary:
        temporary.write_bytes(b">first part\n" + text + b"\n")
    for path in data.rglob("*.test.csv*"):
        folder = work / "again" / path.name.split(".")[0]
        folder.mkdir(parents=True, exist_ok=True)
        raw = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        head, *lines = csv.reader(io.StringIO(raw.decode()))
        order = np.random.default_rng(0).permutation(len(lines))
        first, second = int(0.8 * len(lines)), int(0.9 * len(lines))
        for name, part in zip(("train", "dev", "test"), np.split(order, [first, second]), strict=True):
            written = io.StringIO()
            csv.writer(written).writerows([head, *(lines[index] for index in part)])
            with replacing(folder / f"{name}.csv") as temporary:
                temporary.write_text(written.getvalue())


# Training


def changed(config: TrainConfig, name: str, args: argparse.Namespace) -> TrainConfig:
    config = override(config, dict(each.split("=", 1) for each in args.changes))
    model = change(config.model, RUNS[name])
    model = matched(model, parameters(config.model)) if RUNS[name] else model
    precision = (
        "bfloat16" if torch.cuda.is_available() and "precision=float32" not in args.changes else "float32"
    )
    return replace(config, model=model, precision=precision, log_every=50, save_every=10**6, keep=1)


def pretraining(name: str, args: argparse.Namespace) -> TrainConfig:
    config = changed(load_recipe("dna/pretrain"), name, args)
    steps = args.pretrain_steps
    return replace(
        config, steps=steps, save_every=max(1, steps // 4),
        data=replace(config.data, path=str(args.work / "train.fna")),
        optimizer=replace(config.optimizer, warmup=min(100, max(1, steps // 10))),
    )  # fmt: skip


def pretrained(name: str, args: argparse.Namespace) -> tuple[Path, Row]:
    """The folder of a model trained on the genome's first part, and how that went."""
    folder = args.work / f"genome-{name}"
    took = folder / "took.json"
    if not took.is_file():
        began = time.monotonic()
        fit(pretraining(name, args), folder, resume=(folder / "checkpoints").is_dir())
        took.write_text(json.dumps(round(time.monotonic() - began, 1)))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [round(line["loss"] / math.log(2), 4) for line in lines if line["loss"] is not None]
    training = {
        "seconds": json.loads(took.read_text()),
        "losses": losses,
        "tokens_per_s": lines[-1]["tokens_per_s"],
    }
    return folder / "model", training


def classifying(name: str, path: Path, count: int, what: Row, args: argparse.Namespace) -> TrainConfig:
    """Some ten epochs of few sequences, four of many."""
    config = changed(load_recipe("dna/classify"), name, args)
    batch = config.batch if "batch=4" in args.changes else (128 if count > 20_000 else 64)
    epochs = what["epochs"] * (1 if count > 20_000 else 2.5)
    steps = args.steps or max(LOOKS, round(epochs * count / batch))
    return replace(
        config, steps=steps, batch=batch, seed=what["seed"],
        init_from=str(args.work / f"genome-{name}" / "model") if what["begin"] == "genome" else None,
        data=DataConfig(kind="dna", path=str(path), length=1024, weight=what["weight"],
                        reverse_complement=what["strands"] == 2),
        optimizer=OptimizerConfig(lr=what["lr"], warmup=max(1, steps // 20)),
    )  # fmt: skip


# Measuring


class Split:
    """Sequences of a split, and how well a model tells their classes."""

    def __init__(self, path: Path, split: str, names: list[str], most: int | None) -> None:
        data = read_labelled("data", str(path), split)
        self.sequences = data.sequences[:most]
        self.classes = [names.index(label) for label in data.labels[:most]]
        self.count = len(names)

    def scored(self, model: Model, both: bool, mode: Mode | None = None) -> np.ndarray:
        """The confusion matrix; of `both` strands' mean."""
        mode = mode or model.memory_mode
        subject, rows = (
            Subject(model.device, network=model, memory_mode=mode),
            1024 if model.device.type == "cuda" else 128,
        )
        found = []
        model.eval()
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
            for first in range(0, len(self.sequences), rows):
                own = self.sequences[first : first + rows]
                logs = label_scores(subject, own, self.count)
                if both:
                    logs = logs + label_scores(
                        subject, [reverse_complement(each) for each in own], self.count
                    )
                found.append(logs.argmax(1))
        model.train()
        return confusion(self.classes, torch.cat(found).tolist(), self.count)


def classes(what: Row, args: argparse.Namespace) -> Row:
    """One fine-tuning, looked at on dev; the best on dev is tested."""
    path, name = tasks_of(args.data, args.work)[what["task"]], what["run"]
    train: Labelled = read_labelled("data", str(path), "train")
    config = classifying(name, path, len(train.labels), what, args)
    dev, test = (Split(path, split, train.names, args.samples) for split in ("dev", "test"))
    folder = (
        args.work
        / "runs"
        / "-".join(str(what[key]) for key in ("task", "run", "begin", "seed", "strands", "weight")).replace(
            "/", "_"
        )
    )
    shutil.rmtree(folder, ignore_errors=True)
    best, chosen, looks, losses, began = -2.0, dict[str, Any](), [], [], time.monotonic()
    with Run.open(config, folder) as run:
        every = max(1, config.steps // LOOKS)
        while not run.done:
            losses.append(run.step().loss)
            if run.progress.step % every and not run.done:
                continue
            found = classification_scores(dev.scored(run.model, both=False))
            looks.append(
                [run.progress.step, round(found["mcc"], 4), round(statistics.fmean(losses[-every:]), 4)]
            )
            if found["mcc"] > best:
                best = found["mcc"]
                chosen = {name: each.detach().clone() for name, each in run.model.state_dict().items()}
        took = round(time.monotonic() - began, 1)
        run.model.load_state_dict(chosen)
        found = {}
        for mode in MODES[:3] if run.model.has_memory else MODES[:1]:
            for both in (False, True):
                matrix = test.scored(run.model, both, mode if run.model.has_memory else None)
                found[f"{mode}{' both' * both}"] = {
                    "confusion": matrix.tolist(),
                    **classification_scores(matrix),
                }
        count = sum(parameter.numel() for parameter in run.model.parameters())
    shutil.rmtree(folder, ignore_errors=True)
    return {
        "parameters": count, "seconds": took, "steps": config.steps, "batch": config.batch, "dev": round(best, 4),
        "looks": looks, "test": found,
    }  # fmt: skip


def genome(what: Row, args: argparse.Namespace, device: torch.device) -> Row:
    """Bits per base of every stretch of the genome, in one reading."""
    bases = genome_of(args.data)[: args.most]
    began = time.monotonic()
    if what["run"] == "markov":
        models = Mixture(ORDERS)
        bits = np.concatenate([models.bits(bases[at : at + 2**18]) for at in range(0, len(bases), 2**18)], 1)[
            :, 1:
        ]
        names = [*(f"order {order}" for order in ORDERS), "orders mixed"]
        return {"curves": {name: stretches(own, args.every) for name, own in zip(names, bits, strict=True)},
                **held_out(dict(zip(names, bits, strict=True)), len(bases))}  # fmt: skip
    folder, training = pretrained(what["run"], args)
    model = Model.load(folder, device=device).eval()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    # A memory that begins anew with every segment can as well read many stretches of the genome side by side.
    rows = SIDE_BY_SIDE if what["mode"] == "fresh" else 1
    each, piece = (len(bases) - 1) // rows, args.piece if rows == 1 else min(args.piece, 2048)
    text = torch.from_numpy(bases[: rows * each + 1].astype(np.int64)).unfold(0, each + 1, each)
    state, found, marks = model.start(rows), [], {}
    for first in range(0, each, piece):
        bits, state = bits_of(model, text[:, first : first + piece + 1], state, what["mode"])
        found.append(bits.cpu())  # what is held on the device does not grow
        if device.type == "cuda" and len(found) in (2, -(-each // piece)):
            marks[f"MiB after {first + bits.shape[1]:,}"] = round(
                torch.cuda.max_memory_allocated() / 2**20, 1
            )
    own = torch.cat(found, 1).flatten().numpy()
    name = what["mode"]
    return {
        "curves": {name: stretches(own, args.every)}, **held_out({name: own}, len(bases)),
        "diverged": bool(state.diverged.any()), "memory": marks, "seconds": round(time.monotonic() - began, 1),
        "parameters": parameters(model.config), "training": training,
    }  # fmt: skip


def stretches(bits: np.ndarray, every: int) -> list[float]:
    return [round(float(bits[at : at + every].mean()), 5) for at in range(0, len(bits), every)]


def held_out(found: dict[str, np.ndarray], count: int) -> Row:
    """Means over the part that models were trained on, and over the part that they were not; and of the latter the
    first and the last quarter.
    """
    cut = int(SHARE * count)
    quarter = (count - cut) // 4
    parts = {"trained": slice(0, cut), "held out": slice(cut, None), "first quarter": slice(cut, cut + quarter),
             "last quarter": slice(-quarter, None)}  # fmt: skip
    return {"bits": {name: {part: round(float(own[where].mean()), 5) for part, where in parts.items()}
                     for name, own in found.items()}}  # fmt: skip


# What was found


def table(rows: list[Row]) -> str:
    return "\n".join([*_genome_table(rows), "", *_class_table(rows), ""])


def _genome_table(rows: list[Row]) -> Iterator[str]:
    yield table_row(
        "bits per base", "memory", "trained part", "held out", "its first quarter", "its last quarter"
    )
    yield table_rule(6)
    for row in rows:
        if row["what"]["kind"] == "genome":
            for name, own in row["bits"].items():
                run = TITLES.get(row["what"]["run"], f"Markov, {name}")
                mode = name if run in TITLES.values() and run != TITLES["window"] else ""
                yield table_row(run, mode, *(f"{value:.4f}" for value in own.values()))


def _class_table(rows: list[Row]) -> Iterator[str]:
    """Of all seeds: the mean and the deviation of MCC, and the accuracy of all their answers with its interval."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        what = row["what"]
        if what["kind"] == "classes":
            found.setdefault((what["task"], named(what), what["begin"]), []).append(row)
    yield table_row("task", "model", "begun from", "seeds", "MCC, test", "both strands", "memory off", "frozen",
                    "accuracy, test", "MCC, dev", *BESIDE)  # fmt: skip
    yield table_rule(12)
    for (task, run, begin), own in sorted(found.items()):
        cells = [_mcc(own, kind) for kind in ("on", "on both", "off", "frozen")]
        right = sum(int(np.trace(np.array(row["test"]["on"]["confusion"]))) for row in own)
        count = sum(int(np.sum(row["test"]["on"]["confusion"])) for row in own)
        low, high = wilson(right, count)
        accuracy = f"{right / count:.1%} ({low:.1%}-{high:.1%})"
        beside = PUBLISHED.get(task, {})
        published = [f"{beside[name]:.2f}" if name in beside else "not comparable" for name in BESIDE]
        dev = f"{100 * statistics.fmean(row['dev'] for row in own):.1f}"
        yield table_row(task, run, begin, len(own), *cells, accuracy, dev, *published)


def named(what: Row) -> str:
    """An architecture, and how it was fine-tuned if not as the others."""
    other = [", trained on one strand"] * (what["strands"] == 1)
    other += [f", bases count {what['weight']:g}"] * (what["weight"] > 0)
    return TITLES[what["run"]] + "".join(other)


def _mcc(rows: list[Row], kind: str) -> str:
    values = [100 * row["test"][kind]["mcc"] for row in rows if kind in row["test"]]
    if not values:
        return ""
    return f"{statistics.fmean(values):.1f}" + (
        f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    )


def plot(rows: list[Row], path: Path) -> None:
    """Bits per base over the genome, and MCC by task: what there is of the two."""
    from matplotlib.figure import Figure

    drawn = {"genome": _plot_genome, "classes": _plot_classes}
    found = {kind: own for kind in drawn if (own := [row for row in rows if row["what"]["kind"] == kind])}
    figure = Figure(figsize=(9, 4 * max(1, len(found))), layout="constrained")
    for axis, (kind, own) in zip(
        np.atleast_1d(figure.subplots(max(1, len(found)))), found.items(), strict=False
    ):
        drawn[kind](axis, own)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=130)


def _plot_genome(axis: Any, rows: list[Row]) -> None:
    """Curves, smoothed over a sixtieth of the genome."""
    for row in rows:
        run, every = row["what"]["run"], row["what"]["every"]
        for name, curve in row["curves"].items():
            if run == "markov" and name not in ("order 4", "orders mixed"):
                continue
            wide = max(1, len(curve) // 60)
            means = np.convolve(curve[:-1] or curve, np.ones(wide) / wide, "valid")
            label = f"Markov, {name}" if run == "markov" else f"{TITLES[run]}, memory {name}"
            label = TITLES[run] if run == "window" else label
            places = (np.arange(len(means)) + wide / 2) * every / 1e6
            axis.plot(places, means, label=label, linewidth=1.2, linestyle=":" if run == "markov" else "-")
    axis.axvline(SHARE * len(curve) * every / 1e6, color="#888888", linewidth=0.8)
    axis.set(xlabel="million bases read before (trained on those left of the line)", ylabel="bits per base")


def _plot_classes(axis: Any, rows: list[Row]) -> None:
    found: dict[str, dict[str, list[float]]] = {}
    for what, row in ((row["what"], row) for row in rows):
        if named(what) == TITLES[what["run"]]:
            name = f"{TITLES[what['run']]}, from {what['begin']}"
            found.setdefault(name, {}).setdefault(what["task"], []).append(100 * row["test"]["on"]["mcc"])
    tasks = sorted({task for own in found.values() for task in own})
    for index, (name, own) in enumerate(sorted(found.items())):
        places = [tasks.index(task) + 0.12 * (index - len(found) / 2) for task in own]
        axis.errorbar(
            places, [statistics.fmean(values) for values in own.values()],
            [statistics.stdev(values) if len(values) > 1 else 0 for values in own.values()], fmt="o", label=name,
        )  # fmt: skip
    for name, mark in zip(BESIDE, "_x", strict=True):
        right = 0.12 * len(found) / 2
        known = [(tasks.index(task) + right, own[name]) for task, own in PUBLISHED.items() if task in tasks]
        if known:
            axis.plot(
                *zip(*known, strict=True), mark, color="#555555", markersize=9, label=f"{name} (published)"
            )
    axis.set_xticks(range(len(tasks)), [task.replace("_", "\n", 1) for task in tasks], fontsize=8)
    axis.set(ylabel="MCC x 100 on the test set, one strand")


# The command


def work_of(args: argparse.Namespace) -> list[Row]:
    """Everything to run, the most important first."""
    tasks = list(tasks_of(args.data, args.work))
    gue = [task for task in tasks if task in PUBLISHED] or tasks
    reading = {"kind": "genome", "every": args.every, "steps": args.pretrain_steps, "changes": args.changes}
    reading |= {"most": args.most}
    tuning = {"kind": "classes", "epochs": args.epochs, "lr": args.lr, "weight": 0.0, "strands": 2, "steps": args.steps,
              "pretrained": args.pretrain_steps, "changes": args.changes}  # fmt: skip
    jobs = [{**reading, "run": run, "mode": "on"} for run in args.runs]
    for seed in args.seeds:
        jobs += [
            {**tuning, "task": task, "run": run, "begin": begin, "seed": seed}
            for begin in ("scratch", "genome") for task in gue for run in args.runs
        ]  # fmt: skip
        if seed == args.seeds[0]:
            jobs += [
                {**reading, "run": run, "mode": mode} for run in args.runs if run != "window" for mode in MODES[1:]
            ]  # fmt: skip
    jobs.insert(len(args.runs) + 2, {**reading, "run": "markov", "mode": None})
    jobs += [
        {**tuning, "task": task, "run": run, "begin": begin, "seed": seed}
        for seed in args.seeds for task in tasks if task not in gue
        for begin in ("genome", "scratch") for run in args.runs
    ]  # fmt: skip
    others = [{"strands": 1}, {"weight": 0.1}]  # what these two choices are worth, for the first architecture
    jobs += [
        {**tuning, "task": task, "run": args.runs[0], "begin": "genome", "seed": seed, **other}
        for seed in args.seeds for other in others for task in gue
    ]  # fmt: skip
    return [job for job in jobs if job["kind"] in args.kinds]


def ready(what: Row, args: argparse.Namespace) -> bool:
    """Whether the model that a run begins from is there, or is this run's own to make."""
    first = what["kind"] == "genome" and what["mode"] in ("on", None)
    needs = what["kind"] == "genome" or what["begin"] == "genome"
    return first or not needs or (args.work / f"genome-{what['run']}" / "took.json").is_file()


def work(args: argparse.Namespace, rows: Rows) -> None:
    """Take runs that nobody has taken, until there is none."""
    device, began = torch.device("cuda" if torch.cuda.is_available() else "cpu"), time.monotonic()
    failed = 0
    waiting = [(number, what) for number, what in enumerate(work_of(args)) if not rows.has(what)]
    while waiting and time.monotonic() - began < args.seconds:
        alone = args.worker is None
        # What begins from a model that could not be made never will.
        waiting = [each for each in waiting if not (args.work / f"failed-{each[1]['run']}").exists()]
        number, what = next((each for each in waiting if alone or ready(each[1], args)), (-1, {}))
        if not what:
            time.sleep(0.5)
            continue
        waiting.remove((number, what))
        try:
            os.close(os.open(args.work / f"taken-{number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        start = time.monotonic()
        try:
            if what["kind"] == "classes" and what["begin"] == "genome":
                pretrained(what["run"], args)  # there already, where workers share the list
            found = genome(what, args, device) if what["kind"] == "genome" else classes(what, args)
        except Exception:  # the other runs go on
            traceback.print_exc()
            failed += 1
            if not (args.work / f"genome-{what['run']}" / "took.json").exists() and what["kind"] == "genome":
                (args.work / f"failed-{what['run']}").touch()
            continue
        rows.add({"what": what, **machine(device), **found})
        told = found.get("bits") or {kind: round(own["mcc"], 3) for kind, own in found["test"].items()}
        names = " ".join(
            str(what[key]) for key in ("task", "run", "begin", "mode", "seed") if what.get(key) is not None
        )
        print(f"{names}: {told}   {time.monotonic() - start:.0f} s", flush=True)
    if failed:
        sys.exit(f"{failed} runs failed")


def fan_out(args: argparse.Namespace) -> None:
    """Workers that share the list of runs; then their rows together."""
    parts = [args.work / f"rows-{index}.json" for index in range(args.jobs)]
    done = [args.out] if args.out.exists() else []
    command = [sys.executable, "-m", __spec__.name, *sys.argv[1:]]
    workers = [subprocess.Popen([*command, "--worker", str(part)]) for part in parts]
    codes = [worker.wait() for worker in workers]
    Rows(args.out, args.commit, [*done, *(part for part in parts if part.exists())]).save()
    if any(codes):
        sys.exit(f"exit codes of the workers: {codes}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="a folder with a genome, GUE's tasks and tables")
    parser.add_argument("--kinds", nargs="+", default=["genome", "classes"], choices=["genome", "classes"])
    parser.add_argument("--runs", nargs="+", default=["lmm", "window"], choices=list(RUNS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--pretrain-steps", type=int, default=2000)
    parser.add_argument(
        "--epochs", type=float, default=4, help="of fine-tuning; 2.5 times as many on small sets"
    )
    parser.add_argument("--steps", type=int, help="of fine-tuning, instead of epochs")
    parser.add_argument("--lr", type=float, default=1e-3, help="of fine-tuning")
    parser.add_argument(
        "--changes", nargs="*", default=[], help="to the recipes: model.num_layers=2 model.dim=128"
    )
    parser.add_argument("--every", type=int, default=10_000, help="bases of a point of the curve")
    parser.add_argument("--most", type=int, help="bases of the genome, from its beginning")
    parser.add_argument("--piece", type=int, default=16384, help="bases read in one call")
    parser.add_argument("--samples", type=int, help="sequences of dev and test")
    parser.add_argument("--jobs", type=int, default=1, help="workers that share the device")
    parser.add_argument("--work", type=Path, default=Path("out/dna"), help="folder for models")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    add_arguments(parser, "dna.json")
    if "--tiny" in sys.argv:
        parser.set_defaults(**TINY)
    args = parser.parse_args()
    rows = Rows(args.out, args.commit, args.merge or ())
    if rows.shown(args, table, plot):
        return
    if args.worker is not None:
        own = Rows(args.worker, args.commit, [args.out] if args.out.exists() else [])
        work(args, own)
        return
    prepare(args.data, args.work, args.most)
    for note in (*args.work.glob("taken-*"), *args.work.glob("failed-*")):
        note.unlink()
    left = sorted(args.work.glob("rows-*.json"))  # of workers that were interrupted
    if left:
        rows = Rows(args.out, args.commit, left)
        rows.save()
    if args.jobs > 1:
        fan_out(args)
    else:
        work(args, rows)


if __name__ == "__main__":
    main()
