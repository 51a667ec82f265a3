"""The card of an exported model: its facts are the model's, and what it says to type works."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from runs import config
from series import config as forecast_config
from series import waves, written

from remanence import Model
from remanence.data import prepare
from remanence.io.files import read_json
from remanence.train import DataConfig, export, fit


@pytest.fixture
def exported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("A text of any length. " * 40)
    prepare([tmp_path / "book.txt"], tmp_path / "tokens")
    fit(config("mag", data=DataConfig(kind="packed", path="tokens", length=24), steps=2), tmp_path / "run")
    export(tmp_path / "run", tmp_path / "mine")
    return (tmp_path / "mine" / "README.md").read_text()


def test_its_facts_are_the_models(exported):
    count = sum(parameter.numel() for parameter in Model.load("mine").parameters())
    trained = read_json(Path("mine/trained.json"))
    assert (
        f"# mine\n\n{count:,} parameters: depth 1, width 16 (1 mag), float32, a vocabulary of 257" in exported
    )
    assert f"on {trained['tokens']:,} tokens in 2 steps (data: packed)" in exported


def check_commands(card, command):
    """Run the commands and the Python of a card, and have Hugging Face's own reader read its header."""
    typed = [shlex.split(line) for line in re.findall(r"^    remanence (.+)$", card, re.M)]
    assert typed
    for words in typed:
        if words[0] == "generate":
            words += ["--max-tokens", "4"]
        if words[0] == "eval":
            words += ["--distances=8", "--texts=2"] if words[2] == "recall" else []
        command(*words, "--device", "cpu")
    for block in re.findall(r"(?:^    \S.*\n(?:\n(?=    ))?)+", card, re.M):
        if not block.startswith("    remanence "):
            code = "".join(line[4:] or "\n" for line in block.splitlines(keepends=True))
            exec(compile(code, "README.md", "exec"), {})
    from huggingface_hub import ModelCard

    assert ModelCard(card).data.to_dict()["library_name"] == "remanence"


def test_what_it_says_to_type_works(exported, command):
    check_commands(exported, command)
    assert "pipeline_tag: text-generation" in exported


STORY = "1 Mary moved to the office.\n2 John went to the garden.\n3 Where is Mary? \toffice\t1\n"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "data",
    [
        DataConfig(kind="recall", length=24, pairs=4, keys=8, noise=4),
        DataConfig(kind="needle", length=256, pairs=1),
        DataConfig(kind="facts", path="tokens", length=512),
        DataConfig(kind="documents", path="tokens", length=24),
        DataConfig(kind="babilong", path="babi", books="book.txt", tasks=("qa1",), length=256),
        DataConfig(kind="genome", path="genome.fna", length=24),
        DataConfig(kind="dna", path="table.csv", length=24),
        DataConfig(kind="forecast", path="series.csv", length=24, horizon=8),
    ],
    ids=lambda data: data.kind,
)
def test_what_it_says_to_type_works_for_every_kind_of_data(data, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("A text of any length. It goes on. " * 100)
    Path("bases.txt").write_text("ACGTTGCA" * 9)
    Path("genome.fna").write_text(">one\n" + "ACGTTGCA" * 90 + "\n")
    Path("table.csv").write_text("sequence,label\n" + "ACGTTGCA,a\nTTGCATTT,b\n" * 4)
    Path("babi").mkdir()
    Path("babi/qa1_one_train.txt").write_text(STORY * 4)
    written(Path("series.csv"), waves(400))
    Path("other.txt").write_text("Another text. " * 100)
    prepare([Path("book.txt"), Path("other.txt")], Path("tokens"))
    if data.kind == "forecast":
        given = forecast_config("series.csv", steps=2)
    else:
        vocabulary = {"recall": 20, "genome": 32, "dna": 32}.get(data.kind, 257)
        given = config("mag", data=data, steps=1, batch=2)
        given = replace(given, model=replace(given.model, vocab_size=vocabulary))
    fit(given, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "mine")
    check_commands(Path("mine/README.md").read_text(), command)
