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
    num_sms,
    padded_size,
    padded_width,
    precision,
    triton_type,
)
from remanence.ops.triton.resources import Constants, Launch, Record, recording

WARPS = {
    "coef_kernel": 4,
    "state_kernel": 8,
    "state_blocked": 8,
    "read_kernel": 4,
    "read_backward": 4,
    "read_scores_backward": 4,
    "state_backward": 8,
    "state_backward_blocked": 8,
    "keys_backward": 4,
    "coef_backward": 4,
}
"""The number of warps of a program, by kernel. Tiles of more than 64 tokens use at least 8."""

STAGES = {"state_kernel": 2, "state_backward": 2}
"""The number of chunks that are loaded ahead, for the kernels that never read back their own results. It is 1
in all other kernels, and on GPUs before Hopper.
"""

MAX_HIDDEN_IN_REGISTERS = 64
"""The largest hidden width of which one program keeps the state in registers. A wider state is kept in global
memory (in practice, L2) and processed in blocks.
"""

HIDDEN_PER_PROGRAM = 64
"""The width of one program's block of the hidden axis, where several programs work on one memory. They do so
if there are too few rows and heads to occupy the GPU otherwise.
"""

BLOCKS = {
    "state_blocked": 64,
    "state_backward_blocked": 64,
    "read_kernel": 64,
    "read_backward": 64,
    "read_scores_backward": 64,
    "keys_backward": 64,
}
"""Block size along the hidden axis in the kernels that process it in blocks. It is halved for heads wider
than 64, and reduced for float32.
"""

