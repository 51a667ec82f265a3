"""The layer on a CPU, forward + backward, side by side with titans-pytorch: tokens per second and peak memory.

Times are medians of rounds in which the implementations take turns in one process; peak memory is each one's own process,
over what it held before its first step. Prints a table, writes benchmarks/out/cpu.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

BATCH, TOKENS, WIDTH, HEADS, DEPTH, EXPANSION, CHUNK = 2, 2048, 256, 4, 2, 2.0, 64
CASE = f"layer fwd+bwd b{BATCH} t{TOKENS} d{WIDTH} h{HEADS} depth{DEPTH} x{EXPANSION:g} chunk{CHUNK}"
OURS = "remanence"


def ours(**fields: object) -> torch.nn.Module:
    from remanence import NeuralMemory

    paper = {"net": "titans", "depth": DEPTH, "expansion": EXPANSION, "chunk": CHUNK}
    return NeuralMemory(dim=WIDTH, heads=HEADS, **{**paper, **fields})


def peer(refresh: int | None) -> torch.nn.Module:
    from titans_pytorch import MemoryMLP
    from titans_pytorch import NeuralMemory as Peer

    net = MemoryMLP(WIDTH // HEADS, depth=DEPTH, expansion_factor=EXPANSION)
    return Peer(dim=WIDTH, dim_head=WIDTH // HEADS, heads=HEADS, chunk_size=CHUNK, batch_size=refresh, model=net)


IMPLEMENTATIONS: dict[str, Callable[[], torch.nn.Module]] = {
    OURS: ours,
    "remanence, as it comes": lambda: ours(net="deep", expansion=None),
    "remanence, no momentum": lambda: ours(rule="no_momentum"),
    "remanence, linear, token-exact": lambda: ours(net="linear", depth=None, expansion=None),
    f"titans-pytorch, batch_size={CHUNK}": lambda: peer(CHUNK),
    "titans-pytorch, all gradients at the first weights": lambda: peer(None),
}
BASELINE = f"titans-pytorch, batch_size={CHUNK}"


def step_of(name: str) -> Callable[[], None]:
    torch.manual_seed(0)
    layer = IMPLEMENTATIONS[name]()
    x = torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)

    def step() -> None:
        y = layer(x)[0]
        y.sum().backward()
        layer.zero_grad()

    return step


def peak_mib(name: str) -> float:
    """Of one step, over what the process held before it, measured in a process of its own."""
    command = [sys.executable, __file__, "--peak-of", name]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def print_peak(name: str) -> None:
    step = step_of(name)
    before = high_water_mib()
    step()
    print(high_water_mib() - before)


def high_water_mib() -> float:
    """This process's largest resident size so far. Linux: not getrusage, whose figure a child inherits from its parent."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 2**10
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds, after one to warm up")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "cpu.json")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak_of:
        return print_peak(options.peak_of)
    steps, rows, missing = {}, [], {}
    for name in IMPLEMENTATIONS:
        try:
            steps[name] = step_of(name)
        except ImportError as error:
            missing[name] = f"not installed ({error}); pip install 'remanence[bench]'"
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in track(range(options.rounds + 1), "timing"):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if turn:
                times[name].append(time.perf_counter() - start)
    for name in IMPLEMENTATIONS:
        if name in missing:
            rows.append({"case": CASE, "impl": name, "tokens_per_s": None, "peak_mib": None, "note": missing[name]})
            continue
        speed = BATCH * TOKENS / statistics.median(times[name])
        rows.append(
            {"case": CASE, "impl": name, "tokens_per_s": round(speed, 1), "peak_mib": round(peak_mib(name), 1), "note": ""}
        )
    report(rows, options.out, options.rounds)
    return None


def report(rows: list[dict], out: Path, rounds: int) -> None:
    base = next((row for row in rows if row["impl"] == BASELINE and row["tokens_per_s"]), None)
    table = Table(title=CASE)
    for column in ("implementation", "tokens/s", "speed", "peak MiB", "memory"):
        table.add_column(column, justify="left" if column == "implementation" else "right")
    for row in rows:
        if row["tokens_per_s"] is None:
            table.add_row(row["impl"], row["note"])
            continue
        ratios = [f"{row[key] / base[key]:.2f} x" if base else "" for key in ("tokens_per_s", "peak_mib")]
        table.add_row(row["impl"], f"{row['tokens_per_s']:,.0f}", ratios[0], f"{row['peak_mib']:,.0f}", ratios[1])
    Console().print(table)
    versions = {"torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_suffix(".tmp")
    temporary.write_text(json.dumps({"rounds": rounds, **versions, "rows": rows}, indent=1))
    os.replace(temporary, out)
    print(f"written: {out}")


if __name__ == "__main__":
    main()
