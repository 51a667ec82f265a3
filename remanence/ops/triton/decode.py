"""One token on a GPU: launches of kernels that convolve it, read it into a memory and copy weights, in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from remanence.ops.state import Gates, Weights
from remanence.ops.triton.launch import launch, power, triton_type
from remanence.ops.triton.resources import Constants

if TYPE_CHECKING:
    from remanence.ops.decode import InPlaceMemory

BLOCK = 64
"""Of the hidden axis or a matrix's columns; half of it for heads wider, or chunks longer, than 64."""

WARPS = 8


def convolve(
    xs: Sequence[Tensor], pasts: Sequence[Tensor], weights: Sequence[Tensor], heads: int, active: Tensor
) -> list[Tensor]:
    """The short convolutions of q, k and v (or only the first of them) of one token ``[r inner]``, as ``[r h e]``:
    convolution, SiLU and unit length in one kernel. The active rows of their pasts ``[r history inner]`` advance in
    place.
    """
    rows, history, inner = pasts[0].shape
    taps, width = weights[0].shape[1], inner // heads
    xs = [x.contiguous() for x in xs]
    ys = [x.new_empty(rows, heads, width) for x in xs]
    slots = [[*tensors, *tensors[:1] * (3 - len(xs))] for tensors in (xs, list(pasts), list(weights), ys)]
    launch(
        "convolve_kernel", (rows * heads, len(xs)),
        *[tensor for group in slots for tensor in group], active.view(torch.uint8),
        HEADS=heads, D=width, BD=power(width), HISTORY=history, BT=power(max(history, 1)), TAPS=taps,
        ACC=triton_type(pasts[0].dtype), options={"num_warps": 4 if history <= 64 else 8},
    )  # fmt: skip
    return ys


def copy_weights(memory: InPlaceMemory, weights: Weights, rows: Tensor) -> None:
    """Copy the memory's weights at its chunk's start to `weights`, in place, in these rows ``[r]``."""
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
    """Read one token into a memory, as `InPlaceMemory.step` does. Answers and surprise of inactive rows are 0."""
    y = torch.empty_like(v, dtype=q.dtype, memory_format=torch.contiguous_format)
    surprise = torch.empty_like(gates.log_step)
    absent = memory.gates.log_step
    held = [absent if gate is None else gate for gate in memory.gates]
    new = [gates.log_step if gate is None else gate.contiguous() for gate in gates]
    launch(
        "decode_kernel" if memory.net.depth == 2 else "decode_linear_kernel", (memory.rows * memory.heads,),
        q.contiguous(), k.contiguous(), v.contiguous(), *new,
        *memory.layers, *memory.inputs, *memory.errors, memory.v, *held,
        memory.position, active.view(torch.uint8), y, surprise, memory.diverged.view(torch.uint8),
        **_constants(memory), options={"num_warps": WARPS, "num_stages": 1},
    )  # fmt: skip
    memory.position += active  # not in the kernel, whose programs read it
    return y, surprise


def _constants(memory: InPlaceMemory) -> Constants:
    """What the kernel is compiled for."""
    net, rule, chunk, width, columns = (
        memory.net,
        memory.rule,
        memory.chunk,
        memory.width,
        memory.layers[0].shape[-1],
    )
    block = min(power(columns), BLOCK >> (width > 64) + (chunk > 64))
    constants: Constants = {
        "HEADS": memory.heads, "CHUNK": chunk, "BC": power(chunk), "D": width, "BD": power(width),
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
        "TOKEN": exact,
        "SCALED": rule.decay_first,
    }
