"""How often backward had to limit a gradient, on every device. In a healthy training run it never does.

A memory (one row and head of a call) counts once if its gradient, carried from chunk to chunk, was scaled down at least
once in that call's backward. The chunked backend and the kernels count, also inside torch.compile, which sees them as
one operator each. The reference has no limit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

_counters: dict[torch.device, Tensor] = {}


def counter(beside: Tensor) -> Tensor:
    """The count ``[1]`` on a tensor's device, to be added to there without waiting. It is a throwaway on fake tensors,
    and when a CUDA graph is captured before there is a counter: the graph would capture its zero, too.

    Tracing by the compiler also makes the real one: compiled code may first run in memory that belongs to a CUDA graph.
    """
    device = beside.device
    if isinstance(beside, FakeTensor):
        if device.type == "cuda" and device not in _counters and torch.cuda.is_available():
            with unset_fake_temporarily():
                _counters[device] = torch.zeros(1, dtype=torch.int64, device=device)
        return beside.new_empty(1, dtype=torch.int64)
    found = _counters.get(device)
    if found is None:
        found = torch.zeros(1, dtype=torch.int64, device=device)
        if type(beside) is Tensor and not (
            device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        ):
            _counters[device] = found
    return found


def clamped() -> int:
    """How many memories' gradients were limited since the start or `reset_clamped`, on all devices; waits for them."""
    return sum(int(count) for count in _counters.values())


def reset_clamped() -> None:
    for count in _counters.values():
        count.zero_()


class GradientClamp:
    """Limits the gradient that is carried back from chunk to chunk, per row and head, to what floats can represent.

    Thousands of writes are a long product of Jacobians, which explodes with a deep net or repeated keys. The limit is
    all that was received so far (the absolute sum of the outputs' gradients, times the largest query if above 1) times
    1 / eps: beyond it, rounding has replaced the last digit of what was received. There the gradient is scaled down;
    below it nothing changes. Deep nets are limited after every chunk, a user's own net after every block.

    What was received may itself have grown in a later call (MAC makes one per segment), so there is also a fixed limit:
    a number whose square can be summed 1e18 times, as a gradient's norm needs.

    `count` adds the limited rows and heads to the total that `clamped` returns.
    """

    def __init__(self, g_end: tuple[Tensor, ...], dtype: torch.dtype) -> None:
        self.received: Tensor | int = sum(g.abs().reshape(len(g), -1).sum(1) for g in g_end)
        self.reach, self.end = 1.0 / torch.finfo(dtype).eps, torch.finfo(dtype).max ** 0.5 * 1e-9
        self.least: Tensor | None = None

    def apply(self, g_state: list[Tensor], received: Tensor) -> None:
        """Scale g_state ``[m ...]`` down in place where needed, after gradients of this size ``[m]`` were received."""
        self.received = self.received + received
        limit = (self.received * self.reach).clamp(max=self.end)
        size = torch.stack([g.reshape(len(g), -1).abs().amax(1) for g in g_state]).amax(0)
        factor = (limit / size).clamp_(max=1.0).nan_to_num_(1.0)
        self.least = factor if self.least is None else torch.minimum(self.least, factor)
        for g in g_state:
            g.mul_(factor.view(-1, *[1] * (g.dim() - 1)))

    def count(self) -> None:
        if self.least is not None and not torch.compiler.is_compiling():
            counter(self.least).add_((self.least < 1.0).sum())
