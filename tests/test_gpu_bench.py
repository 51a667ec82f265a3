"""The GPU benchmark's own bookkeeping, and every path of it that a CPU can take."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return __import__("gpu")


def test_a_process_that_dies_costs_one_row(gpu, monkeypatch, tmp_path):
    """The second case kills its process, the third loses the GPU and says so, the fifth never ends."""
    child = """
import json, os, sys, time
for case in json.loads(sys.argv[1])["cases"]:
    if case == "2":
        sys.stderr.write("something bad\\n"); os.abort()
    if case == "5":
        time.sleep(60)
    print("ROW " + json.dumps({"case": case, "ms": 2.0, "tokens_per_s": 1.0}), flush=True)
    if case == "3":
        sys.exit(3)
"""
    start = lambda fields, errors: subprocess.Popen(
        [sys.executable, "-c", child, json.dumps(fields)],
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        start_new_session=True,
    )
    monkeypatch.setattr(gpu, "begin", start)
    bench = gpu.Bench(tmp_path / "gpu.json", [], gpu.time.perf_counter() + 100, 3.0, True, "")
    bench.run(gpu.job("b", gpu.OURS, "layer", list("123456")))
    rows = {row["case"]: row for row in json.loads((tmp_path / "gpu.json").read_text())["rows"]}
    assert list(rows) == list("123456")
    assert [case for case in rows if rows[case].get("ms")] == ["1", "3", "4"]
    assert rows["1"]["ratio"] == 1.0
    assert "something bad" in rows["2"]["note"]
    assert rows["5"]["note"] == rows["6"]["note"] == "out of time (3 s a process)"
    gpu.Console(file=open("/dev/null", "w")).print(gpu.table(bench.rows, {}))  # noqa: SIM115


def test_the_floor_is_that_of_the_design(gpu):
    """Forward, 8 rows of 8,192 tokens, 16 heads of 64, chunk 64: counted by hand from ops/closed_form."""
    rows = __import__("gpu_rows")
    count = lambda net, **rule: rows.flops(net, rows.Rule(**rule), 64, 64) * 8 * 16 * 8192
    C, d = 64, 64
    for h in (64, 256):
        chunk = 22 * C * d * h + 4 * C * C * (d + h) + 2 * C**3
        assert count(rows.MLP(expansion=h / 64)) == chunk * (8 * 16 * 8192 / C)
    assert round(1e3 * count(rows.MLP(expansion=1.0)) / rows.PEAK, 2) == 0.17


def test_rows_are_compared_with_what_their_part_says(gpu):
    row = lambda part, what, case, speed: {
        "part": part,
        "what": what,
        "case": case,
        "ms": 1.0,
        "tokens_per_s": speed,
    }
    rows = [
        row("b", gpu.OURS, "8x4K", 2.0),
        row("b", gpu.MATRIX, "8x4K", 4.0),
        row("b", gpu.DEFAULT, "8x4K", 3.0),
        row("b", gpu.DEFAULT, "1x32K", 3.0),  # nothing to compare with
        row("c", "mag", "4K", 5.0),
        row("c", gpu.TRANSFORMER, "4K", 10.0),
        row("d", "mag", "batch 1, context 1K", 10.0),
        row("d", "mag", "batch 1, context 1M", 9.0),
        row("e", "mag", "rows carried", 19.0),
        row("e", "mag", gpu.RESET, 20.0),
        row("e", "lmm", gpu.RESET, 40.0),
        row("f", gpu.TRANSFORMER, "at 64K", 8.0),
        row("f", "mag", "at 64K", 12.0),
    ]
    gpu.compare(rows)
    assert [row.get("ratio") for row in rows] == [
        1.0,
        2.0,
        1.5,
        None,
        0.5,
        1.0,
        1.0,
        0.9,
        0.95,
        1.0,
        1.0,
        1.0,
        1.5,
    ]
    assert [row.get("ratio_matrix") for row in rows[:4]] == [0.5, None, 0.75, None]


def test_every_layer_is_known_and_a_peer_that_is_not_there_says_so(gpu, monkeypatch):
    rows = __import__("gpu_rows")
    assert {todo["fields"]["name"] for todo in gpu.layer_jobs(False)} == set(rows.LAYERS)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if "peers" not in place])
    for name in (gpu.MOMENTUM, "LaCT, its authors' kernels"):
        assert "not installed (no folder" in rows.attempt(lambda name=name: rows.LAYERS[name](64, 2))["note"]


def test_what_is_claimed_comes_first(gpu, monkeypatch, tmp_path):
    """And every other job after it, each begun while the one before it is measured."""
    began, order = [], []
    monkeypatch.setattr(gpu, "begin", lambda fields, errors: began.append(fields) or idle())

    def measured(self, child, todo):
        order.append((todo["part"], todo["title"], len(began)))
        return len(todo["fields"]["cases"]), ""

    monkeypatch.setattr(gpu.Bench, "process", measured)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--tiny", "--out", str(tmp_path / "gpu.json")])
    gpu.main()
    titles = [title for _, title, _ in order]
    claimed = "bbbb" + "e" + "ffff" + "cccc"
    assert "".join(part for part, *_ in order[: len(claimed)]) == claimed
    assert {part for part, *_ in order[len(claimed) :]} == set("bceda")
    assert titles[:4] == [gpu.OURS, gpu.MATRIX, gpu.DEFAULT, "remanence, linear, token-exact, momentum"]
    assert [count for *_, count in order] == [*range(2, len(order) + 1), len(order)]


def idle():
    return subprocess.Popen(["true"], stdout=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.exhaustive
def test_every_part_runs_in_small(gpu, tmp_path):
    out = tmp_path / "gpu.json"
    command = [sys.executable, str(BENCH / "gpu.py"), "--tiny", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=BENCH.parent, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    rows = json.loads(out.read_text())["rows"]
    assert {row["part"] for row in rows} == set("abcdef")
    for row in rows:
        assert row.get("ms") or "needs a GPU" in row["note"] or "not installed" in row["note"], row
    table = __import__("speeds").speeds({"device": "NVIDIA H200", "rows": rows}, {})
    assert {row["variant"] for row in table["rows"]} == {gpu.TRANSFORMER, "lmm", "mag", "mal", "mac"}


@pytest.mark.slow
def test_the_search_s_runs_in_small(tmp_path):
    pytest.importorskip("triton")
    out = tmp_path / "knn.json"
    command = [sys.executable, str(BENCH / "knn_gpu.py"), "--tiny", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=BENCH.parent, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    rows = json.loads(out.read_text())["rows"]
    assert {(row["queries"], row["dtype"]) for row in rows} == {
        (3, "bfloat16"),
        (3, "float32"),
        (1, "bfloat16"),
        (1, "float32"),
    }
    assert all(row["right"] and row["same_slots"] == 1.0 for row in rows)


def test_every_setting_that_the_search_is_tuned_by_is_there(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    tuned = __import__("knn_gpu")
    for changes in tuned.SETTINGS:
        with tuned.settings(changes):
            for name, value in changes.items():
                assert value in (getattr(tuned.nearest, name, None), getattr(tuned.launch, name, None))
