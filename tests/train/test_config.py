"""A config refuses fields of another kind of data, and still reads what earlier versions wrote and were given."""

import ast
import copy
import json
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from runs import config

from remanence.data import Batch
from remanence.io.migrations import first_fields
from remanence.recipes import load_recipe
from remanence.tasks import facts
from remanence.train import (
    DATA_KINDS,
    SOURCES,
    DataConfig,
    FactDialoguesData,
    FactsData,
    PackedData,
    RecallData,
    TrainConfig,
    export,
    fit,
    override,
    register_data,
    run_config,
)

RUNS = sorted((Path(__file__).parents[1] / "fixtures").glob("v*/*/run"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"kind": "packed", "pairs": 4},
            "pairs: expected only with data.kind='recall' or 'needle' or 'fact_dialogues', got it with 'packed'",
        ),
        (
            {"kind": "needle", "rounds": 3},
            "rounds: expected only with data.kind='recall', got it with 'needle'",
        ),
        (
            {"kind": "recall", "path": "x"},
            "path: expected only with data.kind='packed' or 'documents' or 'text' or 'facts' or 'fact_dialogues' or",
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


def test_the_class_of_a_kind_is_made_by_its_name():
    for kind, cls in DATA_KINDS.items():
        found = DataConfig(kind=kind)
        assert type(found) is cls and found == cls() == DataConfig.from_dict(found.to_dict())
        assert replace(found, length=7).length == 7 and type(copy.deepcopy(found)) is cls
    assert TrainConfig().data == DataConfig() == PackedData()
    with pytest.raises(ValueError, match="kind: expected 'recall' of RecallData, got 'needle'"):
        RecallData(kind="needle")


def test_the_old_name_of_fact_dialogues_works_with_one_warning():
    with pytest.warns(
        DeprecationWarning, match="data.kind='told' is deprecated: use 'fact_dialogues'"
    ) as seen:
        found = DataConfig(kind="told", pairs=3)
    assert found == FactDialoguesData(pairs=3) and len(seen) == 1 and seen[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="told") as seen:
        changed = override(config(), {"data.kind": "told", "data.share": "0.25"})
    assert changed.data == FactDialoguesData(length=24, pairs=4, share=0.25) and len(seen) == 1
    with warnings.catch_warnings():  # a file is no one's mistake
        warnings.simplefilter("error")
        assert DataConfig.from_dict({"kind": "told", "pairs": 3}) == found


def test_a_field_that_no_kind_has_is_refused_with_the_nearest():
    for make in (
        lambda: DataConfig(kind="recall", pears=3),
        lambda: override(config(), {"data.pears": "3"}),
    ):
        with pytest.raises(ValueError, match=r"data.pears: field of RecallData: .*; did you mean 'pairs'\?"):
            make()


@dataclass(frozen=True, kw_only=True)
class Counting(DataConfig):
    """Rows that count upwards.

    Attributes:
        stride: the distance between neighbours.
    """

    kind: str = "counting"
    stride: int = 1


class CountingSource:
    def __init__(self, config, batch, rank, world_size):
        self.data, self.batch = config.data, batch

    def step(self, number):
        row = torch.arange(self.data.length + 1) * self.data.stride + number
        rows = (row % 16).expand(self.batch, -1)
        return Batch(rows[:, :-1], rows[:, 1:])


def test_a_registered_kind_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.setattr(DATA_KINDS, "data", dict(DATA_KINDS.data))
    monkeypatch.setattr(SOURCES, "data", dict(SOURCES.data))
    register_data(Counting, CountingSource)
    given = override(config(steps=2), {"data.kind": "counting", "data.stride": "3"})
    assert given.data == Counting(length=24, stride=3) == DataConfig(kind="counting", length=24, stride=3)
    with pytest.raises(
        ValueError, match=r"data.stride: expected only with data.kind='counting', got it with 'recall'"
    ):
        DataConfig(kind="recall", stride=3)
    fit(given, tmp_path / "run")
    assert run_config(tmp_path / "run") == given
    del DATA_KINDS["counting"]  # elsewhere, the run can still be read and exported
    there = run_config(tmp_path / "run")
    assert there.to_dict() == given.to_dict() and there.data.stride == 3
    export(tmp_path / "run", tmp_path / "out")


def test_a_kind_without_a_class_may_use_every_field(tmp_path):
    found = DataConfig(kind="mine", path="x", pairs=3, books="y")
    assert (found.pairs, found.books, found.rounds) == (3, "y", 2) and replace(found, length=3).pairs == 3
    assert override(config(data=found), {"data.pairs": "4"}).data.pairs == 4
    with pytest.raises(ValueError, match=r"data.kind: expected one of packed, .* got 'mine'"):
        fit(config(data=found), tmp_path / "run")


def test_rows_of_facts_are_carried_as_long_as_their_config_says():
    assert FactsData.max_carried_steps == facts.MAX_STEPS


def test_digests_of_recipes_stay_what_they_were():
    """Rows of an evaluation are found again by what their recipe was before each kind had a class of its own."""
    found = first_fields("train", config().to_dict())["data"]
    before = (
        "{'kind': 'recall', 'path': None, 'length': 24, 'pairs': 4, 'rounds': 2, 'keys': 32, 'noise': 16, "
        "'share': 0.5, 'weight': 0.1, 'ramp': 0, 'books': None, 'tasks': ('qa1', 'qa2', 'qa3', 'qa4', 'qa5'), "
        "'curriculum': (), 'reverse_complement': False, 'horizon': 96, 'split': '7/1/2', 'columns': (), "
        "'missing': 'refuse'}"
    )
    assert found == ast.literal_eval(before)
    assert first_fields("train", TrainConfig(data=FactDialoguesData()).to_dict())["data"]["kind"] == "told"


def test_files_with_the_fields_of_every_kind_are_read():
    saved = config().to_dict()
    saved["data"] |= {"path": "unused", "books": "unused", "tasks": ["qa2"]}
    assert TrainConfig.from_dict(json.loads(json.dumps(saved))) == config()
    with pytest.raises(
        ValueError,
        match=r"data.pears: field of RecallData: expected one of .* got 'pears'; did you mean 'pairs'",
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


def test_a_change_of_a_model_whose_configuration_is_not_used_is_refused():
    """The recipe `text` begins from a model: a change of its fields had no effect."""
    message = r"model.memory.rule: expected no change of the model beside init_from=remanence-small"
    with pytest.raises(ValueError, match=message):
        override(load_recipe("text"), {"model.memory.rule": "delta"})
    changed = override(load_recipe("text"), {"model.memory.rule": "delta", "init_from": "none"})
    assert changed.model.memory.rule == "delta" and changed.init_from is None


def test_the_old_names_of_initial_states_work_with_a_warning():
    now = config("mac", initial_state="neighbor", initial_state_share=0.25)
    with pytest.warns(DeprecationWarning, match="begin") as warned:
        assert config("mac", begin="passed", begin_share=0.25) == now
    assert [str(each.message) for each in warned] == [
        "begin='passed' is deprecated: use initial_state='neighbor'",
        "begin_share is deprecated: use initial_state_share",
    ]
    with pytest.warns(DeprecationWarning, match="passed") as warned:
        config("mac", initial_state="passed")
    assert len(warned) == 1
    changes = {"begin": "passed", "begin_share": "0.25"}
    assert (
        override(config("mac"), changes) == override(config("mac"), {**changes, "begin": "neighbor"}) == now
    )
    saved = json.loads(json.dumps(now.to_dict()))
    before = {**saved, "begin": "passed", "begin_share": saved["initial_state_share"]}
    del before["initial_state"], before["initial_state_share"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert TrainConfig.from_dict(before) == now
    first = first_fields("train", saved)
    assert first["begin"] == "passed" and first["begin_share"] == 0.25 and "initial_state" not in first
    with pytest.warns(DeprecationWarning, match="told.Told is deprecated: use"):
        from remanence.tasks.told import Told
    assert Told.__name__ == "FactDialogues"
