"""A curriculum's texts are stories in hay of exactly so many tokens, and all their questions are answered as told."""

import hashlib
import re
from contextlib import closing

import numpy as np
import pytest
import torch

from remanence.config import ModelConfig
from remanence.tasks.babilong import PROMPT, parse_stories
from remanence.tasks.curriculum import Curriculum
from remanence.tokenizers.tokens import ByteTokenizer
from remanence.train import DataConfig, Run, TrainConfig, fit, override
from remanence.train.sources import Prefetcher

PLACES = ("hallway", "kitchen", "garden", "office")
BOOK = [f"It was the {n}th day of the long journey." for n in range(400)]
ASKED = re.compile(rf"\nQuestion: Where is (\w+)\?{PROMPT} (\w+)\n")


def babi(stories=9, rounds=3):
    """Two facts and a question, three times: who went where last."""
    chance, lines = np.random.default_rng(3), []
    for _ in range(stories):
        number = 0
        for _ in range(rounds):
            told = {}
            for name in ("Mary", "John"):
                number += 1
                told[name] = PLACES[chance.integers(4)]
                lines.append(f"{number} {name} went to the {told[name]}.")
            number += 1
            lines.append(f"{number} Where is Mary? \t{told['Mary']}\t1")
    return "\n".join(lines) + "\n"


def source(curriculum, tokens=2048, steps=60, seed=7, rank=0):
    told = {"qa1": list(parse_stories(babi()))}
    return Curriculum(told, BOOK, ByteTokenizer(), curriculum, tokens, steps, seed, rank)


def texts(batch):
    return [ByteTokenizer().decode(row) for row in batch.tokens.tolist()]


def answers_are_told(text):
    """How many questions a text has; each is answered with the place that its person went to last."""
    found = list(ASKED.finditer(text))
    for asked in found:
        last = re.findall(rf"{asked[1]} went to the (\w+)\.", text[: asked.start()])[-1]
        assert last == asked[2]
    return len(found)


@pytest.mark.parametrize("lengths", [(0,), (0, 256), (256,), (512,), (0, 256, 512)])
def test_every_question_is_answered_as_it_was_told_and_only_answers_are_targets(lengths):
    for number in (0, 25, 59):
        batch = source(lengths).step(number)
        assert batch.tokens.numel() == 2048 and batch.begins is batch.mask is batch.offsets is None
        for tokens, targets, text in zip(batch.tokens, batch.targets, texts(batch), strict=True):
            assert answers_are_told(text) >= 1
            said = [f" {asked[2]}\n" for asked in ASKED.finditer(text)]
            places = (targets >= 0).nonzero().flatten()
            assert ByteTokenizer().decode(targets[places].tolist()) == "".join(said)
            assert torch.equal(targets[places], tokens[places + 1])


def test_a_text_has_its_length_and_ends_with_its_question():
    for text in texts(source((256, 512), steps=2).step(1)):
        for part in (text[:256], text[256:]) if text[:256].endswith("\n") else (text,):
            assert answers_are_told(part) and part.endswith("\n")
            facts = [fact for fact in part.split(".") if " went to the " in fact]
            assert 2 <= len(facts) <= 6 and "journey" in part
    assert not any("journey" in text[: text.rindex("Question")] for text in texts(source((0, 256)).step(3)))


def test_half_of_the_texts_have_the_questions_on_the_way():
    counts = [answers_are_told(text) for step in range(20) for text in texts(source((512,)).step(step))]
    assert set(counts) == {1, 2, 3}
    assert 0.5 < counts.count(1) / len(counts) < 0.85, "a third has no earlier one"


def test_rows_grow_and_shorter_texts_come_again():
    own = source((0, 256, 256, 1024), steps=80)
    shapes = [tuple(own.step(number).tokens.shape) for number in (0, 19, 20, 59, 60, 79, 500)]
    assert shapes == [(8, 256)] * 4 + [(2, 1024)] * 3, "the last of them if a run was made longer"
    last = [answers_are_told(text) for number in range(60, 260) for text in texts(own.step(number))]
    assert 0.4 < sum(count <= 3 for count in last) / len(last) < 0.85 and max(last) > 6


