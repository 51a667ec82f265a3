"""Everything that is claimed of speed on a GPU, in one run on one GPU: prints a table, writes benchmarks/out/gpu.json.

    python benchmarks/gpu.py                         all of it that fits into the budget, what is claimed first
    python benchmarks/gpu.py --parts b e --budget 300
    python benchmarks/gpu.py --parts d a --add       beside what the file already holds of the other parts
    python benchmarks/gpu.py --tiny                  every path that runs on a CPU, in small

(a) the memory operator alone beside its FLOP floor, (b) the layer, forward + backward, beside other layers, (c)
training whole models (as `fit` does: forward and backward captured as a CUDA graph), (d) decoding, (e) training small
models whose rows go on where they were, beside rows that begin anew at every step, (f) reading one long text. Medians
of CUDA-event timings after warm-up. Each kind of row has a process of its own (gpu_rows.py), begun again after a crash
for the cases that are left; the file is written after every row. benchmarks/gpu_tune.py is for tuning.

About how long the parts take on an H200, estimated, not measured: building kernels 1.5 minutes; (b) 1 for the rows that
something is claimed of, 3 for the rest; (c) 2.5, most of it MAC; (e) 1; (f) 1.5; (d) 1.5; (a) 1. Rows of which
something is claimed come first whatever their part (`first` below): by this they fit into ten minutes. All of it does
not, where all peers are there: `--parts b e f c`, then `--parts d a --add`. benchmarks/speeds.py makes of (c) what
`remanence train --dry-run` estimates from.

Peers are measured where they can be imported: flash-linear-attention and titans-pytorch as packages; from a folder of
PYTHONPATH into which they were cloned, github.com/HuuYuLong/MomentumDeltaNet (kernels of its authors; fla's own layer
of that name still takes a reference path) and github.com/a1600012888/LaCT (large-chunk test-time training; needs fla as
well). LaCT's kernels try dozens of settings for every shape, which takes minutes:
`--parts b --only LaCT --limit 500 --add`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

BEGIN = time.perf_counter()
OURS, DEFAULT, TRANSFORMER, MATRIX = "remanence", "remanence, as it comes", "attention", "fla GatedDeltaNet"
OUT_OF_TIME = "out of time"
MOMENTUM, RESET = "MomentumDeltaNet, its authors' kernels", "rows begin anew"
LOST = 3
"""With what a process of gpu_rows.py ends that has lost the GPU, after the row that tells how."""
Row = dict[str, Any]


def operator_jobs() -> list[Row]:
    """The kernels' own configurations; depth 1; what has no kernel."""
    base = {"net": {}, "rule": {}, "hidden": 128, "chunk": 64, "width": 64, "heads": 16, "backend": "triton"}
    linear = {"depth": 1, "norm": False, "residual": False}
    deep = {
        f"hidden {hidden}, chunk {chunk}": {**base, "hidden": hidden, "chunk": chunk}
        for chunk in (64, 16)
        for hidden in (64, 128, 256)
    }
    one = {
        "depth 1": {**base, "net": {"depth": 1}},
        "depth 1, linear, token-exact": {**base, "net": linear, "rule": {"anchor": "token"}},
    }
    rest = {f"{name} (chunked)": {**fields, "backend": "chunked"} for name, fields in one.items()}
    rest["hidden 128, chunk 64 (chunked)"] = {**base, "backend": "chunked"}
    rest |= {
        f"depth {depth} (chunked)": {**base, "net": {"depth": depth}, "backend": "chunked"}
        for depth in (3, 4)
    }
    rest["4 heads of 256 (chunked)"] = {**base, "hidden": 512, "width": 256, "heads": 4, "backend": "chunked"}
    groups = {"operator": deep, "operator, one layer": one, "operator, without kernels": rest}
    return [job("a", name, "operator", list(cases), settings=cases) for name, cases in groups.items()]


def layer_jobs(tiny: bool) -> list[Row]:
    shapes = {
        "8x4K": (8, 4096),
        "1x32K": (1, 32768),
        "16x2K": (16, 2048),
        "1x128K": (1, 131072),
        "8x32K": (8, 32768),
    }
    if tiny:
        shapes = {"2x128": (2, 128), "1x192": (1, 192)}
    claimed = (OURS, MATRIX, DEFAULT, "remanence, linear, token-exact, momentum")
    others = (
        "flash attention (SDPA)",
        "fla DeltaNet",
        "remanence, expansion 1",
        "remanence, chunk 16",
        MOMENTUM,
        "titans-pytorch, all gradients at the first weights",
        "titans-pytorch, weights refreshed every 256 tokens",
        "fla MomentumDeltaNet, its reference path",
        "LaCT, torch.compile",
        "LaCT, its authors' kernels",
    )
    some = {
        "remanence, chunk 16": 1,
        "LaCT, torch.compile": 2,
        "LaCT, its authors' kernels": 2,
    }  # these build for every shape
    made = [job("b", name, "layer", list(shapes)[:2], True, name=name, shapes=shapes) for name in claimed]
    made += [
        job("b", name, "layer", list(shapes)[2:], name=name, shapes=shapes) for name in claimed if shapes
    ]
    return made + [
        job("b", name, "layer", list(shapes)[: some.get(name)], name=name, shapes=shapes) for name in others
    ]


