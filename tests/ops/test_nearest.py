"""Searching by kernels is searching by hand: all scores, sorted. As test_triton.py: interpreted, in a process of their
own.

Vectors of integers have exact products, so that slots can be compared too, and many equal scores.
"""

import math

import pytest
import torch
from cases import pairwise

from remanence.memory.search import SEARCHES, exact
from remanence.memory.store import Store, StoreState
from remanence.ops.triton import nearest as module
from remanence.ops.triton.nearest import nearest
from remanence.testing import assert_close

pytestmark = pytest.mark.interpreted

LAST = torch.iinfo(torch.int64).max


@pytest.fixture(autouse=True)
def _full_of_winners(monkeypatch):
    """Memory as allocated: a number that no kernel writes would be chosen."""
    empty = torch.empty
    filled = lambda *shape, **how: empty(*shape, **how).fill_(
        2**62 if how.get("dtype") == torch.int64 else math.nan
    )
    monkeypatch.setattr(torch, "empty", filled)


def whole_numbers(*shape, most=2):
    return torch.randint(-most, most + 1, shape).float()


def by_hand(q, keys, position, limit, k):
    score = torch.einsum("rthe,rnhe->rthn", q.double(), keys.double())
    hidden = (position < 0).unsqueeze(1) | (position.unsqueeze(1) > limit.unsqueeze(-1))
    score, index = score.masked_fill(hidden.unsqueeze(2), -math.inf).sort(
        dim=-1, descending=True, stable=True
    )
    return score[..., :k], index[..., :k].masked_fill(score[..., :k] == -math.inf, -1)


def check(q, keys, position, limit, k):
    score, index = nearest(q, keys, position, limit, k)
    want, slots = by_hand(q, keys, position, limit, k)
    assert score.dtype == torch.float32
    assert_close(score.double(), want, 0.0)
    assert torch.equal(index, slots)


