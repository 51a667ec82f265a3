"""Launching a kernel: where the kernels are, and the tile sizes, types and precision that they are compiled for."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from remanence.ops.triton.resources import Constants, record

WIDEST = 128
"""Head width, and chunk, of the largest tile."""

PRECISION = "tf32x3"
"""Of products of float32 operands: three tensor-core products for one of (nearly) float32. "ieee" is exact and slow."""

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # read once, as Triton does when it is imported
HAS_TRITON = importlib.util.find_spec("triton") is not None  # found, but not imported before it is needed


@cache
def kernels() -> ModuleType | None:
    """The kernels' module, or None where Triton cannot be imported."""
    try:
        from remanence.ops.triton import kernels as written
    except ImportError:
        return None
    if interpreted():
        _mend_interpreter()
    return written


def _mend_interpreter() -> None:
    """Triton 3.6 converts its scalars, arrays of one, to Python integers in a way that NumPy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def mended(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = mended


def interpreted() -> bool:
    """Whether kernels run under Triton's interpreter."""
    return INTERPRETED


def power(size: int) -> int:
    """Tiles are powers of two, and a matrix product's at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def side(size: int, op: torch.dtype, chip: int) -> int:
    """Of a tile, along a memory's width or hidden axis. At least 128 bytes on Hopper: from narrower tiles Triton 3.6
    builds kernels whose results are wrong there, or which reach outside their memory (heads of 16, 32 and 128 showed it
    on an H200).
    """
    return max(power(size), 128 // op.itemsize if chip >= 90 else 16)


@cache
def triton_type(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float64: tl.float64}[dtype]


@cache
def arch(device: torch.device) -> int:
    """Compute capability, 90 for 9.0; 0 for what is not a GPU."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return 10 * major + minor


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def precision() -> str:
    return "ieee" if interpreted() else PRECISION


def coefficients(chunk: int, momentum: bool, forget: bool, acc: torch.dtype, op: torch.dtype) -> Constants:
    """The constants of the kernels in kernels/coef.py."""
    quick = op == torch.bfloat16
    return {
        "CHUNK": chunk,
        "BC": power(chunk),
        "MOMENTUM": momentum,
        "FORGET": forget,
        "QUICK": quick,
        "ACC": triton_type(acc),
        "OP": triton_type(op),
        # Beside bfloat16 operands a product of gates need not be exacter than one tensor-core product of float32 is.
        # Beside float32 every error here is met again in each chunk: with "tf32x3" gradients were 1.4 times as far off
        # as torch's, with "ieee" half as far.
        "PRECISION": "tf32" if quick else "ieee",
    }


def launch(name: str, grid: tuple[int, ...], *tensors: Any, options: Constants, **constants: Any) -> None:
    if isinstance(tensors[0], FakeTensor):  # torch.compile wants shapes only, `recording` the kernels' names
        record(name, tensors, constants)
        return
    with torch.cuda.device_of(tensors[0]):  # Triton launches on the current device, not on its arguments'
        getattr(kernels(), name)[grid](*tensors, **constants, **options)
