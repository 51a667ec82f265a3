"""Forecasting and DNA register themselves: the rest of the package works without their folders, never names them."""

import ast
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from series import config as forecast_config
from series import waves, written

from remanence import verticals
from remanence.train import SOURCES, TASKS, DataConfig, TrainConfig, fit
from remanence.train.language import LanguageModeling
from remanence.verticals import Registry, imported

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "remanence"
NAMES = ("forecast", "dna")


def names_in(path):
    """Identifiers, modules and texts of a file, but for its docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    texts = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.FunctionDef | ast.ClassDef | ast.alias | ast.Attribute | ast.arg):
            yield {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg"}.get(type(node), "name"), node
        elif isinstance(node, ast.ImportFrom):
            yield "module", node
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            yield "value", node


@pytest.mark.parametrize(
    "package", ["train", "inference", "evaluate", "tasks", "data", "tokenizers", "cli", "report"]
)
def test_no_package_of_the_trunk_names_a_vertical(package):
    words = {
        *NAMES,
        *verticals.data_configs(),
        "network",
        "fasta",
        "genome",
        "reverse_complement",
        "horizon",
        "forecaster",
    }
    words -= {"network"} if package == "evaluate" else set()  # the model of a `Subject`
    for path in sorted((PACKAGE / package).rglob("*.py")):
        for attribute, node in names_in(path):
            found = str(getattr(node, attribute) or "").lower()
            parts = set(found.replace(".", "_").split("_")) | {found}
            assert not parts & words, f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', '')}: {found}"


def test_training_asks_no_model_what_it_is():
    for path in sorted((PACKAGE / "train").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                named = {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
                assert not named & {"Network", "Attached", "Model", "Forecasting"}, (
                    f"{path.name}: {ast.unparse(node)}"
                )


SCRIPT = """
import json
import sys
from pathlib import Path

import remanence, remanence.train, remanence.evaluate, remanence.recipes, remanence.report, remanence.hf
from remanence import cli
from remanence.train import TrainConfig

gone, out = sys.argv[1], Path(sys.argv[2])
assert Path(remanence.__file__).parent.parent == out, remanence.__file__
for arguments in (["--help"], ["train", "--help"], ["eval", "--help"]):
    try:
        cli.main(arguments)
    except SystemExit as stop:
        assert not stop.code, arguments
small = "--model.dim=16 --model.num_layers=1 --model.heads=2 --steps=2 --batch=2 --device=cpu --data.length=24".split()
small += ["--data.pairs=4"]
cli.main(["train", "recall", "--out", str(out / "run"), *small])
cli.main(["eval", str(out / "run"), "recall", "--texts=2", "--distances=24", "--pairs=4", "--capacities=4"])
TrainConfig.from_dict(json.loads((out / "old.json").read_text()))
assert not any(gone in name.split(".") for name in sys.modules if name.startswith("remanence."))
for arguments in (
    ["train", {"forecast": "forecast/etth1", "dna": "dna/pretrain"}[gone], "--out", str(out / "other")],
    ["train", "recall", f"--data.kind={gone}", "--out", str(out / "other")],
    ["eval", str(out / "run"), gone],
):
    try:
        cli.main(arguments)
    except SystemExit as stop:
        assert stop.code == 2, arguments
    else:
        raise AssertionError(arguments)
assert not (out / "other").exists()
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_rest_works_without_the_folder(name, tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "remanence", ignore=shutil.ignore_patterns("__pycache__", "shipped"))
    shutil.rmtree(tmp_path / "remanence" / name)
    (tmp_path / "old.json").write_text(json.dumps(TrainConfig().to_dict()))  # a run that was begun with it
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, name, str(tmp_path)],
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    recipe, kind, task = [line for line in done.stderr.splitlines() if line.startswith("remanence: error: ")]
    assert recipe.startswith("remanence: error: recipe: expected a Python file or one of ") and name in recipe
    assert (
        kind.startswith("remanence: error: data.kind: expected one of packed, ") and f"got '{name}'" in kind
    )
    assert task.startswith("remanence: error: task: expected one of lm, ") and f"got '{name}'" in task


OLD_NAMES = """
import sys, warnings
from importlib import import_module

warnings.simplefilter("ignore")
import remanence.core
from remanence.verticals import imported, verticals

moved = {old: new for each in verticals() for old, new in each.moved.items() if new}
assert len(moved) > 10
for old, new in moved.items():
    module, _, attribute = old.partition(":")
    import_module(module.rpartition(".")[0])
    code = f"from {module} import {attribute} as found" if attribute else f"import {module}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(code)
    told = [str(each.message) for each in caught if each.category is DeprecationWarning]
    assert told == ["{} is deprecated: use {}".format(old.replace(":", "."), new.replace(":", "."))], (old, told)
    assert caught[0].filename == "<string>", caught[0].filename
    found = found if attribute else sys.modules[module]
    assert found is imported(new), old
    assert attribute or (found.__name__ == found.__spec__.name == new), found.__spec__
from remanence.series import network
assert network is sys.modules["remanence.forecast.network"]
try:
    import remanence.series.missing
except ModuleNotFoundError:
    pass
"""


def test_names_of_earlier_versions_work_with_a_warning():
    done = subprocess.run(
        [sys.executable, "-c", OLD_NAMES], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_everything_that_is_registered_can_be_imported():
    for each in verticals.verticals():
        named = [
            *each.data_configs.values(),
            *each.sources.values(),
            *each.tasks.values(),
            *each.evaluations.values(),
            *each.models.values(),
            *each.tokenizers,
            *[found.documents for found in each.formats],
            *([each.train_fields] if each.train_fields else []),
        ]
        assert all(callable(imported(name)) for name in named)
        assert set(each.tasks) <= set(TASKS)
        assert set(each.data_configs) == set(each.sources) <= set(SOURCES)


def test_an_entry_is_imported_when_it_is_asked_for():
    found = Registry({"there": "json:dumps", "missing": "no.such.module:name"})
    assert list(found) == ["there", "missing"] and found["there"] is json.dumps
    assert dict(found.data)["missing"] == "no.such.module:name"
    with pytest.raises(ModuleNotFoundError):
        found["missing"]


def test_a_task_of_ones_own(monkeypatch, tmp_path):
    """What the loop calls is what a task has: here language modelling that counts its calls and halves the loss."""
    calls = []

    class Halved(LanguageModeling):
        def gradients(self, *given):
            calls.append(given[3])
            found = super().gradients(*given)
            return found._replace(loss=found.loss / 2)

    from runs import config, losses

    monkeypatch.setitem(TASKS, "recall", Halved)
    given = config(steps=3)
    fit(given, tmp_path / "own")
    monkeypatch.delitem(TASKS, "recall")
    fit(given, tmp_path / "plain")
    assert calls == [0, 1, 2]
    own, plain = losses(tmp_path / "own"), losses(tmp_path / "plain")
    assert own == pytest.approx({step: loss / 2 for step, loss in plain.items()})


def test_a_config_with_fields_of_a_vertical_is_the_same_file_as_before(tmp_path):
    written(tmp_path / "s.csv", waves(400))
    given = forecast_config(tmp_path / "s.csv")
    assert TrainConfig.from_dict(json.loads(json.dumps(given.to_dict()))) == given
    assert TrainConfig().to_dict()["forecast"]["network"] == "memory"
    with pytest.raises(
        ValueError, match=r"forecast: expected only with data.kind='forecast', got it with 'recall'"
    ):
        replace(given, data=DataConfig(kind="recall"))
    with pytest.raises(ValueError, match=r"carry: expected False with data.kind='forecast', got True"):
        replace(given, carry=True)
