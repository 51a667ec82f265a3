"""Compile the Triton kernels for chips that are not here: registers, spills and shared memory of each, without a GPU.

python benchmarks/kernels.py --arch 90 --hidden 64 256 --chunk 64
"""

from __future__ import annotations

import argparse
import itertools
import os

import torch

from remanence.ops.triton import mlp as fused
from remanence.ops.triton.launch import PRECISION, kernels
from remanence.ops.triton.resources import SHARED, Launch, assembled, build

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", type=int, nargs="+", default=[90])
    parser.add_argument("--width", type=int, nargs="+", default=[64])
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--chunk", type=int, nargs="+", default=[64])
    parser.add_argument("--dtype", nargs="+", default=["bf16"], choices=list(DTYPES))
    parser.add_argument("--kernel", nargs="+", default=None, help="only these")
    parser.add_argument("--warps", type=int, nargs="+", default=[0], help="instead of the kernel's own")
    parser.add_argument("--block", type=int, default=0, help="hidden block instead of the plan's own")
    parser.add_argument("--stages", type=int, default=0, help="instead of the kernel's own")
    given = parser.parse_args()
    print(f"{'kernel':14} sm  d   h    chunk dtype warps  registers spilled shared(KiB) compile")
    for arch, width, hidden, chunk, dtype in itertools.product(
        given.arch, given.width, given.hidden, given.chunk, given.dtype
    ):
        plan = fused.Plan(
            width, hidden, chunk, 1, True, True, True, True, True, os.environ.get("PRECISION", PRECISION)
        )
        for launch, warps in itertools.product(fused.list_launches(plan, DTYPES[dtype], arch), given.warps):
            if given.kernel and launch.name not in given.kernel:
                continue
            if given.block and "BH" in launch.constants:
                launch.constants["BH"] = given.block
            launch = launch._replace(warps=warps or launch.warps, stages=given.stages or launch.stages)
            row(
                launch,
                arch,
                f"{launch.name:14} {arch}  {width:<3} {hidden:<4} {chunk:<5} {dtype}  {launch.warps:<5}",
            )


def row(launch: Launch, arch: int, head: str) -> None:
    try:
        need = build(kernels(), launch, arch)
        registers, spilled = assembled(need.ptx, arch)
    except Exception as error:
        print(
            head,
            f"failed: {type(error).__name__}: {str(error).splitlines()[-1] if str(error) else ''}",
            flush=True,
        )
        return
    full = "" if need.shared <= SHARED[arch] * 1024 else "  TOO MUCH SHARED MEMORY"
    print(
        head,
        f"{registers:>9} {spilled:>7} {need.shared / 1024:>10.1f} {need.seconds:>6.1f}s" + full,
        flush=True,
    )


if __name__ == "__main__":
    main()
