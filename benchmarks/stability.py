"""Does training stay finite? Every variant, memories of several depths, for as many steps as asked; one table at the
end.

python benchmarks/stability.py --steps 50                                   # CPU, generated data
python benchmarks/stability.py --device cuda --steps 2000 --data out/books --precision bfloat16 --jobs 8

Each is a run of `remanence train`, in a folder of its own under --out: stopped (Ctrl-C, --minutes), it goes on when
started again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import time
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table

from remanence.config import ModelConfig
from remanence.train import DataConfig, OptimizerConfig, TrainConfig

VARIANTS = ("mac", "mag", "mal", "lmm")


def setting(
    variant: str,
    depth: int,
    precision: str,
    *,
    steps: int,
    length: int,
    data: str | None = None,
    device: str = "cpu",
    layers: int = 2,
) -> TrainConfig:
    """A small model with a memory of `depth` layers, long rows, and a learning rate on the high side."""
    model = ModelConfig(
        vocab_size=257,
        dim=64,
        num_layers=layers,
        heads=2,
        pattern=(variant,),
        window=128,
        segment=256,
        persistent=4,
        memory={"net": "titans", "depth": depth, "expansion": 2.0, "chunk": 64},
    )
    return TrainConfig(
        model=model,
        data=DataConfig(kind="packed", path=data, length=length)
        if data
        else DataConfig(kind="recall", length=length, pairs=32),
        optimizer=OptimizerConfig(lr=3e-3, warmup=20, schedule="constant"),
        steps=steps,
        batch=2,
        precision=precision,  # type: ignore[arg-type]
        save_every=500,
        log_every=1,
        patience=1_000_000,  # to count them all
        device=device,
    )


def run(config: TrainConfig, out: Path) -> None:
    from remanence.train import fit

    fit(config, out, resume=(out / "config.json").is_file())


def work(runs: dict[Path, TrainConfig], jobs: int, end: float) -> None:
    """Every run in a process of its own, so many at once; at the end of the time, SIGTERM, on which a run saves
    itself.
    """
    waiting, running = list(runs.items()), []
    while (waiting or running) and time.monotonic() < end:
        running = [process for process in running if process.is_alive()]
        while waiting and len(running) < jobs:
            out, config = waiting.pop(0)
            process = mp.get_context("spawn").Process(target=run, args=(config, out))
            process.start()
            running.append(process)
        time.sleep(0.2)
    for process in running:
        process.terminate()
    for process in running:
        process.join()


def told(out: Path) -> dict[str, float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["loss"] is not None]
    return {
        "steps": lines[-1]["step"],
        "skipped": lines[-1]["skipped"],
        "first": sum(losses[:20]) / len(losses[:20]),
        "last": sum(losses[-20:]) / len(losses[-20:]),
        "gradient": max(line["gradient"] or float("inf") for line in lines),
        "tokens_per_s": lines[-1]["tokens_per_s"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--depths", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--precision", nargs="+", default=["float32"])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--data", help="prepared tokens; default: the recall task")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9, help="stop then, to go on later")
    parser.add_argument("--out", type=Path, default=Path("out/stability"))
    given = parser.parse_args()
    runs = {}
    for variant, depth, precision in product(given.variants, given.depths, given.precision):
        config = setting(
            variant,
            depth,
            precision,
            steps=given.steps,
            length=given.length,
            data=given.data,
            device=given.device,
        )
        runs[given.out / f"{variant}-{depth}-{precision}"] = config
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    work(runs, given.jobs, time.monotonic() + 60 * given.minutes)
    table = Table(
        "run", "steps", "skipped", "loss, first 20", "loss, last 20", "largest gradient", "tokens/s"
    )
    for out in runs:
        if (out / "metrics.jsonl").is_file() and (out / "metrics.jsonl").stat().st_size:
            row = told(out)
            table.add_row(
                out.name,
                *(f"{row[name]:,.0f}" for name in ("steps", "skipped")),
                *(f"{row[name]:.3f}" for name in ("first", "last")),
                f"{row['gradient']:.3g}",
                f"{row['tokens_per_s']:,.0f}",
            )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
