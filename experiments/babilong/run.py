"""BABILong by fine-tuning from nothing: byte models of equal parameters learn bAbI's stories, from short texts to long.

    python -m experiments.babilong.run BABI BOOKS --runs window window,lmm --work out/babilong --out babilong.json
    python -m experiments.babilong.run --merge a.json b.json --out babilong.json --plot babilong.png

BABI is bAbI's archive or folder (tasks_1-20_v1-2), BOOKS a folder of ``*.txt.xz`` with an ``index.json`` that names
each book's split. A run is a pattern of blocks. All runs have equal parameters and read the same batches: stories of
the split train (the ten thousand of en-10k where there are so many) in books of the split train. Then questions of the
split test are asked in books of the split test, with the memory on, and in each mode of --controls up to
--control-longest tokens; of a length
that has no room for some stories, the others are asked. What is in the file already is not run again, and a model that
--work holds is not trained again, so that the same command goes on after an interruption.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from experiments.shared import command_line
from remanence import ModelConfig
from remanence.evaluate import TASKS, Subject, configured, evaluate, published
from remanence.evaluate.plots import curves
from remanence.evaluate.run import commit, hardware
from remanence.evaluate.task import wilson
from remanence.io.files import write_json
from remanence.model import matched, parameters
from remanence.runtime.overrides import format_length, parse_length
from remanence.tasks.babilong import ALL, PROMPT, find_file, read_stories
from remanence.tokenizers.tokens import ByteTokenizer
from remanence.train import DataConfig, OptimizerConfig, TrainConfig, fit
from remanence.train.config import PLAIN

Row = dict[str, Any]
TRAINING = ("tasks", "dim", "depth", "window", "tokens", "curriculum", "steps", "lr", "memory", "write_cost")
"""The arguments that a trained model depends on, beside its pattern and seed."""
CHANCE = {"qa1": 6, "qa2": 6, "qa3": 6, "qa4": 6, "qa5": 7}
"""The number of answers of each task, all about as frequent."""


PUBLISHED_LENGTHS = (2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072, 524_288, 1_048_576, 10_485_760)
PUBLISHED = {
    name: list(zip(PUBLISHED_LENGTHS, cells, strict=True))
    for name, cells in {
        "ARMT": (98, 98, 98, 98, 98, 98, 97, 95, 93, 77),
        "GPT2 + MAC + MAL": (99, 99, 98, 97, 98, 96, 96, 95, 94, 79),
    }.items()
}
"""After fine-tuning, lengths in tokens and accuracies in percent (Titans, NeurIPS 2025, appendix G.1). ARMT, with 137M
parameters, is Rodkin et al.'s (2024).
"""


def prepare(args: argparse.Namespace) -> dict[str, str]:
    """Folders with the stories, and with the books of each split, made once for all runs in the folder of work."""
    made = args.work / "data"
    if not made.is_dir():
        building = args.work / f"data-{os.getpid()}"
        source = Path(args.babi)
        for name in ("babi", "train", "test"):
            (building / name).mkdir(parents=True)
        if source.is_file():
            with tarfile.open(source) as archive:
                archive.extractall(building / "all", filter="data")
            source = building / "all"
        large = next(source.rglob("en-10k"), source)
        for task in ALL:
            for split, first in (("train", large), ("test", source)):
                text = find_file("babi", first, task, split) or find_file("babi", source, task, split)
                if text is not None:
                    (building / "babi" / f"{task}_{split}.txt").write_text(text)
        for book in json.loads((Path(args.books) / "index.json").read_text()):
            if book["split"] in ("train", "test"):
                shutil.copy(Path(args.books) / book["file"], building / book["split"])
        with suppress(OSError):  # another process has been faster
            building.rename(made)
        shutil.rmtree(building, ignore_errors=True)
    return {name: str(made / name) for name in ("babi", "train", "test")}


def config_of(name: str, seed: int, args: argparse.Namespace, data: dict[str, str]) -> TrainConfig:
    shape: Row = {
        "vocab_size": 272,
        "dim": args.dim,
        "num_layers": args.depth,
        "heads": max(1, args.dim // 64),
    }
    shape |= {"window": args.window, "segment": args.window, "persistent": 0, "memory": args.memory}
    shape["ffn"] = (
        4 * args.dim
    )  # a Transformer's; with its parameters MAC and MAG keep more than a tenth of it
    base = ModelConfig(pattern=tuple(name.split(",")), **shape)
    on_gpu = torch.cuda.is_available()
    return TrainConfig(
        model=matched(base),
        data=DataConfig(
            kind="babilong",
            path=data["babi"],
            books=data["train"],
            tasks=tuple(args.tasks),
            length=args.tokens,
            curriculum=tuple(args.curriculum),
        ),
        optimizer=OptimizerConfig(lr=args.lr, warmup=min(100, args.steps // 10), schedule="wsd"),
        steps=args.steps,
        write_cost=0.0 if set(base.blocks) <= PLAIN or not base.memory.threshold else args.write_cost,
        batch=1,
        precision="bfloat16" if on_gpu else "float32",
        seed=seed,
        save_every=args.steps,
        log_every=max(1, args.steps // 40),
        device="cuda" if on_gpu else "cpu",
    )


def train(name: str, seed: int, args: argparse.Namespace, data: dict[str, str], about: Row) -> Iterator[Row]:
    """A model in the folder of work, trained if it is not there yet."""
    config, out = config_of(name, seed, args, data), folder(args, about)
    if (out / "model").is_dir():
        return
    began, curve = time.time(), []

    def log(line: Row) -> None:
        curve.append([line["step"], round(line["loss"], 4)])
        shown = {key: line.get(key) for key in ("step", "loss", "gradient", "tokens_per_s", "memory_gib")}
        print(name, json.dumps(shown), flush=True)

    fit(
        None if (out / "config.json").is_file() else config,
        out,
        resume=(out / "config.json").is_file(),
        log=log,
    )
    yield {
        **about,
        "kind": "train",
        "parameters": parameters(config.model),
        "tokens": args.steps * args.tokens,
        "seconds": round(time.time() - began, 1),
        "loss": curve[-1][1],
        "curve": curve,
    }


def measure(
    args: argparse.Namespace, data: dict[str, str], about: Row, done: set[str], left: Callable[[], bool]
) -> Iterator[Row]:
    """A row for every length and mode of the memory."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    subject = Subject.load(folder(args, about) / "model", device, seed=about["seed"])
    common = {"data": data["babi"], "books": data["test"], "batch": str(args.batch)}
    common |= {"indices": args.indices} if args.indices else {}
    sizes = {qa: story_sizes(data["babi"], qa, args.indices) for qa in args.tasks}
    for length in args.lengths:
        controls = args.controls if subject.model.has_memory and length <= args.control_longest else ()
        for mode in ("on", *controls):
            count = args.samples if length <= args.near else args.far_samples
            row = {**about, "kind": "eval", "length": length, "memory": mode, "samples": count}
            row["stories"] = Path(args.indices).name if args.indices else "drawn with the seed"
            if key(row) in done or not left():
                continue
            began, found = time.time(), []
            for qa in args.tasks:
                room = length - len(PROMPT)
                few = count if not length else min(count, sum(size <= room for size in sizes[qa]))
                if few:
                    given = {**common, "tasks": qa, "lengths": str(length), "samples": str(few)}
                    task = TASKS["babilong"](subject, configured(TASKS["babilong"], given))
                    found += evaluate(subject, [task], (mode,))
            yield {
                **row,
                **{
                    metric: {
                        r.setting["qa"]: round(r.value * r.count)
                        for r in found
                        if r.metric == metric and r.count and r.setting["qa"] != "mean"
                    }
                    for metric in ("right", "chosen")
                },
                "count": {r.setting["qa"]: r.count for r in found if r.setting["qa"] != "mean"},
                "tokens": length
                * sum(r.count or 0 for r in found)
                // 4,  # each counted in two metrics and their means
                "seconds": round(time.time() - began, 1),
            }


