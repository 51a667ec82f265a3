"""The experiment on attached memories in small: every part, taken up again, as table and plot."""

import importlib
import json
import lzma
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

from remanence.data.prepare import prepare
from remanence.tokenizers.tokens import ByteTokenizer


@pytest.fixture
def bench(monkeypatch):
    return importlib.import_module("experiments.attach.run")


@pytest.fixture
def given(tmp_path):
    """A pretrained model, books, and the same books as its tokens."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=257, max_position_embeddings=256, **shape))
    base.save_pretrained(tmp_path / "base")
    ByteTokenizer().save(tmp_path / "base")
    rng = np.random.default_rng(0)
    words = [bytes(rng.integers(97, 123, 5).tolist()).decode() for _ in range(200)]
    text = " ".join(words[int(index)] for index in rng.integers(200, size=600)) + ".\n"
    books = tmp_path / "books"
    books.mkdir()
    (books / "one.txt.xz").write_bytes(lzma.compress(text.encode()))
    (books / "index.json").write_text(json.dumps([{"file": "one.txt.xz", "split": "test"}]))
    (tmp_path / "one.txt").write_text(text)
    prepare([tmp_path / "one.txt"], tmp_path / "tokens")
    return tmp_path


@pytest.mark.slow
def test_every_part(bench, given, monkeypatch, capsys):
    out = given / "rows.json"

    def called(*arguments):
        command = ["attach.py", given / "base", "--out", out, "--tiny", *arguments]
        monkeypatch.setattr(sys, "argv", [str(each) for each in command])
        bench.main()
        return capsys.readouterr().out

    about = [
        "--tokens",
        given / "tokens",
        "--books",
        given / "books",
        "--work",
        given / "work",
        "--commit",
        "x",
    ]
    called(*about, "--parts", "train", "facts")
    told = called(*about)  # what is left
    assert "'facts'" not in told and "step" not in told
    rows = json.loads(out.read_text())["rows"]
    parts = [row["what"].get("reach", row["what"]["part"]) for row in rows]
    assert {part: parts.count(part) for part in parts} == {
        "facts": 6,
        "near": 6,
        "far": 5,
        "gates": 1,
        "speed": 3,
    }
    assert all(row["asked"] == 6 for row in rows if row["what"]["part"] == "facts")
    for row in rows:
        assert all(0 < bits / size < 20 for _, bits, size in row.get("positions", ()))
    (found,) = [row["gates"] for row in rows if "gates" in row]
    assert len(found) == 2 and all(0 < step < 1 for row in found for step in row[2:5])  # one layer, two heads
    table = called("--table", "--plot", given / "plot.png")
    assert (given / "plot.png").stat().st_size > 5000
    for words in (
        "window and memory",
        "full attention, memory frozen",
        "of 6",
        "others",
        "step at values",
        "tokens/s read",
    ):
        assert words in table


def test_what_an_untrained_memory_finds(given, monkeypatch, capsys):
    begin = importlib.import_module("experiments.attach.untrained")
    given_here = [
        "--layers",
        "1",
        "--convs",
        "4",
        "8",
        "--told",
        "3",
        "--distance",
        "64",
        "--conversations",
        "2",
    ]
    command = ["attach_begin.py", given / "base", "--books", given / "books", "--window", 32, *given_here]
    monkeypatch.setattr(sys, "argv", [str(each) for each in command])
    begin.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[2].startswith("| 1 | 4 |") and lines[3].count("%") == 3
