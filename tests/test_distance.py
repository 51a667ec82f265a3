"""experiments/facts/distance.py in small: its runs, its questions, and that a question leaves the reading unchanged."""

import importlib
import json
import lzma
from argparse import Namespace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from remanence import Model, preset
from remanence.model import parameters
from remanence.tasks.answers import Likelihood

ARGS = Namespace(work=Path("nowhere"), steps=None, changes=[])


@pytest.fixture
def bench():
    return importlib.import_module("experiments.facts.distance")


@pytest.fixture
def books():
    rng = np.random.default_rng(0)
    words = [bytes(rng.integers(97, 123, rng.integers(2, 8)).tolist()) for _ in range(300)]
    text = b" ".join(words[int(index)] for index in rng.integers(300, size=3000)) + b".\n"
    return [torch.frombuffer(bytearray(text), dtype=torch.uint8)]


def test_all_runs_have_as_many_parameters_and_plain_ones_pay_nothing(bench):
    configs = {name: bench.config_of(name, 0, ARGS) for name in bench.RUNS}
    counts = [parameters(config.model) for config in configs.values()]
    assert max(counts) < 1.02 * min(counts)
    assert configs["mag"].write_cost > 0 and configs["mag"].carry
    assert configs["window"].write_cost == configs["mag-sigmoid"].write_cost == 0
    assert not configs["attention"].carry


def test_facts_are_in_the_text_and_the_asked_one_is_told_apart(bench, books):
    texts = bench.Texts(books, 3, 0)
    facts = bench.Facts(texts, 3, 4)
    said = facts.stated(texts, 1024)
    assert said.shape == (3, 1024)
    for row, names, values in zip(said, facts.names, facts.values, strict=True):
        text = bytes(row.tolist()).decode()
        assert len(set(names)) == 4
        assert all(
            text.count(name) == 1 and text.count(value) == 1
            for name, value in zip(names, values, strict=True)
        )


def test_numbers_are_all_that_stands_around_the_digits_of_books(bench):
    book = b"a" * 100 + b"12" + b"b" * 10 + b"3" + b"c" * 100 + b"7"
    found = bench.around_digits([torch.frombuffer(bytearray(book), dtype=torch.uint8)])
    expected = b"a" * 24 + b"12" + b"b" * 10 + b"3" + b"c" * 48 + b"7"
    assert bytes(found.tolist()) == expected


def test_an_answer_with_more_digits_is_wrong(bench, books, monkeypatch):
    """The same greedy value, once ended by a period and once by another digit."""
    texts = bench.Texts(books, 2, 0)
    facts = bench.Facts(texts, 2, 1)
    subject = bench.Subject(torch.device("cpu"), tokens=bench.ByteTokenizer())
    found = [Likelihood(-1.0, True, "."), Likelihood(-1.0, True, "8")]
    monkeypatch.setattr(subject, "likelihoods", lambda *_: found)
    assert facts.right(subject, None) == [True, False]


@pytest.mark.parametrize("kind", ["single", "late"])
def test_a_text_that_was_asked_goes_on_as_if_it_had_not_been(bench, books, kind, monkeypatch):
    """The states that are asked at the last distance are those of a reading that was asked nowhere before."""
    asked = []

    def right(self, subject, state):
        asked.append(state)
        return [True] * len(self.names)

    monkeypatch.setattr(bench.Facts, "right", right)
    model = Model(preset("tiny", "mag", window=16)).eval()
    if kind == "late":  # facts are drawn anew at each distance: the text's own reading is what counts
        monkeypatch.setattr(bench.Facts, "stated", lambda self, texts, length: texts.take(length))
    both = list(bench.measure(model, kind, [64, 200], books, 2, 1, 64))
    alone = list(bench.measure(model, kind, [200], books, 2, 1, 64))
    assert [each["distance"] for each in both] == [64, 200] and alone[0]["count"] == 2
    _, last, other = asked
    for a, b in zip(last.tensors(), other.tensors(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_it_trains_asks_and_prints(tmp_path, books, experiment):
    folder = tmp_path / "books"
    folder.mkdir()
    index = []
    for split in ("train", "test"):
        (folder / f"{split}.txt.xz").write_bytes(lzma.compress(bytes(books[0].tolist())))
        index.append({"file": f"{split}.txt.xz", "split": split})
    (folder / "index.json").write_text(json.dumps(index))

    called = partial(experiment, "facts.distance", folder)
    out = ["--out", tmp_path / "rows.json"]
    called(
        "--tiny", "--jobs", 2, "--work", tmp_path / "work", "--kinds", "single", "--modes", "on", "off", *out
    )
    called(
        "--model",
        "remanence-small",
        "--texts",
        2,
        "--kinds",
        "single",
        "--distances",
        1024,
        "--out",
        tmp_path / "own.json",
    )
    (own,) = json.loads((tmp_path / "own.json").read_text())["rows"]
    assert own["what"]["run"] == "remanence-small" and own["answers"][0]["right"] == 2
    printed = called(*out, "--table", "--plot", tmp_path / "plot.png")
    cells = [line.split(" | ")[:4] for line in printed.strip().splitlines()[2:]]
    assert [(run.split()[1], *others) for run, *others in cells] == [
        ("mag-context", "single", "ruler", "on"), ("mag-context", "single", "ruler", "off"),
        ("window", "single", "ruler", "on"),
    ]  # fmt: skip
    assert (tmp_path / "plot.png").exists()
