"""Which device to run on, by name, and how much it holds."""

from __future__ import annotations

import os
from math import inf
from typing import Literal

import torch

Device = Literal["auto", "cpu", "cuda", "mps"]


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
