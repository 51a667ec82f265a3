"""Everything that is claimed of speed on a GPU, in one run on one GPU: prints a table, writes benchmarks/out/gpu.json.

    python benchmarks/gpu.py                         all of it; peers are measured where they can be imported
    python benchmarks/gpu.py --parts a b --budget 500
    python benchmarks/gpu.py --parts c d --add       beside what the file already holds of the other parts
    python benchmarks/gpu.py --tiny                  every path that runs on a CPU, in small

(a) the memory operator alone beside its FLOP floor, (b) the layer, forward + backward, beside other layers, (c) training whole
models, (d) decoding. Medians of CUDA-event timings after warm-up. Each kind of row has a process of its own (gpu_rows.py), begun
again after a crash for the cases that are left; the file is written after every row. benchmarks/gpu_tune.py is for tuning.
"""

from __future__ import annotations

import argparse
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
OURS, TRANSFORMER = "remanence", "attention"
OUT_OF_TIME = "out of time"
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
    rest |= {f"depth {depth} (chunked)": {**base, "net": {"depth": depth}, "backend": "chunked"} for depth in (3, 4)}
    rest |= {f"depth {depth} (compiled)": {**base, "net": {"depth": depth}, "backend": "compiled"} for depth in (3, 4)}
    rest["4 heads of 256 (chunked)"] = {**base, "hidden": 512, "width": 256, "heads": 4, "backend": "chunked"}
    groups = {"operator": deep, "operator, one layer": one, "operator, without kernels": rest}
    return [job("a", name, "operator", list(cases), settings=cases) for name, cases in groups.items()]


def layer_jobs(tiny: bool) -> list[Row]:
    shapes = {"16x2K": (16, 2048), "8x4K": (8, 4096), "1x32K": (1, 32768), "1x128K": (1, 131072), "8x32K": (8, 32768)}
    if tiny:
        shapes = {"2x128": (2, 128), "1x192": (1, 192)}
    short = list(shapes)[1:2]
    names = {
        OURS: None,
        "flash attention (SDPA)": None,
        "fla DeltaNet": None,
        "fla GatedDeltaNet": None,
        "remanence, expansion 1": None,
        "remanence, linear, token-exact, momentum": None,
        "remanence, chunk 16": short,
        "titans-pytorch, all gradients at the first weights": None,
        "titans-pytorch, weights refreshed every 256 tokens": None,
        "fla MomentumDeltaNet": None,
    }
    return [job("b", name, "layer", some or list(shapes), name=name, shapes=shapes) for name, some in names.items()]


def train_jobs(tiny: bool) -> list[Row]:
    lengths = {"64": 64, "128": 128} if tiny else {"2K": 2048, "4K": 4096, "16K": 16384, "32K": 32768}
    return [
        job("c", name, "train", list(lengths), variant=name, lengths=lengths)
        for name in (TRANSFORMER, "lmm", "mag", "mal", "mac")
    ]


def decode_jobs(tiny: bool) -> list[Row]:
    batches, contexts = ((1, 2), {"64": 64, "1M": 2**20}) if tiny else ((1, 64), {"1K": 1024, "1M": 2**20})
    settings = {f"batch {batch}, context {name}": (batch, size) for batch in batches for name, size in contexts.items()}
    return [job("d", name, "decode", list(settings), variant=name, settings=settings) for name in ("lmm", "mag", "mal", "mac")]


def job(part: str, title: str, what: str, cases: list[str], **fields: Any) -> Row:
    """A process's work: its place in the table, and the fields for gpu_rows.py."""
    return {"part": part, "title": title, "fields": {"what": what, "cases": cases, **fields}}


class Bench:
    def __init__(self, out: Path, rows: list[Row], deadline: float, limit: float, tiny: bool, only: str) -> None:
        self.out, self.rows, self.deadline, self.limit, self.tiny, self.only = out, rows, deadline, limit, tiny, only
        self.about: Row = {}

    def run(self, todo: Row) -> None:
        """All cases of a job, in as many processes as it takes; a case that ends its process is a row that says so."""
        cases = [case for case in todo["fields"]["cases"] if self.only in f"{todo['part']} {todo['title']} {case}"]
        while cases:
            found, reason = 0, OUT_OF_TIME
            if time.perf_counter() < self.deadline - 5:
                found, reason = self.process({**todo["fields"], "cases": cases, "tiny": self.tiny}, todo)
            cases = cases[found:]
            over = reason.startswith(OUT_OF_TIME)
            guilty = cases if over else cases[:1] if reason else []
            for case in guilty:
                self.add(todo, {"case": case, "note": reason})
            cases = cases[len(guilty) :]

    def process(self, fields: Row, todo: Row) -> tuple[int, str]:
        """How many rows came, and why no more did; nothing if the last of them had said so itself."""
        end = min(self.deadline, time.perf_counter() + self.limit)
        lines: queue.Queue[str | None] = queue.Queue()
        with tempfile.TemporaryFile("w+") as errors:
            running = begin(fields, errors)
            threading.Thread(target=forward, args=(running, lines), daemon=True).start()
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
                stop(running, patience)
            if not reason and not (found and running.returncode == LOST):
                errors.seek(0)
                said = [line for line in errors.read().splitlines() if line.strip()] or ["it said nothing"]
                reason = f"the process ended with {running.returncode}: {said[-1].strip()[:110]}"
        return found, reason

    def add(self, todo: Row, row: Row) -> None:
        figures = {key: float(f"{x:.5g}") if isinstance(x, float) else x for key, x in row.items()}
        whole = {"part": todo["part"], "what": todo["title"], **figures}
        same = lambda old: all(old[key] == whole[key] for key in ("part", "what", "case"))
        self.rows[:] = [old for old in self.rows if not same(old)] + [whole]
        compare(self.rows)
        self.write()
        told = [f"{key} {whole[key]:,}" for key in ("forward_ms", "ms", "tokens_per_s", "peak_gib") if whole.get(key) is not None]
        print(f"[{time.perf_counter() - BEGIN:4.0f} s]", f"({whole['part']})", whole["what"], "|", whole["case"], "|",
              ", ".join([*told, *filter(None, [whole.get("note")])]), flush=True)  # fmt: skip

    def write(self) -> None:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.out.with_suffix(".tmp")
        temporary.write_text(json.dumps({**self.about, "rows": self.rows}, indent=1))
        os.replace(temporary, self.out)


