"""States: typed tuples of tensors with one row per document, which one call returns and the next one takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from remanence.runtime.positions import copy_host, host_copy, positions_of, with_host_copy


def needs_grad(tensors: Iterable[Tensor | None]) -> bool:
    """Whether autograd records what is computed from these tensors. (A loop, because torch 2.11 does not compile a
    generator that is not exhausted.)
    """
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def _map(function: Callable[[Tensor], Tensor], node: Any) -> Any:
    if isinstance(node, Tensor):
        return function(node)
    if node is None:
        return None
    children = [_map(function, child) for child in node]
    return type(node)(*children) if hasattr(node, "_fields") else tuple(children)


def _tensors(node: Any) -> list[Tensor]:
    if isinstance(node, Tensor):
        return [node]
    return [] if node is None else [tensor for child in node for tensor in _tensors(child)]


def _shown(node: Any) -> str:
    """A state as text, without its numbers: a line for each field, parts indented."""
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
    first = nodes[0]
    if isinstance(first, Tensor):
        return torch.cat(list(nodes))
    if isinstance(first, TensorTuple):
        return type(first).concat(nodes)
    return None if first is None else tuple(_concat(children) for children in zip(*nodes, strict=True))


def _at(node: Any, position: list[int]) -> Any:
    if isinstance(node, TensorTuple):
        return node.at(position)
    if not isinstance(node, tuple):
        return node
    children = [_at(child, position) for child in node]
    return type(node)(*children) if hasattr(node, "_fields") else tuple(children)


def parts(node: Any, path: str = "") -> Iterator[tuple[str, TensorTuple]]:
    """Every `TensorTuple` of a state, itself included, with its path: ``blocks.0.memory``."""
    if isinstance(node, TensorTuple):
        yield path, node
    if isinstance(node, tuple):
        names = getattr(node, "_fields", range(len(node)))
        for name, child in zip(names, node, strict=True):
            yield from parts(child, f"{path}.{name}" if path else str(name))


class TensorTuple:
    """Methods for a named tuple of tensors (or of such tuples) whose first axis is always the state's rows.

    A state that is more than its tensors says so itself: which fields grow with the text, which may hold minus
    infinity, and whether its numbers agree with the tokens read. Memory files ask.
    """

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__repr__" not in cls.__dict__:
            cls.__repr__ = TensorTuple.__repr__  # type: ignore[method-assign]  # not the NamedTuple's
        # A state holds tensors and such tuples only, so torch.load(..., weights_only=True) may build it.
        torch.serialization.add_safe_globals([cls])

    def __repr__(self) -> str:
        """The fields' dtypes, shapes and devices, not their numbers."""
        shown = _shown(self)
        return f"{shown[:-1]}  nbytes={self.nbytes:,},\n)"

    minus_infinity: ClassVar[tuple[str, ...]] = ()
    """Fields in which minus infinity is a proper number, such as the logarithm of a closed gate."""

    def growing(self) -> tuple[str, ...]:
        """Fields whose second axis grows with the text, an entry for every token read."""
        return ()

    def agrees(self, read: Tensor) -> Tensor | bool:
        """Whether each row ``[r]`` can be the state of a text of so many tokens ``[r]``; parts are asked themselves."""
        return True

    def crop(self, tokens: int) -> Self:
        """The state before each row's last `tokens` tokens were read, where that can be told from the state."""
        if tokens:
            name = type(self).__name__
            raise ValueError(f"tokens: expected 0, as {name} does not know what it was before, got {tokens}")
        return self

    def at(self, position: list[int]) -> Self:
        """The same state, its rows known on the host to be at these positions: so is every field named `position`."""
        node: Any = self
        made = type(node)(*[_at(child, position) for child in node])
        return (
            made._replace(position=with_host_copy(made.position.detach(), position))
            if "position" in node._fields
            else made
        )

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        return _map(function, self)

    def tensors(self) -> list[Tensor]:
        return _tensors(self)

    def detach(self) -> Self:
        return self.map(lambda tensor: tensor.detach() if tensor.is_floating_point() else tensor)

    def clone(self) -> Self:
        return self.map(lambda tensor: copy_host(tensor.clone(), tensor))

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """To a device, a floating-point dtype, or both, with the arguments of ``torch.nn.Module.to``:
        ``state.to("cuda")``, ``state.to(torch.float64)``. Integers and booleans keep their dtype. A memory's part is
        float32, or float64 in a float64 model; another dtype is refused by the call that reads on from the state.
        """
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype: expected a floating-point dtype, got {dtype}")

        def moved(tensor: Tensor) -> Tensor:
            own = dtype if tensor.is_floating_point() else None
            return copy_host(tensor.to(device, own or tensor.dtype, non_blocking), tensor)

        return self.map(moved)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def rows(self, index: int | slice | Sequence[int] | Tensor) -> Self:
        """The chosen rows, in the order given, as a state of their own."""
        if isinstance(index, int) or (isinstance(index, Tensor) and index.dim() == 0):
            index = [int(index)]
        return self.map(lambda tensor: tensor[index])

    @classmethod
    def concat(cls, states: Sequence[Self]) -> Self:
        """Several states as one, row after row."""
        if not states:
            raise ValueError("states: expected at least one state to concatenate, got none")
        return cls(*[_concat(children) for children in zip(*states, strict=True)])


def roll_history(past: Tensor, new: Tensor) -> Tensor:
    """A history ``[r s ...]``, newest entry last, with new entries appended and as many of the oldest dropped. Never a
    view, which would keep the tensors of a whole call alive.
    """
    length, count = past.shape[1], new.shape[1]
    if count >= length:
        return new[:, count - length :].to(past.dtype, copy=True)
    return torch.cat([past[:, count:], new.to(past.dtype)], 1)


def rewind(past: Tensor, tokens: int) -> Tensor:
    """A history ``[r s ...]``, newest entry last, without its last `tokens` entries; zeros fill the oldest places."""
    removed = min(tokens, past.shape[1])
    return torch.cat([torch.zeros_like(past[:, :removed]), past[:, : past.shape[1] - removed]], 1)


def where(rows: list[bool] | Tensor, new: Any, old: Any) -> Any:
    """Each row from the one tree of tensors or the other; which, the host knows, or the device."""
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
