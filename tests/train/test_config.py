"""A config refuses fields of another kind of data, and still reads what earlier versions wrote and were given."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from runs import config

from remanence.train import DataConfig, TrainConfig, override, run_config

RUNS = sorted((Path(__file__).parents[1] / "fixtures").glob("v*/*/run"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"kind": "packed", "pairs": 4},
            "pairs: expected only with data.kind='recall' or 'needle' or 'told', got it with 'packed'",
        ),
        (
            {"kind": "needle", "rounds": 3},
            "rounds: expected only with data.kind='recall', got it with 'needle'",
        ),
        (
            {"kind": "recall", "path": "x"},
            "path: expected only with data.kind='packed' or 'documents' or 'text' or 'facts' or 'told' or 'babilong'",
        ),
        (
            {"kind": "documents", "tasks": ("qa1",)},
            "tasks: expected only with data.kind='babilong', got it with 'documents'",
        ),
    ],
)
def test_a_field_of_another_kind_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**fields)
    changes = {
        f"data.{name}": value if isinstance(value, str) else "3"
        for name, value in fields.items()
        if name != "tasks"
    }
    if len(changes) > 1:
        with pytest.raises(ValueError, match=message):
            override(config(), changes)


def test_another_kind_drops_what_the_recipe_had_for_its_own():
    changed = override(config(), {"data.kind": "needle", "data.length": "300"})
    assert changed.data == DataConfig(kind="needle", length=300, pairs=4)
    changed = override(config(), {"data.kind": "documents", "data.path": "x"})
    assert changed.data == DataConfig(kind="documents", path="x", length=24)


def test_a_kind_of_ones_own_may_use_every_field():
    assert DataConfig(kind="mine", path="x", pairs=3, books="y").pairs == 3


def test_files_with_the_fields_of_every_kind_are_read():
    saved = config().to_dict()
    saved["data"] |= {"path": "unused", "books": "unused", "tasks": ["qa2"]}
    assert TrainConfig.from_dict(json.loads(json.dumps(saved))) == config()
    with pytest.raises(
        ValueError, match=r"DataConfig field: expected one of .* got 'pears'; did you mean 'pairs'"
    ):
        TrainConfig.from_dict({"data": {"kind": "recall", "pears": 4}})


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.parent.name)
def test_runs_of_earlier_versions_are_read(run):
    found = run_config(run)
    assert TrainConfig.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_start_is_still_a_name_for_init_from():
    now = config(init_from="model")
    assert config(start="model") == now and now.start == now.init_from == "model"
    saved = now.to_dict()
    assert "start" not in saved
    saved["start"] = saved.pop("init_from")
    assert TrainConfig.from_dict(saved) == now
    assert override(config(), {"start": "model"}) == override(config(), {"init_from": "model"}) == now
    assert replace(now, steps=3).init_from == "model" and replace(now, start="other").init_from == "other"
