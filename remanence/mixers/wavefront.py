"""The wavefront schedule (diagonal batching: Sivtsov et al., 2025) for layers that read one segment after the other.

Segment s of layer l needs the output of layer l - 1 for segment s, and the state of layer l after segment s - 1. So all
pairs with the same l + s can be computed together, as one layer with stacked weights (`remanence.mixers.stacked`) and
with the rows of all these layers in one batch::

    layer     0  1  2  3
    time 0    0                 the segment that each layer reads at each time
         1    1  0
         2    2  1  0
         3    3  2  1  0
         4    4  3  2  1
         5       4  3  2
         6          4  3
         7             4

This takes layers + segments - 1 large steps instead of layers x segments small ones. The results are the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from operator import itemgetter
from types import MethodType
from typing import NamedTuple, Protocol, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from remanence.layers import matmul_dtype
from remanence.mixers.base import MemoryTrace
from remanence.mixers.stacked import STACKABLE_MODULES, StackedParameters
from remanence.ops.state import Weights
from remanence.runtime.module import altered, described, modules_of, ours, overridden
from remanence.runtime.state import TensorTuple, where

MIN_SEGMENTS = 2
"""The least number of segments for which the schedule is used; it gains nothing with fewer."""

T = TypeVar("T")


class SegmentMixer(Protocol):
    """The methods of a mixer that the schedule calls. `MAC` has them."""

    @property
    def segment_length(self) -> int | None:
        """Number of tokens in a segment; None if the schedule cannot be used."""

    def carry(self, state: TensorTuple, /) -> TensorTuple:
        """The part of a state at a segment's start that reading further segments needs."""

    def read_segment(
        self, x: Tensor, carry: TensorTuple, /
    ) -> tuple[Tensor, TensorTuple, MemoryTrace | None]:
        """The output for one whole segment, the carry after it, and the trace of the memory."""

    def segment_start(self, carry: TensorTuple, /) -> Weights:
        """The part of the carry that the state keeps from the start of a segment."""

    def after_segments(
        self, carry: TensorTuple, start: Weights, previous: TensorTuple, tokens: int, /
    ) -> TensorTuple:
        """The state after whole segments with `tokens` tokens in total."""


def segment_mixers(blocks: Sequence[nn.Module]) -> list[SegmentMixer]:
    """The mixers of blocks, as the schedule uses them."""
    return [block.mixer for block in blocks]  # type: ignore[misc]


def unsupported_reason(blocks: Sequence[nn.Module]) -> str | None:
    """Why these blocks cannot use the wavefront schedule; None if they can.

    The schedule calls the first block for all layers, with their stacked weights. So a module that computes something
    else in one layer, because of a hook, a subclass or a setting, rules it out.
    """
    mixers: list[nn.Module] = [block.mixer for block in blocks]  # type: ignore[misc]
    if len(mixers) < 2 or len({type(mixer) for mixer in mixers}) > 1:
        return "the wavefront schedule needs at least two layers, all of one kind"
    lengths = {mixer.segment_length for mixer in segment_mixers(blocks)}
    if None in lengths:
        return "the layers do not read whole segments of whole chunks, or memories are being observed"
    if len(lengths) > 1:
        return "the layers' segments differ in length"
    if (name := overridden(mixers[0], "read_segment")) is not None:
        return f"{type(mixers[0]).__name__} overrides {name} and not read_segment"
    known = set[nn.Module]().union(*(described(mixer, "read_segment") for mixer in mixers))
    inside = [modules_of(block) for block in blocks]
    modules = [module for each in inside for module in each]
    for module in modules:
        if not (ours(module) or module in known) or (
            module._parameters and not isinstance(module, STACKABLE_MODULES)
        ):
            name = type(module).__name__
            return f"a module ({name}) is not part of this package, and may not support stacked weights"
    if (reason := altered(modules)) is not None:
        return f"{reason}, and belongs to one layer"
    first, *others = inside
    if any(list(map(type, each)) != list(map(type, first)) for each in others):
        return "the layers' modules differ"
    if any(not _same_settings(*pair) for each in others for pair in zip(first, each, strict=True)):
        return "the layers' settings differ"
    return None