def test_a_step_is_made_again_and_dealt_to_processes():
    one = source((0, 256, 512)).step(41)
    two = [source((0, 256, 512), tokens=1024, rank=rank).step(41) for rank in range(2)]
    for name in ("tokens", "targets"):
        assert torch.equal(getattr(one, name), torch.cat([getattr(each, name) for each in two]))
    assert not torch.equal(one.tokens, source((0, 256, 512), seed=8).step(41).tokens)
    digest = hashlib.sha256(one.tokens.numpy().tobytes() + one.targets.numpy().tobytes()).hexdigest()[:16]
    assert digest == "2b670f45c8ff0e22", (
        "a run that was begun by an earlier version goes on with the same batches"
    )


@pytest.fixture
def home(tmp_path):
    (tmp_path / "babi").mkdir()
    (tmp_path / "babi" / "qa1_one_train.txt").write_text(babi())
    (tmp_path / "book.txt").write_text(" ".join(BOOK))
    return tmp_path


def run(home, pattern="lmm"):
    data = DataConfig(
        kind="babilong", path=str(home / "babi"), books=str(home / "book.txt"), tasks=("qa1",),
        length=256, curriculum=(0, 256, 512),
    )  # fmt: skip
    shape = {
        "vocab_size": 257,
        "dim": 16,
        "num_layers": 1,
        "heads": 2,
        "window": 8,
        "segment": 8,
        "persistent": 0,
    }
    model = ModelConfig(**shape, pattern=(pattern,), memory={"heads": 2, "chunk": 4})
    return TrainConfig(model=model, data=data, batch=2, steps=6, log_every=1, save_every=2, device="cpu")


def losses(folder):
    return re.findall(r'"loss": ([^,]+)', (folder / "metrics.jsonl").read_text())


@pytest.mark.sample(1)
@pytest.mark.parametrize("pattern", ["lmm", "mac", "window"])
def test_a_run_grows_and_goes_on_after_a_stop(home, pattern):
    fit(run(home, pattern), home / "whole")
    with Run.open(run(home, pattern), home / "part") as begun:
        for _ in range(3):
            begun.step()
    fit(None, home / "part", resume=True)
    assert len(losses(home / "whole")) == 6 and losses(home / "whole") == losses(home / "part")


def test_the_next_step_is_drawn_ahead_and_is_the_same():
    with closing(Prefetcher(source((0, 256, 512)))) as ahead:
        for number in (0, 1, 2, 7, 8, 3):  # after a jump, too
            assert torch.equal(ahead.step(number).tokens, source((0, 256, 512)).step(number).tokens)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data.curriculum": "256,384"},
            "data.curriculum: expected rising lengths, each a multiple of the one before",
        ),
        ({"data.curriculum": "0,256,128"}, "data.curriculum: .* got 128 after 256"),
        ({"data.curriculum": "-1"}, "data.curriculum: expected rising lengths"),
        (
            {"initial_state": "neighbor"},
            "initial_state: expected 'fresh' with data.curriculum, whose steps differ in their rows, got 'n",
        ),
        (
            {"data.kind": "recall", "data.curriculum": "0"},
            "curriculum: expected only with data.kind='fact_dialogues' or 'babilong', got",
        ),
    ],
)
def test_what_cannot_be_is_one_line(home, changes, message):
    with pytest.raises(ValueError, match=message):
        override(run(home), changes)


def test_lengths_that_cannot_be_filled_are_refused():
    with pytest.raises(
        ValueError, match=r"curriculum: expected at least \d+, for the shortest story of qa1, got 64"
    ):
        source((64, 512))
    with pytest.raises(
        ValueError, match=r"curriculum: expected divisors of a step's 2048 tokens .*, got 4096"
    ):
        source((1024, 4096))
