"""Check a module of your own: one module keeps the laws, the other leaks the future.

The command prints all laws as a table: ``remanence check examples/check_your_module.py:RunningMean``. In tests, use
`remanence.testing`, as below.
"""

import torch
from torch import nn

from remanence.testing import assert_causal, assert_rows_isolated, assert_split


class RunningMean(nn.Module):
    """The mean of all tokens so far; its state is their sum and count."""

    def forward(self, x, state=None):
        start = torch.zeros_like(x[:, :1]), torch.zeros_like(x[:, :1, :1])
        total, count = start if state is None else state
        sums = total + x.cumsum(1)
        counts = count + torch.arange(1, x.shape[1] + 1).view(1, -1, 1)
        return sums / counts, (sums[:, -1:], counts[:, -1:])


class LeakyMean(nn.Module):
    def forward(self, x, state=None):
        return x - x.mean(1, keepdim=True), None


if __name__ == "__main__":
    x = torch.randn(3, 12, 5, dtype=torch.float64)
    assert_causal(RunningMean(), x)
    assert_rows_isolated(RunningMean(), x)
    assert_split(RunningMean(), x, [5, 1, 6])
    print("RunningMean: causal, rows isolated, one call = any split")
    try:
        assert_causal(LeakyMean(), x)
    except AssertionError as broken:
        print(f"LeakyMean: {broken}")
