"""CUDA graphs: work on fixed buffers, launched as one. The host then costs nothing, however many small kernels there
are.
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
    """A function without arguments, run so often for what is loaded or compiled on first use, then captured: the graph,
    and what the function returned, which every replay writes anew. With a graph `beside` it shares the memory, so that
    what one of them left is lost when the other is replayed.
    """
    with warnings.catch_warnings(), torch.cuda.device(device):
        # Steps before it ran on another stream, for which torch would wait: it is the one that this stream has waited
        # for.
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
    """Many tensors into fixed places, in a few launches."""
    torch._foreach_copy_(list(into), list(source))
