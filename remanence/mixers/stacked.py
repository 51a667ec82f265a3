"""The parameters of identical layers, stacked along a new first axis, with gradients that are summed in place."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from remanence.layers import Features, GateProjection, Linear, RMSNorm, ShortConv
from remanence.layers.attention import Persistent
from remanence.layers.linear import StackedWeight
from remanence.memory.components import InitialMemory
from remanence.runtime.state import needs_grad

AUTOCAST_MODULES = (Linear, Features, InitialMemory, Persistent)
"""Modules whose parameters autocast casts to its dtype, as operands of matrix products."""

STACKABLE_MODULES = (*AUTOCAST_MODULES, RMSNorm, ShortConv, GateProjection)
"""Modules whose parameters may have a further first axis for layers."""


class StackedParameters:
    """The parameters of identical blocks, by name, stacked along a new first axis: copied, and cast as autocast would,
    once per call.

    Backward computes their gradients for a few layers at a time; `GradientSums` adds them up in place.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        first = blocks[0]
        device = next(first.parameters()).device.type
        narrow = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        found = [dict(block.named_parameters()) for block in blocks]
        kinds = {f"{path}.{name}": isinstance(module, AUTOCAST_MODULES) for path, module in first.named_modules()
                 for name, _ in module.named_parameters(recurse=False)}  # fmt: skip
        self.names = list(found[0])
        projections = {path for path, module in first.named_modules() if isinstance(module, Linear)}
        self.is_projection = [name.rpartition(".")[0] in projections for name in self.names]
        self.groups = [[each[name] for each in found] for name in self.names]
        self.dtypes = [narrow if narrow is not None and kinds[name] else group[0].dtype
                       for name, group in zip(self.names, self.groups, strict=True)]  # fmt: skip
        self.depth = len(blocks)
        self.needs_grad = needs_grad(itertools.chain(*self.groups))
        flat = [_full_tensor(parameter) for group in self.groups for parameter in group]
        mesh = getattr(self.groups[0][0], "device_mesh", None)
        stacked = self.stack(flat)
        dtypes = [group[0].dtype for group in self.groups]
        self.sums = GradientSums(stacked, dtypes, 1 if mesh is None else mesh.size())
        self.stacked = _StackFunction.apply(self.sums, stacked, *flat) if self.needs_grad else stacked

    @torch.no_grad()
    def stack(self, flat: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The stacked parameters, from those of all layers: name after name, and layer after layer of each."""
        groups = [flat[first : first + self.depth] for first in range(0, len(flat), self.depth)]
        return tuple(
            torch.stack(list(group)).to(dtype) for group, dtype in zip(groups, self.dtypes, strict=True)
        )

    def take(self, first: int, last: int) -> dict[str, Tensor]:
        """The parameters of layers `first` to `last` - 1, by their names in `_SegmentReader`."""
        taken = (
            _SliceFunction.apply(self.sums, first, last, *self.stacked)
            if self.needs_grad
            else [each[first:last] for each in self.stacked]
        )
        if self.needs_grad:
            taken = [
                StackedWeight.of(each, partial(self.sums.slot, index, first, last)) if is_projection else each
                for index, (each, is_projection) in enumerate(zip(taken, self.is_projection, strict=True))
            ]
        return {f"block.{name}": each for name, each in zip(self.names, taken, strict=True)}


class GradientSums:
    """Sums of the gradients of stacked parameters, in the dtype of the parameters, until backward is complete.

    The functions of backward refer to this object and not to `StackedParameters`: that would be a reference cycle
    through autograd's graph, which the garbage collector cannot find.
    """

    def __init__(self, stacked: Sequence[Tensor], dtypes: Sequence[torch.dtype], mesh: int) -> None:
        self.shapes, self.dtypes, self.mesh = [each.shape for each in stacked], dtypes, mesh
        self.device = stacked[0].device
        self.totals: list[Tensor] | None = None

    def slot(self, index: int, first: int, last: int) -> Tensor:
        """The sum for parameter `index` of layers `first` to `last` - 1, a view to add gradients to."""
        if self.totals is None:
            self.totals = [
                torch.zeros(shape, dtype=dtype, device=self.device)
                for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
            ]
        return self.totals[index][first:last]

    def add(self, first: int, last: int, grads: Sequence[Tensor | None]) -> None:
        """Add gradients of all parameters of layers `first` to `last` - 1."""
        for index, grad in enumerate(grads):
            if grad is not None:
                total = self.slot(index, first, last)
                total += grad

    def pop_all(self) -> list[Tensor | None]:
        """The gradients of all layers' parameters, in the order of `StackedParameters.stack`; the sums are reset."""
        totals, self.totals = self.totals, None
        if totals is None:
            return [None] * sum(shape[0] for shape in self.shapes)
        # FSDP averages the gradients of sharded parameters over processes; here they are summed.
        return [
            grad for total in totals for grad in (total if self.mesh == 1 else total / self.mesh).unbind(0)
        ]


def _full_tensor(parameter: Tensor) -> Tensor:
    """A parameter, gathered if it is sharded over processes; backward distributes its gradient again."""
    if not hasattr(parameter, "full_tensor"):
        return parameter
    from torch.distributed.tensor import Partial

    return parameter.full_tensor(grad_placements=[Partial()])


class _SumsCtx(FunctionCtx):
    sums: GradientSums
    layers: tuple[int, int]


class _StackFunction(torch.autograd.Function):
    """Returns the stacked parameters. Its backward runs after that of every `_SliceFunction` and returns the sums."""

    @staticmethod
    def forward(
        ctx: _SumsCtx, sums: GradientSums, stacked: tuple[Tensor, ...], *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.sums = sums
        ctx.set_materialize_grads(False)
        return stacked

    @staticmethod
    def backward(ctx: _SumsCtx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.sums.pop_all()


class _SliceFunction(torch.autograd.Function):
    """Returns the parameters of some layers. Its backward adds their gradients to the sums."""

    @staticmethod
    def forward(
        ctx: _SumsCtx, sums: GradientSums, first: int, last: int, *stacked: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.sums, ctx.layers = sums, (first, last)
        ctx.set_materialize_grads(False)
        return tuple(each[first:last] for each in stacked)

    @staticmethod
    def backward(ctx: _SumsCtx, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.sums.add(*ctx.layers, grads)
        return None, None, None, *[None] * len(grads)
