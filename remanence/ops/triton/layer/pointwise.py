"""SwiGLU and rotary position embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from remanence.ops.library import register_differentiable, register_operator
from remanence.ops.triton.layer import tiles
from remanence.ops.triton.layer.tiles import TILE, next_power


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return SiLU of `gate`, times `up`."""
    return swiglu_forward(gate, up)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x ``[r t h e]`` with each pair of channels (i, i + e/2) rotated by an angle. `cos` and `sin` are
    those of the angles ``[r or 1, t, e/2]``; they get no gradient.
    """
    return rotary_forward(x, cos, sin, False)


SWIGLU_BLOCK = 2048
"""Elements that one program of the SwiGLU kernels processes."""


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    tiles.launch_kernel(
        "swiglu_kernel", (-(-gate.numel() // SWIGLU_BLOCK),), gate, up, y, gate.numel(), BLOCK=SWIGLU_BLOCK
    )
    return y


def _swiglu_backward(g_y: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    g_y, gate, up = (tensor.contiguous() for tensor in (g_y, gate, up))
    g_gate, g_up, n = torch.empty_like(gate), torch.empty_like(up), gate.numel()
    tiles.launch_kernel(
        "swiglu_backward", (-(-n // SWIGLU_BLOCK),), gate, up, g_y, g_gate, g_up, n, BLOCK=SWIGLU_BLOCK
    )
    return g_gate, g_up


def _rotary(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """Rotate by the angles, or by minus the angles if `back` (the gradient)."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    rows, tokens, heads, width = x.shape
    half = width // 2
    constants = {
        "HEADS": heads,
        "HALF": half,
        "BH": next_power(half),
        "BT": max(1, TILE["rotary_kernel"] // next_power(width)),
    }
    stride = 0 if len(cos) == 1 else tokens * half
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (heads * -(-tokens // constants["BT"]), rows)
    tiles.launch_kernel(
        "rotary_kernel",
        grid,
        x,
        cos,
        sin,
        y,
        tokens,
        stride,
        *x.stride()[:3],
        SIGN=-1 if back else 1,
        **constants,
    )
    return y


def _save_angles(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save the angles for backward; x itself is not needed."""
    ctx.save_for_backward(*inputs[1:3])
    ctx.back = inputs[3]


swiglu_forward = register_differentiable("swiglu", _swiglu, _swiglu_backward, "Tensor gate, Tensor up")
rotary_forward = register_operator(
    "rotary",
    _rotary,
    "(Tensor x, Tensor cos, Tensor sin, bool back) -> Tensor",
    lambda ctx, g: (
        torch.ops.remanence.rotary.default(g, *ctx.saved_tensors, not ctx.back),
        None,
        None,
        None,
    ),
    _save_angles,
)
