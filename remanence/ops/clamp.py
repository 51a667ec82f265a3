"""A clamp on the gradient of a memory's state during backward, and a count of how often the clamp was
applied.

In a healthy training run it is never applied. A memory (one row and head of a call) is counted once per call
if the gradient of its state was scaled down at least once in the backward pass of that call. The chunked
backend and the Triton kernels clamp and count, also under torch.compile, where each of them is one operator.
The reference backend does not clamp.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

_counters: dict[torch.device, Tensor] = {}
"""The number of clamped memories, one tensor ``[1]`` per device."""


def clamp_counter(like: Tensor) -> Tensor:
    """Return the counter ``[1]`` on the device of `like`, which is incremented without synchronisation.

    A temporary tensor is returned for fake tensors, and also while a CUDA graph is captured before the
    counter exists: the graph would capture the initialisation to zero as well. When the compiler traces with
    fake tensors, the real counter is created too, because compiled code may first run in memory that belongs
    to a CUDA graph.
    """
    device = like.device
    if isinstance(like, FakeTensor):
        if device.type == "cuda" and device not in _counters and torch.cuda.is_available():
            with unset_fake_temporarily():
                _counters[device] = torch.zeros(1, dtype=torch.int64, device=device)
        return like.new_empty(1, dtype=torch.int64)
    found = _counters.get(device)
    if found is None:
        found = torch.zeros(1, dtype=torch.int64, device=device)
        if type(like) is Tensor and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            _counters[device] = found
    return found


def clamped() -> int:
    """Return the number of memories whose gradient was clamped since `reset_clamped`, summed over all
    devices. This synchronises with the devices.
    """
    return sum(int(count) for count in _counters.values())


def reset_clamped() -> None:
    """Set the count that `clamped` returns to zero."""
    for count in _counters.values():
        count.zero_()


class GradientClamp:
    """Limits the gradient of the state while it is propagated back from chunk to chunk, for each row and
    head.

    Thousands of writes are a long product of Jacobians, which explodes with a deep net or with repeated keys.
    The relative limit is 1 / eps times the gradient received from the outputs so far (the sum of its absolute
    values, times the largest query if that is above 1). Beyond this limit, rounding errors are as large as
    the received gradient. A larger gradient is scaled down to the limit, a smaller one is not changed.
    Built-in nets are clamped after every chunk, custom nets after every block of chunks.

    There is also an absolute limit, because the received gradient may itself have grown in a later call (MAC
    makes one call per segment). The square of this limit can be summed 1e18 times without overflow.

    `add_to_counter` adds the number of clamped rows and heads to the total that `clamped` returns.
    """

    def __init__(self, g_end: tuple[Tensor, ...], dtype: torch.dtype) -> None:
        self.received: Tensor | int = sum(g.abs().reshape(len(g), -1).sum(1) for g in g_end)
        self.relative_limit, self.absolute_limit = (
            1.0 / torch.finfo(dtype).eps,
            torch.finfo(dtype).max ** 0.5 * 1e-9,
        )
        self.smallest_factor: Tensor | None = None

    def apply(self, g_state: list[Tensor], received: Tensor) -> None:
        """Scale the gradient `g_state` ``[m ...]`` down in place where it exceeds the limit. `received`
        ``[m]`` is the size of the gradient that the outputs of this chunk or block received; it is added to
        the sum so far.
        """
        self.received = self.received + received
        limit = (self.received * self.relative_limit).clamp(max=self.absolute_limit)
        size = torch.stack([g.reshape(len(g), -1).abs().amax(1) for g in g_state]).amax(0)
        factor = (limit / size).clamp_(max=1.0).nan_to_num_(1.0)
        self.smallest_factor = (
            factor if self.smallest_factor is None else torch.minimum(self.smallest_factor, factor)
        )
        for g in g_state:
            g.mul_(factor.view(-1, *[1] * (g.dim() - 1)))

    def add_to_counter(self) -> None:
        """Add the number of clamped rows and heads to the counter of their device."""
        if self.smallest_factor is not None and not torch.compiler.is_compiling():
            clamp_counter(self.smallest_factor).add_((self.smallest_factor < 1.0).sum())
