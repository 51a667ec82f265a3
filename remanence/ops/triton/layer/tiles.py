"""Tile sizes and launches shared by the kernels of a layer."""

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
"""The most programs among which backward splits its sums over tokens: per head for the convolution, per block
of input channels for the gates, and in total for the norms.
"""

TILE = {
    "short_conv_kernel": 2048,
    "short_conv_backward": 1024,
    "short_conv_input_backward": 2048,
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
"""Elements of each tensor that one program processes at a time, by kernel: 16 per thread, or 8 where many
tensors are loaded at once.
"""


@cache
def kernels() -> ModuleType:
    """Return the module of the layer's kernels."""
    launch.kernels()  # patches the interpreter
    from remanence.ops.triton.kernels import layer

    return layer


def is_supported(
    x: Tensor, *, width: int = 1, taps: int = 1, gates: int = 1, features: int = 0, channels: int = 1
) -> bool:
    """Whether these kernels can run on x. If not, `dispatch.layer_reason` returns why."""
    return dispatch.layer_reason(x, width, taps, gates, features, channels) is None


def next_power(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def sum_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of sums over x: float64 for float64, otherwise float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def launch_kernel(
    name: str, grid: tuple[Any, ...], *tensors: Any, warps: int = 4, stages: int = 1, **constants: Any
) -> None:
    """Launch a kernel of a layer on the device of the first tensor. For fake tensors, only record the launch."""
    constants["ACC"] = launch.triton_type(sum_dtype(tensors[0]))
    # torch.compile needs only shapes, and `list_key_features_launches` only the kernels' names.
    if isinstance(tensors[0], FakeTensor):
        record(name, tensors, {**constants, "warps": warps, "stages": stages})
        return
    with torch.cuda.device_of(tensors[0]):
        getattr(kernels(), name)[grid](*tensors, **constants, num_warps=warps, num_stages=stages)


def split_tiles(tiles: Any, parts: int) -> tuple[Any, Any]:
    """Split tiles among at most `parts` programs. Returns the number of programs and the most tiles of one
    program.
    """
    steps = -(-tiles // parts)
    return -(-tiles // steps), steps


def group_sizes(weight: Tensor, plain: int, count: Any) -> tuple[int, Any]:
    """Return the number of groups of a weight, and how many of `count` items belong to each. A weight with
    `plain` dimensions has one group; a further leading dimension is the groups.
    """
    groups = weight.shape[0] if weight.dim() > plain else 1
    return groups, count // groups


def sum_parts(parts: Tensor, groups: int) -> Tensor:
    """Sum ``[groups*parts ...]`` over the parts; returns ``[groups ...]``."""
    return parts.unflatten(0, (groups, -1)).sum(1)


def product_options(x: Tensor) -> Constants:
    """Return the operand dtype, the precision, and the number of pipeline stages of a kernel with matrix
    products. There are fewer stages on a GPU with little shared memory.
    """
    return {
        "OP": launch.triton_type(x.dtype),
        "PRECISION": launch.precision(),
        "stages": 2 if has_large_shared_memory(x) else 1,
    }


recorded_chip: ContextVar[int] = ContextVar("chip", default=90)
"""The compute capability for which launches on fake tensors are recorded."""


def has_large_shared_memory(x: Tensor) -> bool:
    """Whether a block may use more than 160 KiB of shared memory on the GPU of x."""
    return SHARED.get(arch_of(x), 227) > 160


def product_padded_width(size: int, x: Tensor) -> int:
    """Return the tile size of a matrix product for an axis of `size`; see `launch.padded_width`."""
    return launch.padded_width(size, x.dtype, arch_of(x))


def arch_of(x: Tensor) -> int:
    """Return the compute capability of the GPU of x. Without a GPU it is 0 under Triton's interpreter, and
    `recorded_chip` for fake tensors.
    """
    return launch.arch(x.device) if x.is_cuda else 0 if launch.interpreted() else recorded_chip.get()
