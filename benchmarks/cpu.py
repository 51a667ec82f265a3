"""The layer on a CPU, forward + backward, side by side with titans-pytorch: tokens per second and peak memory.

Times are medians of rounds in which the implementations take turns in one process; peak memory is each one's own
process, over what it held before its first step. Then how long the first call of a compiled layer takes, in a process
of its own with an empty cache, behind the first call of anything compiled, which is torch's own. Prints tables, writes
benchmarks/out/cpu.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
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
    return Peer(
        dim=WIDTH, dim_head=WIDTH // HEADS, heads=HEADS, chunk_size=CHUNK, batch_size=refresh, model=net
    )


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


COMPILED = (("deep", 23), ("deep", 2048), ("titans", 23), ("titans", 2048))
"""Nets and numbers of tokens of layers whose first compiled call is timed."""


def compiled_row(net: str, tokens: int) -> dict:
    """Seconds of torch.compile's first calls in a new process: of a sine, then of a layer, forward, and forward +
    backward.
    """
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, __file__, "--compiled", net, str(tokens)]
        kept = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        said = subprocess.run(command, check=True, capture_output=True, text=True, env=kept).stdout
    anything, forward, both = map(float, said.split()[-3:])
    return {
        "net": net,
        "tokens": tokens,
        "anything_s": anything,
        "forward_s": forward,
        "with_gradients_s": both,
    }


def print_compiled(net: str, tokens: int) -> None:
    from remanence import NeuralMemory

    def first_call(step: Callable[[], object]) -> float:
        torch.compiler.reset()
        start = time.perf_counter()
        step()
        return round(time.perf_counter() - start, 2)

    x = torch.randn(1, tokens, 64)
    layer = NeuralMemory(dim=64, net=net)
    anything = first_call(lambda: torch.compile(torch.sin)(x))
    with torch.no_grad():
        forward = first_call(lambda: torch.compile(layer)(x))
    both = first_call(lambda: torch.compile(layer)(x)[0].sum().backward())
    print(anything, forward, both)


def high_water_mib() -> float:
    """This process's largest resident size so far. Linux: not getrusage, whose figure a child inherits from its
    parent.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 2**10
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds, after one to warm up")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "cpu.json")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    parser.add_argument("--compiled", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak_of:
        return print_peak(options.peak_of)
    if options.compiled:
        return print_compiled(options.compiled[0], int(options.compiled[1]))
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
            rows.append(
                {"case": CASE, "impl": name, "tokens_per_s": None, "peak_mib": None, "note": missing[name]}
            )
            continue
        speed = BATCH * TOKENS / statistics.median(times[name])
        rows.append(
            {
                "case": CASE,
                "impl": name,
                "tokens_per_s": round(speed, 1),
                "peak_mib": round(peak_mib(name), 1),
                "note": "",
            }
        )
    compiled = [compiled_row(net, tokens) for net, tokens in track(COMPILED, "compiling")]
    report(rows, compiled, options.out, options.rounds)
    return None


def report(rows: list[dict], compiled: list[dict], out: Path, rounds: int) -> None:
    base = next((row for row in rows if row["impl"] == BASELINE and row["tokens_per_s"]), None)
    table = Table(title=CASE)
    for column in ("implementation", "tokens/s", "speed", "peak MiB", "memory"):
        table.add_column(column, justify="left" if column == "implementation" else "right")
    for row in rows:
        if row["tokens_per_s"] is None:
            table.add_row(row["impl"], row["note"])
            continue
        ratios = [f"{row[key] / base[key]:.2f} x" if base else "" for key in ("tokens_per_s", "peak_mib")]
        table.add_row(
            row["impl"], f"{row['tokens_per_s']:,.0f}", ratios[0], f"{row['peak_mib']:,.0f}", ratios[1]
        )
    Console().print(table)
    table = Table(
        title="torch.compile(NeuralMemory(dim=64)): seconds of a first call, beyond those of anything compiled first"
    )
    for column in ("net", "tokens", "anything", "forward", "forward + backward"):
        table.add_column(column, justify="left" if column == "net" else "right")
    for row in compiled:
        table.add_row(row["net"], f"{row['tokens']:,}", *[f"{row[key]:.1f}" for key in list(row)[2:]])
    Console().print(table)
    versions = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_suffix(".tmp")
    temporary.write_text(
        json.dumps({"rounds": rounds, **versions, "rows": rows, "compiled": compiled}, indent=1)
    )
    os.replace(temporary, out)
    print(f"written: {out}")


if __name__ == "__main__":
    main()
