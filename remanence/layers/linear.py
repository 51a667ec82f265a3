"""Linear projections of one layer, or of several stacked layers. For stacked layers, the matmul itself
accumulates the gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from remanence.runtime.module import is_unmodified


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a matmul of x runs under autocast. Casting x to it once avoids a cast in
    every matmul.
    """
    device = x.device.type
    return (
        torch.get_autocast_dtype(device)
        if x.dtype == torch.float32 and torch.is_autocast_enabled(device)
        else x.dtype
    )


class StackedWeight(Tensor):
    """Stacked weights of several layers ``[n outputs inputs]``. Their gradients are added to the tensor that
    `gradient_sum` returns, and autograd receives none. Results of operations on it are plain tensors.
    """

    gradient_sum: Callable[[], Tensor]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, weight: Tensor, gradient_sum: Callable[[], Tensor]) -> StackedWeight:
        """Return the weight as a `StackedWeight` with this function for the sum of its gradients."""
        made = weight.as_subclass(cls)
        made.gradient_sum = gradient_sum
        return made


class Linear(nn.Linear):
    """A linear projection without bias, of one layer or of several stacked layers."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Float[Tensor, "b t inputs"]) -> Float[Tensor, "b t outputs"]:
        if self.weight.dim() == 2:
            return F.linear(x, self.weight)
        if isinstance(self.weight, StackedWeight) and torch.is_grad_enabled():
            return _project_fused(x, self)[0]
        stacked = x.reshape(len(self.weight), -1, x.shape[-1])
        return torch.bmm(stacked, self.weight.mT).view(*x.shape[:-1], self.out_features)


def project(x: Float[Tensor, "b t d"], *projections: Linear) -> tuple[Tensor, ...]:
    """Return several projections of the same x. On a GPU, the gradients of x are accumulated inside the
    matmuls and not by separate kernels.
    """
    if len(projections) < 2 or not x.is_cuda or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return tuple(projection(x) for projection in projections)
    if not all(is_unmodified(projection, Linear) for projection in projections):
        return tuple(projection(x) for projection in projections)
    return _project_fused(x, *projections)


def _project_fused(x: Tensor, *projections: Linear) -> tuple[Tensor, ...]:
    """Compute `project` with `_FusedProjection`, in the dtype of autocast."""
    dtype = matmul_dtype(x)
    weights = [projection.weight for projection in projections]
    sums = tuple(weight.gradient_sum if isinstance(weight, StackedWeight) else None for weight in weights)
    return _FusedProjection.apply(x.to(dtype), sums, *[weight.to(dtype) for weight in weights])


class _ProjectionContext(FunctionCtx):
    """The values that the forward pass of `_FusedProjection` keeps for the backward pass."""

    sums: tuple[Callable[[], Tensor] | None, ...]
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class _FusedProjection(torch.autograd.Function):
    """Several projections of one input. The gradient of a `StackedWeight` is added to its sum, and autograd
    receives none. On a GPU, the matmul itself does this addition, so that the gradient of a step is not
    rounded, and not written to memory and read again.
    """

    @staticmethod
    def forward(
        ctx: _ProjectionContext,
        x: Tensor,
        sums: tuple[Callable[[], Tensor] | None, ...],
        *weights: Tensor,
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
    def backward(ctx: _ProjectionContext, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
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
            elif wants_this and gradient_sum is not None:
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
    """Compute ``total += a @ b``, ``[n i o]`` each, in place. On a GPU, the product is accumulated in float32
    without being rounded first.
    """
    if total.dtype == a.dtype:
        total.baddbmm_(a, b)
    elif a.is_cuda and total.dtype == torch.float32:
        torch.ops.aten.baddbmm.dtype_out(total, a, b, torch.float32, out=total)
    else:
        total += a @ b


def _stacked(x: Tensor, weight: Tensor) -> Tensor:
    """Return x as a matrix of tokens: ``[b*t d]`` for the weight of one layer, ``[n b*t d]`` for the weights
    of n stacked layers.
    """
    return x.reshape(*weight.shape[:-2], -1, x.shape[-1])


def broadcast_stacked(weight: Tensor, unstacked_dim: int, x: Tensor) -> Tensor:
    """Return a weight with `unstacked_dim` axes unchanged. Reshape the stacked weights of several layers so that they
    broadcast over x when the first axis of x is split by layers.
    """
    return (
        weight
        if weight.dim() == unstacked_dim
        else weight.view(len(weight), *[1] * (x.dim() - unstacked_dim), *weight.shape[1:])
    )
