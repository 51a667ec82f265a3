"""The wavefront schedule (diagonal batching: Sivtsov et al., 2025) for layers that read one segment after the other.

Segment s of layer l needs the output of layer l - 1 for segment s, and the state of layer l after segment s -
1. Therefore all pairs (l, s) with the same l + s can be computed together, as one layer with stacked weights
(`remanence.mixers.stacked`) and with the rows of all these layers in one batch::

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
from torch.utils.checkpoint import checkpoint

from remanence.layers import matmul_dtype
from remanence.mixers.base import MemoryTrace
from remanence.mixers.stacked import STACKABLE_MODULES, StackedParameters
from remanence.ops.state import Weights
from remanence.runtime.module import (
    alteration_reason,
    is_package_module,
    modules_covered_by,
    modules_of,
    overridden_method,
)
from remanence.runtime.state import TensorTuple, where

MIN_SEGMENTS = 2
"""The minimum number of segments for which the schedule is used. With fewer segments it is not faster."""

T = TypeVar("T")


class SegmentMixer(Protocol):
    """The methods of a mixer that the wavefront schedule calls. `MAC` implements them."""

    @property
    def segment_length(self) -> int | None:
        """Number of tokens in a segment; None if the schedule cannot be used."""

    def carry(self, state: TensorTuple, /) -> TensorTuple:
        """The part of a state at the start of a segment that is needed to read further whole segments (the
        carry).
        """

    def read_segment(
        self, x: Tensor, carry: TensorTuple, /
    ) -> tuple[Tensor, TensorTuple, MemoryTrace | None]:
        """Read one whole segment x. Returns the output, the carry after the segment, and the trace of the
        memory.
        """

    def segment_start(self, carry: TensorTuple, /) -> Weights:
        """The weights in a carry at the start of a segment, which the state keeps while the segment is read."""

    def after_segments(
        self, carry: TensorTuple, start: Weights, previous: TensorTuple, tokens: int, /
    ) -> TensorTuple:
        """The state after whole segments with `tokens` tokens in total. `start` is the result of
        `segment_start` for the last segment, `previous` the state before the first segment.
        """


def segment_mixers(blocks: Sequence[nn.Module]) -> list[SegmentMixer]:
    """The mixers of blocks, with the type that the schedule needs. Whether they have it is not checked."""
    return [block.mixer for block in blocks]  # type: ignore[misc]


def unsupported_reason(blocks: Sequence[nn.Module]) -> str | None:
    """Why these blocks cannot use the wavefront schedule; None if they can.

    The schedule calls the first block for all layers, with their stacked weights. It therefore cannot be used
    if a module of some layer computes something else, because of a hook, a subclass or a setting.
    """
    mixers: list[nn.Module] = [block.mixer for block in blocks]  # type: ignore[misc]
    if len(mixers) < 2 or len({type(mixer) for mixer in mixers}) > 1:
        return "the wavefront schedule needs at least two layers, all of one kind"
    lengths = {mixer.segment_length for mixer in segment_mixers(blocks)}
    if None in lengths:
        return "the layers do not read whole segments of whole chunks, or a recording of the memories is under way"
    if len(lengths) > 1:
        return "the layers' segments differ in length"
    if (name := overridden_method(mixers[0], "read_segment")) is not None:
        return f"{type(mixers[0]).__name__} overrides {name} and not read_segment"
    known = set[nn.Module]().union(*(modules_covered_by(mixer, "read_segment") for mixer in mixers))
    inside = [modules_of(block) for block in blocks]
    modules = [module for each in inside for module in each]
    for module in modules:
        if not (is_package_module(module) or module in known) or (
            module._parameters and not isinstance(module, STACKABLE_MODULES)
        ):
            name = type(module).__name__
            return f"a module ({name}) is not part of this package, and may not support stacked weights"
    if (reason := alteration_reason(modules)) is not None:
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
        name.startswith("_") or (name in other and (value is other[name] or _same_value(value, other[name])))
        for name, value in one.items()
    )


def _same_value(a: object, b: object) -> bool:
    """Whether two attributes have the same type and value. Tensors are never equal."""
    if isinstance(a, MethodType):  # FSDP sets such attributes; see `alteration_reason`
        return isinstance(b, MethodType) and a.__name__ == b.__name__
    return type(a) is type(b) and not isinstance(a, Tensor) and bool(a == b)


class WavefrontOutput(NamedTuple):
    """The result of `read`."""

    x: Tensor
    """The output of the last layer ``[b t d]``."""
    states: tuple[TensorTuple, ...]
    """The state of each layer after the call."""
    traces: Sequence[MemoryTrace | None]
    """The memory trace of each layer."""
    layers: Sequence[Tensor]
    """The input of each layer ``[b t d]``."""


class PackedRows(NamedTuple):
    """Packed documents arranged in rows of whole segments. A row may contain several documents; each begins
    at the start of a segment.

    token_index
        The index in the call of the token at each place of each row ``[rows t]``; -1: padding.
    row_index
        The index in the flattened rows of each token of the call ``[tokens]``.
    begins
        Whether a document begins at each segment ``[rows segments]``.
    """

    token_index: Tensor
    row_index: Tensor
    begins: Tensor


TARGET_ROWS = 8
"""The approximate number of rows in which packed documents are arranged. There are fewer if one long document
makes all rows long.
"""


def pack_rows(borders: list[int], size: int) -> PackedRows:
    """Arrange packed documents in rows of segments of `size` tokens. `borders` are the offsets of the
    documents. Each document is put into the first row with enough space, the longest document first.
    """
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
    """One time step of the schedule: the index of the first layer that it computes, and the inputs and traces
    of all its layers, concatenated along the rows.
    """

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
    """Read whole segments x ``[b t d]`` with all blocks, in memory mode "on". x must begin at the start of a
    segment and of a chunk. `states` are the states of the blocks before the call.

    Where `begins` ``[b segments]`` is true, a row is reset to its state in `states` before the segment; None:
    nowhere. `checkpointing`: whether backward recomputes the activations of each step.
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
        if carry is not None and time >= count:  # the first layer of the carry has read all segments
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
        """The time steps that compute a layer, each with the slice of the rows that belong to the layer."""
        found = [(step, (layer - step.first) * rows) for step in steps[layer : layer + count]]
        return [(step, slice(place, place + rows)) for step, place in found]

    def layer_trace(layer: int) -> MemoryTrace | None:
        """The trace of one layer for all segments; None if it has none."""
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
    reader: _SegmentReader, weights: dict[str, Tensor], x: Tensor, carry: TensorTuple
) -> tuple[Tensor, TensorTuple, MemoryTrace | None]:
    """Read one whole segment with the given parameters. Returns the output, the carry and the trace."""
    reader.set_parameters(weights)
    return reader.read(x, carry)


