"""Modules that can be initialised again, as models made on the meta device must be; and where they can be called."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Module(nn.Module):
    """A module whose `reset_parameters` initialises all that is inside it, in the constructor's order: after
    ``torch.manual_seed`` it draws the numbers that a new module would have.

    A subclass with parameters or buffers of its own, or with something to do once its parts are initialised, defines
    `reset_own_parameters` and calls it at the end of its constructor.
    """

    def reset_parameters(self) -> None:
        """Initialise all parameters and buffers again: after ``to_empty``, for example."""
        _reset_parts(self)
        self.reset_own_parameters()

    def reset_own_parameters(self) -> None:
        """Initialise what belongs to no part, once the parts have been initialised."""
        _check_no_own(self, "reset_own_parameters")


def _reset_parts(module: nn.Module) -> None:
    for part in module.children():
        reset = getattr(part, "reset_parameters", None)
        if reset is not None:
            reset()
        else:
            _reset_parts(part)
            _check_no_own(part, "reset_parameters")


def _check_no_own(module: nn.Module, method: str) -> None:
    own = [*module._parameters, *module._buffers]
    if own:
        name = type(module).__name__
        raise NotImplementedError(
            f"{name}: expected a method {method} that initialises {', '.join(own)}, got none; define it"
        )


@torch.no_grad()
def assign(parameter: Tensor, value: Tensor) -> None:
    """Copy a value into a parameter; into one that is sharded over processes (a DTensor), each process its share."""
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        sharded: Any = parameter
        value = distribute_tensor(value.to(sharded.device), sharded.device_mesh, sharded.placements)
    parameter.copy_(value)


def check_transforms() -> None:
    """That a memory is not called inside a transform it cannot run in: those of torch.func, and torch.jit.trace."""
    if torch.compiler.is_compiling():
        return
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            "torch.func: a memory does not run inside grad, vmap, jvp or jacrev; use torch.autograd.grad or backward() "
            "(with torch.func.functional_call for other parameters), and batch rows instead of vmap"
        )
    if torch.jit.is_tracing():
        raise RuntimeError(
            "torch.jit.trace: a memory's call depends on where its rows stand; use torch.compile or torch.export.export"
        )
