"""experiments/mechanics/run.py in small: its tasks are what they say, and its tables are whole."""

import importlib
import itertools
import json
import lzma
import random
from functools import partial

import pytest
import torch


@pytest.fixture
def mechanics():
    return importlib.import_module("experiments.mechanics.run")


@pytest.fixture
def books(tmp_path):
    draw, words = random.Random(0), [f"word{i}" for i in range(500)]
    index = [{"file": f"{split}.txt.xz", "split": split} for split in ("train", "validation")]
    for book in index:
        text = " ".join(draw.choices(words, k=1200)).encode()
        (tmp_path / book["file"]).write_bytes(lzma.compress(text))
    (tmp_path / "index.json").write_text(json.dumps(index))
    return tmp_path


def test_states_are_those_that_tokens_lead_to(mechanics):
    bits, parity = mechanics.tracked("parity", 3, 20, 0)
    assert parity[:, -1].tolist() == [sum(row) % 2 for row in bits.tolist()]
    swaps, states = mechanics.tracked("s5", 3, 20, 0)
    order = list(itertools.permutations(range(5)))
    for row, found in zip(swaps.tolist(), states.tolist(), strict=True):
        cups = list(range(5))  # where each of five balls is
        for swap, state in zip(row, found, strict=True):
            cups = [{swap: swap + 1, swap + 1: swap}.get(cup, cup) for cup in cups]
            assert order[state] == tuple(cups)


def test_a_wide_step_is_twice_the_gate(mechanics):
    what = {"part": "track", "task": "parity", "seed": 0, "length": 32, "dim": 64, "depth": 1, "head_dim": 32}
    plain, wide = (
        mechanics.made({**what, "run": run}, torch.device("cpu")) for run in ("deep1", "deep1-wide")
    )
    wide.load_state_dict(plain.state_dict())
    tokens, _ = mechanics.tracked("parity", 2, 8, 0)
    steps = [model.trace(tokens).traces[0].gates.log_step.exp() for model in (plain, wide)]
    torch.testing.assert_close(2 * steps[0], steps[1])


def test_a_matrix_set_by_hand_tracks_states(mechanics):
    what = {"seed": 0, "length": 32, "texts": 4, "farthest": 64}
    for run, task in itertools.product(mechanics.HAND, mechanics.TASKS):
        found = mechanics.construct({**what, "run": run, "task": task}, torch.device("cpu"))["right"]
        assert found == {32: 1.0, 64: 1.0}, (run, task)


@torch.no_grad()
def test_the_chunk_is_a_detail_for_deep_and_none_for_titans(mechanics):
    what = {
        "part": "recall",
        "task": "recall",
        "seed": 0,
        "dim": 64,
        "depth": 1,
        "head_dim": 32,
        "length": 64,
    }
    tokens = torch.randint(48, (2, 64))
    for run, same in (("deep", True), ("titans", False)):
        model = mechanics.made({**what, "run": run}, torch.device("cpu"))
        one, other = (mechanics.with_chunk(model, chunk)(tokens)[0] for chunk in (1, 64))
        assert torch.allclose(one, other, atol=1e-4) == same


@pytest.mark.slow
def test_all_parts_save_and_print(books, tmp_path, experiment):
    called = partial(experiment, "mechanics.run")
    out = ["--tiny", "--out", tmp_path / "a.json"]
    called("construct", *out, "--farthest", 128)
    called("track", *out, "--runs", "deep1", "deep1-wide", "titans2", "attention")
    called("recall", *out, "--runs", "deep", "deep-depth1", "titans", "titans-no-momentum", "--farthest", 256)
    settings = ["--farthest", 512, "--length", 64]
    called("language", *out, "--books", books, "--runs", "deep", "titans", "titans-linear", *settings)
    again = called("track", *out, "--runs", "deep1")
    assert again == ""  # nothing is run twice
    printed = called(*out, "--table", "--plot", tmp_path / "plot.png")
    assert (
        "**track: s5**" in printed
        and "| titans-no-momentum | 1 |" in printed
        and "| titans | 16 |" in printed
    )
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert len(rows) == 4 + 8 + 4 + 3 and (tmp_path / "plot.png").exists()
    assert list(rows[-2]["chunks"]) == ["1", "4", "16", "64", "256"]
    assert set(rows[-2]["gates"][0]) == {"step", "momentum", "forget"}
