"""Decoding: a memory that reads one token at a time and is updated in place.

For each token, the memory needs the layer inputs X and errors D of the earlier tokens of its chunk, computed
at the anchor weights. They are stored beside the tail, so that one token adds only one row to every matrix
product of `closed_form`. Rows may be at different positions in their chunks: the slot to write, and whether
the chunk is complete, are computed on the device. All shapes are fixed and nothing synchronises with the
host, so a CUDA graph can capture a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from remanence.ops import closed_form as cf
from remanence.ops.closed_form import unsupported_reason
from remanence.ops.nets import MLP, Net
from remanence.ops.rules import Rule, coefficients, is_linear
from remanence.ops.state import DIVERGENCE_LIMIT, Gates, MemoryState, Weights, is_within
from remanence.ops.triton import decode as kernels
from remanence.ops.triton import dispatch
from remanence.ops.triton.decode import convolve

__all__ = [
    "InPlaceMemory",
    "convolve",
    "is_supported",
    "overwrite_rows",
    "select_rows",
    "unsupported_reason",
    "write_slots",
]


def write_slots(buffer: Tensor, slot: Tensor, new: Tensor, active: Tensor) -> None:
    """Write `new` ``[r ...]`` into a buffer ``[r slots ...]`` in place, at the slot ``[r]`` of each row. Rows
    where `active` ``[r]`` is false stay unchanged.
    """
    where = torch.arange(buffer.shape[0], device=buffer.device), slot
    buffer[where] = select_rows(active, new.to(buffer.dtype), buffer[where])


def overwrite_rows(buffers: Sequence[Tensor], new: Sequence[Tensor], rows: Tensor) -> None:
    """Copy the rows where the mask `rows` ``[r]`` is true from the new tensors to the buffers, in place."""
    for old, tensor in zip(buffers, new, strict=True):
        old.copy_(select_rows(rows, tensor, old))


def select_rows(rows: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return `new` in the rows where the mask `rows` ``[r]`` is true, and `old` in the other rows."""
    return torch.where(rows.view(-1, *[1] * (new.dim() - 1)), new, old)


def is_supported(like: Tensor, width: int) -> bool:
    """Whether the kernels can decode heads of this width. `like` is any tensor with the dtype and device of
    the state.
    """
    return dispatch.decode_reason(like, width) is None


