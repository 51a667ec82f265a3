"""CUDA graphs: operations on fixed buffers that are launched together, which removes the host's cost per
kernel.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def capture(
    function: Callable[[], T], device: torch.device, warm: int = 2, beside: torch.cuda.CUDAGraph | None = None
) -> tuple[torch.cuda.CUDAGraph, T]:
    """Call a function `warm` times, so that everything needed is loaded and compiled, and then capture it as
    a CUDA graph.

    Returns the graph and the function's result, which every replay overwrites. If `beside` is given, both
    graphs share memory, so replaying one destroys the results of the other.
    """
    with warnings.catch_warnings(), torch.cuda.device(device):
        # Earlier steps ran on another stream, and torch warns that it would wait for it. This stream has
        # already waited for that one.
        warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream does not match")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(warm):
                function()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=None if beside is None else beside.pool(), capture_error_mode="thread_local"
        ):
            returned = function()
    return graph, returned


def copy_all(into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Copy many tensors into existing tensors with few kernel launches."""
    torch._foreach_copy_(list(into), list(source))
