"""What a newcomer is told who gives a run for a model, a folder for a file, or the name of a text for the text."""

import importlib.machinery
import importlib.util
from pathlib import Path

import pytest

from remanence import Model, ModelConfig, Session
from remanence.train import fit
from tests.train.runs import MODEL, config


@pytest.fixture
def model(tmp_path):
    Model(ModelConfig(**MODEL, pattern=("lmm",), memory={"heads": 2, "chunk": 4})).save(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def session(model):
    return Session(model)


class TestRunsAndModels:
    def test_a_run_is_answered_with_its_model(self, command, tmp_path):
        fit(config(steps=1), tmp_path / "run")
        told = f"got the training run {tmp_path / 'run'}; its model is {tmp_path / 'run' / 'model'}"
        for arguments in (["generate", tmp_path / "run", "--prompt", "a"], ["inspect", tmp_path / "run"]):
            assert told in command(*arguments, code=2)

    def test_a_run_that_is_not_done_is_answered_with_what_makes_one_of_it(self, command, tmp_path):
        fit(config(steps=2), tmp_path / "run")
        for path in sorted((tmp_path / "run" / "model").iterdir(), reverse=True):
            path.unlink()
        said = command("generate", tmp_path / "run", "--prompt", "a", code=2)
        assert f"`remanence export {tmp_path / 'run'} FOLDER` writes one" in said

    def test_a_model_needs_no_export(self, command, model, tmp_path):
        said = command("export", model, tmp_path / "other", code=2)
        assert f"run: expected a training run, got the model {model}; it is ready to use" in said
        assert "TrainConfig" not in said and not (tmp_path / "other").exists()


class TestFiles:
    def test_a_folder_is_not_a_missing_file(self, command, model, tmp_path):
        said = command("read", model, tmp_path, "--save", tmp_path / "x.mem", code=2)
        assert (
            f"files: expected a text file, got the folder {tmp_path}" in said and "no such file" not in said
        )
        said = command("lens", model, "--text", tmp_path, "--out", tmp_path / "x.html", code=2)
        assert f"--text: expected a text file, got the folder {tmp_path}" in said

    def test_an_empty_file_is_said_to_be_empty(self, command, model, tmp_path):
        empty = tmp_path / "empty.txt"
        empty.touch()
        said = command("read", model, empty, "--save", tmp_path / "x.mem", code=2)
        assert f"files: expected a text, got {empty}, which is empty" in said
        assert not (tmp_path / "x.mem").exists()


class TestSession:
    def test_the_name_of_a_file_is_refused_and_its_path_is_read(self, session, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path("book.txt").write_text("Call me Ishmael. " * 40, encoding="utf-8")
        for name in ("book.txt", str(tmp_path / "book.txt")):
            with pytest.raises(
                ValueError, match=r"got the name of a file, '.*book.txt'; read\(Path\('.*book.txt'\)\)"
            ):
                session.read(name)
        assert session.tokens == 0
        assert session.read(Path("book.txt")).tokens == 680
        other = Session(session.model)
        other.read("Call me Ishmael. " * 40)
        assert other.read("Good night.") == session.read("Good night.")  # the same memory

    @pytest.mark.parametrize("text", ["no such name", "a\0b", "x" * 5000, "a text\nof lines", "."])
    def test_a_text_that_no_file_is_called_is_a_text(self, session, text):
        assert session.read(text).tokens == len(text)

    def test_what_is_no_text_file_is_refused(self, session, tmp_path):
        (tmp_path / "empty.txt").touch()
        for path, why in (
            (tmp_path, "a folder"),
            (tmp_path / "no", "nothing there"),
            (tmp_path / "empty.txt", "which is empty"),
        ):
            with pytest.raises(ValueError, match=f"source: expected .*{why}"):
                session.read(path)


class TestTrackers:
    @pytest.mark.parametrize("name", ["wandb", "tensorboard"])
    def test_one_that_is_not_installed_names_its_extra(self, command, tmp_path, monkeypatch, name):
        found = importlib.util.find_spec
        monkeypatch.setattr(
            "remanence.train.metrics.find_spec", lambda each: None if each == name else found(each)
        )
        said = command(
            "train", "recall", f"--trackers={name}", "--device=cpu", "--out", tmp_path / "run", code=2
        )
        assert f"pip install 'remanence[{name}]'" in said and not (tmp_path / "run").exists()

    def test_a_folder_of_its_files_is_not_the_package(self, command, tmp_path, monkeypatch):
        spec = importlib.machinery.ModuleSpec("wandb", None, is_package=True)  # as ./wandb is found
        monkeypatch.setattr("remanence.train.metrics.find_spec", lambda name: spec)
        said = command(
            "train", "recall", "--trackers=wandb", "--device=cpu", "--out", tmp_path / "run", code=2
        )
        assert "pip install 'remanence[wandb]'" in said
