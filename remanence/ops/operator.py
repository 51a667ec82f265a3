"""The operator as people call it: checks what came, chooses the backend, says which."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.func import vmap

from remanence.core.state import trains
from remanence.ops import chunked, opaque, reference
from remanence.ops.checks import check_call, check_chunk, check_kinds, check_offsets, check_start, check_state, check_values
from remanence.ops.layout import from_rows, to_rows
from remanence.ops.nets import MLP, NETS, Net
from remanence.ops.rules import RULES, Rule
from remanence.ops.state import Gates, MemoryState, Weights, fresh
from remanence.ops.triton import dispatch as gpu
from remanence.ops.triton import layer

log = logging.getLogger("remanence")

BACKENDS: dict[str, Callable[..., tuple[Tensor, MemoryState, Tensor]]] = {
    "reference": reference.memorize,
    "chunked": chunked.memorize,
    "compiled": chunked.compiled,
    "triton": gpu.memorize,
}


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
    """The state before anything was read: `rows` copies of the per-head initial weights ``[h ...]``, nothing else.

    `width` is the head width; it is read off the last layer's columns unless a net of your own has other shapes. `keys` is the
    keys' width where it is another than the values', as a matrix allows. `momentum`, per row ``[r h ...]``, is zero unless given.
    """
    check_chunk(chunk)
    check_start(weights, momentum, rows, rule)
    width = weights[-1].shape[-1] if width is None else width
    keys = width if keys is None else keys
    return fresh(weights, momentum, rows, chunk=chunk, keys=keys, values=width, has_momentum=rule.momentum, forget=rule.forget)


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
    offsets: Int[Tensor, "r+1"] | Sequence[int] | None = None,
    aligned: bool = False,
    backend: str = "auto",
    check: bool | None = None,
) -> tuple[Float[Tensor, "b t h e"], MemoryState, Float[Tensor, "b t h"]]:
    """Read tokens into a memory and ask it: answers, the state afterwards, and how surprising each token was.

    Every token is written before it is asked about (eq. 15's read is inclusive), with the gradient taken at the weights of
    its chunk's start. Differentiable in q, k, v, the gates, and the state's weights, momentum and tail. Answers have q's
    dtype; the arithmetic, the state and the surprise are float32, or float64 if q is (the triton backend multiplies bfloat16
    operands as they are, and adds up in float32).

    Args:
        q, k, v: queries, keys, values. Keys should be normalised: the step size is relative to their squared length. Values
            have the keys' width, or any where the net is a matrix (`NETS["linear"]`); answers have the values'.
        gates: log step size, log momentum, log of what is kept, ``[b t h]`` each; see `Gates`.
        state: from `start` or from the call before. One row per batch row, or per document if packed.
        net: what the memory is: `MLP(...)`, an entry of `NETS`, or any object with ``init`` and ``apply``.
        rule: how it changes: `Rule(...)` or an entry of `RULES`.
        chunk: tokens that share the gradient's anchor. Part of what the model is: another chunk is another function.
        offsets: for documents packed one behind the other in a single batch row: 0, each one's end, the last being t.
        aligned: your word that every row stands at a chunk's border, as at a document's start. The kernels then rearrange
            nothing; without it they neither ask the device where a row stands nor wait for it, but copy.
        backend: "auto", or one of `BACKENDS`.
        check: whether to look at values (finite, gates in range). None: on the CPU only, since on a GPU a look waits for it. What
            is not finite and not looked at raises the state's flag, and can reach the whole of its own chunk.

    Returns:
        answers, the new state, and the surprise: the inner loss of each token and head before it was written.

    Raises:
        ValueError: an argument's shape, dtype or value is not what it should be; the message names it.
    """
    borders = check_call(q, k, v, gates, state, net, rule, chunk, offsets)
    if check is None:
        check = q.device.type == "cpu" and not torch.compiler.is_compiling()
    if check:
        check_values(q, k, v, gates)
    train = trains([q, k, v, *gates.tensors(), *state.layers])
    backend = _choose(backend, q, v, net, rule, chunk, train)
    if q.shape[1] == 0:
        return v, state, q.new_zeros(q.shape[:3], dtype=state.k.dtype)
    exact = state.k.dtype
    operands = (q, k, v) if backend == "triton" else (q.to(exact), k.to(exact), v.to(exact))
    known = {"aligned": aligned} if backend == "triton" else {}
    run = BACKENDS[backend]
    if backend == "chunked" and torch.compiler.is_compiling():
        run = opaque.memorize if opaque.knows(net, rule) else torch.compiler.disable(run)
    with torch.autocast(q.device.type, enabled=False):
        y, new, surprise = run(*operands, gates, state, net, rule, chunk, borders, **known)
    return y.to(q.dtype), new, surprise


def recall(
    q: Float[Tensor, "b t h f"],
    state: MemoryState,
    *,
    net: Net = NETS["titans"],
    rule: Rule = RULES["titans"],
    offsets: Int[Tensor, "r+1"] | Sequence[int] | None = None,
) -> Float[Tensor, "b t h e"]:
    """Ask a memory without writing to it: every query meets the weights as they are after all that was read."""
    check_kinds(net, rule)
    if not isinstance(state, MemoryState):
        raise ValueError(f"state: expected a MemoryState, got {type(state).__name__}")
    check_state(q, state, net, rule, state.chunk, offsets)
    return ask(q, settle(state, net=net, rule=rule), net=net, offsets=offsets)


def settle(state: MemoryState, *, net: Net = NETS["titans"], rule: Rule = RULES["titans"]) -> Weights:
    """A memory's weights ``[r h ...]`` as they are after all that was read, its open chunk included."""
    with torch.autocast(state.k.device.type, enabled=False):
        return chunked.settle(state, net, rule)


def ask(
    q: Float[Tensor, "b t h f"],
    weights: Weights,
    *,
    net: Net = NETS["titans"],
    offsets: Int[Tensor, "r+1"] | Sequence[int] | None = None,
) -> Float[Tensor, "b t h e"]:
    """What weights ``[r h ...]`` (from `settle`) answer, one row of them for each row of the batch or packed document."""
    rows = weights[0].shape[0]
    borders = check_offsets(offsets, q.shape[0], q.shape[1], rows)
    if q.shape[1] == 0:
        return q.new_zeros(*q.shape[:3], weights[-1].shape[-1]) if isinstance(net, MLP) else q
    with torch.autocast(q.device.type, enabled=False):
        matrix = isinstance(net, MLP) and net.rectangular and not net.bias
        if (
            matrix and q.dtype == torch.bfloat16 and layer.fits(q, width=max(q.shape[-1], weights[0].shape[-1]))
        ):  # as the kernels do
            asked, index = to_rows(q, borders)
            return from_rows(layer.by_heads(asked, weights[0]), index)
        asked, index = to_rows(q.to(weights[0].dtype), borders)
        y = vmap(vmap(net.apply, in_dims=(0, 1), out_dims=1))(weights, asked)
    return from_rows(y, index).to(q.dtype)


_said: set[str] = set()


def _choose(backend: str, q: Tensor, v: Tensor, net: Net, rule: Rule, chunk: int, train: bool) -> str:
    if backend == "auto":
        backend, why = "chunked", ""
        if q.device.type == "cuda":
            reason = gpu.unsupported(net, rule, q.shape[-1], v.shape[-1], chunk, q.dtype, q.device)
            reason = reason or _lacking(q, v, net, rule, chunk, train)
            backend, why = ("triton", "") if reason is None else ("chunked", f": {reason}")
        said = f"memory operator: backend {backend}{why}"
        if not torch.compiler.is_compiling() and said not in _said:
            _said.add(said)
            log.info("%s", said)
    elif backend not in BACKENDS:
        raise ValueError(f"backend: expected 'auto' or one of {', '.join(BACKENDS)}, got {backend!r}")
    return backend


def _lacking(q: Tensor, v: Tensor, net: Net, rule: Rule, chunk: int, train: bool) -> str | None:
    """What the GPU lacks for the kernels, which it should have: said once, since the call is slower without them."""
    if not isinstance(net, MLP):
        return None
    op = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
    reason = gpu.fits(gpu.plan_of(net, rule, q.shape[-1], v.shape[-1], q.shape[-2], chunk), op, q.device, train)
    if reason is not None and reason not in _said:
        _said.add(reason)
        log.warning("memory operator: backend chunked, without the kernels: %s", reason)
    return reason
