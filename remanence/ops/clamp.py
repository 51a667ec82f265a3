"""A clamp on the gradient of a memory's state during backward, and a count of how often it acted.

In a healthy training run it never acts. A memory (one row and head of a call) counts once if the gradient of its state
was scaled down at least once in that call's backward. The chunked backend and the kernels count, also inside
torch.compile, where each is one operator. The reference backend does not clamp.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

_counters: dict[torch.device, Tensor] = {}


def clamp_counter(like: Tensor) -> Tensor:
    """The counter ``[1]`` on a tensor's device, which is incremented without synchronisation.

    A temporary tensor for fake tensors, and while a CUDA graph is captured before the counter exists: the graph would
    also capture the zero that it starts from. Tracing by the compiler creates the counter, because compiled code may
    first run in memory that belongs to a CUDA graph.
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
    """The number of memories whose gradient was clamped since `reset_clamped`, on all devices; synchronises."""
    return sum(int(count) for count in _counters.values())


def reset_clamped() -> None:
    """Set the count of `clamped` to zero."""
    for count in _counters.values():
        count.zero_()


class GradientClamp:
    """Limits the gradient of the state, as it is propagated back from chunk to chunk, per row and head.

    Thousands of writes are a long product of Jacobians, which explodes with a deep net or repeated keys. The relative
    limit is 1 / eps times the gradient received from the outputs so far (its absolute sum, times the largest query if
    above 1): beyond that, rounding errors are as large as the received gradient. A larger gradient is scaled down, a
    smaller one is not changed. Built-in nets are clamped after every chunk, custom nets after every block of chunks.

    The received gradient may itself have grown in a later call (MAC makes one call per segment), so there is also an
    absolute limit, a number whose square can be summed 1e18 times without overflow.

    `add_to_counter` adds the limited rows and heads to the total that `clamped` returns.
    """

    def __init__(self, g_end: tuple[Tensor, ...], dtype: torch.dtype) -> None:
        self.received: Tensor | int = sum(g.abs().reshape(len(g), -1).sum(1) for g in g_end)
        self.relative_limit, self.absolute_limit = (
            1.0 / torch.finfo(dtype).eps,
            torch.finfo(dtype).max ** 0.5 * 1e-9,
        )
        self.smallest_factor: Tensor | None = None

    def apply(self, g_state: list[Tensor], received: Tensor) -> None:
        """Scale g_state ``[m ...]`` down in place where needed, after gradients of this size ``[m]`` were received."""
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
