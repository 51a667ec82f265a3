"""Names of earlier versions: each works, with one warning, and the present ones give none."""

import json
import warnings
from dataclasses import replace

import pytest

from remanence import Model, ModelConfig, preset
from remanence.attached.config import AttachConfig
from remanence.cli import main
from remanence.config import change
from remanence.inference import memfile
from remanence.io.migrations import current_field, first_fields
from remanence.train import TrainConfig
from remanence.train.config import override

SIZES = {"dim": 16, "heads": 2, "window": 8, "segment": 8, "persistent": 0, "memory": {"chunk": 8}}
NOW = ModelConfig(vocab_size=257, num_layers=1, **SIZES)


@pytest.mark.parametrize(
    "made",
    [
        lambda: ModelConfig(vocabulary=257, depth=1, **SIZES),
        lambda: replace(replace(NOW, num_layers=2, vocab_size=3), vocabulary=257, depth=1),
        lambda: change(replace(NOW, num_layers=2, vocab_size=3), {"vocabulary": 257, "depth": 1}),
        lambda: replace(preset("tiny", depth=1, vocabulary=257), **SIZES),
    ],
)
def test_old_fields_of_a_model(made):
    with pytest.warns(DeprecationWarning, match="deprecated: use") as seen:
        assert made() == NOW
    assert sorted(str(each.message) for each in seen) == [
        "depth is deprecated: use num_layers",
        "vocabulary is deprecated: use vocab_size",
    ]
    assert {each.filename for each in seen} == {__file__}, "the warning names the caller's line"


def test_old_attributes():
    attached = AttachConfig(vocab_size=9, num_layers=0)
    for config, size in ((NOW, 257), (attached, 9)):
        with pytest.warns(DeprecationWarning, match="vocabulary is deprecated: use vocab_size"):
            assert config.vocabulary == size
        with pytest.warns(DeprecationWarning, match="depth is deprecated: use num_layers"):
            assert config.depth == config.num_layers


def test_files_of_earlier_versions_open_without_a_warning(tmp_path):
    old = first_fields("model", NOW.to_dict())
    assert {"vocabulary", "depth"} <= old.keys() and not {"vocab_size", "num_layers"} & old.keys()
    run = first_fields("train", TrainConfig(model=NOW).to_dict())
    assert run["model"]["depth"] == 1 and "start" in run
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ModelConfig.from_dict(json.loads(json.dumps(old))) == NOW
        assert TrainConfig.from_dict(json.loads(json.dumps(run))) == TrainConfig(model=NOW)
        assert override(TrainConfig(model=NOW), {"model.depth": "2"}).model.num_layers == 2


def test_a_fingerprint_does_not_change_with_a_name():
    """Evaluations of earlier versions go on: what they have measured is found by a model's fingerprint."""
    config = ModelConfig(
        vocab_size=257, dim=16, num_layers=1, heads=2, pattern=("lmm",), window=8, segment=8, persistent=0
    )
    assert memfile.fingerprint(Model(config)).config == "6d21958319f071ab51ac1f8308b3256c"


def test_only_the_fields_of_a_model_are_renamed():
    assert current_field("train", "model.depth") == "model.num_layers"
    assert current_field("train", "model.memory.depth") == "model.memory.depth"
    assert current_field("train", "data.depth") == "data.depth"


def test_old_options_of_commands(tmp_path, monkeypatch, capsys):
    def warned(*arguments):
        main([str(argument) for argument in arguments])
        return capsys.readouterr().err

    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("some text")
    small = ["--model.dim=16", "--model.heads=2", "--model.memory.head_dim=8", "--model.segment=64"]
    said = warned("new", "tiny", "m", "--variant=lmm", "--model.depth=1", *small)
    assert said == "remanence: warning: --model.depth is deprecated: use --model.num_layers\n"
    assert Model.load("m").config.num_layers == 1
    assert "deprecated" not in warned("read", "m", "t.txt", "--save", "a.mem")
    said = warned("read", "m", "t.txt", "--memory", "a.mem", "--save", "b.mem")
    assert said.count("--memory is deprecated: use --memory-file") == 1
    for old, new in (("--memory=b.mem", "--memory-file"), ("--mode=off", "--memory-mode")):
        said = warned("generate", "m", "--prompt", "a", "--max-tokens", 1, "--temperature", 0, old)
        assert f"{old.partition('=')[0]} is deprecated: use {new}" in said
    said = warned("eval", "m", "lm", "--data=t.txt", "--memory", "on", "off")
    assert "--memory is deprecated: use --memory-mode" in said
