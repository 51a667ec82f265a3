"""The kernels as a backend of the memory operator: arrange the inputs in chunks, run the kernels, and build
the new state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from remanence.ops.layout import SyncFreeLayout, gates_with_tail
from remanence.ops.nets import MLP
from remanence.ops.rules import LinearRule
from remanence.ops.state import DIVERGENCE_LIMIT, Gates, MemoryState
from remanence.ops.triton import linear, mlp
from remanence.runtime.positions import advance_position
from remanence.runtime.state import needs_grad

PIECE_CHUNKS = 256
"""The number of chunks computed at once in a call without gradients."""

Plan = mlp.Plan | linear.Plan
"""The plan of a two-layer or of a one-layer memory."""


def plan_of(net: MLP, rule: LinearRule, width: int, values: int, heads: int, chunk: int) -> Plan:
    """Return the plan for a memory of one or two layers. `width` and `values` are the widths of keys and
    values.
    """
    if net.depth == 1:
        return linear.plan_of(net, rule, width, values, heads, chunk)
    return mlp.plan_of(net, rule, width, heads, chunk)


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
    aligned: bool = False,
) -> tuple[Tensor, MemoryState, Tensor]:
    """Run the memory operator with the kernels. Returns the answers, the new state and the surprise.

    The arguments are those of `remanence.ops.memorize`. They must already be checked, also by
    `dispatch.memory_reason`. q, k and v have the dtype that the caller passed.
    """
    exact = state.k.dtype
    op = q.dtype if q.dtype == torch.bfloat16 else exact
    layout = SyncFreeLayout(q.shape[0], q.shape[1], state, chunk, offsets, aligned)
    q, k, v = (x.to(op) for x in (q, k, v))
    q, k, v = layout.query_rows(q), layout.rows_with_tail(state.k, k), layout.rows_with_tail(state.v, v)
    gates = gates_with_tail(layout, state, gates)
    rows, _, heads, width = q.shape
    inputs = [*[x.contiguous() for x in (q, k, v)], *[None if x is None else x.contiguous() for x in gates]]
    start = [layer.flatten(0, 1).contiguous() for layer in state.layers]
    train = needs_grad([*inputs, *start])
    plan = plan_of(net, rule, width, v.shape[-1], heads, chunk)
    # Without gradients a long call is computed in pieces, because the states at the starts of all chunks
    # could fill the GPU's memory.
    piece = layout.length if train else min(layout.length, PIECE_CHUNKS * chunk)
    y, surprise, nonfinite, ends = _pieces(plan, inputs, start, layout.totals, piece, layout.length, train)
    layers = (
        tuple(end.view(rows, heads, *end.shape[1:]) for end in ends)
        if layout.completes_chunk
        else state.layers
    )
    # The infinity norm is NaN if any entry is.
    largest = lambda x: torch.linalg.vector_norm(x.detach().flatten(1), torch.inf, 1)
    sizes = [
        largest(surprise) / DIVERGENCE_LIMIT,
        *(largest(layer) for layer in layers if layout.completes_chunk),
    ]
    diverged = (
        state.diverged | nonfinite.view(rows, -1).any(1) | ~(torch.stack(sizes) <= DIVERGENCE_LIMIT).all(0)
    )
    tail_k, tail_v = layout.next_tail(k).to(exact), layout.next_tail(v).to(exact)
    position = advance_position(state.position, layout.counts)
    new = MemoryState(layers, tail_k, tail_v, gates.map(layout.next_tail), position, diverged)
    return layout.to_batch(y), new, layout.to_batch(surprise)


def _pieces(
    plan: Plan,
    inputs: list[Tensor | None],
    ends: list[Tensor],
    totals: Tensor,
    piece: int,
    length: int,
    train: bool,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Run the kernels on `piece` tokens at a time. Returns the answers, the surprise, the flags of chunks
    whose answers are not finite, and the final layers.
    """
    run = linear.linear_forward if isinstance(plan, linear.Plan) else mlp.memory_forward
    results, count = [], 3 + len(ends)
    for first in range(0, length, piece):
        part = inputs
        if piece != length:
            part = [x if x is None else x[:, first : first + piece].contiguous() for x in inputs]
        left = (totals - first).clamp(0, piece).to(torch.int32)
        y, surprise, *ends, nonfinite = run(*part, *ends, left, train, *plan)[:count]
        results.append((y, surprise, nonfinite))
    y, surprise, nonfinite = (
        column[0] if len(results) == 1 else torch.cat(column, 1) for column in zip(*results, strict=True)
    )
    return y, surprise, nonfinite, ends
