"""Masks are what their drawings say; the fast forms are plain softmax under those masks."""

import functools
import inspect
import itertools

import pytest
import torch

from remanence.layers import Rotary, softmax
from remanence.layers.attention import Attention
from remanence.layers.masks import band_mask, causal_mask, segment_mask
from remanence.layers.softmax import full_attention, sliding_attention
from remanence.testing import assert_close

pytestmark = pytest.mark.sample(3)


def drawing(function):
    """The rows of # and . in a docstring, without the blanks between groups."""
    lines = [line.replace(" ", "") for line in inspect.getdoc(function).splitlines()]
    return [line for line in lines if line and set(line) <= set("#.")]


def draw(mask):
    return ["".join("#" if seen else "." for seen in row) for row in mask.tolist()]


def test_masks_are_as_drawn():
    assert draw(causal_mask(3, 4, 2, torch.tensor([2]), window=3)[0]) == drawing(causal_mask)
    assert draw(band_mask(3, 3, 1)) == drawing(band_mask)
    assert draw(segment_mask(2, 2, 1, torch.tensor([1]))[0]) == drawing(segment_mask)


def test_without_a_window_everything_read_is_seen():
    assert draw(causal_mask(2, 3, 1, torch.tensor([1, 3]))[0]) == ["#..##.", "#..###"]
    assert draw(causal_mask(2, 3, 1, torch.tensor([1, 3]))[1]) == ["#####.", "######"]


def test_a_segment_without_a_memory_has_tokens_only():
    assert draw(segment_mask(2, 1, 1, torch.tensor([1]), retrieved=False)[0]) == ["###.", "####"]


def plain(q, k, v, prefix, window, position):
    """One query and head at a time."""
    cached = k.shape[1] - q.shape[1]
    out = torch.zeros_like(q)
    for r in range(q.shape[0]):
        for i in range(q.shape[1]):
            first = max(-int(position[r]), i - window + 1 if window else -cached)
            keys = torch.cat([prefix[0], k[r, cached + first : cached + i + 1]])
            values = torch.cat([prefix[1], v[r, cached + first : cached + i + 1]])
            weights = torch.einsum("he,khe->hk", q[r, i], keys).div(q.shape[-1] ** 0.5).softmax(-1)
            out[r, i] = torch.einsum("hk,khe->he", weights, values)
    return out


@pytest.mark.parametrize("window", [1, 2, 5, 17, 40])
@pytest.mark.parametrize("queries", [1, 3, 20, 67])
@pytest.mark.parametrize("slack", [0, 3])
def test_sliding_attention_is_softmax_over_a_window(window, queries, slack):
    cached = window - 1 + slack
    q = torch.randn(3, queries, 2, 4, dtype=torch.float64)
    k, v = torch.randn(2, 3, cached + queries, 2, 4, dtype=torch.float64)
    prefix = (torch.randn(2, 2, 4, dtype=torch.float64), torch.randn(2, 2, 4, dtype=torch.float64))
    position = torch.tensor([0, min(2, window - 1), 1000])
    assert_close(
        sliding_attention(q, k, v, prefix, window, position), plain(q, k, v, prefix, window, position), 1e-12
    )
    new = k[:, cached:], v[:, cached:]
    expected = plain(q, *new, prefix, window, torch.zeros(3, dtype=torch.int64))
    assert_close(sliding_attention(q, *new, prefix, window, None), expected, 1e-12)


@pytest.mark.parametrize("cached", [0, 4])
@pytest.mark.parametrize("queries", [1, 6])
def test_full_attention_is_softmax_over_everything(queries, cached):
    q = torch.randn(2, queries, 2, 4, dtype=torch.float64)
    k, v = torch.randn(2, 2, cached + queries, 2, 4, dtype=torch.float64)
    none = (q.new_zeros(0, 2, 4), q.new_zeros(0, 2, 4))
    position = torch.tensor([cached, cached // 2])
    assert_close(full_attention(q, k, v, position), plain(q, k, v, none, None, position), 1e-12)
    if not cached:
        assert_close(full_attention(q, k, v, None), plain(q, k, v, none, None, position), 1e-12)


def test_rotary_tells_distances_only_and_stays_exact_far_out():
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(i, j, dtype=torch.float64):
        turned = [Rotary(torch.tensor([[at]]), 8, 1e4, dtype)(x.to(dtype)) for x, at in ((q, i), (k, j))]
        return float((turned[0] * turned[1]).sum())

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-12)
    assert score(7, 3) == pytest.approx(score(2_000_007, 2_000_003), abs=1e-8)
    assert score(7, 3) == pytest.approx(score(2_000_007, 2_000_003, torch.float32), abs=1e-5)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-3)


def test_persistent_tokens_are_seen_from_everywhere():
    torch.manual_seed(0)
    attention = Attention(8, 2, window=3, persistent=2, rotary=1e4).double()
    x = torch.randn(1, 20, 8, dtype=torch.float64)
    before, _ = attention(x)
    with torch.no_grad():
        attention.persistent.weight.add_(1.0)
    after, _ = attention(x)
    assert ((before - after).abs().amax(-1) > 1e-6).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention runs on CUDA")
@pytest.mark.parametrize("width", [16, 48, 64, 96])
def test_flexible_attention_is_the_same(width):
    q, k, v = torch.randn(3, 2, 700, 2, width, device="cuda", requires_grad=True)
    prefix = tuple(torch.randn(2, 5, 2, width, device="cuda"))
    from remanence.layers.softmax import flex_sliding_attention

    position = torch.zeros(2, dtype=torch.int64, device="cuda")
    blocks = sliding_attention(q, k, v, prefix, 200, position)
    before = flex_sliding_attention(q, k, v, prefix, 200)
    assert_close(before, blocks, 1e-3)
    changed = [torch.cat([x[:, :333], torch.randn_like(x[:, 333:])], 1) for x in (q, k, v)]
    assert torch.equal(flex_sliding_attention(*changed, prefix, 200)[:, :333], before[:, :333]), (
        "causal to the bit"
    )


@pytest.mark.slow
def test_flexible_attention_stays_compiled_however_many_kinds_of_calls_there_are(monkeypatch):
    """By itself torch gives up after eight builds of a function, and all scores are computed at once."""
    eager = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", eager)
    softmax._compiled_flex.cache_clear()
    try:
        flex = softmax._compiled_flex("fixed")
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            for length, lse in itertools.product(range(128, 128 + 6 * 16, 16), (False, True)):
                q = torch.randn(1, 2, length, 16)
                mask = softmax._sliding_block_mask(length, 0, 32, 0, q.device)
                y, total = flex(q, q, q, mask, None, lse)
                assert y.shape == q.shape and (total is not None) == lse
    finally:
        softmax._compiled_flex.cache_clear()
        torch._dynamo.reset()
