"""A second schedule for layers that read segment after segment: a wavefront over layers and segments, with the same
results.

Segment s of layer l needs segment s of layer l - 1 and what segment s - 1 left in layer l. So all pairs with the same l
+ s can be computed together, as one layer whose weights have one axis more (`remanence.layers`) and whose rows are
those of the layers under way, one behind the other::

    layer     0  1  2  3
    time 0    0                 the segment that each layer reads
         1    1  0
         2    2  1  0
         3    3  2  1  0
         4    4  3  2  1
         5       4  3  2
         6          4  3
         7             4

Of layers times segments small steps there remain layers plus segments large ones (diagonal batching: Sivtsov et al.,
2025).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, NamedTuple, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from remanence.layers import matmul_dtype
from remanence.mixers.base import MemoryTrace
from remanence.mixers.stacked import STACKABLE_MODULES, StackedParameters
from remanence.runtime.module import altered, described, modules_of, ours, overridden
from remanence.runtime.state import where

MIN_SEGMENTS = 2
"""Segments below which layer after layer is as good."""

T = TypeVar("T")


def unsupported(blocks: Sequence[nn.Module]) -> str | None:
    """Why these blocks cannot read in a wavefront, in words; None if they can.

    The first block then computes for all of them, with their weights, by `Mixer.read_segment`: a module that would be
    called in its own way, by a hook, a subclass or another setting, must be called in its own layer.
    """
    mixers: list[Any] = [block.mixer for block in blocks]
    if len(mixers) < 2 or len({type(mixer) for mixer in mixers}) > 1:
        return "at least two layers, all of one kind, read in a wavefront"
    lengths = {mixer.segment_length for mixer in mixers}
    if None in lengths:
        return "the layers do not read segment after segment in whole chunks, or memories are being observed"
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
            return f"a module ({name}) is not one of ours, and may not know what to do with several layers' weights"
    if (reason := altered(modules)) is not None:
        return f"{reason}, and belongs to one layer"
    first, *others = inside
    if any(list(map(type, each)) != list(map(type, first)) for each in others):
        return "the layers' modules differ"
    if any(not _same_settings(*pair) for each in others for pair in zip(first, each, strict=True)):
        return "the layers' settings differ"
    return None


def _same_settings(a: nn.Module, b: nn.Module) -> bool:
    """Whether two modules of one class have the same attributes, apart from parameters and parts."""
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
    """What came of a call: the last layer's output, each layer's state, what was seen of its memory, and its input."""

    x: Tensor
    states: tuple[Any, ...]
    traces: Sequence[MemoryTrace | None]
    layers: Sequence[Tensor]


class PackedRows(NamedTuple):
    """Packed documents in rows of whole segments, several in a row, each from a segment's start on: where each row's
    token stands in the call ``[rows t]``, -1 for none; where each of the call's tokens stands in the rows, laid flat;
    and which segments of each row begin a document ``[rows segments]``.
    """

    there: Tensor
    back: Tensor
    begins: Tensor


TARGET_ROWS = 8
"""Rows that packed documents are laid into, about, unless one of them is longer than all of them would then be."""


def pack_rows(borders: list[int], size: int) -> PackedRows:
    """The longest first, each into the first row that has room."""
    counts = [b - a for a, b in itertools.pairwise(borders)]
    needed = [-(-count // size) for count in counts]
    room = max(1, *needed, -(-sum(needed) // TARGET_ROWS))
    rows: list[list[int]] = []
    left: list[int] = []
    for document in sorted(range(len(counts)), key=lambda each: -needed[each]):
        row = next((row for row, free in enumerate(left) if free >= needed[document]), None)
        if row is None:
            row = len(rows)
            rows.append([])
            left.append(room)
        rows[row].append(document)
        left[row] -= needed[document]
    there = torch.full((len(rows), room * size), -1)
    back, begins = torch.empty(borders[-1], dtype=torch.int64), torch.zeros(len(rows), room, dtype=torch.bool)
    for row, documents in enumerate(rows):
        at = 0
        for document in documents:
            first, count = borders[document], counts[document]
            there[row, at * size : at * size + count] = torch.arange(first, first + count)
            back[first : first + count] = torch.arange(count) + (row * room + at) * size
            begins[row, at : at + 1] = count > 0
            at += needed[document]
    return PackedRows(there, back, begins)


def read(
    blocks: Sequence[nn.Module],
    x: Tensor,
    states: Sequence[Any],
    *,
    begins: Tensor | None = None,
    checkpointing: bool = False,
) -> WavefrontOutput:
    """Whole segments ``[b t d]`` through all blocks, memory "on", from where a segment begins, and a chunk with it.

    Where `begins` ``[b segments]`` is true, a row restarts from its initial state.
    """
    mixers: list[Any] = [block.mixer for block in blocks]
    segments = x.split(mixers[0].segment_length, 1)
    rows, depth, count = x.shape[0], len(blocks), len(segments)
    stack, reads = StackedParameters(blocks), _SegmentReader(blocks[0])
    steps: list[
        tuple[int, Tensor, MemoryTrace]
    ] = []  # of each time: its first layer, the layers' inputs, what was seen
    out: list[Tensor] = []
    ends: list[Any] = []
    y: Tensor | None = None
    carry: Any = None
    for time in range(depth + count - 1):
        first, last = max(0, time - count + 1), min(depth - 1, time)
        inputs = [segments[time]] if time < count else []
        if y is not None:  # what each layer said is for the next one
            inputs.append(y)
        if carry is not None and time >= count:  # a layer has read all there is
            carry = carry.rows(slice(rows, None))
        if time < depth:
            begun = mixers[time].carry(states[time])
            carry = begun if carry is None else type(begun).concat([carry, begun])
        if begins is not None:
            anew = begins[:, time - last : time - first + 1].mT.flip(0).flatten()
            starts = [mixers[index].carry(states[index]) for index in range(first, last + 1)]
            carry = where(anew, type(carry).concat(starts), carry)
        before, step = mixers[first].segment_start(carry), torch.cat(inputs) if len(inputs) > 1 else inputs[0]
        arguments = (reads, stack.take(first, last + 1), step, carry)
        y, carry, seen = (
            checkpoint(_step, *arguments, use_reentrant=False) if checkpointing else _step(*arguments)
        )
        steps.append((first, step, seen))
        if last == depth - 1:
            y, said = y.split([len(y) - rows, rows])
            out.append(said)
        if time >= count - 1:
            ends.append(
                _final_state(
                    carry.rows(slice(0, rows)),
                    [weight[:rows] for weight in before],
                    states[first],
                    x,
                    mixers[first],
                )
            )

    def layer_rows(layer: int, column: int) -> list[Any]:
        """A layer's rows of every step in which it was under way."""
        found = [(step[column], (layer - step[0]) * rows) for step in steps[layer : layer + count]]
        return [_row_slice(tree, place, rows) for tree, place in found]

    seen_of = lambda layer: MemoryTrace.join(layer_rows(layer, 2))
    return WavefrontOutput(
        torch.cat(out, 1),
        tuple(ends),
        LazySequence(depth, seen_of),
        LazySequence(depth, lambda layer: torch.cat(layer_rows(layer, 1), 1)),
    )


