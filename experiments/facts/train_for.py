"""Train the recipe `facts` for a given time, several seeds at once on one device, and measure the models.

    python -m experiments.facts.train_for BOOKS --seeds 0 1 --train-seconds 400 --work out/broad --out out/results \
        --wikitext wikitext-2/test.txt.xz

BOOKS is a folder of ``*.txt.xz`` with an ``index.json`` that names each book's split. Every seed is a process. It
first measures how long a step takes, with the other seeds running, and computes the number of steps from it, and the
number of rows of a step: the most that leave MIN_STEPS. In the first half of the run, in which neither the learning
rate nor the write cost depends on the number of steps, the number is corrected once; later it is only reduced, if a run
has become slower.

--out gets the models in bfloat16 (``small-SEED.tar``), ``metrics.tar``, ``rows.json`` and ``table.md`` of
`experiments.facts.breadth`. With --part train or measure, only that part runs. --runs gives runs other names and
changes of the recipe: ``--runs wide:model.memory.head_dim=64``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from remanence.data import Batch, Tokens
from remanence.data.prepare import prepare
from remanence.io.files import write_json
from remanence.model import Model, parameters
from remanence.recipes.facts import recipe
from remanence.tasks.broad_facts import BroadFacts
from remanence.train import FactsData, Run, TrainConfig
from remanence.train.config import override
from remanence.train.export import export

MIN_STEPS = {64: 5000, 32: 3000, 16: 0}
"""The smallest number of steps for a number of rows."""
RAMP, FIXED_AT = 0.55, 0.4
"""The ramp of distances as a share of the steps, and the share of the time after which their number is corrected."""
MEASURED, WARM = 40, 12
"""The number of steps that are timed before a run, and of those before them, which compile and capture."""
CHECKED = 50
"""The number of steps after which a run looks whether it has become so slow that it needs fewer steps."""
SPARE = 12.0
"""Seconds that are kept for saving a model."""
TINY = ["model.dim=64", "model.num_layers=2", "model.heads=2", "model.ffn=64", "model.memory.head_dim=32",
        "data.length=512", "precision=float32", "optimizer.warmup=2"]  # fmt: skip
KEPT = "tokens", "targets", "begins", "weights"


class Parallel(BroadFacts):
    """The same batches as `BroadFacts`, with the rows drawn by several processes, each one step ahead."""

    def __init__(self, config: TrainConfig, workers: int) -> None:
        data = config.data
        assert isinstance(data, FactsData)
        about = (
            data.path, data.length, config.batch // workers, data.weight, data.distance_ramp, config.seed,
        )  # fmt: skip
        super().__init__(Tokens(str(data.path)), data.length, 1, data.weight, data.distance_ramp, config.seed)
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(workers):
            own, other = context.Pipe()
            process = context.Process(target=_serve, args=(other, about, rank, workers), daemon=True)
            process.start()
            self.pipes.append(own)
            self.processes.append(process)

    def step(self, number: int) -> Batch:
        for pipe in self.pipes:
            pipe.send(number)
        parts = [pipe.recv() for pipe in self.pipes]
        fields = {
            name: torch.cat([torch.from_numpy(part[index]) for part in parts])
            for index, name in enumerate(KEPT)
        }
        return Batch(fields["tokens"], fields["targets"], None, None, fields["begins"], fields["weights"])

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.close()
            process.join(2)
            if process.is_alive():
                process.terminate()


def _serve(pipe: Connection, about: tuple[Any, ...], rank: int, workers: int) -> None:
    """Send the rows of one process for every step that is asked for."""
    torch.set_num_threads(1)
    path, length, batch, weight, ramp, seed = about
    source = BroadFacts(Tokens(path), length, batch, weight, ramp, seed, rank, workers)
    ready: tuple[int, list[Any]] | None = None

    def rows(number: int) -> list[Any]:
        batch = source.step(number)
        return [getattr(batch, name).numpy() for name in KEPT]

    try:
        while True:
            number = pipe.recv()
            pipe.send(ready[1] if ready is not None and ready[0] == number else rows(number))
            ready = number + 1, rows(number + 1)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def prepared(books: Path, work: Path) -> Path:
    """The tokens of the training books, made once."""
    tokens = work / "tokens"
    if not (tokens / "prepare.json").is_file():
        index = json.loads((books / "index.json").read_text())
        prepare([books / book["file"] for book in index if book["split"] == "train"], tokens)
    return tokens


def config_of(args: argparse.Namespace, changes: Sequence[str], seed: int) -> TrainConfig:
    """The recipe with the changes of a run."""
    config = replace(recipe(), seed=seed, save_every=10**6)
    changes = [f"data.path={args.work / 'tokens'}", *(TINY if args.tiny else []), *changes]
    return override(config, dict(each.split("=", 1) for each in changes))


def synchronized() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic()


def step_seconds(config: TrainConfig, folder: Path, workers: int, steps: int, warm: int) -> float:
    """The mean time of a step, in a run that is thrown away."""
    shutil.rmtree(folder, ignore_errors=True)
    source = Parallel(config, workers)
    try:
        with Run.open(replace(config, steps=warm + steps), folder, source=source) as run:
            began = 0.0
            while not run.done:
                if run.progress.step == warm:
                    began = synchronized()
                run.step()
            took = synchronized() - began
    finally:
        source.close()
        shutil.rmtree(folder, ignore_errors=True)
    return took / steps


def planned(
    config: TrainConfig, args: argparse.Namespace, folder: Path, deadline: float
) -> tuple[TrainConfig, float]:
    """The config with the number of rows and steps that fit into the time, and the time of a step."""
    batches = (4, 2) if args.tiny else (32, 64, 16)
    seconds: dict[int, float] = {}
    steps, warm = (4, 3) if args.tiny else (MEASURED, WARM)
    for batch in batches:
        if batch == 16 and seconds and max(_steps(seconds[32], deadline), 0) >= MIN_STEPS[32]:
            break
        if batch == 64 and _steps(seconds[32], deadline) < MIN_STEPS[64]:  # 64 rows take longer still
            continue
        seconds[batch] = step_seconds(replace(config, batch=batch), folder, args.workers, steps, warm)
        print(f"{folder.name}: {batch} rows take {1e3 * seconds[batch]:.1f} ms", flush=True)
        if batch == 64 and _steps(seconds[64], deadline) >= MIN_STEPS[64]:
            break
    fits = [b for b in seconds if _steps(seconds[b], deadline) >= MIN_STEPS.get(b, 0)]
    batch = max(fits or [min(seconds)])
    count = max(20 if args.tiny else 200, _steps(seconds[batch], deadline))
    config = override(config, {"data.distance_ramp": str(round(RAMP * count))})
    return replace(config, batch=batch, steps=count), seconds[batch]


def _steps(seconds: float, deadline: float) -> int:
    return int(0.97 * (deadline - SPARE - time.monotonic()) / seconds)


def train(name: str, changes: Sequence[str], seed: int, args: argparse.Namespace) -> None:
    """Train one run until its deadline, and save its model."""
    deadline = time.monotonic() + args.train_seconds
    folder = args.work / f"{name}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    config, seconds = planned(
        config_of(args, changes, seed), args, args.work / f"{name}-{seed}.timing", deadline
    )
    print(
        f"{name}-{seed}: {config.steps} steps of {config.batch} rows, {parameters(config.model):,} parameters",
        flush=True,
    )
    began, corrected, late = time.monotonic(), False, False
    first = 3 if args.tiny else WARM
    source, warmed, shortened = Parallel(config, args.workers), began, 0
    marks: list[tuple[int, float]] = []
    try:
        with Run.open(config, folder, source=source) as run:
            while not run.done:
                run.step()
                step, now = run.progress.step, time.monotonic()
                if step == first:
                    warmed = now
                if step > 2 * first and not corrected and now - began > FIXED_AT * (deadline - SPARE - began):
                    corrected = True
                    count = step + int(0.97 * (deadline - SPARE - now) * (step - first) / (now - warmed))
                    if count >= 2 * step:  # else the write cost has begun
                        run.config = replace(run.config, steps=count)
                        write_json(folder / "config.json", run.config.to_dict())
                        print(f"{name}-{seed}: {count} steps", flush=True)
                if step % CHECKED == 0:
                    marks.append((step, now))
                    before, then = marks[max(0, len(marks) - 5)]
                    left = int((deadline - SPARE - now) * (step - before) / max(1e-9, now - then))
                    if corrected and step > before and step + left < 0.97 * run.config.steps:
                        run.config = replace(run.config, steps=max(step + 1, step + left))
                        shortened += 1
                if now > deadline - SPARE / 2 and not run.done:
                    late = True
                    run.config = replace(run.config, steps=step)
            write_json(folder / "config.json", run.config.to_dict())
            run.finish()
    finally:
        source.close()
    took = {
        "seconds": round(time.monotonic() - began), "steps": run.progress.step, "rows": config.batch, "late": late,
        "shortened": shortened,
        "step_milliseconds": round(1e3 * seconds, 1), "parameters": parameters(config.model),
        "config": run.config.to_dict(), "changes": list(changes),
    }  # fmt: skip
    write_json(folder / "took.json", took)
    print(f"{name}-{seed}: done {json.dumps({k: took[k] for k in ('seconds', 'steps', 'late')})}", flush=True)


def packed(folder: Path, out: Path, name: str) -> Path:
    """Export a run's model in bfloat16, for all libraries, and pack it. Returns the model's folder."""
    model = folder / "exported"
    shutil.rmtree(model, ignore_errors=True)
    export(folder, model)
    Model.load(model, dtype=torch.bfloat16).save(model)
    with tarfile.open(out / f"{name}.tar", "w") as archive:
        archive.add(model, name)
        archive.add(folder / "took.json", f"{name}/took.json")
    return model


def processes(commands: Sequence[list[str]]) -> None:
    """Run commands at once, and wait for all of them."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    running = [subprocess.Popen([sys.executable, "-m", *command], env=environment) for command in commands]
    for process in running:
        process.wait()


