"""What a memory is for in a stream: a season longer than the look-back, which changes again and again.

python -m experiments.forecast.seasons --seeds 0 1 2 --out seasons.json
python -m experiments.forecast.seasons --out seasons.json --table
python -m experiments.forecast.seasons --out seasons.json --plot seasons.png

Every channel repeats a pattern of 96 rows that was drawn at random, ten times; then another one begins. A look-back has
24 rows, and so has the horizon: what comes next was last seen 96 rows ago, which only a memory can know. A network is
trained on streams of 12 look-backs of the first 7 of 10 parts, and read along the last 2, whose patterns it has never
seen: with its memory on, frozen where the test part begins, begun anew at every look-back, and off. "without" is a
network that was trained without its memory. Errors are by how many rows ago the pattern began; a variance is 1.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.shared import Rows, add_arguments, machine, table_row, table_rule
from remanence.config import change
from remanence.forecast.config import ForecastConfig
from remanence.forecast.network import Network
from remanence.forecast.online import roll
from remanence.forecast.recipes import forecasting
from remanence.forecast.series import Series
from remanence.forecast.task import WindowSource
from remanence.runtime.device import resolve
from remanence.train import OptimizerConfig, Run, TrainConfig

Row = dict[str, Any]
LOOKBACK, PERIOD, REPEATS, CHANNELS, WAVES = 24, 96, 10, 8, 6
RUNS = ("memory", "without")
MODES = ("on", "frozen", "fresh", "off")
TINY = {"steps": 2, "patterns": 12, "seeds": [0]}


def seasons(patterns: int, seed: int) -> Series:
    """So many patterns behind one another in every channel, each a sum of waves that fit into a period."""
    draw, t, k = np.random.default_rng(seed), np.arange(PERIOD), np.arange(1, WAVES + 1)[:, None, None]
    size, phase = draw.standard_normal((2, WAVES, CHANNELS * patterns, 1))
    drawn = (size * np.sin(2 * np.pi * (k * t / PERIOD + phase))).sum(0) * (2 / WAVES) ** 0.5
    rows = np.tile(drawn.reshape(CHANNELS, patterns, 1, PERIOD), (1, 1, REPEATS, 1))
    return Series(rows.reshape(CHANNELS, -1).T, tuple(map(str, range(CHANNELS))))


def config_of(steps: int, seed: int, device: str) -> TrainConfig:
    config = forecasting("7/1/2", lookback=LOOKBACK, horizon=LOOKBACK)
    memory = {"heads": 2, "chunk": 16, "induction": True}
    return replace(
        config,
        model=change(config.model, {"dim": 32, "num_layers": 2, "ffn": 64, "memory": {"dim": 32, **memory}}),
        forecast=ForecastConfig(patch=8, stride=8, history=11, dropout=0.0, loss="mse"),
        optimizer=OptimizerConfig(lr=3e-3, betas=(0.9, 0.99), warmup=20),
        steps=steps, batch=8, seed=seed, device=device, validate_every=0, stop_after=0,
        save_every=10**9, log_every=10**9,
    )  # fmt: skip


def trained(config: TrainConfig, series: Series, without: bool) -> tuple[Network, WindowSource]:
    source = WindowSource(config, config.batch, series)
    folder = Path(tempfile.mkdtemp(prefix="seasons-"))
    try:
        with Run.open(config, folder / "run", source=source) as run:
            if without:
                run.model.memory_mode = "off"
            while not run.done:
                run.step()
            return run.model.eval(), source
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measured(network: Network, source: WindowSource, modes: tuple[str, ...]) -> Row:
    """Mean squared errors by mode and by the periods since a pattern began, from the first pattern of the test part."""
    length = PERIOD * REPEATS
    start = -(-source.protocol.borders.val // length) * length
    values, found = source.protocol.values.to(network.device), {}
    for mode in modes:
        rolled = roll(network, values, start, memory_mode=mode, warm=16, phases=3)
        since = (rolled.origins - start) % length // (PERIOD // 4)
        found[mode] = [round(float(rolled.mse[since == part].mean()), 4) for part in range(4 * REPEATS)]
    return found


def table(rows: list[Row]) -> str:
    """Means over seeds, by rows since the pattern began."""
    shown = (0, 1, 2, 3, 4, 5, 6, 8, 16, 4 * REPEATS - 4)
    head = ["network", "memory in the test", *(f"from {part * PERIOD // 4}" for part in shown), "seeds"]
    lines = ["Mean squared errors of forecasts by the rows since the pattern began:", "", table_row(*head)]
    lines.append(table_rule(len(head)))
    for run in RUNS:
        own = [row["errors"] for row in rows if row["what"]["run"] == run]
        for mode in own[0] if own else ():
            cells = [f"{statistics.mean(each[mode][part] for each in own):.3f}" for part in shown]
            lines.append(table_row(run, mode if run == "memory" else "none", *cells, len(own)))
    return "\n".join(lines)


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from remanence.io.files import replacing

    figure, axis = plt.subplots(figsize=(8, 3.6), layout="constrained")
    colours = {"on": "#1b6ca8", "frozen": "#e07a1f", "fresh": "#3a8f5c", "off": "#8a8a8a"}
    for run, mode in (*(("memory", mode) for mode in MODES), ("without", "off")):
        own = [row["errors"][mode] for row in rows if row["what"]["run"] == run]
        if own:
            values = [statistics.mean(each[part] for each in own) for part in range(4 * REPEATS)]
            label = f"memory {mode}" if run == "memory" else "trained without a memory"
            colour = colours[mode] if run == "memory" else "#8a4f9e"
            axis.plot([PERIOD // 4 * part for part in range(len(values))], values, color=colour, label=label)
    axis.set(xlabel="rows since another pattern began", ylabel="mean squared error", xlim=(0, PERIOD * 5))
    axis.set_ylim(bottom=0)
    axis.set_title(f"A season of {PERIOD} rows, forecast from {LOOKBACK}", fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=8, loc="outside right upper")
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=RUNS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--patterns", type=int, default=40, help="of each channel, one behind the other")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    add_arguments(parser, "seasons.json")
    if "--tiny" in sys.argv:
        parser.set_defaults(**TINY)
    args = parser.parse_args()
    rows, began, device = (
        Rows(args.out, args.commit, args.merge or ()),
        time.monotonic(),
        resolve(args.device),
    )
    if rows.shown(args, table, plot):
        return
    for seed in args.seeds:
        for run in args.runs:
            what = {"run": run, "seed": seed, "steps": args.steps, "patterns": args.patterns}
            if rows.has(what) or time.monotonic() - began > args.seconds:
                continue
            start, config = time.monotonic(), config_of(args.steps, seed, device.type)
            network, source = trained(config, seasons(args.patterns, seed), run == "without")
            errors = measured(network, source, MODES if run == "memory" else ("off",))
            took = round(time.monotonic() - start, 1)
            rows.add({"what": what, **machine(device), "seconds": took, "errors": errors})
            told = ", ".join(f"{mode} {statistics.mean(values[8:]):.3f}" for mode, values in errors.items())
            print(f"{run} seed {seed}: after two periods {told}   {took:.0f} s", flush=True)


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    main()
