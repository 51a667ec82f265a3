"""experiments/facts/small_limits.py in small: how answers are scored, and that every part asks and keeps its rows."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def bench():
    return importlib.import_module("experiments.facts.small_limits")


def test_a_prefix_leads_and_is_not_right(bench):
    found = bench.scored([("136", "136. The"), ("136", "13608. "), ("136", "8136. "), ("red", "red.")])
    assert (found["count"], found["leading"], found["right"]) == (4, 3, 2)


class Stub:
    """Answers every question with a stated number, and two digits more."""

    def __init__(self, bench):
        self.bench, self.made = bench, bench.Asker.__new__(bench.Asker)
        self.made.rng, self.made.book = bench.np.random.default_rng(0), b"A book. " * 4000
        self.made.session = self
        self.text = ""

    def fork(self):
        return self

    def read(self, text):
        self.text = text

    def generate(self, question, max_tokens, temperature):
        assert temperature == 0
        import re

        return f" {re.findall(r'[0-9]+', self.text)[-1]}08."[: max_tokens + 1]


def test_every_part_states_what_it_asks_for(bench):
    """A model that repeats the number it has read leads everywhere, and is right nowhere."""
    asker = Stub(bench).made
    for part in (bench.digits, bench.wordings, bench.names, bench.far):
        for title, row in part(asker, 2):
            assert (row["leading"], row["right"], row["count"]) == (2, 0, 2), title
    for title, row in bench.unknown(asker, 2):
        assert (row["stated"], row["right"]) == (2, 0), title


@pytest.mark.slow
def test_the_command(tmp_path):
    command = [
        sys.executable,
        "-m",
        "experiments.facts.small_limits",
        "--tiny",
        "--out",
        str(tmp_path / "rows.json"),
    ]
    done = subprocess.run([*command, "--parts", "books"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["count"] == row["leading"] == 2 and "| books |" in done.stdout
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "--wikitext: expected a file of WikiText" in done.stderr
