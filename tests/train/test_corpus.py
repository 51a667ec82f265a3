"""A run goes on with the corpus that it began with, or not at all."""

import pytest
from runs import config, losses

from remanence.data import Tokens, prepare
from remanence.io.files import read_json
from remanence.train import DataConfig, Run, TrainConfig, fit


def setting(shards: str) -> TrainConfig:
    return config(data=DataConfig(kind="packed", path=shards, length=16), steps=2)


def stopped(shards, run):
    """After the first of two steps."""
    with Run.open(setting(shards), run) as begun:
        begun.step()
        begun.checkpoint()


def test_another_corpus_is_refused(tmp_path, shards):
    texts, run = tmp_path / "t.jsonl", tmp_path / "run"
    fit(setting(shards), tmp_path / "whole")
    stopped(shards, run)
    digest = Tokens(shards).digest
    assert read_json(run / "data.json") == {"corpus": digest}
    (tmp_path / "other.jsonl").write_text(texts.read_text().upper().replace("TEXT", "text"))
    for sources, limits in (([tmp_path / "other.jsonl"], {}), ([texts], {"max_documents": 29})):
        prepare(sources, shards, overwrite=True, **limits)
        message = rf"data: expected the corpus that the run began with \(digest {digest}\), got another \("
        with pytest.raises(ValueError, match=message):
            fit(None, run, resume=True)
        assert losses(run).keys() == {1}
    prepare([texts], shards)
    fit(None, run, resume=True)
    assert losses(run) == losses(tmp_path / "whole"), "the first one, prepared again, is the same"


def test_it_can_be_accepted(tmp_path, shards):
    stopped(shards, tmp_path / "run")
    prepare([tmp_path / "t.jsonl"], shards, max_documents=29)
    with pytest.raises(ValueError, match=r"run/data\.json to go on with this one"):
        fit(None, tmp_path / "run", resume=True)
    (tmp_path / "run" / "data.json").unlink()
    fit(None, tmp_path / "run", resume=True)
    assert read_json(tmp_path / "run" / "data.json") == {"corpus": Tokens(shards).digest}


def test_generated_data_has_no_digest(tmp_path):
    fit(config(steps=1), tmp_path / "run")
    assert not (tmp_path / "run" / "data.json").exists()
