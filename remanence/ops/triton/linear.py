"""The one-layer memory on a GPU: one differentiable function that launches the kernels, as in mlp.py.

The tensors saved for backward include the inputs, P, and the state at the start of every chunk in the dtype
of the inputs (``2 d d`` numbers per chunk and head with momentum). For the token-exact rule they also include
the triangular inverse of each chunk and its products with the keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from remanence.ops.clamp import clamp_counter
from remanence.ops.nets import MLP
from remanence.ops.rules import LinearRule
from remanence.ops.state import Gates
from remanence.ops.triton.autograd import empty_grads, memory_operator
from remanence.ops.triton.launch import (
    arch,
    coefficients,
    launch,
    num_sms,
    padded_size,
    padded_width,
    precision,
    triton_type,
)
from remanence.ops.triton.mlp import warps_of
from remanence.ops.triton.resources import Constants, Launch, recording

SEQUENTIAL = ("linear_state", "linear_state_backward")
"""The kernels that iterate over the chunks. They never read back their own results."""

MAX_COLUMNS = 64
"""The most columns of the state that a kernel processes at once. With LayerNorm it always processes all
columns.
"""

MIN_COLUMNS = 32
"""The fewest columns of the state in one program of a sequential kernel."""


class Plan(NamedTuple):
    """The values that the kernels of one call are compiled for."""

    width: int
    """Channels of a head's queries and keys."""
    values: int
    """Channels of a head's values."""
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
    squared: bool
    """Whether the loss is squared; otherwise it is the dot product."""
    token_exact: bool
    """Whether the rule is token-exact: gradients are taken at the previous token's weights, not at the
    chunk's start.
    """
    decay_first: bool
    """Whether the weights decay before the gradient is taken (`decay_first`)."""
    precision: str
    """The `input_precision` of Triton for float32 products."""
    chip: int = 0
    """Compute capability (90 for 9.0), or 0 if there is no GPU or `for_device` was not called yet."""

    def for_device(self, programs: int, device: torch.device) -> Plan:
        """Return the plan with the compute capability of a device. `programs` is not used."""
        return self._replace(chip=arch(device))

    @property
    def needs_solve(self) -> bool:
        """Whether each chunk needs the solution of a triangular system: the rule is token-exact with the
        squared loss.
        """
        return self.token_exact and self.squared

    def block(self, op: torch.dtype) -> int:
        """Return the number of columns of the state that a parallel kernel processes at once."""
        whole = padded_width(self.values, op, self.chip)
        return whole if self.norm else min(whole, MAX_COLUMNS)

    def columns(self, programs: int, op: torch.dtype, device: torch.device) -> int:
        """Return the number of columns of the state in one program of a sequential kernel. Fewer columns make
        more programs, if a GPU would otherwise be partly idle. `programs` is the number of rows times heads.
        """
        if self.norm:
            return self.block(op)
        whole = padded_width(self.values, op, self.chip)
        fits = (
            op == torch.bfloat16
            and max(padded_width(self.width, op, self.chip), whole, self.chunk) <= MAX_COLUMNS
        )
        columns = self.block(op) if fits else min(self.block(op), MIN_COLUMNS)
        while (
            device.type == "cuda" and columns > MIN_COLUMNS and programs * whole < columns * num_sms(device)
        ):
            columns //= 2
        return columns

    def coefficients(self, acc: torch.dtype, op: torch.dtype) -> Constants:
        """Return the compile-time arguments of the kernels in kernels/coef.py."""
        return coefficients(self.chunk, self.momentum, self.forget, acc, op)

    def tiles(self, kernel: str, acc: torch.dtype, op: torch.dtype, **more: Any) -> Constants:
        """Return the compile-time arguments of a kernel, with those in `more` added or replaced. `acc` is the
        dtype of sums, `op` that of the operands of products.
        """
        constants = {
            "D": self.width,
            "BD": padded_width(self.width, op, self.chip),
            "E": self.values,
            "BV": self.block(op),
            "CHUNK": self.chunk,
            "BC": padded_size(self.chunk),
            "MOMENTUM": self.momentum,
            "RESIDUAL": self.residual,
            "ACC": triton_type(acc),
            "OP": triton_type(op),
            # On an H200, the error of token-exact memories was 2 to 3.5 times that of torch with "tf32x3",
            # and 1.1 to 2 times with "ieee". For wider heads, "ieee" did not compile within ten minutes.
            "PRECISION": "ieee"
            if op == torch.float32 and max(self.width, self.values) <= 64
            else self.precision,
        }
        if kernel != "linear_solve":
            constants |= {"NORM": self.norm, "SQUARED": self.squared, "TOKEN_EXACT": self.token_exact}
        if kernel not in ("linear_state", "linear_state_backward"):
            constants["DECAY_FIRST"] = self.decay_first
        if kernel == "linear_state_backward":
            constants |= {
                "RELATIVE_LIMIT": 1.0 / torch.finfo(acc).eps,
                "ABSOLUTE_LIMIT": torch.finfo(acc).max ** 0.5 * 1e-9,
            }
        return constants | more


