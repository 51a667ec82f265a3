"""Forecasting runs through the training engine: a run goes on to the bit, keeps its best weights, and stops in time."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import losses
from series import config, waves, written

from remanence.forecast.config import ForecastConfig
from remanence.forecast.network import load_network
from remanence.forecast.series import Series
from remanence.forecast.task import WindowSource
from remanence.train import DataConfig, OptimizerConfig, Run, TrainConfig, export, fit, override
from remanence.train.validation import Validation

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def path(tmp_path):
    return written(tmp_path / "s.csv", waves())


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def same(one, other):
    assert losses(one) == losses(other)
    assert [line.get("validation") for line in lines(one)] == [
        line.get("validation") for line in lines(other)
    ]
    ours, theirs = (load_network(run / "model").state_dict() for run in (one, other))
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_every_window_is_read_once_in_an_epoch_and_its_targets_follow_it(path):
    source = WindowSource(config(path, batch=7), 7)
    assert source.train.num_windows == 280 - 24 - 8 + 1
    seen = torch.cat([source.step(number).first for number in range(2 * source.train.num_windows // 7 + 1)])
    count = source.train.num_windows
    assert sorted(seen[:count].tolist()) == list(range(count)) == sorted(seen[count : 2 * count].tolist())
    assert seen[:count].tolist() != seen[count : 2 * count].tolist()
    batch, values = source.step(3), source.protocol.values
    for row, first in enumerate(batch.first.tolist()):
        assert torch.equal(batch.x[row], values[first : first + 24])
        assert torch.equal(batch.targets[row, 0], values[first + 24 : first + 32])
    assert all(torch.equal(x, y) for x, y in zip(batch, source.step(3), strict=True))


def test_with_a_history_every_look_back_has_its_own_targets(path):
    made = config(path, forecast=ForecastConfig(patch=8, stride=4, history=2))
    source = WindowSource(made, 4)
    batch, values = source.step(0), source.protocol.values
    assert batch.x.shape == (4, 72, 3) and batch.targets.shape == (4, 3, 8, 3)
    for row, first in enumerate(batch.first.tolist()):
        for block in range(3):
            start = first + 24 * (block + 1)
            assert torch.equal(batch.targets[row, block], values[start : start + 8])
    assert int(max(source.step(n).first.max() for n in range(60))) + 72 + 8 <= 280, (
        "nothing of the validation part"
    )


def test_training_never_sees_what_comes_after_its_part(tmp_path):
    values = waves()
    changed = values.copy()
    changed[320:] *= -7.0  # the test part
    found = []
    for number, each in enumerate((values, changed)):
        source = WindowSource(config(steps=4), 8, Series(each, ("a", "b", "c")))
        found.append(fit(config(steps=4), tmp_path / str(number), source=source))
    assert all(
        torch.equal(*pair) for pair in zip(*(each.state_dict().values() for each in found), strict=True)
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "fields", [{}, {"forecast": ForecastConfig(patch=8, stride=4, history=1, cycle=5, linear=False)}]
)
def test_a_run_that_is_left_goes_on_to_the_bit(path, tmp_path, fields):
    made = config(path, steps=10, **fields)
    fit(made, tmp_path / "fit")
    run = Run.open(made, tmp_path / "run")
    for _ in range(8):
        run.step()
    run.close()
    with Run.open(None, tmp_path / "run", resume=True) as again:
        assert again.progress.step == 6, "the last checkpoint"
        assert [step for step, _ in again.validation.history] == [4]
        again.train()
    same(tmp_path / "fit", tmp_path / "run")


@pytest.mark.slow
def test_a_killed_command_goes_on_with_the_same_losses(path, tmp_path):
    made = {"steps": "400", "save_every": "5", "log_every": "1", "batch": "4", "validate_every": "10"}
    made |= {
        "data.length": "24",
        "data.horizon": "8",
        "model.dim": "16",
        "model.heads": "2",
        "model.memory.heads": "2",
    }
    given = [f"--{name}={value}" for name, value in {**made, "data.path": str(path), "device": "cpu"}.items()]
    command = [
        sys.executable,
        "-m",
        "remanence",
        "train",
        "forecast/csv",
        "--out",
        str(tmp_path / "run"),
        *given,
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "run" / "checkpoints").glob("00000015")) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    left = json.loads((tmp_path / "run" / "config.json").read_text())
    left["steps"] = 25
    (tmp_path / "run" / "config.json").write_text(json.dumps(left))
    fit(TrainConfig.from_dict(left), tmp_path / "fit")
    killed = losses(tmp_path / "run")
    with pytest.warns(UserWarning, match="changed since the checkpoint: steps 400 -> 25"):
        fit(None, tmp_path / "run", resume=True)
    after = losses(tmp_path / "run")
    assert {step: killed[step] for step in range(1, 16)} == {step: after[step] for step in range(1, 16)}
    assert sorted(after) == list(range(1, 26))


def test_the_model_is_the_best_by_validation_and_runs_stop(path, tmp_path):
    """A learning rate that destroys: the first look is the best, and three that are no better end the run."""
    made = config(
        path, steps=60, validate_every=2, stop_after=3, optimizer=OptimizerConfig(lr=0.3, warmup=8, clip=1e3)
    )
    network = fit(made, tmp_path / "run")
    history = [(line["step"], line["validation"]) for line in lines(tmp_path / "run") if "validation" in line]
    best = min(history, key=lambda each: each[1])
    assert history[-1][0] < 60 and sum(step > best[0] for step, _ in history) == 3
    source = WindowSource(made, 8)
    assert source.validate(network) == pytest.approx(best[1]) != pytest.approx(history[-1][1])
    assert source.validate(load_network(tmp_path / "run" / "model")) == pytest.approx(best[1])
    with Run.open(None, tmp_path / "run", resume=True) as again:
        assert again.done, "a run that was stopped stays so"
    export(tmp_path / "run", tmp_path / "exported")
    assert source.validate(load_network(tmp_path / "exported")) == pytest.approx(best[1])


def test_of_equal_looks_the_first_counts(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": n, "loss": 1.0, "validation": v}) + "\n"
            for n, v in ((1, 3), (2, 2), (3, 2), (9, 1))
        )
        + '{"step": 4, "vali'
    )
    found = Validation(tmp_path, 5, stop_after=1)
    assert found.best == (2, 2) and found.stopped and len(found.history) == 3
    assert (
        not Validation(tmp_path, 2, stop_after=1).stopped
        and not Validation(tmp_path, 5, stop_after=0).stopped
    )


def test_another_series_is_not_taken_up(path, tmp_path):
    fit(config(path, steps=3), tmp_path / "run")
    written(path, waves(seed=1))
    left = json.loads((tmp_path / "run" / "config.json").read_text())
    (tmp_path / "run" / "config.json").write_text(json.dumps({**left, "steps": 6}))
    with pytest.raises(ValueError, match="data: expected the corpus that the run began with"):
        fit(None, tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"carry": True}, "carry: expected False with data.kind='forecast', got True"),
        ({"accumulate": 2}, "accumulate: expected 1 with data.kind='forecast', got 2"),
        ({"initial_state": "noise"}, "initial_state: expected 'fresh' with data.kind='forecast'"),
        ({"stop_after": 2, "validate_every": 0}, "stop_after: expected 0, or validate_every above 0"),
        ({"data": DataConfig(kind="recall", length=24)}, "forecast: expected only with data.kind='forecast'"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        config(**fields)


def test_fields_can_be_changed_by_name(path):
    changed = override(config(path), {"forecast.patch": "6", "data.split": "ett-hour", "data.columns": "a,b"})
    assert changed.forecast.patch == 6 and changed.data.columns == ("a", "b")
    assert TrainConfig.from_dict(json.loads(json.dumps(changed.to_dict()))) == changed
    for name, value, message in (
        ("forecast.pach", "6", "did you mean 'patch'"),
        ("forecast.loss", "rmse", "forecast.loss: expected one of mse, mae, decay, got 'rmse'"),
        ("forecast.stride", "40", "forecast.stride: expected at most patch=8"),
        ("data.missing", "drop", "data.missing: expected one of refuse, previous"),
    ):
        with pytest.raises(ValueError, match=message):
            override(config(path), {name: value})
    with pytest.raises(ValueError, match=r"data.path: expected a CSV file .* got none"):
        WindowSource(config(), 8)
    with pytest.raises(ValueError, match=r"forecast.patch: expected at most the look-back of 24, got 30"):
        WindowSource(replace(config(path), forecast=ForecastConfig(patch=30)), 8)
