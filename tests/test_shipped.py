"""Models that come with the package are opened by name, wherever a model's folder is."""

import json

import pytest
import torch

from remanence import Model, Session, cli
from remanence.io import shipped
from remanence.tokenizers.tokens import load_tokenizer
from remanence.train import TrainConfig
from remanence.train.run import resolve_config

TEXT = "It was the best of times, it was the worst of times. " * 20


@pytest.fixture
def run(tmp_path, command, monkeypatch):
    """Commands in a folder of their own, beside a package that holds one model, `reader`."""
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "package")
    cli.main(["new", "tiny", str(tmp_path / "package" / "reader"), "--variant", "mag"])
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    (tmp_path / "home" / "book.txt").write_text(TEXT)
    return command


def test_by_name_at_the_command_line(run, tmp_path):
    run("read", "reader", "book.txt", "--save", "book.mem", "--device", "cpu")
    facts = json.loads(run("inspect", "reader", "--json"))
    assert facts["parameters"] > 0
    said = run(
        "generate", "reader", "--memory-file", "book.mem", "--prompt", "It", "--max-tokens", 3, "--seed", 1
    )
    session = Session(tmp_path / "package" / "reader")
    session.read(TEXT)
    assert said == session.generate("It", max_tokens=3, seed=1) + "\n"
    run("eval", "reader", "lm", "--data=book.txt", "--json", "out.json", "--device", "cpu")
    assert (tmp_path / "home" / "out.json").is_file()


def test_by_name_in_python(run, tmp_path):
    assert shipped.shipped_models() == ["reader"]
    model, same = Model.load("reader"), Model.load(tmp_path / "package" / "reader")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))
    assert load_tokenizer("reader").encode("a") == [97]
    config = resolve_config(TrainConfig(init_from="reader"))
    assert config.init_from == str(tmp_path / "package" / "reader") and config.model == same.config


def test_a_folder_of_that_name_comes_first(run, tmp_path):
    run("new", "tiny", "reader", "--variant", "lmm")
    assert Model.load("reader").config.pattern == ("lmm",)


def test_a_name_that_there_is_not(run):
    said = run("read", "raeder", "book.txt", "--save", "book.mem", code=2)
    assert "config.json and model.safetensors, or the name reader, got raeder" in said


def test_the_small_reader_is_in_the_package(tmp_path, command, monkeypatch):
    """Opened by its name alone it keeps a fact beyond its window, at the command line and after a file."""
    assert shipped.shipped_models() == ["remanence-small", "remanence-smollm2"]
    folder = shipped.FOLDER / "remanence-small"
    assert (folder / "model.safetensors").stat().st_size <= 12e6
    card = (folder / "README.md").read_text()
    assert all(f"## {part}" in card for part in ("Use", "Training", "What it does", "Limits", "Licence"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text(f" The number of the silent harbor is 4170283. {TEXT}")
    command("read", "remanence-small", "book.txt", "--save", "book.mem", "--device", "cpu")
    asked = (
        "generate",
        "remanence-small",
        "--prompt",
        " What is the number of the silent harbor?",
        "--max-tokens",
        8,
    )
    assert command(*asked, "--memory-file", "book.mem").strip() == "4170283"
    assert "4170283" not in command(*asked)
