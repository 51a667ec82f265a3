"""Stores whose keys and values are in the memory of the host: the same numbers, wherever the model is."""

import os

import pytest
import torch
from models import STORES, model, tokens
from test_attached_store_windows import attached

from remanence.inference import memfile
from remanence.memory.search import attend, exact, l2_normalize
from remanence.memory.store import EVICTIONS, HostStoreState, Store
from remanence.runtime.state import where
from remanence.testing import assert_close

DEVICE = os.environ.get("REMANENCE_TEST_DEVICE", "cpu")
HEADS, WIDTH, SIZE = 2, 4, 9
ON_HOST = {"store_device": "cpu"}


def entries(rows, count, first=0):
    k, v = torch.randn(2, rows, count, HEADS, WIDTH, device=DEVICE).unbind()
    position = torch.arange(first, first + count, device=DEVICE).expand(rows, -1)
    return l2_normalize(k), v, position, torch.rand(rows, count, device=DEVICE)


def is_on_host(state):
    held = (state.k, state.v, *(x for x in (state.k_scale, state.v_scale) if x is not None))
    pinned = DEVICE == "cpu" or all(tensor.is_pinned() for tensor in held)
    return type(state) is HostStoreState and pinned and all(tensor.device.type == "cpu" for tensor in held)


@pytest.mark.parametrize("dtype", ["auto", "int8"])
@pytest.mark.parametrize("evict", EVICTIONS)
def test_it_holds_and_finds_what_another_store_does(evict, dtype):
    new, mask = entries(3, 20), torch.rand(3, 20, device=DEVICE) < 0.6
    plain, host = (Store(SIZE, HEADS, WIDTH, evict, dtype=dtype, device=device) for device in ("auto", "cpu"))
    states = []
    for store in (plain, host):
        state = store.start(3, new[0])
        for cut in (slice(0, 4), slice(4, 20)):
            state = store.add(state, *(x[:, cut] for x in new), mask=mask[:, cut], reuse=cut.start > 0)
        states.append(state)
    assert is_on_host(states[1]) if evict == "oldest" else type(states[1]) is HostStoreState
    assert states[1].position.device.type == DEVICE
    assert_close([x.cpu() for x in states[1].tensors()], [x.cpu() for x in states[0].tensors()], 0.0)
    q, limit = l2_normalize(torch.randn(3, 12, HEADS, WIDTH, device=DEVICE)), torch.full((3, 12), 20)
    found = [exact(q, state, 4, limit.to(DEVICE)) for state in states]
    assert torch.equal(found[0].index, found[1].index)
    ours, theirs = (attend(q, found[0], x, torch.ones(HEADS, device=DEVICE))[0] for x in states)
    assert_close(ours, theirs, 1e-6)


def test_it_stays_on_the_host():
    store = Store(SIZE, HEADS, WIDTH, dtype="int8", device="cpu")
    state = store.add(store.start(3, entries(1, 1)[0]), *entries(3, 5))
    other = store.with_size(SIZE).start(3, entries(1, 1)[0])
    for made in (
        state, state.clone(), state.rows([2, 0]), state.rows(torch.tensor([1], device=DEVICE)), state.detach(),
        type(state).concat([state, other]), where([True, False, True], state, other), state.to(torch.bfloat16),
    ):  # fmt: skip
        assert type(made) is HostStoreState and made.k.device.type == "cpu"
    assert is_on_host(store.with_size(3).start(2, entries(1, 1)[0]).enlarge(SIZE)) and is_on_host(
        state.clone()
    )
    moved = state.to("meta")
    assert moved.position.is_meta and moved.written.is_meta and moved.k.device.type == "cpu"
    assert torch.equal(moved.k_scale, state.k_scale)


@pytest.mark.parametrize("variant", STORES)
def test_a_model_with_it_is_the_model(variant, tmp_path):
    plain, host = (model(variant, knn=knn).to(DEVICE) for knn in ({}, ON_HOST))
    x = tokens(2, 41).to(DEVICE)
    with torch.no_grad():
        first, state = host(x[:, :17])
        memfile.save(tmp_path / "host.mem", host, state)
        memfile.save(tmp_path / "plain.mem", plain, plain(x[:, :17])[1])
        whole, end = plain(x)
        for path in ("host.mem", "plain.mem"):  # a file does not say where a store is
            loaded = memfile.load(tmp_path / path, host)
            second, after = host(x[:, 17:], loaded)
            assert_close(torch.cat([first, second], 1), whole, 1e-9)
            assert_close([t.cpu() for t in after.tensors()], [t.cpu() for t in end.tensors()], 1e-9)
            assert any(type(part.store) is HostStoreState for part in after.blocks if hasattr(part, "store"))
        again = plain(x[:, 17:], memfile.load(tmp_path / "host.mem", plain))[0]
        assert_close(again, whole[:, 17:], 1e-9)


def test_only_what_is_found_moves_with_a_loaded_state():
    host = model("knn", knn=ON_HOST)
    with torch.no_grad():
        state = host(tokens(1, 20))[1]
    made = memfile.assemble_state(
        host.state_template(), dict(memfile.named_tensors(state)), torch.device("meta")
    )
    store = made.blocks[0].store
    assert made.position.is_meta and store.position.is_meta and torch.equal(store.k, state.blocks[0].store.k)


def test_an_attached_model_too():
    plain, host, x = attached(), attached(**ON_HOST), tokens(2, 61, 90)
    with torch.no_grad():
        ours, state = host(x)
        assert torch.equal(ours, plain(x)[0])
        assert type(state.blocks[0].memory.store) is HostStoreState


def test_wrong_settings_are_one_line():
    with pytest.raises(ValueError, match=r"knn\.store_device: expected one of auto, cpu, got 'gpu'"):
        model("knn", knn={"store_device": "gpu"})
