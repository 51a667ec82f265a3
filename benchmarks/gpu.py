"""The Triton backend on a GPU: is it right (against float64), how fast is it, and where does the time go.

    python benchmarks/gpu.py                 checks, then times (under 4 minutes)
    python benchmarks/gpu.py --sweep         times each kernel with other numbers of warps and other blocks
    TRITON_INTERPRET=1 python benchmarks/gpu.py --tiny      the same paths without a GPU, in small

Builds the kernels in several processes first: a build takes seconds, and Triton's cache is on disk.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from remanence.ops import MLP, Gates, fused, memorize, start

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 64
BEGIN = time.perf_counter()


def inputs(batch: int, heads: int, tokens: int, hidden: int, dtype: torch.dtype, width: int = WIDTH) -> list[torch.Tensor]:
    """q, k, v, log gates, initial weights: gates as the layer's at the start of training."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, device=DEVICE)
    q, k, v = (draw(batch, tokens, heads, width) for _ in range(3))
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    gates = [F.logsigmoid(draw(batch, tokens, heads) + bias) for bias in (-4.0, 0.0, 8.0)]
    weights = [draw(heads, width, hidden) / width**0.5, draw(heads, hidden, width) / hidden**0.5]
    return [*[x.to(dtype) for x in (q, k, v)], *gates, *weights]


def call(leaves: list[torch.Tensor], hidden: int, chunk: int, backend: str, width: int = WIDTH) -> tuple[torch.Tensor, ...]:
    q, k, v, *rest = leaves
    net = MLP(expansion=hidden / width)
    state = start(tuple(rest[3:]), q.shape[0], chunk=chunk)
    y, new, surprise = memorize(q, k, v, Gates(*rest[:3]), state, net=net, chunk=chunk, backend=backend, check=False)
    return y, surprise, *new.layers


NAMES = ["y", "surprise", "state 1", "state 2", *[f"d{x}" for x in ("q", "k", "v", "step", "momentum", "keep", "W1", "W2")]]


