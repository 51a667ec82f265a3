"""The parameters of alike layers stacked along a new first axis, with gradients that are summed in place."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from remanence.layers import Features, GateProjection, Linear, RMSNorm, ShortConv
from remanence.layers.attention import Persistent
from remanence.layers.linear import StackedWeight
from remanence.memory.components import InitialMemory
from remanence.runtime.state import needs_grad

AUTOCAST_MODULES = (Linear, Features, InitialMemory, Persistent)
"""Whose parameters are operands of products, which autocast narrows."""

STACKABLE_MODULES = (*AUTOCAST_MODULES, RMSNorm, ShortConv, GateProjection)
"""Whose parameters may have one axis more."""


class StackedParameters:
    """The parameters of alike blocks, by name, one axis more in front: copied, and cast as autocast would, once for a
    whole call.

    Their gradients come step by step, of some layers at a time, and are added up in place (`GradientSums`).
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
        self.projects = [name.rpartition(".")[0] in projections for name in self.names]
        self.groups = [[each[name] for each in found] for name in self.names]
        self.dtypes = [narrow if narrow is not None and kinds[name] else group[0].dtype
                       for name, group in zip(self.names, self.groups, strict=True)]  # fmt: skip
        self.depth = len(blocks)
        self.needs_grad = needs_grad(itertools.chain(*self.groups))
        flat = [_full_tensor(parameter) for group in self.groups for parameter in group]
        mesh = getattr(self.groups[0][0], "device_mesh", None)
        stacked = self.stack(flat)
        own = [group[0].dtype for group in self.groups]
        self.sums = GradientSums(stacked, own, 1 if mesh is None else mesh.size())
        self.stacked = _StackFunction.apply(self.sums, stacked, *flat) if self.needs_grad else stacked

    @torch.no_grad()
    def stack(self, flat: Sequence[Tensor]) -> tuple[Tensor, ...]:
        groups = [flat[first : first + self.depth] for first in range(0, len(flat), self.depth)]
        return tuple(
            torch.stack(list(group)).to(dtype) for group, dtype in zip(groups, self.dtypes, strict=True)
        )

    def take(self, first: int, last: int) -> dict[str, Tensor]:
        """Those of some layers in a row, by the names that `_SegmentReader` has for them."""
        taken = (
            _SliceFunction.apply(self.sums, first, last, *self.stacked)
            if self.needs_grad
            else [each[first:last] for each in self.stacked]
        )
        if self.needs_grad:
            taken = [
                StackedWeight.of(each, partial(self.sums.at, index, first, last)) if projects else each
                for index, (each, projects) in enumerate(zip(taken, self.projects, strict=True))
            ]
        return {f"block.{name}": each for name, each in zip(self.names, taken, strict=True)}


class GradientSums:
    """Gradients of stacked parameters, added up in place, in the parameters' own dtype, and handed over when the last
    has come.

    What runs in backward knows this and not the stack: a stack whose tensors are made by a function that knows the
    stack is a circle that nobody sees whole, and would stay for ever.
    """

    def __init__(self, stacked: Sequence[Tensor], dtypes: Sequence[torch.dtype], mesh: int) -> None:
        self.shapes, self.dtypes, self.mesh = [each.shape for each in stacked], dtypes, mesh
        self.device = stacked[0].device
        self.totals: list[Tensor] | None = None

    def at(self, index: int, first: int, last: int) -> Tensor:
        """Where the gradients of some layers' parameters are added up."""
        if self.totals is None:
            self.totals = [
                torch.zeros(shape, dtype=dtype, device=self.device)
                for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
            ]
        return self.totals[index][first:last]

    def add(self, first: int, last: int, grads: Sequence[Tensor | None]) -> None:
        for index, grad in enumerate(grads):
            if grad is not None:
                total = self.at(index, first, last)
                total += grad

    def pop_all(self) -> list[Tensor | None]:
        totals, self.totals = self.totals, None
        if totals is None:
            return [None] * sum(shape[0] for shape in self.shapes)
        # Of weights that several processes share the gradient is the mean of theirs, as FSDP has it; these are added
        # up.
        return [
            grad for total in totals for grad in (total if self.mesh == 1 else total / self.mesh).unbind(0)
        ]


def _full_tensor(parameter: Tensor) -> Tensor:
    """A parameter whole, where processes share it; its gradient goes back to those who have it."""
    if not hasattr(parameter, "full_tensor"):
        return parameter
    from torch.distributed.tensor import Partial

    return parameter.full_tensor(grad_placements=[Partial()])


class _StackFunction(torch.autograd.Function):
    """Runs last in backward, since every `_SliceFunction` depends on it; the gradients are in the sums."""

    @staticmethod
    def forward(
        ctx: Any, sums: GradientSums, stacked: tuple[Tensor, ...], *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.sums = sums
        ctx.set_materialize_grads(False)
        return stacked

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, None, *ctx.sums.pop_all()


class _SliceFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: GradientSums, first: int, last: int, *stacked: Tensor) -> tuple[Tensor, ...]:
        ctx.sums, ctx.range = sums, (first, last)
        ctx.set_materialize_grads(False)
        return tuple(each[first:last] for each in stacked)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.sums.add(*ctx.range, grads)
        return None, None, None, *[None] * len(grads)
