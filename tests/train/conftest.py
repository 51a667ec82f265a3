import json
import random

import pytest
from pair import two_processes

from remanence.data import prepare


@pytest.fixture
def shards(tmp_path):
    chance = random.Random(0)
    texts = ["".join(chance.choices("abcdef ", k=chance.randint(3, 90))) for _ in range(30)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare([tmp_path / "t.jsonl"], tmp_path / "tokens")
    return str(tmp_path / "tokens")


@pytest.fixture(scope="module")
def on_two():
    """Call a function in both of two processes, which the tests of a file share: importing torch takes longer than most
    of the calls.
    """
    with two_processes() as call:
        yield call
