"""Register the forward and backward kernel launches of a memory as one differentiable operator. Used for
memories of one layer and of two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

import torch
from torch import Tensor

from remanence.ops.library import (
    GATES,
    fill_missing_grads,
    raise_on_double_backward,
    register_operator,
    results_schema,
)
from remanence.ops.state import Gates


def memory_operator(
    name: str,
    plan: Any,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    layers: tuple[str, ...],
    saved: int,
) -> Any:
    """Register the operator ``<name>_forward`` together with its gradient, and return it.

    Its arguments are q, k, v, the gates, the initial layers, the totals (tokens of each row), `train`, and
    the fields of the plan. It returns the answers, the surprise, the final layers, a flag for each chunk
    whose answers are not finite, and `saved` tensors for backward.

    `plan` is a NamedTuple class of the values that the kernels are compiled for. Its method
    ``for_device(programs, device)`` adapts a plan to a device. `layers` are the names of the layer arguments.

    ``forward(plan, q, k, v, gates, *layers, totals, train)`` returns the results of the operator.
    ``backward(plan, (q, k, v, totals, *saved), gates, *grads)`` returns the gradients of q, k, v, the gates
    and the layers.
    """
    count = len(layers)
    first_plan = 8 + count  # q, k, v, three gates, the layers, totals, train
    differentiable = 2 + count  # number of differentiable results: answers, surprise, the layers

    def run_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        """Rebuild the plan from its fields, adapt it to the device, and call `forward`."""
        here = plan(*rest[5 + count :]).for_device(q.shape[0] * q.shape[2], q.device)
        return forward(here, q, k, v, Gates(*rest[:3]), *rest[3 : 5 + count])

    def run_backward(
        log_step: Tensor, log_momentum: Tensor | None, log_keep: Tensor | None,
        saved: list[Tensor], grads: list[Tensor], *fields: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Rebuild the plan from its fields, adapt it to the device, and call `backward`."""
        here = plan(*fields).for_device(log_step.shape[0] * log_step.shape[2], log_step.device)
        return backward(here, tuple(saved), Gates(log_step, log_momentum, log_keep), *grads)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.plan = inputs[first_plan:]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[differentiable:])
        # The results themselves are not saved, because the caller may change them in place. Zeros for missing
        # gradients need only the shapes and dtypes.
        ctx.like = [(x.shape, x.dtype) for x in output[:differentiable]]
        ctx.save_for_backward(*inputs[3:6], *inputs[:3], inputs[6 + count], *output[differentiable + 1 :])

    def gradient(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Return the gradient of every argument of the operator, None for those without one."""
        kept = ctx.saved_tensors  # read once: activation checkpointing allows a single access
        gates, saved = kept[:3], list(kept[3:])
        filled = fill_missing_grads(grads, ctx.like, saved[0].device)
        g_q, g_k, g_v, *rest = back(*gates, saved, filled, *ctx.plan)
        g_gates = [None if gate is None else grad for gate, grad in zip(gates, rest, strict=False)]
        return g_q, g_k, g_v, *g_gates, *rest[3:], None, None, *[None] * len(ctx.plan)

    fields = ", ".join(f"{kind.__name__} {field}" for field, kind in get_type_hints(plan).items())
    inputs = f"Tensor q, Tensor k, Tensor v, {GATES}, " + "".join(f"Tensor {layer}, " for layer in layers)
    back = register_operator(
        f"{name}_backward",
        run_backward,
        f"({GATES}, Tensor[] saved, Tensor[] grads, {fields}) -> {results_schema(6 + count)}",
        raise_on_double_backward,
    )
    return register_operator(
        f"{name}_forward",
        run_forward,
        f"({inputs}Tensor totals, bool train, {fields}) -> {results_schema(differentiable + 1 + saved)}",
        gradient,
        setup_context,
    )


def empty_grads(gates: Gates, grads: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the gradients of the gates, with an empty tensor for each gate that is None, because an operator
    can return only tensors.
    """
    pairs = zip(gates, grads, strict=True)
    return [torch.empty(0, dtype=dtype, device=grad.device) if gate is None else grad for gate, grad in pairs]
