"""Measure the GPU resources that the kernels need (shared memory, registers, spills) by compiling them. No
GPU is needed.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

SHARED = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
"""Maximum shared memory of one block in KiB, by compute capability (from the CUDA programming guide)."""

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64"}
"""The name that Triton gives to a pointer to each dtype."""

TYPES |= {torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64"}


Constants = dict[str, Any]
"""The compile-time arguments of a kernel by parameter name: sizes, flags and Triton types."""


class Launch(NamedTuple):
    """A description of one kernel launch: the kernel's name, its arguments' types as Triton names them, its
    compile-time arguments, the number of warps, and the number of pipeline stages.
    """

    name: str
    types: tuple[str, ...]
    constants: Constants
    warps: int
    stages: int


class Need(NamedTuple):
    """The result of compiling a kernel: shared memory in bytes, PTX assembly (the input of `assembled`), and
    compile time in seconds.
    """

    shared: int
    ptx: str
    seconds: float


Record = tuple[str, tuple[str, ...], Constants]
"""A recorded launch: the kernel's name, its arguments' types, and its compile-time arguments."""

_records: ContextVar[list[Record] | None] = ContextVar("records", default=None)


@contextmanager
def recording() -> Iterator[list[Record]]:
    """Context manager that yields a list. Each launch on fake tensors inside the context is appended to it as
    a `Record`.
    """
    records: list[Record] = []
    token = _records.set(records)
    try:
        yield records
    finally:
        _records.reset(token)


def record(name: str, arguments: tuple[Any, ...], constants: Constants) -> None:
    """Append a launch to the list of the enclosing `recording` context. Does nothing outside of one."""
    records = _records.get()
    if records is not None:
        records.append(
            (name, tuple(TYPES[x.dtype] if isinstance(x, Tensor) else "i32" for x in arguments), constants)
        )


def build(kernels: ModuleType, launch: Launch, arch: int) -> Need:
    """Compile a kernel for a compute capability (90 for 9.0). A later launch on such a GPU finds the result
    in Triton's cache.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(kernels, launch.name)
    names = list(inspect.signature(kernel.fn).parameters)
    given = dict(zip(names, launch.types, strict=False))
    signature = {name: given.get(name, "constexpr") for name in names}
    # Tensors are allocated with 16-byte alignment, and a real launch tells Triton so. Strings have no
    # attributes, but must be listed because they are part of the key of Triton's cache.
    attributes = {
        (i,): [["tt.divisibility", 16]] if signature[name].startswith("*") else []
        for i, name in enumerate(names)
        if signature[name].startswith("*") or isinstance(launch.constants.get(name), str)
    }
    constants = {(names.index(name),): value for name, value in launch.constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    begin = time.perf_counter()
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return Need(built.metadata.shared, built.asm["ptx"], time.perf_counter() - begin)


def assembled(ptx: str, arch: int) -> tuple[int, int]:
    """Assemble PTX with the assembler that Triton includes. Return the registers per thread and the bytes
    spilled per thread.
    """
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    newer = tools / "ptxas-blackwell"
    target = re.search(r"\.target\s+(\w+)", ptx)
    name = target[1] if target else f"sm_{arch}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [
            str(newer if arch >= 100 and newer.exists() else tools / "ptxas"),
            "-v",
            f"--gpu-name={name}",
            str(source),
        ]
        done = subprocess.run(
            [*command, "-o", str(Path(folder) / "kernel.cubin")], check=True, capture_output=True, text=True
        )
    registers, spilled = (
        re.search(words, done.stderr) for words in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
    )
    return int(registers[1]) if registers else 0, int(spilled[1]) if spilled else 0


def caches(kernels: ModuleType, device: int = 0) -> dict[str, dict[Any, Any]]:
    """Return the compiled versions of each kernel, by kernel name, that this process holds for one of its
    GPUs.
    """
    found: dict[str, Any] = {name: getattr(kernels, name, None) for name in getattr(kernels, "__all__", [])}
    return {
        name: kernel.device_caches[device][0]
        for name, kernel in found.items()
        if hasattr(kernel, "device_caches")
    }


def loaded(kernels: ModuleType, device: int = 0) -> dict[str, tuple[int, int]]:
    """Return registers per thread and bytes of local memory per thread of each kernel that this process has
    launched. If a kernel has several versions, the one with the most local memory counts.
    """
    sizes = {
        name: [
            (kernel.n_regs, 4 * kernel.n_spills)
            for kernel in built.values()
            if getattr(kernel, "n_regs", None)
        ]
        for name, built in caches(kernels, device).items()
    }
    return {name: max(each, key=lambda size: size[::-1]) for name, each in sizes.items() if each}


def lacking(kernels: ModuleType, launches: list[Launch], arch: int, shared: int) -> str | None:
    """Return why a GPU with `shared` bytes of shared memory per block cannot run these launches, or None if
    it can.

    The kernels are compiled in parallel threads, because most of the compilation happens outside Python. A
    kernel that fails is compiled again alone, and only that error is reported: CPython 3.11 miscounts its
    recursion depth when several threads parse at once, which fails a kernel that compiles.
    """
    for launch in launches:
        getattr(kernels, launch.name).cache_key  # noqa: B018, computed once, before the threads read it

    def compile_kernel(launch: Launch) -> Need | Exception:
        """Compile one kernel. Return what it needs or the error."""
        try:
            return build(kernels, launch, arch)
        except Exception as error:
            return error

    with ThreadPoolExecutor(max(1, min(len(launches), os.cpu_count() or 1))) as pool:
        results = list(pool.map(compile_kernel, launches))
    for launch, first in zip(launches, results, strict=True):
        result = compile_kernel(launch) if isinstance(first, Exception) else first
        if isinstance(result, Exception):
            return f"{launch.name} does not compile for sm_{arch}: {type(result).__name__}: {_reason(result)}"
        if result.shared > shared:
            sizes = (
                f"{result.shared / 1024:.0f} KiB of shared memory, of which sm_{arch} has {shared / 1024:.0f}"
            )
            return f"{launch.name} needs {sizes}"
    return None


def _reason(error: Exception) -> str:
    """Return one line of a compiler's error: the error that caused it, or its last line that has words."""
    lines = [line.strip() for line in str(error.__cause__ or error).splitlines()]
    return next((line for line in reversed(lines) if line.strip("^ ")), "")[:160]