def train_jobs(tiny: bool) -> list[Row]:
    lengths = {"64": 64, "128": 128} if tiny else {"4K": 4096, "16K": 16384, "32K": 32768}
    made = [
        job("c", name, "train", list(lengths), name != "mal", variant=name, lengths=lengths)
        for name in (TRANSFORMER, "lmm", "mac", "mag", "mal")
    ]
    for chunk in (64, 16):
        memory = {"net": "titans", "expansion": 2.0, "chunk": chunk}
        title, one = f"lmm, the paper's net, chunk {chunk}", list(lengths)[:1]
        made.append(job("c", title, "train", one, variant="lmm", lengths=lengths, memory=memory))
    return made


def decode_jobs(tiny: bool) -> list[Row]:
    batches, contexts = ((1, 2), {"64": 64, "1M": 2**20}) if tiny else ((1, 64), {"1K": 1024, "1M": 2**20})
    settings = {
        f"batch {batch}, context {name}": (batch, size)
        for batch in batches
        for name, size in contexts.items()
    }
    return [
        job("d", name, "decode", list(settings), variant=name, settings=settings)
        for name in ("lmm", "mag", "mal", "mac")
    ]


def carried_jobs() -> list[Row]:
    """What carrying costs: everything else is the same, the process too."""
    cases = [RESET, "rows carried", "rows carried, one begins anew"]
    return [job("e", name, "carried", cases, name == "mag", variant=name) for name in ("mag", "lmm", "mac")]


def read_jobs(tiny: bool) -> list[Row]:
    before = {"from 0 to 128": 0, "at 128": 128} if tiny else {"from 0 to 64K": 0, "at 64K": 65536}
    return [
        job("f", name, "read", list(before), True, variant=name, before=before)
        for name in (TRANSFORMER, "lmm", "mag", "mac")
    ]


def job(part: str, title: str, what: str, cases: list[str], first: bool = False, **fields: Any) -> Row:
    """A process's work: its place in the table, whether it goes before what nothing is claimed of, the fields for
    gpu_rows.py.
    """
    return {"part": part, "title": title, "first": first, "fields": {"what": what, "cases": cases, **fields}}


