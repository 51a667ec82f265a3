"""`remanence eval ... forecast`: the protocol's errors in every memory mode, rolling errors, plots, and wrong turns."""

import json

import numpy as np
import pytest
import torch
from evaluations import measured
from series import config, waves, written

from remanence.forecast.network import load_network
from remanence.forecast.online import SHIFTS, roll
from remanence.forecast.protocol import Protocol, compute_errors
from remanence.forecast.series import read_series
from remanence.train import fit


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a series, `s.csv`, and a trained run, `run`."""
    folder = tmp_path_factory.mktemp("home")
    path = written(folder / "s.csv", waves())
    fit(config(path), folder / "run")
    return folder


def test_rows_are_the_protocols_errors_in_every_mode(home):
    rows = measured(home / "run", "forecast", ("on", "off", "frozen", "fresh"), data=str(home / "s.csv"))
    network = load_network(home / "run" / "model").eval()
    protocol = Protocol.from_series(read_series(home / "s.csv"), scaler=network.scaler)
    windows = protocol.windows("test", 24, 8)
    for mode in ("on", "off", "frozen", "fresh"):
        network.memory_mode = mode
        wanted = compute_errors(network, windows)
        assert rows.value("mse", memory=mode, horizon=8) == pytest.approx(wanted.mse, rel=1e-6)
        assert rows.value("mae", memory=mode) == pytest.approx(wanted.mae, rel=1e-6)
        assert rows.row("mae", memory=mode).count == 80 - 8 + 1
    assert rows.value("mse", memory="on") != rows.value("mse", memory="off")


def test_rolling_errors_are_the_streams(home):
    settings = {"data": str(home / "s.csv"), "shifts": "none,level", "warm": "2", "phases": "3"}
    rows = measured(home / "run" / "model", "forecast", ("on", "fresh"), **settings)
    network = load_network(home / "run" / "model").eval()
    values = Protocol.from_series(read_series(home / "s.csv"), scaler=network.scaler).values
    for shift in ("none", "level"):
        rolled = roll(network, SHIFTS[shift](values, 360), 320, warm=2, phases=3)
        before, after = rolled.between(320, 360 - 8 + 1), rolled.between(360, 400)
        told = [
            rows.value("rolling mse", memory="on", shift=shift, when=when) for when in ("before", "after")
        ]
        assert told == pytest.approx([before[0], after[0]])
    assert rows.value("rolling mse", memory="on", shift="level", when="after") > 3 * told[0]
    assert sum(row.detail for row in rows) == 2 * 2 * len(rolled.origins)


def test_the_commands_from_a_csv_to_plots(home, command, tmp_path):
    small = [
        "--steps=4",
        "--batch=4",
        "--data.length=24",
        "--data.horizon=8",
        "--model.dim=16",
        "--model.heads=2",
    ]
    small += ["--model.memory.heads=2", "--validate_every=2", "--device=cpu"]
    path = home / "s.csv"
    told = command("train", "forecast/csv", f"--data.path={path}", "--out", tmp_path / "run", *small)
    assert f"the model is in {tmp_path / 'run' / 'model'}" in told
    found = json.loads((tmp_path / "run" / "config.json").read_text())
    assert found["data"]["path"] == str(path) and found["forecast"]["patch"] == 16
    asked = [
        "forecast",
        f"--forecast.data={path}",
        "--forecast.shifts=none",
        "--memory-mode",
        "on",
        "off",
        "frozen",
        "fresh",
    ]
    told = command("eval", tmp_path / "run", *asked, "--json", tmp_path / "r.json", "--device", "cpu")
    for word in (
        "mse",
        "mae",
        "rolling mse",
        "memory frozen",
        "on - off",
        "r.forecast.png",
        "r.forecast-none.png",
    ):
        assert word in told, word
    for name in ("r.forecast.png", "r.forecast-none.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    report = tmp_path / "report.md"
    command("report", tmp_path / "run", tmp_path / "r.json", "--out", report)
    assert "| run | lmm, 1 layers | - |" in report.read_text() and "rolling mse" in report.read_text()
    assert "Hugging Face" not in command("export", tmp_path / "run", tmp_path / "m")
    again = command("eval", tmp_path / "m", "forecast", f"--forecast.data={path}", "--device", "cpu")
    row = next(
        each for each in json.loads((tmp_path / "r.json").read_text())["rows"] if each["metric"] == "mse"
    )
    assert f"{row['value']:.4g}" in again, "the exported network is the run's"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "run", "forecast"], "forecast.data: expected a CSV file, got none"),
        (["eval", "run", "forecast", "--forecast.data=no.csv"], "no.csv: no such file"),
        (
            ["eval", "run", "forecast", "--forecast.data=other.csv"],
            "other.csv: column: expected one of date, x, got 'a'",
        ),
        (
            ["eval", "run", "forecast", "--forecast.data=s.csv", "--forecast.shifts=slope"],
            "shifts: expected one of none,",
        ),
        (
            ["eval", "run", "lm", "--data=s.csv"],
            "model: expected a language model, got the forecasting network",
        ),
        (
            ["eval", "remanence-small", "forecast", "--forecast.data=s.csv"],
            "model: expected a forecasting network",
        ),
        (["train", "forecast/csv", "--out", "x"], "data.path: expected a CSV file with the columns' names"),
        (
            ["train", "forecast/csv", "--out", "x", "--data.path=short.csv"],
            "data: expected at least 192 rows to train",
        ),
        (
            ["train", "forecast/etth1", "--out", "x", "--data.path=s.csv"],
            "data.split: expected at least 14,400 rows",
        ),
        (["train", "forecast/csv", "--data.path=s.csv", "--dry-run"], "data.kind: expected a kind of tokens"),
    ],
)
def test_wrong_turns_are_one_line_and_leave_nothing(home, command, monkeypatch, arguments, message):
    monkeypatch.chdir(home)
    (home / "other.csv").write_text("date,x\n1,2\n")
    written(home / "short.csv", waves(100))
    error = command(*arguments, code=2)
    assert message in error and error.count("\n") == 1
    assert not (home / "x").exists()


def test_a_constant_column_and_gaps_train_and_forecast(home, tmp_path):
    values = waves(300)
    values[:, 1] = 4.0
    lines = written(tmp_path / "g.csv", values).read_text().splitlines()
    lines[50] = "2020,,,"
    (tmp_path / "g.csv").write_text("\n".join(lines))
    made = config(tmp_path / "g.csv")
    with pytest.raises(ValueError, match="column 'a': expected a number in every row, got 1 missing"):
        fit(made, tmp_path / "run")
    filled = type(made)(
        **{**vars(made), "data": type(made.data)(**{**vars(made.data), "missing": "previous"})}
    )
    network = fit(filled, tmp_path / "run")
    assert np.isfinite(network.scaler.std).all() and network.scaler.std[1] == 1
    assert bool(network(torch.zeros(1, 24, 3)).isfinite().all())
    rows = measured(tmp_path / "run", "forecast", data=str(tmp_path / "g.csv"), missing="previous")
    assert np.isfinite(rows.value("mse"))
