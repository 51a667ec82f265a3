"""What a layer does around its memory, on a GPU: convolution, gates, features, and the gated normalisation, each as one kernel.

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
WIDEST, MOST_TAPS, MOST_GATES, MOST_FEATURES = 256, 8, 128, 128

PARTS = {"short_conv": 128, "gates": 32, "gated_norm": 1024, "lift": 512}
"""Programs (per head; per block of the input's channels; in all; in all) that backward's sums over tokens are split between."""

TILE = {
    "short_conv_kernel": 2048,
    "short_conv_slopes": 1024,
    "short_conv_turned": 2048,
    "gated_norm_kernel": 2048,
    "gated_norm_backward": 1024,
}
"""Numbers a program has at hand of each tensor: 16 a thread, or 8 where many tensors are held at once."""

GATE_TILE = {"gates_kernel": (64, 32), "gates_slopes": (64, 0), "gates_backward": (32, 64)}
"""Tokens and channels of the input at hand; half of each for more than 64 gates."""

LIFT_TILE = {"lift_kernel": (64, 32, 16), "lift_backward": (32, 32, 16), "lift_weights": (32, 32, 32)}
"""Tokens at hand, by `_burden`: with more of them the compiler ran out of registers."""

LIFT_HELD = {"lift_kernel": 2, "lift_backward": 1}
"""The burden from which on the weights are not at hand throughout, for want of registers and shared memory (of 99 KiB)."""


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
    if features and max(width, features) > MOST_FEATURES:
        return False
    return width <= WIDEST and 1 <= taps <= MOST_TAPS and gates <= MOST_GATES


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


def lift(x: Tensor, weight: Tensor, mix: Tensor) -> Tensor:
    """``[b t h width]`` to ``[b t h width+count]``: x, and beside it the features that a gated layer with `weight`
    ``[h width 2*count]`` makes of it, at length 1; in shares by the logits `mix` ``[h]``, so that of a unit x the whole is unit.
    """
    return lift_forward(x, weight, mix)


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


def _burden(x: Tensor, weight: Tensor) -> int:
    """0 for bfloat16, with up to 64 channels and features; 1 more where either is wider, and 1 more for float32."""
    return int(max(weight.shape[1], weight.shape[2] // 2) > 64) + int(x.dtype.itemsize > 2)


def _lift_tiles(name: str, x: Tensor, weight: Tensor, chip: int) -> dict[str, Any]:
    heads, width, side = weight.shape
    burden = _burden(x, weight)
    constants: dict[str, Any] = {"HEADS": heads, "D": width, "BD": launch.side(width, x.dtype, chip)}
    constants |= {"BT": LIFT_TILE[name][burden], "OP": launch.triton_type(x.dtype), "PRECISION": launch.precision()}
    if name == "lift_weights":
        return constants | {"SIDE": side, "BN": 64, "warps": 4, "stages": 3}
    constants |= {"COUNT": side // 2, "BC": launch.side(side // 2, x.dtype, chip), "SCALE": math.sqrt(width)}
    return constants | {"HELD": burden < LIFT_HELD[name], "warps": 8 if burden else 4}


def _lift_split(n: Any, tile: int, heads: int) -> tuple[Any, Any]:
    return _split(-(-n // tile), max(1, PARTS["lift"] // heads))


def _lift(x: Tensor, weight: Tensor, mix: Tensor, chip: int | None = None) -> Tensor:
    x, weight, mix = (tensor.contiguous() for tensor in (x, weight, mix))
    rows, tokens, heads, width = x.shape
    y = torch.empty((rows, tokens, heads, width + weight.shape[2] // 2), dtype=x.dtype, device=x.device)
    constants = _lift_tiles("lift_kernel", x, weight, launch.arch(x.device) if chip is None else chip)
    parts, steps = _lift_split(rows * tokens, constants["BT"], heads)
    _launch("lift_kernel", (heads * parts,), x, weight, mix, y, rows * tokens, steps, **constants)
    return y


def _lift_backward(g_y: Tensor, x: Tensor, weight: Tensor, mix: Tensor, chip: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    g_y, x, weight, mix = (tensor.contiguous() for tensor in (g_y, x, weight, mix))
    n, heads, chip = x.shape[0] * x.shape[1], x.shape[2], launch.arch(x.device) if chip is None else chip
    constants = _lift_tiles("lift_backward", x, weight, chip)
    parts, steps = _lift_split(n, constants["BT"], heads)
    like: dict[str, Any] = {"dtype": _wide(x), "device": x.device}
    g_x, g_mix = torch.empty_like(x), torch.empty((parts, heads), **like)
    held = constants["HELD"]
    g_z = torch.empty((0 if held else n, heads, weight.shape[2]), dtype=x.dtype, device=x.device)
    g_weight = torch.empty((parts if held else 0, *weight.shape), **like)
    _launch("lift_backward", (heads * parts,), x, weight, mix, g_y, g_x, g_z, g_weight, g_mix, n, steps, **constants)
    if not held:
        constants = _lift_tiles("lift_weights", x, weight, chip)
        parts, steps = _lift_split(n, constants["BT"], heads)
        g_weight = torch.empty((parts, *weight.shape), **like)
        grid = (parts * heads * -(-weight.shape[2] // constants["BN"]),)
        _launch("lift_weights", grid, x, g_z, g_weight, n, steps, **constants)
    return g_x, g_weight.sum(0).to(weight.dtype), g_mix.sum(0).to(mix.dtype)


def lift_launches(heads: int, width: int, count: int, op: torch.dtype, arch: int) -> list[Launch]:
    """The kernels of `lift` and its gradient as they are launched on a chip; nothing runs."""
    with FakeTensorMode(), torch.device("cpu"), noting() as noted:
        x, weight, mix = torch.empty(1, 8192, heads, width, dtype=op), torch.empty(heads, width, 2 * count), torch.empty(heads)
        _lift_backward(_lift(x, weight, mix, arch), x, weight, mix, arch)
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
lift_backward = launch.operator(
    "lift_backward",
    _lift_backward,
    "(Tensor g_y, Tensor x, Tensor weight, Tensor mix) -> (Tensor, Tensor, Tensor)",
    launch.once,
)
lift_forward = launch.operator(
    "lift", _lift, "(Tensor x, Tensor weight, Tensor mix) -> Tensor", _through(lift_backward), _keep_inputs
)
