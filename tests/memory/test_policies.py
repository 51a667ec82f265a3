"""What is worth storing: never a matter of how a text is cut into calls."""

import math

import pytest
import torch

from remanence.memory.policies import POLICIES, Tokens, keep, unigrams


def read(tokens, position):
    table = unigrams(torch.arange(10).repeat_interleave(torch.arange(10)), 10).to(tokens.device)
    surprise = ((tokens * 7 + position * 3) % 11).double()
    return Tokens(tokens, position, table, surprise)


@pytest.mark.parametrize("name", POLICIES)
def test_no_score_depends_on_the_call(name):
    tokens, position = (
        torch.randint(10, (3, 48)),
        torch.arange(48).expand(3, -1) + torch.tensor([[0], [96], [5 * 48]]),
    )
    whole = POLICIES[name](read(tokens, position))
    assert whole.shape == (3, 48)
    for sizes in ([1] * 48, [5, 40, 3], [16, 32]):
        parts = zip(tokens.split(sizes, 1), position.split(sizes, 1), strict=True)
        assert torch.equal(torch.cat([POLICIES[name](read(*part)) for part in parts], 1), whole)
    marked = keep(whole, 0.25, 16)
    parts = [keep(part, 0.25, 16) for part in whole.split([16, 32], 1)]
    assert torch.equal(torch.cat(parts, 1), marked)
    assert bool((marked.unflatten(1, (3, 16)).sum(-1) == 4).all())


def test_rare_is_minus_log_p():
    tokens = torch.tensor([[0, 9, 4]])
    score = POLICIES["rare"](read(tokens, torch.arange(3)[None]))
    want = [-math.log((count + 1) / (45 + 10)) for count in (0, 9, 4)]
    assert torch.allclose(score, torch.tensor([want]))
    assert keep(score, 0.3, 3).tolist() == [[True, False, False]]


def test_unigrams_are_probabilities_and_none_is_zero():
    table = unigrams(torch.tensor([[1, 1], [3, 1]]), 6).to(torch.empty(0).device)
    assert torch.allclose(table.exp().sum(), torch.tensor(1.0))
    assert torch.allclose(table.exp() * 10, torch.tensor([1.0, 4, 1, 2, 1, 1]))
    with pytest.raises(ValueError, match="tokens: expected below vocabulary=3, got 3"):
        unigrams(torch.tensor([3]), 3)


def test_random_is_uniform_and_differs_by_row_and_seed():
    tokens, position = torch.zeros(4, 4096, dtype=torch.int64), torch.arange(4096).expand(4, -1)
    score = POLICIES["random"](Tokens(tokens, position))
    assert float(score.min()) >= 0 and float(score.max()) < 1
    assert torch.allclose(score.mean(1), torch.tensor(0.5), atol=0.03)
    other = POLICIES["random"](Tokens(tokens, position, seed=1))
    pairs = torch.corrcoef(torch.cat([score, other, score.roll(1, 1)]))
    assert float((pairs - torch.eye(12)).abs().max()) < 0.08
    moved = POLICIES["random"](Tokens(tokens[:1], position[:1], document=torch.tensor([2])))
    assert torch.equal(moved, score[2:3])


def test_keep_marks_whole_segments_only_and_the_earlier_of_equals():
    marked = keep(torch.ones(1, 11), 0.5, 4)
    assert marked.tolist() == [[True, True, False, False] * 2 + [False] * 3]
    assert bool(keep(torch.rand(2, 8), 1.0, 4).all())
    assert int(keep(torch.rand(1, 30), 0.1, 30).sum()) == 3
    assert keep(torch.tensor([[-math.inf, -math.inf, 1.0]]), 1.0, 3).tolist() == [[False, False, True]]
    with pytest.raises(ValueError, match="fraction: expected above 0"):
        keep(torch.ones(1, 4), 0.0, 4)


@pytest.mark.parametrize(("name", "what"), [("rare", "log_unigrams"), ("surprise", "surprise")])
def test_what_is_missing_is_named(name, what):
    with pytest.raises(ValueError, match=f"{what}: expected .* '{name}' needs"):
        POLICIES[name](Tokens(torch.zeros(1, 2, dtype=torch.int64), torch.arange(2)[None]))
