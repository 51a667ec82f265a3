"""The chunked backend as one torch operator, which torch.compile does not trace into.

Tracing would unroll the loop over chunks and specialise the code on the position of each row in its chunk:
the first call took a minute, and another minute for every new position. The shapes of an operator's results
must follow from the shapes of its arguments, so the tensors for saved states are large enough for a scan from
any position.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remanence.ops.chunked import arrange_chunks, from_chunks, scan_backward, scan_forward, to_chunks
from remanence.ops.layout import Layout
from remanence.ops.library import GATES, raise_on_double_backward, register_operator
from remanence.ops.nets import MLP
from remanence.ops.rules import LinearRule
from remanence.ops.scans import ChunkBlock, ChunkScan, choose_scan
from remanence.ops.state import Gates, MemoryState
from remanence.runtime.state import needs_grad

BLOCK_CHUNKS = 16
"""The number of chunks from one saved state to the next. It is a constant, because the number of chunks is
not known at compile time.
"""

_NET_AND_RULE = (
    "int depth, float expansion, str activation, bool residual, bool norm, bool bias, "
    "bool momentum, bool forget, bool decay_first, str anchor, str loss"
)
"""The part of the operators' schema that describes the net and the rule."""
_TENSORS = (
    f"Tensor q, Tensor k, Tensor v, {GATES}, Tensor tail_k, Tensor tail_v, "
    "Tensor tail_step, Tensor? tail_momentum, Tensor? tail_keep, Tensor[] layers"
)
"""The part of the schema with the differentiable tensors."""
_CALL = f"{_TENSORS}, Tensor position, Tensor diverged, int[]? offsets, int chunk, {_NET_AND_RULE}"
"""The arguments that both operators have in common."""
# The index of the layers, the index of the first argument that is not a tensor, and the number of arguments.
_LAYERS_INDEX, _FIRST_NON_TENSOR, _NUM_ARGUMENTS = (
    11,
    14,
    27,
)


class _Call(NamedTuple):
    """The arguments of the operators, grouped as in the other backends."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Gates
    state: MemoryState
    offsets: list[int] | None
    chunk: int
    net: MLP
    rule: LinearRule

    @classmethod
    def from_arguments(cls, *arguments: Any) -> _Call:
        """Build a call from the flat list of arguments: the inverse of `arguments`."""
        q, k, v, *rest = arguments
        gates, (tail_k, tail_v), tails = Gates(*rest[:3]), rest[3:5], Gates(*rest[5:8])
        (
            layers,
            position,
            diverged,
            offsets,
            chunk,
            depth,
            expansion,
            activation,
            residual,
            norm,
            bias,
            *rest,
        ) = rest[8:]
        net = MLP(
            depth=depth, expansion=expansion, activation=activation, residual=residual, norm=norm, bias=bias
        )
        momentum, forget, decay_first, anchor, loss = rest
        rule = LinearRule(momentum=momentum, forget=forget, decay_first=decay_first, anchor=anchor, loss=loss)
        state = MemoryState(tuple(layers), tail_k, tail_v, tails, position, diverged)
        return cls(q, k, v, gates, state, offsets, chunk, net, rule)

    @property
    def arguments(self) -> list[Any]:
        """The flat list of the operators' arguments."""
        state, net, rule = self.state, self.net, self.rule
        return [
            self.q, self.k, self.v, *self.gates, state.k, state.v, *state.gates, list(state.layers),
            state.position, state.diverged, self.offsets, self.chunk,
            net.depth, net.expansion, net.activation, net.residual, net.norm, net.bias,
            rule.momentum, rule.forget, rule.decay_first, rule.anchor, rule.loss,
        ]  # fmt: skip

    @property
    def num_saved_states(self) -> int:
        """The largest number of saved states for any position in a chunk: one for each block of chunks except
        the first.
        """
        longest = self.q.shape[1] if self.offsets is None else max(b - a for a, b in pairwise(self.offsets))
        return (longest + self.chunk - 2) // (self.chunk * BLOCK_CHUNKS)

    @property
    def differentiable_tensors(self) -> list[Tensor]:
        """The tensors that get a gradient, except the layers of the state."""
        return [
            x
            for x in (self.q, self.k, self.v, *self.gates, *self.state[1:3], *self.state.gates)
            if x is not None
        ]

    def arrange(self) -> tuple[Layout, ChunkScan, ChunkBlock, tuple[Tensor, Tensor, Gates]]:
        """Return the layout, the scan, the inputs as chunks, and the keys, values and gates as rows with the
        state's tail.
        """
        layout = Layout(self.q.shape[0], self.q.shape[1], self.state, self.chunk, self.offsets)
        block, k, v, gates = arrange_chunks(layout, self.q, self.k, self.v, self.gates, self.state)
        return (
            layout,
            choose_scan(self.net, self.rule, layout.completes_chunk, len(self.state.layers)),
            block,
            (k, v, gates),
        )


