"""A second schedule for layers that read segment after segment: a wavefront over layers and segments, with the same results.

Segment s of layer l needs segment s of layer l - 1 and what segment s - 1 left in layer l. So all pairs with the same l + s can
be computed together, as one layer whose weights have one axis more (`remanence.layers`) and whose rows are those of the layers
under way, one behind the other::

    layer     0  1  2  3
    time 0    0                 the segment that each layer reads
         1    1  0
         2    2  1  0
         3    3  2  1  0
         4    4  3  2  1
         5       4  3  2
         6          4  3
         7             4

Of layers times segments small steps there remain layers plus segments large ones (diagonal batching: Sivtsov et al., 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from remanence.attention import Persistent
from remanence.blocks import MAC, MACState, Seen
from remanence.layers import Features, Linear, operand
from remanence.memory.neural import InitialMemory, NeuralMemoryState
from remanence.ops.state import TensorTuple, noted, placed

LEAST = 2
"""Segments below which layer after layer is as good."""

T = TypeVar("T")


def unsupported(blocks: Sequence[nn.Module]) -> str | None:
    """Why these blocks cannot read in a wavefront, in words; None if they can."""
    mixers: list[Any] = [block.mixer for block in blocks]
    if len(mixers) < 2 or not all(isinstance(mixer, MAC) for mixer in mixers):
        return "only MAC layers, at least two and nothing else, are known to read segment after segment"
    if mixers[0].size % mixers[0].memory.layer.config.chunk:
        return "a segment has to be so many chunks"
    if any(mixer.memory.layer.watch is not None for mixer in mixers):
        return "a memory is being watched"
    if any(type(parameter.data) is not Tensor for parameter in blocks[0].parameters()):
        return "the weights are sharded"
    return None


class _Carry(NamedTuple):
    memory: NeuralMemoryState
    asked: Tensor


class Carry(_Carry, TensorTuple):
    """What layers hand from segment to segment: the memory, and the history of the questions' convolution."""

    __slots__ = ()


class Passage(NamedTuple):
    """What came of a call: the last layer's output, each layer's state, what was seen of its memory, and its input."""

    x: Tensor
    states: tuple[MACState, ...]
    seen: Sequence[Seen | None]
    layers: Sequence[Tensor]


def read(blocks: Sequence[nn.Module], x: Tensor, states: Sequence[MACState], *, checkpointing: bool = False) -> Passage:
    """Whole segments ``[b t d]`` through all blocks, memory "on", from where a segment begins, and a chunk with it."""
    mixers: list[Any] = [block.mixer for block in blocks]
    segments = x.split(mixers[0].size, 1)
    rows, depth, count = x.shape[0], len(blocks), len(segments)
    stack, reads = Stack(blocks), _Reads(blocks[0])
    steps: list[tuple[int, Tensor, Seen]] = []  # of each time: its first layer, the layers' inputs, what was seen
    out: list[Tensor] = []
    ends: list[MACState] = []
    y: Tensor | None = None
    carry: Carry | None = None
    for time in range(depth + count - 1):
        first, last = max(0, time - count + 1), min(depth - 1, time)
        inputs = [segments[time]] if time < count else []
        if y is not None:  # what each layer said is for the next one
            inputs.append(y)
        if carry is not None and time >= count:  # a layer has read all there is
            carry = carry.rows(slice(rows, None))
        if time < depth:
            begun = Carry(states[time].memory, states[time].asked)
            carry = begun if carry is None else Carry.concat([carry, begun])
        assert carry is not None
        before, step = carry.memory.memory.weights, torch.cat(inputs) if len(inputs) > 1 else inputs[0]
        arguments = (reads, stack.take(first, last + 1), step, carry)
        y, carry, seen = checkpoint(_step, *arguments, use_reentrant=False) if checkpointing else _step(*arguments)
        steps.append((first, step, seen))
        if last == depth - 1:
            y, said = y.split([len(y) - rows, rows])
            out.append(said)
        if time >= count - 1:
            ends.append(_end(carry.rows(slice(0, rows)), [weight[:rows] for weight in before], states[first], x, mixers[first]))

    def own(layer: int, column: int) -> list[Any]:
        """A layer's rows of every step in which it was under way."""
        found = [(step[column], (layer - step[0]) * rows) for step in steps[layer : layer + count]]
        return [_rows(tree, place, rows) for tree, place in found]

    seen_of = lambda layer: Seen.join(own(layer, 2))
    return Passage(torch.cat(out, 1), tuple(ends), Later(depth, seen_of), Later(depth, lambda layer: torch.cat(own(layer, 1), 1)))