class Bench:
    def __init__(
        self, out: Path, rows: list[Row], deadline: float, limit: float, tiny: bool, only: str
    ) -> None:
        self.out, self.rows, self.deadline, self.limit, self.tiny, self.only = (
            out,
            rows,
            deadline,
            limit,
            tiny,
            only,
        )
        self.about: Row = {}
        self.waiting: Child | None = None

    def run_all(self, jobs: list[Row]) -> None:
        """While one job is measured, the next one's process imports what it needs, and then waits."""
        jobs = [{**todo, "fields": {**todo["fields"], "cases": self.chosen(todo)}} for todo in jobs]
        jobs = [todo for todo in jobs if todo["fields"]["cases"]]
        try:
            for todo, after in zip(jobs, [*jobs[1:], None], strict=True):
                self.run(todo, after)
        finally:
            if self.waiting:
                self.waiting.end(0)

    def chosen(self, todo: Row) -> list[str]:
        return [
            case for case in todo["fields"]["cases"] if self.only in f"{todo['part']} {todo['title']} {case}"
        ]

    def run(self, todo: Row, after: Row | None = None) -> None:
        """All cases of a job, in as many processes as it takes; a case that ends its process is a row that says so."""
        cases, child, self.waiting = todo["fields"]["cases"], self.waiting, None
        while cases:
            found, reason = 0, OUT_OF_TIME
            if time.perf_counter() < self.deadline - 5:
                child = child or Child({**todo["fields"], "cases": cases, "tiny": self.tiny})
                child.go()
                if after and self.waiting is None:
                    self.waiting = Child({**after["fields"], "tiny": self.tiny})
                found, reason = self.process(child, todo)
            if child:
                child.end(0)
            cases, child = cases[found:], None
            over = reason.startswith(OUT_OF_TIME)
            guilty = cases if over else cases[:1] if reason else []
            for case in guilty:
                self.add(todo, {"case": case, "note": reason})
            cases = cases[len(guilty) :]

    def process(self, child: Child, todo: Row) -> tuple[int, str]:
        """How many rows came, and why no more did; nothing if the last of them had said so itself."""
        end = min(self.deadline, time.perf_counter() + self.limit)
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=forward, args=(child.running, lines), daemon=True).start()
        found, reason, patience = 0, "", 0.0
        try:
            while True:
                line = lines.get(timeout=max(0.1, end - time.perf_counter()))
                if line is None:
                    patience = 10.0  # it has said all it had to
                    break
                kind, _, text = line.partition(" ")
                if kind == "ABOUT":
                    self.about = self.about or json.loads(text)
                elif kind == "ROW":
                    self.add(todo, json.loads(text))
                    found += 1
        except queue.Empty:
            reason = f"{OUT_OF_TIME} ({self.limit:.0f} s a process)" if end < self.deadline else OUT_OF_TIME
        finally:
            child.end(patience)
        if not reason and not (found and child.running.returncode == LOST):
            reason = f"the process ended with {child.running.returncode}: {child.complaint()}"
        return found, reason

    def add(self, todo: Row, row: Row) -> None:
        figures = {key: float(f"{x:.5g}") if isinstance(x, float) else x for key, x in row.items()}
        whole = {"part": todo["part"], "what": todo["title"], **figures}
        same = lambda old: all(old[key] == whole[key] for key in ("part", "what", "case"))
        self.rows[:] = [old for old in self.rows if not same(old)] + [whole]
        compare(self.rows)
        self.write()
        told = [
            f"{key} {whole[key]:,}"
            for key in ("forward_ms", "ms", "tokens_per_s", "peak_gib")
            if whole.get(key) is not None
        ]
        print(f"[{time.perf_counter() - BEGIN:4.0f} s]", f"({whole['part']})", whole["what"], "|", whole["case"], "|",
              ", ".join([*told, *filter(None, [whole.get("note")])]), flush=True)  # fmt: skip

    def write(self) -> None:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.out.with_suffix(".tmp")
        temporary.write_text(json.dumps({**self.about, "rows": self.rows}, indent=1))
        os.replace(temporary, self.out)


class Child:
    """A process of gpu_rows.py, which waits for `go` once it has imported what it needs."""

    def __init__(self, fields: Row) -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.running = begin(fields, self.errors)

    def go(self) -> None:
        with contextlib.suppress(OSError):  # it may have ended by itself, and then says so below
            if self.running.stdin:
                self.running.stdin.write("go\n")
                self.running.stdin.flush()

    def end(self, patience: float) -> None:
        """It and what it started."""
        try:
            self.running.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            os.killpg(self.running.pid, signal.SIGKILL)
            self.running.wait()

    def complaint(self) -> str:
        self.errors.seek(0)
        said = [line for line in self.errors.read().splitlines() if line.strip()] or ["it said nothing"]
        return said[-1].strip()[:160]


def begin(fields: Row, errors: Any) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(Path(__file__).with_name("gpu_rows.py")),
        json.dumps(fields),
    ]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=errors, text=True, start_new_session=True
    )


