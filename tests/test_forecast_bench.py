"""The experiments on forecasts in small: every kind of run, in several processes, taken up again, as table and plot."""

import importlib
import json
import sys
import zipfile

import numpy as np
import pytest
from series import waves, written

from experiments.forecast.published import TABLE3, TABLE3_COLUMNS


@pytest.fixture
def bench():
    return importlib.import_module("experiments.forecast.run")


@pytest.mark.slow
def test_every_kind_of_run_in_two_processes(bench, tmp_path, monkeypatch, experiment):
    path = written(tmp_path / "ETTh1.csv", waves(900))
    with zipfile.ZipFile(tmp_path / "ETT-small.zip", "w") as archive:
        archive.write(path, "ETT-small/ETTh1.csv")
    path.unlink()
    out = tmp_path / "rows.json"
    given = [tmp_path, "--tiny", "--rows", 900, "--lookback", 48, "--out", out, "--device", "cpu"]
    experiment("forecast.run", *given, "--runs", "dlinear", "off", "--jobs", 2)
    assert len(json.loads(out.read_text())["rows"]) == 2
    monkeypatch.setattr(sys, "argv", ["forecast.py", *map(str, given)])
    bench.main()  # what is left
    rows = json.loads(out.read_text())["rows"]
    assert sorted(row["what"]["run"] for row in rows) == [
        "attention",
        "cycle",
        "dlinear",
        "memory",
        "off",
        "online",
    ]
    assert all(row["errors"]["on"]["windows"] == 180 - 24 + 1 for row in rows)
    own = {row["what"]["run"]: row for row in rows}
    assert set(own["memory"]["errors"]) == {"on", "off", "frozen"} and set(own["off"]["errors"]) == {"on"}
    assert abs(own["attention"]["parameters"] / own["memory"]["parameters"] - 1) < 0.1
    table = bench.table(rows)
    for word in ("| ETTh1 | 24 |", "| traffic | not measured |", "memory frozen", "frequency", "Titans"):
        assert word in table, word
    bench.plot(rows, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(bench, "trained", lambda *_: pytest.fail("nothing is run twice"))
    bench.main()


def test_means_are_over_horizons_and_seeds(bench):
    def row(run, horizon, seed, mse):
        what = {"run": run, "dataset": "ETTh1", "horizon": horizon, "seed": seed}
        return {"what": what, "errors": {"on": {"mse": mse, "mae": mse / 2}}}

    bench = importlib.import_module("experiments.forecast.tables")

    horizons = (96, 192, 336, 720)
    rows = [row("dlinear", horizon, seed, horizon + seed) for horizon in horizons for seed in (2, 0)]
    rows += [row("dlinear", 96, 5, 1000.0)]  # a seed whose other horizons are missing
    mse, mae, deviation = bench.average(bench.cells(rows), "ETTh1", "dlinear")
    assert (mse, mae, deviation) == pytest.approx((337.0, 168.5, 2**0.5))
    assert bench.average(bench.cells(rows[:6]), "ETTh1", "dlinear") is None, "a horizon is missing"
    assert bench.average(bench.cells(rows), "ETTh1", "memory") is None


def test_rows_of_an_earlier_recipe_are_not_averaged_with_others(bench):
    shared = {"dataset": "ETTh2", "horizon": 96, "lookback": 96, "steps": None, "rows": None, "split": None}

    def row(run, seed, mse, **more):
        what = {"run": run, "seed": seed, **shared, **more}
        errors = {"on": {"mse": mse, "mae": mse / 2}}
        return {"what": what, "device": "some", "torch": "2", "errors": errors}

    rows = [row("memory", 0, 0.9, recipe="e639130"), row("memory", 1, 0.3), row("memory", 2, 0.5)]
    rows += [row("dlinear", 1, 0.6)]
    earlier, now = bench.table(rows).split("\n\nOn some")
    assert "'recipe': 'e639130'" in earlier and "| 0.900 / 0.450 |" in earlier
    assert "| 0.400 / 0.200 |" in now and "| 1 or 2 |" in now


def test_the_papers_table_is_whole():
    assert {len(columns) for columns in TABLE3.values()} == {len(TABLE3_COLUMNS)} == {9}
    assert TABLE3["ETTh1"][TABLE3_COLUMNS.index("DLinear")] == (0.456, 0.452)
    assert TABLE3["traffic"][0] == (0.415, 0.289) and TABLE3["traffic"][2] == (0.428, 0.282)


def test_seasons_come_again_and_change(bench, monkeypatch, tmp_path):
    seasons = importlib.import_module("experiments.forecast.seasons")
    monkeypatch.setattr(seasons, "REPEATS", 3)
    values = seasons.seasons(8, seed=0).values
    length, period = 3 * seasons.PERIOD, seasons.PERIOD
    assert values.shape == (8 * length, seasons.CHANNELS)
    assert np.allclose(values[: 2 * period], values[period:length])
    assert abs(values[length - period : length] - values[length : length + period]).mean() > 0.5
    assert abs(values.var() - 1) < 0.25
    given = ["--tiny", "--patterns", 8, "--device", "cpu", "--out", tmp_path / "s.json"]
    for more in ([], ["--plot", tmp_path / "s.png"]):
        monkeypatch.setattr(sys, "argv", ["seasons.py", *map(str, given + more)])
        seasons.main()
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads((tmp_path / "s.json").read_text())["rows"]
    assert [list(row["errors"]) for row in rows] == [["on", "frozen", "fresh", "off"], ["off"]]
    assert all(len(values) == 12 for row in rows for values in row["errors"].values())
