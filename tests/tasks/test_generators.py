"""Generated tasks ask only what was told, and deal rows alike to any number of processes."""

import hashlib
from dataclasses import replace

import pytest
import torch

from remanence.config import ModelConfig
from remanence.tasks.babilong import Babilong, Story
from remanence.tasks.needle import Needle
from remanence.tasks.recall import Recall
from remanence.tokenizers.tokens import ByteTokenizer
from remanence.train import DataConfig, TrainConfig
from remanence.train.sources import SOURCES


@pytest.mark.parametrize(("rounds", "keys", "noise"), [(2, 32, 16), (3, 32, 16), (5, 32, 16), (3, 16, 4)])
def test_every_question_has_one_answer_that_was_told(rounds, keys, noise):
    source = Recall(length=160, batch=6, pairs=8, rounds=rounds, seed=1, keys=keys, noise=noise)
    assert source.vocabulary == 2 * keys + noise
    batch = source.step(4)
    for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        told = {tokens[i]: tokens[i + 1] for i in range(0, 16, 2)}
        assert len(told) == 8 and all(key < keys <= value < 2 * keys for key, value in told.items())
        asked = [i for i, target in enumerate(targets) if target >= 0]
        assert len(asked) == 8 * (rounds - 1) and asked[0] >= 16
        for i in asked:
            assert targets[i] == told[tokens[i]] == tokens[i + 1]
        others = [
            token for i, token in enumerate(tokens) if i >= 16 and i not in asked and i - 1 not in asked
        ]
        assert all(2 * keys <= token < source.vocabulary for token in others), "the rest is noise"


def test_steps_are_made_again_and_dealt_to_processes():
    one = Recall(64, 4, 8, 2, seed=3)
    assert torch.equal(one.step(5).tokens, Recall(64, 4, 8, 2, seed=3).step(5).tokens)
    assert not torch.equal(one.step(5).tokens, one.step(6).tokens)
    two = [Recall(64, 2, 8, 2, seed=3, rank=rank, world_size=2) for rank in range(2)]
    assert torch.equal(one.step(5).tokens, torch.cat([each.step(5).tokens for each in two]))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="length: expected at least 48 for 3 rounds of 8 pairs, got 47"):
        Recall(47, 1, 8, 3, 0)
    with pytest.raises(ValueError, match="pairs: expected at most 32, the number of keys, got 33"):
        Recall(999, 1, 33, 2, 0)


def test_a_run_says_how_many_keys_and_kinds_of_noise():
    data = DataConfig(kind="recall", length=64, pairs=4, keys=5, noise=3)
    config = TrainConfig(model=ModelConfig(vocab_size=13, dim=16, num_layers=1), data=data, batch=2)
    assert int(SOURCES["recall"](config, 2, 0, 1).step(0).tokens.max()) == 12
    with pytest.raises(ValueError, match=r"model.vocab_size: expected at least the task's 14, got 13"):
        SOURCES["recall"](replace(config, data=replace(data, noise=4)), 2, 0, 1)
    with pytest.raises(ValueError, match="keys: expected a number above 0, got 0"):
        DataConfig(kind="recall", keys=0)


@pytest.mark.parametrize(("length", "pairs"), [(149, 4), (300, 1), (1000, 13)])
def test_the_needle_is_there_once_and_the_length_is_exact(length, pairs):
    batch = Needle(length, 5, pairs, seed=2).step(7)
    assert batch.tokens.shape == (5, length)
    for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        text = bytes(tokens).decode()
        assert text.count("The number of") == pairs
        asked = text[text.rindex("What is the number of ") :].split()[5].rstrip("?")
        answer = text[-4:]
        assert text.count(f"The number of {asked} is {answer}. ") == 1 and text.count(f"of {asked} is") == 1
        assert [i for i, target in enumerate(targets) if target >= 0] == list(range(length - 5, length - 1))
        assert bytes(target for target in targets if target >= 0).decode() == answer


def test_needles_are_dealt_to_processes_and_must_fit():
    one = Needle(200, 4, 2, seed=3)
    two = [Needle(200, 2, 2, seed=3, rank=rank, world_size=2) for rank in range(2)]
    assert torch.equal(one.step(5).tokens, torch.cat([each.step(5).tokens for each in two]))
    assert not torch.equal(one.step(5).tokens, one.step(6).tokens)
    with pytest.raises(
        ValueError, match="length: expected at least 149 bytes for 4 needles and the question, got 148"
    ):
        Needle(148, 1, 4, 0)
    with pytest.raises(ValueError, match="pairs: expected at most 13 needles, got 14"):
        Needle(9999, 1, 14, 0)


DIGESTS = {"recall": "59843bec177929ac", "needle": "444420adebb9d257", "babilong": "d93d396a3296a778"}


def drawn(kind):
    if kind == "recall":
        return Recall(64, 3, 4, 3, seed=7, rank=1, world_size=2, keys=5, noise=3)
    if kind == "needle":
        return Needle(300, 3, 4, seed=7, rank=1, world_size=2)
    facts = [f"Mary went to the {name}." for name in ("hallway", "kitchen", "garden")]
    stories = [
        Story(facts[: n + 1], "Where is Mary?", name)
        for n, name in enumerate(("hallway", "kitchen", "garden"))
    ]
    book = [f"It was the {n}th day of the long journey." for n in range(99)]
    return Babilong({"qa1": stories}, book, ByteTokenizer(), 256, 3, seed=7, rank=1, world_size=2)


@pytest.mark.parametrize("kind", DIGESTS)
def test_the_same_seed_draws_what_it_drew_in_earlier_versions(kind):
    """A run that was begun by an earlier version goes on with the same batches."""
    digest = hashlib.sha256()
    for number in (0, 5):
        batch = drawn(kind).step(number)
        digest.update(batch.tokens.numpy().tobytes() + batch.targets.numpy().tobytes())
    assert digest.hexdigest()[:16] == DIGESTS[kind]
