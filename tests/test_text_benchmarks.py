"""The experiments on texts in small: they read as a model reads, and their tables are whole."""

import importlib
import json
import lzma
import random
import re
from collections import Counter

import pytest
import torch

from remanence import Model, preset


@pytest.fixture
def bench():
    return lambda name: importlib.import_module(f"experiments.{name}")


@pytest.fixture
def home(tmp_path):
    draw, words = random.Random(0), [f"word{i}" for i in range(500)]
    index = []
    for split in ("train", "train", "validation", "test"):
        name = f"{len(index)}.txt.xz"
        text = " ".join(draw.choices(words, k=1200)).encode()
        (tmp_path / name).write_bytes(lzma.compress(text))
        index.append({"file": name, "split": split})
    (tmp_path / "index.json").write_text(json.dumps(index))
    return tmp_path


def test_pieces_are_in_order_and_never_leave_a_book(bench):
    books = bench("shared")
    texts = [torch.zeros(n, dtype=torch.uint8) for n in (900, 500)]
    plan, new = books.plan_of(texts, rows=3, length=64, steps=40, seed=0, restart=0.1)
    assert new[0].all()
    assert torch.equal(plan[1:][~new[1:]], plan[:-1][~new[1:]] + 64)
    assert ((plan + 64 < 900) | (plan >= 900)).all() and (plan + 64 < 1400).all()
    again = books.plan_of(texts, rows=3, length=64, steps=40, seed=0, restart=0.1)
    assert torch.equal(plan, again[0]) and torch.equal(new, again[1])


@torch.no_grad()
def test_reading_is_one_call_in_pieces(bench):
    books = bench("shared")
    x = torch.randint(256, (2, 385), dtype=torch.uint8)
    for variant in ("mag", "memorizing"):
        model = Model(preset("tiny", variant, num_layers=1, window=64, segment=64)).eval()
        whole, _ = books.bits_of(model, x)
        torch.testing.assert_close(books.read(model, x, 100), whole, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_restarted_context_ends_where_it_is_scored(bench):
    books = bench("shared")
    x = torch.randint(256, (2, 321), dtype=torch.uint8)
    model = Model(preset("tiny", "attention", num_layers=1)).eval()
    for length, stride in ((128, 128), (128, 64)):
        bits = books.read_restarted(model, x, length, stride)
        assert bits.shape == (2, 320)
        for place in (0, 127, 128, 200, 319):
            last = min(length + max(0, -(-(place + 1 - length) // stride)) * stride, 320)
            alone, _ = books.bits_of(model, x[:, last - length : place + 2])
            torch.testing.assert_close(alone[:, -1], bits[:, place], atol=1e-4, rtol=1e-4)


def test_classes_of_words(bench):
    memorizing = bench("knn.memorizing")
    text = b"a rare word and a word" + b" " * 40 + b"a unseen rare"
    counts = Counter({b"a": 20000, b"rare": 5, b"word": 50, b"and": 3000})
    x = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    found = memorizing.classes_of(x, re.compile(memorizing.WORDS["books"]), counts, window=32)
    at = lambda word, start=0: found[text.index(word, start) - 1].item()
    assert len(found) == len(text) - 1 and at(b" ") == 18
    assert [at(b"rare"), at(b"word"), at(b"and"), at(b"unseen")] == [3, 6, 12, 0]
    assert at(b"word", 16) == 7 and at(b"a unseen") == 17 and at(b"rare", 50) == 5


@pytest.mark.slow
def test_language_saves_merges_and_prints(home, tmp_path, experiment):
    small = [home, "--tiny", "--steps", 2]
    experiment("language.run", *small, "--runs", "window", "window-gate", "--out", tmp_path / "a.json")
    experiment("language.run", *small, "--runs", "mag", "attention", "--out", tmp_path / "b.json")
    assert experiment("language.run", *small, "--runs", "window", "--out", tmp_path / "a.json") == ""
    both = ["--out", tmp_path / "c.json", "--merge", tmp_path / "a.json", tmp_path / "b.json", "--table"]
    printed = experiment("language.run", home, *both, "--plot", tmp_path / "plot.png")
    assert all(f"| {name} |" in printed for name in ("window", "window-gate", "mag", "attention, overlapped"))
    rows = json.loads((tmp_path / "c.json").read_text())["rows"]
    assert len(rows) == 4 and (tmp_path / "plot.png").exists()
    assert list(rows[2]["bits"]["test"]) == ["on", "off", "frozen", "fresh"]


@pytest.mark.slow
def test_memorizing_saves_and_prints(home, tmp_path, experiment):
    out = ["--out", tmp_path / "m.json"]
    experiment("knn.memorizing", home, "--tiny", "--corpora", "books", *out)
    printed = experiment("knn.memorizing", home, *out, "--table", "--plot", tmp_path / "plot.png")
    assert "| 0.125K, tuned with 1K |" in printed and "same sign" in printed
    rows = json.loads((tmp_path / "m.json").read_text())["rows"]
    assert len(rows) == 7 and len({row["parameters"] for row in rows}) == 1
    for row in rows:  # every byte is in one class
        assert torch.tensor(row["counts"]).sum(1).tolist() == [2048] * len(row["counts"])


@pytest.mark.slow
def test_addressing_saves_and_prints(home, tmp_path, experiment):
    out = ["--out", tmp_path / "a.json"]
    experiment("facts.addressing", home, "--tiny", "--runs", "lmm, conv 4", "mag, conv 16, induction", *out)
    printed = experiment("facts.addressing", home, *out, "--table")
    assert "| mag, conv 16, induction | 0 |" in printed
    assert [len(row["curve"]) for row in json.loads((tmp_path / "a.json").read_text())["rows"]] == [2, 2]
