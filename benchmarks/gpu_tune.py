"""The Triton backend on a GPU: is it right (against float64), how fast is it, and where does the time go.

    python benchmarks/gpu_tune.py            all of it, under 5 minutes: checks, times, a sweep of settings
    python benchmarks/gpu_tune.py --parts check time --hidden 64 --chunk 64
    TRITON_INTERPRET=1 python benchmarks/gpu_tune.py --tiny      the same paths without a GPU, in small

Every configuration has a process of its own, since an illegal access ends the process it happens in, and nothing
outlives the budget. A bfloat16 check that fails is tried again with another assembler, without its optimiser, and with
other numbers of warps: ptxas before 13.1 is known to miscompile some wgmma kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from remanence.ops import MLP, Gates, memorize, start
from remanence.ops.triton import mlp as fused
from remanence.ops.triton.launch import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 64
BEGIN = time.perf_counter()


def inputs(
    batch: int, heads: int, tokens: int, hidden: int, dtype: torch.dtype, seed: int = 0
) -> list[torch.Tensor]:
    """q, k, v, log gates, initial weights: gates as the layer's at the start of training."""
    width, generator = WIDTH, torch.Generator(DEVICE).manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, device=DEVICE)
    q, k, v = (draw(batch, tokens, heads, width) for _ in range(3))
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    gates = [F.logsigmoid(draw(batch, tokens, heads) + bias) for bias in (-4.0, 0.0, 8.0)]
    weights = [draw(heads, width, hidden) / width**0.5, draw(heads, hidden, width) / hidden**0.5]
    return [*[x.to(dtype) for x in (q, k, v)], *gates, *weights]


def call(leaves: list[torch.Tensor], hidden: int, chunk: int, backend: str) -> tuple[torch.Tensor, ...]:
    q, k, v, *rest = leaves
    net = MLP(expansion=hidden / WIDTH)
    state = start(tuple(rest[3:]), q.shape[0], chunk=chunk)
    y, new, surprise = memorize(
        q, k, v, Gates(*rest[:3]), state, net=net, chunk=chunk, backend=backend, check=False, aligned=True
    )
    return y, surprise, *new.layers


NAMES = [
    "y",
    "surprise",
    "state 1",
    "state 2",
    *[f"d{x}" for x in ("q", "k", "v", "step", "momentum", "keep", "W1", "W2")],
]


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


def in_loop(true: torch.Tensor, x: torch.Tensor) -> float:
    """Root mean square of the difference, relative to the truth's."""
    true, x = true.double(), x.double()
    return float((true - x).square().mean().sqrt() / true.square().mean().sqrt().clamp_min(1e-30))


def check(hidden: int, chunk: int, dtype: torch.dtype, tiny: bool) -> bool:
    """Triton's error against float64 beside plain torch's (float32 arithmetic on the same inputs), and whether two runs
    agree.
    """
    batch, heads, tokens = (1, 1, 2 * chunk + 3) if tiny else (2, 4, 8 * chunk + 5)
    leaves = inputs(batch, heads, tokens, hidden, dtype)
    true = results(leaves, hidden, chunk, "chunked", torch.float64)
    plain = [in_loop(a, b) for a, b in zip(true, results(leaves, hidden, chunk, "chunked"), strict=True)]
    first, second = (results(leaves, hidden, chunk, "triton") for _ in range(2))
    ours = [in_loop(a, b) for a, b in zip(true, first, strict=True)]
    same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    name = "bf16" if dtype == torch.bfloat16 else "fp32"
    worst = max(range(len(ours)), key=lambda i: ours[i] if ours[i] == ours[i] else float("inf"))
    told = " ".join(f"{n}={e:.1e}" for n, e in zip(NAMES, ours, strict=True))
    beside = f"worst {NAMES[worst]} {ours[worst]:.1e} (torch fp32 {plain[worst]:.1e}), runs equal: {same}"
    # bfloat16 is bound by its operands' rounding: the keys' gradients of a hundred chunks come out within a few per
    # cent.
    right = same and all(error < (0.1 if dtype == torch.bfloat16 else 1e-3) for error in ours)
    print(f"check {name} h={hidden} c={chunk}: {'right' if right else 'WRONG'}, {beside}")
    print(f"      {told}", flush=True)
    return right


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


def clock(
    hidden: int, chunk: int, tiny: bool, dtype: torch.dtype, backend: str = "triton", rounds: int = 7
) -> None:
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
        print(
            "         "
            + "  ".join(f"{n} {t:.3f}" for n, t in parts.items())
            + f"  torch and gaps {rest:.3f}",
            flush=True,
        )


