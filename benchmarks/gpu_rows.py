"""What one process of benchmarks/gpu.py measures: each function takes a job's fields and yields a row for each of its
cases.

A row that cannot be measured says why; after an error that leaves the GPU unusable the process ends, and its parent
starts one more for the cases that are left.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib
import json
import os
import platform
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu import LOST, RESET
from torch import Tensor, nn

from remanence import Model, NeuralMemory, preset
from remanence.data import Batch
from remanence.inference import reader
from remanence.layers.attention import SegmentState
from remanence.model import matched
from remanence.ops import MLP, RULES, Gates, Rule, memorize, operator, start
from remanence.ops.triton import dispatch, launch, resources
from remanence.ops.triton.memory import plan_of
from remanence.train import DataConfig, OptimizerConfig, TrainConfig, engine
from remanence.train.carry import carry_in
from remanence.train.distributed import ProcessGroup
from remanence.train.graphed import Graphed, Graphs
from remanence.train.plan import flops_per_token

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PEAK = 800e12
"""FLOP/s of bfloat16 products on an H100 or H200."""
SLOW = 5.0
"""Seconds of one call beyond which an implementation's larger cases are skipped."""
Row = dict[str, Any]


class SkipError(Exception):
    """Why a row cannot be measured here."""


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def several(run: Callable[[], Any], count: int) -> float:
    """Milliseconds of a call, one behind the other as in training: what the host does for the next hides behind this
    one.
    """
    if DEVICE == "cpu":
        begin = time.perf_counter()
        for _ in range(count):
            run()
        return 1e3 * (time.perf_counter() - begin) / count
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    for _ in range(count):
        run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / count


def median_ms(run: Callable[[], Any], seconds: float = 1.0, most: int = 10) -> float:
    """Of as many rounds as fit, after two calls to warm up; what is quick is called several times a round. A first call
    can take minutes, where a peer tries dozens of settings of each of its kernels: it says nothing of the next.
    """
    run()
    synchronize()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()  # autotuning may have needed more
    about = several(run, 1)
    count = max(1, min(8, int(60.0 / about)))
    rounds = max(0, min(most, int(1e3 * seconds / about / count)))
    return statistics.median([several(run, count) for _ in range(rounds)] or [about])


def peak_gib() -> float | None:
    return round(torch.cuda.max_memory_allocated() / 2**30, 2) if DEVICE == "cuda" else None


def autocast() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda")


def backend() -> str:
    """What the operator has chosen so far in this process."""
    return (
        "+".join(
            name for name in operator.BACKENDS if any(f"backend {name}" in said for said in dispatch._logged)
        )
        or "?"
    )


# (a) the operator alone


def flops(net: MLP, rule: Rule, width: int, chunk: int) -> float:
    """Of one head's forward products per token (ops/closed_form's); backward has two for each.

    Keys at the anchor, up and down the net (token-exact: at their own weights, and a triangular system); fold; read; P.
    """
    parts, sizes = 1 + rule.momentum, net.shapes(width)
    weights, ends = sum(a * b for a, b in sizes), sum(a + b for a, b in sizes)
    keys = 2.0 * (weights + sum(a * b for a, b in sizes[1:]))
    if rule.anchor == "token":
        keys = 2.0 * parts * weights + 2.0 * chunk * ends + chunk**2 / 3
    fold, read = 2.0 * parts * weights, 2.0 * parts * weights + 2.0 * chunk * ends
    return keys + fold + read + 2.0 * chunk**2 * (rule.momentum and rule.forget)


def operator_rows(cases: list[str], settings: dict[str, Row], tiny: bool) -> Iterator[Row]:
    for case in cases:
        yield {"case": case, **attempt(lambda case=case: one_operator(tiny=tiny, **settings[case]))}


