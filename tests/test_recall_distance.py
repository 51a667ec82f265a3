"""experiments/recall/distance.py in small: what is asked, and that asking does not disturb the reading."""

import importlib
import json
from argparse import Namespace
from functools import partial

import pytest
import torch

from remanence import Model
from remanence.inference.reader import read
from remanence.model import parameters

ARGS = Namespace(distances=[64, 128], reach=None, texts=[3, 2], many=64, off=64, late=32, store=64)


@pytest.fixture
def bench():
    return importlib.import_module("experiments.recall.distance")


def test_all_models_have_as_many_parameters(bench):
    counts = [parameters(bench.config_of(name, ARGS)) for name in bench.RUNS]
    assert max(counts) < 1.05 * min(counts)


@torch.no_grad()
def test_a_state_is_asked_as_if_the_text_ended_there(bench):
    """The last answers are those of a text that was never asked before, and of the rows that went on alone."""
    model = Model(bench.config_of("lmm", ARGS)).eval()
    found = bench.measure(model, 0, "on", ARGS)
    assert [(each["distance"], each["kind"], each["count"]) for each in found] == [
        (64, "early", 24), (64, "late", 24), (128, "early", 16), (128, "late", 16),
    ]  # fmt: skip
    texts = bench.Texts(3, 0)
    pairs, noise = texts.pairs(), texts.noise(64 - bench.STATED)
    texts.pairs(), texts.noise(32 - bench.STATED)
    texts.rows = 2
    whole = torch.cat([pairs[:2], noise[:2], texts.noise(64)], 1)
    assert bench.right(model, read(model, whole).state, pairs[:2], "on") == found[2]["right"]


def test_answers_are_those_after_each_key_alone(bench):
    model = Model(bench.config_of("window", ARGS)).eval()
    texts = bench.Texts(2, 0)
    pairs = texts.pairs()
    state = read(model, pairs).state
    with torch.no_grad():
        told = [
            model(torch.cat([pairs[row : row + 1], key.view(1, 1)], 1))[0][0, -1].argmax() == value
            for row in range(2)
            for key, value in pairs[row].view(-1, 2)
        ]
    assert bench.right(model, state, pairs, None) == sum(map(int, told))


@pytest.mark.slow
def test_it_saves_and_prints(tmp_path, experiment):
    called = partial(experiment, "recall.distance")
    out = ["--out", tmp_path / "rows.json"]
    runs = [
        "lmm",
        "mac",
        "window",
        "memorizing",
        "gated_delta-threshold",
    ]  # every kind of layer, with a write cost
    called("--tiny", "--runs", *runs, *out)
    assert called("--tiny", "--runs", *runs, *out) == ""
    printed = called(*out, "--table", "--plot", tmp_path / "plot.png")
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["what"]["run"] for row in rows] == runs
    assert all(f"| {run} | 1 | early | on |" in printed for run in runs)
    assert (tmp_path / "plot.png").exists()
