"""What can be seen of a run: its cost before, trackers and samples while it goes on."""

import json
import os
import runpy
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import config, losses

from remanence.config import PRESETS, preset
from remanence.model import Model
from remanence.train import DataConfig, TrainConfig, fit
from remanence.train.plan import flops_per_token, plan

RECIPES = sorted((Path(__file__).parents[2] / "remanence" / "recipes").glob("[a-z]*.py"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_makes_a_config_that_survives_being_saved(path):
    made = runpy.run_path(str(path))["recipe"]()
    assert TrainConfig.from_dict(json.loads(json.dumps(made.to_dict()))) == made


@pytest.mark.parametrize(
    "path", [path for path in RECIPES if "titans" in path.stem], ids=lambda path: path.stem
)
def test_the_papers_recipes_fit_eight_gpus(path):
    made = runpy.run_path(str(path))["recipe"]()
    costs = plan(made, 8, "H100")
    billions = {"170m": 15, "340m": 15, "760m": 30, "1.3b": 100}[
        path.stem.removeprefix("titans_").replace("_", ".")
    ]
    assert costs.tokens == pytest.approx(billions * 1e9, rel=1e-4)
    with torch.device("meta"):
        assert costs.parameters == sum(p.numel() for p in Model(made.model).parameters())


def test_operations_of_a_transformer_are_six_per_weight_and_token():
    """The usual estimate: 6 for every weight of a matrix, and attention's 12 x width x half the length for each
    layer.
    """
    c = preset("340m", "attention", vocab_size=32_000)
    with torch.device("meta"):
        weights = sum(p.numel() for p in Model(c).parameters() if p.dim() > 1)
    assert flops_per_token(c, 2048) == pytest.approx(6 * weights + 12 * c.num_layers * c.dim * 1024, rel=1e-3)
    assert all(flops_per_token(preset(name, "lmm"), 64) > 0 for name in PRESETS)


def test_what_cannot_fit_is_refused():
    large = TrainConfig(
        model=preset("1.3b", "mac", vocab_size=32_000), data=DataConfig(length=4096), batch=512
    )
    with pytest.raises(
        ValueError, match=r"memory: expected at most 80.0 GB on a device, .* --checkpointing=true"
    ):
        plan(large, 8)
    small = replace(large, batch=1, data=DataConfig(length=64), model=preset("1.3b", "lmm", num_layers=48))
    with pytest.raises(ValueError, match=r"memory: .* more GPUs share it"):
        plan(small, 1, "3090")
    with pytest.raises(ValueError, match="batch: expected a multiple of accumulate x GPUs = 7, got 512"):
        plan(large, 7)
    with pytest.raises(ValueError, match=r"gpu: expected one of .* did you mean 'H100'"):
        plan(large, 8, "H101")


def test_this_machine_is_timed():
    made = plan(config("lmm"))
    assert made.rate > 0 and made.hours > 0 and "timed on this machine" in made.basis


def test_tensorboard_gets_what_metrics_get(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    fit(config("lmm", steps=3, trackers=("tensorboard",)), tmp_path / "run")
    read = events.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    read.Reload()
    told = {event.step: event.value for event in read.Scalars("loss")}
    assert told == pytest.approx(losses(tmp_path / "run"), rel=1e-6)
    assert {"surprise", "keep", "memory_gib"} <= set(read.Tags()["scalars"])


def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    fit(config("lmm", steps=2, trackers=("wandb",)), tmp_path / "run")
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))


def test_a_tracker_that_is_not_there_leaves_no_run_behind(tmp_path, monkeypatch):
    with pytest.raises(
        ValueError, match="trackers: expected one of tensorboard, wandb, got 'wandbb'; did you mean 'wandb'"
    ):
        fit(config("lmm", trackers=("wandbb",)), tmp_path / "run")
    monkeypatch.setattr("remanence.train.metrics.find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"trackers: 'wandb' needs the extra .* pip install 'remanence\[wandb\]'"
    ):
        fit(config("lmm", trackers=("wandb",)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_sample_is_written_when_asked(tmp_path, shards):
    run = tmp_path / "run"
    setting = config(
        "mac", steps=4, data=DataConfig(kind="packed", path=shards, length=24), prompt="ab", sample_tokens=7
    )

    def ask(line):
        if line["step"] == 2:
            os.kill(os.getpid(), signal.SIGUSR1)

    fit(setting, run, log=ask)
    fit(setting, tmp_path / "other")
    (told,) = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert told["step"] == 2 and told["prompt"] == "ab" and isinstance(told["text"], str)
    assert losses(run) == losses(tmp_path / "other"), "looking changes nothing"


@pytest.mark.slow
def test_compiled_parts_train_alike(tmp_path):
    fit(config("lmm", steps=3), tmp_path / "plain")
    fit(config("lmm", steps=3, compile=True), tmp_path / "compiled")
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "plain"), abs=1e-5)
