"""Searching and attending: exact = a loop over all entries; gradients reach the queries and never the store."""

import builtins
import logging
import math

import pytest
import torch

from remanence.memory import search
from remanence.memory.search import SEARCHES, SearchResult, attend, combine, dense, exact, l2_normalize
from remanence.memory.store import Store, StoreState
from remanence.testing import assert_close


def stored(rows, size, heads, width, empty=0, dtype=torch.float64):
    k, v = (torch.randn(rows, size, heads, width, dtype=dtype) for _ in range(2))
    position = torch.stack([torch.randperm(size) for _ in range(rows)])
    position[:, size - empty :] = -1
    return StoreState(l2_normalize(k), v, position, torch.ones(rows, size), torch.full((rows,), size - empty))


def queries(rows, tokens, heads, width, dtype=torch.float64):
    return l2_normalize(torch.randn(rows, tokens, heads, width, dtype=dtype))


def loop(q, state, k, limit):
    """Every entry, one after the other."""
    score = torch.full((*q.shape[:3], k), -math.inf, dtype=q.dtype)
    index = torch.full(score.shape, -1)
    for row, token, head in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        may = [j for j, p in enumerate(state.position[row].tolist()) if 0 <= p <= limit[row, token]]
        found = sorted((-float(q[row, token, head] @ state.k[row, j, head]), j) for j in may)[:k]
        for place, (s, j) in enumerate(found):
            score[row, token, head, place], index[row, token, head, place] = -s, j
    return SearchResult(score, index)


class TestExact:
    @pytest.mark.parametrize(
        ("size", "empty", "k"), [(40, 0, 3), (83, 20, 5), (6, 5, 6), (9, 9, 2), (130, 0, 1)]
    )
    @pytest.mark.parametrize("block", [16, 64, 2**16])
    def test_is_the_loop(self, size, empty, k, block, monkeypatch):
        monkeypatch.setattr(search, "BLOCK", block)
        monkeypatch.setattr(search, "SCORES", 3 * min(block, size))
        state, q = stored(2, size, 2, 4, empty), queries(2, 5, 2, 4)
        limit = torch.randint(-1, size, (2, 5))
        found, want = exact(q, state, k, limit), loop(q, state, k, limit)
        assert_close(found.score, want.score, 1e-12)
        assert torch.equal(found.index, want.index)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("block", [32, 2**16])
    def test_equals_are_in_the_order_of_their_slots(self, dtype, block, monkeypatch):
        monkeypatch.setattr(search, "BLOCK", block)
        state, q = stored(1, 200, 1, 3, dtype=dtype), torch.randint(-1, 2, (1, 7, 1, 3)).to(dtype)
        state = state._replace(k=torch.randint(-1, 2, state.k.shape).to(dtype))
        limit = torch.full((1, 7), 150)
        found, want = exact(q, state, 12, limit), loop(q, state, 12, limit)
        assert torch.equal(found.index, want.index)
        assert_close(found.score, want.score, 0.0)

    def test_large_in_float32_is_topk(self):
        state, q = stored(1, 70_001, 2, 8, dtype=torch.float32), queries(1, 65, 2, 8, torch.float32)
        score = torch.einsum("rthe,rnhe->rthn", q, state.k)
        found = exact(q, state, 32, torch.full((1, 65), 70_001))
        assert_close(found.score, score.topk(32).values, 1e-6)
        assert_close(score.gather(-1, found.index), found.score, 1e-6)

    def test_half_precision_is_scored_in_float32(self):
        state, q = stored(1, 50, 1, 4, dtype=torch.bfloat16), queries(1, 3, 1, 4, torch.bfloat16)
        limit = torch.full((1, 3), 50)
        found = exact(q, state, 5, limit)
        assert found.score.dtype == torch.float32
        assert torch.equal(found.index, exact(q.float(), state._replace(k=state.k.float()), 5, limit).index)

    def test_bad_input_is_refused(self):
        state, q = stored(1, 4, 1, 2), queries(1, 3, 1, 2)
        with pytest.raises(ValueError, match="k: expected between 1 and the store's size of 4, got 5"):
            exact(q, state, 5, torch.zeros(1, 3))
        with pytest.raises(ValueError, match="max_position: expected shape"):
            exact(q, state, 2, torch.zeros(1, 2))
        with pytest.raises(ValueError, match="q: expected rows, heads and width"):
            exact(queries(1, 3, 2, 2), state, 2, torch.zeros(1, 3))


