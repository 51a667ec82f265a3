"""What a memory carries between two calls, and the gates that steer it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

Weights = tuple[Tensor, ...]
"""A memory's weights: one tensor per layer. Per head inside a net, ``[h, ...]`` as parameters, ``[r, h, ...]`` in a state."""


def trains(tensors: Iterable[Tensor | None]) -> bool:
    """Whether anyone can ask for a gradient of what is made of these. (A loop: torch 2.11 does not compile a generator that
    is left halfway.)
    """
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def placed(position: Tensor, places: list[int]) -> Tensor:
    """A position ``[r]`` with its numbers noted beside it: who knows them on the host need not ask the device, and wait for it.
    What is made of the tensor does not have the note, and nothing noted is ever changed in place.
    """
    if not torch.compiler.is_compiling() and position.device.type != "cpu":
        position._places = places  # type: ignore[attr-defined]
    return position


def noted(position: Tensor) -> list[int] | None:
    """The numbers of a position, if they are known on the host: noted, or there already. (So what runs on a CPU does not depend
    on how a state came to be, and a run that goes on is the run that was not stopped, to the bit.)
    """
    if torch.compiler.is_compiling() or isinstance(position, FakeTensor):
        return None
    return position.tolist() if position.device.type == "cpu" else getattr(position, "_places", None)


def places(position: Tensor) -> list[int]:
    """The numbers of a position, asked of the device if they must be."""
    known = noted(position)
    return position.tolist() if known is None else known


def advanced(position: Tensor, counts: Tensor | int) -> Tensor:
    """A position after more was read; its note goes on if all rows read as many."""
    known = noted(position)
    after = position + counts
    return placed(after, [place + counts for place in known]) if known is not None and isinstance(counts, int) else after


def aligned(position: Tensor, size: int) -> bool:
    """Whether all rows are known to stand at a multiple of so many tokens."""
    known = noted(position)
    return known is not None and all(place % size == 0 for place in known)


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


def _concat(nodes: Sequence[Any]) -> Any:
    first = nodes[0]
    if isinstance(first, Tensor):
        return torch.cat(list(nodes))
    if isinstance(first, TensorTuple):
        return type(first).concat(nodes)
    return None if first is None else tuple(_concat(children) for children in zip(*nodes, strict=True))


def _with_note(copy: Tensor, tensor: Tensor) -> Tensor:
    """A copy of a position knows what the position knew; one that comes from the CPU can be asked for nothing."""
    if tensor.dtype != torch.int64 or tensor.dim() != 1 or copy is tensor:
        return copy
    known = noted(tensor)
    return copy if known is None else placed(copy, known)


class TensorTuple:
    """Methods for a named tuple of tensors (or of such tuples) whose first axis is always the state's rows."""

    __slots__ = ()

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        return _map(function, self)

    def tensors(self) -> list[Tensor]:
        return _tensors(self)

    def detach(self) -> Self:
        return self.map(lambda tensor: tensor.detach() if tensor.is_floating_point() else tensor)

    def clone(self) -> Self:
        return self.map(lambda tensor: _with_note(tensor.clone(), tensor))

    def to(self, device: torch.device | str) -> Self:
        """Move to a device. The dtype is part of what a state is, and stays."""
        place = torch.device(device)
        return self.map(lambda tensor: _with_note(tensor.to(place), tensor))

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


def carry_on(past: Tensor, new: Tensor) -> Tensor:
    """A history ``[r s ...]``, newest last, after more has come; its length stays. Never a view, which keeps a whole call."""
    length, count = past.shape[1], new.shape[1]
    if count >= length:
        return new[:, count - length :].to(past.dtype, copy=True)
    return torch.cat([past[:, count:], new.to(past.dtype)], 1)


def take_back(past: Tensor, tokens: int) -> Tensor:
    """A history ``[r s ...]``, newest last, without its last entries; zeros take the oldest places."""
    gone = min(tokens, past.shape[1])
    return torch.cat([torch.zeros_like(past[:, :gone]), past[:, : past.shape[1] - gone]], 1)


