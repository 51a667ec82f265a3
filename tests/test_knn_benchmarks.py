"""The measurements of kNN stores run, in small."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def main_of(path, arguments, monkeypatch):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    module.main()


def test_reading_with_a_store(tmp_path, monkeypatch, capsys):
    arguments = ["--entries", "0", "600", "--rounds", "1", "--out", str(tmp_path / "rows.json")]
    main_of(ROOT / "benchmarks" / "knn_reading.py", arguments, monkeypatch)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["entries"], row["dtype"]) for row in rows] == [
        (entries, dtype) for entries in (0, 600) for dtype in ("auto", "int8")
    ]
    assert all(row["open_s"] > 0 and row["decode_ms"] > 0 for row in rows)
    assert rows[3]["mib"] < rows[2]["mib"]
    assert "decoding" in capsys.readouterr().out


def test_searches_beside_each_other(tmp_path, monkeypatch, capsys):
    pytest.importorskip("faiss")
    arguments = [
        "--sizes",
        "512",
        "--heads",
        "1",
        "--rounds",
        "1",
        "--file",
        "600",
        "--out",
        str(tmp_path / "rows.json"),
    ]
    only = ["--only", "exact", "exact, int8", "faiss Flat", "faiss HNSW"]
    main_of(ROOT / "benchmarks" / "knn.py", [*arguments, *only], monkeypatch)
    rows = {row["impl"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    assert list(rows) == only[1:]
    assert rows["faiss Flat"]["recall"] == 1 and min(row["recall"] for row in rows.values()) > 0.9


def test_rounding(tmp_path, monkeypatch, capsys):
    from experiments.knn import rounding

    monkeypatch.setattr(sys, "argv", ["rounding", "--entries", "2000", "--out", str(tmp_path / "rows.json")])
    rounding.main()
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["dtype"] for row in rows] == ["float32", "bfloat16", "int8"] * 2
    assert all(row["found"] > 0.95 and row["error"] < 0.1 for row in rows)