def _same_settings(a: nn.Module, b: nn.Module) -> bool:
    """Whether two modules of one class have the same attributes, apart from parameters and submodules."""
    one, other = a.__dict__, b.__dict__
    return len(one) == len(other) and all(
        name.startswith("_") or (name in other and (value is other[name] or _equal(value, other[name])))
        for name, value in one.items()
    )


def _equal(a: object, b: object) -> bool:
    if isinstance(a, MethodType):  # FSDP's, as `altered` says
        return isinstance(b, MethodType) and a.__name__ == b.__name__
    return type(a) is type(b) and not isinstance(a, Tensor) and bool(a == b)


class WavefrontOutput(NamedTuple):
    """The result of a call: the last layer's output, and each layer's state, memory trace and input."""

    x: Tensor
    states: tuple[TensorTuple, ...]
    traces: Sequence[MemoryTrace | None]
    layers: Sequence[Tensor]


class PackedRows(NamedTuple):
    """Packed documents arranged in rows of whole segments: several documents per row, each at a segment's start.

    token_index
        The index of each row's tokens in the call ``[rows t]``; -1: padding.
    row_index
        The index of each token of the call in the flattened rows ``[tokens]``.
    begins
        Whether each segment begins a document ``[rows segments]``.
    """

    token_index: Tensor
    row_index: Tensor
    begins: Tensor


TARGET_ROWS = 8
"""The approximate number of rows that packed documents are arranged in; fewer if a long document makes rows long."""


