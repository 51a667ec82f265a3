"""Does a memory train on real text, and does it stay worth reading with? Byte models of equal parameters on books.

    python -m experiments.dynamics.run BOOKS --runs deep gated_delta --lrs 1e-3 2e-3 4e-3 --steps 1000 --out rows.json

BOOKS is a folder of ``*.txt.xz`` with an ``index.json`` that names each book's split. The models are LMMs (memory and
feed-forward, no attention), trained on the books of the split train with their memories carried from piece to piece,
then read on held-out books (--splits): bits per byte by octave of positions with the memory carried (on) and begun anew
every 256 tokens (fresh), each a mean over separate streams with the standard error of the difference. A run that is in
the file already is not run again, so that the same command goes on after an interruption.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from experiments.shared import captured, load, octaves, plan_of, streams
from remanence import Model, ModelConfig
from remanence.model import matched
from remanence.ops import clamped, reset_clamped
from remanence.runtime.state import where

RUNS: dict[
    str, dict[str, Any]
] = {  # the memory's configuration; all but the last two have a path that is never forgotten
    "deep": {"head_dim": 128},
    "deep64": {},
    "matrix": {"depth": 1, "rule": "titans"},  # token-exact, with momentum as printed
    "gated_delta": {"depth": 1},
    "matrix128": {"depth": 1, "head_dim": 128},  # as large a state as deep's
    "matrix128-momentum": {"depth": 1, "head_dim": 128, "rule": "titans"},
    "deep3": {"head_dim": 128, "depth": 3},
    "deep-x2": {"head_dim": 128, "expansion": 2.0},
    "deep-chunk16": {"head_dim": 128, "chunk": 16},
    "deep-chunk128": {"head_dim": 128, "chunk": 128},
    "titans": {"net": "titans", "expansion": 2.0, "chunk": 64},
    "bare": {"net": "linear", "rule": "gated_delta", "step_bias": 0.0, "forget_bias": -6.0, "chunk": 64},
}
SEGMENT = 256


def knows_borders(model: Model) -> Model:
    """Pieces here are whole chunks, so that every row stands at a chunk's border in every call."""
    for block in model.blocks:
        memory = block.mixer.memory
        memory.forward = partial(memory.forward, aligned=True)
    return model


