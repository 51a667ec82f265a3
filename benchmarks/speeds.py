"""Turn what benchmarks/gpu.py measured of training into the table that `remanence train ... --dry-run` estimates from.

    python benchmarks/gpu.py --parts c
    python benchmarks/speeds.py                      benchmarks/out/gpu.json -> remanence/train/speeds.json

What the file has of a kind of block, net and chunk takes the place of all that the table had of them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from remanence.train.plan import PEAKS
from remanence.train.speeds import TABLE

Row = dict[str, Any]


def speeds(measured: Row, before: Row, origin: str | None = None) -> Row:
    """The table after a run of the benchmark."""
    device = measured["device"]
    gpu = next((name for name in PEAKS if name in device), None)
    if gpu is None:
        raise ValueError(f"device: expected one whose peak is known ({', '.join(PEAKS)}), got {device}")
    if before.get("rows") and before["gpu"] != gpu:
        raise ValueError(
            f"device: expected the table's {before['gpu']}, got {device}; begin a new one with --anew"
        )
    origin = origin or "python benchmarks/gpu.py --parts c, " + ", ".join(
        f"{name} {measured[name]}" for name in ("torch", "triton") if name in measured
    )
    kind = lambda row: (row["variant"], row.get("net"), row.get("chunk"), bool(row.get("captured")))
    new = []
    for row in measured["rows"]:
        if row["part"] != "c" or not row.get("tokens_per_s"):
            continue
        made = {"variant": row["variant"], "length": row["length"]}
        made |= {} if row["variant"] == "attention" else {"net": row["net"], "chunk": row["chunk"]}
        made |= {"tokens_per_s": row["tokens_per_s"], "share": share(row, PEAKS[gpu])}
        made |= {name: True for name in ("checkpointing", "captured") if row.get(name)}
        new.append({**made, "from": origin})
    replaced = {kind(row) for row in new}
    rows = [row for row in before.get("rows", []) if kind(row) not in replaced] + new
    rows.sort(
        key=lambda row: (
            row["variant"],
            row.get("net") or "",
            -(row.get("chunk") or 0),
            not row.get("captured"),
            row["length"],
        )
    )
    return {"gpu": gpu, "preset": "340m", "rows": rows}


def share(row: Row, peak: float) -> float:
    return float(f"{row['flops_per_token'] * row['tokens_per_s'] / peak:.4g}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measured", type=Path, nargs="?", default=Path(__file__).parent / "out" / "gpu.json")
    parser.add_argument("--origin", help="what the rows are said to come from")
    parser.add_argument("--anew", action="store_true", help="keep nothing of the table")
    parser.add_argument("--out", type=Path, default=TABLE)
    given = parser.parse_args()
    before = json.loads(given.out.read_text()) if given.out.exists() and not given.anew else {}
    made = speeds(json.loads(given.measured.read_text()), before, given.origin)
    lines = ",\n".join("  " + json.dumps(row) for row in made.pop("rows"))
    given.out.write_text(json.dumps(made)[:-1] + ', "rows": [\n' + lines + "\n]}\n")
    print(f"written: {given.out}")


if __name__ == "__main__":
    main()
