"""For tests of what torch.compile makes of something."""

import torch
from torch import Tensor


def whole(function):
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def assert_same(true, found, tolerance=1e-10):
    for index, (a, b) in enumerate(zip(true, found, strict=True)):
        assert (a is None) == (b is None), index
        if isinstance(a, Tensor):
            scale = max(1.0, float(a.detach().abs().max())) if a.is_floating_point() and a.numel() else 1.0
            assert a.shape == b.shape and a.dtype == b.dtype, index
            assert torch.allclose(a, b, rtol=0, atol=tolerance * scale), (index, a, b)