def results(
    leaves: list[torch.Tensor], hidden: int, chunk: int, backend: str, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Outputs and gradients; in `dtype` throughout if given."""
    leaves = [(x if dtype is None else x.to(dtype)).detach().requires_grad_() for x in leaves]
    outputs = call(leaves, hidden, chunk, backend)
    generator = torch.Generator(DEVICE).manual_seed(1)
    loss = 0
    for x in outputs:
        upstream = torch.randn(x.shape, generator=generator, device=DEVICE)
        loss = loss + (x * upstream.to(torch.bfloat16).to(x.dtype)).sum()
    return [x.detach() for x in (*outputs, *torch.autograd.grad(loss, leaves))]


def apart(true: torch.Tensor, x: torch.Tensor) -> float:
    """Root mean square of the difference, relative to the truth's."""
    true, x = true.double(), x.double()
    return float((true - x).square().mean().sqrt() / true.square().mean().sqrt().clamp_min(1e-30))


def check(hidden: int, chunk: int, dtype: torch.dtype, tiny: bool) -> None:
    """Triton's error against float64 beside plain torch's (float32 arithmetic on the same inputs), and whether two runs agree."""
    batch, heads, tokens = (1, 1, 2 * chunk + 3) if tiny else (2, 4, 8 * chunk + 5)
    leaves = inputs(batch, heads, tokens, hidden, dtype)
    true = results(leaves, hidden, chunk, "chunked", torch.float64)
    plain = [apart(a, b) for a, b in zip(true, results(leaves, hidden, chunk, "chunked"), strict=True)]
    first, second = (results(leaves, hidden, chunk, "triton") for _ in range(2))
    ours = [apart(a, b) for a, b in zip(true, first, strict=True)]
    same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    name = "bf16" if dtype == torch.bfloat16 else "fp32"
    worst = max(range(len(ours)), key=lambda i: ours[i] if ours[i] == ours[i] else float("inf"))
    told = " ".join(f"{n}={e:.1e}" for n, e in zip(NAMES, ours, strict=True))
    beside = f"worst {NAMES[worst]} {ours[worst]:.1e} (torch fp32 {plain[worst]:.1e}), runs equal: {same}"
    print(f"check {name} h={hidden} c={chunk}: {beside}")
    print(f"      {told}", flush=True)


def median_ms(run: Callable[[], Any], rounds: int) -> float:
    if DEVICE == "cpu":
        run()
        return float("nan")
    for _ in range(2):
        run()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def sizes(tiny: bool) -> tuple[int, int, int]:
    return (1, 1, 0) if tiny else (8, 16, 8192)


def one_call(
    hidden: int, chunk: int, tiny: bool, dtype: torch.dtype, backend: str
) -> tuple[Callable[[], Any], Callable[[], Any], int]:
    batch, heads, tokens = sizes(tiny)
    tokens = tokens or 2 * chunk
    leaves = inputs(batch, heads, tokens, hidden, dtype)
    wanted = [x.clone().requires_grad_() for x in leaves]
    upstream = torch.randn_like(leaves[0])

    def forward() -> None:
        with torch.no_grad():
            call(leaves, hidden, chunk, backend)

    def both() -> None:
        torch.autograd.grad(call(wanted, hidden, chunk, backend)[0], wanted, upstream)

    return forward, both, batch * tokens


def kernel_times(run: Callable[[], Any], rounds: int) -> dict[str, float]:
    """Milliseconds of each kernel in one run, the median over rounds."""
    launch, marks, found = fused._launch, [], defaultdict(list)

    def timed(name: str, *args: Any, **constants: Any) -> None:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        launch(name, *args, **constants)
        end.record()
        marks.append((name, begin, end))

    fused._launch = timed
    try:
        run()
        for _ in range(rounds):
            marks.clear()
            run()
            torch.cuda.synchronize()
            for name, begin, end in marks:
                found[name].append(begin.elapsed_time(end))
    finally:
        fused._launch = launch
    return {name: sorted(times)[len(times) // 2] for name, times in found.items()}


def clock(hidden: int, chunk: int, tiny: bool, dtype: torch.dtype, backend: str = "triton", rounds: int = 7) -> None:
    name = "bf16" if dtype == torch.bfloat16 else "fp32"
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    forward, both, tokens = one_call(hidden, chunk, tiny, dtype, backend)
    f, b = median_ms(forward, rounds), median_ms(both, rounds)
    peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else float("nan")
    speed = tokens / b / 1e3 if b == b else float("nan")
    told = f"forward {f:8.3f} ms   forward+backward {b:8.3f} ms   {speed:6.2f} Mtok/s   {peak:5.1f} GiB"
    print(f"{backend:8} {name} h={hidden:<4} c={chunk:<4} {told}", flush=True)
    if DEVICE == "cuda" and backend == "triton":
        parts = kernel_times(both, 3)
        rest = b - sum(parts.values())
        print("         " + "  ".join(f"{n} {t:.3f}" for n, t in parts.items()) + f"  torch and gaps {rest:.3f}", flush=True)


def sweep(hidden: int, chunk: int, tiny: bool) -> None:
    """Each kernel by itself with other warps and blocks, all others at their own."""
    _, both, _ = one_call(hidden, chunk, tiny, torch.bfloat16, "triton")
    if DEVICE == "cpu":
        both()
        return
    for name in list(kernel_times(both, 1)):
        line = []
        for block in [32, 64, 128] if name in fused.BLOCKS and hidden > 32 else [None]:
            for stages in [1, 2, 3] if name in fused.STAGES else [None]:
                for warps in (4, 8, 16):
                    told = " ".join(f"{x}{y}" for x, y in (("w", warps), ("b", block), ("s", stages)) if y is not None)
                    if block is not None and block > hidden:
                        continue
                    try:
                        line.append(f"{told} {with_settings(name, warps, block, stages, both):.3f}")
                    except Exception as error:
                        line.append(f"{told} {type(error).__name__}")
        print(f"sweep h={hidden} c={chunk} {name}: " + " | ".join(line), flush=True)


def with_settings(name: str, warps: int, block: int | None, stages: int | None, run: Callable[[], Any]) -> float:
    changes = [(fused.WARPS, warps), (fused.BLOCKS, block), (fused.STAGES, stages)]
    old = [table.get(name) for table, _ in changes]
    try:
        for table, value in changes:
            if value is not None:
                table[name] = value
        return kernel_times(run, 3)[name]
    finally:
        for (table, value), before in zip(changes, old, strict=True):
            if value is not None:
                table[name] = before


def attempt(what: str, run: Callable[..., None], *args: Any, **fields: Any) -> None:
    try:
        run(*args, **fields)
    except Exception as error:
        text = (str(error) or "").strip().splitlines()
        print(f"{what}: {type(error).__name__}: {' / '.join(text[:2] + text[-2:])[:600]}", flush=True)


def build(jobs: list[str]) -> None:
    """Compile every configuration in processes of their own, so that the disk cache has them."""
    if DEVICE == "cpu":
        return
    waiting = [[sys.executable, __file__, "--build", job] for job in jobs]
    running: list[subprocess.Popen] = []
    begin = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < max(1, (os.cpu_count() or 2) - 2):
            running.append(subprocess.Popen(waiting.pop(0), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        running = [process for process in running if process.poll() is None]
        time.sleep(0.1)
    print(f"built {len(jobs)} configurations in {time.perf_counter() - begin:.0f} s", flush=True)


def build_one(job: str) -> None:
    """One call in small; "hidden,chunk,dtype" or, for the sweep, with warps, block and stages of every kernel behind them."""
    hidden, chunk, name, *settings = job.split(",")
    if settings:
        for table, value in zip((fused.WARPS, fused.BLOCKS, fused.STAGES), settings, strict=True):
            table.update(dict.fromkeys(table, int(value)))
    launch = fused._launch

    def go_on(*args: Any, **constants: Any) -> None:
        attempt("build", launch, *args, **constants)

    fused._launch = go_on
    dtype = torch.bfloat16 if name == "bf16" else torch.float32
    leaves = inputs(1, 2, 2 * int(chunk) + 1, int(hidden), dtype)
    results(leaves, int(hidden), int(chunk), "triton")
    call(leaves, int(hidden), int(chunk), "triton")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small sizes, for the interpreter")
    parser.add_argument("--sweep", action="store_true", help="time each kernel with other warps and blocks instead")
    parser.add_argument("--hidden", type=int, nargs="+", default=None)
    parser.add_argument("--chunk", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--fp32", action="store_true", help="time float32 too")
    parser.add_argument("--budget", type=float, default=220.0, help="seconds after which no further row is begun")
    parser.add_argument("--build", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.build:
        return build_one(options.build)
    if options.tiny:
        global WIDTH
        WIDTH = 16
    hiddens = options.hidden or ([16, 32] if options.tiny else [64, 128, 256])
    names = ["fp32"] if options.tiny else ["bf16", "fp32"]
    print(f"{torch.cuda.get_device_name() if DEVICE == 'cuda' else 'interpreter'}, torch {torch.__version__}", flush=True)
    rows = [(hidden, chunk) for hidden in hiddens for chunk in options.chunk]
    jobs = [f"{h},{c},{d}" for d in names for h, c in rows if not (options.sweep and d == "fp32")]
    if options.sweep:
        ways = [(32, 1), (64, 2), (128, 3)]
        jobs += [f"{h},{c},bf16,{warps},{block},{stages}" for h, c in rows for warps in (4, 8, 16) for block, stages in ways]
    build(jobs)
    late = lambda: time.perf_counter() - BEGIN > options.budget
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    if options.sweep:
        for hidden, chunk in rows:
            attempt(f"sweep h={hidden} c={chunk}", sweep, hidden, chunk, options.tiny)
        return None
    if not options.no_check:
        for name in names:
            for hidden, chunk in rows:
                if not late():
                    attempt(f"check {name} h={hidden} c={chunk}", check, hidden, chunk, dtypes[name], options.tiny)
    if not options.no_time:
        print(f"B{sizes(options.tiny)[0]} H{sizes(options.tiny)[1]} T{sizes(options.tiny)[2]} d{WIDTH}")
        for hidden, chunk in rows:
            for name in ["bf16", "fp32"] if options.fp32 and not options.tiny else [names[0]]:
                if not late():
                    attempt(f"time {name} h={hidden} c={chunk}", clock, hidden, chunk, options.tiny, dtypes[name])
        if not late() and 64 in options.chunk:
            attempt("time chunked", clock, hiddens[0], 64, options.tiny, dtypes[names[0]], "chunked", 2)
    print(f"{time.perf_counter() - BEGIN:.0f} s in all")
    return None


if __name__ == "__main__":
    main()
