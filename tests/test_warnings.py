"""What a reader, the lens and an evaluation say in advance: how far a memory was trained, how large, how long."""

import json

import pytest
import torch

from remanence import Model, ModelConfig, cli
from remanence.cli import progress
from remanence.evaluate import TASKS, Subject, evaluate
from remanence.evaluate.grid import PAPER_NOTE, Ablate, GridSettings
from remanence.train import fit
from remanence.train.checkpoint import Progress
from remanence.train.export import reached
from tests.train.runs import MODEL, config


@pytest.fixture
def trained(tmp_path):
    fit(config(steps=2), tmp_path / "run")
    return tmp_path / "run" / "model"


@pytest.fixture
def warned(capsys):
    """``remanence ...`` in this process: what it said to stderr."""

    def call(*arguments):
        capsys.readouterr()
        cli.main([str(argument) for argument in arguments])
        return capsys.readouterr().err

    return call


def text(path, size):
    path.write_text("x" * size, encoding="utf-8")
    return path


class TestReach:
    def test_read_says_that_a_memory_was_never_trained_that_far(self, warned, trained, tmp_path):
        assert json.loads((trained / "trained.json").read_text())["reach"] == 24
        said = warned("read", trained, text(tmp_path / "a", 20), "--save", tmp_path / "a.mem")
        assert "trained over" not in said
        said = warned(
            "read",
            trained,
            text(tmp_path / "b", 5),
            "--save",
            tmp_path / "b.mem",
            "--memory-file",
            tmp_path / "a.mem",
        )
        assert f"{trained}: 25 tokens will have been read, and its memory was trained over 24 at most" in said

    def test_an_untrained_model_is_not_taken_for_a_trained_one(self, warned, tmp_path):
        Model(ModelConfig(**MODEL, pattern=("lmm",), memory={"heads": 2, "chunk": 4})).save(tmp_path / "m")
        said = warned("read", tmp_path / "m", text(tmp_path / "a", 9), "--save", tmp_path / "a.mem")
        assert "no trained.json, so it may be untrained" in said
        Model(ModelConfig(**MODEL, pattern=("window",))).save(tmp_path / "w")
        assert "trained" not in warned("read", tmp_path / "w", tmp_path / "a", "--save", tmp_path / "w.mem")

    def test_the_model_that_comes_with_the_package_says_how_far(self):
        from remanence.io.shipped import resolve_model_path

        assert (
            json.loads((resolve_model_path("remanence-small") / "trained.json").read_text())["reach"]
            == 512 * 2048
        )

    def test_rows_that_are_carried_go_further(self):
        from remanence.train import DataConfig

        progress = Progress(step=100, tokens=0)
        carried = config(carry=True, data=DataConfig(kind="documents", length=32))
        assert reached(progress, carried) == 3200
        assert reached(progress, config(data=DataConfig(kind="packed", length=32))) == 32
        assert (
            reached(
                Progress(step=9000, tokens=0), config(carry=True, data=DataConfig(kind="facts", length=512))
            )
            == 512**2
        )


def test_the_lens_says_how_large_its_page_will_be(command, tmp_path):
    Model(ModelConfig(**MODEL, pattern=("lmm",), memory={"heads": 2, "chunk": 4})).save(tmp_path / "m")
    out = tmp_path / "page.html"
    said = command("lens", tmp_path / "m", "--text", text(tmp_path / "a", 20_000), "--out", out)
    told = float(said.split(f"{out}: about ")[1].split(" MB")[0].replace(",", ""))
    assert told == pytest.approx(out.stat().st_size / 1e6, rel=0.1)


class TestEvaluation:
    def test_progress_is_of_all_tasks_and_modes_and_knows_what_was_measured_before(self, trained, tmp_path):
        shown = []

        def measured(modes):
            shown.clear()
            subject = Subject.load(trained, torch.device("cpu"), seed=0, folder=None)
            tasks = [
                TASKS["recall"](
                    subject,
                    TASKS["recall"].Settings(distances=(16, 32), capacities=(2,), keys=8, noise=4, pairs=2),
                )
            ]
            evaluate(
                subject,
                tasks,
                modes,
                journal=tmp_path / "units.jsonl",
                show=lambda *about: shown.append(about),
            )
            return tasks[0]

        task = measured(("on",))
        once = sum(task.cost(unit) for group in task.units() for unit in group)
        assert shown[0] == ("recall, memory on", 0, once) and shown[-1][1:] == (once, once)
        measured(("on", "off"))
        assert shown[0][1:] == (once, 2 * once), "what the journal has is done"
        assert shown[-1] == ("recall, memory off", 2 * once, 2 * once)
        assert [done for _, done, _ in shown] == sorted(done for _, done, _ in shown)

    def test_a_bar_that_is_renamed_keeps_its_clock(self, capsys, monkeypatch):
        now = [0.0]
        monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
        bar = progress.Progress().add()
        bar.begin("lm, memory on", 100)
        now[0] = 20.0
        bar.rename("lm, memory off")
        bar.update(20)
        assert capsys.readouterr().err == "lm, memory off: 20 %, 80 s left\n"


class TestPapersNumbers:
    @pytest.mark.parametrize(("kind", "expected"), [("recall", False), ("packed", True)])
    def test_the_papers_perplexity_stands_beside_texts_alone_and_with_its_note(self, kind, expected):
        task = Ablate.__new__(Ablate)
        task.settings, task.recipe = GridSettings(), config()
        if kind == "packed":
            from remanence.train import DataConfig

            task.recipe = config(data=DataConfig(kind="packed", length=24))
        task.subject = type("Nothing", (), {"seed": 0})()
        row, *_ = task._variant_rows("perplexity", 24, "base", {0: {"loss": 1.0, "right": 0.5, "count": 3}})
        assert (PAPER_NOTE in row.setting) == expected and "table 5" not in row.setting
        assert "for the order alone" in PAPER_NOTE
        row, *_ = task._variant_rows("accuracy", 24, "base", {0: {"loss": 1.0, "right": 0.5, "count": 3}})
        assert PAPER_NOTE not in row.setting
