"""One long text on a CPU: does reading take constant memory, and is a decoded token as cheap after a million tokens as
after a thousand? Reads generated text of any length with an untrained model, prints one line per variant, writes
benchmarks/out/long.json.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from cpu import high_water_mib
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from remanence import Model, Session, State, preset

SHORT, MIDDLE = 1_000, 100_000


def text(tokens: int) -> Iterator[bytes]:
    """Words of a small vocabulary in random order."""
    chance = random.Random(0)
    words = [
        "".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(2, 9))) for _ in range(2000)
    ]
    while tokens > 0:
        piece = (" ".join(chance.choices(words, k=2000)) + "\n").encode()[:tokens]
        tokens -= len(piece)
        yield piece


def decode_ms(model: Model, states: list[State], rounds: int) -> list[float]:
    """Median milliseconds of one token from each state, the states taking turns."""
    times: list[list[float]] = [[] for _ in states]
    for turn in range(rounds + 8):
        for index, state in enumerate(states):
            start = time.perf_counter()
            with torch.no_grad():
                _, states[index] = model(torch.tensor([[turn % 256]]), state)
            if turn >= 8:
                times[index].append(1e3 * (time.perf_counter() - start))
    return [statistics.median(each) for each in times]


def measure(variant: str, name: str, tokens: int, rounds: int) -> dict:
    torch.manual_seed(0)
    model = Model(preset(name, variant)).eval()
    session = Session(model)
    session.read(text(SHORT))
    marks = {SHORT: session.state}
    half, peak_at_middle, start = None, 0.0, time.perf_counter()
    with Progress(transient=True) as bar:
        task = bar.add_task(variant, total=tokens)
        for _ in session.read_pieces(text(tokens)):
            bar.update(task, completed=session.tokens)
            if not peak_at_middle and session.tokens >= MIDDLE:
                peak_at_middle = high_water_mib()
            if half is None and session.tokens >= tokens / 2:
                half = session.state
    speed = (session.tokens - SHORT) / (time.perf_counter() - start)
    peak = high_water_mib()
    assert half is not None
    early, late = decode_ms(model, [marks[SHORT], half], rounds)
    return {
        "variant": variant,
        "preset": name,
        "tokens": session.tokens,
        "tokens_per_s": round(speed, 1),
        "peak_mib_at_100k": round(peak_at_middle, 1),
        "peak_mib_at_end": round(peak, 1),
        "growth": round(peak / peak_at_middle - 1, 4),
        "decode_ms_at_1k": round(early, 3),
        "decode_ms_halfway": round(late, 3),
        "decode_ratio": round(late / early, 3),
        "state_bytes": session.state.nbytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2_000_000)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--variants", nargs="+", default=["lmm", "mac", "mag", "mal"])
    parser.add_argument("--rounds", type=int, default=320, help="decoded tokens from each state")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "long.json")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return print(json.dumps(measure(options.variants[0], options.preset, options.tokens, options.rounds)))
    if options.tokens < 2 * MIDDLE:
        parser.error(f"--tokens: expected at least {2 * MIDDLE}, got {options.tokens}")
    rows = []
    for variant in options.variants:  # a process each: peak memory is the process's own
        command = [sys.executable, __file__, "--one", "--variants", variant, "--preset", options.preset]
        command += ["--tokens", str(options.tokens), "--rounds", str(options.rounds)]
        rows.append(
            json.loads(
                subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
            )
        )
    table = Table(title=f"{options.preset}, {options.tokens:,} tokens, {torch.get_num_threads()} threads")
    for column in (
        "variant",
        "tokens/s",
        "peak MiB at 100K",
        "at the end",
        "growth",
        "ms/token at 1K",
        "halfway",
        "ratio",
    ):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for row in rows:
        table.add_row(
            row["variant"],
            f"{row['tokens_per_s']:,.0f}",
            f"{row['peak_mib_at_100k']:,.0f}",
            f"{row['peak_mib_at_end']:,.0f}",
            f"{100 * row['growth']:.1f} %",
            f"{row['decode_ms_at_1k']:.2f}",
            f"{row['decode_ms_halfway']:.2f}",
            f"{row['decode_ratio']:.3f}",
        )
    Console().print(table)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(
        json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(), "rows": rows}, indent=1)
    )
    print(f"written: {options.out}")
    return None


if __name__ == "__main__":
    main()
