"""The kNN store on a CPU: searching 512 queries for their 32 nearest, and adding 512 entries, side by side with raw
faiss and with memorizing-transformers-pytorch's KNNMemory. ``--queries 1`` is the search of a decoding step.

Implementations take turns in one process on one core; times are the least of the rounds. Keys are 64 wide, of unit
length, and lie in clusters, as a model's do. Recall is the share of exact search's entries that were found. Peak memory
is a search's, over what the process held before it (Linux). Prints a table, writes benchmarks/out/knn.json.

The peer wants faiss-gpu, which the package index does not have; without it, where it can be imported:
    pip install --no-deps --target .peers memorizing-transformers-pytorch einops-exts joblib; PYTHONPATH=.peers python
    ...
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from remanence import Model, ModelConfig
from remanence.inference import memfile
from remanence.memory.ivf import recall
from remanence.memory.search import SEARCHES, attend, exact, l2_normalize
from remanence.memory.store import Store, StoreState

QUERIES, NEAREST, WIDTH, CLUSTERS = 512, 32, 64, 1024
PEER = "memorizing-transformers-pytorch (HNSW)"
PEER_KEYS = 2**19
"""Keys of all heads above which the peer's graphs are not built, to keep the run short: they take 0.05 ms a key and
more.
"""


class Contestant:
    """What is timed: a search, an add, and how long its index took to make."""

    def __init__(
        self, search: Callable[[], torch.Tensor | None], add: Callable[[], object], build: float = 0.0
    ) -> None:
        self.search, self.add, self.build = search, add, build


def problem(
    size: int, heads: int, queries: int = QUERIES
) -> tuple[torch.Tensor, StoreState, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    centres = torch.randn(CLUSTERS, WIDTH)

    def clustered(count: int) -> torch.Tensor:
        noise = torch.randn(1, count, heads, WIDTH)
        return l2_normalize(noise.mul_(0.5).add_(centres[torch.randint(CLUSTERS, (1, count, heads))]))

    store, k = Store(size, heads, WIDTH), clustered(size)
    state = store.add(store.start(1, k), k, k, torch.arange(size)[None], reuse=True)
    new = clustered(QUERIES)
    return clustered(queries), state, (new, new, torch.arange(size, size + QUERIES)[None])


def ours(name: str) -> Callable[..., Contestant]:
    def make(q: torch.Tensor, state: StoreState, new: tuple[torch.Tensor, ...]) -> Contestant:
        store, limit, scale = (
            Store(state.size, *q.shape[2:]),
            torch.full(q.shape[:2], state.size),
            torch.ones(q.shape[2]),
        )
        find = SEARCHES[name]()
        start = time.perf_counter()
        if name == "ivf":
            find(q[:, :1], state, NEAREST, limit[:, :1])
        build = time.perf_counter() - start

        @torch.no_grad()
        def search() -> torch.Tensor | None:
            found = find(q, state, NEAREST, limit)
            if name != "dense":
                return found.index
            attend(q, found, state, scale)
            return None

        held = state.clone()
        return Contestant(search, lambda: store.add(held, *new, reuse=True), build)

    return make


def keeping(q: torch.Tensor, state: StoreState, new: tuple[torch.Tensor, ...]) -> Contestant:
    """Searched and attended to, with a new state for each add while the old one stays."""
    limit, scale, store = (
        torch.full(q.shape[:2], state.size),
        torch.ones(q.shape[2]),
        Store(state.size, *q.shape[2:]),
    )

    @torch.no_grad()
    def search() -> torch.Tensor:
        found = exact(q, state, NEAREST, limit)
        attend(q, found, state, scale)
        return found.index

    return Contestant(search, lambda: store.add(state, *new))


def rounded(q: torch.Tensor, state: StoreState, new: tuple[torch.Tensor, ...]) -> Contestant:
    """Exact search in a store of int8 keys."""
    store = Store(state.size, *q.shape[2:], dtype="int8")
    held = store.add(store.start(1, q), state.k, state.v, state.position, reuse=True)
    limit = torch.full(q.shape[:2], state.size)
    return Contestant(lambda: exact(q, held, NEAREST, limit).index, lambda: store.add(held, *new, reuse=True))


def graph(q: torch.Tensor, state: StoreState, new: tuple[torch.Tensor, ...]) -> Contestant:
    """faiss's HNSW, which can add keys and not replace them."""
    import faiss

    heads = q.shape[2]
    if state.size * heads > PEER_KEYS:
        raise ImportError(f"not built: above {PEER_KEYS:,} keys in all")
    faiss.omp_set_num_threads(1)
    asked, keys, more = (
        [x[0, :, head].contiguous().numpy() for head in range(heads)] for x in (q, state.k, new[0])
    )
    graphs = [faiss.IndexHNSWFlat(WIDTH, 32, faiss.METRIC_INNER_PRODUCT) for _ in keys]
    start = time.perf_counter()
    for index, key in zip(graphs, keys, strict=True):
        index.hnsw.efSearch = 2 * NEAREST
        index.add(key)
    build = time.perf_counter() - start

    def search() -> torch.Tensor:
        found = [index.search(x, NEAREST)[1] for index, x in zip(graphs, asked, strict=True)]
        return torch.stack([torch.from_numpy(slots) for slots in found], 1)[None]

    return Contestant(search, lambda: [index.add(x) for index, x in zip(graphs, more, strict=True)], build)