class TestAttend:
    def plain(self, q, state, limit, scale):
        """Softmax over all that may be found, with the loop's eyes."""
        score = torch.einsum("rthe,rnhe->rthn", q, state.k) * scale.view(-1, 1)
        hidden = (state.position < 0).unsqueeze(1) | (state.position.unsqueeze(1) > limit.unsqueeze(-1))
        score = score.masked_fill(hidden.unsqueeze(2), -math.inf)
        return (
            score,
            torch.einsum("rthn,rnhe->rthe", score.softmax(-1).nan_to_num(), state.v),
            score.logsumexp(-1),
        )

    @pytest.mark.parametrize("name", ["exact", "dense"])
    def test_all_found_is_plain_attention(self, name, monkeypatch):
        monkeypatch.setattr(search, "BLOCK", 8)
        monkeypatch.setattr(search, "SCORES", 8 * 36)
        state, q = stored(2, 20, 3, 4, empty=4), queries(2, 6, 3, 4)
        limit, scale = torch.randint(-1, 20, (2, 6)), torch.rand(3, dtype=torch.float64) * 10
        output, lse = attend(q, SEARCHES[name]()(q, state, 20, limit), state, scale)
        _, want, want_lse = self.plain(q, state, limit, scale)
        assert_close(output, want, 1e-12)
        assert torch.allclose(lse, want_lse, atol=1e-12)

    @pytest.mark.filterwarnings("ignore:Anomaly Detection")
    @pytest.mark.parametrize("find", [exact, dense])
    def test_gradients_reach_queries_and_scale_and_not_the_store(self, find, monkeypatch):
        monkeypatch.setattr(search, "BLOCK", 8)
        monkeypatch.setattr(search, "SCORES", 8 * 36)
        state, q = stored(2, 20, 2, 4), queries(2, 6, 2, 4).requires_grad_()
        scale = torch.full((2,), 5.0, dtype=torch.float64, requires_grad=True)
        state.k.requires_grad_(), state.v.requires_grad_()
        limit = torch.randint(3, 20, (2, 6))
        limit[0, :2] = -1  # finds nothing, and must not make a NaN

        def loss(q, scale):
            output, lse = attend(q, find(q, state, 3, limit), state, scale)
            return combine(torch.zeros_like(output), torch.zeros_like(lse), output, lse).square().sum()

        with torch.autograd.detect_anomaly(check_nan=True):
            loss(q, scale).backward()
        assert state.k.grad is None and state.v.grad is None
        assert (
            bool((q.grad[0, :2] == 0).all())
            and bool((q.grad[1] != 0).any())
            and bool((scale.grad != 0).all())
        )
        assert torch.autograd.gradcheck(loss, (q, scale))


class TestCombine:
    def test_nothing_found_is_local_attention_alone(self):
        store = Store(8, 2, 4)
        q, local = queries(1, 3, 2, 4), torch.randn(1, 3, 2, 4, dtype=torch.float64)
        state = store.start(1, q)
        for find in (exact, dense):
            output, lse = attend(
                q, find(q, state, 4, torch.full((1, 3), 99)), state, torch.ones(2, dtype=torch.float64)
            )
            assert bool((output == 0).all()) and bool((lse == -math.inf).all())
            for gate in (None, torch.full((2,), 3.0, dtype=torch.float64)):
                assert torch.equal(combine(local, torch.zeros(1, 3, 2), output, lse, gate), local)

    def test_joint_is_one_softmax_over_both(self):
        state, near, q = stored(2, 20, 3, 4), stored(2, 7, 3, 4), queries(2, 6, 3, 4)
        limit, scale = torch.full((2, 6), 99), torch.tensor([1.0, 8.0, 30.0], dtype=torch.float64)
        sides = [TestAttend().plain(q, one, limit, scale) for one in (near, state)]
        memory = attend(q, exact(q, state, 20, limit), state, scale)
        weight = torch.cat([side[0] for side in sides], -1).softmax(-1)
        want = torch.einsum("rthn,rnhe->rthe", weight, torch.cat([near.v, state.v], 1))
        assert_close(combine(sides[0][1], sides[0][2], *memory), want, 1e-12)

    def test_gate_is_the_paper_s(self):
        local, memory = torch.randn(2, 1, 5, 2, 4)
        gate = torch.tensor([-1.0, 2.0])
        g = gate.sigmoid().view(-1, 1)
        assert_close(
            combine(local, None, memory, torch.zeros(1, 5, 2), gate), memory * g + local * (1 - g), 1e-6
        )


