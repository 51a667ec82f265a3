"""Torch operators for the computations around a memory in its layer, used under torch.compile on a CPU. They
correspond to the functions of ops/triton/layer, and have the same results as `remanence.layers`.

Without them, the compiler turns every group of elementwise operations into a C++ file that takes seconds to
build: twenty files for a layer and its gradient, but only a few with these operators. They can be
differentiated once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from remanence.ops.library import register_differentiable
from remanence.runtime.state import roll_history as rolled

_aten = torch.ops.aten


def is_supported(x: Tensor) -> bool:
    """Whether to use these operators: only under torch.compile, on a CPU, and for an input that is not empty."""
    return x.device.type == "cpu" and x.numel() > 0 and torch.compiler.is_compiling()


def short_conv(x: Tensor, past: Tensor, weight: Tensor, heads: int, unit: bool) -> Tensor:
    """Return SiLU of the causal convolution of x ``[b t w]`` as heads ``[b t h e]``, normalised to unit
    length if `unit`. `past` has the inputs before x.
    """
    before = past[:, past.shape[1] - weight.shape[1] + 1 :]
    return short_conv_forward(x, before.to(x.dtype), weight, heads, unit)


def log_gates(
    x: Tensor, weight: Tensor, bias: Tensor, heads: int, negated: Sequence[bool]
) -> tuple[Tensor, ...]:
    """Return log-sigmoid gates ``[b t h]`` of x ``[b t d]``, one per entry of `negated`. Where an entry is
    True, the gate is the log-sigmoid of the negated logits.
    """
    logs, *_ = log_gates_forward(
        x, weight, bias, heads, sum(1 << gate for gate, negate in enumerate(negated) if negate)
    )
    return logs.unbind(0)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm of x ``[b t h e]`` times SiLU of `gate` ``[b t h*e]``, in the shape of the gate."""
    return gated_norm_forward(x, gate, weight, eps)


def key_features(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Apply one feature layer of a deep memory to keys x ``[b t h e]``. The result has the same shape."""
    return key_features_forward(x, up, down)


def roll_history(past: Tensor, new: Tensor) -> Tensor:
    """Run `runtime.state.roll_history` as an operator. Otherwise its branch on the length would be compiled
    again for every length.
    """
    return roll_history_forward(past, new)


def _upcast(x: Tensor) -> Tensor:
    """Return x in float32, or unchanged if it is float64."""
    return x if x.dtype == torch.float64 else x.float()


def _unit_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x normalised to unit length over its last axis, and the factor by which it was multiplied."""
    factor = torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-12)
    return x * factor, factor


def _unit_norm_backward(grad: Tensor, y: Tensor, factor: Tensor) -> Tensor:
    """Return the gradient of the input of `_unit_norm`, from the gradient of its output, the output y and the
    factor.
    """
    return torch.addcmul(grad, y, (grad * y).sum(-1, keepdim=True), value=-1).mul_(factor)


def _short_conv(x: Tensor, past: Tensor, weight: Tensor, heads: int, unit: bool) -> Tensor:
    """Compute the operator behind `short_conv`. Here `past` has exactly kernel - 1 tokens."""
    y = F.silu(_convolve(_conv_input(x, past), weight)).unflatten(-1, (heads, -1))
    return (_unit_norm(_upcast(y))[0].to(x.dtype) if unit else y).contiguous()