def flat(q: torch.Tensor, state: StoreState, new: tuple[torch.Tensor, ...]) -> Contestant:
    import faiss

    faiss.omp_set_num_threads(1)
    asked, keys, more = (
        [x[0, :, head].contiguous().numpy() for head in range(x.shape[2])] for x in (q, state.k, new[0])
    )
    indices = [faiss.IndexFlatIP(WIDTH) for _ in keys]
    for index, key in zip(indices, keys, strict=True):
        index.add(key)
    spare = [faiss.IndexFlatIP(WIDTH) for _ in keys]

    def search() -> torch.Tensor:
        found = [index.search(x, NEAREST)[1] for index, x in zip(indices, asked, strict=True)]
        return torch.stack([torch.from_numpy(slots) for slots in found], 1)[None]

    return Contestant(search, lambda: [index.add(x) for index, x in zip(spare, more, strict=True)])


def peer(q: torch.Tensor, state: StoreState, new: tuple[torch.Tensor, ...]) -> Contestant:
    from memorizing_transformers_pytorch.knn_memory import KNNMemory

    heads = q.shape[2]
    if state.size * heads > PEER_KEYS:
        raise ImportError(f"not built: above {PEER_KEYS:,} keys in all")
    with tempfile.TemporaryDirectory() as folder:  # a file that is open stays when its name is gone
        memory = KNNMemory(WIDTH, state.size + 64 * QUERIES, heads, f"{folder}/memory", multiprocessing=False)
    pairs, more = (torch.stack([x, x], 3)[0].transpose(0, 1) for x in (state.k, new[0]))
    asked = q[0].transpose(0, 1)
    start = time.perf_counter()
    memory.add(pairs)
    build = time.perf_counter() - start

    graphs = [knn.index for knn in memory.knns]
    first = [graph.search(x.contiguous().numpy(), NEAREST)[1] for graph, x in zip(graphs, asked, strict=True)]
    slots = torch.stack([torch.from_numpy(found) for found in first], 1)[None]

    def search() -> torch.Tensor:
        memory.search(asked, NEAREST)
        return slots

    return Contestant(search, lambda: memory.add(more), build)


IMPLEMENTATIONS: dict[str, Callable[..., Contestant]] = {
    "exact": ours("exact"),
    "exact + attend, old state kept": keeping,
    "exact, int8": rounded,
    "ivf": ours("ivf"),
    "dense (attends)": ours("dense"),
    "faiss Flat": flat,
    "faiss HNSW": graph,
    PEER: peer,
}


def memory_mib(line: str) -> float:
    found = [text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith(line)]
    return int(found[0].split()[1]) / 2**10


