"""experiments/dna/run.py in small: what it splits, in which order it runs, and that what is done is not done again."""

import gzip
import importlib
import json
import lzma
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from remanence.dna.alphabet import BASES
from remanence.dna.labelled import read_labelled
from remanence.model import parameters

ROOT = Path(__file__).parent.parent


@pytest.fixture
def bench():
    return importlib.import_module("experiments.dna.run")


@pytest.fixture
def data(tmp_path):
    """A genome, a task in GUE's layout and a table, as the benchmark finds them."""
    rng, folder = np.random.default_rng(0), tmp_path / "data"

    def table(path, count):
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = ["".join(BASES[base] for base in rng.integers(4, size=20)) for _ in range(count)]
        lines = ["sequence,label", *(f"{row},{number % 2}" for number, row in enumerate(rows))]
        path.write_bytes(lzma.compress("\n".join(lines).encode()))

    for split, count in (("train", 40), ("dev", 12), ("test", 12)):
        table(folder / "gue" / "tf" / "0" / f"{split}.csv.xz", count)
    table(folder / "other" / "enhancers.test.csv.xz", 50)
    bases = "".join(BASES[base] for base in rng.integers(4, size=9000))
    (folder / "x.fna.gz").write_bytes(gzip.compress(f">x\n{bases}\n".encode()))
    return folder


def test_tables_are_split_again_without_overlap(bench, data, tmp_path):
    bench.prepare(data, tmp_path / "work", None)
    tasks = bench.tasks_of(data, tmp_path / "work")
    assert list(tasks) == ["tf/0", "enhancers"]
    parts = [read_labelled("x", str(tasks["enhancers"]), split) for split in ("train", "dev", "test")]
    assert [len(part.labels) for part in parts] == [40, 5, 5]
    rows = [sequence.tobytes() for part in parts for sequence in part.sequences]
    assert len(set(rows)) == 50
    assert (tmp_path / "work" / "train.fna").read_text().splitlines()[1] == "".join(
        BASES[base] for base in bench.genome_of(data)[:7200]
    )


def test_all_architectures_have_as_many_parameters(bench):
    args = Namespace(changes=[], work=Path("nowhere"), pretrain_steps=10)
    counts = [parameters(bench.pretraining(name, args).model) for name in bench.RUNS]
    assert max(counts) < 1.02 * min(counts) and 2e6 < counts[0] < 6e6


def test_means_of_parts(bench):
    bits = np.arange(99.0)  # of a hundred bases, all but the first
    found = bench.held_out({"x": bits}, 100)["bits"]["x"]
    assert found["trained"] == bits[:80].mean() and found["held out"] == bits[80:].mean()
    assert found["first quarter"] == bits[80:85].mean() and found["last quarter"] == bits[94:].mean()
    assert bench.stretches(bits, 40) == [19.5, 59.5, 89.0]


def test_it_runs_and_what_is_there_is_not_run_again(bench, data, tmp_path, monkeypatch, capsys):
    tiny = {**bench.TINY, "most": 9000, "runs": ["lmm"]}
    monkeypatch.setattr(bench, "TINY", tiny)
    places = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "rows.json")]

    def run(*more):
        monkeypatch.setattr(sys, "argv", ["dna.py", str(data), *places, "--tiny", *more])
        bench.main()
        return capsys.readouterr().out

    run()
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    kinds = [(row["what"]["kind"], row["what"]["run"], row["what"].get("mode")) for row in rows]
    assert [kind for kind in kinds if kind[0] == "genome"] == [
        ("genome", "lmm", "on"),
        ("genome", "markov", None),
        *[("genome", "lmm", mode) for mode in ("off", "frozen", "fresh")],
    ]
    tested = [row for row in rows if row["what"]["kind"] == "classes"]
    begun = [(row["what"]["task"], row["what"]["begin"]) for row in tested]
    assert begun[:2] == [("tf/0", "scratch"), ("tf/0", "genome")]
    assert set(begun) == {(task, begin) for task in ("tf/0", "enhancers") for begin in ("scratch", "genome")}
    assert all(np.sum(row["test"]["on"]["confusion"]) in (12, 5) for row in tested)
    assert run() == "" and json.loads((tmp_path / "rows.json").read_text())["rows"] == rows
    told = run("--table", "--plot", str(tmp_path / "x.png"))
    assert "not comparable" in told and "71.99" in told and "Markov, orders mixed" in told
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


def test_a_run_that_fails_does_not_hold_up_the_others(bench, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "TINY", {**bench.TINY, "most": 9000, "runs": ["lmm"]})
    monkeypatch.setattr(bench, "fit", lambda *_, **__: 1 / 0)
    places = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "rows.json")]
    monkeypatch.setattr(sys, "argv", ["dna.py", str(data), *places, "--tiny", "--kinds", "genome"])
    with pytest.raises(SystemExit, match="1 runs failed"):
        bench.main()
    told = capsys.readouterr()
    assert "ZeroDivisionError" in told.err and "markov" in told.out
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["what"]["run"] for row in rows] == ["markov"], "what needs no model was measured"
