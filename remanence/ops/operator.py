"""The memory operator: checks its arguments, chooses a backend and runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.func import vmap

from remanence.ops import chunked, opaque, reference
from remanence.ops.checks import (
    check_arguments,
    check_buffers,
    check_chunk,
    check_net_and_rule,
    check_offsets,
    check_start,
    check_state,
    check_values,
)
from remanence.ops.closed_form import unsupported_reason
from remanence.ops.layout import from_rows, to_rows
from remanence.ops.nets import MLP, NETS, Net, is_matrix
from remanence.ops.rules import RULES, Rule, is_linear, pack_state
from remanence.ops.state import Gates, MemoryState, Weights, initial_state
from remanence.ops.triton import dispatch, layer, memory
from remanence.runtime.state import needs_grad

BACKENDS: dict[str, Callable[..., tuple[Tensor, MemoryState, Tensor]]] = {
    "reference": reference.memorize,
    "chunked": chunked.memorize,
    "triton": memory.memorize,
}
"""The backends by name. Each is a function like `memorize` with checked arguments."""


def start(
    weights: Weights,
    rows: int,
    *,
    rule: Rule = RULES["titans"],
    chunk: int = 16,
    width: int | None = None,
    keys: int | None = None,
    momentum: Weights | None = None,
) -> MemoryState:
    """Return the state before any token is read, with `rows` copies of the initial weights ``[h ...]`` of
    each head.

    `width` is the head width. It defaults to the last dimension of the last weight; set it for a custom net
    whose weights have another shape. `keys` is the width of the keys if it differs from the width of the
    values, which is possible for a matrix memory. `momentum` ``[r h ...]`` is the initial momentum, zero by
    default.
    """
    check_chunk(chunk)
    check_start(weights, momentum, rows, rule)
    width = weights[-1].shape[-1] if width is None else width
    keys = width if keys is None else keys
    first = [weight.expand(rows, *weight.shape) for weight in weights]
    layers, buffers = pack_state(rule, first, momentum or _initial_buffers(weights, rows, rule))
    return initial_state(
        layers,
        buffers,
        chunk=chunk,
        keys=keys,
        values=width,
        momentum=rule.momentum,
        forget=rule.forget,
        forget_channels=rule.forget_channels,
    )


def _initial_buffers(weights: Weights, rows: int, rule: Rule) -> Weights:
    """Return the rule's buffers ``[r h ...]`` at the start of a document."""
    if is_linear(rule):
        return rule.init_state(tuple(weight.expand(rows, *weight.shape) for weight in weights))
    made = vmap(rule.init_state)(tuple(weights))
    check_buffers(made)
    dtype = weights[0].dtype
    return tuple(buffer.to(dtype).expand(rows, *buffer.shape).contiguous() for buffer in made)


def memorize(
    q: Float[Tensor, "b t h f"],
    k: Float[Tensor, "b t h f"],
    v: Float[Tensor, "b t h e"],
    gates: Gates,
    state: MemoryState,
    *,
    net: Net = NETS["titans"],
    rule: Rule = RULES["titans"],
    chunk: int = 16,
    offsets: Int[Tensor, " r+1"] | Sequence[int] | None = None,
    aligned: bool = False,
    backend: str = "auto",
    check: bool | None = None,
) -> tuple[Float[Tensor, "b t h e"], MemoryState, Float[Tensor, "b t h"]]:
    """Write tokens to a memory and query it. Return the answers, the new state and the surprise of each token.

    Every token is written before it is queried (the read of eq. 15 is inclusive), with the gradient taken at the
    weights of its chunk's start, unless the rule declares otherwise (see `Rule`). The result is differentiable in q, k,
    v, the gates, and the state's weights, buffers and tail. Answers have the dtype of q. The
    arithmetic, the state and the surprise are float32, or float64 if q is float64 (the triton backend multiplies
    bfloat16 operands and accumulates in float32).

    Args:
        q: queries.
        k: keys. They should be normalised: the step size is relative to their squared length.
        v: values. Their width is that of the keys, or any width if the net is a matrix (`NETS["linear"]`). Answers
            have the width of the values.
        gates: logarithms of step size, momentum and retention, ``[b t h]`` each (for a rule with `forget_channels`, the
            last is ``[b t h f]``); see `Gates`.
        state: the result of `start` or of the previous call. It has one row per batch row, or per packed document.
        net: the function that the memory computes: `MLP(...)`, an entry of `NETS`, or any object with ``init``
            and ``apply``.
        rule: how the memory is updated: an entry of `RULES`, `Rule(...)`, or an instance of a subclass of `Rule`.
        chunk: number of tokens whose gradients are taken at the same weights. It is part of the model: a different
            chunk computes a different function.
        offsets: for documents packed in a single batch row: 0, then the end of each document; the last one is t.
        aligned: True if every row is at a chunk border, as at the start of a document. The kernels then need
            not copy the tokens to align the rows. If False they copy, because checking the positions would
            synchronise with the device.
        backend: "auto", or one of `BACKENDS`.
        check: whether to check values (finite, gates in range). None: on the CPU only, since a check synchronises with
            a GPU. An unchecked value that is not finite sets `state.diverged` and can affect its whole chunk.

    Returns:
        answers, the new state, and the surprise: the inner loss of each token and head before it was written.

    Raises:
        ValueError: an argument has a wrong shape, dtype or value; the message names the argument.
    """
    borders = check_arguments(q, k, v, gates, state, net, rule, chunk, offsets)
    if check is None:
        check = q.device.type == "cpu" and not torch.compiler.is_compiling()
    if check:
        check_values(q, k, v, gates)
    if backend not in BACKENDS and backend != "auto":
        raise ValueError(f"backend: expected 'auto' or one of {', '.join(BACKENDS)}, got {backend!r}")
    if q.shape[0] == 0 or q.shape[1] == 0:
        return v, state, q.new_zeros(q.shape[:3], dtype=state.k.dtype)
    backend = _choose_backend(backend, q, k, v, gates, state, net, rule, chunk)
    exact = state.k.dtype
    operands = (q, k, v) if backend == "triton" else (q.to(exact), k.to(exact), v.to(exact))
    known = {"aligned": aligned} if backend == "triton" else {}
    run = BACKENDS[backend]
    if backend == "chunked" and torch.compiler.is_compiling():
        run = opaque.memorize if unsupported_reason(net, rule) is None else torch.compiler.disable(run)
    with torch.autocast(q.device.type, enabled=False):
        y, new, surprise = run(*operands, gates, state, net, rule, chunk, borders, **known)
    return y.to(q.dtype), new, surprise


