"""Features of keys on torch: unit, the written function, and the same numbers wherever they are drawn. (The kernels'
law is in tests/ops/test_triton_layer.py.)
"""

import pytest
import torch
import torch.nn.functional as F

from remanence.layers import Features
from remanence.testing import distance


def keys(*shape, dtype=torch.float64):
    return F.normalize(torch.randn(*shape, dtype=dtype), dim=-1)


def trained(*sizes):
    """As if training had moved the way back from zero."""
    features = Features(*sizes)
    for _, down in features.layers:
        torch.nn.init.normal_(down)
    return features


def written(features, x, head):
    """Of one key of a head, word by word."""
    for up, down in features.layers:
        gate, value = (len(x) ** 0.5 * (x @ up[head])).chunk(2)
        u = gate * gate.sigmoid() * value
        x = x + (u / u.norm()) @ down[head]
        x = x / x.norm()
    return x


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_each_key_by_itself(depth):
    features = trained(3, 5, 7, depth).double()
    x = keys(2, 4, 3, 5)
    y = features(x)
    assert y.shape == x.shape
    assert distance(torch.ones(2, 4, 3, dtype=torch.float64), y.norm(dim=-1)) < 1e-10
    for row, token, head in ((0, 0, 0), (1, 3, 1), (1, 2, 2)):
        assert distance(written(features, x[row, token, head], head), y[row, token, head]) < 1e-10


def test_gradients():
    features = trained(2, 4, 3, 2).double()
    x = keys(1, 3, 2, 4).requires_grad_()
    names, values = zip(*features.named_parameters(), strict=True)
    call = lambda x, *values: torch.func.functional_call(features, dict(zip(names, values, strict=True)), x)
    assert torch.autograd.gradcheck(call, (x, *values))


def test_untrained_they_are_the_keys():
    """Nothing is added yet, and the way back, at zero, has a gradient to leave it by."""
    features = Features(2, 8, 16, 2).double()
    x = keys(1, 6, 2, 8).requires_grad_()
    y = features(x)
    assert distance(x, y) < 1e-10
    upstream = torch.randn_like(y)
    found = dict(
        zip(
            ["x", *dict(features.named_parameters())],
            torch.autograd.grad(y, [x, *features.parameters()], upstream),
            strict=True,
        )
    )
    along = (upstream * x).sum(-1, keepdim=True)
    assert distance(upstream - along * x, found["x"]) < 1e-10
    assert all(
        bool(found[f"down{layer}"].any()) and not bool(found[f"up{layer}"].any()) for layer in range(2)
    )


def test_keys_of_nothing_keep_a_gradient():
    """The root of a length that is 0 would give NaN."""
    features = trained(2, 4, 4)
    x = torch.zeros(1, 3, 2, 4).requires_grad_()
    y = features(x)
    found = torch.autograd.grad(y.sin().sum(), [x, *features.parameters()])
    assert all(bool(part.isfinite().all()) for part in (y, *found))


def test_autocast_changes_nothing():
    """Keys come in the dtype that products are to have."""
    features = trained(2, 8, 16, 2)
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
    later = later.to_empty(device=made.up0.device)
    torch.manual_seed(5)
    later.reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), later.parameters(), strict=True))
    assert not any(bool(down.any()) for _, down in made.layers)
    assert all(0.9 < float(up.detach().std() * up.shape[1] ** 0.5) < 1.1 for up, _ in made.layers)