def begin(fields: Row, errors: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("gpu_rows.py")), json.dumps(fields)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)


def forward(running: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    for line in running.stdout or ():
        lines.put(line)
    lines.put(None)


def stop(running: subprocess.Popen[str], patience: float) -> None:
    """It and what it started."""
    try:
        running.wait(timeout=patience)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()


def compare(rows: list[Row]) -> None:
    """Each row's ratio: (a) time to the floor; (b) speed to ours; (c) to the Transformer's; (d) to that at the first context."""
    for row in rows:
        if not row.get("ms"):
            continue
        if row["part"] == "a":
            row["ratio"] = float(f"{row['ms'] / row['floor_ms']:.4g}")
            continue
        peer, case = {"b": OURS, "c": TRANSFORMER}.get(row["part"], row["what"]), row["case"]
        against = [other for other in rows if (other["part"], other["what"]) == (row["part"], peer) and other.get("ms")]
        if row["part"] == "d":
            against = [other for other in against if other["case"].split(",")[0] == case.split(",")[0]][:1]
        else:
            against = [other for other in against if other["case"] == case]
        if against:
            row["ratio"] = float(f"{row['tokens_per_s'] / against[0]['tokens_per_s']:.4g}")


MEANS = {
    "a": "x floor",
    "b": f"x {OURS}",
    "c": "x Transformer++",
    "d": "x first context",
}


def table(rows: list[Row], about: Row) -> Table:
    made = Table(title=", ".join(f"{key} {value}" for key, value in about.items()))
    for column in ("", "what", "case", "forward ms", "ms", "tokens/s", "ratio", "peak GiB", "by", "note"):
        made.add_column(column, justify="left" if column in ("", "what", "case", "by", "note") else "right", overflow="fold")
    for part in sorted({row["part"] for row in rows}):
        for row in [row for row in rows if row["part"] == part]:
            figure = lambda key, form, row=row: format(row[key], form) if row.get(key) is not None else ""
            ratio = f"{row['ratio']:.3g} {MEANS[part]}" if row.get("ratio") else ""
            figures = [figure("forward_ms", ",.3f"), figure("ms", ",.3f"), speed(row), ratio, figure("peak_gib", ".1f")]
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
        said.append("registers+spilled bytes: " + ", ".join(f"{name} {a}+{b}" for name, (a, b) in row["kernels"].items()))
    return "; ".join(filter(None, said))


def prepare(bench: Bench, parts: list[str]) -> None:
    """Compile the kernels of every configuration at once, so that no row waits for it."""
    end = min(bench.deadline, time.perf_counter() + 150)
    with tempfile.TemporaryFile("w+") as said:
        running = [
            begin({"what": "build", "cases": ["build"], "hidden": hidden, "chunk": chunk, "tiny": False}, said)
            for hidden in (64, 128, 256)
            for chunk in (64, 16)
        ]
        # The peers build and try theirs at their first call, which takes some of them over a minute.
        running += [
            begin({**todo["fields"], "cases": ["8x4K"], "tiny": False}, said)
            for todo in layer_jobs(False)
            if "b" in parts and todo["title"].startswith("fla")
        ]
        try:
            for each in running:
                stop(each, max(0.1, end - time.perf_counter()))  # what they say fits into the pipe
                for line in each.stdout or ():
                    if line.startswith("ROW ") and json.loads(line[4:]).get("note"):
                        print("build:", json.loads(line[4:])["note"], flush=True)
                if each.returncode:
                    said.seek(0)
                    print(
                        f"build ended with {each.returncode}:", (said.read().strip().splitlines() or [""])[-1][:160], flush=True
                    )
        finally:
            for each in running:
                stop(each, 0)
    print(f"[{time.perf_counter() - BEGIN:4.0f} s] kernels built", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list("abcd"), choices=list("abcd"))
    parser.add_argument("--only", default="", help="only rows whose part, name and case contain this")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which everything is ended")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds of one process")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a CPU")
    parser.add_argument("--add", action="store_true", help="keep the file's other rows")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "gpu.json")
    given = parser.parse_args()
    kept = json.loads(given.out.read_text())["rows"] if given.add and given.out.exists() else []
    bench = Bench(given.out, kept, BEGIN + given.budget, given.limit, given.tiny, given.only)
    jobs = {"a": operator_jobs(), "b": layer_jobs(given.tiny), "c": train_jobs(given.tiny), "d": decode_jobs(given.tiny)}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if not given.tiny and not given.only:
            prepare(bench, given.parts)
        for part in given.parts:
            for todo in jobs[part]:
                bench.run(todo)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    finally:
        console = Console()
        Console(width=console.width if console.is_terminal else 220).print(table(bench.rows, bench.about))
        if bench.rows:
            print(f"written: {given.out}; {time.perf_counter() - BEGIN:.0f} s")


if __name__ == "__main__":
    main()