def plan_of(net: MLP, rule: LinearRule, width: int, values: int, heads: int, chunk: int) -> Plan:
    """Return the plan for a memory; `for_device` completes it."""
    return Plan(
        width, values, chunk, heads, rule.momentum, rule.forget, net.norm, net.residual, rule.loss == "squared",
        rule.anchor == "token", rule.decay_first, precision(),
    )  # fmt: skip


def options(name: str, constants: Constants, hopper: bool) -> dict[str, int]:
    """Return the number of warps of a kernel, and the number of chunks that it loads ahead: as many as
    registers hold without spilling.
    """
    if name.startswith("coef"):
        return {"num_warps": warps_of(name, constants["BC"]), "num_stages": 1}
    norm, wide = constants.get("NORM", False), triton_type(torch.bfloat16) != constants["OP"]
    if name in SEQUENTIAL:
        warps = 8 if norm else max(4, constants["BV"] // 16)
        return {
            "num_warps": warps,
            "num_stages": 2 if hopper and not norm and not constants.get("CLAMP") else 1,
        }
    if name == "linear_solve" and not wide and constants["BC"] <= 64:
        # Also for heads of 128: two programs then share a processor, which helps because each often waits.
        return {"num_warps": 4, "num_stages": 1}
    return {
        "num_warps": 8 if norm or wide or max(constants["BC"], constants["BD"], constants["BV"]) > 64 else 4,
        "num_stages": 1,
    }


def _launch(name: str, grid: tuple[int, ...], *tensors: Any, **constants: Any) -> None:
    """Launch a kernel with its number of warps and stages."""
    launch(name, grid, *tensors, options=options(name, constants, arch(tensors[0].device) >= 90), **constants)


def list_launches(plan: Plan, op: torch.dtype, arch: int, train: bool = True) -> list[Launch]:
    """Return the list of kernels that a call with this plan launches on a compute capability, and those of its
    backward if `train`. The launches are recorded with fake tensors; nothing runs.
    """
    plan = plan._replace(chip=arch)
    with FakeTensorMode(), torch.device("cpu"), recording() as recorded:
        q, k, v = (
            torch.empty(1, plan.chunk, 1, width, dtype=op) for width in (plan.width, plan.width, plan.values)
        )
        step, momentum, keep = (torch.empty(1, plan.chunk, 1) for _ in range(3))
        gates = Gates(step, momentum if plan.momentum else None, keep if plan.forget else None)
        J, totals = (
            torch.empty(1, 1 + plan.momentum, plan.width, plan.values),
            torch.empty(1, dtype=torch.int32),
        )
        y, surprise, end, _, *kept = _forward(plan, q, k, v, gates, J, totals, train)
        if train:
            _backward(plan, (q, k, v, totals, *kept), gates, y, surprise, end)
    chosen = [options(name, constants, arch >= 90) for name, _, constants in recorded]
    return [Launch(*each, o["num_warps"], o["num_stages"]) for each, o in zip(recorded, chosen, strict=True)]


def _forward(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, gates: Gates, J: Tensor, totals: Tensor, train: bool
) -> tuple[Tensor, ...]:
    """Compute the memory for q, k ``[r L heads d]``, v ``[r L heads e]``, gates ``[r L heads]``, initial
    layer J ``[m p d e]`` (m is rows times heads, p is 2 with momentum, otherwise 1) and the tokens of each
    row ``[r]``.

    Returns the answers, the surprise, the final layer, a flag for each chunk whose answers are not finite,
    and the tensors that backward needs.
    """
    rows, L, heads = q.shape[:3]
    n, m = -(-L // plan.chunk), rows * heads
    acc, op, C = J.dtype, q.dtype, padded_size(plan.chunk)
    if train:
        clamp_counter(q)  # created now, because backward may run where it cannot be allocated
    empty = lambda *shape, dtype=op: torch.empty(shape, dtype=dtype, device=q.device)
    like = lambda x, wanted: torch.empty_like(x) if wanted else empty(0)
    log_gates = [gate if gate is not None else gates.log_step for gate in gates]
    P, coef, end_factors = empty(m, n, C, C), empty(m, n, 4, C, dtype=acc), empty(m, n, 4, dtype=acc)
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
    inverse = empty(*((m, n, C, C) if plan.needs_solve else (0,)))
    U, errors_at_zero, R = (
        like(k, plan.needs_solve),
        like(v, plan.needs_solve),
        like(k, plan.needs_solve and plan.momentum),
    )
    if plan.needs_solve:
        _launch(
            "linear_solve", (n * m,), k, v, log_gates[2], P, coef, inverse, U, R, errors_at_zero, L, n, heads,
            **plan.tiles("linear_solve", acc, op),
        )  # fmt: skip
    starts, end, errors = empty(m, n, *J.shape[1:]), torch.empty_like(J), torch.empty_like(v)
    columns = plan.block(op) if isinstance(q, FakeTensor) else plan.columns(m, op, q.device)
    _launch(
        "linear_state", (m, -(-plan.values // columns)),
        k, v, U, R, errors_at_zero, J, end, starts, coef, end_factors, errors, L, n, heads,
        **plan.tiles("linear_state", acc, op, BV=columns),
    )  # fmt: skip
    keep = train and plan.norm
    y, surprise, nonfinite = (
        torch.empty_like(v),
        empty(rows, L, heads, dtype=acc),
        empty(m, n, dtype=torch.int32),
    )
    predictions, answers = like(v, keep or (train and not plan.squared)), like(v, keep)
    prediction_rstds, answer_rstds = (
        empty(*((rows, L, heads) if keep else (0,)), dtype=acc) for _ in range(2)
    )
    _launch(
        "linear_read", (n * m,),
        q, k, v, log_gates[2], starts, P, coef, errors, predictions, prediction_rstds, answers, answer_rstds, y,
        surprise, nonfinite, L, n, heads,
        **plan.tiles("linear_read", acc, op, SAVE_FOR_BACKWARD=train),
    )  # fmt: skip
    return (
        y,
        surprise,
        end,
        nonfinite,
        P,
        coef,
        end_factors,
        starts,
        errors,
        inverse,
        U,
        R,
        predictions,
        prediction_rstds,
        answers,
        answer_rstds,
    )


def _backward(
    plan: Plan, saved: tuple[Tensor, ...], gates: Gates, g_y: Tensor, g_surprise: Tensor, g_end: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, the three gates and the initial layer, from those of the answers, the
    surprise and the final layer.
    """
    (
        q,
        k,
        v,
        totals,
        P,
        coef,
        end_factors,
        starts,
        errors,
        inverse,
        U,
        R,
        predictions,
        prediction_rstds,
        answers,
        answer_rstds,
    ) = saved
    rows, L, heads = q.shape[:3]
    n, m = -(-L // plan.chunk), rows * heads
    acc, op = coef.dtype, q.dtype
    log_gates = [gate if gate is not None else gates.log_step for gate in gates]
    g_q, g_k, g_v, g_errors = (torch.empty_like(x) for x in (q, k, v, v))
    g_P, g_coef, g_end_factors, g_starts = (torch.empty_like(x) for x in (P, coef, end_factors, starts))
    received_norm = torch.empty((m, n), dtype=acc, device=q.device)
    _launch(
        "linear_read_backward", (n * m,),
        q, k, v, log_gates[2], U, R, starts, P, coef, errors, predictions, prediction_rstds, answers,
        answer_rstds, g_y, g_surprise,
        g_q, g_k, g_P, g_coef, g_errors, g_starts, received_norm, L, n, heads,
        **plan.tiles("linear_read_backward", acc, op),
    )  # fmt: skip
    received_norm_end = g_end.abs().flatten(1).sum(1)
    g_start, g_chunk_ends = torch.empty_like(g_end), torch.empty_like(starts)
    columns = plan.block(op) if isinstance(q, FakeTensor) else plan.columns(m, op, q.device)
    whole = padded_width(plan.values, op, plan.chip)
    exceeds_limit = torch.zeros((m, whole // columns), dtype=torch.int32, device=q.device)
    for clamps, block in ((False, columns), (True, whole)):
        _launch(
            "linear_state_backward", (m, -(-plan.values // block)),
            k, v, U, R, coef, end_factors, predictions, prediction_rstds, g_starts, received_norm,
            received_norm_end, g_end, g_start, g_chunk_ends, exceeds_limit,
            clamp_counter(q), L, n, heads,
            **plan.tiles("linear_state_backward", acc, op, BV=block, CLAMP=clamps,
            PROGRAMS_PER_MEMORY=whole // columns),
        )  # fmt: skip
    g_log_keep_anchor = torch.empty_like(gates.log_step) if plan.decay_first else received_norm
    _launch(
        "linear_keys_backward", (n * m,),
        k, v, log_gates[2], starts, P, coef, inverse, errors, predictions, prediction_rstds, g_surprise,
        g_errors, g_chunk_ends,
        g_k, g_v, g_P, g_coef, g_end_factors, g_log_keep_anchor, L, n, heads,
        **plan.tiles("linear_keys_backward", acc, op),
    )  # fmt: skip
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
    if plan.decay_first:
        g_gates[2] += g_log_keep_anchor
    return g_q, g_k, g_v, *empty_grads(gates, g_gates, acc), g_start


linear_forward = memory_operator("linear", Plan, _forward, _backward, ("J",), saved=12)
"""The operator ``linear_forward``; see `memory_operator`."""
