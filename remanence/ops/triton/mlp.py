"""The two-layer memory on a GPU: one differentiable function that launches the kernels.

The tensors saved for backward include the inputs, P, and the state at the start of every chunk in the dtype
of the inputs (``4 d h`` numbers per chunk and head with momentum). The recurrence over the chunks runs once
forwards and once backwards; backward neither repeats nor inverts it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from remanence.ops.clamp import clamp_counter
from remanence.ops.nets import MLP
from remanence.ops.rules import LinearRule
from remanence.ops.state import Gates
from remanence.ops.triton.autograd import empty_grads, memory_operator
from remanence.ops.triton.launch import (
    arch,
    coefficients,
    interpreted,
    launch,
    power,
    precision,
    processors,
    side,
    triton_type,
)
from remanence.ops.triton.resources import Constants, Launch, Record, recording

WARPS = {
    "coef_kernel": 4,
    "state_kernel": 8,
    "state_stream": 8,
    "read_kernel": 4,
    "read_backward": 4,
    "blend_backward": 4,
    "carry_kernel": 8,
    "carry_stream": 8,
    "keys_backward": 4,
    "coef_backward": 4,
}
"""The number of warps of a program, by kernel. Tiles of more than 64 tokens use at least 8."""

STAGES = {"state_kernel": 2, "carry_kernel": 2}
"""The number of chunks that are loaded ahead, for the kernels that never read back their own results. It is 1
in all other kernels, and on GPUs before Hopper.
"""

REGISTERS = 64
"""The largest hidden width of which one program keeps the state in registers. A wider state is kept in global
memory (in practice, L2) and processed in blocks.
"""

SHARE = 64
"""The width of one program's block of the hidden axis, where several programs share a memory. They do so if
there are too few rows and heads to occupy the GPU otherwise.
"""

BLOCKS = {
    "state_stream": 64,
    "carry_stream": 64,
    "read_kernel": 64,
    "read_backward": 64,
    "blend_backward": 64,
    "keys_backward": 64,
}
"""Block size along the hidden axis in the kernels that process it in blocks. It is halved for heads wider
than 64, and reduced for float32.
"""

APART = dict.fromkeys(
    ("state_kernel", "state_stream", "read_kernel", "read_backward", "carry_kernel", "carry_stream"), True
)
"""Whether a kernel computes its products in separate loops (`dot_apart`) for chunks longer than 32. This
saves registers but prevents prefetching.
"""


class Plan(NamedTuple):
    """The values that the kernels of one call are compiled for."""

    width: int
    """Channels of a head."""
    hidden: int
    """Width of the hidden layer."""
    chunk: int
    """Tokens of a chunk."""
    heads: int
    """Number of heads."""
    momentum: bool
    """Whether the rule has momentum."""
    forget: bool
    """Whether the rule has a forget gate."""
    norm: bool
    """Whether the memory ends with a LayerNorm."""
    residual: bool
    """Whether the memory adds its input to its output."""
    gelu: bool
    """Whether the activation is GELU; otherwise SiLU."""
    precision: str
    """The `input_precision` of Triton for float32 products."""
    chip: int = 0
    """Compute capability (90 for 9.0), or 0 if there is no GPU or `for_device` was not called yet."""
    shares: int = 1
    """The number of programs that share one memory, each with a block of its hidden axis."""

    def for_device(self, programs: int, device: torch.device) -> Plan:
        """Return the plan for a device. The hidden axis is split between programs if the GPU has a processor
        for each of them. `programs` is the number of rows times heads.
        """
        here = self._replace(chip=arch(device))
        shares = power(self.hidden) // SHARE
        if (
            interpreted()
            or device.type != "cuda"
            or self.width > 64
            or shares < 2
            or programs * shares > processors(device)
        ):
            return here
        return here._replace(shares=shares)

    @property
    def tile(self) -> int:
        """The number of rows of a tile that holds a chunk."""
        return power(self.chunk)

    @property
    def streams(self) -> bool:
        """Whether the state is processed in blocks through global memory, because it does not fit into
        registers.
        """
        return power(self.hidden) // self.shares > REGISTERS or self.width > 64

    def block(self, kernel: str, op: torch.dtype) -> int:
        """Return the tile size of a kernel along the hidden axis, for operands of dtype `op`."""
        if kernel not in BLOCKS:
            return side(power(self.hidden) // self.shares, op, self.chip)
        # Wide heads and 4-byte operands each double the use of shared memory; with 4-byte operands, long
        # chunks double it again.
        shrink = (self.width > 64) + (op != torch.bfloat16) * (1 + (self.tile > 64))
        return side(min(power(self.hidden), max(16, BLOCKS[kernel] >> shrink)), op, self.chip)

    def coefficients(self, acc: torch.dtype, op: torch.dtype) -> Constants:
        """Return the compile-time arguments of the kernels in kernels/coef.py."""
        return coefficients(self.chunk, self.momentum, self.forget, acc, op)

    def tiles(self, kernel: str, acc: torch.dtype, op: torch.dtype, train: bool = True) -> Constants:
        """Return the compile-time arguments of a kernel. `acc` is the dtype of sums, `op` that of the
        operands of products.
        """
        constants = {
            "D": self.width,
            "BD": side(self.width, op, self.chip),
            "HIDDEN": self.hidden,
            "BH": self.block(kernel, op),
            "CHUNK": self.chunk,
            "BC": self.tile,
            "MOMENTUM": self.momentum,
            "ACC": triton_type(acc),
            "OP": triton_type(op),
            # "tf32x3" keeps every operand twice in shared memory, for which this kernel has no room.
            "PRECISION": "ieee" if kernel == "carry_stream" and self.tile > 32 else self.precision,
        }
        if kernel not in ("blend_backward", "keys_backward"):
            constants["NORM"] = self.norm
        if kernel != "blend_backward":
            constants["RESIDUAL"] = self.residual
        if kernel.startswith(("state", "read")):
            constants["GELU"] = self.gelu
        if kernel in APART:
            constants["APART"] = self.tile >= 64 and APART[kernel]
        if kernel in ("state_kernel", "carry_kernel"):
            constants["SHARES"] = self.shares
        if kernel.startswith("carry"):
            constants["REACH"], constants["END"] = (
                1.0 / torch.finfo(acc).eps,
                torch.finfo(acc).max ** 0.5 * 1e-9,
            )
        if kernel.startswith("state") or kernel == "read_kernel":
            constants["TRAIN"] = train
        return constants


def plan_of(net: MLP, rule: LinearRule, width: int, heads: int, chunk: int) -> Plan:
    """Return the plan for a memory; `for_device` completes it."""
    return Plan(
        width, net.widths(width)[1], chunk, heads, rule.momentum, rule.forget, net.norm, net.residual,
        net.activation == "gelu", precision(),
    )  # fmt: skip


def stages_of(name: str, arch: int) -> int:
    """Return the number of pipeline stages of a kernel on a compute capability."""
    return STAGES.get(name, 1) if arch >= 90 else 1


def warps_of(name: str, tile: int) -> int:
    """Return the number of warps of a kernel whose tiles hold `tile` tokens."""
    return max(WARPS[name], 8) if tile > 64 else WARPS[name]


def _launch(name: str, grid: tuple[int, ...], *tensors: Any, **constants: Any) -> None:
    """Launch a kernel with its number of warps and stages."""
    options: Constants = {
        "num_warps": warps_of(name, constants["BC"]),
        "num_stages": stages_of(name, arch(tensors[0].device)),
    }
    if constants.get("SHARES", 1) > 1:  # these programs wait for each other: all must be resident
        options["launch_cooperative_grid"] = True
    launch(name, grid, *tensors, options=options, **constants)


def launches(plan: Plan, op: torch.dtype, arch: int, train: bool = True) -> list[Launch]:
    """Return the kernels that a call launches on a compute capability, and those of its backward if `train`.
    The launches are recorded with fake tensors; nothing runs.
    """
    plan = plan._replace(chip=arch)
    with FakeTensorMode(), torch.device("cpu"), recording() as recorded:
        q, k, v = (torch.empty(1, plan.chunk, 1, plan.width, dtype=op) for _ in range(3))
        step, momentum, keep = (torch.empty(1, plan.chunk, 1) for _ in range(3))
        gates = Gates(step, momentum if plan.momentum else None, keep if plan.forget else None)
        J1, J2 = (
            torch.empty(1, 1 + plan.momentum, *size)
            for size in ((plan.width, plan.hidden), (plan.hidden, plan.width))
        )
        totals = torch.empty(1, dtype=torch.int32)
        y, surprise, end1, end2, _, *kept = _forward(plan, q, k, v, gates, J1, J2, totals, train)
        if train:
            _backward(plan, (q, k, v, totals, *kept), gates, y, surprise, end1, end2)
    if plan.streams and plan.width <= 64:  # calls with few rows and heads use other kernels
        shared = launches(plan._replace(shares=power(plan.hidden) // SHARE), op, arch, train)
        return [
            *_named(recorded, arch),
            *[each for each in shared if each.name in ("state_kernel", "carry_kernel")],
        ]
    return _named(recorded, arch)


def _named(recorded: list[Record], arch: int) -> list[Launch]:
    """Add the number of warps and stages to recorded launches."""
    return [Launch(*each, warps_of(each[0], each[2]["BC"]), stages_of(each[0], arch)) for each in recorded]


def _empty(like: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor on the device of `like`."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def _kept_norm(plan: Plan, like: Tensor, acc: torch.dtype, train: bool) -> tuple[Tensor, Tensor]:
    """Allocate the output and the 1 / standard deviation of the LayerNorm at each token. Both are empty if
    backward does not need them.
    """
    if train and plan.norm:
        return torch.empty_like(like), _empty(like, *like.shape[:3], dtype=acc)
    return _empty(like, 0, dtype=like.dtype), _empty(like, 0, dtype=acc)


def _sequential(
    name: str, plan: Plan, m: int, acc: torch.dtype, like: Tensor
) -> tuple[str, tuple[int, ...], tuple[Tensor, ...]]:
    """Return the name and the grid of the kernel that iterates over the chunks, and the buffers (none if the
    state is streamed) in which the programs that share a memory exchange sums. `m` is the number of rows
    times heads.
    """
    if plan.streams:
        return f"{name}_stream", (m,), ()
    boxes = (
        2 * plan.shares * (plan.tile * side(plan.width, like.dtype, plan.chip) + 1) if plan.shares > 1 else 0
    )
    meeting = _empty(like, m, boxes, dtype=acc), torch.zeros(m, dtype=torch.int32, device=like.device)
    return f"{name}_kernel", (m, plan.shares), meeting


def _forward(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    J1: Tensor,
    J2: Tensor,
    totals: Tensor,
    train: bool,
) -> tuple[Tensor, ...]:
    """Compute the memory for q, k, v ``[r L heads d]``, gates ``[r L heads]``, initial layers J1, J2 ``[m p
    ..]`` (m is rows times heads, p is 2 with momentum, otherwise 1) and the tokens of each row ``[r]``.

    Returns the answers, the surprise, the final layers, a flag for each chunk whose answers are not finite,
    and the tensors that backward needs.
    """
    rows, L, heads = q.shape[:3]
    n, m = -(-L // plan.chunk), rows * heads
    acc, op, C = J1.dtype, q.dtype, plan.tile
    if train:
        clamp_counter(q)  # created now, because backward may run where it cannot be allocated
    P, co = _empty(q, m, n, C, C, dtype=op), _empty(q, m, n, 4, C, dtype=acc)
    fold = _empty(q, m, n, 4, dtype=acc)
    log_gates = [gate if gate is not None else gates.log_step for gate in gates]
    _launch(
        "coef_kernel", (n * m,), *log_gates, totals, P, co, fold, L, n, heads, **plan.coefficients(acc, op)
    )
    starts1, starts2 = (_empty(q, m, n, *J.shape[1:], dtype=op) for J in (J1, J2))
    end1, end2, errors = torch.empty_like(J1), torch.empty_like(J2), torch.empty_like(k)
    surprise = _empty(q, rows, L, heads, dtype=acc)
    values, rstds = _kept_norm(plan, k, acc, train)
    state, grid, meeting = _sequential("state", plan, m, acc, q)
    _launch(
        state, grid,
        k, v, J1, J2, end1, end2, starts1, starts2, co, fold, errors, values, rstds, surprise, *meeting, L, n, heads,
        **plan.tiles(state, acc, op, train),
    )  # fmt: skip
    y, bad = torch.empty_like(q), _empty(q, m, n, dtype=torch.int32)
    size = (m, n, C, plan.hidden) if train else (0,)
    tiles = [_empty(q, *size, dtype=op) for _ in range(5)]  # hiddens, slopes, firsts, bends, reads
    scores = _empty(q, *((m, n, C, C) if train else (0,)), dtype=op)
    answers, spreads = _kept_norm(plan, q, acc, train)
    _launch(
        "read_kernel", (n * m,),
        q, k, starts1, starts2, P, co, errors, *tiles, scores, answers, spreads, y, bad, L, n, heads,
        **plan.tiles("read_kernel", acc, op, train),
    )  # fmt: skip
    kept = [P, co, fold, starts1, starts2, errors, values, rstds, *tiles, scores, answers, spreads]
    return y, surprise, end1, end2, bad, *kept


def _backward(
    plan: Plan,
    saved: tuple[Tensor, ...],
    gates: Gates,
    g_y: Tensor,
    g_surprise: Tensor,
    g_end1: Tensor,
    g_end2: Tensor,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, the three gates and the two initial layers, from those of the answers,
    the surprise and the final layers.
    """
    (
        q,
        k,
        v,
        totals,
        P,
        co,
        fold,
        starts1,
        starts2,
        errors,
        values,
        rstds,
        *tiles,
        scores,
        answers,
        spreads,
    ) = saved
    hiddens, slopes, firsts, bends, reads = tiles
    rows, L, heads = q.shape[:3]
    n, m = -(-L // plan.chunk), rows * heads
    acc, op = co.dtype, q.dtype
    g_q, g_k, g_v, g_D2 = (torch.empty_like(q) for _ in range(4))
    g_P, g_co, g_fold = torch.empty_like(P), torch.empty_like(co), torch.empty_like(fold)
    g_X2, g_D1 = torch.empty_like(reads), torch.empty_like(reads)
    g_J1, g_J2 = torch.empty_like(starts1), torch.empty_like(starts2)
    received = _empty(q, m, n, dtype=acc)
    _launch(
        "read_backward", (n * m,),
        q, starts1, starts2, P, co, errors, hiddens, reads, scores, answers, spreads, g_y, g_surprise,
        g_q, g_P, g_co, g_X2, g_D1, g_D2, g_J1, g_J2, received, L, n, heads,
        **plan.tiles("read_backward", acc, op),
    )  # fmt: skip
    _launch(
        "blend_backward", (n * m,),
        q, k, starts2, P, slopes, firsts, g_D1, g_q, g_k, g_P, g_D1, g_D2, L, n, heads,
        **plan.tiles("blend_backward", acc, op),
    )  # fmt: skip
    received_end = g_end1.abs().flatten(1).sum(1) + g_end2.abs().flatten(1).sum(1)
    g_first1, g_first2 = torch.empty_like(g_end1), torch.empty_like(g_end2)
    # If the state is in registers, chunks are loaded ahead, so results must not overwrite inputs. If it is
    # streamed, results overwrite inputs to save memory.
    carry, grid, meeting = _sequential("carry", plan, m, acc, q)
    ends = (
        torch.empty_like(g_D1),
        *((g_J1, g_J2) if plan.streams else (torch.empty_like(g_J1), torch.empty_like(g_J2))),
    )
    _launch(
        carry, grid,
        k, v, starts2, co, fold, errors, values, rstds, hiddens, slopes, bends, g_surprise,
        g_X2, g_D1, g_D2, g_J1, g_J2, received, received_end, g_end1, g_end2, g_first1, g_first2, *ends, g_v,
        clamp_counter(q), *meeting, L, n, heads,
        **plan.tiles(carry, acc, op),
    )  # fmt: skip
    _launch(
        "keys_backward", (n * m,),
        k, starts1, starts2, co, errors, hiddens, firsts, *ends, g_v, g_k, g_co, g_fold, L, n, heads,
        **plan.tiles("keys_backward", acc, op),
    )  # fmt: skip
    log_gates = [gate if gate is not None else gates.log_step for gate in gates]
    g_gates = [torch.empty_like(gates.log_step) for _ in range(3)]
    _launch(
        "coef_backward",
        (n * m,),
        *log_gates,
        totals,
        g_P,
        g_co,
        g_fold,
        *g_gates,
        L,
        n,
        heads,
        **plan.coefficients(acc, op),
    )
    return g_q, g_k, g_v, *empty_grads(gates, g_gates, acc), g_first1, g_first2


memory_forward = memory_operator("memory", Plan, _forward, _backward, ("J1", "J2"), saved=16)
"""The operator ``memory_forward``; see `memory_operator`."""
