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