class InPlaceMemory:
    """A memory for decoding, updated in place. It starts from a copy of a `MemoryState`; the property `state`
    returns a copy, too.

    In the shapes, m is rows times heads. `inputs` and `errors` are X and D of the incomplete chunk, one
    tensor ``[m c ...]`` per layer. `step` writes one token (see `_step_plain`).
    """

    def __init__(self, state: MemoryState, net: Net, rule: Rule, backend: str = "auto") -> None:
        reason = unsupported_reason(net, rule)
        if reason is not None or not isinstance(net, MLP) or not is_linear(rule):
            raise ValueError(
                f"net: expected a memory that can be updated in place, got {type(net).__name__}: {reason}"
            )
        self.net, self.rule, self.chunk = net, rule, state.chunk
        self.rows, self.heads, self.width = state.k.shape[0], *state.k.shape[2:]
        self.values = state.v.shape[-1]
        # There is one more slot than in a tail, for the token that completes the chunk.
        k, self.v, self.gates = self._slots(state.k), self._slots(state.v), state.gates.map(self._slots)
        self.layers = tuple(
            layer.detach().flatten(0, 1).clone(memory_format=torch.contiguous_format)
            for layer in state.layers
        )
        self.position, self.diverged = state.position.clone(), state.diverged.clone()
        self.inputs, self.errors = self._inputs_and_errors(k, self.v)
        reason = dispatch.decode_reason(self.v, max(self.width, self.values))
        self.has_kernels = reason is None  # to copy weights; there may still be no kernel for a step
        self.step = (
            self._step_fused if self._choose_backend(backend, reason) == "triton" else self._step_plain
        )

    def _choose_backend(self, backend: str, reason: str | None) -> str:
        """Return the backend, "triton" or "plain". `reason` tells why the kernels cannot be used, or is None
        if they can.
        """
        reason = dispatch.decode_memory_reason(self.net, self.rule, self.chunk) or reason
        if backend == "triton" and reason is not None:
            raise ValueError(f"backend: 'triton' cannot decode this memory: {reason}")
        return ("plain" if reason else "triton") if backend == "auto" else backend

    def _slots(self, tail: Tensor) -> Tensor:
        """Return the slots ``[m c ...]`` of a chunk, from a tail ``[r c-1 h ...]`` and one empty slot."""
        chunk = torch.cat([tail.detach(), tail.new_zeros(tail.shape[0], 1, *tail.shape[2:])], 1)
        return chunk.transpose(1, 2).flatten(0, 1).contiguous()

    def _inputs_and_errors(self, k: Tensor, v: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return X and D of the incomplete chunk, one tensor ``[m c ...]`` per layer. Unused slots have no
        effect on later tokens, because their coefficients are 0.
        """
        coef = coefficients(self.rule, self.gates, torch.zeros(len(k), dtype=torch.bool, device=k.device))
        key_activations = cf.record_keys(
            self.net,
            self.rule,
            cf.Anchor(self.layers, coef, cf.token_exact_solver(self.net, self.rule, k, coef)),
            k,
            v,
        )
        return [x.contiguous() for x in key_activations.inputs], [
            x.contiguous() for x in key_activations.errors
        ]

    @property
    def weights(self) -> Weights:
        """The weights ``[r h ...]`` at the start of the incomplete chunk. They are views, which change when
        the memory is updated.
        """
        return tuple(self._split_heads(layer[:, 0]) for layer in self.layers)

    def copy_weights(self, weights: Weights, rows: Tensor) -> None:
        """Copy the rows of `self.weights` where the mask `rows` ``[r]`` is true to `weights`, in place."""
        if self.has_kernels:
            kernels.copy_weights(self, weights, rows)
        else:
            overwrite_rows(weights, self.weights, rows)

    def current_weights(self) -> Weights:
        """Return the weights ``[r h ...]`` after all tokens so far, including those of the incomplete chunk."""
        slot = self._repeat_heads(self.position % self.chunk)
        coef = coefficients(self.rule, self.gates, torch.zeros_like(slot, dtype=torch.bool))
        gradient_factors, state_factors = self._gather_slot(
            slot, *cf.previous_token_factors(coef._replace(anchor_scale=None))
        )
        weights = []
        for layer, x, error in zip(self.layers, self.inputs, self.errors, strict=True):
            held = (state_factors.mT.unsqueeze(-1) * layer).sum(1)
            weights.append(
                self._split_heads(torch.baddbmm(held, (x * gradient_factors.mT).mT, error, alpha=-1))
            )
        return tuple(weights)

    def _repeat_heads(self, x: Tensor) -> Tensor:
        """Repeat one value per row ``[r]`` for each head: ``[m]``."""
        return x.unsqueeze(-1).expand(self.rows, self.heads).flatten()

    def _split_heads(self, x: Tensor) -> Tensor:
        """Reshape ``[m ...]`` to ``[r h ...]``."""
        return x.unflatten(0, (self.rows, self.heads))

    def _gather_slot(self, slot: Tensor, *tensors: Tensor) -> list[Tensor]:
        """Return the entry ``[m 1 ...]`` of each tensor ``[m c ...]`` at the given slot ``[m]``."""
        index = torch.arange(len(slot), device=slot.device)
        return [x[index, slot].unsqueeze(1) for x in tensors]

    def _step_plain(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Gates, active: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write one token ``[r h e]``, with log gates ``[r h]``, to the rows where `active` ``[r]`` is true.
        Return its answers ``[r h e]`` and surprise ``[r h]``.

        The results for inactive rows are meaningless.
        """
        q, k, v = (x.flatten(0, 1).unsqueeze(1).to(self.v.dtype) for x in (q, k, v))
        on, slot = self._repeat_heads(active), self._repeat_heads(self.position % self.chunk)
        for buffer, gate in zip(self.gates, gates, strict=True):
            if buffer is not None and gate is not None:
                write_slots(buffer, slot, gate.flatten(), on)
        chunk_coef = coefficients(self.rule, self.gates, on & (slot == self.chunk - 1))
        gradient_factors, state_factors, previous_gradient_factors, previous_state_factors = (
            self._gather_slot(
                slot,
                chunk_coef.gradient_factors,
                chunk_coef.state_factors,
                *cf.previous_token_factors(chunk_coef),
            )
        )
        coef = chunk_coef._replace(
            gradient_factors=gradient_factors,
            state_factors=state_factors,
            anchor_scale=None
            if chunk_coef.anchor_scale is None
            else self._gather_slot(slot, chunk_coef.anchor_scale)[0],
        )
        key_coef = (
            coef._replace(gradient_factors=previous_gradient_factors, state_factors=previous_state_factors)
            if cf.is_token_exact(self.net, self.rule)
            else coef
        )
        key_activations = cf.record_next_key(
            self.net, self.rule, cf.Anchor(self.layers, key_coef), self.inputs, self.errors, k, v
        )
        pairs = zip(
            (*self.inputs, *self.errors, self.v),
            (*key_activations.inputs, *key_activations.errors, v),
            strict=True,
        )
        for buffer, new in pairs:
            write_slots(buffer, slot, new.squeeze(1), on)
        y = cf.read_queries(
            self.net, cf.Anchor(self.layers, coef), self.inputs, self.errors, q
        ).answers.squeeze(1)
        surprise = key_activations.surprise(self.rule).squeeze(1)
        ends = tuple(torch.empty_like(layer) for layer in self.layers)
        # This does not change the state of a row whose chunk is not complete.
        cf.write_end_state(cf.Anchor(self.layers, chunk_coef), self.inputs, self.errors, ends)
        for layer, end in zip(self.layers, ends, strict=True):
            layer.copy_(end)
        is_finite = self._split_heads(is_within(y).all(-1) & is_within(surprise, DIVERGENCE_LIMIT**2)).all(1)
        self.diverged |= active & ~is_finite
        self.position += active
        return self._split_heads(y), self._split_heads(surprise)

    def _step_fused(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Gates, active: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute `_step_plain` with one kernel. The answers and surprise of inactive rows are 0."""
        return kernels.step(self, q, k, v, gates, active)

    @property
    def state(self) -> MemoryState:
        """A copy of the memory's current state."""
        slot = (self.position % self.chunk).unsqueeze(-1)
        read = torch.arange(self.chunk - 1, device=slot.device) < slot

        def tail(x: Tensor) -> Tensor:
            x = self._split_heads(x).transpose(1, 2)[:, : self.chunk - 1]
            return torch.where(read.view(*read.shape, *[1] * (x.dim() - 2)), x, 0.0)

        layers = tuple(self._split_heads(layer).clone() for layer in self.layers)
        bad = self.diverged.clone()
        for layer in layers:
            bad |= ~is_within(layer).flatten(1).all(1)
        k = tail(cf.drop_ones(self.net, self.inputs[0]))
        return MemoryState(layers, k, tail(self.v), self.gates.map(tail), self.position.clone(), bad)