def _choose_backend(
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    state: MemoryState,
    net: Net,
    rule: Rule,
    chunk: int,
) -> str:
    """Return the name of the backend that runs a call. For "auto", `dispatch` decides whether the kernels can
    run it.
    """
    if backend not in ("auto", "triton"):
        return backend
    train = needs_grad([q, k, v, *gates, *state.layers, *state.buffers, state.k, state.v, *state.gates])
    if backend == "auto":
        return dispatch.memory_backend(q, v, net, rule, chunk, train)
    reason = dispatch.memory_reason(q, v, net, rule, chunk, train)
    if reason is not None:
        raise ValueError(f"backend: 'triton' cannot run this call: {reason}")
    return backend


def recall(
    q: Float[Tensor, "b t h f"],
    state: MemoryState,
    *,
    net: Net = NETS["titans"],
    rule: Rule = RULES["titans"],
    offsets: Int[Tensor, " r+1"] | Sequence[int] | None = None,
) -> Float[Tensor, "b t h e"]:
    """Return the answers of a memory to queries, from its current weights. Nothing is written to the memory."""
    check_net_and_rule(net, rule)
    if not isinstance(state, MemoryState):
        raise ValueError(f"state: expected a MemoryState, got {type(state).__name__}")
    check_state(q, state, net, rule, state.chunk, offsets)
    return query(q, current_weights(state, net=net, rule=rule), net=net, offsets=offsets)


def current_weights(
    state: MemoryState, *, net: Net = NETS["titans"], rule: Rule = RULES["titans"]
) -> Weights:
    """Return the weights ``[r h ...]`` of a memory after all tokens so far, including those of the incomplete
    chunk. For a rule with ``read="chunk"``, return the weights at the start of that chunk.
    """
    with torch.autocast(state.k.device.type, enabled=False):
        return chunked.current_weights(state, net, rule)


def query(
    q: Float[Tensor, "b t h f"],
    weights: Weights,
    *,
    net: Net = NETS["titans"],
    offsets: Int[Tensor, " r+1"] | Sequence[int] | None = None,
) -> Float[Tensor, "b t h e"]:
    """Return the answers of given weights ``[r h ...]`` (see `current_weights`). The weights have one row per
    batch row or packed document.
    """
    rows = weights[0].shape[0]
    borders = check_offsets(offsets, q.shape[0], q.shape[1], rows)
    if q.shape[0] == 0 or q.shape[1] == 0:
        return q.new_zeros(*q.shape[:3], weights[-1].shape[-1]) if isinstance(net, MLP) else q
    with torch.autocast(q.device.type, enabled=False):
        widest = max(q.shape[-1], weights[0].shape[-1])
        # This rounds in the same way as the kernels.
        if is_matrix(net) and q.dtype == torch.bfloat16 and layer.is_supported(q, width=widest):
            queries, index = to_rows(q, borders)
            return from_rows(layer.per_head_matmul(queries, weights[0]), index)
        queries, index = to_rows(q.to(weights[0].dtype), borders)
        y = vmap(vmap(net.apply, in_dims=(0, 1), out_dims=1))(weights, queries)
    return from_rows(y, index).to(q.dtype)
