"""Launch the kernels that process one token on a GPU, in place: its short convolutions, the step of a memory,
and copies of a memory's weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from remanence.ops.state import Gates, Weights
from remanence.ops.triton.launch import launch, padded_size, triton_type
from remanence.ops.triton.resources import Constants

if TYPE_CHECKING:
    from remanence.ops.decode import InPlaceMemory

BLOCK = 64
"""Block size along the hidden axis, or along the columns of a one-layer memory. It is halved for heads wider
than 64, and halved again for chunks longer than 64.
"""

WARPS = 8
"""The number of warps of a program that steps a memory."""


def convolve(
    xs: Sequence[Tensor], pasts: Sequence[Tensor], weights: Sequence[Tensor], heads: int, active: Tensor
) -> list[Tensor]:
    """Return the short convolutions of q, k and v (or only the first of them) of one token ``[r inner]``,
    each as ``[r h e]``. One kernel computes the convolution, SiLU, and, except for v, the scaling to unit
    length. The past inputs ``[r history inner]`` of active rows are shifted by one token in place.
    """
    rows, history, inner = pasts[0].shape
    taps, width = weights[0].shape[1], inner // heads
    xs = [x.contiguous() for x in xs]
    ys = [x.new_empty(rows, heads, width) for x in xs]
    slots = [[*tensors, *tensors[:1] * (3 - len(xs))] for tensors in (xs, list(pasts), list(weights), ys)]
    launch(
        "convolve_kernel", (rows * heads, len(xs)),
        *[tensor for group in slots for tensor in group], active.view(torch.uint8),
        HEADS=heads, D=width, BD=padded_size(width), HISTORY=history, BT=padded_size(max(history, 1)), TAPS=taps,
        ACC=triton_type(pasts[0].dtype), options={"num_warps": 4 if history <= 64 else 8},
    )  # fmt: skip
    return ys


def copy_weights(memory: InPlaceMemory, weights: Weights, rows: Tensor) -> None:
    """Copy the weights of the memory at the start of its incomplete chunk to `weights`, in place, for the
    rows ``[r]`` that are true in `rows`.
    """
    for layer, weight in zip(memory.layers, weights, strict=True):
        size, block = weight[0, 0].numel(), 1024
        grid, constants = (
            (memory.rows * memory.heads, -(-size // block)),
            (size, layer.shape[1], memory.heads, block),
        )
        launch("copy_weights_kernel", grid, rows.view(torch.uint8), layer, weight, *constants, options={})


def step(
    memory: InPlaceMemory, q: Tensor, k: Tensor, v: Tensor, gates: Gates, active: Tensor
) -> tuple[Tensor, Tensor]:
    """Process one token with a memory, as `InPlaceMemory.step` does. Returns the answers and the surprise,
    both 0 for inactive rows.
    """
    y = torch.empty_like(v, dtype=q.dtype, memory_format=torch.contiguous_format)
    surprise = torch.empty_like(gates.log_step)
    unused_gate = memory.gates.log_step
    tail_gates = [unused_gate if gate is None else gate for gate in memory.gates]
    new = [gates.log_step if gate is None else gate.contiguous() for gate in gates]
    launch(
        "decode_kernel" if memory.net.depth == 2 else "decode_linear_kernel", (memory.rows * memory.heads,),
        q.contiguous(), k.contiguous(), v.contiguous(), *new,
        *memory.layers, *memory.inputs, *memory.errors, memory.v, *tail_gates,
        memory.position, active.view(torch.uint8), y, surprise, memory.diverged.view(torch.uint8),
        **_constants(memory), options={"num_warps": WARPS, "num_stages": 1},
    )  # fmt: skip
    memory.position += active  # not in the kernel, because its other programs still read it
    return y, surprise


def _constants(memory: InPlaceMemory) -> Constants:
    """Return the compile-time arguments of the kernel that steps this memory."""
    net, rule, chunk, width, columns = (
        memory.net,
        memory.rule,
        memory.chunk,
        memory.width,
        memory.layers[0].shape[-1],
    )
    block = min(padded_size(columns), BLOCK >> (width > 64) + (chunk > 64))
    constants: Constants = {
        "HEADS": memory.heads, "CHUNK": chunk, "BC": padded_size(chunk), "D": width, "BD": padded_size(width),
        "MOMENTUM": rule.momentum, "FORGET": rule.forget, "RESIDUAL": net.residual, "ACC": triton_type(memory.v.dtype),
    }  # fmt: skip
    if net.depth == 2:
        return constants | {
            "HIDDEN": columns,
            "BH": block,
            "NORM": net.norm,
            "GELU": net.activation == "gelu",
        }
    exact, squared = rule.anchor == "token", rule.loss == "squared"
    return constants | {
        "E": columns,
        "BV": block,
        "SQUARED": squared,
        "TOKEN_EXACT": exact,
        "DECAY_FIRST": rule.decay_first,
    }
