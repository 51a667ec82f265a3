"""What a block does around its memory and its projections, on a GPU: convolution, gates, features, norms and rotary
angles, each as one kernel. (Wide features use torch's batched products, with kernels in between.)

Weights may have one more axis in front: groups, the weights of several layers at once. The rows are then split into as
many equal shares, one after the other.

The functions do what `remanence.layers` does in torch; `fits` decides which of the two runs. They are torch operators,
so no graph breaks at them, and differentiable once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextvars import ContextVar
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from remanence.ops.library import differentiable, operator, raise_on_double_backward
from remanence.ops.triton import dispatch, launch
from remanence.ops.triton.resources import SHARED, Launch, record, recording
from remanence.runtime.state import roll_history

PARTS = {"short_conv": 128, "gates": 32, "gated_norm": 1024, "rms_norm": 1024}
"""Programs (per head; per block of the input's channels; in all) that backward's sums over tokens are split between."""

TILE = {
    "short_conv_kernel": 2048,
    "short_conv_slopes": 1024,
    "short_conv_turned": 2048,
    "gated_norm_kernel": 2048,
    "gated_norm_backward": 1024,
    "rms_norm_kernel": 2048,
    "rms_norm_backward": 2048,
    "join_kernel": 2048,
    "join_backward": 2048,
    "rotary_kernel": 2048,
    "key_features_gated": 2048,
    "key_features_gated_backward": 1024,
    "key_features_added": 2048,
    "key_features_added_backward": 1024,
}
"""Elements of each tensor in one program: 16 a thread, or 8 where many tensors are loaded at once."""

GATE_TILE = {"gates_kernel": (64, 32), "gates_slopes": (64, 0), "gates_backward": (32, 64)}
"""Tokens and channels of the input in one tile; half of each for more than 64 gates."""

FEATURE_PARTS, FEATURE_PART = 16, 512
"""The most parts that a product over tokens is split into, and the fewest tokens of one. One product per head would use
few of the GPU's processors, and would add everything up in bfloat16.
"""


@cache
def kernels() -> ModuleType:
    launch.kernels()  # patches the interpreter
    from remanence.ops.triton.kernels import layer

    return layer


def fits(
    x: Tensor, *, width: int = 1, taps: int = 1, gates: int = 1, features: int = 0, channels: int = 1
) -> bool:
    """Whether x can take these kernels; `dispatch.layer_reason` says why not."""
    return dispatch.layer_reason(x, width, taps, gates, features, channels) is None


def short_conv(x: Tensor, past: Tensor, weight: Tensor, heads: int, unit: bool) -> tuple[Tensor, Tensor]:
    """``[b t w]`` to ``[b t heads e]``: SiLU of the causal convolution with `weight` ``[w taps]``, each head's vector
    at unit length if `unit`. The first tokens' taps reach into the end of `past` ``[b s w]``, s >= taps - 1. The second
    result is the past after x; one operator returns both, because few of x's tokens get a gradient from it.
    """
    y, kept, _ = short_conv_forward(x, past, weight, heads, unit)
    return y, kept


def log_gates(
    x: Tensor, weight: Tensor, bias: Tensor, heads: int, flipped: Sequence[bool]
) -> tuple[Tensor, ...]:
    """``[b t d]`` to one ``[b t heads]`` for each entry of `flipped`, float32 at least: log sigmoid of the logits, of
    their negatives where flipped.
    """
    logs, *_ = gates_forward(
        x, weight, bias, heads, sum(1 << gate for gate, flip in enumerate(flipped) if flip)
    )
    return logs.unbind(0)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x ``[b t heads e]`` with a gain, times SiLU of `gate` ``[b t heads*e]``, and shaped like that."""
    return gated_norm_forward(x, gate, weight, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """RMSNorm over the last axis with a gain, in float32 at least, the result in `dtype`."""
    return rms_norm_forward(x, weight, eps, dtype)


def join(x: Tensor, m: Tensor, weight: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMSNorm of x with the one gain, times the sigmoid of RMSNorm of m with the other."""
    return join_forward(x, m, weight, gain, eps)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU of the one times the other."""
    return swiglu_forward(gate, up)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x ``[r t h e]`` with channel pairs (i, i + e/2) rotated by angles ``[r or 1, t, e/2]``, which get no gradient."""
    return rotary_forward(x, cos, sin, False)


def by_heads(x: Tensor, weight: Tensor, base: Tensor | None = None) -> Tensor:
    """Each head of x ``[b t h i]`` times its matrix ``[h i o]``, in x's dtype, plus `base` ``[b t h o]`` if given."""
    return heads_forward(x, weight, base)


def key_features(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """One layer of features: `up` ``[h e 2*o]`` makes gated features at unit length of x ``[b t h e]``, `down`
    ``[h o e]`` projects them back, and x plus that is normalized to unit length.
    """
    return key_features_forward(x, up, down)


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _launch(
    name: str, grid: tuple[Any, ...], *tensors: Any, warps: int = 4, stages: int = 1, **constants: Any
) -> None:
    constants["ACC"] = launch.triton_type(_wide(tensors[0]))
    # torch.compile wants shapes only, `key_features_launches` the kernels' names.
    if isinstance(tensors[0], FakeTensor):
        record(name, tensors, {**constants, "warps": warps, "stages": stages})
        return
    with torch.cuda.device_of(tensors[0]):
        getattr(kernels(), name)[grid](*tensors, **constants, num_warps=warps, num_stages=stages)


def _split(tiles: Any, parts: int) -> tuple[Any, Any]:
    """Split tiles between at most `parts` programs: how many programs, and how many tiles each."""
    steps = -(-tiles // parts)
    return -(-tiles // steps), steps


def _conv_tiles(name: str, weight: Tensor, heads: int) -> dict[str, Any]:
    width, taps = weight.shape[-2] // heads, weight.shape[-1]
    elements = TILE[name]
    if name == "short_conv_slopes" and taps > 4:  # a tile for every tap is held in registers
        elements = elements * 4 // _power(taps)
    return {
        "HEADS": heads,
        "D": width,
        "BD": _power(width),
        "BT": max(1, elements // _power(width)),
        "TAPS": taps,
    }


def _per(weight: Tensor, plain: int, count: Any) -> tuple[int, Any]:
    """How many groups a weight has (1 without the extra dimension), and how many of `count` belong to each."""
    groups = weight.shape[0] if weight.dim() > plain else 1
    return groups, count // groups


def _short_conv(
    x: Tensor, past: Tensor, weight: Tensor, heads: int, unit: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The results, and the part of the past that was used, for backward."""
    kept = roll_history(past, x)
    past = past[:, past.shape[1] - weight.shape[-1] + 1 :].to(x.dtype, copy=True)
    x, past, weight = (tensor.contiguous() for tensor in (x, past, weight))
    rows, tokens, width = x.shape
    constants = _conv_tiles("short_conv_kernel", weight, heads)
    y = torch.empty((rows, tokens, heads, width // heads), dtype=x.dtype, device=x.device)
    grid = (heads * -(-tokens // constants["BT"]), rows)
    _launch(
        "short_conv_kernel",
        grid,
        x,
        past,
        weight,
        y,
        tokens,
        _per(weight, 2, rows)[1],
        UNIT=unit,
        **constants,
    )
    return y, kept, past


def _short_conv_backward(
    g_y: Tensor,
    g_kept: Tensor | None,
    x: Tensor,
    past: Tensor,
    weight: Tensor,
    heads: int,
    unit: bool,
    like: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """`past` is the part that was used, `like` has the shape of all of it."""
    g_y, x, past, weight = (tensor.contiguous() for tensor in (g_y, x, past, weight))
    rows, tokens, width = x.shape
    taps, (groups, per) = weight.shape[-1], _per(weight, 2, rows)
    constants = _conv_tiles("short_conv_slopes", weight, heads)
    parts, steps = _split(-(-tokens // constants["BT"]), max(1, PARTS["short_conv"] // rows))
    g_z, g_x = torch.empty_like(x), torch.empty_like(x)
    g_past = torch.empty((rows, taps - 1, width), dtype=past.dtype, device=x.device)
    g_weight = torch.empty((rows * parts, width, taps), dtype=_wide(x), device=x.device)
    tensors = (x, past, weight, g_y, g_z, g_weight)
    _launch("short_conv_slopes", (heads * parts, rows), *tensors, tokens, steps, per, UNIT=unit, **constants)
    constants = _conv_tiles("short_conv_turned", weight, heads)
    grid = (heads * -(-(tokens + taps - 1) // constants["BT"]), rows)
    _launch("short_conv_turned", grid, g_z, weight, g_x, g_past, tokens, per, **constants)
    held = like.shape[1]
    g_past = F.pad(g_past.to(like.dtype), (0, 0, held - taps + 1, 0))
    if g_kept is not None and held:
        new = min(tokens, held)
        g_x[:, tokens - new :] += g_kept[:, held - new :].to(g_x.dtype)
        g_past[:, new:] += g_kept[:, : held - new]
    return g_x, g_past, _summed(g_weight, groups).view_as(weight).to(weight.dtype)


def _summed(parts: Tensor, groups: int) -> Tensor:
    """``[groups*parts ...]`` to ``[groups ...]``."""
    return parts.unflatten(0, (groups, -1)).sum(1)


def _gate_tiles(name: str, weight: Tensor, heads: int, flipped: int) -> dict[str, Any]:
    count, dim = weight.shape[-2:]
    block = max(16, _power(count))
    tokens, channels = (size // (1 if block <= 64 else 2) for size in GATE_TILE[name])
    constants: dict[str, Any] = {"BG": block, "DIM": dim, "BT": tokens}
    if channels:
        constants |= {"BD": channels, "PRECISION": launch.precision()}
    return constants | (
        {"COUNT": count}
        if name == "gates_backward"
        else {"GATES": count // heads, "HEADS": heads, "FLIPPED": flipped}
    )


def _gates(
    x: Tensor, weight: Tensor, bias: Tensor, heads: int, flipped: int
) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, bias = (tensor.contiguous() for tensor in (x, weight, bias))
    count, n = weight.shape[-2], x.shape[0] * x.shape[1]
    groups, per = _per(weight, 2, n)
    like: dict[str, Any] = {"dtype": _wide(x), "device": x.device}
    logs = torch.empty((count // heads, *x.shape[:2], heads), **like)
    logits, scales = torch.empty((n, count), **like), torch.empty((n,), **like)
    constants = _gate_tiles("gates_kernel", weight, heads, flipped)
    constants["TERMS"] = 18 if x.dtype == torch.float64 else 9  # of a series, to the dtype's last digit
    grid = (-(-per // constants["BT"]), groups)
    _launch("gates_kernel", grid, x, weight, bias, logs, logits, scales, n, per, stages=3, **constants)
    return logs, logits, scales


def _gates_backward(
    g_logs: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    logits: Tensor,
    scales: Tensor,
    heads: int,
    flipped: int,
) -> tuple[Tensor, Tensor, Tensor]:
    g_logs, x, weight, bias = (tensor.contiguous() for tensor in (g_logs, x, weight, bias))
    (n, count), dim = logits.shape, weight.shape[-1]
    groups, per = _per(weight, 2, n)
    constants = _gate_tiles("gates_slopes", weight, heads, flipped)
    blocks = -(-per // constants["BT"])
    g_logits, pulls = torch.empty_like(logits), torch.empty_like(scales)
    g_bias = torch.empty((groups * blocks, count), dtype=logits.dtype, device=x.device)
    _launch(
        "gates_slopes",
        (blocks, groups),
        g_logs,
        logits,
        scales,
        bias,
        g_logits,
        pulls,
        g_bias,
        n,
        per,
        **constants,
    )
    constants = _gate_tiles("gates_backward", weight, heads, flipped)
    parts, steps = _split(-(-per // constants["BT"]), max(1, PARTS["gates"] // groups))
    g_x, g_weight = (
        torch.empty_like(x),
        torch.empty((groups * parts, count, dim), dtype=logits.dtype, device=x.device),
    )
    grid = (parts * -(-dim // constants["BD"]), groups)
    _launch("gates_backward", grid, x, weight, g_logits, pulls, g_x, g_weight, per, steps, **constants)
    summed = (_summed(g_weight, groups).view_as(weight), _summed(g_bias, groups).view_as(bias))
    return g_x, summed[0].to(weight.dtype), summed[1].to(bias.dtype)


def _norm_tiles(name: str, width: int, eps: float) -> dict[str, Any]:
    return {"D": width, "BD": _power(width), "BT": max(1, TILE[name] // _power(width)), "EPS": eps}


def _gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, gate, weight = (tensor.contiguous() for tensor in (x, gate, weight))
    y = torch.empty(gate.shape, dtype=torch.promote_types(x.dtype, gate.dtype), device=x.device)
    constants = _norm_tiles("gated_norm_kernel", x.shape[-1], eps)
    groups, per = _per(weight, 1, x.numel() // x.shape[-1])
    _launch("gated_norm_kernel", (-(-per // constants["BT"]), groups), x, gate, weight, y, per, **constants)
    return y


def _gated_norm_backward(
    g_y: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    g_y, x, gate, weight = (tensor.contiguous() for tensor in (g_y, x, gate, weight))
    constants = _norm_tiles("gated_norm_backward", x.shape[-1], eps)
    groups, per = _per(weight, 1, x.numel() // x.shape[-1])
    parts, steps = _split(-(-per // constants["BT"]), max(1, PARTS["gated_norm"] // groups))
    g_x, g_gate = torch.empty_like(x), torch.empty_like(gate)
    g_weight = torch.empty((groups * parts, x.shape[-1]), dtype=_wide(x), device=x.device)
    _launch(
        "gated_norm_backward",
        (parts, groups),
        x,
        gate,
        weight,
        g_y,
        g_x,
        g_gate,
        g_weight,
        per,
        steps,
        **constants,
    )
    return g_x, g_gate, _summed(g_weight, groups).view_as(weight).to(weight.dtype)


def _wide_norm(name: str, weight: Tensor, n: int, eps: float) -> tuple[dict[str, Any], int, int]:
    """Tiles of a norm over complete vectors, its groups, and how many vectors each has."""
    groups, per = _per(weight, 1, n)
    constants = _norm_tiles(name, weight.shape[-1], eps)
    constants["warps"] = max(4, min(16, constants["BD"] * constants["BT"] // 512))
    return constants, groups, per


def _rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    x, weight = x.contiguous(), weight.contiguous()
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    constants, groups, per = _wide_norm("rms_norm_kernel", weight, x.numel() // x.shape[-1], eps)
    _launch("rms_norm_kernel", (-(-per // constants["BT"]), groups), x, weight, y, per, **constants)
    return y


def _rms_norm_backward(g_y: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    g_y, x, weight = (tensor.contiguous() for tensor in (g_y, x, weight))
    constants, groups, per = _wide_norm("rms_norm_backward", weight, x.numel() // x.shape[-1], eps)
    parts, steps = _split(-(-per // constants["BT"]), max(1, PARTS["rms_norm"] // groups))
    g_x, g_weight = (
        torch.empty_like(x),
        torch.empty((groups * parts, x.shape[-1]), dtype=_wide(x), device=x.device),
    )
    _launch("rms_norm_backward", (parts, groups), x, weight, g_y, g_x, g_weight, per, steps, **constants)
    return g_x, _summed(g_weight, groups).view_as(weight).to(weight.dtype)


def _join(x: Tensor, m: Tensor, weight: Tensor, gain: Tensor, eps: float) -> Tensor:
    x, m, weight, gain = (tensor.contiguous() for tensor in (x, m, weight, gain))
    y = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, m.dtype), device=x.device)
    constants, groups, per = _wide_norm("join_kernel", weight, x.numel() // x.shape[-1], eps)
    _launch("join_kernel", (-(-per // constants["BT"]), groups), x, m, weight, gain, y, per, **constants)
    return y


def _join_backward(
    g_y: Tensor, x: Tensor, m: Tensor, weight: Tensor, gain: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g_y, x, m, weight, gain = (tensor.contiguous() for tensor in (g_y, x, m, weight, gain))
    constants, groups, per = _wide_norm("join_backward", weight, x.numel() // x.shape[-1], eps)
    parts, steps = _split(-(-per // constants["BT"]), max(1, PARTS["rms_norm"] // groups))
    g_x, g_m = torch.empty_like(x), torch.empty_like(m)
    g_weight, g_gain = (
        torch.empty((groups * parts, x.shape[-1]), dtype=_wide(x), device=x.device) for _ in range(2)
    )
    tensors = (x, m, weight, gain, g_y, g_x, g_m, g_weight, g_gain)
    _launch("join_backward", (parts, groups), *tensors, per, steps, **constants)
    sums = [
        _summed(parts, groups).view_as(like).to(like.dtype)
        for parts, like in ((g_weight, weight), (g_gain, gain))
    ]
    return g_x, g_m, sums[0], sums[1]


SWIGLU_BLOCK = 2048


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    _launch(
        "swiglu_kernel", (-(-gate.numel() // SWIGLU_BLOCK),), gate, up, y, gate.numel(), BLOCK=SWIGLU_BLOCK
    )
    return y


def _swiglu_backward(g_y: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    g_y, gate, up = (tensor.contiguous() for tensor in (g_y, gate, up))
    g_gate, g_up, n = torch.empty_like(gate), torch.empty_like(up), gate.numel()
    _launch("swiglu_backward", (-(-n // SWIGLU_BLOCK),), gate, up, g_y, g_gate, g_up, n, BLOCK=SWIGLU_BLOCK)
    return g_gate, g_up


def _rotary(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    rows, tokens, heads, width = x.shape
    half = width // 2
    constants = {
        "HEADS": heads,
        "HALF": half,
        "BH": _power(half),
        "BT": max(1, TILE["rotary_kernel"] // _power(width)),
    }
    stride = 0 if len(cos) == 1 else tokens * half
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (heads * -(-tokens // constants["BT"]), rows)
    _launch(
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


def _head_tiles(x: Tensor, inputs: int, outputs: int) -> dict[str, Any]:
    """Tiles of products by heads: complete rows of x, and as much of the matrix as fits beside them."""
    narrow = x.dtype == torch.bfloat16
    block = min(_dot(outputs, x), 128 if narrow else 64)
    constants = {
        "HEADS": x.shape[2],
        "INPUTS": inputs,
        "BI": _dot(inputs, x),
        "OUTPUTS": outputs,
        "BO": block,
        "BT": 64 if narrow else 32,
    }
    return constants | _dtypes(x) | {"warps": 8 if narrow and block > 64 else 4}


def _dtypes(x: Tensor) -> dict[str, Any]:
    """Dtypes, and how many slices are loaded ahead: fewer on a GPU with little shared memory."""
    return {
        "OP": launch.triton_type(x.dtype),
        "PRECISION": launch.precision(),
        "stages": 2 if _roomy(x) else 1,
    }


_chip: ContextVar[int] = ContextVar("chip", default=90)
"""The compute capability of kernels that are recorded, not launched."""


def _roomy(x: Tensor) -> bool:
    """Whether a block may have about 160 KiB of shared memory."""
    return SHARED.get(_arch(x), 227) > 160


def _dot(size: int, x: Tensor) -> int:
    """A side of a product's tile, never too narrow for the chip."""
    return launch.side(size, x.dtype, _arch(x))


def _arch(x: Tensor) -> int:
    return launch.arch(x.device) if x.is_cuda else 0 if launch.interpreted() else _chip.get()


def _heads(x: Tensor, weight: Tensor, base: Tensor | None) -> Tensor:
    return _heads_product(x, weight, base, False)


def _heads_product(x: Tensor, weight: Tensor, base: Tensor | None, turned: bool) -> Tensor:
    x, weight = x.contiguous(), weight.to(x.dtype).contiguous()
    base = None if base is None else base.contiguous()
    inputs, outputs = weight.shape[-2:][::-1] if turned else weight.shape[-2:]
    groups, per = _per(weight, 3, x.shape[0] * x.shape[1])
    y = torch.empty((*x.shape[:3], outputs), dtype=x.dtype, device=x.device)
    constants = _head_tiles(x, inputs, outputs)
    grid = (-(-per // constants["BT"]), groups * x.shape[2], -(-outputs // constants["BO"]))
    beside = x if base is None else base
    _launch(
        "heads_kernel", grid, x, weight, beside, y, per, TURNED=turned, BASE=base is not None, **constants
    )
    return y


HEAD_PROGRAMS = 528
"""The most programs that a product over tokens is split between: four per processor of a large GPU."""


def _heads_weight(x: Tensor, g: Tensor, weight: Tensor) -> Tensor:
    """The gradient of `weight` in ``by_heads(x, weight)``."""
    inputs, outputs = weight.shape[-2:]
    groups, per = _per(weight, 3, x.shape[0] * x.shape[1])
    side = 128 if x.dtype == torch.bfloat16 else 64
    constants = {
        "HEADS": x.shape[2],
        "INPUTS": inputs,
        "BI": min(_dot(inputs, x), side),
        "OUTPUTS": outputs,
        "BO": min(_dot(outputs, x), side),
    }
    constants |= {"BT": 64 if side == 128 else 32, **_dtypes(x), "warps": 8 if side == 128 else 4}
    blocks = -(-inputs // constants["BI"]) * -(-outputs // constants["BO"])
    every = groups * x.shape[2]
    parts, steps = _split(-(-per // constants["BT"]), max(1, HEAD_PROGRAMS // (every * blocks)))
    out = torch.empty((every * parts, inputs, outputs), dtype=_wide(x), device=x.device)
    _launch("heads_weight", (parts, every, blocks), x, g, out, per, steps, **constants)
    return _summed(out, every).view_as(weight).to(weight.dtype)


def _heads_backward(g_y: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    g_y, x = g_y.contiguous(), x.contiguous()
    return _heads_product(g_y.to(x.dtype), weight, None, True), _heads_weight(x, g_y, weight)


def _key_features_fused(x: Tensor, down: Tensor) -> bool:
    """Whether one processor can hold the weights of a head beside a tile of keys."""
    return max(x.shape[-1], down.shape[-2]) <= (128 if x.dtype == torch.bfloat16 else 64)


def _key_features_tiles(x: Tensor, down: Tensor, backward: bool) -> dict[str, Any]:
    """For wide heads backward has one program per processor and forward two, so that no register is spilled."""
    count, width = down.shape[-2:]
    narrow = x.dtype == torch.bfloat16
    wide = narrow and max(count, width) > 64
    constants: dict[str, Any] = {
        "HEADS": x.shape[2],
        "D": width,
        "BD": _dot(width, x),
        "COUNT": count,
        "BC": _dot(count, x),
    }
    constants |= {
        "BT": 64 if narrow else 32,
        "SCALE": math.sqrt(width),
        "APART": wide and backward,
        "warps": 8 if wide else 4,
    }
    return constants | _dtypes(x)


def _key_features_at_once(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    x, up, down = (tensor.to(x.dtype).contiguous() for tensor in (x, up, down))
    groups, per = _per(up, 3, x.shape[0] * x.shape[1])
    constants, y = _key_features_tiles(x, down, False), torch.empty_like(x)
    _launch(
        "key_features_kernel",
        (-(-per // constants["BT"]), groups * x.shape[2]),
        x,
        up,
        down,
        y,
        per,
        **constants,
    )
    return y


def _key_features_at_once_backward(
    g_y: Tensor, x: Tensor, up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    g_y, x, narrow_up, narrow_down = (tensor.to(x.dtype).contiguous() for tensor in (g_y, x, up, down))
    groups, per = _per(up, 3, x.shape[0] * x.shape[1])
    constants, count = _key_features_tiles(x, down, True), down.shape[-2]
    g_sum = torch.empty_like(x)
    u, g_z = (
        torch.empty((*x.shape[:3], size), dtype=x.dtype, device=x.device) for size in (count, 2 * count)
    )
    grid = (-(-per // constants["BT"]), groups * x.shape[2])
    _launch("key_features_slopes", grid, g_y, x, narrow_up, narrow_down, u, g_sum, g_z, per, **constants)
    return (
        _heads_product(g_z, narrow_up, g_sum, True),
        _heads_weight(x, g_z, up),
        _heads_weight(u, g_sum, down),
    )


def _key_features_launch(name: str, tokens: Any, heads: int, *tensors: Any, **constants: Any) -> None:
    size = constants["COUNT" if "COUNT" in constants else "D"]
    constants |= {
        "BC" if "COUNT" in constants else "BD": _power(size),
        "BT": max(1, TILE[name] // _power(size)),
    }
    _launch(name, (-(-tokens // constants["BT"]), heads), *tensors, **constants)


def _key_features_products(x: Tensor, up: Tensor, down: Tensor, room: Any) -> tuple[Tensor, Tensor, Tensor]:
    """By heads: the products z, their unit features (with room for so many tokens), and what these add to x."""
    groups = up.shape[0] // x.shape[2]
    # Of one group a view, else a copy.
    by_heads = x.flatten(0, 1).unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    heads, n, width = by_heads.shape
    z = torch.bmm(by_heads, up)
    u = torch.empty((heads, room, down.shape[1]), dtype=x.dtype, device=x.device)
    _key_features_launch(
        "key_features_gated", room, heads, z, u, n, room, COUNT=down.shape[1], SCALE=math.sqrt(width)
    )
    return z, u, torch.bmm(u[:, :n], down)


def _key_features(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    if _key_features_fused(x, down):
        return _key_features_at_once(x, up, down)
    x, up, down = x.contiguous(), up.flatten(0, -3).to(x.dtype), down.flatten(0, -3).to(x.dtype)
    rows, tokens, heads, width = x.shape
    y, n = torch.empty_like(x), rows * tokens * heads // len(up)
    with torch.autocast(x.device.type, enabled=False):  # x has the dtype that products are to have
        _, _, added = _key_features_products(x, up, down, n)
    _key_features_launch("key_features_added", n, len(up), x, added, y, n, HEADS=heads, D=width)
    return y


def _key_features_room(n: int) -> tuple[int, int]:
    """How many parts products over n tokens have, and how many tokens all parts together, the last one padded."""
    parts = min(FEATURE_PARTS, -(-n // FEATURE_PART))
    return parts, parts * -(-n // parts)


def _over_tokens(a: Tensor, b: Tensor, parts: int) -> Tensor:
    """``[h t i]`` and ``[h t o]`` to ``[h i o]``, parts of the tokens added up in float32 at least."""
    a, b = (side.reshape(len(side) * parts, -1, side.shape[-1]) for side in (a, b))
    return torch.bmm(a.mT, b).unflatten(0, (-1, parts)).sum(1, dtype=_wide(a))


def _key_features_backward(g_y: Tensor, x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if _key_features_fused(x, down):
        return _key_features_at_once_backward(g_y, x, up, down)
    g_y, x, narrow_up, narrow_down = (
        g_y.contiguous(),
        x.contiguous(),
        up.flatten(0, -3).to(x.dtype),
        down.flatten(0, -3).to(x.dtype),
    )
    rows, tokens, heads, width = x.shape
    every = len(narrow_up)  # heads of all groups
    n = rows * tokens * heads // every
    parts, room = _key_features_room(n)
    g_x, g_sum = torch.empty_like(x), torch.empty((every, room, width), dtype=x.dtype, device=x.device)
    turned = torch.empty_like(g_sum)
    with torch.autocast(x.device.type, enabled=False):
        z, u, added = _key_features_products(x, narrow_up, narrow_down, room)
        tensors = (g_y, x, added, g_x, g_sum, turned)
        _key_features_launch(
            "key_features_added_backward", room, every, *tensors, n, room, HEADS=heads, D=width
        )
        g_down = _over_tokens(u, g_sum, parts).view_as(down).to(down.dtype)
        g_u = torch.bmm(g_sum[:, :n], narrow_down.mT)
        g_z = torch.empty((every, room, up.shape[-1]), dtype=x.dtype, device=x.device)
        constants = {"COUNT": down.shape[-2], "SCALE": math.sqrt(width)}
        _key_features_launch("key_features_gated_backward", room, every, z, g_u, g_z, n, room, **constants)
        g_up = _over_tokens(turned, g_z, parts).view_as(up).to(up.dtype)
        for group in range(every // heads):  # of one group a view that a product can be added to
            part = slice(group * heads, (group + 1) * heads)
            g_x.flatten(0, 1)[group * n : (group + 1) * n].transpose(0, 1).baddbmm_(
                g_z[part, :n], narrow_up[part].mT
            )
    return g_x, g_up, g_down


def _key_features_shape(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _key_features_shapes(g_y: Tensor, x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Not the function itself, whose number of parts would bind a graph to its number of tokens."""
    return x.new_empty(x.shape), up.new_empty(up.shape), down.new_empty(down.shape)


def key_features_launches(heads: int, width: int, count: int, op: torch.dtype, arch: int) -> list[Launch]:
    """The kernels of `key_features` and its gradient as they are launched on a chip; nothing runs."""
    chip = _chip.set(arch)
    with FakeTensorMode(), torch.device("cpu"), recording() as recorded:
        x, up, down = (
            torch.empty(1, 8192, heads, width, dtype=op),
            torch.empty(heads, width, 2 * count),
            torch.empty(heads, count, width),
        )
        _key_features_backward(_key_features(x, up, down), x, up, down)
    _chip.reset(chip)
    return [
        Launch(name, types, constants, constants.pop("warps"), constants.pop("stages"))
        for name, types, constants in recorded
    ]


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.eps = inputs[2]


def _save_angles(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:3])
    ctx.back = inputs[3]


def _save_conv(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, past, weight, *ctx.constants = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.shape = output[0].shape
    ctx.save_for_backward(x, output[2], weight, past[:0].new_empty(0, past.shape[1], 0))


def _conv_gradient(ctx: Any, g_y: Tensor | None, g_kept: Tensor | None, _: None) -> tuple[Any, ...]:
    x, past, weight, like = ctx.saved_tensors
    g_y = x.new_zeros(ctx.shape) if g_y is None else g_y
    return *short_conv_backward(g_y, g_kept, x, past, weight, *ctx.constants, like), None, None


def _save_heads(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.base = None if inputs[2] is None else inputs[2].dtype


def _heads_gradient(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    return *heads_backward(g, *ctx.saved_tensors), g.to(ctx.base) if ctx.base is not None else None


_CONV = "Tensor x, Tensor past, Tensor weight"
short_conv_backward = operator(
    "short_conv_backward",
    _short_conv_backward,
    f"(Tensor g_y, Tensor? g_kept, {_CONV}, int heads, bool unit, Tensor like) -> (Tensor, Tensor, Tensor)",
    raise_on_double_backward,
)
short_conv_forward = operator(
    "short_conv",
    _short_conv,
    f"({_CONV}, int heads, bool unit) -> (Tensor, Tensor, Tensor)",
    _conv_gradient,
    _save_conv,
)
gates_forward = differentiable(
    "log_gates",
    _gates,
    _gates_backward,
    "Tensor x, Tensor weight, Tensor bias",
    "int heads, int flipped",
    extra=2,
)
gated_norm_forward = differentiable(
    "gated_norm", _gated_norm, _gated_norm_backward, "Tensor x, Tensor gate, Tensor weight", "float eps"
)
rms_norm_backward = operator(
    "rms_norm_backward",
    _rms_norm_backward,
    "(Tensor g_y, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    raise_on_double_backward,
)
rms_norm_forward = operator(
    "rms_norm",
    _rms_norm,
    "(Tensor x, Tensor weight, float eps, ScalarType dtype) -> Tensor",
    lambda ctx, g: (*rms_norm_backward(g, *ctx.saved_tensors, ctx.eps), None, None),
    _save_norm,
)
join_forward = differentiable(
    "join", _join, _join_backward, "Tensor x, Tensor m, Tensor weight, Tensor gain", "float eps"
)
swiglu_forward = differentiable("swiglu", _swiglu, _swiglu_backward, "Tensor gate, Tensor up")
rotary_forward = operator(
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
heads_backward = operator(
    "heads_backward",
    _heads_backward,
    "(Tensor g_y, Tensor x, Tensor weight) -> (Tensor, Tensor)",
    raise_on_double_backward,
)
heads_forward = operator(
    "by_heads", _heads, "(Tensor x, Tensor weight, Tensor? base) -> Tensor", _heads_gradient, _save_heads
)
key_features_forward = differentiable(
    "key_features",
    _key_features,
    _key_features_backward,
    "Tensor x, Tensor up, Tensor down",
    fake=_key_features_shape,
    fake_backward=_key_features_shapes,
)