IN_LOOP = dict.fromkeys(
    (
        "state_kernel",
        "state_blocked",
        "read_kernel",
        "read_backward",
        "state_backward",
        "state_backward_blocked",
    ),
    True,
)
"""Whether a kernel computes each product inside a loop of one iteration (`dot_in_loop`) for chunks longer than
32. This saves registers but prevents prefetching.
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
    programs_per_memory: int = 1
    """The number of programs that work on one memory, each with a block of its hidden axis."""

    def for_device(self, programs: int, device: torch.device) -> Plan:
        """Return the plan for a device. The hidden axis is split between programs if the GPU has a processor
        for each of them. `programs` is the number of rows times heads.
        """
        here = self._replace(chip=arch(device))
        programs_per_memory = padded_size(self.hidden) // HIDDEN_PER_PROGRAM
        if (
            interpreted()
            or device.type != "cuda"
            or self.width > 64
            or programs_per_memory < 2
            or programs * programs_per_memory > num_sms(device)
        ):
            return here
        return here._replace(programs_per_memory=programs_per_memory)

    @property
    def tile(self) -> int:
        """The number of rows of a tile that holds a chunk."""
        return padded_size(self.chunk)

    @property
    def is_blocked(self) -> bool:
        """Whether the state is processed in blocks through global memory, because it does not fit into
        registers.
        """
        return (
            padded_size(self.hidden) // self.programs_per_memory > MAX_HIDDEN_IN_REGISTERS or self.width > 64
        )

    def block(self, kernel: str, op: torch.dtype) -> int:
        """Return the tile size of a kernel along the hidden axis, for operands of dtype `op`."""
        if kernel not in BLOCKS:
            return padded_width(padded_size(self.hidden) // self.programs_per_memory, op, self.chip)
        # Wide heads and 4-byte operands each double the use of shared memory; with 4-byte operands, long
        # chunks double it again.
        shrink = (self.width > 64) + (op != torch.bfloat16) * (1 + (self.tile > 64))
        return padded_width(min(padded_size(self.hidden), max(16, BLOCKS[kernel] >> shrink)), op, self.chip)

    def coefficients(self, acc: torch.dtype, op: torch.dtype) -> Constants:
        """Return the compile-time arguments of the kernels in kernels/coef.py."""
        return coefficients(self.chunk, self.momentum, self.forget, acc, op)

    def tiles(self, kernel: str, acc: torch.dtype, op: torch.dtype, train: bool = True) -> Constants:
        """Return the compile-time arguments of a kernel. `acc` is the dtype of sums, `op` that of the
        operands of products.
        """
        constants = {
            "D": self.width,
            "BD": padded_width(self.width, op, self.chip),
            "HIDDEN": self.hidden,
            "BH": self.block(kernel, op),
            "CHUNK": self.chunk,
            "BC": self.tile,
            "MOMENTUM": self.momentum,
            "ACC": triton_type(acc),
            "OP": triton_type(op),
            # "tf32x3" keeps every operand twice in shared memory, for which this kernel has no room.
            "PRECISION": "ieee" if kernel == "state_backward_blocked" and self.tile > 32 else self.precision,
        }
        if kernel not in ("read_scores_backward", "keys_backward"):
            constants["NORM"] = self.norm
        if kernel != "read_scores_backward":
            constants["RESIDUAL"] = self.residual
        if kernel in ("state_kernel", "state_blocked", "read_kernel", "read_backward"):
            constants["GELU"] = self.gelu
        if kernel in IN_LOOP:
            constants["IN_LOOP"] = self.tile >= 64 and IN_LOOP[kernel]
        if kernel in ("state_kernel", "state_backward"):
            constants["PROGRAMS_PER_MEMORY"] = self.programs_per_memory
        if kernel in ("state_backward", "state_backward_blocked"):
            constants["RELATIVE_LIMIT"], constants["ABSOLUTE_LIMIT"] = (
                1.0 / torch.finfo(acc).eps,
                torch.finfo(acc).max ** 0.5 * 1e-9,
            )
        if kernel in ("state_kernel", "state_blocked", "read_kernel"):
            constants["SAVE_FOR_BACKWARD"] = train
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
    if (
        constants.get("PROGRAMS_PER_MEMORY", 1) > 1
    ):  # these programs wait for each other: all must be resident
        options["launch_cooperative_grid"] = True
    launch(name, grid, *tensors, options=options, **constants)


def list_launches(plan: Plan, op: torch.dtype, arch: int, train: bool = True) -> list[Launch]:
    """Return the list of kernels that a call with this plan launches on a compute capability, and those of its
    backward if `train`. The launches are recorded with fake tensors; nothing runs.
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
    if plan.is_blocked and plan.width <= 64:  # calls with few rows and heads use other kernels
        with_several_programs = list_launches(
            plan._replace(programs_per_memory=padded_size(plan.hidden) // HIDDEN_PER_PROGRAM), op, arch, train
        )
        return [
            *_named(recorded, arch),
            *[each for each in with_several_programs if each.name in ("state_kernel", "state_backward")],
        ]
    return _named(recorded, arch)


def _named(recorded: list[Record], arch: int) -> list[Launch]:
    """Add the number of warps and stages to recorded launches."""
    return [Launch(*each, warps_of(each[0], each[2]["BC"]), stages_of(each[0], arch)) for each in recorded]


def _empty(like: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor on the device of `like`."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def _empty_norm_results(plan: Plan, like: Tensor, acc: torch.dtype, train: bool) -> tuple[Tensor, Tensor]:
    """Allocate the output and the 1 / standard deviation of the LayerNorm at each token. Both are empty if
    backward does not need them.
    """
    if train and plan.norm:
        return torch.empty_like(like), _empty(like, *like.shape[:3], dtype=acc)
    return _empty(like, 0, dtype=like.dtype), _empty(like, 0, dtype=acc)


def _sequential(
    kernel: str, blocked_kernel: str, plan: Plan, m: int, acc: torch.dtype, like: Tensor
) -> tuple[str, tuple[int, ...], tuple[Tensor, ...]]:
    """Return the name and the grid of the kernel that iterates over the chunks: `kernel`, which keeps the
    state in registers, or `blocked_kernel`. The last result is the buffer, and the counters of arrived
    programs, with which several programs that process the same memory exchange sums (none for the blocked
    kernel). `m` is the number of rows times heads.
    """
    if plan.is_blocked:
        return blocked_kernel, (m,), ()
    numbers = (
        2 * plan.programs_per_memory * (plan.tile * padded_width(plan.width, like.dtype, plan.chip) + 1)
        if plan.programs_per_memory > 1
        else 0
    )
    exchange = _empty(like, m, numbers, dtype=acc), torch.zeros(m, dtype=torch.int32, device=like.device)
    return kernel, (m, plan.programs_per_memory), exchange


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
    P, coef = _empty(q, m, n, C, C, dtype=op), _empty(q, m, n, 4, C, dtype=acc)
    end_factors = _empty(q, m, n, 4, dtype=acc)
    log_gates = [gate if gate is not None else gates.log_step for gate in gates]
    _launch(
        "coef_kernel",
        (n * m,),
        *log_gates,
        totals,
        P,
        coef,
        end_factors,
        L,
        n,
        heads,
        **plan.coefficients(acc, op),
    )
    starts1, starts2 = (_empty(q, m, n, *J.shape[1:], dtype=op) for J in (J1, J2))
    end1, end2, errors = torch.empty_like(J1), torch.empty_like(J2), torch.empty_like(k)
    surprise = _empty(q, rows, L, heads, dtype=acc)
    predictions, prediction_rstds = _empty_norm_results(plan, k, acc, train)
    kernel, grid, exchange = _sequential("state_kernel", "state_blocked", plan, m, acc, q)
    _launch(
        kernel, grid,
        k, v, J1, J2, end1, end2, starts1, starts2, coef, end_factors, errors, predictions, prediction_rstds,
        surprise, *exchange, L, n, heads,
        **plan.tiles(kernel, acc, op, train),
    )  # fmt: skip
    y, nonfinite = torch.empty_like(q), _empty(q, m, n, dtype=torch.int32)
    size = (m, n, C, plan.hidden) if train else (0,)
    tiles = [_empty(q, *size, dtype=op) for _ in range(5)]  # hiddens, slopes, firsts, bends, reads
    scores = _empty(q, *((m, n, C, C) if train else (0,)), dtype=op)
    answers, answer_rstds = _empty_norm_results(plan, q, acc, train)
    _launch(
        "read_kernel", (n * m,),
        q, k, starts1, starts2, P, coef, errors, *tiles, scores, answers, answer_rstds, y, nonfinite, L, n, heads,
        **plan.tiles("read_kernel", acc, op, train),
    )  # fmt: skip
    kept = [
        P,
        coef,
        end_factors,
        starts1,
        starts2,
        errors,
        predictions,
        prediction_rstds,
        *tiles,
        scores,
        answers,
        answer_rstds,
    ]
    return y, surprise, end1, end2, nonfinite, *kept


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
        coef,
        end_factors,
        starts1,
        starts2,
        errors,
        predictions,
        prediction_rstds,
        *tiles,
        scores,
        answers,
        answer_rstds,
    ) = saved
    hiddens, slopes, hidden_errors, curvatures, query_preacts = tiles
    rows, L, heads = q.shape[:3]
    n, m = -(-L // plan.chunk), rows * heads
    acc, op = coef.dtype, q.dtype
    g_q, g_k, g_v, g_errors = (torch.empty_like(q) for _ in range(4))
    g_P, g_coef, g_end_factors = torch.empty_like(P), torch.empty_like(coef), torch.empty_like(end_factors)
    g_hiddens, g_hidden_errors = torch.empty_like(query_preacts), torch.empty_like(query_preacts)
    g_starts1, g_starts2 = torch.empty_like(starts1), torch.empty_like(starts2)
    received_norm = _empty(q, m, n, dtype=acc)
    _launch(
        "read_backward", (n * m,),
        q, starts1, starts2, P, coef, errors, hiddens, query_preacts, scores, answers, answer_rstds, g_y, g_surprise,
        g_q, g_P, g_coef, g_hiddens, g_hidden_errors, g_errors, g_starts1, g_starts2, received_norm, L, n, heads,
        **plan.tiles("read_backward", acc, op),
    )  # fmt: skip
    _launch(
        "read_scores_backward", (n * m,),
        q, k, starts2, P, slopes, hidden_errors, g_hidden_errors, g_q, g_k, g_P, g_hidden_errors, g_errors, L, n, heads,
        **plan.tiles("read_scores_backward", acc, op),
    )  # fmt: skip
    received_norm_end = g_end1.abs().flatten(1).sum(1) + g_end2.abs().flatten(1).sum(1)
    g_start1, g_start2 = torch.empty_like(g_end1), torch.empty_like(g_end2)
    # If the state is in registers, chunks are loaded ahead, so results must not overwrite inputs. If it is
    # processed in blocks, results overwrite inputs to save memory.
    kernel, grid, exchange = _sequential("state_backward", "state_backward_blocked", plan, m, acc, q)
    ends = (
        torch.empty_like(g_hidden_errors),
        *(
            (g_starts1, g_starts2)
            if plan.is_blocked
            else (torch.empty_like(g_starts1), torch.empty_like(g_starts2))
        ),
    )
    _launch(
        kernel, grid,
        k, v, starts2, coef, end_factors, errors, predictions, prediction_rstds, hiddens, slopes, curvatures,
        g_surprise,
        g_hiddens, g_hidden_errors, g_errors, g_starts1, g_starts2, received_norm, received_norm_end, g_end1,
        g_end2, g_start1, g_start2, *ends, g_v,
        clamp_counter(q), *exchange, L, n, heads,
        **plan.tiles(kernel, acc, op),
    )  # fmt: skip
    _launch(
        "keys_backward", (n * m,),
        k, starts1, starts2, coef, errors, hiddens, hidden_errors, *ends, g_v, g_k, g_coef, g_end_factors, L, n, heads,
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
        g_coef,
        g_end_factors,
        *g_gates,
        L,
        n,
        heads,
        **plan.coefficients(acc, op),
    )
    return g_q, g_k, g_v, *empty_grads(gates, g_gates, acc), g_start1, g_start2


memory_forward = memory_operator("memory", Plan, _forward, _backward, ("J1", "J2"), saved=16)
"""The operator ``memory_forward``; see `memory_operator`."""
