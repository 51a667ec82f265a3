"""Where rows stand in their documents: integers on a device, with a copy on the host where it is known."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


class Position(Tensor):
    """Tokens that each row has read ``[r]``, on a device other than the CPU, and the same integers on the host: code
    that decides by them does not wait for the device.

    Whatever is computed from it is a plain tensor, and so is what files and copies of other processes hold. It is never
    changed in place.
    """

    host: list[int]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return with_host_copy(self.clone(), list(self.host))


def with_host_copy(position: Tensor, host: list[int]) -> Tensor:
    """A position ``[r]`` as a `Position`, if it is not on the CPU, where reading it costs nothing."""
    if torch.compiler.is_compiling() or position.device.type == "cpu":
        return position
    known = position.as_subclass(Position)
    known.host = host
    return known


def host_copy(position: Tensor) -> list[int] | None:
    """The integers of a position if the host has them: of a `Position`, or on the CPU. (So what runs on a CPU does not
    depend on how a state came to be, and a run that is resumed gives the bits of one that was not stopped.)
    """
    if torch.compiler.is_compiling() or isinstance(position, FakeTensor):
        return None
    if position.device.type == "cpu":
        return position.tolist()
    return position.host if isinstance(position, Position) else None


def positions_of(position: Tensor) -> list[int]:
    """The integers of a position; read from the device if the host does not have them."""
    known = host_copy(position)
    return position.tolist() if known is None else known


def advance_position(position: Tensor, counts: Tensor | int) -> Tensor:
    """A position after `counts` more tokens; the host still knows it if all rows read as many."""
    known = host_copy(position)
    after = position + counts
    if known is None or not isinstance(counts, int):
        return after
    return with_host_copy(after, [number + counts for number in known])


def is_aligned(position: Tensor, size: int) -> bool:
    """Whether the host knows that all rows stand at a multiple of `size` tokens."""
    known = host_copy(position)
    return known is not None and all(number % size == 0 for number in known)


def copy_host(copy: Tensor, position: Tensor) -> Tensor:
    """A copy of a state's tensor; of a position, with what the host knows of it."""
    if position.dtype != torch.int64 or position.dim() != 1 or copy is position:
        return copy
    known = host_copy(position)
    return copy if known is None else with_host_copy(copy, known)
