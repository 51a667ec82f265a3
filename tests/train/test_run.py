"""A run can be driven step by step, left at any step, and taken up again: the result is that of `fit`."""

import pytest
import torch
from runs import config, losses, weights

from remanence.runtime.errors import DivergedError
from remanence.train import Run, TrainingError, fit


def same(one, other):
    assert losses(one) == losses(other)
    assert all(torch.equal(x, y) for x, y in zip(weights(one).values(), weights(other).values(), strict=True))


def test_a_loop_of_ones_own_is_fit(tmp_path):
    fit(config(steps=5), tmp_path / "fit")
    with Run.open(config(steps=5), tmp_path / "run") as run:
        taken = []
        while not run.done:
            taken.append(run.step().loss)
        run.finish()
    assert [run.progress.step, len(taken)] == [5, 5]
    same(tmp_path / "fit", tmp_path / "run")


def test_a_run_that_is_left_without_a_word_goes_on_from_its_checkpoint(tmp_path):
    fit(config(steps=7, save_every=2), tmp_path / "fit")
    run = Run.open(config(steps=7, save_every=2), tmp_path / "run")
    for _ in range(5):
        run.step()
    run.close()
    assert not (tmp_path / "run" / "model").exists()
    with Run.open(None, tmp_path / "run", resume=True) as again:
        assert again.progress.step == 4, "the last checkpoint"
        again.train()
    same(tmp_path / "fit", tmp_path / "run")


def test_a_checkpoint_can_be_asked_for(tmp_path):
    with Run.open(config(save_every=100), tmp_path / "run") as run:
        run.step()
        run.checkpoint()
        run.step()
    with Run.open(None, tmp_path / "run", resume=True) as again:
        assert again.progress.step == 1


def test_a_run_that_cannot_be_opened_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="config: expected a TrainConfig for a new run, got None"):
        Run.open(None, tmp_path / "run")
    with pytest.raises(ValueError, match="graph: expected None or false on cpu"):
        Run.open(config(graph=True), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert issubclass(TrainingError, DivergedError) and issubclass(DivergedError, ValueError)
