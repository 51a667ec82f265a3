"""Whole models on a CPU at equal parameters, side by side with a Transformer++: forward + backward, and decoding.

Every variant's feed-forward is narrowed until it has the Transformer's number of parameters. The variants take turns in
one process, so that the ratios hold on a noisy machine. Prints a table, writes benchmarks/out/models.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from remanence import Model, preset
from remanence.model import matched

VARIANTS = ("attention", "window", "lmm", "mac", "mag", "mal", "gated_delta", "ttt")
BASELINE = "attention"


def train_step(model: Model, tokens: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        logits, _ = model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        model.zero_grad()

    return step


def decode_step(model: Model, context: torch.Tensor) -> Callable[[], None]:
    with torch.no_grad():
        _, state = model(context)
    held = [state]

    def step() -> None:
        with torch.no_grad():
            for _ in range(16):  # a whole chunk: what a token costs depends on its place in it
                _, held[0] = model(context[:, :1], held[0])

    return step


def medians(steps: dict[str, Callable[[], None]], rounds: int, what: str) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in track(range(rounds + 1), what):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds, after one to warm up")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "models.json")
    options = parser.parse_args()
    torch.manual_seed(0)
    models = {variant: Model(matched(preset(options.preset, variant))) for variant in VARIANTS}
    tokens = torch.randint(257, (options.batch, options.tokens + 1))
    trained = medians(
        {name: train_step(model, tokens) for name, model in models.items()}, options.rounds, "training"
    )
    contexts = {name: decode_step(model.eval(), tokens[:1, :-1]) for name, model in models.items()}
    decoded = medians(contexts, options.rounds, "decoding")
    rows = []
    for name, model in models.items():
        rows.append(
            {
                "case": f"{options.preset} b{options.batch} t{options.tokens}",
                "variant": name,
                "parameters": sum(p.numel() for p in model.parameters()),
                "train_tokens_per_s": round(options.batch * options.tokens / trained[name], 1),
                "train_ratio": round(trained[BASELINE] / trained[name], 3),
                "decode_tokens_per_s": round(16 / decoded[name], 1),
                "decode_ratio": round(decoded[BASELINE] / decoded[name], 3),
            }
        )
    table = Table(
        title=f"{rows[0]['case']}: forward + backward; decoding one sequence after {options.tokens} tokens"
    )
    for column in ("variant", "parameters", "train tokens/s", "ratio", "decode tokens/s", "ratio"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for row in rows:
        figures = [f"{row['train_tokens_per_s']:,.0f}", f"{row['train_ratio']:.2f} x"]
        figures += [f"{row['decode_tokens_per_s']:,.0f}", f"{row['decode_ratio']:.2f} x"]
        table.add_row(row["variant"], f"{row['parameters']:,}", *figures)
    Console().print(table)
    versions = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    temporary = options.out.with_suffix(".tmp")
    temporary.write_text(json.dumps({"rounds": options.rounds, **versions, "rows": rows}, indent=1))
    os.replace(temporary, options.out)
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
