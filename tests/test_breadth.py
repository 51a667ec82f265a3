"""The experiments `breadth` and `train_for` of facts in small: how answers are scored, that every part asks for what it
states, and that several processes draw the same batches as one.
"""

import importlib
import json
import lzma
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from remanence.config import preset
from remanence.data import Tokens
from remanence.model import Model
from remanence.tasks.broad_facts import BroadFacts
from remanence.tasks.fact_phrases import UNKNOWN, Fact
from remanence.train import FactsData, TrainConfig

SENTENCES = b"It rained. Nobody came until the evening fell on the hill. "


@pytest.fixture
def bench():
    return importlib.import_module("experiments.facts.breadth")


@pytest.fixture
def asker(bench):
    torch.manual_seed(0)
    model = preset("tiny", "lmm", dim=32, num_layers=1, vocab_size=257, memory={"heads": 1})
    return bench.Asker(Model(model).eval(), SENTENCES * 400, 0)


@pytest.fixture
def books(tmp_path):
    folder = tmp_path / "books"
    folder.mkdir()
    index = [{"file": f"{split}.txt.xz", "split": split} for split in ("train", "test")]
    for book in index:
        (folder / book["file"]).write_bytes(lzma.compress(SENTENCES * 600))
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def test_an_answer_is_right_if_it_ends(bench):
    facts = (Fact("", "", "136"), Fact("", "", "blue tiger"))
    said = ["136. The", "13608.", "blue tiger.", "unknown."]
    row = bench.scored([(bench.Question(facts, "?", "136"), text) for text in said])
    assert (row["count"], row["leading"], row["right"], row["stated"], row["unknown"]) == (4, 2, 1, 3, 1)


def test_what_is_asked_is_stated_once(bench, asker, monkeypatch):
    """In every part; the answer of a question about something unknown is not stated."""
    seen = []
    monkeypatch.setattr(bench.Asker, "answered", lambda self, questions, state: seen.append(questions) or {})
    monkeypatch.setattr(bench.Asker, "read", lambda self, texts: SimpleNamespace(rows=lambda rows: None))
    for part in (bench.digits, bench.card, bench.kinds, bench.held_out, bench.unknown, bench.facts):
        for _ in part(asker, 3):
            questions = seen.pop()
            texts = asker.texts(questions, 64)
            assert len({len(text) for text in texts}) == 1
            for question, text in zip(questions, texts, strict=True):
                if question.value == UNKNOWN:
                    assert question.question not in {fact.question for fact in question.facts}
                else:
                    assert [f.value for f in question.facts if f.question == question.question] == [
                        question.value
                    ]
                for fact in question.facts:
                    assert bytes(text).count(fact.statement.encode()) == 1 and fact.value in fact.statement


def test_the_table_has_all_models(bench):
    what = {"part": "digits", "seed": 0, "count": 4, "title": "3"}
    rows = [
        {
            "what": {**what, "model": model},
            "title": "3",
            "right": right,
            "count": 4,
            "leading": 4,
            "unknown": 0,
        }
        for model, right in (("one", 4), ("two", 3))
    ]
    assert "| digits | 3 | 4 of 4 | 3 of 4 (4 leading) |" in bench.table(rows)


@pytest.mark.slow
def test_several_processes_draw_the_batches_of_one(books, tmp_path):
    script = importlib.import_module("experiments.facts.train_for")
    tokens = script.prepared(books, tmp_path)
    data = FactsData(path=str(tokens), length=512, weight=0.1, distance_ramp=10, facts="broad")
    model = preset("tiny", "lmm", dim=32, num_layers=1, memory={"heads": 1})
    source = script.Parallel(TrainConfig(model=model, data=data, batch=4, seed=3, carry=True), 2)
    one = BroadFacts(Tokens(tokens), 512, 4, 0.1, 10, 3)
    try:
        for number in (0, 1, 5):
            for a, b in zip(source.step(number), one.step(number), strict=True):
                assert (a is None and b is None) or np.array_equal(a, b)
    finally:
        source.close()


@pytest.mark.slow
def test_a_model_is_trained_for_a_time_and_measured(books, tmp_path, experiment):
    wikitext = tmp_path / "wikitext.txt"
    wikitext.write_bytes(SENTENCES * 400)
    about = [
        str(books),
        "--seeds",
        "0",
        "--train-seconds",
        "40",
        "--workers",
        "2",
        "--work",
        str(tmp_path / "work"),
    ]
    out = tmp_path / "out"
    experiment(
        "facts.train_for", *about, "--out", str(out), "--wikitext", str(wikitext), "--tiny", "--part", "train"
    )
    took = json.loads((tmp_path / "work" / "base-0" / "took.json").read_text())
    assert took["steps"] >= 2 and took["config"]["data"]["facts"] == "broad"
