"""A model with a large kNN store on a CPU: opening its memory file, reading and decoding, beside the same model with a
store that is empty.

    OMP_NUM_THREADS=1 python benchmarks/knn_reading.py

Six layers of width 512 with windows of 512, of which the fifth has a store of keys and values of 8 heads, filled with
random vectors. Of each store: the size of the memory file, the seconds to open it, the seconds until the first token
after it is read (its pages are in the page cache), milliseconds per token of reading 512 tokens, and of decoding one by
one. Medians over the rounds. Prints a table, writes benchmarks/out/knn_reading.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from remanence import Model, ModelConfig
from remanence.backbone import State
from remanence.inference import memfile
from remanence.memory.search import l2_normalize

WINDOW, HEADS, WIDTH = 512, 8, 64


def model_of(entries: int, dtype: str, search: str) -> Model:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=257, dim=HEADS * WIDTH, num_layers=6, heads=HEADS, window=WINDOW, persistent=0,
        pattern=("window", "window", "window", "window", "knn", "window"),
        knn={"size": entries, "store_dtype": dtype, "search": search},
    )  # fmt: skip
    return Model(config).bfloat16().eval()


@torch.no_grad()
def filled(model: Model, entries: int) -> State:
    """A state after so many tokens and one window more, whose store holds random vectors."""
    _, state = model(torch.randint(257, (1, 2 * WINDOW)))
    mixer, block = model.blocks[4].mixer, state.blocks[4]
    store = mixer.store.start(1, block.k)
    for first in range(0, entries, 2**16):
        k = l2_normalize(torch.randn(1, min(2**16, entries - first), HEADS, WIDTH))
        place = torch.arange(first, first + k.shape[1])[None]
        store = mixer.store.add(store, k, k, place, reuse=True)
    more = entries - entries % WINDOW
    moved = lambda part: part.map(lambda x: x + more if x.dtype == torch.int64 and x.dim() == 1 else x)
    blocks = [moved(part) for part in state.blocks]
    blocks[4] = blocks[4]._replace(store=store)
    return state._replace(position=state.position + more, blocks=tuple(blocks))


def seconds(call: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call(*args)
    return time.perf_counter() - start, result


@torch.no_grad()
def measured(entries: int, dtype: str, search: str, rounds: int, folder: Path) -> dict[str, Any]:
    model, path = model_of(entries, dtype, search), folder / "store.mem"
    memfile.save(path, model, filled(model, entries))
    text = torch.randint(257, (1, WINDOW))
    found: dict[str, list[float]] = {"open_s": [], "first_s": [], "read_ms": [], "decode_ms": []}
    for _ in range(rounds):
        opened, state = seconds(memfile.load, path, model)
        first, (_, state) = seconds(model, text[:, :1], state)
        read, (_, after) = seconds(model, text, state)
        steps = []
        for column in range(16):
            step, (_, state) = seconds(model, text[:, column : column + 1], state)
            steps.append(step)
        for name, value in zip(
            found, (opened, first, read / WINDOW * 1e3, statistics.median(steps) * 1e3), strict=True
        ):
            found[name].append(value)
        del after
    row = {"entries": entries, "dtype": dtype, "search": search, "mib": path.stat().st_size / 2**20}
    return row | {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--entries", type=int, nargs="+", default=[0, 65536, 2**20])
    parser.add_argument("--dtypes", nargs="+", default=["auto", "int8"])
    parser.add_argument("--search", default="exact")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "knn_reading.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(
        "entries", "dtype", "file MiB", "open s", "first token s", "reading ms/token", "decoding ms"
    )
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for entries in options.entries:
            for dtype in options.dtypes:
                row = measured(entries, dtype, options.search, options.rounds, Path(folder))
                rows.append(row)
                shown = [row[name] for name in ("mib", "open_s", "first_s", "read_ms", "decode_ms")]
                table.add_row(f"{entries:,}", dtype, *[f"{value:,.3f}" for value in shown])
    Console().print(table)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
