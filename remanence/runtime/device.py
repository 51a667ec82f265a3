"""Which device to run on, by name, how much it holds, and how many threads a CPU works with."""

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
"""Environment variables with which a user sets the number of threads."""
INITIAL_THREADS = torch.get_num_threads()
"""The number of threads when this package was imported."""
TRIALS, BUSY, WORTH = 3, 1.5, 0.9
"""Timings of each number of threads; the share of one thread's time from which on cores are busy, and the share below
which several threads are worth it.
"""


def resolve(name: str) -> torch.device:
    """The device a name means: "auto" is the best one present. One that is not present is refused."""
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
    """Bytes of this machine's memory; infinite where the system does not tell."""
    if not hasattr(os, "sysconf"):
        return inf
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def memory_of(device: torch.device | str) -> float:
    """Bytes of memory that a device has in all; infinite where that cannot be known."""
    device = torch.device(device)
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return machine_memory() if device.type in ("cpu", "mps") else inf


def threads_are_set() -> bool:
    """Whether the user has set the number of threads, by a variable or by `torch.set_num_threads`.

    PyTorch's own default is the number of cores, or half of it where each core counts twice; any other number, and any
    change since this package was imported, is the user's. With one thread there is nothing to choose.
    """
    number, cores = torch.get_num_threads(), os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    is_default = number == INITIAL_THREADS and number in (cores, cores // 2)
    return number == 1 or not is_default or any(os.environ.get(name) for name in VARIABLES)


def fastest_threads(work: Callable[[], object], probe: Callable[[], object]) -> int:
    """The number of threads to do `work` with on the CPU: one, or PyTorch's default if that is clearly faster.

    Threads that wait for each other on cores that other processes use can take many times as long as one thread, so
    both are timed: first with `probe`, which is short and ends the trial on busy cores, then with `work` itself. A
    number that the user has set is returned as it is.
    """
    most = torch.get_num_threads()
    if threads_are_set():
        return most
    return most if _gain(probe) < BUSY and _gain(work) < WORTH else 1


def _gain(work: Callable[[], object]) -> float:
    """The time that several threads take, as a share of the time of one: medians of `TRIALS` timings."""
    with using_threads(1):
        work()  # the first call is for warming up
        alone = median(_seconds(work) for _ in range(TRIALS))
    several: list[float] = []
    while len(several) < TRIALS and not (several and several[-1] > 2 * BUSY * alone):
        several.append(_seconds(work))
    return median(several) / alone


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@contextmanager
def using_threads(number: int) -> Iterator[None]:
    """Work with so many threads, and with the earlier number afterwards."""
    before = torch.get_num_threads()
    if number == before:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
