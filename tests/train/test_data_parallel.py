"""Attached models and forecasting in two processes are the same as in one, and resume each other's checkpoints."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from runs import losses
from series import config as forecast_config
from series import waves, written
from transformers import LlamaConfig, LlamaForCausalLM

import remanence
from remanence.data import prepare
from remanence.forecast.config import ForecastConfig
from remanence.io.tensors import read_tensors
from remanence.testing import assert_close
from remanence.train import DataConfig, FactDialoguesData, OptimizerConfig, TrainConfig, export, fit

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="two gloo processes are tried on Linux only"),
]
STEPS = 6
BASE = LlamaConfig(
    vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def settings(folder):
    """Runs of attached models, with rows that carry their memory and without, and of a forecasting network."""
    (folder / "texts").mkdir()
    for number in range(4):
        words = " ".join(f"word{index} {number}" for index in range(400))
        (folder / "texts" / f"{number}.txt").write_text(words)
    for name in ("tokens", "held"):
        prepare([folder / "texts"], folder / name)
    LlamaForCausalLM(BASE).save_pretrained(folder / "base")
    attached = remanence.attach(folder / "base", every=2, window=16, heads=2, head_dim=16, chunk=16)
    attached.save_pretrained(folder / "own")
    common = TrainConfig(
        init_from=str(folder / "own"), batch=4, steps=STEPS, save_every=STEPS // 2, keep=9, log_every=1,
        optimizer=OptimizerConfig(lr=1e-3, warmup=2), device="cpu",
    )  # fmt: skip
    path, held = str(folder / "tokens"), str(folder / "held")
    dialogues = FactDialoguesData(path=path, length=320, pairs=1, share=0.25)
    packed = DataConfig(kind="packed", path=path, held_out=held, length=48)
    written(folder / "series.csv", waves(400))
    series = forecast_config(folder / "series.csv", steps=STEPS, keep=9, stop_after=2, validate_every=2)
    return {
        "dialogues": replace(common, data=dialogues, carry=True, windows=(32,)),
        "packed": replace(common, data=packed, accumulate=2, validate_every=2),
        "forecast": replace(series, forecast=ForecastConfig(patch=8, stride=4, dropout=0.0)),
    }


def train_all(named, folder):
    for name, setting in named.items():
        fit(setting, Path(folder) / name)


def resume_all(names, folder):
    for name in names:
        fit(None, Path(folder) / name, resume=True)


def half(source, target):
    """A copy of a run that ended after half of its steps."""
    shutil.copytree(source, target)
    shutil.rmtree(target / "checkpoints" / f"{STEPS:08d}")
    shutil.rmtree(target / "model")


def validations(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["validation"] for line in lines if line.get("validation") is not None]


def test_two_processes_are_one_and_resume_each_others_checkpoints(tmp_path, on_two):
    named = settings(tmp_path)
    train_all(named, tmp_path / "one")
    on_two(train_all, named, tmp_path / "two")
    for name in named:
        half(tmp_path / "one" / name, tmp_path / "one-two" / name)
        half(tmp_path / "two" / name, tmp_path / "two-one" / name)
    on_two(resume_all, list(named), tmp_path / "one-two")
    resume_all(named, tmp_path / "two-one")
    for name in named:
        alone = tmp_path / "one" / name
        assert len(losses(alone)) == STEPS
        expected = read_tensors(alone / "model" / "model.safetensors").tensors
        for other in ("two", "one-two", "two-one"):
            found = tmp_path / other / name
            assert losses(found) == pytest.approx(losses(alone), abs=1e-5), (name, other)
            assert validations(found) == pytest.approx(validations(alone), abs=1e-5), (name, other)
            assert_close(read_tensors(found / "model" / "model.safetensors").tensors, expected, 1e-4)
        assert bool(validations(alone)) == (name != "dialogues")
        export(tmp_path / "two" / name, tmp_path / "exported" / name)
