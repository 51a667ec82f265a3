"""A kNN store in a pretrained model begins where the window ends, also when the window is changed."""

import pytest
import torch
from test_families import base

import remanence
from remanence.testing import assert_close

pytestmark = pytest.mark.sample(12)

WINDOW = 12


def attached(window=WINDOW, case="llama", **fields):
    """A pretrained model with a store in its first layer, whose keys do not depend on the window."""
    model = base(case).double()
    fields = {"layers": [0], "sinks": 2, "k": 4, "size": 64} | fields
    own = remanence.attach(model, kind="knn", window=window, **fields).model.eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for memory in own.memories.values():
            memory.gate.fill_(0.7)
            memory.log_scale.normal_(1.0, 0.5)
    return own


def tokens(rows=2, length=61):
    return torch.randint(3, 90, (rows, length), generator=torch.Generator().manual_seed(0))


def store_of(state):
    return state.blocks[0].memory


@pytest.mark.parametrize("window", [2, 5, 8, 20])
def test_a_changed_window_is_a_model_with_this_window(window):
    """Attention, store and state are those of a model that was attached with the window, in any split of a text."""
    changed, other, x = attached(), attached(window), tokens()
    changed.window = window
    with torch.no_grad():
        whole, end = other(x)
        ours, state = changed(x)
        assert torch.equal(ours, whole)
        assert_close(state, end, 0.0)
        for cut in (1, window, 13, 40):
            first, state = changed(x[:, :cut])
            second, state = changed(x[:, cut:], state)
            assert_close(torch.cat([first, second], 1), whole, 1e-9)
            assert_close(state, end, 1e-9)


@pytest.mark.parametrize("window", [3, 5, 12])
def test_every_earlier_token_is_in_the_window_or_can_be_found_once(window, monkeypatch):
    model, x = attached(), tokens(1)
    model.window = window
    memory, found = model.memories["0"], []
    query = type(memory).query_store

    def seen(self, q, store, max_position):
        for last in max_position[0].tolist():
            held = [place for place in store.position[0].tolist() if 0 <= place <= last]
            found.append(sorted(held))
        return query(self, q, store, max_position)

    monkeypatch.setattr(type(memory), "query_store", seen)
    with torch.no_grad():
        model(x)
    assert found == [list(range(max(0, place - window + 1))) for place in range(x.shape[1])]


@pytest.mark.parametrize("case", ["gemma3", "llama"])
def test_a_store_begins_at_the_window_of_its_layer(case):
    """A layer of the pretrained model with a narrower window keeps it, and its store begins there."""
    model = attached(window=40, case=case)
    layer = model.attached_layers[0]
    assert layer.memory.window == layer.window_spec.window
    assert (layer.native_window is None) == (layer.memory.window == 40)
    with torch.no_grad():
        memory = store_of(model(tokens())[1])
    held = sorted(place for place in memory.store.position[0].tolist() if place >= 0)
    assert held == list(range(61 - int(memory.open_length[0])))


@pytest.mark.parametrize("window", [2, 3, 4, 5, 6, 7, 11, 12])
@pytest.mark.parametrize("read", [0, 1, 11, 12, 13, 24, 25, 43])
def test_a_state_of_a_larger_window_goes_on_with_a_narrower_one(window, read):
    model, x = attached(), tokens()
    mask = torch.ones(2, read, dtype=torch.bool)
    mask[1, : min(read, 7)] = False  # rows at different positions
    with torch.no_grad():
        before = model(x[:, :read], mask=mask)[1] if read else model.start(2)
        copy_of = before.clone()
        model.window = window
        fitted = model.fit_window(before)
        assert_close(before, copy_of, 0.0)
        memory = store_of(fitted)
        for row, position in enumerate(fitted.position.tolist()):
            held = sorted(place for place in memory.store.position[row].tolist() if place >= 0)
            opened = int(memory.open_length[row])
            pending = memory.token_importance[row, :opened] > -torch.inf
            waiting = (torch.arange(position - opened, position)[pending]).tolist()
            assert held + waiting == list(range(position)) and int(memory.store.written[row]) == len(held)
        if WINDOW % window == 0 and read:
            assert_close(memory, store_of(model(x[:, :read], mask=mask)[1]), 1e-9)
        state = model(x[:, read:], fitted)[1]  # nothing is written twice later
        for row, position in enumerate(state.position.tolist()):
            held = sorted(place for place in store_of(state).store.position[row].tolist() if place >= 0)
            assert held == list(range(position - int(store_of(state).open_length[row])))


def test_a_state_of_a_narrower_window_does_not_fit():
    model = attached()
    model.window = 5
    state = model(tokens())[1]
    model.window = WINDOW
    assert model.fit_window(state) is None
    with pytest.raises(ValueError, match="state: expected a window of 12 tokens, got one of 5"):
        model(tokens(2, 3), state)
