"""Projections: of one layer, or of several layers at once, whose gradients are added up inside the products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from remanence.runtime.module import plain


def operand(x: Tensor) -> torch.dtype:
    """x's dtype as autocast's products take it: what is cast once for all of them is not cast by autocast for each, and
    back.
    """
    device = x.device.type
    return (
        torch.get_autocast_dtype(device)
        if x.dtype == torch.float32 and torch.is_autocast_enabled(device)
        else x.dtype
    )


class StackedWeight(Tensor):
    """Several layers' weights ``[n outputs inputs]`` whose gradients are added to the tensor that `gradient_sum` gives;
    autograd gets none. Whatever is computed from it is a plain tensor.
    """

    gradient_sum: Callable[[], Tensor]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, weight: Tensor, gradient_sum: Callable[[], Tensor]) -> StackedWeight:
        made = weight.as_subclass(cls)
        made.gradient_sum = gradient_sum
        return made


class Linear(nn.Linear):
    """A projection without a bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Float[Tensor, "b t inputs"]) -> Float[Tensor, "b t outputs"]:
        if self.weight.dim() == 2:
            return F.linear(x, self.weight)
        if isinstance(self.weight, StackedWeight) and torch.is_grad_enabled():
            return _projected(x, self)[0]
        stacked = x.reshape(len(self.weight), -1, x.shape[-1])
        return torch.bmm(stacked, self.weight.mT).view(*x.shape[:-1], self.out_features)


def project(x: Float[Tensor, "b t d"], *projections: Linear) -> tuple[Tensor, ...]:
    """Several projections of the same x. On a GPU their gradients are added up inside the products, not by other
    kernels.
    """
    if len(projections) < 2 or not x.is_cuda or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return tuple(projection(x) for projection in projections)
    if not all(plain(projection, Linear) for projection in projections):
        return tuple(projection(x) for projection in projections)
    return _projected(x, *projections)


def _projected(x: Tensor, *projections: Linear) -> tuple[Tensor, ...]:
    dtype = operand(x)
    weights = [projection.weight for projection in projections]
    sums = tuple(weight.gradient_sum if isinstance(weight, StackedWeight) else None for weight in weights)
    return _Projected.apply(x.to(dtype), sums, *[weight.to(dtype) for weight in weights])


class _Projected(torch.autograd.Function):
    """The gradients of a `StackedWeight` are added to its sum, and autograd gets none. On a GPU that is part of the
    product, so that each step's gradient is neither rounded nor written and read again.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sums: tuple[Callable[[], Tensor] | None, ...], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.sums = sums
        ctx.set_materialize_grads(False)
        stacked = _stacked(x, weights[0])
        with torch.autocast(x.device.type, enabled=False):
            if weights[0].dim() == 2:
                return tuple(F.linear(x, weight) for weight in weights)
            return tuple(
                torch.bmm(stacked, weight.mT).view(*x.shape[:-1], weight.shape[-2]) for weight in weights
            )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        x, *weights = ctx.saved_tensors
        inputs, total = _stacked(x, weights[0]), None
        found: list[Tensor | None] = []
        wanted, _, *wants = ctx.needs_input_grad
        for weight, grad, wants_this, gradient_sum in zip(weights, grads, wants, ctx.sums, strict=True):
            found.append(None)
            if grad is None:
                continue
            g = _stacked(grad, weight)
            if wants_this and gradient_sum is None:
                found[-1] = g.mT @ inputs
            elif wants_this:
                _add_products(gradient_sum(), g.mT, inputs)
            if not wanted:
                continue
            if total is None:
                total = g @ weight
            elif weight.dim() == 2:
                total.addmm_(g, weight)
            else:
                total.baddbmm_(g, weight)
        return None if total is None else total.view_as(x), None, *found


def _add_products(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, ``[n i o]`` each; on a GPU without a rounding in between, as the product itself adds in
    float32.
    """
    if total.dtype == a.dtype:
        total.baddbmm_(a, b)
    elif a.is_cuda and total.dtype == torch.float32:
        torch.ops.aten.baddbmm.dtype_out(total, a, b, torch.float32, out=total)
    else:
        total += a @ b


def _stacked(x: Tensor, weight: Tensor) -> Tensor:
    """Tokens ``[b*t d]`` for a plain weight, ``[n b*t d]`` for several layers'."""
    return x.reshape(*weight.shape[:-2], -1, x.shape[-1])


def shared(weight: Tensor, plain: int, x: Tensor) -> Tensor:
    """A weight of `plain` axes as it is, or several layers' so shaped that each meets its own share of x's rows, once
    x's first axis is split into shares.
    """
    return (
        weight
        if weight.dim() == plain
        else weight.view(len(weight), *[1] * (x.dim() - plain), *weight.shape[1:])
    )
