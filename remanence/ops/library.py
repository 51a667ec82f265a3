"""Registration of functions as torch operators, which torch.compile does not trace into. They can be
differentiated once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

GATES = "Tensor log_step, Tensor? log_momentum, Tensor? log_keep"
"""The arguments for the gates in the schema of an operator."""

_library = torch.library.Library("remanence", "DEF")
"""The torch.library namespace ``remanence`` of all operators of this package."""


def register_operator(
    name: str,
    function: Callable[..., Any],
    schema: str,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
    fake: Callable[..., Any] | None = None,
    tags: tuple[torch.Tag, ...] = (),
) -> Any:
    """Register a function as ``torch.ops.remanence.<name>`` and return the operator.

    `backward` computes its gradient from the values that `setup_context` saved. `fake` returns empty results
    of the right shapes; without it, the function itself runs on fake tensors. torch.library.custom_op is not
    used, because its checks took half of the host's time for a layer (0.4 ms per call). The tests make the
    same checks with torch.library.opcheck.
    """
    _library.define(f"{name}{schema}", tags=tags)
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"remanence::{name}", fake or function, lib=_library)
    if backward is not None:
        torch.library.register_autograd(
            f"remanence::{name}", backward, setup_context=setup_context, lib=_library
        )
    return getattr(torch.ops.remanence, name).default


def raise_on_double_backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    """Raise an error. This is the backward function of operators that are themselves a backward pass."""
    raise RuntimeError(DOUBLE_BACKWARD_ERROR)


DOUBLE_BACKWARD_ERROR = (
    "a memory is differentiable once; for second derivatives use remanence.memorize(..., backend='reference')"
)
"""The message of the error that is raised when a gradient is differentiated again."""


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the backward of an autograd.Function like torch's `once_differentiable`, but with an error message
    that says what to use instead. The error is also raised if the incoming gradients do not require a
    gradient.
    """

    @wraps(backward)
    def once(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():  # backward was called with create_graph=False
            return found
        present = [grad.detach().requires_grad_() for grad in found if isinstance(grad, Tensor)]
        refused = iter(
            torch._C._functions.DelayedError(DOUBLE_BACKWARD_ERROR.encode(), len(present))(*present)
        )
        return tuple(next(refused) if isinstance(grad, Tensor) else grad for grad in found)

    return once


def fill_missing_grads(
    grads: tuple[Tensor | None, ...], like: list[tuple[torch.Size, torch.dtype]], device: torch.device
) -> list[Tensor]:
    """Return the gradients as contiguous tensors, with zeros in place of None. `like` has the shape and dtype
    of each.
    """
    pairs = zip(grads, like, strict=False)
    return [torch.zeros(x[0], dtype=x[1], device=device) if g is None else g.contiguous() for g, x in pairs]


def results_schema(count: int) -> str:
    """Return the result type of an operator schema for `count` tensors."""
    return "(" + ", ".join(["Tensor"] * count) + ")"


def register_differentiable(
    name: str,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    inputs: str,
    constants: str = "",
    *,
    extra: int = 0,
    fake: Callable[..., Any] | None = None,
    fake_backward: Callable[..., Any] | None = None,
) -> Any:
    """Register an operator and its gradient. Its arguments are the tensors `inputs`, then `constants`; both
    are strings in the syntax of operator schemas.

    The first result is differentiable. The `extra` results after it are only saved for backward. `backward`
    is called with the gradient of the first result, the inputs, the extra results and the constants; it
    returns one gradient per input.
    """
    count = inputs.count("Tensor")
    constants = constants and f", {constants}"

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        saved = output[1:] if extra else ()
        if extra:
            ctx.mark_non_differentiable(*saved)
        ctx.save_for_backward(*inputs[:count], *saved)
        ctx.constants = inputs[count:]

    def autograd_backward(ctx: Any, g_y: Tensor, *_: Any) -> tuple[Any, ...]:
        return *gradient(g_y, *ctx.saved_tensors, *ctx.constants), *[None] * len(ctx.constants)

    saved = "".join(f", Tensor saved{index}" for index in range(extra))
    gradient = register_operator(
        f"{name}_backward", backward, f"(Tensor g_y, {inputs}{saved}{constants}) -> {results_schema(count)}",
        raise_on_double_backward, fake=fake_backward,
    )  # fmt: skip
    returned = results_schema(1 + extra) if extra else "Tensor"
    schema = f"({inputs}{constants}) -> {returned}"
    return register_operator(name, forward, schema, autograd_backward, setup_context, fake)
