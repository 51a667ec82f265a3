"""A memory at work, before any training: key-value pairs stream into a NeuralMemory, round after round.

Halfway every key gets a new value: what was stored is now wrong. Surprise jumps and falls again, recall drops and rises
again; how fast depends on the rule, with and without momentum and forgetting.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from remanence.device import resolve
from remanence.layers import unit
from remanence.memory.neural import NeuralMemory
from remanence.ops import MemoryState, recall

RULES = {
    "both": "titans",
    "momentum": "no_forget",
    "forgetting": "no_momentum",
    "neither": "ttt",
}
PAIRS, WIDTH, ROUNDS = 64, 32, 24
# With nothing to learn them from, the gates are constants for a stream of this length: forgetting halves a memory in 760
# tokens, half the stream.
STEP_BIAS, FORGET_BIAS = -2.0, -7.0


@dataclass(frozen=True)
class Run:
    """One rule's course: per round, mean surprise while reading it, and recall asked after it."""

    name: str
    surprise: list[float]
    recall: list[float]


def see_through(memory: NeuralMemory) -> NeuralMemory:
    """Projections set by hand: a token is (key, value) side by side, and the gates are the same for every token."""
    half = torch.eye(WIDTH)
    none = torch.zeros(WIDTH, WIDTH)
    with torch.no_grad():
        memory.q_proj.weight.copy_(torch.cat([half, none], 1))
        memory.k_proj.weight.copy_(torch.cat([half, none], 1))
        memory.v_proj.weight.copy_(torch.cat([none, half], 1))
        memory.gates.weight.zero_()
    return memory


@torch.no_grad()
def stream(rule: str, device: torch.device, seed: int) -> tuple[list[float], list[float]]:
    """Surprise and recall, round by round, of one memory."""
    torch.manual_seed(seed)
    memory = NeuralMemory(dim=2 * WIDTH, heads=1, head_dim=WIDTH, conv=0, rule=rule, step_bias=STEP_BIAS, forget_bias=FORGET_BIAS)
    memory = see_through(memory).to(device)
    keys, *values = (torch.randn(PAIRS, WIDTH).to(device) for _ in range(3))
    state, surprises, recalls = None, [], []
    for turn in range(ROUNDS):
        current = values[turn >= ROUNDS // 2]
        order = torch.randperm(PAIRS).to(device)
        seen = memory.trace(torch.cat([keys, current], 1)[order].unsqueeze(0), state)
        state = seen.state
        surprises.append(float(seen.surprise.mean()))
        recalls.append(recalled(memory, state.memory, keys, current))
    return surprises, recalls


def recalled(memory: NeuralMemory, state: MemoryState, keys: Tensor, values: Tensor) -> float:
    """The share of keys whose answer is nearer to their own value, as the memory was given it, than to any other."""
    silu = torch.nn.functional.silu
    asked = unit(silu(keys))[None, :, None]
    answers = recall(asked, state, net=memory.net, rule=memory.rule)[0, :, 0]
    nearest = torch.cdist(unit(answers), unit(silu(values))).argmin(1)
    return float((nearest == torch.arange(len(keys), device=keys.device)).float().mean())


def plot(runs: list[Run], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    tokens = [PAIRS * (turn + 1) for turn in range(ROUNDS)]
    for run, colour in zip(runs, ("#1b6ca8", "#e07a1f", "#3a8f5c", "#8a8a8a"), strict=True):
        left.plot(tokens, run.surprise, label=run.name, color=colour, linewidth=2)
        right.plot(tokens, [100 * value for value in run.recall], color=colour, linewidth=2)
    for axis, title in ((left, "mean surprise while reading"), (right, "pairs recalled, %")):
        axis.axvline(PAIRS * ROUNDS // 2, color="black", linewidth=1, linestyle=":")
        axis.set(title=title, xlabel="tokens read")
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylim(bottom=0)
    right.set_ylim(0, 103)
    right.annotate("every key gets\na new value", (PAIRS * ROUNDS // 2, 12), xytext=(6, 0), textcoords="offset points")
    left.legend(title="the rule has", frameon=False, fontsize=9, loc="lower left")
    temporary = path.with_suffix(".tmp.png")
    figure.savefig(temporary, dpi=120)
    plt.close(figure)
    os.replace(temporary, path)


def main(out: Path, device: str, seed: int) -> None:
    where = resolve(device)
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: expected a folder to write into, got the file {out}")
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    runs = [
        Run(name, *stream(rule, where, seed))
        for name, rule in track(list(RULES.items()), "reading", console=console, transient=True)
    ]
    half = ROUNDS // 2
    table = Table(title=f"{PAIRS} key-value pairs, {ROUNDS} rounds, new values after round {half} ({where})")
    table.add_column("memory")
    points = [0, half - 1, half, half + 2, ROUNDS - 1]
    for point in points:
        table.add_column(f"round {point + 1}", justify="right")
    for run in runs:
        table.add_row(run.name, *[f"{run.surprise[i]:4.1f} {100 * run.recall[i]:3.0f} %" for i in points])
    table.caption = "mean surprise while reading the round, share of pairs recalled after it"
    console.print(table)
    plot(runs, out / "memory.png")
    temporary = out / "memory.json.tmp"
    temporary.write_text(json.dumps({"seed": seed, "pairs": PAIRS, "runs": [asdict(run) for run in runs]}, indent=1))
    os.replace(temporary, out / "memory.json")
    console.print(f"plot: {out / 'memory.png'}   numbers: {out / 'memory.json'}", soft_wrap=True)
