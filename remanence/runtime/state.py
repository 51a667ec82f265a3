"""States: typed tuples of tensors with one row per document. One call returns a state and the next call takes
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from remanence.runtime.positions import copy_host, host_copy, positions_of, with_host_copy


def needs_grad(tensors: Iterable[Tensor | None]) -> bool:
    """Whether autograd records operations on these tensors. (Written as a loop, because torch 2.11 cannot
    compile a generator that is not exhausted.)
    """
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def _map(function: Callable[[Tensor], Tensor], node: Any) -> Any:
    """Apply a function to every tensor of a nested tuple and return the same structure."""
    if isinstance(node, Tensor):
        return function(node)
    if node is None:
        return None
    children = [_map(function, child) for child in node]
    return type(node)(*children) if hasattr(node, "_fields") else tuple(children)


def _tensors(node: Any) -> list[Tensor]:
    """Return all tensors of a nested tuple in order."""
    if isinstance(node, Tensor):
        return [node]
    return [] if node is None else [tensor for child in node for tensor in _tensors(child)]


def _shown(node: Any) -> str:
    """Format a state without its numbers: one line per field, with nested states indented."""
    if isinstance(node, Tensor):
        dtype = str(node.dtype).removeprefix("torch.")
        return f"{dtype}{list(node.shape)} {node.device}"
    if not isinstance(node, tuple):
        return repr(node)
    if not hasattr(node, "_fields"):
        return f"({', '.join(map(_shown, node))}{',' * (len(node) == 1)})"
    lines = [f"{name}={_shown(child)}," for name, child in zip(node._fields, node, strict=True)]
    inside = "\n".join(lines).replace("\n", "\n  ")
    return f"{type(node).__name__}(\n  {inside}\n)"


def _concat(nodes: Sequence[Any]) -> Any:
    """Concatenate nested tuples of the same structure along their rows."""
    first = nodes[0]
    if isinstance(first, Tensor):
        return torch.cat(list(nodes))
    if isinstance(first, TensorTuple):
        return type(first).concat(nodes)
    return None if first is None else tuple(_concat(children) for children in zip(*nodes, strict=True))


def _saved(node: Any) -> Any:
    """Apply `TensorTuple.saved` to every state in a nested tuple."""
    if isinstance(node, TensorTuple):
        return node.saved()
    if not isinstance(node, tuple):
        return node
    children = [_saved(child) for child in node]
    return type(node)(*children) if hasattr(node, "_fields") else tuple(children)


def _moved(
    node: Any, move: Callable[[Tensor, torch.device | None], Tensor], device: torch.device | None
) -> Any:
    """Apply `move` to every tensor of a nested tuple and the device that it belongs to: `device`, or the host."""
    if isinstance(node, Tensor):
        return move(node, device)
    if node is None:
        return None
    names = getattr(node, "_fields", range(len(node)))
    host = node.host if isinstance(node, TensorTuple) and device is not None else ()
    own = [torch.device("cpu") if name in host else device for name in names]
    children = [_moved(child, move, each) for child, each in zip(node, own, strict=True)]
    return type(node)(*children) if hasattr(node, "_fields") else tuple(children)


def _at(node: Any, position: list[int]) -> Any:
    """Apply `TensorTuple.at` to every state in a nested tuple."""
    if isinstance(node, TensorTuple):
        return node.at(position)
    if not isinstance(node, tuple):
        return node
    children = [_at(child, position) for child in node]
    return type(node)(*children) if hasattr(node, "_fields") else tuple(children)


def parts(node: Any, path: str = "") -> Iterator[tuple[str, TensorTuple]]:
    """Yield every `TensorTuple` in a state, including the state itself, with its path such as
    ``blocks.0.memory``.
    """
    if isinstance(node, TensorTuple):
        yield path, node
    if isinstance(node, tuple):
        names = getattr(node, "_fields", range(len(node)))
        for name, child in zip(names, node, strict=True):
            yield from parts(child, f"{path}.{name}" if path else str(name))


class TensorTuple:
    """Base class with methods for a named tuple of tensors or of other such tuples. The first axis of every
    tensor is the row.

    A state class describes itself for memory files: which fields grow with the text, which fields may hold
    minus infinity, and whether its values are consistent with the number of tokens read.
    """

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__repr__" not in cls.__dict__:
            cls.__repr__ = TensorTuple.__repr__  # type: ignore[method-assign]  # not the NamedTuple's
        # A state contains only tensors and tuples, so torch.load(..., weights_only=True) may build it.
        torch.serialization.add_safe_globals([cls])

    def __repr__(self) -> str:
        """Return the fields' dtypes, shapes and devices, without their numbers."""
        shown = _shown(self)
        return f"{shown[:-1]}  nbytes={self.nbytes:,},\n)"

    minus_infinity: ClassVar[tuple[str, ...]] = ()
    """Names of the fields in which minus infinity is a valid value, such as the logarithm of a closed gate.
    """

    host: ClassVar[tuple[str, ...]] = ()
    """Names of the fields that stay in the memory of the host when a state is moved to another device."""

    def growing(self) -> tuple[str, ...]:
        """Return the names of the fields whose second axis has one entry for every token read."""
        return ()

    def variable(self) -> tuple[str, ...]:
        """Return the names of the fields whose second axis may have any length."""
        return ()

    def transient(self) -> tuple[str, ...]:
        """Return the names of the fields that are not saved, as they can be computed from the others."""
        return ()

    def saved(self) -> Self:
        """Return the state as it is saved: without transient fields, also in nested states."""
        dropped = self.transient()
        node: Any = self
        fields = zip(node._fields, node, strict=True)
        return type(self)(*[None if name in dropped else _saved(child) for name, child in fields])

    def lag(self) -> Tensor | int:
        """Return the number of last tokens of each row that only this part of a state has read ``[r]``."""
        return 0

    def agrees(self, read: Tensor) -> Tensor | bool:
        """Whether the state of each row is consistent with having read this many tokens ``[r]``. Nested
        states are checked by their own method.
        """
        return True

    def crop(self, tokens: int) -> Self:
        """Return the state as it was before each row's last `tokens` tokens. Raises ValueError if this state
        type cannot be rewound.
        """
        if tokens:
            name = type(self).__name__
            raise ValueError(f"tokens: expected 0, as {name} does not know what it was before, got {tokens}")
        return self

    def at(self, position: list[int]) -> Self:
        """Return the same state with these positions stored on the host for its rows. Applies to every field
        named `position`, also in nested states.
        """
        node: Any = self
        made = type(node)(*[_at(child, position) for child in node])
        return (
            made._replace(position=with_host_copy(made.position.detach(), position))
            if "position" in node._fields
            else made
        )

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return the state with `function` applied to every tensor."""
        return _map(function, self)

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the state, including nested states, in order."""
        return _tensors(self)

    def detach(self) -> Self:
        """Return the state with its floating-point tensors detached from the autograd graph."""
        return self.map(lambda tensor: tensor.detach() if tensor.is_floating_point() else tensor)

    def clone(self) -> Self:
        return self.map(lambda tensor: copy_host(tensor.clone(), tensor))

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the state on a device, in a floating-point dtype, or both, with the arguments of
        ``torch.nn.Module.to``: ``state.to("cuda")``, ``state.to(torch.float64)``. Integers and booleans keep
        their dtype. A memory's state must be float32, or float64 in a float64 model; the next call that takes
        the state raises an error for other dtypes.
        """
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype: expected a floating-point dtype, got {dtype}")

        def moved(tensor: Tensor, device: torch.device | None) -> Tensor:
            own = dtype if tensor.is_floating_point() else None
            return copy_host(tensor.to(device, own or tensor.dtype, non_blocking), tensor)

        return _moved(self, moved, device)

    @property
    def nbytes(self) -> int:
        """The size of all tensors of the state in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def rows(self, index: int | slice | Sequence[int] | Tensor) -> Self:
        """Return a state with the chosen rows, in the given order."""
        if isinstance(index, int) or (isinstance(index, Tensor) and index.dim() == 0):
            index = [int(index)]
        if isinstance(index, Tensor):
            return self.map(lambda tensor: tensor[index.to(tensor.device)])
        return self.map(lambda tensor: tensor[index])

    @classmethod
    def concat(cls, states: Sequence[Self]) -> Self:
        """Return one state with the rows of all states, in order."""
        if not states:
            raise ValueError("states: expected at least one state to concatenate, got none")
        return cls(*[_concat(children) for children in zip(*states, strict=True)])