def memorize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    state: MemoryState,
    net: MLP,
    rule: LinearRule,
    chunk: int,
    offsets: list[int] | None,
) -> tuple[Tensor, MemoryState, Tensor]:
    """Run `remanence.ops.memorize` as one operator. The arguments must have been checked. Returns the
    answers, the new state and the surprise.
    """
    call = _Call(q, k, v, gates, state, offsets, chunk, net, rule)
    train = needs_grad([*call.differentiable_tensors, *state.layers])
    y, surprise, *rest = chunked_forward(*call.arguments, train)
    depth = len(state.layers)
    layers, (tail_k, tail_v), rest = tuple(rest[:depth]), rest[depth : depth + 2], rest[depth + 2 :]
    found = iter(rest)
    tails = Gates._make([None if gate is None else next(found) for gate in gates])
    return y, MemoryState(layers, tail_k, tail_v, tails, next(found), next(found)), surprise


def _forward(*arguments: Any) -> list[Tensor]:
    """Return the answers, the surprise and the tensors of the new state, then the states saved for backward,
    one tensor ``[saved m ...]`` per layer (none unless the last argument, `train`, is true).
    """
    call, train = _Call.from_arguments(*arguments[:-1]), arguments[-1]
    state, heads = call.state, call.q.shape[2]
    layout, scan, block, rows = call.arrange()
    y, surprise, end, starts = scan_forward(
        scan, block, tuple(layer.flatten(0, 1) for layer in state.layers), BLOCK_CHUNKS, train
    )
    y, surprise = (from_chunks(x, heads) for x in (y, surprise))
    layers = (
        tuple(layer.unflatten(0, (-1, heads)) for layer in end) if layout.completes_chunk else state.layers
    )
    y, surprise = layout.to_batch(y), layout.to_batch(surprise[:, layout.query_offset :])
    new = layout.next_state(state, layers, *rows, (y, surprise))
    if not layout.completes_chunk:
        # An operator must not return one of its arguments.
        new = new._replace(layers=tuple(layer.clone() for layer in layers))
    kept = []
    if train:
        kept = [layer.new_zeros(call.num_saved_states, *layer.flatten(0, 1).shape) for layer in state.layers]
        for index, start in enumerate(starts[1:]):
            for layer, first in zip(kept, start, strict=True):
                layer[index] = first
    results = [y, surprise, *new.tensors()]
    return [x.contiguous() for x in results] + kept


def _fake_forward(*arguments: Any) -> list[Tensor]:
    """Return empty tensors in the shapes of the results of `_forward`."""
    call, train = _Call.from_arguments(*arguments[:-1]), arguments[-1]
    state = call.state
    y, surprise = call.v.new_empty(call.v.shape), state.k.new_empty(call.q.shape[:3])
    kept = (
        [x.new_empty(call.num_saved_states, x.shape[0] * x.shape[1], *x.shape[2:]) for x in state.layers]
        if train
        else []
    )
    return [y, surprise, *[x.new_empty(x.shape) for x in state.tensors()], *kept]


