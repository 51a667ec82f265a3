"""Modules that can be initialised again, as models made on the meta device must be."""

from __future__ import annotations

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

        value = distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
    parameter.copy_(value)