class Training:
    """Books in order, rows that begin anew now and then, the memory carried; one step is one CUDA graph."""

    def __init__(
        self,
        model: Model,
        books: list[torch.Tensor],
        rows: int,
        length: int,
        steps: int,
        lr: float,
        seed: int,
        device: str,
    ):
        self.model, self.length, self.steps, self.lr, self.device = model, length, steps, lr, device
        self.text = torch.cat(books).to(device)
        plan, new = plan_of(books, rows, length, steps, seed)
        self.plan, self.new = plan.to(device), new.to(device)
        parameters = list(model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.rate = torch.zeros((), device=device)
        on_gpu = device == "cuda"
        self.optimizer = torch.optim.AdamW(
            groups, lr=self.rate, betas=(0.9, 0.95), fused=on_gpu, capturable=on_gpu
        )
        with torch.no_grad():
            self.state = model.start(rows).clone()
        self.at, self.fresh = self.plan[0].clone(), self.new[0].clone()
        self.loss, self.norm = torch.zeros((), device=device), torch.zeros((), device=device)

    def step(self) -> None:
        span = torch.arange(self.length + 1, device=self.device)
        x = self.text[self.at.unsqueeze(1) + span].long()
        state = where(self.fresh, self.model.start(len(x)), self.state)
        with torch.autocast(self.device, torch.bfloat16, cache_enabled=False):
            logits, after = self.model(x[:, :-1], state)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), x[:, 1:].flatten())
        loss.backward()
        self.norm.copy_(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        for old, new in zip(self.state.tensors(), after.detach().tensors(), strict=True):
            old.copy_(new)
        self.loss.copy_(loss.detach())

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses in bits and gradient norms, of every step."""
        losses, norms = [], []
        weights = [p.detach().clone() for p in self.model.parameters()]
        replay = captured(self.step, self.device)  # its rate is 0, yet what it warmed up with is undone
        with torch.no_grad():
            for parameter, weight in zip(self.model.parameters(), weights, strict=True):
                parameter.copy_(weight)
            for kept in self.optimizer.state.values():
                for tensor in kept.values():
                    tensor.zero_()
        for step in range(self.steps):
            self.at.copy_(self.plan[step])
            self.fresh.copy_(self.new[step] if step else torch.ones_like(self.new[0]))
            warm, cosine = min(1, (step + 1) / 60), 0.5 * (1 + math.cos(math.pi * step / self.steps))
            self.rate.fill_(self.lr * warm * (0.1 + 0.9 * cosine))
            replay()
            losses.append(self.loss.clone())
            norms.append(self.norm.clone())
        return torch.stack(losses).cpu() / math.log(2), torch.stack(norms).cpu()


@torch.no_grad()
def measure(model: Model, x: torch.Tensor, device: str, piece: int) -> dict[str, Any]:
    """Per octave of positions: bits on, bits fresh, and the difference's standard error over the streams."""
    x = x.to(device)
    rows, length = x.shape[0], x.shape[1] - 1
    bits: dict[str, torch.Tensor] = {}
    for mode, size in (("on", piece), ("fresh", SEGMENT if device == "cuda" else 64)):
        state, nothing = model.start(rows).clone(), model.start(rows)
        at, out = torch.zeros((), dtype=torch.long, device=device), torch.zeros(rows, size, device=device)

        def step(
            mode: str = mode,
            size: int = size,
            state: Any = state,
            nothing: Any = nothing,
            at: Any = at,
            out: Any = out,
        ) -> None:
            here = x[:, at + torch.arange(size + 1, device=device)].long()
            begun = state
            if mode == "fresh":  # the convolutions go on
                begun = state._replace(
                    blocks=tuple(
                        new._replace(conv=old.conv)
                        for new, old in zip(nothing.blocks, state.blocks, strict=True)
                    )
                )
            with torch.autocast(device, torch.bfloat16, cache_enabled=False):
                logits, after = model(here[:, :-1], begun)
            loss = F.cross_entropy(logits.float().flatten(0, 1), here[:, 1:].flatten(), reduction="none")
            out.copy_(loss.view(rows, size) / math.log(2))
            for old, new in zip(state.tensors(), after.tensors(), strict=True):
                old.copy_(new)

        replay, found = captured(step, device), []
        for tensor, new in zip(state.tensors(), nothing.tensors(), strict=True):
            tensor.copy_(new)
        for first in range(0, length - size + 1, size):
            at.fill_(first)
            replay()
            found.append(out.clone())
        bits[mode] = torch.cat(found, 1).cpu()
    table = {}
    for first, last in octaves(length):
        on, fresh = (bits[mode][:, first:last].double().mean(1) for mode in ("on", "fresh"))
        gap = on - fresh
        table[last] = [
            round(v.item(), 4) for v in (on.mean(), fresh.mean(), gap.mean(), gap.std() / math.sqrt(rows))
        ]
    return table


def one(name: str, lr: float, seed: int, args: argparse.Namespace, device: str) -> dict[str, Any]:
    small = device == "cpu"
    dim, depth = (128, 2) if small else (512, 6)
    rows, length = args.rows or (8 if small else 16), args.piece or (256 if small else 2048)
    torch.manual_seed(seed)
    base = ModelConfig(
        vocab_size=256,
        dim=dim,
        num_layers=depth,
        heads=dim // 64,
        pattern=("lmm",),
        segment=SEGMENT,
        persistent=0,
    )
    memory = {"head_dim": 64, **RUNS[name]}
    config = matched(ModelConfig(**{**base.to_dict(), "memory": memory}))
    model = knows_borders(Model(config).to(device))
    began = time.time()
    losses, norms = Training(
        model, load(args.books, "train"), rows, length, args.steps, lr, seed, device
    ).run()
    took = time.time() - began
    held = clamped()
    reset_clamped()
    x = {split: streams(load(args.books, split), args.length, args.streams) for split in args.splits}
    weights, every = model.start(1).tensors(), min(25, args.steps)
    state = sum(t.numel() for t in weights if t.dim() == 6) or sum(t.numel() for t in weights if t.dim() == 5)
    return {
        "run": name, "lr": lr, "seed": seed, "steps": args.steps, "bytes": args.steps * rows * length,
        "parameters": sum(p.numel() for p in model.parameters()), "state": state // depth,
        "train": round(losses[-50:].mean().item(), 4),
        "curve": [round(bits, 3) for bits in losses.unfold(0, every, every).mean(1).tolist()],
        "norm": [round(norms.quantile(p).item(), 3) for p in (0.5, 0.95, 1.0)], "leash": held, "seconds": round(took),
        "streams": {split: len(each) for split, each in x.items()},
        "positions": {split: measure(model, each, device, length) for split, each in x.items()},
    }  # fmt: skip


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Training curves, and held-out bits by position with and without what was read before, a mean over the seeds."""
    from matplotlib.figure import Figure

    splits = list(rows[0]["positions"])
    figure = Figure(figsize=(5 * (1 + len(splits)), 4), layout="constrained")
    left, *right = figure.subplots(1, 1 + len(splits))
    names = list(dict.fromkeys(row["run"] for row in rows))
    for color, name in enumerate(names):
        mine = [row for row in rows if row["run"] == name]
        curve = torch.tensor([row["curve"] for row in mine]).mean(0).tolist()
        steps = [mine[0]["steps"] * (i + 0.5) / len(curve) for i in range(len(curve))]
        left.plot(steps, curve, color=f"C{color}", label=name)
        for axes, split in zip(right, splits, strict=True):
            places = [int(place) for place in mine[0]["positions"][split]]
            table = torch.tensor([[row["positions"][split][str(p)] for p in places] for row in mine]).mean(0)
            axes.plot(places, table[:, 0].tolist(), color=f"C{color}", marker="o", label=f"{name}, on")
            axes.plot(
                places, table[:, 1].tolist(), color=f"C{color}", ls="--", alpha=0.6, label=f"{name}, fresh"
            )
            axes.set(xscale="log", xlabel="position, up to", ylabel="bits per byte", title=f"{split} books")
    left.set(xlabel="step", ylabel="bits per byte", title="training", ylim=(1.35, 2.4))
    left.legend(frameon=False)
    right[0].legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("books")
    parser.add_argument("--runs", nargs="+", default=["deep", "gated_delta"], choices=list(RUNS))
    parser.add_argument("--lrs", nargs="+", type=float, default=[2e-3])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rows", type=int, help="of a batch: 16, on a CPU 8")
    parser.add_argument("--piece", type=int, help="tokens of each, in one step: 2,048, on a CPU 256")
    parser.add_argument("--splits", nargs="+", default=["validation"])
    parser.add_argument("--length", type=int, default=262144, help="tokens of each held-out stream")
    parser.add_argument("--streams", type=int, default=8, help="at most so many of them")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no run after so long")
    parser.add_argument("--out", type=Path, default=Path("dynamics.json"))
    parser.add_argument("--plot", type=Path, help="draw what --out holds, and run nothing")
    args = parser.parse_args()
    if args.plot:
        plot(json.loads(args.out.read_text()), args.plot)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    began = time.time()
    rows = json.loads(args.out.read_text()) if args.out.exists() else []
    done = {(row["run"], row["lr"], row["seed"], row["steps"], *row["positions"]) for row in rows}
    for seed in args.seeds:
        for name in args.runs:
            for lr in args.lrs:
                if (name, lr, seed, args.steps, *args.splits) in done or time.time() - began > args.seconds:
                    continue
                row = one(name, lr, seed, args, device)
                rows.append(row)
                args.out.write_text(json.dumps(rows, indent=1))
                shown = {
                    key: value
                    for key, value in row.items()
                    if key not in ("curve", "positions", "bytes", "streams")
                }
                print(
                    json.dumps(shown),
                    json.dumps({s: [v[:3] for v in t.values()] for s, t in row["positions"].items()}),
                    flush=True,
                )


if __name__ == "__main__":
    main()