def one_operator(
    net: Row, rule: Row, hidden: int, chunk: int, width: int, heads: int, backend: str, tiny: bool
) -> Row:
    interpreted = launch.interpreted()
    if tiny:
        width, heads, hidden, chunk = 16, 1, 16 * max(1, hidden // width), min(chunk, 16)
        backend = backend if interpreted and DEVICE == "cpu" else "chunked"
    batch, tokens = (1, 40) if tiny else (8, 8192)
    memory, how = MLP(expansion=hidden / width, **net), replace(RULES["titans"], **rule)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    if backend == "triton":
        reason = dispatch.memory_kind_reason(memory, how, width, width, chunk, dtype, torch.device(DEVICE))
        if reason is not None:
            raise SkipError(f"triton: {reason}")
        forget_builds()
    draw = lambda *shape: torch.randn(*shape, device=DEVICE)
    q, k, v = (draw(batch, tokens, heads, width) for _ in range(3))
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    gates = [F.logsigmoid(draw(batch, tokens, heads) + bias) for bias in (-4.0, 0.0, 8.0)]
    leaves = [*[x.to(dtype) for x in (q, k, v)], *gates, *[x.to(DEVICE) for x in memory.init(heads, width)]]
    wanted = [x.clone().requires_grad_() for x in leaves]
    upstream = torch.randn_like(leaves[0])

    def call(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        state = start(rest[3:], batch, rule=how, chunk=chunk, width=width)
        return memorize(
            q, k, v, Gates(*rest[:3]), state, net=memory, rule=how, chunk=chunk, backend=backend, check=False, aligned=True  # noqa: E501
        )[0]  # fmt: skip

    def forward() -> None:
        with torch.no_grad():
            call(*leaves)

    forward_ms = median_ms(forward)
    both_ms = median_ms(lambda: torch.autograd.grad(call(*wanted), wanted, upstream))
    floor = 1e3 * flops(memory, how, width, chunk) * batch * tokens * heads / PEAK
    row = {
        "backend": backend, "forward_ms": forward_ms, "ms": both_ms, "tokens_per_s": 1e3 * batch * tokens / both_ms,
        "floor_forward_ms": floor, "floor_ms": 3 * floor, "peak_gib": peak_gib(),
    }  # fmt: skip
    if DEVICE == "cuda" and backend == "triton":
        row["kernels"] = {name: list(size) for name, size in resources.loaded(launch.kernels()).items()}
    return row


def forget_builds() -> None:
    """So that `resources.loaded` tells of this row's kernels only; on disk they stay."""
    if DEVICE == "cuda":
        for built in resources.caches(launch.kernels()).values():
            built.clear()


# (b) the layer


class Flash(nn.Module):
    """Causal softmax attention with projections, nothing else."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = (
            heads,
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if x.is_cuda else contextlib.nullcontext():
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


def ours(width: int, heads: int, **fields: Any) -> nn.Module:
    return NeuralMemory(dim=width, heads=heads, **{"net": "titans", "expansion": 2.0, "chunk": 64, **fields})


def fla(name: str, width: int, heads: int, **fields: Any) -> nn.Module:
    if DEVICE == "cpu":
        raise SkipError("needs a GPU")
    return getattr(importlib.import_module("fla.layers"), name)(hidden_size=width, num_heads=heads, **fields)


def gated_delta_net(width: int, heads: int) -> nn.Module:
    layer = fla("GatedDeltaNet", width, heads, head_dim=width // heads, expand_v=1, use_short_conv=True)
    known = importlib.import_module("fla.utils")
    if getattr(known, "IS_NVIDIA_HOPPER", False) and not getattr(known, "TRITON_ABOVE_3_7_1", True):
        importlib.import_module("fla.ops.common.chunk_o").TRITON_ABOVE_3_7_1 = True
        layer.remark = (
            "fla refuses this Triton on Hopper, its gradients being wrong there; timed without that check"
        )
    return layer


def titans(width: int, heads: int, refresh: int | None) -> nn.Module:
    from titans_pytorch import MemoryMLP
    from titans_pytorch import NeuralMemory as Peer

    net = MemoryMLP(width // heads, depth=2, expansion_factor=2.0)
    return Peer(dim=width, dim_head=width // heads, heads=heads, chunk_size=64, batch_size=refresh, model=net)


def cloned(name: str, *packages: str) -> None:
    """Make packages of a repository importable that lies, as cloned, in a folder of PYTHONPATH; their own __init__ is
    not run: those import whole model zoos, and one of them a name that there is not.
    """
    folder = next((Path(place) / name for place in sys.path if (Path(place) / name).is_dir()), None)
    if folder is None:
        raise ImportError(f"no folder {name} on PYTHONPATH")
    for package in packages:
        made = types.ModuleType(package)
        made.__path__ = [str(folder / package.replace(".", "/"))]
        sys.modules[package] = made


def unused(name: str, **attributes: Any) -> None:
    """An empty module in place of one that a peer imports, but does not use for what is timed, where it cannot be
    imported.
    """
    try:
        importlib.import_module(name)
    except Exception:
        made = types.ModuleType(name)
        made.__spec__ = ModuleSpec(name, None)  # torch.compile looks for it
        vars(made).update(attributes)
        sys.modules[name] = made


def momentum_delta_net(width: int, heads: int) -> nn.Module:
    """By its authors' kernels, which come with a copy of fla of their own."""
    cloned("MomentumDeltaNet/flash-linear-attention", "fla", "fla.layers", "fla.ops")
    builtins.FLA_CACHE_RESULTS = True  # that fla asks for it and does not set it, with Triton from 3.4 on
    unused("pandas")
    made = importlib.import_module("fla.layers.momentum_deltanet").MomentumDeltaNet
    if DEVICE == "cpu":
        raise SkipError("needs a GPU")
    return made(hidden_size=width, num_heads=heads, head_dim=width // heads, expand_v=1)


def lact(width: int, fused: bool) -> nn.Module:
    """Large-chunk test-time training (SwiGLU nets, chunks of 2,048, momentum) without the window attention beside it,
    configured as its authors' 760M model; parameters in bfloat16, as their trainer has them, with which alone its
    kernels work.
    """
    cloned("LaCT/lact_llm", "lact_model")
    logging = types.SimpleNamespace(get_logger=lambda name: None)
    unused("transformers", logging=logging)
    unused("transformers.utils", logging=logging)
    unused("fla.models")
    unused("fla.models.utils", Cache=object)
    module = importlib.import_module("lact_model.layer_lact_swiglu")
    module.flash_attn_func = lambda q, k, v, **_: torch.zeros_like(v)
    layer = module.LaCTSWIGLULayer(
        hidden_size=width, num_attn_heads=16, num_lact_heads=4, inter_multi=1, window_size=2048, lact_chunk_size=2048,
        attn_qk_norm=False, no_v_silu=True, learnable_ttt_scale=True, w0_w2_low_rank=32, use_momentum=True,
        use_fused_kernel=fused, fp32_states=fused,
    )  # fmt: skip
    for net in (layer.w0, layer.w2):
        net._init_weights()
    if DEVICE == "cpu":
        raise SkipError("needs a GPU")
    layer.remark = (
        f"4 heads of {width // 4}, chunks of 2,048, without its window attention, parameters in bfloat16"
    )
    return layer.to(torch.bfloat16)


LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "remanence": ours,
    "remanence, as it comes": lambda w, h: NeuralMemory(dim=w),
    "remanence, chunk 16": lambda w, h: ours(w, h, chunk=16),
    "remanence, expansion 1": lambda w, h: ours(w, h, expansion=1.0),
    "remanence, linear, token-exact, momentum": lambda w, h: ours(
        w, h, net="linear", rule="titans", expansion=None
    ),
    "flash attention (SDPA)": Flash,
    "fla DeltaNet": lambda w, h: fla("DeltaNet", w, h),
    "fla GatedDeltaNet": gated_delta_net,
    "fla MomentumDeltaNet, its reference path": lambda w, h: fla(
        "MomentumDeltaNet", w, h, head_dim=w // h, expand_v=1.0
    ),
    "MomentumDeltaNet, its authors' kernels": momentum_delta_net,
    "LaCT, torch.compile": lambda w, h: lact(w, False),
    "LaCT, its authors' kernels": lambda w, h: lact(w, True),
    "titans-pytorch, all gradients at the first weights": lambda w, h: titans(w, h, None),
    "titans-pytorch, weights refreshed every 256 tokens": lambda w, h: titans(w, h, 256),
}


def layer_rows(cases: list[str], name: str, shapes: dict[str, list[int]], tiny: bool) -> Iterator[Row]:
    width, heads = (32, 2) if tiny else (1024, 16)
    seconds_per_token = 0.0
    for case in cases:
        batch, tokens = shapes[case]
        about = seconds_per_token * batch * tokens
        if about > SLOW:
            yield {"case": case, "note": f"skipped: about {about:.0f} s a call"}
            continue
        row = attempt(lambda batch=batch, tokens=tokens: one_layer(name, batch, tokens, width, heads))
        seconds_per_token = row.get("ms", 0.0) / 1e3 / (batch * tokens)
        yield {"case": case, **row}


def one_layer(name: str, batch: int, tokens: int, width: int, heads: int) -> Row:
    layer = LAYERS[name](width, heads).to(DEVICE).train()
    x = torch.randn(batch, tokens, width, device=DEVICE, requires_grad=True)
    upstream = torch.randn(batch, tokens, width, device=DEVICE)

    def both() -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        with autocast():
            y = layer(x)
        y = y[0] if isinstance(y, tuple) else y
        y.backward(upstream.to(y.dtype))

    ms = median_ms(both)
    row = {"ms": ms, "tokens_per_s": 1e3 * batch * tokens / ms, "peak_gib": peak_gib()}
    row |= {"backend": backend()} if name.startswith("remanence") else {}
    return row | ({"note": layer.remark} if hasattr(layer, "remark") else {})


# (c) training


def config(variant: str, tiny: bool, memory: Row | None = None) -> Any:
    """Every variant at the Transformer's number of parameters, with the memory that the preset gives, or with
    another.
    """
    return matched(preset("tiny" if tiny else "340m", variant, memory=memory or {}))


def train_rows(
    cases: list[str], variant: str, lengths: dict[str, int], tiny: bool, memory: Row | None = None
) -> Iterator[Row]:
    made = config(variant, tiny, memory)
    with torch.device(DEVICE):
        model = Model(made).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")
    for case in cases:
        length = lengths[case]
        batch = (128 if tiny else 32768) // length
        row = attempt(lambda batch=batch, length=length: one_training(model, optimizer, batch, length))
        if row.get("oom"):
            optimizer.zero_grad(set_to_none=True)
            model.checkpointing = True
            row = attempt(lambda batch=batch, length=length: one_training(model, optimizer, batch, length))
            row["note"] = ", ".join(
                ["checkpointing on, without it out of memory", *filter(None, [row.get("note")])]
            )
            row["checkpointing"], model.checkpointing = True, False
        about = {"variant": variant, "length": length, "net": made.memory.net, "chunk": made.memory.chunk}
        about["captured"] = DEVICE == "cuda"
        yield {"case": case, **about, "flops_per_token": flops_per_token(made, length), **row}


def one_training(model: Model, optimizer: torch.optim.Optimizer, batch: int, length: int) -> Row:
    """As `fit` trains: forward and backward as one CUDA graph, then the update."""
    tokens = torch.randint(model.config.vocab_size, (batch, length + 1), device=DEVICE)
    graphed = Graphed(model, torch.bfloat16) if DEVICE == "cuda" else None

    def step() -> None:
        if graphed is not None:
            graphed(tokens[:, :-1], tokens[:, 1:])
        else:
            logits = model.logits(model.trace(tokens[:, :-1]).hidden)
            F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    ms = median_ms(step, seconds=2.0, most=4)
    count = sum(parameter.numel() for parameter in model.parameters())
    said = {"backend": backend()} if model.has_memory else {}
    return {
        "ms": ms,
        "tokens_per_s": 1e3 * batch * length / ms,
        "peak_gib": peak_gib(),
        "parameters": count,
        **said,
    }


# (d) decoding


def moved(node: Any, tokens: int) -> Any:
    """A state as if so many more tokens had been read, a multiple of every chunk and segment: only the positions
    differ, since nothing but full attention's cache grows with what was read. A segment's position counts from its own
    start.
    """
    if not isinstance(node, tuple) or isinstance(node, SegmentState):
        return node
    children = [moved(child, tokens) for child in node]
    if not hasattr(node, "_fields"):
        return tuple(children)
    made = type(node)(*children)
    return made._replace(position=made.position + tokens) if "position" in node._fields else made


def decode_rows(cases: list[str], variant: str, settings: dict[str, list[int]], tiny: bool) -> Iterator[Row]:
    """A context is 1,024 tokens read (tiny: 64); 1M is the same state with its positions set 2^20 - 1,024 tokens
    further.
    """
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    made = config(variant, tiny)
    with torch.device(DEVICE):
        model = Model(made).to(dtype).eval()
    for case in cases:
        batch, context = settings[case]
        yield {
            "case": case,
            **attempt(lambda batch=batch, context=context: one_decoding(model, batch, context, tiny)),
        }


@torch.no_grad()
def one_decoding(model: Model, batch: int, context: int, tiny: bool) -> Row:
    read = 64 if tiny else 1024
    tokens = torch.randint(model.config.vocab_size, (batch, read), device=DEVICE)
    logits, state = model(tokens)
    note = f"{read} tokens read" + (f", positions set to {context:,}" if context > read else "")
    state = moved(state, context - read)
    held: list[Any] = [state, logits[:, -1].argmax(-1)]
    del logits
    try:
        decoder = importlib.import_module("remanence.inference.decoder").Decoder(model, state)
        how = "Decoder"
    except Exception as error:
        how = "model(tokens, state)"
        note += "" if isinstance(error, ImportError) else f"; Decoder: {type(error).__name__}: {short(error)}"

    def some() -> None:
        for _ in range(64):  # a whole chunk: what a token costs depends on its place in it
            if how == "Decoder":
                held[1] = decoder.step(held[1]).argmax(-1)
            else:
                logits, held[0] = model(held[1].unsqueeze(-1), held[0])
                held[1] = logits[:, -1].argmax(-1)

    ms = median_ms(some, seconds=1.0, most=20) / 64
    return {"ms": ms, "tokens_per_s": 1e3 * batch / ms, "peak_gib": peak_gib(), "backend": how, "note": note}


# (e) training with rows that go on


def carried_rows(cases: list[str], variant: str, tiny: bool) -> Iterator[Row]:
    """Steps as `fit` takes them, of 19M parameters on bytes: the size of experiments/dynamics/run.py, windows and
    segments of the papers' presets.
    """
    own = {} if tiny else {"vocab_size": 257, "dim": 512, "num_layers": 6, "heads": 8}
    batch, length = (2, 64) if tiny else (8, 4096)
    settings = TrainConfig(
        model=matched(preset("tiny" if tiny else "340m", variant, **own)),
        data=DataConfig(kind="documents", length=length),
        optimizer=OptimizerConfig(lr=1e-5),  # random tokens teach nothing
        batch=batch,
        carry=True,
        precision="bfloat16" if DEVICE == "cuda" else "float32",
    )
    with torch.device(DEVICE):
        model = Model(settings.model).train()
    optimizer = engine.make_optimizer(model, settings)
    for case in cases:
        yield {"case": case, **attempt(lambda case=case: one_carried(model, optimizer, settings, case))}


def one_carried(model: Model, optimizer: torch.optim.Optimizer, settings: TrainConfig, case: str) -> Row:
    batch, length = settings.batch, settings.data.length
    tokens = torch.randint(model.config.vocab_size, (batch, length + 1))
    read = Batch(tokens[:, :-1], tokens[:, 1:], None, None, None)
    carried, number = None, 0
    settings = replace(settings, carry=case != RESET)
    graphs = Graphs(model, settings, ProcessGroup(torch.device(DEVICE)), False)

    def step() -> None:
        nonlocal carried, number
        begins = torch.arange(batch) == number % batch if "one begins" in case else None
        here = read._replace(begins=begins)
        graph = graphs.select_graph([here], carried)
        state = carry_in(model, carried, here) if settings.carry and graph is None else None
        seen = engine.take_step(
            model, optimizer, settings, [here], state, number, graph=graph, carried=carried
        ).trace
        carried, number = seen.state.detach() if settings.carry else None, number + 1

    for _ in range(Graphs.EAGER):
        step()
    ms = median_ms(step, seconds=2.0, most=8)
    count = sum(parameter.numel() for parameter in model.parameters())
    row = {"ms": ms, "tokens_per_s": 1e3 * batch * length / ms, "peak_gib": peak_gib(), "parameters": count}
    return {**row, "backend": backend(), "note": f"{batch} x {length:,} tokens"}


# (f) reading one text


def read_rows(cases: list[str], variant: str, before: dict[str, int], tiny: bool) -> Iterator[Row]:
    """As `Session.read` does it, in pieces of 8,192 tokens: a text from its beginning, or a piece of it after so many
    tokens.
    """
    piece, until = (64, 128) if tiny else (8192, 65536)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    made = config(variant, tiny)
    with torch.device(DEVICE):
        model = Model(made).to(dtype).eval()
    for case in cases:
        start = before[case]
        yield {"case": case, **attempt(lambda start=start: one_reading(model, piece, start, until))}


@torch.no_grad()
def one_reading(model: Model, piece: int, start: int, until: int) -> Row:
    tokens = torch.randint(model.config.vocab_size, (1, until), device=DEVICE)

    def some(state: Any, count: int) -> Any:
        for part in tokens[:, :count].split(piece, 1):
            done = reader.read(model, part, state)
            state = done.state
            if done.diverged:
                raise ValueError("a memory has diverged")
        return state

    held = some(model.start(1), max(start, 4 * piece))  # pieces are captured after a few
    held = held if start else None
    if start:  # full attention's cache would grow: every piece is read at the same place
        timed, ms = piece, median_ms(lambda: some(held, piece), seconds=3.0, most=12)
    else:
        timed, ms = until, median_ms(lambda: some(model.start(1), until), seconds=4.0, most=3)
    said = {"backend": backend()} if model.has_memory else {}
    note = f"pieces of {piece:,}, read {min(reader.piece_size(model), piece):,} tokens at a time"
    return {
        "ms": ms * piece / timed,
        "tokens_per_s": 1e3 * timed / ms,
        "peak_gib": peak_gib(),
        "note": note,
        **said,
    }


# the process


def build_rows(cases: list[str], hidden: int, chunk: int, tiny: bool) -> Iterator[Row]:
    """Compile the kernels of one configuration, on all cores, before anything is timed."""
    if DEVICE == "cpu":
        yield {"case": cases[0], "note": "nothing to build without a GPU"}
        return
    plan = plan_of(MLP(expansion=hidden / 64), RULES["titans"], 64, 64, 16, chunk)
    begin = time.perf_counter()
    said = [
        dispatch.chip_reason(plan, torch.bfloat16, torch.device("cuda", 0), train) for train in (True, False)
    ]
    yield {"case": cases[0], "seconds": time.perf_counter() - begin, "note": next((x for x in said if x), "")}


def attempt(measure: Callable[[], Row]) -> Row:
    """The row, or one that says why there is none."""
    try:
        return measure()
    except SkipError as error:
        return {"note": str(error)}
    except ImportError as error:
        return {"note": f"not installed ({short(error)})"}
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            return {"note": "out of memory", "oom": True}
        return {"note": f"{type(error).__name__}: {short(error)}", "lost": lost()}
    finally:
        gc.collect()
        if DEVICE == "cuda" and not lost():
            torch.cuda.empty_cache()


def lost() -> bool:
    """Whether the GPU is unusable for this process, as after an illegal access."""
    try:
        synchronize()
    except Exception:
        return True
    return False


def short(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:110]


def about() -> Row:
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
    for name in ("triton", "flash-linear-attention", "titans-pytorch"):
        with contextlib.suppress(Exception):
            versions[name] = importlib.import_module("importlib.metadata").version(name)
    return {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else platform.processor() or "cpu",
        **versions,
    }


WHATS = {
    "operator": operator_rows,
    "layer": layer_rows,
    "train": train_rows,
    "decode": decode_rows,
    "carried": carried_rows,
    "read": read_rows,
    "build": build_rows,
}


def main() -> None:
    job = json.loads(sys.argv[1])
    if not sys.stdin.readline():  # the parent is gone
        return
    torch.manual_seed(0)
    print("ABOUT " + json.dumps(about()), flush=True)
    for row in WHATS[job.pop("what")](**job):
        print(
            "ROW " + json.dumps({key: value for key, value in row.items() if key not in ("oom", "lost")}),
            flush=True,
        )
        if row.get("lost"):
            sys.exit(LOST)


if __name__ == "__main__":
    main()
