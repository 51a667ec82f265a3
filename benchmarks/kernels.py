"""Compile the Triton kernels for chips that are not here: registers, spills and shared memory of each, without a GPU.

python benchmarks/kernels.py --arch 90 --hidden 64 256 --chunk 64
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from remanence.ops import fused

SHARED = {80: 163, 86: 99, 89: 99, 90: 227}
"""KiB a block may use, by compute capability."""
LISTS = {"J1", "J2", "end1", "end2", "g_end1", "g_end2", "g_first1", "g_first2", "co", "fold", "rstds", "surprise", "g_surprise"}
EXACT = LISTS | {
    "log_step",
    "log_momentum",
    "log_keep",
    "g_step",
    "g_momentum",
    "g_keep",
    "g_co",
    "g_fold",
    "came",
    "came_end",
    "spreads",
}
WHOLE = {"L": "i32", "n": "i32", "HEADS": "i32", "totals": "*i32", "bad": "*i32"}


def compile_kernel(name: str, constants: dict[str, Any], op: str, arch: int, warps: int, stages: int) -> dict[str, Any]:
    kernel = getattr(fused.kernels(), name)
    arguments = list(inspect.signature(kernel.fn).parameters)
    signature = {}
    for argument in arguments:
        if argument in constants:
            signature[argument] = "constexpr"
        else:
            signature[argument] = WHOLE.get(argument) or ("*fp32" if argument in EXACT else f"*{op}")
    aligned = [[("tt.divisibility", 16)][0]]
    attributes = {(i,): [list(pair) for pair in aligned] for i, a in enumerate(arguments) if signature[a].startswith("*")}
    constexprs = {(arguments.index(key),): value for key, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    start = time.perf_counter()
    target = GPUTarget("cuda", arch, 32)
    built = triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})
    seconds = time.perf_counter() - start
    report = assemble(built.asm["ptx"], arch)
    return {"shared_kib": built.metadata.shared / 1024, "seconds": seconds, **report}


def assemble(ptx: str, arch: int) -> dict[str, int]:
    """What ptxas says of it."""
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    name = f"sm_{arch}a" if arch == 90 else f"sm_{arch}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [str(ptxas), "-v", f"--gpu-name={name}", str(source), "-o", str(Path(folder) / "kernel.cubin")]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    find = lambda pattern: int((re.search(pattern, said) or [0, 0])[1])
    return {"registers": find(r"Used (\d+) registers"), "spilled": find(r"(\d+) bytes spill stores")}


def constants_of(name: str, plan: fused.Plan, op: torch.dtype) -> dict[str, Any]:
    if name.startswith("coef"):
        return plan.coefficients(torch.float32, op)
    return plan.tiles(name, torch.float32, op)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[90])
    parser.add_argument("--width", type=int, nargs="+", default=[64])
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--chunk", type=int, nargs="+", default=[64])
    parser.add_argument("--dtype", nargs="+", default=["bf16"], choices=["bf16", "fp32"])
    parser.add_argument("--kernel", nargs="+", default=list(fused.WARPS))
    parser.add_argument("--warps", type=int, nargs="+", default=[0], help="instead of the kernel's own")
    parser.add_argument("--block", type=int, default=0, help="hidden block instead of the plan's own")
    parser.add_argument("--stages", type=int, default=0, help="instead of the kernel's own")
    options = parser.parse_args()
    print(f"{'kernel':14} sm  d   h    chunk dtype warps  registers spilled shared(KiB) compile")
    for arch in options.arch:
        for width in options.width:
            for hidden in options.hidden:
                for chunk in options.chunk:
                    for dtype in options.dtype:
                        for name in options.kernel:
                            for warps in options.warps:
                                row(arch, width, hidden, chunk, dtype, name, warps, options.block, options.stages)


def row(arch: int, width: int, hidden: int, chunk: int, dtype: str, name: str, warps: int, block: int, stages: int) -> None:
    plan = fused.Plan(width, hidden, chunk, 16, True, True, True, True, True, os.environ.get("PRECISION", fused.PRECISION))
    if name.startswith(("state", "carry")) and name.endswith("stream") != plan.streams:
        return
    constants = constants_of(name, plan, torch.bfloat16 if dtype == "bf16" else torch.float32)
    if block and "BH" in constants:
        constants["BH"] = block
    warps = warps or fused.warps_of(name, plan.tile)
    head = f"{name:14} {arch}  {width:<3} {hidden:<4} {chunk:<5} {dtype}  {warps:<5}"
    try:
        told = compile_kernel(name, constants, dtype, arch, warps, stages or (fused.STAGES.get(name, 1) if arch >= 90 else 1))
    except Exception as error:
        print(head, f"failed: {type(error).__name__}: {str(error).splitlines()[-1] if str(error) else ''}", flush=True)
        return
    full = "" if told["shared_kib"] <= SHARED[arch] else "  TOO MUCH SHARED MEMORY"
    numbers = f"{told['registers']:>9} {told['spilled']:>7} {told['shared_kib']:>10.1f} {told['seconds']:>6.1f}s"
    print(head, numbers + full, flush=True)


if __name__ == "__main__":
    main()
