"""The recall task asks only what was told, with noise in every gap, and deals rows alike to any number of processes."""

import pytest
import torch

from remanence.train.sources import Recall


@pytest.mark.parametrize("rounds", [2, 3, 5])
def test_every_question_has_one_answer_that_was_told(rounds):
    source = Recall(length=160, batch=6, pairs=8, rounds=rounds, seed=1)
    batch = source.step(4)
    for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        told = {tokens[i]: tokens[i + 1] for i in range(0, 16, 2)}
        assert len(told) == 8 and all(key < 32 <= value < 64 for key, value in told.items())
        asked = [i for i, target in enumerate(targets) if target >= 0]
        assert len(asked) == 8 * (rounds - 1) and asked[0] >= 16
        for i in asked:
            assert targets[i] == told[tokens[i]] == tokens[i + 1]
        others = [token for i, token in enumerate(tokens) if i >= 16 and i not in asked and i - 1 not in asked]
        assert all(64 <= token < 80 for token in others), "the rest is noise"


def test_steps_are_made_again_and_dealt_to_processes():
    one = Recall(64, 4, 8, 2, seed=3)
    assert torch.equal(one.step(5).tokens, Recall(64, 4, 8, 2, seed=3).step(5).tokens)
    assert not torch.equal(one.step(5).tokens, one.step(6).tokens)
    two = [Recall(64, 2, 8, 2, seed=3, rank=rank, world=2) for rank in range(2)]
    assert torch.equal(one.step(5).tokens, torch.cat([each.step(5).tokens for each in two]))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="length: expected at least 48 for 3 rounds of 8 pairs, got 47"):
        Recall(47, 1, 8, 3, 0)
    with pytest.raises(ValueError, match="pairs: expected at most 32, got 33"):
        Recall(999, 1, 33, 2, 0)
