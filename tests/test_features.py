"""Features of keys on torch: unit, the written function, and the same numbers wherever they are drawn. (The kernels' law is in
tests/ops/test_triton_layer.py.)
"""

import pytest
import torch
import torch.nn.functional as F

from remanence.layers import Features
from remanence.testing import distance


def keys(*shape, dtype=torch.float64):
    return F.normalize(torch.randn(*shape, dtype=dtype), dim=-1)


def written(features, x, head):
    """Of one key of a head, word by word."""
    y = x
    for weight in features.weights:
        gate, up = (len(y) ** 0.5 * (y @ weight[head])).chunk(2)
        y = gate * gate.sigmoid() * up
        y = y / (y.square().sum() + 1e-6).sqrt()
    share = features.mix[head].sigmoid()
    return torch.cat([x * (1 - share).sqrt(), y * share.sqrt()])


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_each_key_by_itself(depth):
    features = Features(3, 5, 7, depth).double()
    torch.nn.init.normal_(features.mix)
    x = keys(2, 4, 3, 5)
    y = features(x)
    assert y.shape == (2, 4, 3, 12)
    assert distance(torch.ones(2, 4, 3, dtype=torch.float64), y.norm(dim=-1)) < 1e-4
    for row, token, head in ((0, 0, 0), (1, 3, 1), (1, 2, 2)):
        assert distance(written(features, x[row, token, head], head), y[row, token, head]) < 1e-12


def test_gradients():
    features = Features(2, 4, 3, 2).double()
    x = keys(1, 3, 2, 4).requires_grad_()
    names, values = zip(*features.named_parameters(), strict=True)
    call = lambda x, *values: torch.func.functional_call(features, dict(zip(names, values, strict=True)), x)
    assert torch.autograd.gradcheck(call, (x, *values))


def test_shares_of_nothing_keep_a_gradient():
    """Down to where float32 ends; the root of a sigmoid that is 0 would give NaN."""
    features = Features(2, 4, 4)
    with torch.no_grad():
        features.mix.copy_(torch.tensor([-1000.0, 1000.0]))
    x = keys(1, 3, 2, 4, dtype=torch.float32).requires_grad_()
    y = features(x)
    found = torch.autograd.grad(y.sin().sum(), [x, *features.parameters()])
    assert all(bool(part.isfinite().all()) for part in (y, *found))


def test_autocast_changes_nothing():
    """Keys come in the dtype that products are to have."""
    features = Features(2, 8, 16, 2)
    for dtype in (torch.float32, torch.bfloat16):
        x = keys(1, 6, 2, 8, dtype=torch.float32).to(dtype)
        plain = features(x)
        with torch.autocast(x.device.type, torch.bfloat16):
            assert torch.equal(features(x), plain) and plain.dtype == dtype


def test_the_same_numbers_wherever_they_are_drawn():
    torch.manual_seed(5)
    made = Features(2, 8, 16, 2)
    with torch.device("meta"):
        later = Features(2, 8, 16, 2)
    assert all(parameter.is_meta for parameter in later.parameters())
    later = later.to_empty(device=made.mix.device)
    torch.manual_seed(5)
    later.reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), later.parameters(), strict=True))
    assert not bool(made.mix.any())
    assert all(0.9 < float(weight.detach().std() * weight.shape[1] ** 0.5) < 1.1 for weight in made.weights)
