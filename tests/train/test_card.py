"""The card of an exported model: its facts are the model's, and what it says to type works."""

import re
import shlex
from pathlib import Path

import pytest
from runs import config

from remanence import Model
from remanence.core.files import read_json
from remanence.data import prepare
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


def test_what_it_says_to_type_works(exported, command):
    """The commands, the Python, and by Hugging Face's own reader of cards its header."""
    typed = [shlex.split(line) for line in re.findall(r"^    remanence (.+)$", exported, re.M)]
    assert [words[0] for words in typed] == ["read", "generate"]
    for words in typed:
        command(*words, "--device", "cpu")
    blocks = re.findall(r"(?:^    \S.*\n(?:\n(?=    ))?)+", exported, re.M)
    for block in blocks[1:]:
        code = "".join(line[4:] or "\n" for line in block.splitlines(keepends=True))
        exec(compile(code, "README.md", "exec"), {})
    from huggingface_hub import ModelCard

    header = ModelCard(exported).data.to_dict()
    assert header["library_name"] == "remanence" and header["pipeline_tag"] == "text-generation"