def roll_history(past: Tensor, new: Tensor) -> Tensor:
    """Return a history ``[r s ...]``, newest entry last, with `new` appended and as many of the oldest
    entries dropped. The result is never a view, because a view would keep the tensors of a whole call in
    memory.
    """
    length, count = past.shape[1], new.shape[1]
    if count >= length:
        return new[:, count - length :].to(past.dtype, copy=True)
    return torch.cat([past[:, count:], new.to(past.dtype)], 1)


def rewind(past: Tensor, tokens: int) -> Tensor:
    """Return a history ``[r s ...]``, newest entry last, without its last `tokens` entries. Zeros are added
    at the oldest end.
    """
    removed = min(tokens, past.shape[1])
    return torch.cat([torch.zeros_like(past[:, :removed]), past[:, : past.shape[1] - removed]], 1)


def where(rows: list[bool] | Tensor, new: Any, old: Any) -> Any:
    """Select each row from `new` where `rows` is true, else from `old`. Both are nested tuples of tensors.
    `rows` is a list on the host or a tensor on the device.
    """
    if isinstance(rows, list) and all(rows):
        return new
    if isinstance(new, Tensor):
        chosen = torch.as_tensor(rows, device=new.device).view(-1, *[1] * (new.dim() - 1))
        result = torch.where(chosen, new, old)
        if isinstance(rows, Tensor) or host_copy(new) is None or host_copy(old) is None:
            return result
        return with_host_copy(
            result,
            [a if anew else b for anew, a, b in zip(rows, positions_of(new), positions_of(old), strict=True)],
        )
    if new is None:
        return None
    children = [where(rows, a, b) for a, b in zip(new, old, strict=True)]
    return type(new)(*children) if hasattr(new, "_fields") else tuple(children)
