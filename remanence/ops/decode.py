"""A memory that reads one token at a time, in place: nothing is allocated, nothing waits for the device.

A token needs the layer inputs X and errors D, at the anchor weights, of the earlier tokens of its chunk. Those are
stored beside the tail, so that a token is one row of every product of closed_form. Rows may be anywhere in their
chunks: where a row writes, and whether its chunk is complete, is decided on the device, and all shapes are fixed. So a
CUDA graph can capture it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from remanence.ops import closed_form as cf
from remanence.ops.closed_form import unsupported
from remanence.ops.nets import MLP, Net
from remanence.ops.rules import Rule, coefficients, is_linear
from remanence.ops.state import LARGEST, Gates, MemoryState, Weights, within
from remanence.ops.triton import decode as kernels
from remanence.ops.triton import dispatch
from remanence.ops.triton.decode import convolve

__all__ = ["InPlaceMemory", "choose", "convolve", "fits", "keep", "put", "unsupported"]


def put(buffer: Tensor, slot: Tensor, new: Tensor, active: Tensor) -> None:
    """Write new ``[r ...]`` to each active row's slot ``[r]`` in a buffer ``[r slots ...]``."""
    where = torch.arange(buffer.shape[0], device=buffer.device), slot
    buffer[where] = choose(active, new.to(buffer.dtype), buffer[where])


def keep(buffers: Sequence[Tensor], new: Sequence[Tensor], rows: Tensor) -> None:
    """Overwrite these rows of the buffers with the new ones, in place."""
    for old, tensor in zip(buffers, new, strict=True):
        old.copy_(choose(rows, tensor, old))