class _SegmentReader:
    """Reads one whole segment with a block: mixer, feed-forward network and residual connections. The parameters are
    set before each step.

    The block is copied without its parameters, because the model may be used in other threads at the same time.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block = _copy_modules(block, {})
        self.parameters = {
            f"{path}.{name}" if path else name: (module._parameters, name)
            for path, module in self.block.named_modules()
            for name in module._parameters
        }

    def set_parameters(self, weights: dict[str, Tensor]) -> None:
        """Use these tensors, by the names of the parameters."""
        for name, weight in weights.items():
            owner, key = self.parameters[name]
            owner[key] = weight

    def read(self, x: Tensor, carry: TensorTuple) -> tuple[Tensor, TensorTuple, MemoryTrace | None]:
        """Returns the output, the carry and the trace."""
        block = self.block
        y, carry, trace = block.mixer.read_segment(block.norm_mixer(x, matmul_dtype(x)), carry)  # type: ignore[operator,union-attr]
        return block.residual_ffn(x, y), carry, trace  # type: ignore[operator]


def _copy_modules(module: nn.Module, copies: dict[int, nn.Module]) -> nn.Module:
    """Copy a module and its submodules, with the same attributes and parameters. `copies` are the modules copied so
    far, by the id of the original.
    """
    if id(module) not in copies:
        copy = copies[id(module)] = object.__new__(type(module))
        copy.__dict__.update(module.__dict__)
        copy.__dict__["_parameters"] = dict(module._parameters)
        copy.__dict__["_modules"] = {
            name: None if child is None else _copy_modules(child, copies)
            for name, child in module._modules.items()
        }
    return copies[id(module)]


def _final_state(
    carry: TensorTuple, weights: Weights, previous: TensorTuple, tokens: int, mixer: SegmentMixer
) -> TensorTuple:
    """The state of a layer after its last segment. `weights` are those of its memory at the start of that
    segment.
    """
    if not torch.is_grad_enabled():
        # Copy, because a view would keep the states of all layers in memory.
        carry, weights = carry.clone(), tuple(weight.clone() for weight in weights)
    return mixer.after_segments(carry, weights, previous, tokens)


class LazySequence(Sequence[T]):
    """A sequence of `count` items that are computed by `make` at each access, because most callers do not use
    them.
    """

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