def story_sizes(babi: str, qa: str, indices: str | None) -> list[int]:
    """The bytes of every story that may be asked."""
    stories = read_stories("babi", babi, qa, "test")
    if indices:
        stories = [stories[index] for index in json.loads(Path(indices).read_text())[qa]]
    return [story.size(ByteTokenizer().encode) for story in stories]


def folder(args: argparse.Namespace, about: Row) -> Path:
    """Of a run, by all that its model depends on."""
    digest = hashlib.sha256(json.dumps(about["settings"], sort_keys=True).encode()).hexdigest()[:8]
    return args.work / f"{about['run'].replace(',', '-')}-{about['seed']}-{digest}"


def key(row: Row) -> str:
    """What a row is of: no result and nothing of where it was measured."""
    told = ("kind", "run", "seed", "settings", "length", "memory", "samples")
    return json.dumps({name: row.get(name) for name in told}, sort_keys=True)


def table(rows: list[Row]) -> str:
    """Right answers in per cent with 95 % intervals, the mean over tasks and each task, beside what was published."""
    found = sorted((row for row in rows if row["kind"] == "eval"), key=lambda row: row["length"])
    if not found:
        return ""
    lengths = sorted({row["length"] for row in found})
    head = ["model", "task", *map(format_length, lengths)]
    lines = [head, ["---"] * len(head)]
    for qa in [*dict.fromkeys(qa for row in found for qa in row["count"]), "mean"]:
        for run, seed, mode in dict.fromkeys((run_title(row), row["seed"], row["memory"]) for row in found):
            mine = {
                r["length"]: r for r in found if (run_title(r), r["seed"], r["memory"]) == (run, seed, mode)
            }
            if not any(r["count"].get(qa) for r in mine.values()) and qa != "mean":
                continue
            cells = [cell(mine.get(length, {"count": {}}), qa) for length in lengths]
            lines.append([f"{run}, {mode}, seed {seed}", qa, *cells])
    for name, points in {**published.figure6("fine-tuned"), **PUBLISHED}.items():
        at = dict(points)
        lines.append([f"{name} (published)", "mean", *[f"{at[n]:.0f}" if n in at else "" for n in lengths]])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def run_title(row: Row) -> str:
    """A run by its blocks, each once, and the tasks that it was trained on."""
    tasks = row["settings"]["tasks"]
    told = tasks[0] if len(tasks) == 1 else f"{tasks[0]} to {tasks[-1]}"
    return f"{'+'.join(dict.fromkeys(row['run'].split(',')))} on {told}"