def with_peak(call: Callable[[], torch.Tensor | None]) -> tuple[torch.Tensor | None, float | None]:
    """A call's result, and its largest memory over what was held before. Of the first call: what it keeps hides a
    second's.
    """
    if not sys.platform.startswith("linux"):
        return call(), None
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = memory_mib("VmRSS")
    result = call()
    return result, round(max(0.0, memory_mib("VmHWM") - before), 1)


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def compare(size: int, heads: int, rounds: int, only: Sequence[str], queries: int = QUERIES) -> list[dict]:
    q, state, new = problem(size, heads, queries)
    truth = exact(q, state, NEAREST, torch.full(q.shape[:2], size)).index
    rows, ready = [], {}
    for name, make in IMPLEMENTATIONS.items():
        if name not in only:
            continue
        row = {"entries": size, "heads": heads, "impl": name, "search_ms": None, "note": ""}
        rows.append(row)
        try:
            ready[name] = (made := make(q, state, new), row)
        except ImportError as error:
            row["note"] = str(error)
            continue
        row["build_s"] = round(made.build, 2)
        found, row["peak_mib"] = with_peak(made.search)
        row["recall"] = None if found is None else round(recall(found, truth), 4)
        made.add()
    for _ in range(rounds):
        for made, row in ready.values():
            for what in ("search", "add"):
                least = row.get(f"{what}_ms") or float("inf")
                row[f"{what}_ms"] = min(least, timed(getattr(made, what)))
    return rows


def opening(entries: int) -> dict:
    """A large store in a memory file: written, then opened."""
    config = ModelConfig(
        vocab_size=16,
        dim=8 * WIDTH,
        num_layers=1,
        heads=8,
        pattern=("knn",),
        ffn=8,
        window=512,
        persistent=0,
        knn={"size": entries},
    )
    model = Model(config).bfloat16()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.mem"
        write = timed(lambda: memfile.save(path, model, model.start(1)))
        size = path.stat().st_size
        opened = timed(lambda: memfile.load(path, model))
    return {
        "entries": entries,
        "gib": round(size / 2**30, 2),
        "save_ms": round(write),
        "open_ms": round(opened, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds, after one to warm up")
    parser.add_argument("--queries", type=int, default=QUERIES)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8192, 65536, 262144])
    parser.add_argument("--heads", type=int, nargs="+", default=[1, 8])
    parser.add_argument(
        "--file", type=int, default=2**20, help="entries of the store that is opened from disk"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "knn.json")
    parser.add_argument(
        "--only", nargs="+", default=list(IMPLEMENTATIONS), help="implementations to compare, by their names"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title=f"{options.queries} queries, top {NEAREST}, {WIDTH} wide, one core")
    for column in (
        "entries",
        "heads",
        "implementation",
        "search ms",
        "add ms",
        "build s",
        "recall",
        "peak MiB",
    ):
        table.add_column(column, justify="left" if column == "implementation" else "right")
    rows = []
    for heads in options.heads:
        for size in options.sizes:
            for row in compare(size, heads, options.rounds, options.only, options.queries):
                rows.append(row)
                case = (f"{row['entries']:,}", str(row["heads"]), row["impl"])
                if row["search_ms"] is None:
                    table.add_row(*case, row["note"])
                    continue
                shown = [row["search_ms"], row["add_ms"], row["build_s"], row["recall"], row["peak_mib"]]
                table.add_row(
                    *case,
                    *(
                        "" if x is None else f"{x:,.{n}f}"
                        for x, n in zip(shown, (1, 2, 1, 3, 0), strict=True)
                    ),
                )
            table.add_section()
            Console(stderr=True).print(f"{size:,} entries, {heads} heads: done")
    file = opening(options.file)
    Console().print(table)
    what = f"{file['entries']:,} pairs x 8 heads x {WIDTH} as a file of {file['gib']} GiB"
    print(f"{what}: saved in {file['save_ms']} ms, opened in {file['open_ms']} ms")
    versions = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    temporary = options.out.with_suffix(".tmp")
    temporary.write_text(
        json.dumps({"rounds": options.rounds, **versions, "rows": rows, "file": file}, indent=1)
    )
    os.replace(temporary, options.out)
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
