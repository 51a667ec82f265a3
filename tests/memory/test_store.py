"""The store: what is kept, where, and whose; as a file: whole, or refused in one line."""

import pytest
import torch

from remanence.memory.store import EVICTIONS, Store
from remanence.testing import assert_close

HEADS, WIDTH = 2, 3


def entries(rows, count, first=0):
    k, v = (torch.randn(rows, count, HEADS, WIDTH, dtype=torch.float64) for _ in range(2))
    return k, v, torch.arange(first, first + count).expand(rows, -1), torch.rand(rows, count)


def filled(store, count=5, rows=2):
    new = entries(rows, count)
    return store.add(store.start(rows, new[0]), *new)


def part(new, cut):
    return tuple(tensor[:, cut] for tensor in new)


def slow(size, half_life, offered):
    """By the book: one entry at a time; when there is one too many, the least worth goes, the older of equals."""
    kept = []
    for entry in offered:  # (position, importance)
        kept.append(entry)
        if len(kept) > size:
            now = entry[0]
            worth = [importance * 0.5 ** ((now - position) / half_life) for position, importance in kept]
            del kept[worth.index(min(worth))]
    return [position for position, _ in kept]


@pytest.mark.parametrize("evict", EVICTIONS)
class TestLaws:
    def store(self, evict, size=7):
        return Store(size, HEADS, WIDTH, evict, half_life=20.0)

    @pytest.mark.parametrize("sizes", [[1] * 20, [3, 0, 11, 6], [7, 13], [19, 1]])
    def test_any_split_is_the_whole(self, evict, sizes):
        store, new = self.store(evict), entries(3, 20)
        mask = torch.rand(3, 20) < 0.6
        whole = store.add(store.start(3, new[0]), *new, mask=mask)
        state, first = store.start(3, new[0]), 0
        for size in sizes:
            cut = slice(first, first + size)
            state = store.add(state, *part(new, cut), mask=mask[:, cut])
            first += size
        assert_close(state, whole, 0.0)

    def test_a_mask_is_the_entries_alone(self, evict):
        store, new = self.store(evict), entries(3, 20)
        mask = torch.rand(3, 20) < 0.5
        mask[1] = False
        together = store.add(store.start(3, new[0]), *new, mask=mask)
        for row in range(3):
            alone = tuple(tensor[row : row + 1, mask[row]] for tensor in new)
            assert_close(together.rows(row), store.add(store.start(1, new[0]), *alone), 0.0)

    def test_one_row_touches_no_other(self, evict):
        store = self.store(evict)
        before = filled(store, 12, 3)
        mask = torch.zeros(3, 4, dtype=torch.bool)
        mask[1] = True
        after = store.add(before, *entries(3, 4, first=12), mask=mask)
        assert_close(after.rows([0, 2]), before.rows([0, 2]), 0.0)
        assert after.written.tolist() == [12, 16, 12]

    def test_the_old_state_stays(self, evict):
        store = self.store(evict)
        state = filled(store)
        copy = state.clone()
        store.add(state, *entries(2, 9, first=5))
        assert_close(state, copy, 0.0)

    def test_nothing_stored_has_a_gradient(self, evict):
        store, (k, v, position, importance) = self.store(evict), entries(1, 4)
        state = store.add(store.start(1, k), k.requires_grad_(), v, position, importance)
        assert not any(tensor.requires_grad for tensor in state.tensors())


def test_a_full_ring_keeps_the_newest_with_their_own_values():
    store = Store(5, HEADS, WIDTH)
    new = entries(2, 13)
    state = store.start(2, new[0])
    for first in range(13):
        state = store.add(state, *part(new, slice(first, first + 1)))
        for slot, position in enumerate(state.position[0].tolist()):
            if position < 0:
                assert slot > first
                continue
            assert position % 5 == slot and first - 5 < position <= first
            assert_close(state.k[:, slot], new[0][:, position], 0.0)
            assert_close(state.v[:, slot], new[1][:, position], 0.0)


def test_reusing_a_state_gives_the_same():
    store = Store(5, HEADS, WIDTH)
    state, new = filled(store), entries(2, 3, first=5)
    want = store.add(state, *new)
    assert_close(store.add(state, *new, reuse=True), want, 0.0)
    assert_close(state.k, want.k, 0.0)


@pytest.mark.parametrize("evict", EVICTIONS)
def test_a_store_that_is_widened_was_always_so_large(evict):
    """Until it is full a store of any size holds the same, and goes on as a larger one."""
    small, large = (Store(size, HEADS, WIDTH, evict, half_life=20.0) for size in (8, 14))
    first, second, mask = entries(2, 8), entries(2, 11, first=8), torch.rand(2, 8) < 0.7
    states = [store.add(store.start(2, first[0]), *first, mask=mask) for store in (small, large)]
    assert_close(states[0].enlarge(14), states[1], 0.0)
    assert states[1].enlarge(14) is states[1]
    assert_close(small.with_size(14).add(states[0].enlarge(14), *second), large.add(states[1], *second), 0.0)


@pytest.mark.parametrize("half_life", [3.0, 40.0, 1e9])
def test_importance_is_the_slow_loop(half_life):
    store, new = Store(6, HEADS, WIDTH, "importance", half_life=half_life), entries(4, 40)
    new[3].copy_(torch.randint(1, 4, (4, 40)))  # many equals
    state = store.start(4, new[0])
    for first in range(0, 40, 8):
        state = store.add(state, *part(new, slice(first, first + 8)))
        for row in range(4):
            offered = list(zip(range(first + 8), new[3][row].tolist(), strict=False))
            want = slow(6, half_life, offered)
            assert state.position[row].tolist() == want
            assert_close(state.v[row], new[1][row, want], 0.0)


def test_equal_importance_is_oldest_first():
    new = entries(2, 17)[:3]
    states = [
        store.add(store.start(2, new[0]), *new) for store in (Store(5, 2, 3, evict) for evict in EVICTIONS)
    ]
    assert sorted(states[0].position[0].tolist()) == states[1].position[0].tolist() == [12, 13, 14, 15, 16]


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="size: expected an integer of at least 0, got -1"):
        Store(-1, 1, 1)
    with pytest.raises(ValueError, match="did you mean 'oldest'"):
        Store(1, 1, 1, "oldst")
    store = Store(4, HEADS, WIDTH)
    state, (k, v, position, _) = filled(store), entries(2, 3)
    with pytest.raises(ValueError, match=r"v: expected shape \[2, 3, 2, 3\], got \[2, 2, 2, 3\]"):
        store.add(state, k, v[:, :2], position)
    with pytest.raises(ValueError, match="state: expected a store of size"):
        Store(5, HEADS, WIDTH).add(state, k, v, position)
