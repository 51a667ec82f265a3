"""Titans' Table 3 on this machine: forecasts by the field's protocol, with and without the memory, DLinear beside them.

python -m experiments.forecast.run FOLDER --jobs 12 --out forecast.json
python -m experiments.forecast.run FOLDER --out forecast.json --table
python -m experiments.forecast.run FOLDER --out forecast.json --plot forecast.png

FOLDER holds ETTh1.csv and so on, or archives with them (ETT-small.zip, weather.zip), which are read where they lie. A
run trains one network by its recipe (remanence/forecast/recipes) and measures it on all windows of the test part:

- dlinear: the baseline, to see that the protocol is the published one;
- memory: the recipe as it is; measured with its memory on, off and frozen;
- cycle: the same with a learned season of a day in front and behind;
- off: the same network trained without its memory;
- attention: full attention instead of the memory, with as many parameters;
- online: memory, trained on streams of eight look-backs, then read along the test part: rolling errors with the memory
  written on, frozen where the test begins, begun anew at every look-back, or off; as it is, and with a shift in the
  middle of the test part. With the first horizon alone.

Runs are started in the order of seeds, so that what is stopped early has every cell of the table.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from experiments.forecast.tables import MODES, plot, table
from experiments.shared import Rows, add_arguments, machine
from remanence.config import change
from remanence.forecast.network import Network
from remanence.forecast.online import SHIFTS, roll
from remanence.forecast.protocol import HORIZONS, compute_errors
from remanence.forecast.series import Series, read_series
from remanence.forecast.task import WindowSource
from remanence.model import matched, parameters
from remanence.recipes import load_recipe
from remanence.runtime.device import resolve
from remanence.train import Run, TrainConfig

Row = dict[str, Any]
DATASETS = ("ETTh1", "ETTh2", "ETTm1", "ETTm2", "weather", "electricity", "traffic")
RUNS = ("memory", "dlinear", "off", "cycle", "attention", "online")
DAYS = {"ETTm1": 96, "ETTm2": 96, "weather": 144}
"""Rows of a day, where they are not hours."""
HISTORY = 7
"""Look-backs before its own that an online run's memory has read in training."""
TINY = {"datasets": ["ETTh1"], "horizons": [24], "seeds": [0], "steps": 3, "rows": 1200, "jobs": 1}
TINY |= {"warm": 2, "phases": 2}


@cache
def series_of(folder: Path, name: str, rows: int | None) -> Series | None:
    """A data set of a folder, wherever in it the file lies; None if it is not there."""
    places = [folder / f"{name}.csv{end}" for end in ("", ".gz", ".xz")]
    places = [place for place in places if place.is_file()]
    for archive in sorted(folder.rglob("*.zip")):
        try:
            found = read_series(archive / f"{name}.csv")
        except ValueError:
            continue
        return found if rows is None else found.head(rows)
    if not places:
        return None
    found = read_series(places[0])
    return found if rows is None else found.head(rows)