def forward(running: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    for line in running.stdout or ():
        lines.put(line)
    lines.put(None)


def compare(rows: list[Row]) -> None:
    """Each row's ratio: (a) time to the floor, else speed to that of another row of its part (`MEANS`); (b) ours to one
    more.
    """
    speeds = {(row["part"], row["what"], row["case"]): row["tokens_per_s"] for row in rows if row.get("ms")}
    for row in rows:
        part, what, case = row["part"], row["what"], row["case"]
        if not row.get("ms"):
            continue
        if part == "a":
            row["ratio"] = float(f"{row['ms'] / row['floor_ms']:.4g}")
            continue
        against = {
            "b": (OURS, case),
            "c": (TRANSFORMER, case),
            "e": (what, RESET),
            "f": (TRANSFORMER, case),
        }.get(part)
        if part == "d":
            batch = case.split(",")[0]
            against = next(
                key[1:] for key in speeds if key[:2] == (part, what) and key[2].split(",")[0] == batch
            )
        ratio = lambda other, row=row: float(f"{row['tokens_per_s'] / speeds[other]:.4g}")
        if (part, *against) in speeds:
            row["ratio"] = ratio((part, *against))
        if part == "b" and what.startswith(OURS) and (part, MATRIX, case) in speeds:
            row["ratio_matrix"] = ratio((part, MATRIX, case))


MEANS = {
    "a": "x floor",
    "b": f"x {OURS}",
    "c": "x Transformer++",
    "d": "x first context",
    "e": f"x {RESET}",
    "f": "x Transformer++",
}


def table(rows: list[Row], about: Row) -> Table:
    made = Table(title=", ".join(f"{key} {value}" for key, value in about.items()))
    for column in ("", "what", "case", "forward ms", "ms", "tokens/s", "ratio", "peak GiB", "by", "note"):
        made.add_column(
            column,
            justify="left" if column in ("", "what", "case", "by", "note") else "right",
            overflow="fold",
        )
    for part in sorted({row["part"] for row in rows}):
        for row in [row for row in rows if row["part"] == part]:
            figure = lambda key, form, row=row: format(row[key], form) if row.get(key) is not None else ""
            ratio = f"{row['ratio']:.3g} {MEANS[part]}" if row.get("ratio") else ""
            ratio += f", {row['ratio_matrix']:.3g} x {MATRIX}" if row.get("ratio_matrix") else ""
            figures = [
                figure("forward_ms", ",.3f"),
                figure("ms", ",.3f"),
                speed(row),
                ratio,
                figure("peak_gib", ".1f"),
            ]
            made.add_row(part, row["what"], row["case"], *figures, row.get("backend", ""), note(row))
        made.add_section()
    return made


def speed(row: Row) -> str:
    value = row.get("tokens_per_s")
    return "" if value is None else f"{value / 1e6:.3f} M" if value >= 1e5 else f"{value:,.0f}"


def note(row: Row) -> str:
    said = [row.get("note", "")]
    if row.get("floor_ms"):
        said.append(f"floor {row['floor_forward_ms']:.3g} / {row['floor_ms']:.3g} ms")
    if row.get("kernels"):
        said.append(
            "registers+spilled bytes: "
            + ", ".join(f"{name} {a}+{b}" for name, (a, b) in row["kernels"].items())
        )
    return "; ".join(filter(None, said))


def prepare(bench: Bench, parts: list[str]) -> None:
    """Compile the kernels of every configuration at once, so that no row waits for it."""
    end = min(bench.deadline, time.perf_counter() + 150)
    running = [
        Child({"what": "build", "cases": ["build"], "hidden": hidden, "chunk": chunk, "tiny": False})
        for hidden in (64, 128, 256)
        for chunk in (64, 16)
    ]
    # Matrices' kernels (every preset has them), and the peers', are built and tried at their first call: some take over
    # a minute.
    running += [
        Child({**todo["fields"], "cases": ["8x4K"], "tiny": False})
        for todo in layer_jobs(False)
        if todo["title"] == DEFAULT
        or ("b" in parts and (todo["first"] or todo["title"] in ("fla DeltaNet", MOMENTUM)))
    ]
    try:
        for each in running:
            each.go()
        for each in running:
            each.end(max(0.1, end - time.perf_counter()))  # what they say fits into the pipe
            for line in each.running.stdout or ():
                if line.startswith("ROW ") and json.loads(line[4:]).get("note"):
                    print("build:", json.loads(line[4:])["note"], flush=True)
            if each.running.returncode:
                print(f"build ended with {each.running.returncode}:", each.complaint(), flush=True)
    finally:
        for each in running:
            each.end(0)
    print(f"[{time.perf_counter() - BEGIN:4.0f} s] kernels built", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", default=list("befcda"), choices=list("abcdef"))
    parser.add_argument("--only", default="", help="only rows whose part, name and case contain this")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which everything is ended")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds of one process")
    parser.add_argument(
        "--no-build", action="store_true", help="build kernels as rows need them, not all of them beforehand"
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a CPU")
    parser.add_argument("--add", action="store_true", help="keep the file's other rows")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "gpu.json")
    given = parser.parse_args()
    kept = json.loads(given.out.read_text())["rows"] if given.add and given.out.exists() else []
    bench = Bench(given.out, kept, BEGIN + given.budget, given.limit, given.tiny, given.only)
    small = given.tiny
    jobs = {"a": operator_jobs(), "b": layer_jobs(small), "c": train_jobs(small), "d": decode_jobs(small)}
    jobs |= {"e": carried_jobs(), "f": read_jobs(small)}
    asked = sorted([todo for part in given.parts for todo in jobs[part]], key=lambda todo: not todo["first"])
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if not given.tiny and not given.only and not given.no_build:
            prepare(bench, given.parts)
        bench.run_all(asked)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    finally:
        console = Console()
        Console(width=console.width if console.is_terminal else 220).print(table(bench.rows, bench.about))
        if bench.rows:
            print(f"written: {given.out}; {time.perf_counter() - BEGIN:.0f} s")


if __name__ == "__main__":
    main()