def _step(reads: nn.Module, weights: dict[str, Tensor], x: Tensor, carry: Carry) -> tuple[Tensor, Carry, Seen]:
    return functional_call(reads, weights, (x, carry))


class _Reads(nn.Module):
    """A block that reads one whole segment."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, carry: Carry) -> tuple[Tensor, Carry, Seen | None]:
        block: Any = self.block
        y, memory, asked, seen = block.mixer.whole(block.norm_mixer(x, operand(x)), *carry)
        return block.added(x, y), Carry(memory, asked), seen


def _rows(tree: Any, first: int, count: int) -> Any:
    if isinstance(tree, Tensor):
        return tree[first : first + count]
    return Seen(_rows(tree.surprise, first, count), tree.gates.map(lambda gate: gate[first : first + count]))


def _end(carry: Carry, weights: list[Tensor], begun: MACState, x: Tensor, mixer: MAC) -> MACState:
    """A layer's state after its last segment, which left nothing open."""
    if not torch.is_grad_enabled():
        carry, weights = carry.clone(), [weight.clone() for weight in weights]  # a view would keep all layers' states
    memory, known = carry.memory.memory, noted(begun.memory.memory.position)
    if known is not None:
        memory = memory._replace(position=placed(memory.position, [place + x.shape[1] for place in known]))
    return MACState(NeuralMemoryState(memory, carry.memory.conv), tuple(weights), carry.asked, mixer.attention.start(x.shape[0]))


class Later(Sequence[T]):
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


NARROW = (Linear, Features, InitialMemory, Persistent)
"""Whose parameters are operands of products, which autocast narrows."""


class Stack:
    """The parameters of alike blocks, by name, one axis more in front: copied, and cast as autocast would, once for a whole call.

    Their gradients come step by step, of some layers at a time: they are added up in place, in the parameters' own dtype, and
    handed over when the last has come.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        first = blocks[0]
        device = next(first.parameters()).device.type
        narrow = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        found = [dict(block.named_parameters()) for block in blocks]
        kinds = {f"{path}.{name}": isinstance(module, NARROW) for path, module in first.named_modules()
                 for name, _ in module.named_parameters(recurse=False)}  # fmt: skip
        self.names = list(found[0])
        self.groups = [[each[name] for each in found] for name in self.names]
        self.dtypes = [narrow if narrow is not None and kinds[name] else group[0].dtype
                       for name, group in zip(self.names, self.groups, strict=True)]  # fmt: skip
        self.sums: list[Tensor] | None = None
        self.trains = torch.is_grad_enabled() and any(parameter.requires_grad for group in self.groups for parameter in group)
        flat = [parameter for group in self.groups for parameter in group]
        self.stacked = _Stacked.apply(self, *flat) if self.trains else self.stack()

    def stack(self) -> tuple[Tensor, ...]:
        with torch.no_grad():
            pairs = zip(self.groups, self.dtypes, strict=True)
            return tuple(torch.stack([parameter.detach() for parameter in group]).to(dtype) for group, dtype in pairs)

    def take(self, first: int, last: int) -> dict[str, Tensor]:
        """Those of some layers in a row, by the names that `_Reads` has for them."""
        taken = _Taken.apply(self, first, last, *self.stacked) if self.trains else [each[first:last] for each in self.stacked]
        return {f"block.{name}": each for name, each in zip(self.names, taken, strict=True)}

    def add(self, first: int, last: int, grads: Sequence[Tensor | None]) -> None:
        if self.sums is None:
            self.sums = [torch.zeros(len(group), *group[0].shape, dtype=group[0].dtype, device=group[0].device)
                         for group in self.groups]  # fmt: skip
        for total, grad in zip(self.sums, grads, strict=True):
            if grad is not None:
                total[first:last] += grad

    def hand_over(self) -> list[Tensor | None]:
        sums, self.sums = self.sums, None
        if sums is None:
            return [None] * sum(len(group) for group in self.groups)
        return [grad for total in sums for grad in total.unbind(0)]


class _Stacked(torch.autograd.Function):
    """Runs last in backward, as every `_Taken` is made of it, and gets nothing from them: all is in the stack's sums."""

    @staticmethod
    def forward(ctx: Any, stack: Stack, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.stack = stack
        ctx.set_materialize_grads(False)
        return stack.stack()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, *ctx.stack.hand_over()


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stack: Stack, first: int, last: int, *stacked: Tensor) -> tuple[Tensor, ...]:
        ctx.stack, ctx.range = stack, (first, last)
        ctx.set_materialize_grads(False)
        return tuple(each[first:last] for each in stacked)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.stack.add(*ctx.range, grads)
        return None, None, None, *[None] * len(grads)