def choose(rows: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """The new in these rows, the old in the others."""
    return torch.where(rows.view(-1, *[1] * (new.dim() - 1)), new, old)


def fits(like: Tensor, width: int) -> bool:
    """Whether the kernels decode heads of this width, with a state like this; `dispatch.decode_reason` says why not."""
    return dispatch.decode_reason(like, width) is None


class InPlaceMemory:
    """A `MemoryState` being written in place; the one it was made from is not touched, and `state` hands out a copy.

    ``m`` is rows times heads. `inputs` and `errors` are the open chunk's X and D, one ``[m c ...]`` for each layer.
    """

    def __init__(self, state: MemoryState, net: Net, rule: Rule, backend: str = "auto") -> None:
        reason = unsupported(net, rule)
        if reason is not None or not isinstance(net, MLP) or not is_linear(rule):
            raise ValueError(
                f"net: expected a memory that can be written in place, got {type(net).__name__}: {reason}"
            )
        self.net, self.rule, self.chunk = net, rule, state.chunk
        self.rows, self.heads, self.width = state.k.shape[0], *state.k.shape[2:]
        self.values = state.v.shape[-1]
        # One slot more than a tail has: the token that completes the chunk.
        k, self.v, self.gates = self._slots(state.k), self._slots(state.v), state.gates.map(self._slots)
        self.layers = tuple(
            layer.detach().flatten(0, 1).clone(memory_format=torch.contiguous_format)
            for layer in state.layers
        )
        self.position, self.diverged = state.position.clone(), state.diverged.clone()
        self.inputs, self.errors = self._tail(k, self.v)
        reason = dispatch.decode_reason(self.v, max(self.width, self.values))
        self.fits = reason is None  # also where there is no kernel that reads a token into such a memory
        self.step = self._fused if self._choose(backend, reason) == "triton" else self._plain

    def _choose(self, backend: str, reason: str | None) -> str:
        reason = dispatch.decode_memory_reason(self.net, self.rule, self.chunk) or reason
        if backend == "triton" and reason is not None:
            raise ValueError(f"backend: 'triton' cannot decode this memory: {reason}")
        return ("plain" if reason else "triton") if backend == "auto" else backend

    def _slots(self, tail: Tensor) -> Tensor:
        """``[r c-1 h ...]`` to ``[m c ...]``."""
        chunk = torch.cat([tail.detach(), tail.new_zeros(tail.shape[0], 1, *tail.shape[2:])], 1)
        return chunk.transpose(1, 2).flatten(0, 1).contiguous()

    def _tail(self, k: Tensor, v: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The open chunk's X and D. Slots that are not read yet have coefficients of 0."""
        co = coefficients(self.rule, self.gates, torch.zeros(len(k), dtype=torch.bool, device=k.device))
        rec = cf.record(
            self.net, self.rule, cf.Anchor(self.layers, co, cf.solver(self.net, self.rule, k, co)), k, v
        )
        return [x.contiguous() for x in rec.inputs], [x.contiguous() for x in rec.errors]

    @property
    def weights(self) -> Weights:
        """``[r h ...]`` at the open chunk's start: views, which change as tokens come."""
        return tuple(self._split(layer[:, 0]) for layer in self.layers)

    def copy_weights(self, weights: Weights, rows: Tensor) -> None:
        """Copy `self.weights` to these, in place, in the given rows ``[r]``."""
        if self.fits:
            kernels.copy_weights(self, weights, rows)
        else:
            keep(weights, self.weights, rows)

    def current_weights(self) -> Weights:
        """``[r h ...]`` after all that was read, the open chunk included."""
        slot = self._each(self.position % self.chunk)
        co = coefficients(self.rule, self.gates, torch.zeros_like(slot, dtype=torch.bool))
        mix, own = self._at(slot, *cf.earlier(co._replace(scale=None)))
        weights = []
        for layer, x, error in zip(self.layers, self.inputs, self.errors, strict=True):
            held = (own.mT.unsqueeze(-1) * layer).sum(1)
            weights.append(self._split(torch.baddbmm(held, (x * mix.mT).mT, error, alpha=-1)))
        return tuple(weights)

    def _each(self, x: Tensor) -> Tensor:
        """``[r]`` to ``[m]``."""
        return x.unsqueeze(-1).expand(self.rows, self.heads).flatten()

    def _split(self, x: Tensor) -> Tensor:
        """``[m ...]`` to ``[r h ...]``."""
        return x.unflatten(0, (self.rows, self.heads))

    def _at(self, slot: Tensor, *tensors: Tensor) -> list[Tensor]:
        """Each memory's row at its slot, ``[m c ...]`` to ``[m 1 ...]``."""
        index = torch.arange(len(slot), device=slot.device)
        return [x[index, slot].unsqueeze(1) for x in tensors]

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, gates: Gates, active: Tensor) -> tuple[Tensor, Tensor]:
        """Read one token ``[r h e]``, log gates ``[r h]``, into the rows that are active ``[r]``: answers and surprise.

        Those of other rows have no meaning.
        """
        q, k, v = (x.flatten(0, 1).unsqueeze(1).to(self.v.dtype) for x in (q, k, v))
        on, slot = self._each(active), self._each(self.position % self.chunk)
        for buffer, gate in zip(self.gates, gates, strict=True):
            if buffer is not None and gate is not None:
                put(buffer, slot, gate.flatten(), on)
        full = coefficients(self.rule, self.gates, on & (slot == self.chunk - 1))
        mix, own, before, own_before = self._at(slot, full.mix, full.own, *cf.earlier(full))
        co = full._replace(
            mix=mix, own=own, scale=None if full.scale is None else self._at(slot, full.scale)[0]
        )
        at_key = co._replace(mix=before, own=own_before) if cf.exact(self.net, self.rule) else co
        rec = cf.record_next(
            self.net, self.rule, cf.Anchor(self.layers, at_key), self.inputs, self.errors, k, v
        )
        pairs = zip((*self.inputs, *self.errors, self.v), (*rec.inputs, *rec.errors, v), strict=True)
        for buffer, new in pairs:
            put(buffer, slot, new.squeeze(1), on)
        y = cf.read(self.net, cf.Anchor(self.layers, co), self.inputs, self.errors, q).answers.squeeze(1)
        surprise = rec.surprise(self.rule).squeeze(1)
        ends = tuple(torch.empty_like(layer) for layer in self.layers)
        # Changes nothing where a chunk is open.
        cf.fold(cf.Anchor(self.layers, full), self.inputs, self.errors, ends)
        for layer, end in zip(self.layers, ends, strict=True):
            layer.copy_(end)
        fine = self._split(within(y).all(-1) & within(surprise, LARGEST**2)).all(1)
        self.diverged |= active & ~fine
        self.position += active
        return self._split(y), self._split(surprise)

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, gates: Gates, active: Tensor) -> tuple[Tensor, Tensor]:
        """`_plain` as one kernel. Answers and surprise of rows that are not active are 0."""
        return kernels.step(self, q, k, v, gates, active)

    @property
    def state(self) -> MemoryState:
        """The memory's present state, a copy."""
        slot = (self.position % self.chunk).unsqueeze(-1)
        read = torch.arange(self.chunk - 1, device=slot.device) < slot

        def tail(x: Tensor) -> Tensor:
            x = self._split(x).transpose(1, 2)[:, : self.chunk - 1]
            return torch.where(read.view(*read.shape, *[1] * (x.dim() - 2)), x, 0.0)

        layers = tuple(self._split(layer).clone() for layer in self.layers)
        bad = self.diverged.clone()
        for layer in layers:
            bad |= ~within(layer).flatten(1).all(1)
        k = tail(cf.without_ones(self.net, self.inputs[0]))
        return MemoryState(layers, k, tail(self.v), self.gates.map(tail), self.position.clone(), bad)
