"""The two-layer memory on a GPU: the kernels behind one differentiable function.

Kept for backward are the inputs, P, and the state at every chunk's start in the inputs' dtype (``4 d h`` numbers a chunk and head
with momentum): the recurrence is walked once forwards and once backwards, never again and never inverted.
"""

from __future__ import annotations

import os
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from remanence.ops.layout import Layout, gates_rows
from remanence.ops.nets import MLP, Net
from remanence.ops.rules import Rule
from remanence.ops.state import Gates, MemoryState

WIDEST = 128
"""Head width, and chunk, of the largest tile."""

WARPS = {
    "coef_kernel": 8,
    "state_kernel": 8,
    "state_stream": 8,
    "read_kernel": 8,
    "read_backward": 8,
    "blend_backward": 4,
    "carry_kernel": 8,
    "carry_stream": 8,
    "keys_backward": 4,
    "coef_backward": 8,
}
"""Per program of each kernel."""

SHORT = {"read_kernel": 4, "read_backward": 4}
"""The same for chunks shorter than 64."""

STAGES = {"state_kernel": 2, "carry_kernel": 2}
"""Chunks under way at once in the kernels that never read back what they wrote; all others, and chips before Hopper, have one."""

REGISTERS = 64
"""Widest hidden layer whose state stays in registers; beyond it the state goes through L2 in blocks."""

BLOCKS = {
    "state_stream": 64,
    "carry_stream": 32,
    "read_kernel": 64,
    "read_backward": 64,
    "blend_backward": 32,
    "keys_backward": 32,
}
"""Those blocks, and the parallel kernels' tiles, along the hidden axis; half of it for heads wider than 64."""

PRECISION = "tf32x3"
"""Of products of float32 operands: three tensor-core products for one of (nearly) float32. "ieee" is exact and slow."""

APART = dict.fromkeys(("state_kernel", "state_stream", "read_kernel", "read_backward", "carry_kernel", "carry_stream"), True)
"""Whether these hold their products apart (`_dot_apart`) on chunks of 64 and more: fewer registers, nothing fetched early."""

EXACT: set[str] = set()
"""Kernels ("coef" for the coefficients' two) that multiply float32 operands with "ieee" nevertheless."""


@cache
def kernels() -> ModuleType | None:
    """The kernels' module, or None where Triton cannot be imported."""
    try:
        from remanence.ops import kernels as written
    except ImportError:
        return None
    if interpreted():
        _mend_interpreter()
    return written


def _mend_interpreter() -> None:
    """Triton 3.6 turns its scalars, arrays of one, into Python integers in a way that NumPy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def mended(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = mended


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def unsupported(net: Net, rule: Rule, width: int, chunk: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a call cannot run here, in words; None if it can."""
    if not isinstance(net, MLP) or net.depth > 2 or net.bias:
        return "the kernels know MLP memories of depth 1 and depth 2 without bias"
    if net.depth == 1:
        if not isinstance(rule.loss, str) or (rule.decay_first and rule.anchor != "token"):
            return "the kernels know, for depth 1, the squared and the dot loss, and decay_first only anchored at the token"
    elif rule.anchor != "chunk" or rule.decay_first or rule.loss != "squared":
        return "the kernels know the squared loss, anchored at the chunk's start, without decay_first"
    if not 1 <= width <= WIDEST:
        return f"the kernels know head widths up to {WIDEST}, got {width}"
    if not 1 <= chunk <= WIDEST:
        return f"the kernels know chunks up to {WIDEST}, got {chunk}"
    if kernels() is None:
        return "triton cannot be imported (pip install 'remanence[triton]')"
    if interpreted():
        return None
    if device.type != "cuda":
        return f"the kernels run on CUDA (or under TRITON_INTERPRET=1), got {device.type}"
    return "the kernels compute in float32, got float64" if dtype == torch.float64 else None