def sweep(name: str, hidden: int, chunk: int, tiny: bool, settings: list[list[Any]]) -> None:
    """One kernel by itself, with other numbers of warps, blocks and stages: built first, then timed while no other
    process is.
    """
    launch, found = fused._launch, []

    def record(kernel: str, grid: tuple[int, ...], *tensors: Any, **constants: Any) -> None:
        launch(kernel, grid, *tensors, **constants)
        if kernel == name:
            found[:] = [(grid, tensors, constants)]

    fused._launch = record
    with alone():
        one_call(hidden, chunk, tiny, torch.bfloat16, "triton")[1]()
        synchronize()
    (grid, tensors, constants), kernel, ready, line = found[0], getattr(kernels(), name), [], []
    for warps, block, stages, in_loop in settings:
        told = " ".join(
            f"{x}{int(y)}"
            for x, y in (("w", warps), ("b", block), ("s", stages), ("a", in_loop))
            if y is not None
        )
        fields = {**constants, "num_warps": warps, "num_stages": stages or 1}
        fields |= {} if block is None else {"BH": block}
        fields |= {} if in_loop is None else {"IN_LOOP": in_loop}
        try:
            if DEVICE == "cuda":
                kernel.warmup(*tensors, grid=grid, **fields)
            ready.append((told, fields))
        except Exception as error:
            line.append(f"{told} {type(error).__name__}")
    with alone():
        for told, fields in ready:
            try:
                line.append(
                    f"{told} {median_ms(lambda fields=fields: kernel[grid](*tensors, **fields), 5):.3f}"
                )
            except Exception as error:  # after an illegal access nothing works here any more
                line.append(f"{told} {type(error).__name__}: {str(error).splitlines()[0][:80]}")
                break
    print(f"sweep h={hidden} c={chunk} {name}: " + " | ".join(line), flush=True)


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """No two of these processes are in here at once."""
    with open(Path(tempfile.gettempdir()) / "remanence-gpu.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def named_launches() -> None:
    """Wait for each kernel, so that a failure bears its name."""
    launch = fused._launch

    def waiting(name: str, *args: Any, **constants: Any) -> None:
        try:
            launch(name, *args, **constants)
            synchronize()
        except Exception as error:
            raise RuntimeError(
                f"{name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
            ) from error

    fused._launch = waiting


def job(what: str, warps: dict[str, int] | None = None, **fields: Any) -> int:
    """What a process of its own does."""
    if fields.get("tiny"):
        global WIDTH
        WIDTH = 16
    fused.WARPS.update(warps or {})
    if "dtype" in fields:
        fields["dtype"] = torch.bfloat16 if fields["dtype"] == "bf16" else torch.float32
    if what == "check":
        named_launches()
    try:
        fine = {"check": check, "time": clock, "sweep": sweep}[what](**fields)
    except Exception as error:
        print(f"{what} {fields}: FAILED: {error}"[:400], flush=True)
        return 1
    return 0 if fine is not False else 1


class Jobs:
    """Processes, some at once, all gone at the deadline."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline

    def run(self, jobs: list[tuple[dict[str, Any], dict[str, str], str]], at_once: int) -> list[int]:
        """Return codes of (fields, environment, title), 124 where the deadline came first; output is printed when a job
        ends.
        """
        codes, waiting, running = [124] * len(jobs), list(enumerate(jobs)), []
        while (waiting or running) and time.perf_counter() - BEGIN < self.deadline:
            while waiting and len(running) < at_once:
                index, (fields, env, title) = waiting.pop(0)
                command = [sys.executable, "-W", "ignore", __file__, "--job", json.dumps(fields)]
                out = tempfile.TemporaryFile("w+")  # noqa: SIM115, read when the job ends
                process = subprocess.Popen(
                    command,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **env},
                    start_new_session=True,
                )
                running.append((index, process, out, title))
            for entry in list(running):
                if entry[1].poll() is not None:
                    running.remove(entry)
                    codes[entry[0]] = entry[1].returncode
                    self.tell(entry[2], entry[3])
            time.sleep(0.05)
        for _, process, out, title in running:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self.tell(out, f"{title}out of time:")
        for _, (fields, _, _) in waiting:
            print(f"out of time: {fields}", flush=True)
        return codes

    def tell(self, out: Any, title: str) -> None:
        out.seek(0)
        lines = out.read().splitlines()
        out.close()
        print(f"[{time.perf_counter() - BEGIN:4.0f} s] {title}" + "\n".join(lines[-12:]), flush=True)


def settings_of(name: str) -> list[list[Any]]:
    """Warps, block, stages, products apart or not, to try."""
    if name in ("state_kernel", "state_backward"):
        return [
            [8, None, 1, True],
            [8, None, 2, False],
            [8, None, 1, False],
            [4, None, 2, False],
            [4, None, 1, True],
        ]
    if name.startswith("coef"):
        return [[warps, None, None, None] for warps in (2, 4, 8, 16)]
    in_loop = [True, False] if name in fused.IN_LOOP else [None]
    return [[warps, block, None, way] for block in (32, 64) for warps in (4, 8) for way in in_loop]


def rescues() -> list[tuple[dict[str, Any], dict[str, str], str]]:
    """Other ways to build kernels that failed: (job's fields, environment, name)."""
    import triton

    folder = Path(tempfile.gettempdir()) / "remanence-triton"
    ways: list[tuple[dict[str, Any], dict[str, str], str]] = []
    found = [
        Path(triton.__file__).parent / "backends/nvidia/bin/ptxas-blackwell",
        *Path("/usr/local").glob("cuda-1*/bin/ptxas"),
    ]
    for ptxas in found:
        if ptxas.exists():
            ways.append(
                (
                    {},
                    {
                        "TRITON_PTXAS_PATH": str(ptxas),
                        "TRITON_CACHE_DIR": f"{folder}-{ptxas.parent.parent.name}",
                    },
                    str(ptxas),
                )
            )
    ways.append(
        ({}, {"DISABLE_PTXAS_OPT": "1", "TRITON_CACHE_DIR": f"{folder}-plain"}, "ptxas without optimiser")
    )
    ways.append(({"warps": dict.fromkeys(fused.WARPS, 4)}, {}, "4 warps everywhere"))
    parallel = ("read_kernel", "read_backward", "blend_backward", "keys_backward")
    ways.append(({"warps": dict.fromkeys(parallel, 2)}, {}, "2 warps (no wgmma) in the parallel kernels"))
    return ways


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes, for the interpreter")
    parser.add_argument("--parts", nargs="+", default=None, choices=["check", "time", "sweep"])
    parser.add_argument("--sweep", action="store_true", help="the sweep alone")
    parser.add_argument("--hidden", type=int, nargs="+", default=None)
    parser.add_argument("--chunk", type=int, nargs="+", default=[64, 16])
    parser.add_argument("--only", nargs="+", help="kernels to sweep")
    parser.add_argument("--budget", type=float, default=285.0, help="seconds after which everything is ended")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.job:
        sys.exit(job(**json.loads(options.job)))
    tiny = options.tiny
    parts = ["sweep"] if options.sweep else options.parts or ["check", "time", "sweep"]
    hiddens = options.hidden or ([16] if tiny else [64, 256, 128])
    rows = [(hidden, chunk) for chunk in options.chunk for hidden in hiddens]
    cores = os.cpu_count() or 2
    jobs, several = Jobs(options.budget), 1 if DEVICE == "cpu" else min(8, max(1, cores - 2))
    print(
        f"{torch.cuda.get_device_name() if DEVICE == 'cuda' else 'interpreter'}, "
        f"torch {torch.__version__}, {cores} cores",
        flush=True,
    )
    size = {"tiny": tiny}
    checks = [{"what": "check", "hidden": h, "chunk": c, **size} for h, c in rows]
    if "check" in parts:
        dtype = "fp32" if tiny else "bf16"
        codes = jobs.run([({**fields, "dtype": dtype}, {}, "") for fields in checks], several)
        failed = [fields for fields, code in zip(checks, codes, strict=True) if code not in (0, 124)]
        again = [
            ({**fields, "dtype": dtype, **way}, env, f"with {name}: ")
            for fields in failed[:2]
            for way, env, name in rescues()
        ]
        if not tiny:
            jobs.run(again, several)
    if "time" in parts:
        print("B{} H{} T{}".format(*sizes(tiny)), flush=True)
        timed = [{"what": "time", "hidden": h, "chunk": c, **size} for h, c in rows if True]
        timed += [
            {"what": "time", "hidden": h, "chunk": 64, "backend": "chunked", "rounds": 2, **size} for h in []
        ]
        jobs.run([({**fields, "dtype": "fp32" if tiny else "bf16"}, {}, "") for fields in timed], 1)
    rest: list[tuple[dict[str, Any], dict[str, str], str]] = []
    if "sweep" in parts:
        for hidden in hiddens[:1] if tiny else hiddens[:2]:
            fits = hidden <= fused.MAX_HIDDEN_IN_REGISTERS
            names = [
                "state_backward" if fits else "state_backward_blocked",
                "state_kernel" if fits else "state_blocked",
                "read_backward",
                "read_kernel",
                "keys_backward",
                "blend_backward",
            ]
            names += ["coef_kernel", "coef_backward"] if hidden == hiddens[0] else []
            for name in options.only or names:
                fields = {
                    "name": name,
                    "hidden": hidden,
                    "chunk": options.chunk[0],
                    "settings": settings_of(name),
                }
                rest.append(({"what": "sweep", **fields, **size}, {}, ""))
    if "check" in parts and not tiny:
        rest += [({**fields, "dtype": "fp32"}, {}, "") for fields in sorted(checks, key=lambda x: x["chunk"])]
    jobs.run(rest, several)
    print(f"{time.perf_counter() - BEGIN:.0f} s in all")


if __name__ == "__main__":
    main()
