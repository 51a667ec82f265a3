"""Exact kNN search on one GPU: the kernels beside torch's matmul + topk, and beside `exact` without kernels.

    python benchmarks/knn_gpu.py                8K to 1M keys, 8 heads of 64, the 32 nearest of 512 queries and of 1
    python benchmarks/knn_gpu.py --profile           with the time of each step of the kernels' search
    python benchmarks/knn_gpu.py --tune         with the kernels' time under other settings (ops/triton/nearest.py)
    python benchmarks/knn_gpu.py --tiny              every path that runs on a CPU, interpreted, in small

Implementations take turns; times are medians of CUDA-event timings after warm-up. "graph": the same as a captured CUDA
graph, as in decoding, without the host's time for launches. Before they are timed, what the kernels find is compared
with all scores in float32: the largest difference of a score, and the share of slots that are the same (entries closer
than rounding may change places). torch's own scores of bfloat16 are rounded to bfloat16: not exact, but half as much to
write. A table and JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from remanence.memory.search import SEARCHES, SearchResult, exact, l2_normalize
from remanence.memory.store import Store, StoreState
from remanence.ops.triton import dispatch, launch, nearest

KERNELS, PLAIN, MATMUL = "kernels", "exact, no kernels", "matmul + topk"
CLUSTERS, SCORES = 1024, 2**31
TOLERANCE = 2e-6
"""How far a score of unit vectors may be off: some float32 roundings."""
SETTINGS: list[dict[str, Any]] = [
    {},
    {"KEYS": (2**12, 32)},
    {"KEYS": (2**14, 128)},
    {"QUERIES": (2**14, 128)},
    {"QUERIES": (2**14, 128), "KEYS": (2**14, 128)},
    {"QUERIES": (2**13, 64), "KEYS": (2**14, 128)},
    {"TILES_PER_PROGRAM": 4},
    {"TILES_PER_PROGRAM": 8},
    {"TILES_PER_PROGRAM": 32},
    {"GROUPS": (16, 16)},
    {"GROUPS": (32, 32)},
    {"GROUPS": (64, 64)},
    {"CANDIDATES": 2**12},
    {"CANDIDATES": 2**14},
    {"MAX_SCORES": 2**25},
    {"MAX_SCORES": 2**27},
    {"STAGES": {**nearest.STAGES, "group_max_kernel": 2}},
    {"STAGES": {**nearest.STAGES, "group_max_kernel": 4}},
    {"PRECISION": "ieee"},
]
Call = Callable[[], Any]


class Case:
    """A store full of keys that lie in clusters, as a model's do, and queries near them."""

    def __init__(
        self, size: int, queries: int, heads: int, width: int, k: int, dtype: torch.dtype, device: str
    ) -> None:
        torch.manual_seed(0)
        centres = torch.randn(CLUSTERS, width, device=device)

        def clustered(count: int) -> torch.Tensor:
            noise = torch.randn(1, count, heads, width, device=device)
            return l2_normalize(
                noise.mul_(0.5).add_(centres[torch.randint(CLUSTERS, (1, count, heads), device=device)])
            ).to(dtype)

        store, keys = Store(size, heads, width), clustered(size)
        self.state: StoreState = store.add(
            store.start(1, keys), keys, keys, torch.arange(size, device=device)[None], reuse=True
        )
        self.q, self.k = clustered(queries), k
        self.limit = torch.full((1, queries), size, device=device)

    def kernels(self) -> SearchResult:
        return SEARCHES["triton"]()(self.q, self.state, self.k, self.limit)

    def plain(self) -> SearchResult:
        with without_kernels():
            return exact(self.q, self.state, self.k, self.limit)

    def matmul(self) -> list[torch.Tensor]:
        """In as many blocks of queries as memory asks for; limits and empty slots are not looked at."""
        keys = self.state.k.permute(0, 2, 3, 1)
        block = max(1, SCORES // (keys.shape[1] * keys.shape[3]))
        return [(q.transpose(1, 2) @ keys).topk(self.k).indices for q in self.q.split(block, 1)]

    def compare(self) -> tuple[float, float]:
        """The kernels' largest difference of a score from all scores in float32, sorted, and the share of equal
        slots.
        """
        found, worst, same = self.kernels(), 0.0, 0.0
        for head in range(self.q.shape[2]):
            score, slot = (self.q[0, :, head].float() @ self.state.k[0, :, head].float().T).topk(self.k)
            worst = max(worst, float((score - found.score[0, :, head]).abs().max()))
            hit = (slot.unsqueeze(-1) == found.index[0, :, head].unsqueeze(-2)).any(-1)
            same += float(hit.float().mean()) / self.q.shape[2]
        return worst, same


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    before, dispatch.KERNELS = dispatch.KERNELS, ()
    try:
        yield
    finally:
        dispatch.KERNELS = before


@contextlib.contextmanager
def settings(changes: dict[str, Any]) -> Iterator[None]:
    with contextlib.ExitStack() as changed:
        for name, value in changes.items():
            changed.enter_context(
                mock.patch.object(nearest if hasattr(nearest, name) else launch, name, value)
            )
        yield


def on_gpu() -> bool:
    return torch.cuda.is_available() and not launch.interpreted()


def timed(call: Call, count: int) -> float:
    """Milliseconds a call, of so many in a row."""
    if not on_gpu():
        begin = time.perf_counter()
        for _ in range(count):
            call()
        return 1e3 * (time.perf_counter() - begin) / count
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(count):
        call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / count


def medians(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Each called in turn; what is quick, several times a round."""
    counts = {}
    for name, call in calls.items():
        timed(call, 2)  # builds kernels, fills caches
        counts[name] = max(1, min(20, int(10.0 / timed(call, 1))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(timed(call, counts[name]))
    return {name: statistics.median(each) for name, each in times.items()}


def captured(call: Call) -> Call:
    """A CUDA graph of it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def peak_mib(call: Call) -> float:
    """What a search needs beside its store."""
    if not on_gpu():
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(case: Case, rounds: int) -> dict[str, Any]:
    worst, same = case.compare()
    calls: dict[str, Call] = {KERNELS: case.kernels, PLAIN: case.plain, MATMUL: case.matmul}
    if on_gpu() and case.q.shape[1] == 1:
        for name, call in list(calls.items()):
            with contextlib.suppress(RuntimeError):  # what waits for the device cannot be captured
                calls[f"{name}, graph"] = captured(call)
    return {
        "ms": medians(calls, rounds),
        "peak_mib": {name: peak_mib(call) for name, call in calls.items() if "graph" not in name},
        "largest_difference": worst,
        "same_slots": same,
    }


def tune(case: Case, rounds: int) -> dict[str, float | str]:
    """The kernels alone, under each of the settings; or why not."""
    found: dict[str, float | str] = {}
    for changes in SETTINGS:
        name = ", ".join(f"{key} {value}" for key, value in changes.items()) or "as it is"
        if "PRECISION" in changes and case.q.dtype != torch.float32:
            continue
        try:
            with settings(changes):
                found[name] = medians({name: case.kernels}, rounds)[name]
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[-1][:80]}"
    return found


def profile(case: Case) -> str:
    case.kernels()
    device = on_gpu()
    with torch.profiler.profile() as watch:
        for _ in range(3):
            case.kernels()
        if device:
            torch.cuda.synchronize()
    return watch.key_averages().table(
        sort_by="device_time_total" if device else "cpu_time_total", row_limit=16, max_name_column_width=60
    )


def row_of(fields: dict[str, Any]) -> list[str]:
    names, ms, mib = (KERNELS, PLAIN, MATMUL), fields["ms"], fields["peak_mib"]
    graphs = [f"{ms[graph]:.3f}" if (graph := f"{name}, graph") in ms else "-" for name in names]
    return [
        *(f"{fields['keys']:,}", str(fields["queries"]), fields["dtype"]),
        *(f"{ms[name]:.3f}" for name in names),
        *(f"{ms[name] / ms[KERNELS]:.2f}" for name in names[1:]),
        " / ".join(graphs),
        " / ".join(f"{mib[name]:,.0f}" for name in names),
        f"{fields['largest_difference']:.0e}, {fields['same_slots']:.4f}"
        + ("" if fields["right"] else "  WRONG"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[2**13, 2**16, 2**18, 2**20])
    parser.add_argument("--queries", type=int, nargs="+", default=[512, 1])
    parser.add_argument(
        "--dtypes", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"]
    )
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--nearest", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "knn_gpu.json")
    options = parser.parse_args()
    if options.tiny:
        os.environ["TRITON_INTERPRET"], launch.INTERPRETED = "1", True  # before the kernels are imported
        options.sizes, options.queries, options.heads, options.width, options.nearest, options.rounds = (
            [300],
            [3, 1],
            2,
            16,
            4,
            1,
        )
    elif not torch.cuda.is_available():
        sys.exit("needs a GPU; --tiny runs without one")
    device = "cpu" if options.tiny else "cuda"
    if launch.kernels() is None:
        sys.exit("needs Triton: pip install 'remanence[triton]'")
    about = {"torch": torch.__version__, "device": "cpu" if options.tiny else torch.cuda.get_device_name()}
    about |= {name: getattr(options, name) for name in ("heads", "width", "nearest", "rounds")}
    table = Table(
        title=f"the {options.nearest} nearest, {options.heads} heads of {options.width}, {about['device']}, ms"
    )
    for column in (
        "keys",
        "queries",
        "dtype",
        KERNELS,
        PLAIN,
        MATMUL,
        f"{PLAIN} / {KERNELS}",
        f"{MATMUL} / {KERNELS}",
    ):
        table.add_column(column, justify="right")
    for column in ("graph: each", "MiB: each", "score off, same slots"):
        table.add_column(column, justify="right")
    rows: list[dict[str, Any]] = []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for size in options.sizes:
        for queries in options.queries:
            for dtype in options.dtypes:
                case = Case(
                    size,
                    queries,
                    options.heads,
                    options.width,
                    options.nearest,
                    getattr(torch, dtype),
                    device,
                )
                fields = {"keys": size, "queries": queries, "dtype": dtype, **measure(case, options.rounds)}
                fields["right"] = fields["largest_difference"] <= TOLERANCE and fields["same_slots"] >= 0.999
                if options.tune:
                    fields["tune"] = tune(case, max(1, options.rounds // 3))
                rows.append(fields)
                print(*row_of(fields), sep="  ", file=sys.stderr, flush=True)
                for name, ms in fields.get("tune", {}).items():
                    print(
                        f"    {ms if isinstance(ms, str) else f'{ms:8.3f}'}  {name}",
                        file=sys.stderr,
                        flush=True,
                    )
                if options.profile:
                    print(profile(case), flush=True)
                table.add_row(*row_of(fields))
                options.out.write_text(json.dumps({**about, "rows": rows}, indent=1))
                del case
    Console(width=200).print(table)
    print(f"written: {options.out}")
    if not all(fields["right"] for fields in rows):
        sys.exit("the kernels found something else than all scores, sorted")


if __name__ == "__main__":
    main()