def pack_rows(borders: list[int], size: int) -> PackedRows:
    """Arrange documents with these offsets in rows of segments of `size` tokens: first fit, longest documents first."""
    counts = [b - a for a, b in itertools.pairwise(borders)]
    needed = [-(-count // size) for count in counts]
    capacity = max(1, *needed, -(-sum(needed) // TARGET_ROWS))
    rows: list[list[int]] = []
    free: list[int] = []
    for document in sorted(range(len(counts)), key=lambda each: -needed[each]):
        row = next((row for row, segments in enumerate(free) if segments >= needed[document]), None)
        if row is None:
            row = len(rows)
            rows.append([])
            free.append(capacity)
        rows[row].append(document)
        free[row] -= needed[document]
    token_index = torch.full((len(rows), capacity * size), -1)
    row_index = torch.empty(borders[-1], dtype=torch.int64)
    begins = torch.zeros(len(rows), capacity, dtype=torch.bool)
    for row, documents in enumerate(rows):
        at = 0
        for document in documents:
            first, count = borders[document], counts[document]
            token_index[row, at * size : at * size + count] = torch.arange(first, first + count)
            row_index[first : first + count] = torch.arange(count) + (row * capacity + at) * size
            begins[row, at : at + 1] = count > 0
            at += needed[document]
    return PackedRows(token_index, row_index, begins)


class _Step(NamedTuple):
    """One time of the schedule: its first layer, the inputs of its layers, and their traces, row after row."""

    first: int
    x: Tensor
    trace: MemoryTrace | None


def read(
    blocks: Sequence[nn.Module],
    x: Tensor,
    states: Sequence[TensorTuple],
    *,
    begins: Tensor | None = None,
    checkpointing: bool = False,
) -> WavefrontOutput:
    """Whole segments ``[b t d]`` through all blocks, in memory mode "on", from the start of a segment and of a chunk.

    Where `begins` ``[b segments]`` is true, a row restarts from its initial state.
    """
    mixers = segment_mixers(blocks)
    segments = x.split(mixers[0].segment_length or 1, 1)
    rows, depth, count = x.shape[0], len(blocks), len(segments)
    stack, reader = StackedParameters(blocks), _SegmentReader(blocks[0])
    steps: list[_Step] = []
    out: list[Tensor] = []
    ends: list[TensorTuple] = []
    y: Tensor | None = None
    carry: TensorTuple | None = None
    for time in range(depth + count - 1):
        first, last = max(0, time - count + 1), min(depth - 1, time)
        inputs = [segments[time]] if time < count else []
        if y is not None:  # the output of each layer is the input of the next
            inputs.append(y)
        if carry is not None and time >= count:  # the first of these layers has read all segments
            carry = carry.rows(slice(rows, None))
        if time < depth:
            initial = mixers[time].carry(states[time])
            carry = initial if carry is None else type(initial).concat([carry, initial])
        assert carry is not None
        if begins is not None:
            restarts = begins[:, time - last : time - first + 1].mT.flip(0).flatten()
            starts = [mixers[index].carry(states[index]) for index in range(first, last + 1)]
            carry = where(restarts, type(carry).concat(starts), carry)
        before, step = mixers[first].segment_start(carry), torch.cat(inputs) if len(inputs) > 1 else inputs[0]
        arguments = (reader, stack.take(first, last + 1), step, carry)
        y, carry, trace = (
            checkpoint(_step, *arguments, use_reentrant=False) if checkpointing else _step(*arguments)
        )
        steps.append(_Step(first, step, trace))
        if last == depth - 1:
            y, output = y.split([len(y) - rows, rows])
            out.append(output)
        if time >= count - 1:
            weights = tuple(weight[:rows] for weight in before)
            ends.append(
                _final_state(carry.rows(slice(0, rows)), weights, states[first], x.shape[1], mixers[first])
            )

    def steps_of(layer: int) -> list[tuple[_Step, slice]]:
        """The steps that a layer takes part in, and its rows in each."""
        found = [(step, (layer - step.first) * rows) for step in steps[layer : layer + count]]
        return [(step, slice(place, place + rows)) for step, place in found]

    def layer_trace(layer: int) -> MemoryTrace | None:
        return MemoryTrace.join(
            [MemoryTrace.map_tensors(step.trace, itemgetter(index)) for step, index in steps_of(layer)]
        )

    return WavefrontOutput(
        torch.cat(out, 1),
        tuple(ends),
        LazySequence(depth, layer_trace),
        LazySequence(depth, lambda layer: torch.cat([step.x[index] for step, index in steps_of(layer)], 1)),
    )


def _step(
    reader: nn.Module, weights: dict[str, Tensor], x: Tensor, carry: TensorTuple
) -> tuple[Tensor, TensorTuple, MemoryTrace | None]:
    return functional_call(reader, weights, (x, carry))


class _SegmentReader(nn.Module):
    """A block that reads one whole segment."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, carry: TensorTuple) -> tuple[Tensor, TensorTuple, MemoryTrace | None]:
        block = self.block
        y, carry, trace = block.mixer.read_segment(block.norm_mixer(x, matmul_dtype(x)), carry)  # type: ignore[operator,union-attr]
        return block.residual_ffn(x, y), carry, trace  # type: ignore[operator]


def _final_state(
    carry: TensorTuple, weights: Weights, previous: TensorTuple, tokens: int, mixer: SegmentMixer
) -> TensorTuple:
    """The state of a layer after its last segment."""
    if not torch.is_grad_enabled():
        # A view would keep the states of all layers alive.
        carry, weights = carry.clone(), tuple(weight.clone() for weight in weights)
    return mixer.after_segments(carry, weights, previous, tokens)


class LazySequence(Sequence[T]):
    """A sequence whose items are computed each time that they are asked for, as most callers never ask."""

    def __init__(self, count: int, make: Callable[[int], T]) -> None:
        self.size, self.make = count, make

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...

    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        chosen = range(self.size)[index]
        return self.make(chosen) if isinstance(chosen, int) else [self.make(each) for each in chosen]
