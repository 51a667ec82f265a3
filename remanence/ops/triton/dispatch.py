"""The kernels as a tier of the operator: what they can run, whether a chip can hold them, and a call from layout to state."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from remanence.core.state import advanced, trains
from remanence.ops.layout import DeviceLayout, gates_rows
from remanence.ops.nets import MLP, Net
from remanence.ops.rules import Rule
from remanence.ops.state import Gates, MemoryState
from remanence.ops.triton import linear as fused_linear
from remanence.ops.triton import mlp as fused
from remanence.ops.triton.launch import WIDEST, interpreted, kernels
from remanence.ops.triton.resources import lacking

PIECE = 256
"""Chunks of a call without gradients that are under way at once."""

Plan = fused.Plan | fused_linear.Plan


def unsupported(
    net: Net, rule: Rule, width: int, values: int, chunk: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why a call with keys and values of these widths cannot run here, in words; None if it can."""
    if not isinstance(net, MLP) or net.depth > 2 or net.bias:
        return "the kernels know MLP memories of depth 1 and depth 2 without bias"
    if net.depth == 1:
        if not isinstance(rule.loss, str) or (rule.decay_first and rule.anchor != "token"):
            return "the kernels know, for depth 1, the squared and the dot loss, and decay_first only anchored at the token"
    elif rule.anchor != "chunk" or rule.decay_first or rule.loss != "squared":
        return "the kernels know the squared loss, anchored at the chunk's start, without decay_first"
    if not 1 <= min(width, values) <= max(width, values) <= WIDEST:
        return f"the kernels know head widths up to {WIDEST}, got {max(width, values)}"
    if not 1 <= chunk <= WIDEST:
        return f"the kernels know chunks up to {WIDEST}, got {chunk}"
    if kernels() is None:
        return "triton cannot be imported (pip install 'remanence[triton]')"
    if interpreted():
        return None
    if device.type != "cuda":
        return f"the kernels run on CUDA (or under TRITON_INTERPRET=1), got {device.type}"
    return "the kernels compute in float32, got float64" if dtype == torch.float64 else None


def plan_of(net: MLP, rule: Rule, width: int, values: int, heads: int, chunk: int) -> Plan:
    if net.depth == 1:
        return fused_linear.plan_of(net, rule, width, values, heads, chunk)
    return fused.plan_of(net, rule, width, heads, chunk)


def fits(plan: Plan, op: torch.dtype, device: torch.device, train: bool) -> str | None:
    """Why a GPU cannot hold these kernels, in words; None if it can. Decided by building them, once, before any is launched."""
    if interpreted() or device.type != "cuda" or torch.compiler.is_compiling():
        return None
    chip = torch.cuda.get_device_properties(device)
    shared = chip.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return _fits(plan._replace(heads=1), op, 10 * chip.major + chip.minor, shared, train)


@cache
def _fits(plan: Plan, op: torch.dtype, arch: int, shared: int, train: bool) -> str | None:
    written = kernels()
    if written is None:
        return None
    if isinstance(plan, fused_linear.Plan):
        return lacking(written, fused_linear.launches(plan, op, arch, train), arch, shared)
    return lacking(written, fused.launches(plan, op, arch, train), arch, shared)


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
    aligned: bool = False,
) -> tuple[Tensor, MemoryState, Tensor]:
    """The arguments are those of `remanence.ops.memorize`, already checked, q, k and v in the dtype they came in."""
    reason = unsupported(net, rule, q.shape[-1], v.shape[-1], chunk, q.dtype, q.device)
    if reason is not None or not isinstance(net, MLP):
        raise ValueError(f"backend: 'triton' cannot run this call: {reason}")
    exact = state.k.dtype
    op = q.dtype if q.dtype == torch.bfloat16 else exact
    layout = DeviceLayout(q.shape[0], q.shape[1], state, chunk, offsets, aligned)
    q, k, v = (x.to(op) for x in (q, k, v))
    q, k, v = layout.queries(q), layout.rows(state.k, k), layout.rows(state.v, v)
    gates = gates_rows(layout, state, gates)
    rows, _, heads, width = q.shape
    inputs = [*[x.contiguous() for x in (q, k, v)], *[None if x is None else x.contiguous() for x in gates]]
    start = [layer.flatten(0, 1).contiguous() for layer in state.layers]
    train = trains([*inputs, *start])
    plan = plan_of(net, rule, width, v.shape[-1], heads, chunk)
    reason = fits(plan, op, q.device, train)
    if reason is not None:
        raise ValueError(f"backend: 'triton' cannot run this call: {reason}")
    operator = fused_linear.linear_forward if net.depth == 1 else fused.memory_forward
    # Without gradients nothing is kept, so a long call goes piece by piece: the states at all chunks' starts would fill a GPU.
    piece = layout.length if train else min(layout.length, PIECE * chunk)
    pieces, ends = [], start
    for first in range(0, layout.length, piece):
        some = (
            inputs if piece == layout.length else [x if x is None else x[:, first : first + piece].contiguous() for x in inputs]
        )
        left = (layout.totals - first).clamp(0, piece).to(torch.int32)
        y, surprise, *ends, bad = operator(*some, *ends, left, train, *plan)[: 3 + len(start)]
        pieces.append((y, surprise, bad))
    y, surprise, bad = (column[0] if len(pieces) == 1 else torch.cat(column, 1) for column in zip(*pieces, strict=True))
    layers = tuple(end.view(rows, heads, *end.shape[1:]) for end in ends) if layout.folds else state.layers
    outcomes = [x.detach().flatten(1) for x in (surprise, *(layers if layout.folds else ()))]
    largest = torch.stack([torch.linalg.vector_norm(x, torch.inf, 1) for x in outcomes])  # NaN is the largest of all
    diverged = state.diverged | bad.view(rows, -1).any(1) | ~largest.isfinite().all(0)
    tail_k, tail_v = layout.tail(k).to(exact), layout.tail(v).to(exact)
    new = MemoryState(layers, tail_k, tail_v, gates.map(layout.tail), advanced(state.position, layout.counts), diverged)
    return layout.back(y), new, layout.back(surprise)