def where(rows: list[bool] | Tensor, new: Any, old: Any) -> Any:
    """Each row from the one tree of tensors or the other; which, the host knows, or the device."""
    if isinstance(rows, list) and all(rows):
        return new
    if isinstance(new, Tensor):
        chosen = torch.as_tensor(rows, device=new.device).view(-1, *[1] * (new.dim() - 1))
        result = torch.where(chosen, new, old)
        if isinstance(rows, Tensor) or noted(new) is None or noted(old) is None:
            return result
        return placed(result, [a if anew else b for anew, a, b in zip(rows, places(new), places(old), strict=True)])
    if new is None:
        return None
    children = [where(rows, a, b) for a, b in zip(new, old, strict=True)]
    return type(new)(*children) if hasattr(new, "_fields") else tuple(children)


class _Gates(NamedTuple):
    log_step: Tensor
    log_momentum: Tensor | None = None
    log_keep: Tensor | None = None


class Gates(_Gates, TensorTuple):
    """Per token and head, as logarithms: the step size (theta), the momentum (eta), and what is kept (1 - alpha).

    Logs, because products of gates become sums that cannot underflow halfway, and because -inf says exactly 0. A rule
    without momentum or without forgetting takes None there. ``[b t h]`` each.
    """

    __slots__ = ()


class _MemoryState(NamedTuple):
    layers: Weights
    k: Tensor
    v: Tensor
    gates: Gates
    position: Tensor
    diverged: Tensor


class MemoryState(_MemoryState, TensorTuple):
    """One memory per row and head, wherever its document stands; returned by every call, never changed in place.

    layers
        One ``[r h p ...]`` for each of the net's weights: the weight itself and, for a rule with momentum (p = 2), its
        momentum; as they were at the start of the chunk being read (the closed form's anchor). `weights` and `momentum` are
        views of them.
    k, v, gates
        The tail: what has been read since that chunk began, ``[r c-1 h ...]``; the first ``position % chunk`` slots count.
    position
        Tokens read since the document began, ``[r]``. Chunk borders are counted from there, never from a call's start.
    diverged
        ``[r]``, true once a row's memory, surprise or answers have been infinite or NaN, and from then on.
    """

    __slots__ = ()

    @property
    def weights(self) -> Weights:
        return tuple(layer[:, :, 0] for layer in self.layers)

    @property
    def momentum(self) -> Weights:
        """Empty for a rule without momentum."""
        return tuple(layer[:, :, 1] for layer in self.layers if layer.shape[2] > 1)

    @property
    def chunk(self) -> int:
        return self.k.shape[1] + 1

    def crop(self, tokens: int) -> MemoryState:
        """The state before each row's last `tokens` tokens were read. They must lie in the open chunk: the rest is written."""
        left = self.position % self.chunk - tokens
        if tokens < 0 or bool((left < 0).any()):
            most = int((self.position % self.chunk).min())
            raise ValueError(f"tokens: expected at most {most}, what has been read since the last full chunk, got {tokens}")
        kept = torch.arange(self.chunk - 1, device=self.k.device) < left.unsqueeze(-1)

        def cut(tail: Tensor) -> Tensor:
            return torch.where(kept.view(*kept.shape, *[1] * (tail.dim() - 2)), tail, 0.0)

        return self._replace(k=cut(self.k), v=cut(self.v), gates=self.gates.map(cut), position=self.position - tokens)


def fresh(
    weights: Weights, momentum: Weights | None, rows: int, *, chunk: int, keys: int, values: int, has_momentum: bool, forget: bool
) -> MemoryState:
    """The state of `rows` documents of which nothing has been read, from per-head initial weights ``[h ...]``."""
    first = weights[0]
    heads = first.shape[0]
    tail = lambda width: first.new_zeros(rows, chunk - 1, heads, width)
    gate = first.new_zeros(rows, chunk - 1, heads)
    parts = [[weight.expand(rows, *weight.shape) for weight in weights]]
    if has_momentum:
        parts.append(list(momentum) if momentum else [torch.zeros_like(weight) for weight in parts[0]])
    return MemoryState(
        layers=tuple(torch.stack(layer, 2) for layer in zip(*parts, strict=True)),
        k=tail(keys),
        v=tail(values),
        gates=Gates(gate, gate if has_momentum else None, gate if forget else None),
        position=placed(torch.zeros(rows, dtype=torch.int64, device=first.device), [0] * rows),
        diverged=torch.zeros(rows, dtype=torch.bool, device=first.device),
    )
