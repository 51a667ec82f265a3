"""Launch kernels. Also imports the kernels' module and chooses the tile sizes, types and precision that
kernels are compiled for.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from remanence.ops.triton.resources import Constants, record

MAX_WIDTH = 128
"""The largest head width and the largest chunk that the kernels support."""

PRECISION = "tf32x3"
"""The `input_precision` of Triton for products of float32 operands. "tf32x3" uses three tensor-core products
and is nearly as exact as float32; "ieee" is exact and slow.
"""

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # read once, as Triton does when it is imported
HAS_TRITON = importlib.util.find_spec("triton") is not None  # checked without importing Triton


@cache
def kernels() -> ModuleType | None:
    """Return the module of the kernels, or None if Triton cannot be imported."""
    try:
        from remanence.ops.triton import kernels as written
    except ImportError:
        return None
    if interpreted():
        _patch_interpreter()
    return written


def _patch_interpreter() -> None:
    """Patch Triton's interpreter for NumPy 2.4, which refuses the way in which Triton 3.6 converts its
    scalars (arrays of one element) to Python integers.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched_with_index


def interpreted() -> bool:
    """Whether kernels run under Triton's interpreter."""
    return INTERPRETED


def padded_size(size: int) -> int:
    """Return the tile size for `size` elements: the next power of two, and at least 16, the minimum for
    matrix products.
    """
    return max(16, 1 << (size - 1).bit_length())


def padded_width(size: int, op: torch.dtype, chip: int) -> int:
    """Return the tile size along a memory's width or hidden axis, for operands of dtype `op` and compute
    capability `chip`.

    On Hopper and later the tile has at least 128 bytes. With narrower tiles Triton 3.6 builds kernels there
    that give wrong results or access memory out of bounds (seen on an H200 with heads of 16, 32 and 128).
    """
    return max(padded_size(size), 128 // op.itemsize if chip >= 90 else 16)


@cache
def triton_type(dtype: torch.dtype) -> Any:
    """Return the Triton type of a torch dtype."""
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float64: tl.float64}[dtype]


@cache
def arch(device: torch.device) -> int:
    """Return the compute capability of a device (90 for 9.0), or 0 if it is not a GPU."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return 10 * major + minor


@cache
def num_sms(device: torch.device) -> int:
    """Return the number of streaming multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def precision() -> str:
    """Return the precision of float32 products: "ieee" under Triton's interpreter, otherwise `PRECISION`."""
    return "ieee" if interpreted() else PRECISION


def coefficients(chunk: int, momentum: bool, forget: bool, acc: torch.dtype, op: torch.dtype) -> Constants:
    """Return the compile-time arguments of the kernels in kernels/coef.py. `acc` is the dtype of sums, `op`
    that of the operands of products.
    """
    from_log_sums = op == torch.bfloat16
    return {
        "CHUNK": chunk,
        "BC": padded_size(chunk),
        "MOMENTUM": momentum,
        "FORGET": forget,
        "FROM_LOG_SUMS": from_log_sums,
        "ACC": triton_type(acc),
        "OP": triton_type(op),
        # With bfloat16 operands, one tensor-core product is exact enough for products of gates. With float32
        # operands, errors made here recur in every chunk: the error of the gradients was 1.4 times that of
        # torch with "tf32x3", and half that of torch with "ieee".
        "PRECISION": "tf32" if from_log_sums else "ieee",
    }


def launch(name: str, grid: tuple[int, ...], *tensors: Any, options: Constants, **constants: Any) -> None:
    """Launch a kernel on the device of the first tensor. For fake tensors, only record the launch. `options`
    are Triton's launch options, such as `num_warps`.
    """
    if isinstance(tensors[0], FakeTensor):  # for torch.compile (shapes only) and `recording`
        record(name, tensors, constants)
        return
    with torch.cuda.device_of(tensors[0]):  # Triton launches on the current device
        getattr(kernels(), name)[grid](*tensors, **constants, **options)
