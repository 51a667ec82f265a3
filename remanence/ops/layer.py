"""What a layer does around its memory, on a GPU: convolution, gates, features, and the gated normalisation, each as one kernel
(of the features, what stands between their products, which are torch's own).

The functions are those of `remanence.layers` on torch; which of the two runs is asked of `fits`. Operators of torch's own, opaque
to its compiler: no graph breaks at them. Differentiable once.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from remanence.ops import launch
from remanence.ops.resources import Launch, note, noting

AUTO = True
"""Whether CUDA tensors take the kernels."""

HAS_TRITON = importlib.util.find_spec("triton") is not None  # not imported before it is needed
WIDEST, MOST_TAPS, MOST_GATES, MOST_FEATURES = 256, 8, 128, 512

PARTS = {"short_conv": 128, "gates": 32, "gated_norm": 1024}
"""Programs (per head; per block of the input's channels; in all) that backward's sums over tokens are split between."""

TILE = {
    "short_conv_kernel": 2048,
    "short_conv_slopes": 1024,
    "short_conv_turned": 2048,
    "gated_norm_kernel": 2048,
    "gated_norm_backward": 1024,
    "lift_gated": 2048,
    "lift_gated_backward": 1024,
    "lift_added": 2048,
    "lift_added_backward": 1024,
}
"""Numbers a program has at hand of each tensor: 16 a thread, or 8 where many tensors are held at once."""

GATE_TILE = {"gates_kernel": (64, 32), "gates_slopes": (64, 0), "gates_backward": (32, 64)}
"""Tokens and channels of the input at hand; half of each for more than 64 gates."""

LIFT_PARTS, LIFT_PART = 16, 512
"""Parts (at most) that a product over tokens is made in, and tokens of one (at least): one product per head would keep few of the
chip's processors busy, and of a sum in bfloat16 leave no more digits than that has.
"""


@cache
def kernels() -> ModuleType:
    launch.kernels()  # what the interpreter needs is mended there
    from remanence.ops.kernels import layer

    return layer


def fits(x: Tensor, *, width: int = 1, taps: int = 1, gates: int = 1, features: int = 0) -> bool:
    """Whether x can take the kernels, with heads so wide, so many taps, so many gates of all heads together, and so many
    features of each key.
    """
    if not (AUTO and HAS_TRITON and x.is_cuda and x.dtype in (torch.float32, torch.bfloat16) and x.numel() > 0):
        return False
    return width <= WIDEST and 1 <= taps <= MOST_TAPS and gates <= MOST_GATES and features <= MOST_FEATURES


def short_conv(x: Tensor, past: Tensor, weight: Tensor, heads: int, unit: bool) -> Tensor:
    """``[b t w]`` to ``[b t heads e]``: SiLU of the causal convolution with `weight` ``[w taps]``, each head's vector at length 1
    if `unit`. The first tokens' taps reach into the last of `past` ``[b s w]``, s >= taps - 1.
    """
    before = past[:, past.shape[1] - weight.shape[1] + 1 :]
    return short_conv_forward(x, before.to(x.dtype), weight, heads, unit)


def log_gates(x: Tensor, weight: Tensor, bias: Tensor, heads: int, flipped: Sequence[bool]) -> tuple[Tensor, ...]:
    """``[b t d]`` to one ``[b t heads]`` for each entry of `flipped`, float32 at least: log sigmoid of the logits, of their
    negatives where flipped.
    """
    logs, *_ = gates_forward(x, weight, bias, heads, sum(1 << gate for gate, flip in enumerate(flipped) if flip))
    return logs.unbind(0)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x ``[b t heads e]`` with a gain, times SiLU of `gate` ``[b t heads*e]``, and shaped like that."""
    return gated_norm_forward(x, gate, weight, eps)


def lift(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """One layer of features: to x ``[b t h e]`` are added those that `up` ``[h e 2*o]`` makes of it, gated and at length 1, by
    way of `down` ``[h o e]``, and the sum is brought to length 1.
    """
    return lift_forward(x, up, down)


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _launch(name: str, grid: tuple[Any, ...], *tensors: Any, warps: int = 4, stages: int = 1, **constants: Any) -> None:
    constants["ACC"] = launch.triton_type(_wide(tensors[0]))
    if isinstance(tensors[0], FakeTensor):  # torch.compile asks for shapes only, `lift_launches` for the kernels' names
        note(name, tensors, {**constants, "warps": warps, "stages": stages})
        return
    with torch.cuda.device_of(tensors[0]):
        getattr(kernels(), name)[grid](*tensors, **constants, num_warps=warps, num_stages=stages)


def _split(tiles: Any, parts: int) -> tuple[Any, Any]:
    """So many tiles between at most so many programs: how many programs, and how many tiles each."""
    steps = -(-tiles // parts)
    return -(-tiles // steps), steps


def _conv_tiles(name: str, weight: Tensor, heads: int) -> dict[str, Any]:
    width, taps = weight.shape[0] // heads, weight.shape[1]
    return {"HEADS": heads, "D": width, "BD": _power(width), "BT": max(1, TILE[name] // _power(width)), "TAPS": taps}


def _short_conv(x: Tensor, past: Tensor, weight: Tensor, heads: int, unit: bool) -> Tensor:
    x, past, weight = (tensor.contiguous() for tensor in (x, past, weight))
    rows, tokens, width = x.shape
    constants = _conv_tiles("short_conv_kernel", weight, heads)
    y = torch.empty((rows, tokens, heads, width // heads), dtype=x.dtype, device=x.device)
    grid = (heads * -(-tokens // constants["BT"]), rows)
    _launch("short_conv_kernel", grid, x, past, weight, y, tokens, UNIT=unit, **constants)
    return y


def _short_conv_backward(
    g_y: Tensor, x: Tensor, past: Tensor, weight: Tensor, heads: int, unit: bool
) -> tuple[Tensor, Tensor, Tensor]:
    g_y, x, past, weight = (tensor.contiguous() for tensor in (g_y, x, past, weight))
    rows, tokens, width = x.shape
    taps = weight.shape[1]
    constants = _conv_tiles("short_conv_slopes", weight, heads)
    parts, steps = _split(-(-tokens // constants["BT"]), max(1, PARTS["short_conv"] // rows))
    g_z, g_x = torch.empty_like(x), torch.empty_like(x)
    g_past = torch.empty((rows, taps - 1, width), dtype=past.dtype, device=x.device)
    g_weight = torch.empty((rows * parts, width, taps), dtype=_wide(x), device=x.device)
    tensors = (x, past, weight, g_y, g_z, g_weight)
    _launch("short_conv_slopes", (heads * parts, rows), *tensors, tokens, steps, UNIT=unit, **constants)
    constants = _conv_tiles("short_conv_turned", weight, heads)
    grid = (heads * -(-(tokens + taps - 1) // constants["BT"]), rows)
    _launch("short_conv_turned", grid, g_z, weight, g_x, g_past, tokens, **constants)
    return g_x, g_past, g_weight.sum(0).to(weight.dtype)


def _gate_tiles(name: str, weight: Tensor, heads: int, flipped: int) -> dict[str, Any]:
    count, dim = weight.shape
    block = max(16, _power(count))
    tokens, channels = (size // (1 if block <= 64 else 2) for size in GATE_TILE[name])
    constants: dict[str, Any] = {"BG": block, "DIM": dim, "BT": tokens}
    if channels:
        constants |= {"BD": channels, "PRECISION": launch.precision()}
    return constants | (
        {"COUNT": count} if name == "gates_backward" else {"GATES": count // heads, "HEADS": heads, "FLIPPED": flipped}
    )


def _gates(x: Tensor, weight: Tensor, bias: Tensor, heads: int, flipped: int) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, bias = (tensor.contiguous() for tensor in (x, weight, bias))
    count, n = weight.shape[0], x.shape[0] * x.shape[1]
    like: dict[str, Any] = {"dtype": _wide(x), "device": x.device}
    logs = torch.empty((count // heads, *x.shape[:2], heads), **like)
    logits, scales = torch.empty((n, count), **like), torch.empty((n,), **like)
    constants = _gate_tiles("gates_kernel", weight, heads, flipped)
    constants["TERMS"] = 18 if x.dtype == torch.float64 else 9  # of a series, to the dtype's last digit
    _launch("gates_kernel", (-(-n // constants["BT"]),), x, weight, bias, logs, logits, scales, n, stages=3, **constants)
    return logs, logits, scales


def _gates_backward(
    g_logs: Tensor, x: Tensor, weight: Tensor, bias: Tensor, logits: Tensor, scales: Tensor, heads: int, flipped: int
) -> tuple[Tensor, Tensor, Tensor]:
    g_logs, x, weight, bias = (tensor.contiguous() for tensor in (g_logs, x, weight, bias))
    (n, count), dim = logits.shape, weight.shape[1]
    constants = _gate_tiles("gates_slopes", weight, heads, flipped)
    blocks = -(-n // constants["BT"])
    g_logits, pulls = torch.empty_like(logits), torch.empty_like(scales)
    g_bias = torch.empty((blocks, count), dtype=logits.dtype, device=x.device)
    _launch("gates_slopes", (blocks,), g_logs, logits, scales, bias, g_logits, pulls, g_bias, n, **constants)
    constants = _gate_tiles("gates_backward", weight, heads, flipped)
    parts, steps = _split(-(-n // constants["BT"]), PARTS["gates"])
    g_x, g_weight = torch.empty_like(x), torch.empty((parts, count, dim), dtype=logits.dtype, device=x.device)
    grid = (parts * -(-dim // constants["BD"]),)
    _launch("gates_backward", grid, x, weight, g_logits, pulls, g_x, g_weight, n, steps, **constants)
    return g_x, g_weight.sum(0).to(weight.dtype), g_bias.sum(0).to(bias.dtype)


def _norm_tiles(name: str, width: int, eps: float) -> dict[str, Any]:
    return {"D": width, "BD": _power(width), "BT": max(1, TILE[name] // _power(width)), "EPS": eps}


def _gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, gate, weight = (tensor.contiguous() for tensor in (x, gate, weight))
    y = torch.empty(gate.shape, dtype=torch.promote_types(x.dtype, gate.dtype), device=x.device)
    constants = _norm_tiles("gated_norm_kernel", x.shape[-1], eps)
    n = x.numel() // x.shape[-1]
    _launch("gated_norm_kernel", (-(-n // constants["BT"]),), x, gate, weight, y, n, **constants)
    return y


def _gated_norm_backward(g_y: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    g_y, x, gate, weight = (tensor.contiguous() for tensor in (g_y, x, gate, weight))
    constants = _norm_tiles("gated_norm_backward", x.shape[-1], eps)
    n = x.numel() // x.shape[-1]
    parts, steps = _split(-(-n // constants["BT"]), PARTS["gated_norm"])
    g_x, g_gate = torch.empty_like(x), torch.empty_like(gate)
    g_weight = torch.empty((parts, x.shape[-1]), dtype=_wide(x), device=x.device)
    _launch("gated_norm_backward", (parts,), x, gate, weight, g_y, g_x, g_gate, g_weight, n, steps, **constants)
    return g_x, g_gate, g_weight.sum(0).to(weight.dtype)


def _lift_launch(name: str, tokens: Any, heads: int, *tensors: Any, **constants: Any) -> None:
    size = constants["COUNT" if "COUNT" in constants else "D"]
    constants |= {"BC" if "COUNT" in constants else "BD": _power(size), "BT": max(1, TILE[name] // _power(size))}
    _launch(name, (-(-tokens // constants["BT"]), heads), *tensors, **constants)


def _lift_products(x: Tensor, up: Tensor, down: Tensor, room: Any) -> tuple[Tensor, Tensor, Tensor]:
    """By heads: the products z, the unit features of them (with room for so many tokens), and what these add to x."""
    by_heads = x.flatten(0, 1).transpose(0, 1)
    heads, n, width = by_heads.shape
    z = torch.bmm(by_heads, up)
    u = torch.empty((heads, room, down.shape[1]), dtype=x.dtype, device=x.device)
    _lift_launch("lift_gated", room, heads, z, u, n, room, COUNT=down.shape[1], SCALE=math.sqrt(width))
    return z, u, torch.bmm(u[:, :n], down)


def _lift(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    x, up, down = x.contiguous(), up.to(x.dtype), down.to(x.dtype)
    rows, tokens, heads, width = x.shape
    y, n = torch.empty_like(x), rows * tokens
    with torch.autocast(x.device.type, enabled=False):  # x has the dtype that products are to have
        _, _, added = _lift_products(x, up, down, n)
    _lift_launch("lift_added", n, heads, x, added, y, n, HEADS=heads, D=width)
    return y


def _lift_room(n: int) -> tuple[int, int]:
    """In how many parts products over n tokens are made, and of how many tokens all parts together, the last filled up."""
    parts = min(LIFT_PARTS, -(-n // LIFT_PART))
    return parts, parts * -(-n // parts)


def _over_tokens(a: Tensor, b: Tensor, parts: int) -> Tensor:
    """``[h t i]`` and ``[h t o]`` to ``[h i o]``, parts of the tokens added up in float32 at least."""
    a, b = (side.reshape(len(side) * parts, -1, side.shape[-1]) for side in (a, b))
    return torch.bmm(a.mT, b).unflatten(0, (-1, parts)).sum(1, dtype=_wide(a))


def _lift_backward(g_y: Tensor, x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    g_y, x, narrow_up, narrow_down = g_y.contiguous(), x.contiguous(), up.to(x.dtype), down.to(x.dtype)
    rows, tokens, heads, width = x.shape
    n = rows * tokens
    parts, room = _lift_room(n)
    g_x, g_sum = torch.empty_like(x), torch.empty((heads, room, width), dtype=x.dtype, device=x.device)
    turned = torch.empty_like(g_sum)
    with torch.autocast(x.device.type, enabled=False):
        z, u, added = _lift_products(x, narrow_up, narrow_down, room)
        tensors = (g_y, x, added, g_x, g_sum, turned)
        _lift_launch("lift_added_backward", room, heads, *tensors, n, room, HEADS=heads, D=width)
        g_down = _over_tokens(u, g_sum, parts).to(down.dtype)
        g_u = torch.bmm(g_sum[:, :n], narrow_down.mT)
        g_z = torch.empty((heads, room, up.shape[2]), dtype=x.dtype, device=x.device)
        constants = {"COUNT": down.shape[1], "SCALE": math.sqrt(width)}
        _lift_launch("lift_gated_backward", room, heads, z, g_u, g_z, n, room, **constants)
        g_up = _over_tokens(turned, g_z, parts).to(up.dtype)
        g_x.flatten(0, 1).transpose(0, 1).baddbmm_(g_z[:, :n], narrow_up.mT)
    return g_x, g_up, g_down


def _lift_shape(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _lift_shapes(g_y: Tensor, x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Told apart from the function itself, whose parts would bind a graph to the number of tokens it was made with."""
    return x.new_empty(x.shape), up.new_empty(up.shape), down.new_empty(down.shape)


def lift_launches(heads: int, width: int, count: int, op: torch.dtype) -> list[Launch]:
    """The kernels of `lift` and its gradient as they are launched; nothing runs."""
    with FakeTensorMode(), torch.device("cpu"), noting() as noted:
        x, up, down = (
            torch.empty(1, 8192, heads, width, dtype=op),
            torch.empty(heads, width, 2 * count),
            torch.empty(heads, count, width),
        )
        _lift_backward(_lift(x, up, down), x, up, down)
    return [Launch(name, types, constants, constants.pop("warps"), constants.pop("stages")) for name, types, constants in noted]


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.constants = inputs[3:]


def _keep_gates(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, logits, scales = output
    ctx.mark_non_differentiable(logits, scales)
    ctx.save_for_backward(*inputs[:3], logits, scales)
    ctx.constants = inputs[3:]


def _through(backward: Any) -> Any:
    def gradients(ctx: Any, g: Tensor, *_: Any) -> tuple[Any, ...]:
        return *backward(g, *ctx.saved_tensors, *ctx.constants), *[None] * len(ctx.constants)

    return gradients


_CONV, _GATES, _NORM = "Tensor x, Tensor past, Tensor weight", "Tensor x, Tensor weight, Tensor bias", "Tensor x, Tensor gate"
short_conv_backward = launch.operator(
    "short_conv_backward",
    _short_conv_backward,
    f"(Tensor g_y, {_CONV}, int heads, bool unit) -> (Tensor, Tensor, Tensor)",
    launch.once,
)
short_conv_forward = launch.operator(
    "short_conv", _short_conv, f"({_CONV}, int heads, bool unit) -> Tensor", _through(short_conv_backward), _keep_inputs
)
gates_backward = launch.operator(
    "log_gates_backward",
    _gates_backward,
    f"(Tensor g_logs, {_GATES}, Tensor logits, Tensor scales, int heads, int flipped) -> (Tensor, Tensor, Tensor)",
    launch.once,
)
gates_forward = launch.operator(
    "log_gates", _gates, f"({_GATES}, int heads, int flipped) -> (Tensor, Tensor, Tensor)", _through(gates_backward), _keep_gates
)
gated_norm_backward = launch.operator(
    "gated_norm_backward",
    _gated_norm_backward,
    f"(Tensor g_y, {_NORM}, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
    launch.once,
)
gated_norm_forward = launch.operator(
    "gated_norm", _gated_norm, f"({_NORM}, Tensor weight, float eps) -> Tensor", _through(gated_norm_backward), _keep_inputs
)
_LIFT = "Tensor x, Tensor up, Tensor down"
lift_backward = launch.operator(
    "lift_backward", _lift_backward, f"(Tensor g_y, {_LIFT}) -> (Tensor, Tensor, Tensor)", launch.once, fake=_lift_shapes
)
lift_forward = launch.operator("lift", _lift, f"({_LIFT}) -> Tensor", _through(lift_backward), _keep_inputs, fake=_lift_shape)
