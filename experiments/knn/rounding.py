"""What a store loses when its keys and values are int8 or bfloat16: entries found, and the output of attention.

    python -m experiments.knn.rounding [--entries 65536] [--out rounding.json]

512 queries for the 32 nearest of the entries of one head, 64 wide, of unit length; in clusters, or isotropic. The
values are the keys. Beside each: the share of the 32 nearest float32 keys that are found, that of the nearest, the
relative error of attention over them (inverse temperature 10), and the bytes of an entry.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from remanence.io.files import write_json
from remanence.memory.ivf import recall
from remanence.memory.search import attend, exact, l2_normalize
from remanence.memory.store import Store

QUERIES, NEAREST, WIDTH, CLUSTERS = 512, 32, 64, 1024


def vectors(kind: str, count: int, centres: torch.Tensor) -> torch.Tensor:
    noise = torch.randn(1, count, 1, WIDTH)
    if kind == "clusters":
        noise = noise * 0.5 + centres[torch.randint(len(centres), (1, count, 1))]
    return l2_normalize(noise)


def measured(kind: str, entries: int) -> list[dict[str, object]]:
    torch.manual_seed(0)
    centres = torch.randn(CLUSTERS, WIDTH)
    k, q = vectors(kind, entries, centres), vectors(kind, QUERIES, centres)
    position, limit, scale = (
        torch.arange(entries)[None],
        torch.full((1, QUERIES), entries),
        torch.tensor([10.0]),
    )
    rows, truth = [], None
    for name in ("float32", "bfloat16", "int8"):
        store = Store(entries, 1, WIDTH, dtype="int8" if name == "int8" else "auto")
        like = q.bfloat16() if name == "bfloat16" else q
        state = store.add(store.start(1, like), k, k, position, reuse=True)
        found = exact(q, state, NEAREST, limit)
        y = attend(q, found, state, scale)[0]
        truth = truth or (found.index, y)
        rows.append(
            {
                "keys": kind,
                "dtype": name,
                "found": recall(found.index, truth[0]),
                "nearest": recall(found.index[..., :1], truth[0][..., :1]),
                "error": float((y - truth[1]).norm() / truth[1].norm()),
                "bytes": round(state.nbytes / entries),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--entries", type=int, default=2**16)
    parser.add_argument("--out", type=Path, default=Path("rounding.json"))
    options = parser.parse_args()
    table = Table("keys", "dtype", "of the 32 nearest", "nearest", "error", "bytes")
    rows = [row for kind in ("clusters", "isotropic") for row in measured(kind, options.entries)]
    for row in rows:
        table.add_row(*[f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()])
    Console().print(table)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.out, {"torch": torch.__version__, "entries": options.entries, "rows": rows})


if __name__ == "__main__":
    main()
