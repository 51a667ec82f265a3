"""Measured training speeds, as fractions of a GPU's peak (speeds.json), and estimates for other models.

The table is made by `python benchmarks/gpu.py --parts c` and then `python benchmarks/speeds.py`. It was
measured with the 340m preset on one GPU, for several kinds of block, memory networks, chunk sizes and row
lengths, with steps captured as a CUDA graph or launched by the host.
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
"""The measured kind of block to use for a kind that was not measured.

The default is "lmm", a memory alone.
"""

MATRICES = ("deep", "linear")
"""The memory networks in which each token is written to a single matrix."""


class MeasuredSpeed(NamedTuple):
    """A fraction of the GPU's peak, whether activations were recomputed in the measurement, and its
    description.
    """

    share: float
    checkpointing: bool
    description: str


@cache
def table() -> dict[str, Any]:
    """Return the content of speeds.json."""
    return read_json(TABLE)


def speed_of(kind: str, config: ModelConfig, length: int, captured: bool = True) -> MeasuredSpeed:
    """Return the fraction of the peak for a model with one kind of block, from the nearest measurement.

    The nearest measurement agrees in the kind of block, then in the memory network, then in the chunk size,
    then in whether steps are captured. Values are interpolated between measured lengths on logarithmic
    scales; beyond the shortest and longest, the nearest value is used.
    """
    rows, note = table()["rows"], ""
    measured_kind = kind if any(row["variant"] == kind for row in rows) else NEAREST.get(kind, "lmm")
    if kind in ("window", "conv_window", "knn"):
        length = min(length, 2 * config.window)  # full attention sees as many tokens there
    rows = [row for row in rows if row["variant"] == measured_kind]
    if measured_kind != "attention":
        net = config.memory.net if kind in (measured_kind, *NEAREST) else "linear"  # others write to a matrix
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
    weight = (
        log(length / low["length"]) / log(high["length"] / low["length"])
        if low["length"] < high["length"]
        else 0.0
    )
    share = exp((1 - weight) * log(low["share"]) + weight * log(high["share"]))
    lengths = " and ".join(
        f"{row['length']:,}" for row in ((low, high) if 0 < weight < 1 else (low if weight < 1 else high,))
    )
    name = kind if kind == measured_kind else f"{kind} as {measured_kind}"
    return MeasuredSpeed(
        share,
        bool(low.get("checkpointing")),
        f"{name} {100 * share:.2g} % of the peak at {lengths} tokens{note}",
    )


def nearest(rows: list[dict[str, Any]], distance: Callable[[dict[str, Any]], float]) -> list[dict[str, Any]]:
    """Return the rows with the smallest distance."""
    best = min(rows, key=distance)
    return [row for row in rows if distance(row) == distance(best)]