class Plan(NamedTuple):
    """What one call's kernels are compiled for."""

    width: int
    hidden: int
    chunk: int
    heads: int
    momentum: bool
    forget: bool
    norm: bool
    residual: bool
    gelu: bool
    precision: str

    @property
    def tile(self) -> int:
        return _power(self.chunk)

    @property
    def streams(self) -> bool:
        return _power(self.hidden) > REGISTERS or self.width > 64

    def block(self, kernel: str, op: torch.dtype) -> int:
        if kernel not in BLOCKS:
            return _power(self.hidden)
        # Wide heads and four-byte operands fill shared memory twice as fast, and twice again on long chunks.
        shrink = (self.width > 64) + (op != torch.bfloat16) * (1 + (self.tile > 64))
        return min(_power(self.hidden), max(16, BLOCKS[kernel] >> shrink))

    def coefficients(self, acc: torch.dtype, op: torch.dtype) -> dict[str, Any]:
        # Beside bfloat16 operands a product of gates need not be exacter than one tensor-core product of float32 is.
        precision = "tf32" if op == torch.bfloat16 else "ieee" if "coef" in EXACT else self.precision
        return {
            "CHUNK": self.chunk,
            "BC": self.tile,
            "MOMENTUM": self.momentum,
            "FORGET": self.forget,
            "ACC": _tl(acc),
            "PRECISION": precision,
        }

    def tiles(self, kernel: str, acc: torch.dtype, op: torch.dtype, train: bool = True) -> dict[str, Any]:
        constants = {
            "D": self.width,
            "BD": _power(self.width),
            "HIDDEN": self.hidden,
            "BH": self.block(kernel, op),
            "CHUNK": self.chunk,
            "BC": self.tile,
            "MOMENTUM": self.momentum,
            "ACC": _tl(acc),
            "OP": _tl(op),
            # Three products for one keep every operand twice in shared memory, which this kernel has no room for.
            "PRECISION": "ieee" if kernel in EXACT or (kernel == "carry_stream" and self.tile > 32) else self.precision,
        }
        if kernel not in ("blend_backward", "keys_backward"):
            constants["NORM"] = self.norm
        if kernel != "blend_backward":
            constants["RESIDUAL"] = self.residual
        if kernel.startswith(("state", "read")):
            constants["GELU"] = self.gelu
        if kernel in APART:
            constants["APART"] = self.tile >= 64 and APART[kernel]
        if kernel.startswith("carry"):
            constants["REACH"], constants["END"] = 1.0 / torch.finfo(acc).eps, torch.finfo(acc).max ** 0.5 * 1e-9
        if kernel.startswith("state") or kernel == "read_kernel":
            constants["TRAIN"] = train
        return constants


def _power(size: int) -> int:
    """Tiles are powers of two, and a matrix product's at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def _tl(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float64: tl.float64}[dtype]


@cache
def _hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def warps_of(name: str, tile: int) -> int:
    if tile < 64:
        return SHORT.get(name, WARPS[name])
    return max(WARPS[name], 8) if tile > 64 else WARPS[name]


def _launch(name: str, grid: tuple[int, ...], *tensors: Any, **constants: Any) -> None:
    if isinstance(tensors[0], FakeTensor):  # torch.compile asks for shapes only
        return
    stages = STAGES.get(name, 1) if _hopper() else 1
    warps = warps_of(name, constants["BC"])
    getattr(kernels(), name)[grid](*tensors, **constants, num_warps=warps, num_stages=stages)


def _empty(like: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


def _kept_norm(plan: Plan, like: Tensor, acc: torch.dtype, train: bool) -> tuple[Tensor, Tensor]:
    """LayerNorm's value and 1 / deviation at each token, where backward needs them."""
    if train and plan.norm:
        return torch.empty_like(like), _empty(like, *like.shape[:3], dtype=acc)
    return _empty(like, 0, dtype=like.dtype), _empty(like, 0, dtype=acc)


