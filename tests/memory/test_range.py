"""Inputs too large for a memory are refused or flagged, never read into a memory that is of no use afterwards."""

import pytest
import torch

from remanence import NeuralMemory

pytestmark = pytest.mark.sample(4)

NETS = ["deep", "titans", "linear", "residual"]
DTYPES = [torch.float32, torch.bfloat16]


def made(net, dtype, checks):
    memory = NeuralMemory(dim=16, heads=2, chunk=4, net=net).to(dtype)
    memory.checks = checks
    return memory


@pytest.mark.parametrize("scale", [1e7, 1e18, 1e30, 3e38])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("net", NETS)
def test_beyond_the_range_an_input_is_refused(net, dtype, scale):
    memory, x = made(net, dtype, True), torch.randn(2, 9, 16).clamp(-1, 1).to(dtype)
    _, state = memory(x)
    for call in (memory, memory.trace, memory.read):
        with pytest.raises(
            ValueError, match=r"^x: expected numbers of at most 1e\+06 .* got .*; normalise them"
        ):
            call((x * scale).clamp(max=torch.finfo(dtype).max), state)


@pytest.mark.parametrize("piece", [1, 3, 12])
@pytest.mark.parametrize("scale", [1e18, 1e30])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("net", NETS)
def test_where_nothing_is_checked_the_memory_is_flagged(net, dtype, scale, piece):
    """As on a GPU, in calls of any length; the flag stays, and the other row is not affected."""
    memory = made(net, dtype, False)
    x = torch.randn(2, 12, 16)
    x[1, 5] *= scale
    state = None
    with torch.no_grad():
        for part in x.to(dtype).split(piece, 1):
            _, state = memory(part, state)
        assert state.diverged.tolist() == [False, True]
        assert memory(torch.randn(2, 8, 16).to(dtype), state)[1].diverged.tolist() == [False, True]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("net", ["deep", "titans", "linear"])
def test_inside_the_range_a_memory_stays_of_use(net, dtype):
    memory, x = made(net, dtype, True), torch.randn(1, 64, 16).clamp(-1, 1)
    with torch.no_grad():
        y, state = memory((1e6 * x).to(dtype))
        later, after = memory(x.to(dtype), state)
    assert y.isfinite().all() and later.isfinite().all() and not after.diverged.any()
    assert all(float(layer.abs().max()) < 1e8 for layer in after.memory.layers)
