"""CUDA graphs: what works in fixed places, launched as one. The host then costs nothing, however many small kernels there are."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from math import lcm
from typing import Any, TypeVar

import torch
from torch import Tensor

from remanence.core.state import placed
from remanence.layers.attention import Attention, SegmentState
from remanence.mixers import LMM, MAC, MAG, MAL, Softmax
from remanence.model import Model

T = TypeVar("T")

KINDS = (LMM, MAC, MAG, MAL, Softmax)
"""Layers that decide nothing on the host but what a call's shape decides, and whether rows stand at a border."""


def capture(
    function: Callable[[], T], device: torch.device, warm: int = 2, beside: torch.cuda.CUDAGraph | None = None
) -> tuple[torch.cuda.CUDAGraph, T]:
    """A function without arguments, run so often for what is loaded or compiled on first use, then captured: the graph, and what
    the function returned, which every replay writes anew. With a graph `beside` it shares the memory, so that what one of them
    left is lost when the other is replayed.
    """
    with warnings.catch_warnings(), torch.cuda.device(device):
        # Steps before it ran on another stream, for which torch would wait: it is the one that this stream has waited for.
        warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream does not match")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(warm):
                function()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=None if beside is None else beside.pool(), capture_error_mode="thread_local"):
            returned = function()
    return graph, returned


def copy_all(into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Many tensors into fixed places, in a few launches."""
    torch._foreach_copy_(list(into), list(source))


def unsupported(model: Model, length: int, carries: bool) -> str | None:
    """Why calls of so many tokens cannot be captured, of rows that carry a state or begin, in words; None if they can."""
    if model.embed.weight.device.type != "cuda":
        return "only CUDA has graphs"
    if any(type(parameter.data) is not Tensor for parameter in model.parameters()):
        return "the weights are sharded"
    mixer: Any
    for mixer in mixers(model):
        if not isinstance(mixer, KINDS):
            return f"{type(mixer).__name__} layers decide on the host what to do"
        if carries and isinstance(mixer, Softmax) and mixer.attention.window is None:
            return "what full attention carries grows"
        memory = getattr(mixer, "memory", None)
        if memory is not None and memory.layer.watch is not None:
            return "a memory is being watched"
    border = border_of(model)
    if carries and length % border:
        return f"rows that go on must stand at multiples of {border} tokens, a chunk and a segment, but each call reads {length}"
    return None


def border_of(model: Model) -> int:
    """Tokens after which a chunk of every memory and a segment end together."""
    chunks = [mixer.memory.layer.config.chunk for mixer in mixers(model) if hasattr(mixer, "memory")]
    return lcm(*chunks, *[mixer.size for mixer in mixers(model) if isinstance(mixer, MAC)])


def longest_window(model: Model) -> int:
    """Tokens that any layer's sliding attention reaches back."""
    return max((part.window or 0 for part in model.modules() if isinstance(part, Attention)), default=0)


def mixers(model: Model) -> list[Any]:
    return [block.mixer for block in model.blocks]


def stand_at(state: Any, position: list[int]) -> Any:
    """A state whose rows the host knows to stand there, every memory included."""
    if not isinstance(state, tuple):
        return state
    if isinstance(state, SegmentState):
        size = state.tokens[0].shape[1] + 1
        return state._replace(position=placed(state.position.detach(), [place % size for place in position]))
    children = [stand_at(child, position) for child in state]
    if not hasattr(state, "_fields"):
        return tuple(children)
    made: Any = type(state)(*children)
    return made._replace(position=placed(made.position.detach(), position)) if "position" in state._fields else made