def mean(row: Row) -> float:
    """The mean over the tasks of their shares of right answers."""
    shares = [row["right"][qa] / count for qa, count in row["count"].items()]
    return sum(shares) / len(shares)


def cell(row: Row, qa: str) -> str:
    count = sum(row["count"].values()) if qa == "mean" else row["count"].get(qa, 0)
    if not count:
        return ""
    right = count * mean(row) if qa == "mean" else row["right"][qa]
    low, high = wilson(right, count)
    return f"{100 * right / count:.0f} ({100 * low:.0f}-{100 * high:.0f})"


def plot(rows: list[Row], path: Path) -> None:
    """The mean over tasks by length: a line for every run and mode, the mean over seeds."""
    found = [row for row in rows if row["kind"] == "eval"]
    lengths = sorted({*[row["length"] for row in found], *PUBLISHED_LENGTHS} - {0, 10_485_760})
    none = lengths[0] / 2
    lines = {}
    for run, mode in dict.fromkeys((run_title(row), row["memory"]) for row in found):
        points = []
        for length in sorted({row["length"] for row in found}):
            mine = [r for r in found if (run_title(r), r["memory"], r["length"]) == (run, mode, length)]
            if mine:
                points.append((length or none, 100 * sum(map(mean, mine)) / len(mine)))
        lines[f"{run}, {mode}"] = points
    chance = 100 * sum(1 / n for n in CHANCE.values()) / len(CHANCE)
    lines["guessing"] = [(none, chance), (lengths[-1], chance)]
    shown = {name: own for name, own in published.figure6("fine-tuned").items() if name.endswith("-FT")}
    shown = {
        name: [point for point in own if point[0] <= lengths[-1]]
        for name, own in {**shown, "ARMT": PUBLISHED["ARMT"]}.items()
    }
    ticks = {none: "0"} | {float(length): format_length(length) for length in lengths}
    title = "BABILong, mean of the tasks, after fine-tuning"
    curves(
        path, lines, title=title, x="tokens", y="right answers, %", published=shown, percent=True, ticks=ticks
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("babi", nargs="?")
    parser.add_argument("books", nargs="?")
    parser.add_argument("--runs", nargs="+", default=["window", "window,lmm"], help="patterns, as window,lmm")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--tasks", nargs="+", default=["qa1", "qa2", "qa3", "qa4", "qa5"])
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--window", type=int, default=256, help="tokens; MAC's segments have as many")
    parser.add_argument("--tokens", type=parse_length, default=65536, help="of a step")
    parser.add_argument(
        "--curriculum",
        nargs="+",
        type=parse_length,
        default=[0, 0, 256, 1024, 1024, 1024, 4096, 4096, 16384, 16384],
        help="lengths of texts and rows, each for an equal part of the steps",
    )
    # A start that hardly forgets: what is to be kept for 16K tokens must not fade within hundreds.
    parser.add_argument(
        "--memory", type=json.loads, default={"forget_bias": -10.0, "threshold": 0.01}, help="fields, as JSON"
    )
    parser.add_argument("--write-cost", type=float, default=0.03, help="where gates have a threshold")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=parse_length,
        default=[0, *[1024 * 2**n for n in range(11)]],
        help="that are asked; default: 0 and 1K to 1M",
    )
    parser.add_argument("--samples", type=int, default=100, help="of every task up to --near tokens")
    parser.add_argument("--near", type=parse_length, default=131072)
    parser.add_argument("--far-samples", type=int, default=20, help="of every task beyond")
    parser.add_argument(
        "--controls",
        nargs="*",
        default=["frozen"],
        choices=["frozen", "fresh", "off"],
        help="other memory modes",
    )
    parser.add_argument(
        "--control-longest", type=parse_length, default=16384, help="longest text for the other memory modes"
    )
    parser.add_argument("--indices", help="BABILong's choice of test stories, test_100_idxs.json")
    parser.add_argument("--batch", type=int, default=100, help="texts that are read side by side")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing more after so long")
    parser.add_argument("--work", type=Path, default=Path("out/babilong"), help="folder for data and models")
    parser.add_argument("--out", type=Path, default=Path("babilong.json"))
    parser.add_argument("--commit", help="of this code, where there is no .git")
    parser.add_argument("--merge", nargs="+", type=Path, help="write the rows of several files to --out")
    parser.add_argument("--table", action="store_true", help="print what --out holds, and run nothing")
    parser.add_argument("--plot", type=Path, help="draw what --out holds, and run nothing")
    args = parser.parse_args()
    here = Path(__file__).resolve().parent
    kept: Row = {"command": command_line(), "commit": args.commit or commit(here), "rows": []}
    for path in args.merge or ([args.out] if args.out.exists() else []):
        kept["rows"] += json.loads(path.read_text())["rows"]
    kept["rows"] = list({key(row): row for row in kept["rows"]}.values())
    if args.merge:
        write_json(args.out, kept)
    if args.plot:
        plot(kept["rows"], args.plot)
    if args.merge or args.plot or args.table:
        print(table(kept["rows"]))
        return
    if args.babi is None or args.books is None:
        parser.error("expected BABI and BOOKS")
    torch.set_float32_matmul_precision("high")
    began = time.time()
    args.work.mkdir(parents=True, exist_ok=True)
    data = prepare(args)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    origin = {"hardware": hardware(device), "torch": torch.__version__, "commit": kept["commit"]}

    def left() -> bool:
        return time.time() - began <= args.seconds

    for seed in args.seeds:
        for name in args.runs:
            if not left():
                continue
            about = {
                "run": name,
                "seed": seed,
                "settings": {each: getattr(args, each) for each in TRAINING},
                **origin,
            }
            done = {key(row) for row in kept["rows"]}
            for rows in (
                train(name, seed, args, data, about),
                measure(args, data, about, done, left),
            ):
                for row in rows:
                    kept["rows"].append(row)
                    write_json(args.out, kept)
                    print(
                        json.dumps({k: v for k, v in row.items() if k not in ("curve", "settings")}),
                        flush=True,
                    )
    print(table(kept["rows"]))


if __name__ == "__main__":
    main()
