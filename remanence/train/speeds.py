"""The share of a GPU's peak that training reached where it was measured (speeds.json), and estimates for other models.

The table is made by `python benchmarks/gpu.py --parts c` and then `python benchmarks/speeds.py`: the 340m preset on one
GPU, by kind of block, the memory's net and chunk, tokens of a row, and whether steps were captured as a CUDA graph or
launched by the host.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import exp, log
from pathlib import Path
from typing import Any, NamedTuple

from remanence.config import ModelConfig
from remanence.io.files import read_json

TABLE = Path(__file__).with_name("speeds.json")

NEAREST = {"mal": "mag", "mac": "mag", **dict.fromkeys(("window", "conv_window", "knn"), "attention")}
"""What stands for a kind of block that was not measured; for all others "lmm", a memory alone."""

MATRICES = ("deep", "linear")
"""Nets of which one matrix is written, token by token."""


class Reached(NamedTuple):
    """A share of the peak, whether it was reached with activations recomputed, and in words what was measured."""

    share: float
    checkpointing: bool
    told: str


@cache
def table() -> dict[str, Any]:
    return read_json(TABLE)


def reached(kind: str, config: ModelConfig, length: int, captured: bool = True) -> Reached:
    """The share for a model of such blocks alone, from the nearest measurement.

    Nearest is the same kind, then net, then chunk, then captured or not. Between lengths it is interpolated in
    logarithms; beyond them it is the last.
    """
    rows, note = table()["rows"], ""
    known = kind if any(row["variant"] == kind for row in rows) else NEAREST.get(kind, "lmm")
    if kind in ("window", "conv_window", "knn"):
        length = min(length, 2 * config.window)  # where full attention sees as much
    rows = [row for row in rows if row["variant"] == known]
    if known != "attention":
        net = config.memory.net if kind in (known, *NEAREST) else "linear"  # what others write is a matrix
        rows = nearest(
            rows, lambda row: (row["net"] != net) + ((row["net"] in MATRICES) != (net in MATRICES))
        )
        rows = nearest(rows, lambda row: abs(log(row["chunk"] / config.memory.chunk)))
        if (rows[0]["net"], rows[0]["chunk"]) != (net, config.memory.chunk):
            note = f", measured with the net {rows[0]['net']} in chunks of {rows[0]['chunk']}"
    rows = nearest(rows, lambda row: bool(row.get("captured")) != captured)
    if bool(rows[0].get("captured")) != captured:
        note += f", steps {'launched' if captured else 'captured'}"
    rows = sorted(rows, key=lambda row: row["length"])
    below = [row for row in rows if row["length"] <= length] or rows[:1]
    above = [row for row in rows if row["length"] >= length] or rows[-1:]
    low, high = below[-1], above[0]
    way = (
        log(length / low["length"]) / log(high["length"] / low["length"])
        if low["length"] < high["length"]
        else 0.0
    )
    share = exp((1 - way) * log(low["share"]) + way * log(high["share"]))
    where = " and ".join(
        f"{row['length']:,}" for row in ((low, high) if 0 < way < 1 else (low if way < 1 else high,))
    )
    name = kind if kind == known else f"{kind} as {known}"
    return Reached(
        share,
        bool(low.get("checkpointing")),
        f"{name} {100 * share:.2g} % of the peak at {where} tokens{note}",
    )


def nearest(rows: list[dict[str, Any]], distance: Callable[[dict[str, Any]], float]) -> list[dict[str, Any]]:
    """The rows with the smallest distance."""
    best = min(rows, key=distance)
    return [row for row in rows if distance(row) == distance(best)]