LIMITS = {
    "all": lambda size, shape: torch.full(shape, LAST),
    "none": lambda size, shape: torch.full(shape, -1),
}
LIMITS["some"] = lambda size, shape: torch.randint(-2, size, shape)
EMPTY = {
    "none": lambda p: p,
    "last": lambda p: p.masked_fill(torch.arange(p.shape[1]) >= p.shape[1] // 3, -1),
}
EMPTY |= {
    "here and there": lambda p: p.masked_fill(torch.rand(p.shape) < 0.3, -1),
    "all": lambda p: torch.full_like(p, -1),
}


@pytest.mark.parametrize(
    "s",
    pairwise(
        rows=[1, 2],
        tokens=[1, 3, 17],
        heads=[1, 3],
        width=[5, 16, 64, 100],
        size=[1, 37, 256, 700],
        k=[1, 7, 256],
        limit=list(LIMITS)[::-1],
        empty=list(EMPTY),
    ),
    ids=lambda s: "-".join(map(str, s.values())),
)
def test_equals_by_hand(s):
    rows, tokens, heads, width, size = (s[name] for name in ("rows", "tokens", "heads", "width", "size"))
    position = EMPTY[s["empty"]](torch.stack([torch.randperm(size) for _ in range(rows)]))
    q, keys = whole_numbers(rows, tokens, heads, width), whole_numbers(rows, size, heads, width)
    check(q, keys, position, LIMITS[s["limit"]](size, (rows, tokens)), min(s["k"], size))


@pytest.mark.parametrize(("size", "k", "bundled"), [(4100, 1, True), (4096, 2, True), (1500, 20, False)])
def test_ties_between_groups_and_bundles_of_them(size, k, bundled):
    """Few different scores: hundreds of groups have the same best."""
    q, keys = whole_numbers(1, 3, 2, 3, most=1), whole_numbers(1, size, 2, 3, most=1)
    plan = module.plan_of(q.shape, size, k, 32, torch.float32, 1)
    assert (plan.bundle > 1) == bundled and plan.groups > k
    check(q, keys, torch.arange(size)[None], torch.tensor([[size, size // 2, 40]]), k)


def test_duplicates_and_minus_zero_are_in_the_order_of_their_slots():
    keys = whole_numbers(1, 8, 1, 4).repeat(1, 60, 1, 1)
    q = whole_numbers(1, 2, 1, 4)
    q[0, 1] = 0.0
    keys[0, ::3] *= -1.0  # among them zeros times -1
    check(q, keys, torch.arange(480)[None], torch.full((1, 2), 480), 100)


@pytest.mark.parametrize("held", [1, 400])
def test_blocks_of_queries_change_nothing(held, monkeypatch):
    q, keys, position = (
        whole_numbers(2, 5, 1, 8),
        whole_numbers(2, 300, 1, 8),
        torch.arange(300).expand(2, -1),
    )
    monkeypatch.setattr(module, "MAX_SCORES", held)
    assert module.plan_of(q.shape, 300, 5, 32, torch.float32, 1).block < 5
    check(q, keys, position, torch.randint(300, (2, 5)), 5)


def test_many_turns_and_tiles_of_queries(monkeypatch):
    monkeypatch.setattr(module, "QUERIES", (2**13, 64))
    q, keys = whole_numbers(1, 150, 1, 24), whole_numbers(1, 1200, 1, 24)
    plan = module.plan_of(q.shape, 1200, 4, 32, torch.float32, 1)
    assert plan.tiles_per_program > 1 and plan.block > plan.queries
    position = torch.arange(1200)[None].clone()
    position[0, 500:] = -1
    check(q, keys, position, torch.arange(150)[None] * 5, 4)


def test_positions_beyond_32_bits():
    q, keys, far = whole_numbers(1, 4, 1, 4), whole_numbers(1, 90, 1, 4), 2**40
    position = torch.arange(90)[None] + far
    check(q, keys, position, torch.tensor([[far + 3, far + 80, far - 1, far + 20]]), 10)


def test_vectors_are_read_where_they_lie(monkeypatch):
    position, limit = torch.arange(60).expand(2, -1), torch.full((2, 5), 50)
    cases = (whole_numbers(2, 3, 5, 8).transpose(1, 2), whole_numbers(2, 90, 3, 8)[:, 20:80])
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda x: x if x.dim() < 4 else pytest.fail("copied"))
    check(*cases, position, limit, 6)
    check(cases[0][1:], cases[1][1:], position[1:], limit[1:], 6)
    check(
        cases[0][:, :1].expand(-1, -1, 3, -1),
        cases[1][:, :, :1].expand(-1, -1, 3, -1),
        position,
        limit[:, :1],
        6,
    )


def test_vectors_that_lie_otherwise_are_copied():
    q, keys = whole_numbers(2, 8, 3, 5).transpose(1, 3), whole_numbers(1, 40, 3, 8).expand(2, -1, -1, -1)
    check(q, keys, torch.arange(40).expand(2, -1), torch.full((2, 5), 30), 6)


@pytest.mark.parametrize(
    ("asked", "stored"),
    [("float32", "float32"), ("bfloat16",) * 2, ("float32", "bfloat16"), ("float16",) * 2],
)
def test_scores_are_float32_sums(asked, stored):
    q, keys = (
        torch.randn(1, 20, 2, 48).to(getattr(torch, asked)),
        torch.randn(1, 500, 2, 48).to(getattr(torch, stored)),
    )
    position, limit = torch.arange(500)[None], torch.full((1, 20), 400)
    score, index = nearest(q, keys, position, limit, 16)
    want, slots = by_hand(q, keys, position, limit, 16)
    assert_close(score.double(), want, 1e-6)
    assert torch.equal(index, slots)


def test_exact_and_triton_by_name_are_the_kernels(monkeypatch):
    store = Store(50, 2, 8)
    q, state = whole_numbers(2, 4, 2, 8), store.start(2, torch.zeros(1))
    k = whole_numbers(2, 30, 2, 8)
    state = store.add(state, k, k, torch.arange(30).expand(2, -1))
    limit = torch.randint(30, (2, 4))
    found = [find(q, state, 5, limit) for find in (exact, SEARCHES["triton"]())]
    monkeypatch.setattr("remanence.ops.triton.dispatch.KERNELS", ())
    plain = exact(q, state, 5, limit)
    for score, index in found:
        assert_close(score, plain.score, 0.0)
        assert torch.equal(index, plain.index)
    none = exact(q[:, :0], state, 5, limit[:, :0])
    assert none.index.shape == (2, 0, 2, 5)


def test_what_the_kernels_do_not_know_is_said():
    def state(**how):
        return StoreState(
            *[torch.zeros(1, 9, 1, how.pop("width", 4), **how)] * 2,
            torch.arange(9)[None],
            torch.ones(1, 9),
            None,
        )

    find, limit = SEARCHES["triton"](), torch.full((1, 1), 9)
    for other, reason in (
        (state(dtype=torch.float64), "got float64"),
        (state(width=130), "head widths up to 128, got 130"),
    ):
        with pytest.raises(ValueError, match=f"search: 'triton' cannot run this call: .*{reason}"):
            find(other.k[:, :1], other, 2, limit)
        assert exact(other.k[:, :1], other, 2, limit).index.tolist() == [[[[0, 1]]]]


def test_it_is_an_operator_of_torch(monkeypatch):
    monkeypatch.undo()
    arguments = (
        whole_numbers(1, 3, 2, 4),
        whole_numbers(1, 20, 2, 4),
        torch.arange(20)[None],
        torch.full((1, 3), 9),
        4,
    )
    torch.library.opcheck(nearest, arguments)
    assert [x.shape for x in nearest(arguments[0][:, :0], *arguments[1:3], arguments[3][:, :0], 4)] == [
        (1, 0, 2, 4)
    ] * 2
