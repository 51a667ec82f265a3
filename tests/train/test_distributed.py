"""Two processes are one: the same losses, and each takes up the checkpoints of the other. FSDP2 over gloo, on
the CPU.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pair import port
from runs import config, losses, weights

from remanence import Model
from remanence.backbone import Backbone
from remanence.config import change
from remanence.testing import assert_close
from remanence.train import DataConfig, export, fit
from remanence.train.checkpoint import checkpoints
from remanence.train.distributed import ProcessGroup, gather_tensor, shard

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="two gloo processes are tried on Linux only"),
]


def settings(shards):
    documents = DataConfig(kind="documents", path=shards, length=16)
    common = {"steps": 8, "save_every": 4, "keep": 9}
    return {
        "recall": config("mac", model=config("mac", **common).model, **common, accumulate=2),
        "carried": config("mag", **common, data=documents, carry=True),
        "packed": config(
            "lmm", **common, data=DataConfig(kind="packed", path=shards, length=24), checkpointing=True
        ),
        "passed": config(
            "mac", **common, data=DataConfig(kind="packed", path=shards, length=24), initial_state="neighbor"
        ),
        "noise": config("lmm", **common, data=documents, carry=True, initial_state="noise"),
    }


def train_all(named, folder):
    for name, setting in named.items():
        fit(setting, Path(folder) / name)


def resume_all(names, folder):
    for name in names:
        fit(None, Path(folder) / name, resume=True)


def test_a_wavefront_of_shared_weights(tmp_path, shards, on_two):
    """Rows of one length, documents carried on, documents packed: two processes with MAC in a wavefront are one
    without.
    """
    common = {"steps": 4, "save_every": 4}
    small = {"segment": 16, "window": 16}
    model = change(config("mac", **common).model, {**small, "num_layers": 3})
    named = {
        "recall": config("mac", model=model, **common),
        "carried": config(
            "mac",
            model=model,
            **common,
            data=DataConfig(kind="documents", path=shards, length=48),
            carry=True,
        ),
        "packed": config(
            "mac",
            model=model,
            **common,
            data=DataConfig(kind="packed", path=shards, length=48),
            checkpointing=True,
        ),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Backbone, "_reads_in_wavefront", lambda self: False)
        train_all(named, tmp_path / "one")
    on_two(train_all, named, tmp_path / "two")
    for name in named:
        alone, found = losses(tmp_path / "one" / name), losses(tmp_path / "two" / name)
        assert len(alone) == 4
        for step, loss in alone.items():
            assert found[step] == pytest.approx(loss, abs=1e-5), (name, step)
        assert_close(weights(tmp_path / "two" / name), weights(tmp_path / "one" / name), 1e-4)


def half(source, target):
    """A copy of a run that ended after its fourth step."""
    shutil.copytree(source, target)
    shutil.rmtree(target / "checkpoints" / "00000008")
    shutil.rmtree(target / "model")


def test_two_processes_are_one_and_take_up_each_others_checkpoints(tmp_path, shards, on_two):
    named = settings(shards)
    train_all(named, tmp_path / "one")
    on_two(train_all, named, tmp_path / "two")
    for name in named:
        half(tmp_path / "one" / name, tmp_path / "one-two" / name)
        half(tmp_path / "two" / name, tmp_path / "two-one" / name)
    on_two(resume_all, list(named), tmp_path / "one-two")
    resume_all(named, tmp_path / "two-one")
    for name in named:
        alone = losses(tmp_path / "one" / name)
        assert len(alone) == 8
        for other in ("two", "one-two", "two-one"):
            found = losses(tmp_path / other / name)
            assert found.keys() == alone.keys()
            for step, loss in alone.items():
                assert found[step] == pytest.approx(loss, abs=1e-5), (name, other, step)
            assert_close(weights(tmp_path / other / name), weights(tmp_path / "one" / name), 1e-4)
        parts = checkpoints(tmp_path / "two" / name / "checkpoints")[-1] / "parts"
        assert {path.suffix for path in parts.iterdir()} == {".safetensors"}, "nothing pickled"


def look(folder):
    """In bfloat16 by autocast: the dtypes of the state, and that methods beside forward meet whole weights."""
    rank = dist.get_rank()
    process_group = ProcessGroup(torch.device("cpu"), rank, 2)
    torch.manual_seed(0)
    plain = Model(config("mac").model)
    torch.manual_seed(0)
    spread = shard(Model(config("mac").model), process_group)
    x = torch.arange(20).view(1, 20) % 257
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        told = spread(x, spread.start(1))
        again = spread.trace(x[:, :5], told[1])
        truth, state = plain(x, plain.start(1))
        later = plain.trace(x[:, :5], state)
    assert {tensor.dtype for tensor in told[1].tensors() if tensor.is_floating_point()} == {torch.float32}
    assert torch.equal(told[0], truth)
    assert torch.equal(again.hidden, later.hidden)
    for name, parameter in spread.named_parameters():
        assert torch.equal(gather_tensor(parameter.detach()), dict(plain.named_parameters())[name])
    Path(folder, f"looked-{rank}").touch()


def fail(folder):
    with pytest.raises((ValueError, OSError)):
        fit(config("lmm", steps=2), Path(folder) / "taken")
    with pytest.raises(ValueError, match="batch: expected a multiple of accumulate x processes = 2, got 3"):
        fit(config("lmm", steps=2, batch=3), Path(folder) / "odd")


def in_turn(folder):
    look(folder)
    fail(folder)
    fit(config("lmm", steps=4, save_every=2), Path(folder) / "run")


def test_what_two_processes_see_refuse_and_export(tmp_path, on_two):
    """The state stays float32 and reading meets whole weights; what one refuses stops both; parts become a
    whole model.
    """
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    on_two(in_turn, tmp_path)
    assert len(list(tmp_path.glob("looked-*"))) == 2
    assert not (tmp_path / "odd").exists()
    export(tmp_path / "run", tmp_path / "whole")
    shutil.rmtree(tmp_path / "run" / "model")
    export(tmp_path / "run", tmp_path / "parts")
    assert_close(
        Model.load(tmp_path / "parts").state_dict(), Model.load(tmp_path / "whole").state_dict(), 0.0
    )
    last = checkpoints(tmp_path / "run" / "checkpoints")[-1]
    part = next((last / "parts").iterdir())
    whole = part.read_bytes()
    for damaged in (whole[:100], whole[:-1] + bytes([whole[-1] ^ 1])):
        part.write_bytes(damaged)
        message = "parts: altered or damaged: .*, remove that folder to go on from 00000002"
        with pytest.raises(ValueError, match=message):
            fit(None, tmp_path / "run", resume=True)


def test_torchrun_and_the_command_line(tmp_path):
    recipe = Path(__file__).parents[2] / "remanence" / "recipes" / "recall.py"
    small = [
        "--steps=2",
        "--batch=2",
        "--model.num_layers=1",
        "--data.length=48",
        "--log_every=1",
        "--device=cpu",
    ]
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(port()),
    ]
    command = [*launch, "-m", "remanence", "train", str(recipe), "--out", str(tmp_path / "run"), *small]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("parameters, see metrics.jsonl") == 1, "only one process speaks"
    assert list(losses(tmp_path / "run")) == [1, 2]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["batch"] == 2


def test_two_processes_validate_as_one(tmp_path, on_two):
    """The losses, the weights that are kept, and training after a validation."""
    given = config(steps=4, validate_every=2)
    fit(given, tmp_path / "one")
    on_two(fit, given, tmp_path / "two")
    found = [
        [json.loads(line).get("validation") for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (tmp_path / "one", tmp_path / "two")
    ]
    assert [value is None for value in found[0]] == [True, False, True, False]
    assert found[1][1::2] == pytest.approx(found[0][1::2], rel=1e-5)
    for name, tensor in weights(tmp_path / "one").items():
        assert_close(tensor, weights(tmp_path / "two")[name], 1e-4)
