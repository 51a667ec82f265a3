"""The chunk-parallel backend: a scan over chunks with checkpointing.

For backward, the scan saves its inputs and the states at the starts of about sqrt(n) blocks of chunks. The
states within a block are recomputed from the state at its start. They are not recovered by inverting the
recurrence, because dividing by a gate is unstable.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from remanence.ops.clamp import GradientClamp
from remanence.ops.layout import Layout, gates_with_tail
from remanence.ops.library import once_differentiable
from remanence.ops.nets import Net
from remanence.ops.rules import Rule, is_linear
from remanence.ops.scans import ChunkBlock, ChunkScan, Grad, choose_scan
from remanence.ops.state import Gates, MemoryState, Weights
from remanence.runtime.positions import positions_of
from remanence.runtime.state import needs_grad

INFERENCE_BLOCK = 16
"""The number of chunks whose answers are computed together when nothing is saved for backward."""


def scan_forward(
    scan: ChunkScan, s: ChunkBlock, state: Weights, stride: int, keep: bool
) -> tuple[Tensor, Tensor, Weights, list[Weights]]:
    """Scan all chunks in blocks of `stride` chunks. Return the answers ``[n m c e]``, the surprise ``[n m
    c]``, the end state and the state at the start of each block (an empty list unless `keep`).
    """
    starts: list[Weights] = []
    answers, surprises = [], []
    for start in range(0, s.k.shape[0], stride):
        if keep:
            starts.append(state)
        y, surprise, state = scan.forward(s.slice_chunks(slice(start, start + stride)), state)
        answers.append(y)
        surprises.append(surprise)
    return torch.cat(answers), torch.cat(surprises), state, starts


def scan_backward(
    scan: ChunkScan,
    s: ChunkBlock,
    starts: list[Weights],
    stride: int,
    g_y: Tensor,
    g_surprise: Tensor,
    g_end: tuple[Tensor, ...],
) -> tuple[list[Grad], list[Tensor], list[Tensor]]:
    """Return the gradients of the inputs (the fields of `s` except `complete`), of the initial state, and of
    the slow parameters. `starts` are the states that `scan_forward` kept, `g_end` is the gradient of the end
    state.
    """
    g_state, pieces, slow, clamp = list(g_end), [], [], GradientClamp(g_end, s.k.dtype)
    # Backward may be called under autocast, which must not lower the precision here.
    with torch.autocast(s.k.device.type, enabled=False):
        for index in range(len(starts) - 1, -1, -1):
            chunks = slice(index * stride, (index + 1) * stride)
            grads, g_state, g_slow = scan.backward(
                s.slice_chunks(chunks), starts[index], g_y[chunks], g_surprise[chunks], g_state, clamp
            )
            pieces.append(grads)
            slow.append(g_slow)
    clamp.add_to_counter()
    joined = [None if parts[0] is None else torch.cat(parts[::-1]) for parts in zip(*pieces, strict=True)]
    return joined, g_state, [torch.stack(parts).sum(0) for parts in zip(*slow, strict=True)]


class _ScanFunction(torch.autograd.Function):
    """The scan over all chunks of a call, as a differentiable function of the inputs, gates, state and slow
    parameters.
    """

    @staticmethod
    def forward(ctx: Any, scan: ChunkScan, keep_for_backward: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        s, state = _split_tensors(tensors, scan)
        stride = math.isqrt(s.k.shape[0] - 1) + 1 if keep_for_backward else INFERENCE_BLOCK
        y, surprise, end, starts = scan_forward(scan, s, state, stride, keep_for_backward)
        if keep_for_backward:
            ctx.scan, ctx.stride, ctx.inputs = scan, stride, len(tensors)
            ctx.save_for_backward(*tensors, *[layer for state in starts[1:] for layer in state])
        return y, surprise, *end

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_y: Tensor, g_surprise: Tensor, *g_end: Tensor) -> tuple:
        tensors = ctx.saved_tensors  # read once: activation checkpointing recomputes them on access
        saved = tensors[ctx.inputs :]
        s, state = _split_tensors(tensors[: ctx.inputs], ctx.scan)
        depth = len(state)
        starts = [state, *[saved[i : i + depth] for i in range(0, len(saved), depth)]]
        joined, g_state, slow = scan_backward(ctx.scan, s, starts, ctx.stride, g_y, g_surprise, g_end)
        return None, None, *joined, None, *g_state, *slow


def _split_tensors(tensors: tuple[Tensor, ...], scan: ChunkScan) -> tuple[ChunkBlock, Weights]:
    """Split the flat arguments of `_ScanFunction` into the inputs of the chunks and the state. Slow
    parameters are dropped.
    """
    inputs = len(ChunkBlock._fields)
    return ChunkBlock._make(tensors[:inputs]), tensors[inputs : len(tensors) - len(scan.slow_parameters)]


def _run_scan(
    scan: ChunkScan, block: ChunkBlock, state: MemoryState
) -> tuple[Tensor, Tensor, Weights, Weights]:
    """Return the answers ``[n m c e]`` and surprise ``[n m c]`` of all chunks, and the layers and the buffers
    of the state after them.
    """
    start = [layer.flatten(0, 1) for layer in (*state.layers, *state.buffers)]
    tensors = (*block, *start, *scan.slow_parameters)
    needed = needs_grad(tensors)
    y, surprise, *end = _ScanFunction.apply(scan, needed, *tensors)
    if not scan.completes_chunk:
        return y, surprise, state.layers, state.buffers
    ends, depth = tuple(x.unflatten(0, state.layers[0].shape[:2]) for x in end), len(state.layers)
    return y, surprise, ends[:depth], ends[depth:]


def to_chunks(x: Tensor, n: int) -> Tensor:
    """Split rows ``[r n*c h ...]`` into n chunks ``[n r*h c ...]``."""
    return rearrange(x, "r (n c) h ... -> n (r h) c ...", n=n).contiguous()


def from_chunks(x: Tensor, heads: int) -> Tensor:
    """Join chunks ``[n r*h c ...]`` to rows ``[r n*c h ...]``: the inverse of `to_chunks`."""
    return rearrange(x, "n (r h) c ... -> r (n c) h ...", h=heads)


def memorize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    state: MemoryState,
    net: Net,
    rule: Rule,
    chunk: int,
    offsets: list[int] | None,
) -> tuple[Tensor, MemoryState, Tensor]:
    """Run `remanence.ops.memorize` on this backend. The arguments must have been checked. Returns the
    answers, the new state and the surprise.
    """
    layout = Layout(q.shape[0], q.shape[1], state, chunk, offsets)
    block, k, v, gates = arrange_chunks(layout, q, k, v, gates, state)
    scan = choose_scan(net, rule, layout.completes_chunk, len(state.layers))
    y, surprise, layers, buffers = _run_scan(scan, block, state)
    y, surprise = (from_chunks(x, q.shape[2]) for x in (y, surprise))
    y, surprise = (
        layout.to_batch(y),
        layout.to_batch(surprise[:, layout.query_offset :] if layout.query_offset else surprise),
    )
    return y, layout.next_state(state, layers, k, v, gates, (y, surprise), buffers), surprise


def arrange_chunks(
    layout: Layout, q: Tensor, k: Tensor, v: Tensor, gates: Gates, state: MemoryState
) -> tuple[ChunkBlock, Tensor, Tensor, Gates]:
    """Return the inputs of a call as chunks, and then its keys, values and gates as rows ``[r length ...]``
    that begin with the state's tail.
    """
    k, v, gates = (
        layout.rows_with_tail(state.k, k),
        layout.rows_with_tail(state.v, v),
        gates_with_tail(layout, state, gates),
    )
    inputs = [layout.query_rows(q), k, v, *gates]
    complete = layout.complete_chunks().repeat_interleave(q.shape[2], 1)
    return (
        ChunkBlock._make([*[None if x is None else to_chunks(x, layout.chunks) for x in inputs], complete]),
        k,
        v,
        gates,
    )


def current_weights(state: MemoryState, net: Net, rule: Rule) -> Weights:
    """Return the weights ``[r h ...]`` after all tokens so far, as if the incomplete chunk ended here. For a
    rule with ``read="chunk"``, return those at the start of the incomplete chunk.
    """
    rows, heads = state.k.shape[0], state.k.shape[2]
    slots = int((state.position % state.chunk).max()) if rows else 0
    if slots == 0 or rule.read == "chunk":
        return state.weights
    if not is_linear(rule):
        return _current_weights_by_rule(state, net, rule)
    # Unused slots get gates without effect: step size 0, momentum 0, retention 1.
    unread = (
        torch.arange(slots, device=state.k.device) >= (state.position % state.chunk).unsqueeze(-1)
    ).unsqueeze(-1)
    neutral = (-torch.inf, -torch.inf, 0.0)
    tails = zip(state.gates, neutral, strict=True)
    gates = [None if tail is None else tail[:, :slots].masked_fill(unread, fill) for tail, fill in tails]
    complete = torch.ones(1, rows * heads, dtype=torch.bool, device=state.k.device)
    inputs = [state.k[:, :0], state.k[:, :slots], state.v[:, :slots], *gates]
    block = ChunkBlock._make([*[None if x is None else to_chunks(x, 1) for x in inputs], complete])
    return tuple(
        layer[:, :, 0]
        for layer in _run_scan(choose_scan(net, rule, True, len(state.layers)), block, state)[2]
    )


def _current_weights_by_rule(state: MemoryState, net: Net, rule: Rule) -> Weights:
    """Compute `current_weights` for a rule that is not linear, where unused slots cannot be given gates
    without effect. Rows whose incomplete chunks have the same length are computed together.
    """
    tails = [position % state.chunk for position in positions_of(state.position)]
    order, parts = [], []
    for slots in sorted(set(tails)):
        chosen = [row for row, tail in enumerate(tails) if tail == slots]
        part = state.rows(chosen)
        order += chosen
        if slots:
            complete = torch.ones(1, len(chosen) * state.k.shape[2], dtype=torch.bool, device=state.k.device)
            inputs = [
                part.k[:, :0],
                *[None if x is None else x[:, :slots] for x in (part.k, part.v, *part.gates)],
            ]
            block = ChunkBlock._make([*[None if x is None else to_chunks(x, 1) for x in inputs], complete])
            scan = choose_scan(net, rule, True, len(state.layers))
            part = part._replace(layers=_run_scan(scan, block, part)[2])
        parts.append(part.weights)
    back = torch.tensor(order, device=state.k.device).argsort()
    return tuple(torch.cat(weight)[back] for weight in zip(*parts, strict=True))
