"""Choose a device by name, and find its memory size and the best number of CPU threads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from statistics import median
from typing import Literal

import torch

Device = Literal["auto", "cpu", "cuda", "mps"]
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables that set the number of threads."""
INITIAL_THREADS = torch.get_num_threads()
"""The number of threads when this package was imported."""
TRIALS, BUSY, WORTH = 3, 1.5, 0.9
"""`TRIALS`: timings per number of threads. `BUSY` and `WORTH` are ratios of the time with several threads to
the time with one: from `BUSY` on, the cores are considered busy; below `WORTH`, several threads are used.
"""


def resolve(name: str) -> torch.device:
    """Return the device for a name. "auto" is the best device present. Raises ValueError if the device is not
    present.
    """
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, here in present.items() if here))
    if name not in present:
        raise ValueError(f"device: expected auto, cpu, cuda or mps, got {name!r}")
    if not present[name]:
        here = ", ".join(kind for kind, is_here in present.items() if is_here)
        raise ValueError(
            f"device: {name!r} is not present on this machine (present: {here}); use --device auto"
        )
    return torch.device(name)


def machine_memory() -> float:
    """Return the size of this machine's memory in bytes, or infinity if the system does not report it."""
    if not hasattr(os, "sysconf"):
        return inf
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def memory_of(device: torch.device | str) -> float:
    """Return the total memory of a device in bytes, or infinity if it is unknown."""
    device = torch.device(device)
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return machine_memory() if device.type in ("cpu", "mps") else inf


def inference_dtype(device: torch.device | str) -> torch.dtype:
    """Return the dtype in which a device runs a pretrained model fastest without losing its range: bfloat16 on a GPU
    or CPU with instructions for it (AVX512-BF16 or AMX), otherwise float32.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    if device.type != "cpu":
        return torch.float32
    checks = (
        getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    )
    return torch.bfloat16 if any(check is not None and check() for check in checks) else torch.float32


def threads_are_set() -> bool:
    """Whether the user has set the number of threads, by an environment variable or by
    `torch.set_num_threads`.

    PyTorch's default is the number of cores, or half of it with two hardware threads per core. Any other
    number, and any change since this package was imported, was set by the user. One thread also counts as
    set, because there is nothing to choose.
    """
    number, cores = torch.get_num_threads(), os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    is_default = number == INITIAL_THREADS and number in (cores, cores // 2)
    return number == 1 or not is_default or any(os.environ.get(name) for name in VARIABLES)


def fastest_threads(work: Callable[[], object], probe: Callable[[], object]) -> int:
    """Return the number of threads to use for `work` on the CPU: one, or PyTorch's default if that is clearly
    faster.

    If other processes use the cores, several threads that wait for each other can be many times slower than
    one. So both are timed: first with `probe`, which is short and ends the trial if the cores are busy, then
    with `work`. A number set by the user is returned unchanged.
    """
    most = torch.get_num_threads()
    if threads_are_set():
        return most
    return most if _gain(probe) < BUSY and _gain(work) < WORTH else 1


def _gain(work: Callable[[], object]) -> float:
    """Return the time with several threads divided by the time with one thread, as a ratio of medians of
    `TRIALS` timings.
    """
    with using_threads(1):
        work()  # the first call is a warm-up
        alone = median(_seconds(work) for _ in range(TRIALS))
    several: list[float] = []
    while len(several) < TRIALS and not (several and several[-1] > 2 * BUSY * alone):
        several.append(_seconds(work))
    return median(several) / alone


def _seconds(work: Callable[[], object]) -> float:
    """Return how many seconds one call of `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@contextmanager
def using_threads(number: int) -> Iterator[None]:
    """Use this number of threads inside the block, and restore the previous number afterwards."""
    before = torch.get_num_threads()
    if number == before:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
