"""Compute the logarithms of gates from a layer's input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from remanence.ops.library import register_differentiable
from remanence.ops.triton import launch
from remanence.ops.triton.layer import tiles
from remanence.ops.triton.layer.tiles import PARTS, group_sizes, next_power, split_tiles, sum_dtype, sum_parts
from remanence.ops.triton.resources import Constants

GATE_TILE = {"gates_kernel": (64, 32), "gates_logits_backward": (64, 0), "gates_backward": (32, 64)}
"""Tokens and input channels in one tile, by kernel (0 if the kernel does not tile the channels). Both are
halved for more than 64 gates.
"""


def log_gates(
    x: Tensor, weight: Tensor, bias: Tensor, heads: int, negated: Sequence[bool]
) -> tuple[Tensor, ...]:
    """Return one tensor of log gates ``[b t heads]`` for each entry of `negated`, from the input ``[b t d]``.
    A log gate is the log-sigmoid of its logit, or of minus its logit where `negated` is true, in float32 or
    float64.
    """
    logs, *_ = gates_forward(
        x, weight, bias, heads, sum(1 << gate for gate, negate in enumerate(negated) if negate)
    )
    return logs.unbind(0)


def _gate_tiles(name: str, weight: Tensor, heads: int, negated: int) -> Constants:
    """Return the compile-time arguments of a gate kernel. Bit i of `negated` is set if the logits of
    gate i are negated.
    """
    count, dim = weight.shape[-2:]
    block = max(16, next_power(count))
    tokens, channels = (size // (1 if block <= 64 else 2) for size in GATE_TILE[name])
    constants: Constants = {"BG": block, "DIM": dim, "BT": tokens}
    if channels:
        constants |= {"BD": channels, "PRECISION": launch.precision()}
    return constants | (
        {"COUNT": count}
        if name == "gates_backward"
        else {"GATES": count // heads, "HEADS": heads, "NEGATED": negated}
    )


def _gates(
    x: Tensor, weight: Tensor, bias: Tensor, heads: int, negated: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log gates ``[gates b t heads]`` and, for backward, the logits ``[n gates*heads]`` and 1 /
    RMS of each token's input ``[n]`` (n is b times t).
    """
    x, weight, bias = (tensor.contiguous() for tensor in (x, weight, bias))
    count, n = weight.shape[-2], x.shape[0] * x.shape[1]
    groups, group_size = group_sizes(weight, 2, n)
    like: Constants = {"dtype": sum_dtype(x), "device": x.device}
    logs = torch.empty((count // heads, *x.shape[:2], heads), **like)
    logits, rstds = torch.empty((n, count), **like), torch.empty((n,), **like)
    constants = _gate_tiles("gates_kernel", weight, heads, negated)
    constants["TERMS"] = 18 if x.dtype == torch.float64 else 9  # of the series in `_log_sigmoid`
    grid = (-(-group_size // constants["BT"]), groups)
    tiles.launch_kernel(
        "gates_kernel", grid, x, weight, bias, logs, logits, rstds, n, group_size, stages=3, **constants
    )
    return logs, logits, rstds


def _gates_backward(
    g_logs: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    logits: Tensor,
    rstds: Tensor,
    heads: int,
    negated: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the input, the weight and the bias."""
    g_logs, x, weight, bias = (tensor.contiguous() for tensor in (g_logs, x, weight, bias))
    (n, count), dim = logits.shape, weight.shape[-1]
    groups, group_size = group_sizes(weight, 2, n)
    constants = _gate_tiles("gates_logits_backward", weight, heads, negated)
    blocks = -(-group_size // constants["BT"])
    g_logits, norm_corrections = torch.empty_like(logits), torch.empty_like(rstds)
    g_bias = torch.empty((groups * blocks, count), dtype=logits.dtype, device=x.device)
    tiles.launch_kernel(
        "gates_logits_backward",
        (blocks, groups),
        g_logs,
        logits,
        rstds,
        bias,
        g_logits,
        norm_corrections,
        g_bias,
        n,
        group_size,
        **constants,
    )
    constants = _gate_tiles("gates_backward", weight, heads, negated)
    parts, steps = split_tiles(-(-group_size // constants["BT"]), max(1, PARTS["gates"] // groups))
    g_x, g_weight = (
        torch.empty_like(x),
        torch.empty((groups * parts, count, dim), dtype=logits.dtype, device=x.device),
    )
    grid = (parts * -(-dim // constants["BD"]), groups)
    tiles.launch_kernel(
        "gates_backward",
        grid,
        x,
        weight,
        g_logits,
        norm_corrections,
        g_x,
        g_weight,
        group_size,
        steps,
        **constants,
    )
    summed = (sum_parts(g_weight, groups).view_as(weight), sum_parts(g_bias, groups).view_as(bias))
    return g_x, summed[0].to(weight.dtype), summed[1].to(bias.dtype)


gates_forward = register_differentiable(
    "log_gates",
    _gates,
    _gates_backward,
    "Tensor x, Tensor weight, Tensor bias",
    "int heads, int negated",
    extra=2,
)
"""The differentiable operator ``log_gates``: takes and returns what `_gates` does."""
