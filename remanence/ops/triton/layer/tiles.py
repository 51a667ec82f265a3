"""Tiles and launches that the kernels of a layer share."""

from __future__ import annotations

from contextvars import ContextVar
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from remanence.ops.triton import dispatch, launch
from remanence.ops.triton.resources import SHARED, Constants, record

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
    "sigmoid_gated_norm_kernel": 2048,
    "sigmoid_gated_norm_backward": 2048,
    "rotary_kernel": 2048,
    "key_features_gated": 2048,
    "key_features_gated_backward": 1024,
    "key_features_added": 2048,
    "key_features_added_backward": 1024,
}
"""Elements of each tensor in one program: 16 a thread, or 8 where many tensors are loaded at once."""


@cache
def kernels() -> ModuleType:
    launch.kernels()  # patches the interpreter
    from remanence.ops.triton.kernels import layer

    return layer


def is_supported(
    x: Tensor, *, width: int = 1, taps: int = 1, gates: int = 1, features: int = 0, channels: int = 1
) -> bool:
    """Whether x can take these kernels; `dispatch.layer_reason` says why not."""
    return dispatch.layer_reason(x, width, taps, gates, features, channels) is None


def next_power(size: int) -> int:
    return 1 << (size - 1).bit_length()


def sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def launch_kernel(
    name: str, grid: tuple[Any, ...], *tensors: Any, warps: int = 4, stages: int = 1, **constants: Any
) -> None:
    constants["ACC"] = launch.triton_type(sum_dtype(tensors[0]))
    # torch.compile wants shapes only, `key_features_launches` the kernels' names.
    if isinstance(tensors[0], FakeTensor):
        record(name, tensors, {**constants, "warps": warps, "stages": stages})
        return
    with torch.cuda.device_of(tensors[0]):
        getattr(kernels(), name)[grid](*tensors, **constants, num_warps=warps, num_stages=stages)


def split_tiles(tiles: Any, parts: int) -> tuple[Any, Any]:
    """Split tiles between at most `parts` programs: how many programs, and how many tiles each."""
    steps = -(-tiles // parts)
    return -(-tiles // steps), steps


def group_sizes(weight: Tensor, plain: int, count: Any) -> tuple[int, Any]:
    """How many groups a weight has (1 without the extra dimension), and how many of `count` belong to each."""
    groups = weight.shape[0] if weight.dim() > plain else 1
    return groups, count // groups


def sum_parts(parts: Tensor, groups: int) -> Tensor:
    """``[groups*parts ...]`` to ``[groups ...]``."""
    return parts.unflatten(0, (groups, -1)).sum(1)


def product_options(x: Tensor) -> Constants:
    """Dtypes, and how many slices are loaded ahead: fewer on a GPU with little shared memory."""
    return {
        "OP": launch.triton_type(x.dtype),
        "PRECISION": launch.precision(),
        "stages": 2 if has_large_shared_memory(x) else 1,
    }


recorded_chip: ContextVar[int] = ContextVar("chip", default=90)
"""The compute capability of kernels that are recorded, not launched."""


def has_large_shared_memory(x: Tensor) -> bool:
    """Whether a block may have about 160 KiB of shared memory."""
    return SHARED.get(arch_of(x), 227) > 160


def product_side(size: int, x: Tensor) -> int:
    """A side of a product's tile, never too narrow for the chip."""
    return launch.side(size, x.dtype, arch_of(x))


def arch_of(x: Tensor) -> int:
    return launch.arch(x.device) if x.is_cuda else 0 if launch.interpreted() else recorded_chip.get()
