"""kNN stores in training: carried from step to step and on to what comes after, and a table of rare tokens."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from runs import config, losses, weights

from remanence import Model, Session
from remanence.config import change
from remanence.data import Tokens
from remanence.inference import memfile
from remanence.testing import assert_close
from remanence.train import DataConfig, export, fit
from remanence.train.checkpoint import checkpoints


def setting(shards, **knn):
    data = DataConfig(kind="documents", path=shards, length=16)
    made = config("window", data=data, batch=2, carry=True, keep=9)
    changes = {
        "pattern": ("window", "knn"),
        "window": 8,
        "num_layers": 2,
        "vocab_size": 257,
        "knn": {"k": 4, "size": 32, **knn},
    }
    return replace(made, model=change(made.model, changes))


@pytest.mark.sample(1)
@pytest.mark.parametrize("write", ["all", "rare", "surprise"])
def test_resuming_is_not_stopping(tmp_path, shards, write):
    whole, part = tmp_path / "whole", tmp_path / "part"
    fit(setting(shards, write=write), whole)
    shutil.copytree(whole, part)
    for later in checkpoints(part / "checkpoints")[1:]:
        shutil.rmtree(later)
    shutil.rmtree(part / "model")
    fit(None, part, resume=True)
    assert losses(part) == losses(whole)
    assert_close(weights(part), weights(whole), 0.0)


def test_the_table_is_the_corpus_s_and_is_saved_with_the_model(tmp_path, shards):
    fit(setting(shards, write="rare"), tmp_path / "run")
    table = Model.load(tmp_path / "run" / "model").log_unigrams
    counts = np.bincount(np.concatenate([shard[:] for shard in Tokens(shards).shards]), minlength=257) + 1.0
    assert_close(table, torch.from_numpy(np.log(counts / counts.sum())).float(), 1e-6)
    assert int(table.argmax()) in b"abcdef "


def test_a_run_s_store_goes_on_after_it(tmp_path, shards):
    fit(setting(shards), tmp_path / "run")
    export(tmp_path / "run", tmp_path / "model", memory=tmp_path / "run.mem", row=1)
    session = Session(tmp_path / "model").load(tmp_path / "run.mem")
    held = session.state.blocks[1].store
    read = session.tokens
    assert int((held.position >= 0).sum()) == min(32, max(0, read - 1) // 8 * 8)
    assert isinstance(session.generate("abc", max_tokens=3), str)
    with pytest.raises(ValueError, match="row: expected from 0 to 1"):
        export(tmp_path / "run", tmp_path / "other", memory=tmp_path / "b.mem", row=2)
    assert not (tmp_path / "other").exists()
    fit(config("lmm", steps=2), tmp_path / "plain")
    with pytest.raises(ValueError, match="memory: expected a run that carries its memories"):
        export(tmp_path / "plain", tmp_path / "other", memory=tmp_path / "b.mem")
    assert memfile.read_file(tmp_path / "run.mem")[0]["tokens"] == [read]