def _backward(*arguments: Any) -> list[Tensor]:
    """Return the gradients of `_Call.differentiable_tensors`, then those of the layers of the state."""
    call, (saved, grads) = _Call.from_arguments(*arguments[:_NUM_ARGUMENTS]), arguments[_NUM_ARGUMENTS:]
    state, heads = call.state, call.q.shape[2]
    layout, scan, block, _ = call.arrange()
    results = [
        call.v,
        call.k[..., 0],
        *state.layers,
        state.k,
        state.v,
        *[gate for gate in state.gates if gate is not None],
    ]
    g_y, g_surprise, *rest = (
        torch.zeros_like(x) if grad is None else grad for x, grad in zip(results, grads, strict=True)
    )
    depth = len(state.layers)
    g_layers, g_tails = rest[:depth], rest[depth:]
    starts = [tuple(layer.flatten(0, 1) for layer in state.layers)]
    starts += [
        tuple(layer[index] for layer in saved) for index in range(-(-layout.chunks // BLOCK_CHUNKS) - 1)
    ]
    g_surprise = layout.query_rows(g_surprise)
    if layout.query_offset:
        g_surprise = torch.nn.functional.pad(g_surprise, (0, 0, layout.query_offset, 0))
    g_y, g_surprise = (to_chunks(x, layout.chunks) for x in (layout.query_rows(g_y), g_surprise))
    g_end = tuple(grad.flatten(0, 1) for grad in g_layers) if layout.completes_chunk else ()
    found, g_start, _ = scan_backward(scan, block, starts, BLOCK_CHUNKS, g_y, g_surprise, g_end)
    g_q, *g_rows = [from_chunks(grad, heads).contiguous() for grad in found if grad is not None]
    new, old = [layout.to_batch(g_q)], []
    for grad, g_tail in zip(g_rows, g_tails, strict=True):
        layout.next_tail_backward(g_tail, into=grad)
        before, here = layout.rows_with_tail_backward(grad)
        new.append(here)
        old.append(before)
    first = [grad.unflatten(0, (-1, heads)) for grad in g_start]
    if not layout.completes_chunk:
        first = [a + b for a, b in zip(first, g_layers, strict=True)]
    return [x.contiguous() for x in (*new, *old, *first)]


def _fake_backward(*arguments: Any) -> list[Tensor]:
    """Return empty tensors in the shapes of the results of `_backward`."""
    call = _Call.from_arguments(*arguments[:_NUM_ARGUMENTS])
    return [x.new_empty(x.shape) for x in (*call.differentiable_tensors, *call.state.layers)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    """Save the tensors that the backward pass needs, and mark the outputs that have no gradient."""
    layers = inputs[_LAYERS_INDEX]
    # The number of differentiable outputs: answers, surprise, and the state without position and diverged.
    found = 2 + len(_Call.from_arguments(*inputs[:-1]).state.tensors()) - 2
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[found:])
    ctx.found = found
    ctx.depth, ctx.plain = len(layers), inputs[_FIRST_NON_TENSOR:_NUM_ARGUMENTS]
    ctx.save_for_backward(
        *inputs[:_LAYERS_INDEX], *inputs[_LAYERS_INDEX + 1 : _FIRST_NON_TENSOR], *layers, *output[found + 2 :]
    )


def _autograd_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    """Return one gradient per argument of the operator; None for arguments without a gradient."""
    saved = ctx.saved_tensors
    inputs, (position, diverged), rest = (
        saved[:_LAYERS_INDEX],
        saved[_LAYERS_INDEX : _FIRST_NON_TENSOR - 1],
        saved[_FIRST_NON_TENSOR - 1 :],
    )
    layers, kept = list(rest[: ctx.depth]), list(rest[ctx.depth :])
    found = iter(chunked_backward(*inputs, layers, position, diverged, *ctx.plain, kept, grads[: ctx.found]))
    g_inputs = [None if x is None else next(found) for x in inputs]
    return *g_inputs, list(found), *[None] * (_NUM_ARGUMENTS - _LAYERS_INDEX)


_CUDAGRAPH_UNSAFE = (
    torch.Tag.cudagraph_unsafe,
)  # the host reads the positions, which a CUDA graph does not allow
chunked_forward = register_operator(
    "chunked_forward",
    _forward,
    f"({_CALL}, bool train) -> Tensor[]",
    _autograd_backward,
    _setup_context,
    _fake_forward,
    tags=_CUDAGRAPH_UNSAFE,
)
chunked_backward = register_operator(
    "chunked_backward",
    _backward,
    f"({_CALL}, Tensor[] kept, Tensor?[] grads) -> Tensor[]",
    raise_on_double_backward,
    fake=_fake_backward,
    tags=_CUDAGRAPH_UNSAFE,
)
