"""How often the leash on backward was needed, on every device: what a healthy training run never does, and should see if it does.

Counted is one for each memory (a row's and head's) of a call whose gradient, carried from chunk to chunk, was scaled down at
least once in that call's backward. The chunked tier and the kernels count, inside torch.compile too, to which they are whole; the
reference tier has no leash.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

_counters: dict[torch.device, Tensor] = {}


def counter(beside: Tensor) -> Tensor:
    """The count ``[1]`` on a tensor's device, to be added to there: nothing has to wait. One that nobody reads where it is only
    asked for shapes, or where a CUDA graph is captured before there is a counter: its zero would be captured, too.

    The compiler's tracing makes the real one as well: what it has compiled may first run in memory that is a CUDA graph's.
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
        if type(beside) is Tensor and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            _counters[device] = found
    return found


def leashed() -> int:
    """How many memories' gradients have been held since the process began or `reset_leashed`, on all devices; waits for them."""
    return sum(int(count) for count in _counters.values())


def reset_leashed() -> None:
    for count in _counters.values():
        count.zero_()