def _forward(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, gates: Gates, J1: Tensor, J2: Tensor, totals: Tensor, train: bool
) -> tuple[Tensor, ...]:
    """q, k, v ``[r L heads d]``, gates ``[r L heads]``, J ``[m p ..]``, totals ``[r]``; what backward needs comes last."""
    rows, L, heads = q.shape[:3]
    n, m = -(-L // plan.chunk), rows * heads
    acc, op, C = J1.dtype, q.dtype, plan.tile
    P, co = _empty(q, m, n, C, C, dtype=op), _empty(q, m, n, 4, C, dtype=acc)
    fold = _empty(q, m, n, 4, dtype=acc)
    log_gates = [gate if gate is not None else gates.log_step for gate in gates]
    _launch("coef_kernel", (n, m), *log_gates, totals, P, co, fold, L, n, heads, **plan.coefficients(acc, op))
    starts1, starts2 = (_empty(q, m, n, *J.shape[1:], dtype=op) for J in (J1, J2))
    end1, end2, errors = torch.empty_like(J1), torch.empty_like(J2), torch.empty_like(k)
    surprise = _empty(q, rows, L, heads, dtype=acc)
    values, rstds = _kept_norm(plan, k, acc, train)
    state = "state_stream" if plan.streams else "state_kernel"
    _launch(
        state, (m,),
        k, v, J1, J2, end1, end2, starts1, starts2, co, fold, errors, values, rstds, surprise, L, n, heads,
        **plan.tiles(state, acc, op, train),
    )  # fmt: skip
    y, bad = torch.empty_like(q), _empty(q, m, n, dtype=torch.int32)
    size = (m, n, C, plan.hidden) if train else (0,)
    tiles = [_empty(q, *size, dtype=op) for _ in range(5)]  # hiddens, slopes, firsts, bends, reads
    scores = _empty(q, *((m, n, C, C) if train else (0,)), dtype=op)
    answers, spreads = _kept_norm(plan, q, acc, train)
    _launch(
        "read_kernel", (n, m),
        q, k, starts1, starts2, P, co, errors, *tiles, scores, answers, spreads, y, bad, L, n, heads,
        **plan.tiles("read_kernel", acc, op, train),
    )  # fmt: skip
    kept = [P, co, fold, starts1, starts2, errors, values, rstds, *tiles, scores, answers, spreads]
    return y, surprise, end1, end2, bad, *kept


def _backward(
    plan: Plan, saved: tuple[Tensor, ...], gates: Gates, g_y: Tensor, g_surprise: Tensor, g_end1: Tensor, g_end2: Tensor
) -> tuple[Tensor, ...]:
    q, k, v, totals, P, co, fold, starts1, starts2, errors, values, rstds, *tiles, scores, answers, spreads = saved
    hiddens, slopes, firsts, bends, reads = tiles
    rows, L, heads = q.shape[:3]
    n, m = -(-L // plan.chunk), rows * heads
    acc, op = co.dtype, q.dtype
    g_q, g_k, g_v, g_D2 = (torch.empty_like(q) for _ in range(4))
    g_P, g_co, g_fold = torch.empty_like(P), torch.empty_like(co), torch.empty_like(fold)
    g_X2, g_D1 = torch.empty_like(reads), torch.empty_like(reads)
    g_J1, g_J2 = torch.empty_like(starts1), torch.empty_like(starts2)
    came = _empty(q, m, n, dtype=acc)
    _launch(
        "read_backward", (n, m),
        q, starts1, starts2, P, co, errors, hiddens, reads, scores, answers, spreads, g_y, g_surprise,
        g_q, g_P, g_co, g_X2, g_D1, g_D2, g_J1, g_J2, came, L, n, heads,
        **plan.tiles("read_backward", acc, op),
    )  # fmt: skip
    _launch(
        "blend_backward", (n, m),
        q, k, starts2, P, slopes, firsts, g_D1, g_q, g_k, g_P, g_D1, g_D2, L, n, heads,
        **plan.tiles("blend_backward", acc, op),
    )  # fmt: skip
    came_end = g_end1.abs().flatten(1).sum(1) + g_end2.abs().flatten(1).sum(1)
    g_first1, g_first2 = torch.empty_like(g_end1), torch.empty_like(g_end2)
    # In registers, chunks ahead can be fetched early, so what is written must not be what is read; streamed, memory comes first.
    carry, ends = "carry_stream", (g_D1, g_J1, g_J2)
    if not plan.streams:
        carry, ends = "carry_kernel", (torch.empty_like(g_D1), torch.empty_like(g_J1), torch.empty_like(g_J2))
    _launch(
        carry, (m,),
        k, v, starts2, co, fold, errors, values, rstds, hiddens, slopes, bends, g_surprise,
        g_X2, g_D1, g_D2, g_J1, g_J2, came, came_end, g_end1, g_end2, g_first1, g_first2, *ends, g_v, L, n, heads,
        **plan.tiles(carry, acc, op),
    )  # fmt: skip
    _launch(
        "keys_backward", (n, m),
        k, starts1, starts2, co, errors, hiddens, firsts, *ends, g_v, g_k, g_co, g_fold, L, n, heads,
        **plan.tiles("keys_backward", acc, op),
    )  # fmt: skip
    log_gates = [gate if gate is not None else gates.log_step for gate in gates]
    g_gates = [torch.empty_like(gates.log_step) for _ in range(3)]
    _launch("coef_backward", (n, m), *log_gates, totals, g_P, g_co, g_fold, *g_gates, L, n, heads, **plan.coefficients(acc, op))
    grads = [_empty(q, 0, dtype=acc) if gate is None else grad for gate, grad in zip(gates, g_gates, strict=True)]
    return g_q, g_k, g_v, *grads, g_first1, g_first2


# As operators of torch's own, opaque to its compiler: no graph breaks at them.
_GATES = "Tensor log_step, Tensor? log_momentum, Tensor? log_keep"
_INPUTS = f"Tensor q, Tensor k, Tensor v, {_GATES}, Tensor J1, Tensor J2, Tensor totals"
_PLAN = (
    "int width, int hidden, int chunk, int heads, bool momentum, bool forget, bool norm, bool residual, bool gelu, str precision"
)
_OUTPUTS, _KEPT, _GRADS = 5, 16, 8


def _tensors(count: int) -> str:
    return "(" + ", ".join(["Tensor"] * count) + ")"


def _forward_op(
    q: Tensor, k: Tensor, v: Tensor, log_step: Tensor, log_momentum: Tensor | None, log_keep: Tensor | None, J1: Tensor,
    J2: Tensor, totals: Tensor, train: bool, *plan: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _forward(Plan(*plan), q, k, v, Gates(log_step, log_momentum, log_keep), J1, J2, totals, train)


def _backward_op(
    log_step: Tensor, log_momentum: Tensor | None, log_keep: Tensor | None, saved: list[Tensor], grads: list[Tensor], *plan: Any
) -> tuple[Tensor, ...]:
    return _backward(Plan(*plan), tuple(saved), Gates(log_step, log_momentum, log_keep), *grads)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, log_step, log_momentum, log_keep, _, _, totals, _, *plan = inputs
    ctx.plan = plan
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[4:])
    ctx.save_for_backward(log_step, log_momentum, log_keep, q, k, v, totals, *output)


def _autograd(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    *gates, q, k, v, totals, y, surprise, end1, end2, _bad = ctx.saved_tensors[:12]
    saved = [q, k, v, totals, *ctx.saved_tensors[12:]]
    outputs = (y, surprise, end1, end2)
    given = [torch.zeros_like(x) if g is None else g.contiguous() for g, x in zip(grads[:4], outputs, strict=True)]
    g_q, g_k, g_v, *g_gates, g_J1, g_J2 = memory_backward(*gates, saved, given, *ctx.plan)
    kept = [None if gate is None else grad for gate, grad in zip(gates, g_gates, strict=True)]
    return g_q, g_k, g_v, *kept, g_J1, g_J2, None, None, *[None] * len(ctx.plan)


memory_forward = torch.library.custom_op(
    "remanence::memory_forward", _forward_op, mutates_args=(),
    schema=f"({_INPUTS}, bool train, {_PLAN}) -> {_tensors(_OUTPUTS + _KEPT)}",
)  # fmt: skip
memory_backward = torch.library.custom_op(
    "remanence::memory_backward", _backward_op, mutates_args=(),
    schema=f"({_GATES}, Tensor[] saved, Tensor[] grads, {_PLAN}) -> {_tensors(_GRADS)}",
)  # fmt: skip
memory_forward.register_fake(_forward_op)
memory_backward.register_fake(_backward_op)
memory_forward.register_autograd(_autograd, setup_context=_setup)


def memorize(
    q: Tensor, k: Tensor, v: Tensor, gates: Gates, state: MemoryState, net: Net, rule: Rule, chunk: int, offsets: list[int] | None
) -> tuple[Tensor, MemoryState, Tensor]:
    """The arguments are those of `remanence.ops.memorize`, already checked, q, k and v in the dtype they came in."""
    reason = unsupported(net, rule, q.shape[-1], chunk, q.dtype, q.device)
    if reason is not None or not isinstance(net, MLP):
        raise ValueError(f"backend: 'triton' cannot run this call: {reason}")
    exact = state.k.dtype
    op = q.dtype if q.dtype == torch.bfloat16 else exact
    layout = Layout(q.shape[0], q.shape[1], state, chunk, offsets, replay=True)
    q, k, v = layout.queries(q), layout.rows(state.k, k), layout.rows(state.v, v)
    gates = gates_rows(layout, state, gates)
    rows, _, heads, width = q.shape
    totals = torch.tensor(layout.totals, dtype=torch.int32, device=q.device)
    inputs = [*[x.to(op).contiguous() for x in (q, k, v)], *[None if x is None else x.contiguous() for x in gates]]
    start = [layer.flatten(0, 1).contiguous() for layer in state.layers]
    plan = Plan(
        width, state.layers[0].shape[-1], chunk, heads, rule.momentum, rule.forget, net.norm, net.residual,
        net.activation == "gelu", "ieee" if interpreted() else PRECISION,
    )  # fmt: skip
    train = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*inputs, *start))
    if net.depth == 1:
        from remanence.ops import fused_linear  # which is made of parts of this file

        shallow = fused_linear.plan_of(net, rule, width, chunk, heads)
        y, surprise, *ends, bad = fused_linear.run(*inputs[:3], Gates(*inputs[3:]), *start, totals, shallow, train)
    else:
        y, surprise, *ends, bad = memory_forward(*inputs, *start, totals, train, *plan)[:5]
    layers = tuple(end.unflatten(0, (rows, heads)) for end in ends) if layout.folds else state.layers
    diverged = state.diverged | bad.view(rows, -1).any(1) | ~surprise.detach().isfinite().flatten(1).all(1)
    for layer in layers if layout.folds else ():
        diverged = diverged | ~layer.detach().isfinite().flatten(1).all(1)
    position = state.position + torch.tensor(layout.counts, device=q.device)
    tail_k, tail_v = layout.tail(k).to(exact), layout.tail(v).to(exact)
    new = MemoryState(layers, tail_k, tail_v, gates.map(layout.tail), position, diverged)
    return layout.back(y), new, layout.back(surprise)
