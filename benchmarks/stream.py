"""A memory before any training: 64 key-value pairs stream into a NeuralMemory, round after round, under four rules.

Halfway every key gets a new value: what was stored is now wrong. Surprise jumps and falls again, recall drops and rises
again; how fast depends on the rule, with and without momentum and forgetting. A table of surprise and recall by round.
"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from remanence.layers import l2_normalize
from remanence.memory.neural import NeuralMemory
from remanence.ops import MemoryState, recall
from remanence.runtime.device import resolve

RULES = {
    "both": "titans",
    "momentum": "no_forget",
    "forgetting": "no_momentum",
    "neither": "ttt",
}
PAIRS, WIDTH, ROUNDS = 64, 32, 24
# With nothing to learn them from, the gates are constants for a stream of this length: forgetting halves a memory in
# 760 tokens, half the stream.
STEP_BIAS, FORGET_BIAS = -2.0, -7.0


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
def stream(rule: str, device: torch.device, seed: int) -> list[tuple[float, float]]:
    """One memory, round by round: mean surprise while reading it, and the share of pairs recalled after it."""
    torch.manual_seed(seed)
    memory = NeuralMemory(
        dim=2 * WIDTH,
        heads=1,
        head_dim=WIDTH,
        conv=0,
        net="titans",
        rule=rule,
        step_bias=STEP_BIAS,
        forget_bias=FORGET_BIAS,
    )
    memory = see_through(memory).to(device)
    keys, *values = (torch.randn(PAIRS, WIDTH).to(device) for _ in range(3))
    state, course = None, []
    for turn in range(ROUNDS):
        current = values[turn >= ROUNDS // 2]
        order = torch.randperm(PAIRS).to(device)
        seen = memory.trace(torch.cat([keys, current], 1)[order].unsqueeze(0), state)
        state = seen.state
        course.append((float(seen.surprise.mean()), recalled(memory, state.memory, keys, current)))
    return course


def recalled(memory: NeuralMemory, state: MemoryState, keys: Tensor, values: Tensor) -> float:
    """The share of keys whose answer is nearer to their own value, as the memory was given it, than to any other."""
    silu = torch.nn.functional.silu
    asked = l2_normalize(silu(keys))[None, :, None]
    answers = recall(asked, state, net=memory.net, rule=memory.rule)[0, :, 0]
    nearest = torch.cdist(l2_normalize(answers), l2_normalize(silu(values))).argmin(1)
    return float((nearest == torch.arange(len(keys), device=keys.device)).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    device, half = resolve(options.device), ROUNDS // 2
    table = Table(title=f"{PAIRS} key-value pairs, {ROUNDS} rounds, new values after round {half} ({device})")
    table.add_column("the rule has")
    points = [0, half - 1, half, half + 2, ROUNDS - 1]
    for point in points:
        table.add_column(f"round {point + 1}", justify="right")
    for name, rule in RULES.items():
        course = stream(rule, device, options.seed)
        table.add_row(name, *[f"{course[i][0]:4.1f} {100 * course[i][1]:3.0f} %" for i in points])
    table.caption = "mean surprise while reading the round, share of pairs recalled after it"
    Console().print(table)


if __name__ == "__main__":
    main()