class TestIvf:
    def clustered(self, size=6000, heads=2, width=8):
        centre = torch.randn(40, width)
        k = l2_normalize(
            centre[torch.randint(40, (1, size, heads))] + 0.3 * torch.randn(1, size, heads, width)
        )
        return StoreState(k, k, torch.arange(size)[None], torch.ones(1, size), torch.tensor([size]))

    @pytest.fixture
    def ivf(self, monkeypatch):
        pytest.importorskip("faiss")
        monkeypatch.setattr("remanence.memory.ivf.MIN_ENTRIES", 4096)
        return SEARCHES["ivf"]()

    def test_recall_is_measured_and_logged(self, ivf, caplog):
        state = self.clustered()
        q, limit = state.k[:, ::100], torch.full((1, 60), 5000)
        with caplog.at_level(logging.INFO):
            found = ivf(q, state, 8, limit)
        assert ivf.recall > 0.8 and "recall" in caplog.text
        assert int(state.position[0][found.index].max()) <= 5000
        assert_close(
            found.score,
            torch.einsum("rthe,rthke->rthk", q, state.k[0][found.index, torch.arange(2)[:, None]][None][0]),
            1e-5,
        )

    @pytest.mark.parametrize("reuse", [False, True])
    def test_what_came_since_is_found_and_what_is_gone_is_not(self, ivf, reuse):
        store, state = Store(6000, 2, 8), self.clustered()
        limit = torch.full((1, 10), 10_000)
        ivf(state.k[:, :10], state, 8, limit)
        index = ivf._rows[0]
        new = l2_normalize(torch.randn(1, 500, 2, 8))
        state = store.add(state, new, new, torch.arange(6000, 6500)[None], reuse=reuse)
        found = ivf(new[:, :10], state, 1, limit)
        assert ivf._rows[0] is index, "a twelfth has changed: the index stays"
        assert torch.equal(found.index[0, :, 0, 0], torch.arange(10))
        many = ivf(new[:, :10], state, 600, limit).index.sort(-1).values
        assert bool((many.diff() > 0).all()), "an entry that took another's slot is found once"
        more = l2_normalize(torch.randn(1, 1500, 2, 8))
        state = store.add(state, more, more, torch.arange(6500, 8000)[None])
        ivf(new[:, :10], state, 1, limit)
        assert ivf._rows[0] is not index
        state = store.add(store.start(1, new), new, new, torch.arange(500)[None])
        assert torch.equal(ivf(new[:, :10], state, 5, limit).index, exact(new[:, :10], state, 5, limit).index)

    def test_a_store_with_more_slots_keeps_its_index(self, ivf):
        state, limit = self.clustered(), torch.full((1, 10), 10_000)
        before = ivf(state.k[:, :10], state, 8, limit)
        heads = ivf._rows[0].heads
        assert torch.equal(ivf(state.k[:, :10], state.enlarge(7000), 8, limit).index, before.index)
        assert ivf._rows[0].heads is heads

    def test_a_missing_faiss_names_the_extra(self, monkeypatch):
        original = builtins.__import__

        def without(name, *rest):
            if name == "faiss":
                raise ImportError(name)
            return original(name, *rest)

        monkeypatch.setattr(builtins, "__import__", without)
        find = SEARCHES["ivf"]()  # a model can be looked at without it
        state = Store(4, 1, 2).start(1, torch.zeros(1))
        with pytest.raises(ImportError, match=r"pip install 'remanence\[knn\]'"):
            find(torch.ones(1, 1, 1, 2), state, 1, torch.zeros(1, 1, dtype=torch.int64))


class TestTriton:
    """What the kernels find is in tests/ops/test_nearest.py."""

    def test_a_missing_triton_names_the_extra(self, monkeypatch):
        monkeypatch.setattr("remanence.ops.triton.launch.kernels", lambda: None)
        with pytest.raises(
            ImportError, match=r"search 'triton' needs Triton: pip install 'remanence\[triton\]'"
        ):
            SEARCHES["triton"]()

    def test_without_a_gpu_it_is_refused_by_name_only(self):
        pytest.importorskip("triton")
        state, q = (
            x.to("cpu") for x in (stored(1, 4, 1, 2, dtype=torch.float32), queries(1, 3, 1, 2, torch.float32))
        )
        with pytest.raises(
            ValueError, match=r"search: 'triton' cannot run this call: the kernels run on CUDA .* got cpu"
        ):
            SEARCHES["triton"]()(q, state, 2, torch.zeros(1, 3, device="cpu"))
        exact(q, state, 2, torch.zeros(1, 3, dtype=torch.int64, device="cpu"))


def test_annotated_shapes_are_true():
    beartype = pytest.importorskip("beartype").beartype
    from jaxtyping import jaxtyped

    from remanence.memory import policies

    def checked(function):
        return jaxtyped(typechecker=beartype)(function)

    state, q, limit = stored(2, 9, 3, 4), queries(2, 5, 3, 4), torch.full((2, 5), 9)
    for find in (exact, dense):
        output, lse = checked(attend)(
            q, checked(find)(q, state, 4, limit), state, torch.ones(3, dtype=torch.float64)
        )
        checked(combine)(output, lse, output, lse, torch.zeros(3, dtype=torch.float64))
    with pytest.raises(Exception, match=r"[Tt]ype"):
        checked(combine)(output, lse[0], output, lse)
    checked(Store.add)(Store(9, 3, 4), state, q, q, limit, torch.ones(2, 5), limit > 3)
    read = policies.Tokens(
        limit, limit, checked(policies.unigrams)(limit, 10).to(limit.device), torch.rand(2, 5)
    )
    for policy in policies.POLICIES.values():
        checked(policies.keep)(checked(policy)(read), 0.5, 2)