def measure(names: Sequence[str], args: argparse.Namespace) -> None:
    """Pack and measure the models of all runs, and the one in the package, and write the table."""
    models = {"before": "remanence-small"}
    for name in names:
        folder = args.work / name
        if (folder / "model" / "config.json").is_file():
            models[name] = str(packed(folder, args.out, f"small-{name}"))
        else:
            print(f"{name}: no model", flush=True)
    commands, rows = [], []
    for name, model in models.items():
        rows.append(args.work / f"{name}.rows.json")
        rows[-1].unlink(missing_ok=True)
        commands.append([
            "experiments.facts.breadth", str(args.books), "--model", model, "--name", name, "--out", str(rows[-1]),
            "--seconds", str(args.measure_seconds), "--wikitext", str(args.wikitext),
            *(["--tiny"] if args.tiny else []), *(["--commit", args.commit] if args.commit else []),
        ])  # fmt: skip
    processes(commands)
    with tarfile.open(args.out / "metrics.tar", "w") as archive:
        for name in names:
            for file in ("metrics.jsonl", "config.json", "took.json"):
                if (args.work / name / file).is_file():
                    archive.add(args.work / name / file, f"{name}/{file}")
    found = [str(path) for path in rows if path.is_file()]
    if found:
        command = ["experiments.facts.breadth", str(args.books), "--out", str(args.out / "rows.json")]
        table = [sys.executable, "-m", *command, "--merge", *found, "--table"]
        done = subprocess.run(table, capture_output=True, text=True, check=False)
        (args.out / "table.md").write_text(done.stdout)
        print(done.stdout or done.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("books", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--runs", nargs="+", default=["base"], help="NAME or NAME:CHANGE,CHANGE")
    parser.add_argument("--train-seconds", type=float, default=400)
    parser.add_argument(
        "--measure-seconds", type=float, default=120, help="start no part of the measurement after so long"
    )
    parser.add_argument("--workers", type=int, default=4, help="processes that draw the rows of a run")
    parser.add_argument("--work", type=Path, default=Path("out/broad"))
    parser.add_argument("--out", type=Path, default=Path("out/results"))
    parser.add_argument("--wikitext", type=Path, required=True)
    parser.add_argument("--commit")
    parser.add_argument("--part", choices=("all", "train", "measure", "one"), default="all")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    runs = [each.partition(":") for each in args.runs]
    if args.part == "one":
        torch.set_num_threads(1)
        (name, _, changes), (seed,) = runs[0], args.seeds
        train(name, [each for each in changes.split(",") if each], seed, args)
        return
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.part in ("all", "train"):
        prepared(args.books, args.work)
        processes([
            ["experiments.facts.train_for", str(args.books), "--part", "one", "--seeds", str(seed), "--runs", run,
             "--train-seconds", str(args.train_seconds), "--workers", str(args.workers), "--work", str(args.work),
             "--wikitext", str(args.wikitext), *(["--tiny"] if args.tiny else [])]
            for run in args.runs for seed in args.seeds
        ])  # fmt: skip
    if args.part in ("all", "measure"):
        measure([f"{name}-{seed}" for name, _, _ in runs for seed in args.seeds], args)


if __name__ == "__main__":
    main()
