"""Stacks the parameters of identical layers along a new first axis, for the wavefront schedule. Their
gradients are summed in place.
"""

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
"""Modules whose parameters are operands of matrix products, which autocast casts to its dtype."""

STACKABLE_MODULES = (*AUTOCAST_MODULES, RMSNorm, ShortConv, GateProjection)
"""Modules that work if their parameters have an additional first axis for layers."""


class StackedParameters:
    """The parameters of identical blocks, stacked along a new first axis. They are copied, and cast to the
    dtype of autocast, once per call.

    Backward computes the gradients of a few layers at a time, and `GradientSums` adds them in place.
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
        """Stack parameters, and cast them. `flat` contains the first parameter of all layers, then the second
        parameter of all layers, and so on. Returns one tensor ``[n ...]`` for each parameter name.
        """
        groups = [flat[first : first + self.depth] for first in range(0, len(flat), self.depth)]
        return tuple(
            torch.stack(list(group)).to(dtype) for group, dtype in zip(groups, self.dtypes, strict=True)
        )

    def take(self, first: int, last: int) -> dict[str, Tensor]:
        """The parameters of layers `first` to `last` - 1, by their names in a block."""
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
        return dict(zip(self.names, taken, strict=True))


class GradientSums:
    """The sums of the gradients of stacked parameters, in the dtype of the parameters, while backward runs.

    The autograd functions refer to this object instead of `StackedParameters`. A reference to
    `StackedParameters` would be a cycle through the autograd graph, which the garbage collector cannot find.
    """

    def __init__(self, stacked: Sequence[Tensor], dtypes: Sequence[torch.dtype], mesh: int) -> None:
        self.shapes, self.dtypes, self.mesh = [each.shape for each in stacked], dtypes, mesh
        self.device = stacked[0].device
        self.totals: list[Tensor] | None = None

    def slot(self, index: int, first: int, last: int) -> Tensor:
        """The gradient sum of parameter `index` for layers `first` to `last` - 1, as a view that can be added
        to.
        """
        if self.totals is None:
            self.totals = [
                torch.zeros(shape, dtype=dtype, device=self.device)
                for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
            ]
        return self.totals[index][first:last]

    def add(self, first: int, last: int, grads: Sequence[Tensor | None]) -> None:
        """Add the gradients of all parameters of layers `first` to `last` - 1. None: no gradient."""
        for index, grad in enumerate(grads):
            if grad is not None:
                total = self.slot(index, first, last)
                total += grad

    def pop_all(self) -> list[Tensor | None]:
        """Return the gradients of the parameters of all layers, in the order of `flat` in
        `StackedParameters.stack`, and reset the sums. The gradients are None if none were added.
        """
        totals, self.totals = self.totals, None
        if totals is None:
            return [None] * sum(shape[0] for shape in self.shapes)
        # Gathered parameters get the sum of the gradients of all processes. FSDP takes the mean, so divide here.
        return [
            grad for total in totals for grad in (total if self.mesh == 1 else total / self.mesh).unbind(0)
        ]


def _full_tensor(parameter: Tensor) -> Tensor:
    """Return a parameter as a whole tensor. If it is sharded over processes, it is gathered, and backward
    distributes its gradient to the shards.
    """
    if not hasattr(parameter, "full_tensor"):
        return parameter
    from torch.distributed.tensor import Partial

    return parameter.full_tensor(grad_placements=[Partial()])


class _SumsCtx(FunctionCtx):
    """The context of the autograd functions below."""

    sums: GradientSums
    layers: tuple[int, int]


class _StackFunction(torch.autograd.Function):
    """Returns the stacked parameters. Its backward runs after the backward of every `_SliceFunction`, and
    returns the gradient sums.
    """

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
    """Returns the stacked parameters of some layers. Its backward adds their gradients to the sums."""

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