def config_of(run: str, what: Row, device: str) -> TrainConfig:
    """A data set's recipe, with what a run changes in it."""
    config = load_recipe(f"forecast/{what['dataset'].lower()}")
    steps = (
        {}
        if what["steps"] is None
        else {"steps": what["steps"], "validate_every": max(1, what["steps"] // 2)}
    )
    split = what["split"] or config.data.split
    data = replace(config.data, horizon=what["horizon"], length=what["lookback"], split=split)
    quiet = {"save_every": 10**9, "log_every": 10**9}
    config = replace(config, data=data, seed=what["seed"], device=device, **quiet, **steps)
    if run == "dlinear":
        own = {
            "batch": 32,
            "steps": what["steps"] or 2400,
            "validate_every": max(1, (what["steps"] or 2400) // 12),
        }
        return replace(
            config,
            forecast=replace(config.forecast, network="dlinear", loss="mse", cycle=0),
            optimizer=replace(config.optimizer, lr=2e-3, weight_decay=0.0),
            **own,
        )
    if run == "cycle":
        return replace(config, forecast=replace(config.forecast, cycle=DAYS.get(what["dataset"], 24)))
    if run == "attention":
        plain = change(config.model, {"pattern": ("attention",)})
        return replace(config, model=matched(plain, parameters(config.model)))
    if run == "online":
        return replace(
            config, forecast=replace(config.forecast, history=HISTORY), batch=max(1, config.batch // 4)
        )
    return config


def trained(config: TrainConfig, series: Series, off: bool) -> tuple[Network, WindowSource, Row]:
    """The best network of a run by the package's own engine, in a folder that is thrown away."""
    start = time.monotonic()
    source = WindowSource(config, config.batch, series)
    folder = Path(tempfile.mkdtemp(prefix="forecast-"))
    try:
        with Run.open(config, folder / "run", source=source) as run:
            if off:
                run.model.memory_mode = "off"
            while not run.done:
                run.step()
            run.validation.restore(run.model)
            network, best = run.model.eval(), run.validation.best
        facts = {
            "parameters": sum(parameter.numel() for parameter in network.parameters()),
            "steps": run.progress.step,
            "best_step": best[0],
            "validation": best[1],
            "training_seconds": round(time.monotonic() - start, 2),
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return network, source, facts


def measured(run: str, network: Network, source: WindowSource, args: argparse.Namespace) -> Row:
    """Errors over all windows of the test part, in each mode; of an online run, along the stream as well."""
    shape, device = source.shape, network.device
    windows = source.protocol.windows("test", shape.lookback, shape.horizon).to(device)
    errors = {}
    for mode in ("on", "off", "frozen") if run in ("memory", "online") else ("on",):
        if run != "off":
            network.memory_mode = mode
        errors[mode] = compute_errors(network, windows, size=512)._asdict()
    found: Row = {"errors": errors}
    if run == "online":
        network.memory_mode = "on"
        start, end = source.protocol.borders.val, source.protocol.borders.test
        middle = start + (end - start) // 2
        values = source.protocol.values.to(device)
        found["middle"], found["rolling"] = middle, {}
        for shift, change_of in SHIFTS.items():
            stream = change_of(values, middle)
            for mode in MODES:
                rolled = roll(network, stream, start, memory_mode=mode, warm=args.warm, phases=args.phases)
                part = {
                    "before": rolled.between(start, middle - shape.horizon + 1),
                    "after": rolled.between(middle, end),
                }
                order = rolled.origins.argsort()
                curve = rolled.mse[order][: len(order) // 24 * 24].view(-1, 24).mean(1)
                at = rolled.origins[order][: len(order) // 24 * 24].view(-1, 24).float().mean(1)
                part["curve"] = [
                    [round(float(x)), round(float(y), 5)] for x, y in zip(at, curve, strict=True)
                ]
                found["rolling"][f"{shift} {mode}"] = part
    return found


def asked(args: argparse.Namespace) -> list[Row]:
    """All runs, in the order they are started in."""
    shared = {"lookback": args.lookback, "steps": args.steps, "rows": args.rows, "split": args.split}
    return [
        {"run": run, "dataset": dataset, "horizon": horizon, "seed": seed, **shared}
        for seed in args.seeds
        for horizon in args.horizons
        for dataset in args.datasets
        for run in args.runs
        if run != "online" or horizon == args.horizons[0]
    ]


def work(args: argparse.Namespace) -> None:
    """Run what nobody has claimed yet, and add its rows."""
    rows, began = Rows(args.out, args.commit), time.monotonic()
    known = Rows(args.known, args.commit) if args.known else rows
    device = resolve(args.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    for number, what in enumerate(asked(args)):
        if time.monotonic() - began > args.seconds:
            break
        if rows.has(what) or known.has(what) or not claimed(args, number):
            continue
        series = series_of(args.folder, what["dataset"], args.rows)
        if series is None:
            continue
        start = time.monotonic()
        network, source, facts = trained(
            config_of(what["run"], what, device.type), series, what["run"] == "off"
        )
        found = measured(what["run"], network, source, args)
        took = round(time.monotonic() - start, 2)
        rows.add({"what": what, **machine(device), "seconds": took, **facts, **found})
        errors = found["errors"]["on"]
        print(
            f"{what['dataset']} {what['horizon']} {what['run']} seed {what['seed']}: mse {errors['mse']:.4f} "
            f"mae {errors['mae']:.4f}, best of {facts['steps']} steps at {facts['best_step']}, {took:.1f} s",
            flush=True,
        )


def claimed(args: argparse.Namespace, number: int) -> bool:
    """Whether this process is the one that does a run."""
    if args.claims is None:
        return True
    try:
        os.close(os.open(args.claims / str(number), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


OWN = ("folder", "jobs", "out", "known", "claims", "split", "tiny")
"""Arguments that processes are not given as they came."""


def fan_out(args: argparse.Namespace) -> None:
    """So many processes share the device; each takes the next run that is left, and writes rows of its own."""
    folder = args.out.with_name(f"{args.out.stem}.parts")
    folder.mkdir(parents=True, exist_ok=True)
    before = sorted(folder.glob("*.json"))
    if before:
        Rows(args.out, args.commit, before).save()
    claims = Path(tempfile.mkdtemp(dir=folder))
    given = [sys.executable, "-m", __spec__.name, str(args.folder)]
    for name, value in vars(args).items():
        if name not in OWN and value not in (None, False, []):
            values = [] if value is True else value if isinstance(value, list) else [value]
            given += [f"--{name}", *map(str, values)]
    parts = [folder / f"{number}.json" for number in range(args.jobs)]
    own = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    processes = [
        subprocess.Popen([*given, "--out", part, "--known", args.out, "--claims", claims], env=own)
        for part in parts
    ]
    codes = [process.wait() for process in processes]
    shutil.rmtree(claims, ignore_errors=True)
    Rows(args.out, args.commit, [part for part in parts if part.exists()]).save()
    if any(codes):
        print(f"processes ended with exit codes {codes}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="with the CSV files, or archives with them")
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS), choices=DATASETS)
    parser.add_argument("--horizons", nargs="+", type=int, default=list(HORIZONS))
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=RUNS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--lookback", type=int, default=96)
    parser.add_argument("--steps", type=int, help="of training; the recipe's")
    parser.add_argument("--rows", type=int, help="read no more of a file; split it 7/1/2")
    parser.add_argument(
        "--warm", type=int, default=16, help="look-backs read before a stream's first forecast"
    )
    parser.add_argument("--phases", type=int, default=12, help="streams side by side")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the device")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--known", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--claims", type=Path, help=argparse.SUPPRESS)
    add_arguments(parser, "forecast.json")
    if "--tiny" in sys.argv:
        parser.set_defaults(**TINY)
    args = parser.parse_args()
    args.split = "7/1/2" if args.rows else None
    if not args.folder.is_dir():
        parser.error(f"folder: expected a folder with CSV files or archives, got {args.folder}")
    rows = Rows(args.out, args.commit, args.merge or ())
    if rows.shown(args, table, plot):
        return
    if args.jobs > 1:
        fan_out(args)
    else:
        work(args)


if __name__ == "__main__":
    main()
