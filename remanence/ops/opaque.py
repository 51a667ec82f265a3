"""The chunked backend as one torch operator, which torch.compile does not trace.

Traced, the loop over chunks would be unrolled and each row's position in its chunk compiled in: a first call took a
minute, and the next one, from another position, as long again. The shapes of an operator's results follow from those of
its arguments, so the states saved for backward have room for a scan from any position.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remanence.ops.chunked import arranged, from_chunks, scan_backward, scan_forward, to_chunks
from remanence.ops.layout import Layout
from remanence.ops.library import GATES, operator, raise_on_double_backward
from remanence.ops.nets import MLP
from remanence.ops.rules import LinearRule
from remanence.ops.scans import ChunkBlock, ChunkScan, scan_for
from remanence.ops.state import Gates, MemoryState
from remanence.runtime.state import needs_grad

BLOCK_CHUNKS = 16
"""Chunks from one saved state to the next. Not the root of their number, which the compiler would have to know."""

_KIND = (
    "int depth, float expansion, str activation, bool residual, bool norm, bool bias, "
    "bool momentum, bool forget, bool decay_first, str anchor, str loss"
)
_TENSORS = (
    f"Tensor q, Tensor k, Tensor v, {GATES}, Tensor tail_k, Tensor tail_v, "
    "Tensor tail_step, Tensor? tail_momentum, Tensor? tail_keep, Tensor[] layers"
)
_CALL = f"{_TENSORS}, Tensor position, Tensor diverged, int[]? offsets, int chunk, {_KIND}"
# Index of the layers, of the first argument that is no tensor, and the number of arguments.
_LAYERS, _PLAIN, _ARGUMENTS = (
    11,
    14,
    27,
)


class _Call(NamedTuple):
    """The operators' arguments, as the other backends have them."""

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
    def of(cls, *arguments: Any) -> _Call:
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
        """The operators'; `of` undoes it."""
        state, net, rule = self.state, self.net, self.rule
        return [
            self.q, self.k, self.v, *self.gates, state.k, state.v, *state.gates, list(state.layers),
            state.position, state.diverged, self.offsets, self.chunk,
            net.depth, net.expansion, net.activation, net.residual, net.norm, net.bias,
            rule.momentum, rule.forget, rule.decay_first, rule.anchor, rule.loss,
        ]  # fmt: skip

    @property
    def saved(self) -> int:
        """States to make room for: one per block but the first, from any position of the rows in their chunks."""
        longest = self.q.shape[1] if self.offsets is None else max(b - a for a, b in pairwise(self.offsets))
        return (longest + self.chunk - 2) // (self.chunk * BLOCK_CHUNKS)

    @property
    def differentiable(self) -> list[Tensor]:
        return [
            x
            for x in (self.q, self.k, self.v, *self.gates, *self.state[1:3], *self.state.gates)
            if x is not None
        ]

    def arranged(self) -> tuple[Layout, ChunkScan, ChunkBlock, tuple[Tensor, Tensor, Gates]]:
        layout = Layout(self.q.shape[0], self.q.shape[1], self.state, self.chunk, self.offsets)
        block, k, v, gates = arranged(layout, self.q, self.k, self.v, self.gates, self.state)
        return (
            layout,
            scan_for(self.net, self.rule, layout.folds, len(self.state.layers)),
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
    """The arguments are those of `remanence.ops.memorize`, already checked."""
    call = _Call(q, k, v, gates, state, offsets, chunk, net, rule)
    train = needs_grad([*call.differentiable, *state.layers])
    y, surprise, *rest = chunked_forward(*call.arguments, train)
    depth = len(state.layers)
    layers, (tail_k, tail_v), rest = tuple(rest[:depth]), rest[depth : depth + 2], rest[depth + 2 :]
    found = iter(rest)
    tails = Gates._make([None if gate is None else next(found) for gate in gates])
    return y, MemoryState(layers, tail_k, tail_v, tails, next(found), next(found)), surprise


def _forward(*arguments: Any) -> list[Tensor]:
    """Answers, surprise and the new state; then the states for backward, one tensor ``[saved m ...]`` a layer."""
    call, train = _Call.of(*arguments[:-1]), arguments[-1]
    state, heads = call.state, call.q.shape[2]
    layout, scan, block, rows = call.arranged()
    y, surprise, end, starts = scan_forward(
        scan, block, tuple(layer.flatten(0, 1) for layer in state.layers), BLOCK_CHUNKS, train
    )
    y, surprise = (from_chunks(x, heads) for x in (y, surprise))
    layers = tuple(layer.unflatten(0, (-1, heads)) for layer in end) if layout.folds else state.layers
    y, surprise = layout.back(y), layout.back(surprise[:, layout.lead :])
    new = layout.next_state(state, layers, *rows, (y, surprise))
    if not layout.folds:
        # No result may be an argument itself.
        new = new._replace(layers=tuple(layer.clone() for layer in layers))
    kept = []
    if train:
        kept = [layer.new_zeros(call.saved, *layer.flatten(0, 1).shape) for layer in state.layers]
        for index, start in enumerate(starts[1:]):
            for layer, first in zip(kept, start, strict=True):
                layer[index] = first
    results = [y, surprise, *new.tensors()]
    return [x.contiguous() for x in results] + kept


def _shapes(*arguments: Any) -> list[Tensor]:
    call, train = _Call.of(*arguments[:-1]), arguments[-1]
    state = call.state
    y, surprise = call.v.new_empty(call.v.shape), state.k.new_empty(call.q.shape[:3])
    kept = (
        [x.new_empty(call.saved, x.shape[0] * x.shape[1], *x.shape[2:]) for x in state.layers]
        if train
        else []
    )
    return [y, surprise, *[x.new_empty(x.shape) for x in state.tensors()], *kept]


def _backward(*arguments: Any) -> list[Tensor]:
    """The gradients of all that is differentiable, the state's layers last."""
    call, (saved, grads) = _Call.of(*arguments[:_ARGUMENTS]), arguments[_ARGUMENTS:]
    state, heads = call.state, call.q.shape[2]
    layout, scan, block, _ = call.arranged()
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
    g_surprise = layout.queries(g_surprise)
    if layout.lead:
        g_surprise = torch.nn.functional.pad(g_surprise, (0, 0, layout.lead, 0))
    g_y, g_surprise = (to_chunks(x, layout.chunks) for x in (layout.queries(g_y), g_surprise))
    g_end = tuple(grad.flatten(0, 1) for grad in g_layers) if layout.folds else ()
    found, g_start, _ = scan_backward(scan, block, starts, BLOCK_CHUNKS, g_y, g_surprise, g_end)
    g_q, *g_rows = [from_chunks(grad, heads).contiguous() for grad in found if grad is not None]
    new, old = [layout.back(g_q)], []
    for grad, g_tail in zip(g_rows, g_tails, strict=True):
        layout.tail_backward(g_tail, into=grad)
        before, here = layout.rows_backward(grad)
        new.append(here)
        old.append(before)
    first = [grad.unflatten(0, (-1, heads)) for grad in g_start]
    if not layout.folds:
        first = [a + b for a, b in zip(first, g_layers, strict=True)]
    return [x.contiguous() for x in (*new, *old, *first)]


def _gradients(*arguments: Any) -> list[Tensor]:
    call = _Call.of(*arguments[:_ARGUMENTS])
    return [x.new_empty(x.shape) for x in (*call.differentiable, *call.state.layers)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    layers = inputs[_LAYERS]
    # Answers, surprise and the state, without position and diverged.
    found = 2 + len(_Call.of(*inputs[:-1]).state.tensors()) - 2
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[found:])
    ctx.found = found
    ctx.depth, ctx.plain = len(layers), inputs[_PLAIN:_ARGUMENTS]
    ctx.save_for_backward(*inputs[:_LAYERS], *inputs[_LAYERS + 1 : _PLAIN], *layers, *output[found + 2 :])


def _autograd(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    inputs, (position, diverged), rest = saved[:_LAYERS], saved[_LAYERS : _PLAIN - 1], saved[_PLAIN - 1 :]
    layers, kept = list(rest[: ctx.depth]), list(rest[ctx.depth :])
    found = iter(chunked_backward(*inputs, layers, position, diverged, *ctx.plain, kept, grads[: ctx.found]))
    ours = [None if x is None else next(found) for x in inputs]
    return *ours, list(found), *[None] * (_ARGUMENTS - _LAYERS)


_unsafe = (torch.Tag.cudagraph_unsafe,)  # the host reads positions
chunked_forward = operator(
    "chunked_forward",
    _forward,
    f"({_CALL}, bool train) -> Tensor[]",
    _autograd,
    _setup,
    _shapes,
    tags=_unsafe,
)
chunked_backward = operator(
    "chunked_backward",
    _backward,
    f"({_CALL}, Tensor[] kept, Tensor?[] grads) -> Tensor[]",
    raise_on_double_backward,
    fake=_gradients,
    tags=_unsafe,
)
