"""Stores of int8 keys and values: what a float store of the rounded vectors gives, at half the size or less."""

from pathlib import Path

import pytest
import torch
from models import STORES, model, tokens
from test_attached_store_windows import attached

from remanence.attached.config import AttachConfig
from remanence.inference import memfile
from remanence.memory import ivf
from remanence.memory.search import attend, dense, exact, l2_normalize
from remanence.memory.store import EVICTIONS, Store, dequantize, quantize
from remanence.testing import assert_close

HEADS, WIDTH, SIZE = 2, 16, 40
INT8 = {"store_dtype": "int8"}


def entries(rows, count, first=0, heads=HEADS, width=WIDTH):
    k, v = torch.randn(2, rows, count, heads, width).unbind()
    return l2_normalize(k), v, torch.arange(first, first + count).expand(rows, -1), torch.rand(rows, count)


def filled(evict="oldest", count=SIZE, size=SIZE):
    store = Store(size, HEADS, WIDTH, evict, dtype="int8")
    new = entries(2, count)
    return store, store.add(store.start(2, new[0]), *new), new


def test_a_vector_is_within_half_a_step_and_rounding_again_changes_nothing():
    x = torch.randn(50, 3, WIDTH) * torch.logspace(-20, 10, 50)[:, None, None]
    x[7], x[8, 0, 1:] = 0.0, 0.0
    whole, scale = quantize(x)
    back = dequantize(whole, scale, torch.float32)
    assert whole.dtype == torch.int8 and bool((back - x).abs().le(scale.unsqueeze(-1) * 0.50001).all())
    again, same = quantize(back)
    assert torch.equal(again, whole)
    torch.testing.assert_close(same, scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("search", [exact, dense])
def test_search_and_attention_are_those_of_a_float_store_of_the_rounded_vectors(search, dtype):
    _, state, _ = filled()
    q = l2_normalize(torch.randn(2, 11, HEADS, WIDTH)).to(dtype)
    limit, scale = torch.randint(-1, SIZE, (2, 11)), torch.rand(HEADS) * 10
    plain = state.dequantized()
    assert plain.k.dtype == torch.float32 and plain.k_scale is None and plain.dequantized() is plain
    found = [search(q, each, 5, limit) for each in (state, plain)]
    assert torch.equal(found[0].index, found[1].index) and torch.equal(found[0].score, found[1].score)
    for ours, theirs in zip(*(attend(q, found[0], each, scale) for each in (state, plain)), strict=True):
        assert torch.equal(ours, theirs)


def test_approximate_search_too(monkeypatch):
    pytest.importorskip("faiss")
    monkeypatch.setattr(ivf, "MIN_ENTRIES", 64)
    _, state, _ = filled(count=600, size=600)
    q, limit = l2_normalize(torch.randn(2, 11, HEADS, WIDTH)), torch.full((2, 11), 600)
    found = ivf.IvfSearch(1.0)(q, state, 5, limit)
    assert torch.equal(found.index, exact(q, state, 5, limit).index)


@pytest.mark.parametrize("evict", EVICTIONS)
@pytest.mark.parametrize("sizes", [[1] * 20, [3, 0, 11, 6]])
def test_any_split_is_the_whole_and_positions_are_those_of_floats(evict, sizes):
    new, mask = entries(3, 20), torch.rand(3, 20) < 0.6
    store, plain = (Store(7, HEADS, WIDTH, evict, dtype=dtype) for dtype in ("int8", "auto"))
    whole = store.add(store.start(3, new[0]), *new, mask=mask)
    state, first = store.with_size(4 if evict == "oldest" else 7).start(3, new[0]).enlarge(7), 0
    for size in sizes:
        cut = slice(first, first + size)
        state = store.add(state, *(tensor[:, cut] for tensor in new), mask=mask[:, cut])
        first += size
    assert_close(state, whole, 0.0)
    floats = plain.add(plain.start(3, new[0]), *new, mask=mask)
    assert torch.equal(floats.position, whole.position)
    assert_close(whole.dequantized().v, floats.v, 0.02)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_few_queries_find_what_many_do(dtype):
    """They go through the store in smaller blocks."""
    store = Store(1000, HEADS, WIDTH, dtype="int8" if dtype == torch.int8 else "auto")
    new = entries(2, 1000)
    state = store.add(store.start(2, new[0] if dtype == torch.int8 else new[0].to(dtype)), *new)
    q, limit = l2_normalize(torch.randn(2, 20, HEADS, WIDTH)), torch.randint(0, 1000, (2, 20))
    many, few = exact(q, state, 5, limit), exact(q[:, :3], state, 5, limit[:, :3])
    assert torch.equal(few.index, many.index[:, :3])
    assert_close(few.score, many.score[:, :3], 1e-6)


def test_most_of_the_nearest_are_found():
    torch.manual_seed(0)
    _, state, (k, v, position, importance) = filled(count=4096, size=4096)
    plain = Store(4096, HEADS, WIDTH)
    floats = plain.add(plain.start(2, k), k, v, position, importance)
    q, limit = l2_normalize(torch.randn(2, 64, HEADS, WIDTH)), torch.full((2, 64), 4096)
    assert ivf.recall(exact(q, state, 32, limit).index, exact(q, floats, 32, limit).index) > 0.95


@pytest.mark.parametrize("variant", STORES)
def test_a_model_reads_in_any_split_and_through_a_file(variant, tmp_path):
    subject, x = model(variant, knn=INT8), tokens(2, 41)
    with torch.no_grad():
        whole, end = subject(x)
        first, state = subject(x[:, :17])
        memfile.save(tmp_path / "a.mem", subject, state)
        loaded = memfile.load(tmp_path / "a.mem", subject)
        assert_close(loaded, state, 0.0)
        second, state = subject(x[:, 17:], loaded)
    # Rounding to int8 makes a step of a difference between two ways to sum, which a split may be.
    assert (torch.cat([first, second], 1) - whole).abs().max() < 0.02
    assert state.position.tolist() == end.position.tolist()
    plain = model(variant)
    with torch.no_grad():
        near = plain(x)[0]
    assert (near - whole).abs().max() < 0.1 * near.std()


def test_an_attached_model_too(tmp_path):
    subject, plain, x = attached(store_dtype="int8"), attached(), tokens(2, 61, 90)
    with torch.no_grad():
        whole, end = subject(x)
        assert end.blocks[0].memory.store.k.dtype == torch.int8
        first, state = subject(x[:, :30])
        memfile.save(tmp_path / "a.mem", subject, state)
        second, _ = subject(x[:, 30:], memfile.load(tmp_path / "a.mem", subject))
        assert (torch.cat([first, second], 1) - whole).abs().max() < 0.02 * whole.std()
        assert 0 < (plain(x)[0] - whole).std() < 0.05 * whole.std()


def test_a_file_has_the_size_of_its_integers(tmp_path):
    sizes = {}
    for dtype in ("auto", "int8"):
        subject = model("knn", torch.bfloat16, dim=128, knn={"size": 4096, "store_dtype": dtype})
        memfile.save(tmp_path / dtype, subject, subject.start(1))
        sizes[dtype] = Path(tmp_path / dtype).stat().st_size
    slots = 2 * 4096  # two layers
    assert sizes["auto"] - sizes["int8"] == pytest.approx(slots * 2 * (2 * 128 - 128 - 2 * 4), rel=0.01)


def test_a_file_from_before_there_was_a_dtype_opens(tmp_path, monkeypatch):
    """Of models of our own: tests/test_fixtures.py. Of attached models: the field is missing in the header."""
    subject = attached()
    plain = AttachConfig.to_dict

    def earlier(self):
        data = plain(self)
        del data["knn"]["store_dtype"]
        return data

    with torch.no_grad():
        state = subject(tokens(1, 30, 90))[1]
    with monkeypatch.context() as patch:
        patch.setattr(AttachConfig, "to_dict", earlier)
        memfile.save(tmp_path / "a.mem", subject, state)
    assert_close(memfile.load(tmp_path / "a.mem", subject), state, 0.0)
    with pytest.raises(ValueError, match=r"knn.store_dtype is 'auto' in the file, 'int8' in the model"):
        memfile.load(tmp_path / "a.mem", attached(store_dtype="int8"))


def test_wrong_settings_are_one_line():
    with pytest.raises(ValueError, match=r"knn\.store_dtype: expected one of auto, int8, got 'int4'"):
        model("knn", knn={"store_dtype": "int4"})
    with pytest.raises(ValueError, match=r"store_dtype: expected .*got 'int4'"):
        Store(1, 1, 1, dtype="int4")
    _, state = model("knn")(tokens(1, 9))
    with pytest.raises(ValueError, match="state: expected a store of int8 keys and values, got float64"):
        model("knn", knn=INT8)(tokens(1, 9), state)
    _, state, (k, v, position, _) = filled()
    with pytest.raises(ValueError, match="expected a store of floating-point keys and values, got int8"):
        Store(SIZE, HEADS, WIDTH).add(state, k, v, position)