def _short_conv_backward(
    g_y: Tensor, x: Tensor, past: Tensor, weight: Tensor, heads: int, unit: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, past and weight."""
    image = _conv_input(x, past)
    z = _convolve(image, weight)
    if unit:
        y, factor = _unit_norm(_upcast(F.silu(z)).unflatten(-1, (heads, -1)))
        g_y = _unit_norm_backward(_upcast(g_y), y, factor).to(x.dtype)
    g_z = _aten.silu_backward(g_y.flatten(-2), z).mT.unsqueeze(2)
    taps, width = weight.shape[1], weight.shape[0]
    ones, none = (1, 1), (0, 0)
    g_image, g_weight, _ = _aten.convolution_backward(
        g_z,
        image,
        weight.to(x.dtype)[:, None, None],
        [0],
        ones,
        none,
        ones,
        False,
        none,
        width,
        [True, True, False],
    )
    g_past, g_x = g_image.squeeze(2).mT.split([taps - 1, x.shape[1]], 1)
    return g_x.contiguous(), g_past.to(past.dtype).contiguous(), g_weight.view_as(weight).to(weight.dtype)


def _conv_input(x: Tensor, past: Tensor) -> Tensor:
    """Return the input ``[b w 1 t]`` of a 2-D convolution, which is faster in torch than a 1-D convolution
    (see `ShortConv`).
    """
    return torch.cat([past, x], 1).mT.unsqueeze(2)


def _convolve(image: Tensor, weight: Tensor) -> Tensor:
    """Return the depthwise convolution ``[b t w]`` of the result of `_conv_input`."""
    return F.conv2d(image, weight.to(image.dtype)[:, None, None], groups=weight.shape[0]).squeeze(2).mT


def _log_gates(
    x: Tensor, weight: Tensor, bias: Tensor, heads: int, negated: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log gates ``[gates b t heads]`` and, for backward, the logits ``[b*t gates*heads]`` and the
    input scales ``[b*t]``. `negated` has one bit per gate.
    """
    tokens = _upcast(x).flatten(0, 1)
    scale = torch.rsqrt(tokens.square().mean(-1, keepdim=True) + 1e-6)
    logits = F.linear(tokens, weight.to(tokens.dtype)) * scale + bias.to(tokens.dtype)
    logs = F.logsigmoid(logits * _signs(logits, heads, negated))
    return logs.view(*x.shape[:2], -1, heads).movedim(-2, 0).contiguous(), logits, scale.squeeze(-1)


def _log_gates_backward(
    g_logs: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    logits: Tensor,
    rstds: Tensor,
    heads: int,
    negated: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias."""
    tokens, scale, signs = _upcast(x).flatten(0, 1), rstds.unsqueeze(-1), _signs(logits, heads, negated)
    g_logits = g_logs.movedim(0, -2).reshape(logits.shape) * signs * torch.sigmoid(-signs * logits)
    norm_correction = (
        (g_logits * (logits - bias.to(logits.dtype))).sum(-1, keepdim=True) * scale * scale / tokens.shape[-1]
    )
    g_products = g_logits * scale
    g_x = (g_products @ weight.to(tokens.dtype)).addcmul_(tokens, norm_correction, value=-1)
    return (
        g_x.view(x.shape).to(x.dtype),
        (g_products.mT @ tokens).to(weight.dtype),
        g_logits.sum(0).to(bias.dtype),
    )


def _signs(logits: Tensor, heads: int, negated: int) -> Tensor:
    """Return -1 for the logits of gates whose bit is set in `negated`, and 1 for the others:
    ``[gates*heads]``.
    """
    signs = [-1.0 if negated >> gate & 1 else 1.0 for gate in range(logits.shape[-1] // heads)]
    return torch.tensor(signs, dtype=logits.dtype).repeat_interleave(heads)


def _gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps).flatten(-2) * F.silu(gate)


def _gated_norm_backward(
    g_y: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, gate and weight."""
    wide, gain = _upcast(x), weight.to(_upcast(x).dtype)
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = wide * factor
    g_gate = _aten.silu_backward((_upcast(g_y) * (normed * gain).flatten(-2)).to(gate.dtype), gate)
    g_gained = (g_y * F.silu(gate)).unflatten(-1, x.shape[-2:]).to(wide.dtype)
    g_weight = (g_gained * normed).flatten(0, -2).sum(0)
    g_normed = g_gained.mul_(gain)
    norm_correction = (g_normed * normed).mean(-1, keepdim=True)
    return (
        torch.addcmul(g_normed, normed, norm_correction, value=-1).mul_(factor).to(x.dtype),
        g_gate,
        g_weight.to(weight.dtype),
    )


def _key_features(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    rows = _heads_first(x)
    u = _gated_features(rows, up)[-2]
    return (
        _unit_norm(_upcast(rows + u @ down.to(x.dtype)))[0]
        .to(x.dtype)
        .transpose(0, 1)
        .reshape(x.shape)
        .contiguous()
    )


def _key_features_backward(g_y: Tensor, x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, up and down."""
    rows, narrow_up, narrow_down = _heads_first(x), up.to(x.dtype), down.to(x.dtype)
    gate, value, active, u, factor = _gated_features(rows, up)
    y, scale = _unit_norm(_upcast(torch.baddbmm(rows, u, narrow_down)))
    g_sum = _unit_norm_backward(_upcast(_heads_first(g_y)), y, scale).to(x.dtype)
    g_down = u.mT @ g_sum
    g_f = _unit_norm_backward(_upcast(g_sum @ narrow_down.mT), _upcast(u), factor).to(x.dtype)
    g_z = torch.cat([_aten.silu_backward(g_f * value, gate), g_f * active], -1).mul_(math.sqrt(x.shape[-1]))
    g_up = rows.mT @ g_z
    g_x = g_sum.baddbmm_(g_z, narrow_up.mT).transpose(0, 1).reshape(x.shape).contiguous()
    return g_x, g_up.to(up.dtype), g_down.to(down.dtype)


def _heads_first(x: Tensor) -> Tensor:
    """Reshape ``[b t h e]`` to ``[h b*t e]``."""
    return x.flatten(0, 1).transpose(0, 1)


def _gated_features(rows: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return five tensors: the gate, the value, SiLU of the gate, the features ``[h n o]`` at unit length,
    and the factor that normalised them.
    """
    gate, value = (math.sqrt(rows.shape[-1]) * (rows @ up.to(rows.dtype))).chunk(2, -1)
    active = F.silu(gate)
    u, factor = _unit_norm(_upcast(active * value))
    return gate, value, active, u.to(rows.dtype), factor


def _roll_history_backward(grad: Tensor, past: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of past and new."""
    length, count = past.shape[1], new.shape[1]
    kept = min(count, length)
    g_past = F.pad(grad[:, : length - kept], (0, 0, kept, 0))
    return g_past, F.pad(grad[:, length - kept :], (0, 0, count - kept, 0)).to(new.dtype)


def _fake_short_conv(x: Tensor, past: Tensor, weight: Tensor, heads: int, unit: bool) -> Tensor:
    """Return an empty tensor like the result of `_short_conv`, for tracing. The other `_fake_` functions do
    the same.
    """
    return x.new_empty(*x.shape[:2], heads, x.shape[2] // heads)


def _fake_log_gates(
    x: Tensor, weight: Tensor, bias: Tensor, heads: int, negated: int
) -> tuple[Tensor, Tensor, Tensor]:
    like = _upcast(x)
    tokens, count = x.shape[0] * x.shape[1], weight.shape[0]
    return (
        like.new_empty(count // heads, *x.shape[:2], heads),
        like.new_empty(tokens, count),
        like.new_empty(tokens),
    )


def _fake_gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return gate.new_empty(gate.shape, dtype=torch.promote_types(x.dtype, gate.dtype))


def _fake_key_features(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _register(
    name: str, forward: Any, backward: Any, shape: Any, inputs: str, constants: str = "", extra: int = 0
) -> Any:
    """Call `library.register_differentiable` with fake gradients that have the shapes of the inputs. `shape`
    is the fake forward function.
    """
    count = inputs.count("Tensor")

    def like_inputs(g_y: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        return tuple(x.new_empty(x.shape) for x in inputs[:count])

    return register_differentiable(
        f"{name}_cpu",
        forward,
        backward,
        inputs,
        constants,
        extra=extra,
        fake=shape,
        fake_backward=like_inputs,
    )


short_conv_forward = _register(
    "short_conv",
    _short_conv,
    _short_conv_backward,
    _fake_short_conv,
    "Tensor x, Tensor past, Tensor weight",
    "int heads, bool unit",
)
log_gates_forward = _register(
    "log_gates",
    _log_gates,
    _log_gates_backward,
    _fake_log_gates,
    "Tensor x, Tensor weight, Tensor bias",
    "int heads, int negated",
    extra=2,
)
gated_norm_forward = _register(
    "gated_norm",
    _gated_norm,
    _gated_norm_backward,
    _fake_gated_norm,
    "Tensor x, Tensor gate, Tensor weight",
    "float eps",
)
key_features_forward = _register(
    "key_features",
    _key_features,
    _key_features_backward,
    _fake_key_features,
    "Tensor x, Tensor up, Tensor down",
)
roll_history_forward = _register(
    "roll_history",
    rolled,
    _roll_history_backward,
    lambda past, new: past.new_empty(past.shape),
    "Tensor past, Tensor new",
)
