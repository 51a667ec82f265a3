"""Positions of rows in their documents: integers on a device, with a copy on the host if it is known."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


class Position(Tensor):
    """The number of tokens that each row has read ``[r]``, on a device other than the CPU, with a copy on the
    host. Code that branches on positions then does not wait for the device.

    Results computed from it are plain tensors, and so are copies in files and other processes. It is never
    changed in place.
    """

    host: list[int]
    """The same integers on the host."""
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return with_host_copy(self.clone(), list(self.host))


def with_host_copy(position: Tensor, host: list[int]) -> Tensor:
    """Return a position ``[r]`` as a `Position` with its host copy. On the CPU it is returned unchanged,
    because reading it there costs nothing.
    """
    if torch.compiler.is_compiling() or position.device.type == "cpu":
        return position
    known = position.as_subclass(Position)
    known.host = host
    return known


def host_copy(position: Tensor) -> list[int] | None:
    """Return the integers of a position if the host knows them (a `Position`, or any tensor on the CPU), else
    None.

    On a CPU the result does not depend on how the state was made, so a resumed run gives the same bits as one
    that was never stopped.
    """
    if torch.compiler.is_compiling() or isinstance(position, FakeTensor):
        return None
    if position.device.type == "cpu":
        return position.tolist()
    return position.host if isinstance(position, Position) else None


def positions_of(position: Tensor) -> list[int]:
    """Return the integers of a position. They are read from the device if the host does not have a copy."""
    known = host_copy(position)
    return position.tolist() if known is None else known


def advance_position(position: Tensor, counts: Tensor | int) -> Tensor:
    """Return a position after `counts` more tokens. The host copy is kept if `counts` is an integer, the same
    for all rows.
    """
    known = host_copy(position)
    after = position + counts
    if known is None or not isinstance(counts, int):
        return after
    return with_host_copy(after, [number + counts for number in known])


def is_aligned(position: Tensor, size: int) -> bool:
    """Whether the host knows that the positions of all rows are multiples of `size`."""
    known = host_copy(position)
    return known is not None and all(number % size == 0 for number in known)


def copy_host(copy: Tensor, position: Tensor) -> Tensor:
    """Return `copy`, a copy of a state's tensor. If the tensor is a position, its host copy is attached."""
    if position.dtype != torch.int64 or position.dim() != 1 or copy is position:
        return copy
    known = host_copy(position)
    return copy if known is None else with_host_copy(copy, known)
