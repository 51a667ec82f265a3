"""A damaged checkpoint is refused in one line that names it and the one before; a run's folder is one process's."""

import random
import shutil
import subprocess
import sys
import warnings

import pytest
import torch
from damage import damage
from runs import config, losses

from remanence.data import prepare
from remanence.io.files import add_digest, read_json, write_json
from remanence.io.migrations import first_fields
from remanence.model import Model
from remanence.train import DataConfig, Run, fit
from remanence.train.export import export


@pytest.fixture
def run(tmp_path):
    """Two checkpoints of a run that carries memories, passes them on and has random numbers."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in "abcd":
        (texts / f"{name}.txt").write_text(f"{name} was the best of times, it was the worst of times. " * 8)
    prepare([texts], tmp_path / "data")
    data = DataConfig(kind="documents", path=str(tmp_path / "data"), length=16)
    fit(
        config("lmm", data=data, carry=True, initial_state="neighbor", steps=4, save_every=2, keep=3),
        tmp_path / "run",
    )
    shutil.rmtree(tmp_path / "run" / "model")
    return tmp_path / "run"


def state(run):
    """All that a step depends on."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Run.open(None, run, resume=True) as opened:
            tensors = [*opened.model.parameters(), *opened.carried.tensors(), torch.get_rng_state()]
            moments = [part[key] for part in opened.optimizer.state.values() for key in sorted(part)]
            return opened.progress, [tensor.detach().clone() for tensor in (*tensors, *moments)]


def same(found, wanted):
    return found[0] == wanted[0] and all(torch.equal(a, b) for a, b in zip(found[1], wanted[1], strict=True))


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.exhaustive)])
def test_damage_to_any_file_is_refused_or_changes_nothing(run, tmp_path, count):
    last, whole, wanted = run / "checkpoints" / "00000004", tmp_path / "whole", state(run)
    shutil.copytree(last, whole)
    told = {}
    for seed in range(count):
        shutil.rmtree(last)
        shutil.copytree(whole, last)
        name = damage(random.Random(seed), last)
        gone = not (last / "progress.json").is_file()  # then it is no checkpoint, and the one before counts
        try:
            assert gone or same(state(run), wanted), (seed, name)
        except ValueError as error:
            told[seed, name] = str(error)
    for case, message in told.items():
        assert "\n" not in message and str(last) in message, case
        assert message.endswith("remove that folder to go on from 00000002"), case
    assert len(told) > count / 2


@pytest.mark.parametrize("name", ["carried-00000.safetensors", "random.safetensors", "optimizer.safetensors"])
def test_a_file_that_is_gone_is_missed(run, name):
    (run / "checkpoints" / "00000004" / name).unlink()
    with pytest.raises(ValueError, match=rf"{name}: no such file, which the checkpoint was written with"):
        fit(None, run, resume=True)


def test_another_number_of_rows_is_refused_and_a_changed_config_told(run):
    data = read_json(run / "config.json")
    write_json(run / "config.json", {**data, "batch": 2})
    with pytest.raises(ValueError, match="batch: expected 4, the rows whose memories the checkpoint carries"):
        fit(None, run, resume=True)
    write_json(run / "config.json", {**data, "steps": 5})
    with pytest.warns(UserWarning, match=r"config\.json: changed since the checkpoint: steps 4 -> 5"):
        fit(None, run, resume=True)
    assert max(losses(run)) == 5


def test_renamed_fields_are_not_reported_as_changes(tmp_path, recwarn):
    """A run of the first version, whose config.json and checkpoints have the names of then, all kinds' data fields."""
    run = tmp_path / "run"
    fit(config("mac", initial_state="neighbor", steps=4, save_every=2, keep=2), run)
    shutil.rmtree(run / "checkpoints" / "00000004")
    first = first_fields("train", read_json(run / "config.json"))
    assert first["begin"] == "passed" and "horizon" in first["data"]
    progress = run / "checkpoints" / "00000002" / "progress.json"
    write_json(run / "config.json", first)
    write_json(progress, add_digest({**read_json(progress), "config": first}))
    fit(None, run, resume=True)
    assert max(losses(run)) == 4
    assert not [each for each in recwarn if "changed" in str(each.message)]
    write_json(progress, add_digest({**read_json(progress), "config": {**first, "stop_after": 2}}))
    shutil.rmtree(run / "checkpoints" / "00000004")
    with pytest.warns(UserWarning, match="stop_after 2 -> 0"):  # refused now, and corrected in config.json
        fit(None, run, resume=True)


def test_a_damaged_model_is_not_exported(run, tmp_path):
    path = run / "checkpoints" / "00000004" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors: altered or damaged: its digest does not fit"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_others_have_rewritten_is_taken(run, tmp_path):
    from safetensors.torch import load_file, save_file

    export(run, tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    before = Model.load(run / "checkpoints" / "00000004")
    for one, other in zip(before.parameters(), Model.load(tmp_path / "out").parameters(), strict=True):
        assert torch.equal(one + 1, other)


BOTH = """
import sys
sys.path[:0] = sys.argv[2:]
from runs import config
from remanence.train import fit
print("ready", flush=True)
sys.stdin.readline()
try:
    fit(config(steps=3, save_every=1, seed=int(sys.argv[2])), sys.argv[1])
except ValueError as error:
    sys.exit(f"{error}")
"""


@pytest.mark.slow
def test_of_two_runs_begun_together_one_is_refused(tmp_path):
    out, here = tmp_path / "run", __file__.rpartition("/")[0]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    both = [
        subprocess.Popen([sys.executable, "-c", BOTH, str(out), str(seed), here], text=True, **pipes)
        for seed in (1, 2)
    ]
    for process in both:
        assert process.stdout.readline() == "ready\n"
    for process in both:
        process.stdin.write("\n")
        process.stdin.flush()
    ended = [process.communicate()[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 1]
    well = next(seed for seed, process in enumerate(both, 1) if process.returncode == 0)
    assert any(
        "in use by a training run" in told or "expected a new or empty folder" in told for told in ended
    )
    assert read_json(out / "config.json")["seed"] == well
    alone = tmp_path / "alone"
    fit(config(steps=3, save_every=1, seed=well), alone)
    assert losses(out) == losses(alone)


def test_a_run_in_use_can_be_neither_resumed_nor_begun_anew(tmp_path):
    with Run.open(config(), tmp_path / "run") as first:
        first.step()
        with pytest.raises(ValueError, match="run: in use by a training run"):
            fit(None, tmp_path / "run", resume=True)
        with pytest.raises(ValueError, match="expected a new or empty folder"):
            fit(config(), tmp_path / "run")
    with pytest.raises(ValueError, match="no tracker"):
        fit(config(trackers=("no tracker",)), tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_a_file_of_another_checkpoint_is_noticed(run, name):
    last = run / "checkpoints" / "00000004"
    shutil.copy(run / "checkpoints" / "00000002" / name, last / name)
    with pytest.raises(ValueError, match=f"{name}: altered or damaged: it is not the file that was written"):
        fit(None, run, resume=True)


def test_a_run_that_cannot_begin_leaves_nothing_and_can_be_tried_again(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    (tmp_path / "run").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("remanence.train.run.Metrics", full)
        with pytest.raises(OSError, match="No space left"):
            fit(config(steps=1), tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())
    fit(config(steps=1), tmp_path / "run")