def _step(
    reads: nn.Module, weights: dict[str, Tensor], x: Tensor, carry: Any
) -> tuple[Tensor, Any, MemoryTrace]:
    return functional_call(reads, weights, (x, carry))


class _SegmentReader(nn.Module):
    """A block that reads one whole segment."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, carry: Any) -> tuple[Tensor, Any, MemoryTrace | None]:
        block: Any = self.block
        y, carry, trace = block.mixer.read_segment(block.norm_mixer(x, matmul_dtype(x)), carry)
        return block.residual_ffn(x, y), carry, trace


def _row_slice(tree: Any, first: int, count: int) -> Any:
    if tree is None:
        return None
    if isinstance(tree, Tensor):
        return tree[first : first + count]
    return MemoryTrace(
        _row_slice(tree.surprise, first, count), tree.gates.map(lambda gate: gate[first : first + count])
    )


def _final_state(carry: Any, weights: list[Tensor], begun: Any, x: Tensor, mixer: Any) -> Any:
    """A layer's state after its last segment, which left nothing open."""
    if not torch.is_grad_enabled():
        # A view would keep all layers' states.
        carry, weights = (
            carry.clone(),
            [weight.clone() for weight in weights],
        )
    return mixer.after_segments(carry, tuple(weights), begun, x.shape[1])


class LazySequence(Sequence[T]):
    """Results that most callers never ask for, each made when it is."""

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
