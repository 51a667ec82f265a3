"""What do memories add to a language model? Byte models of equal parameters on books, from windows to Titans.

    python -m experiments.language.run BOOKS --runs window mag lmm --lrs 1e-3 2e-3 --seeds 0 1 --steps 850 --out a.json
    python -m experiments.language.run BOOKS --out all.json --merge rows.json others.json --table --plot language.png

BOOKS is a folder of ``*.txt.xz`` with an ``index.json`` that names each book's split. All models read the same pieces
of the books of the split train in the same order, those of constant size with their state carried from piece to piece,
full attention with none. They are then read on separate held-out streams: bits per byte by octave of positions with
their memories on, off, frozen and fresh (`remanence.config.MODES`). Full attention is read on plainly, beyond the
length it was trained at; with its context begun anew every such length (restarted); and with a context of always at
least half of it (overlapped). A run that is in the file already is not run again.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.shared import (
    Clock,
    Row,
    Rows,
    Training,
    add_arguments,
    bits_of,
    by_octave,
    comparable,
    load,
    machine,
    mean_and_error,
    octaves,
    read,
    read_restarted,
    release,
    rounded,
    streams,
    table_row,
    table_rule,
)
from remanence import Model, ModelConfig
from remanence.config import MODES, memorizing
from remanence.layers import Linear
from remanence.layers.attention import AttentionState
from remanence.mixers import MIXERS, AttentionMixer, Context, Mixer, MixerOutput
from remanence.mixers.window_and_memory import Join
from remanence.model import matched
from remanence.ops import clamped, reset_clamped


class GatedWindow(AttentionMixer):
    """A sliding window whose output is gated as in MAG, by a projection of the input where MAG has its memory: what of
    MAG's gain is the gate's.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, sliding=True)
        self.g_proj, self.join = Linear(config.dim, config.dim), Join(config.dim)

    def forward(self, x: Tensor, state: AttentionState | None, ctx: Context) -> MixerOutput:
        y, state = self.attention(x, state, ctx.offsets)
        return MixerOutput(self.join(y, self.g_proj(x)), state)

    decoder = Mixer.decoder  # not the window's own, which knows of no gate


MIXERS["window-gate"] = GatedWindow

RUNS: dict[str, dict[str, Any]] = {
    "window": {"pattern": ("window",)},
    "attention": {"pattern": ("attention",)},
    "gated_delta": {"pattern": ("gated_delta",)},
    "lmm": {"pattern": ("lmm",)},
    "mag": {"pattern": ("mag",)},
    "mac": {"pattern": ("mac",)},
    "memorizing": {"pattern": "memorizing"},
    "mal": {"pattern": ("mal",)},
    "delta": {"pattern": ("delta",)},
    "ttt": {"pattern": ("ttt",), "memory": {"expansion": 2.0}},
    "hybrid": {"pattern": ("window", "lmm")},
    "window-gate": {"pattern": ("window-gate",)},
    # gated_delta with a path that is never forgotten
    "matrix": {"pattern": ("lmm",), "memory": {"depth": 1}},
    # attention has no convolutions, memories do: what of their gain is those
    "mag-noconv": {"pattern": ("mag",), "memory": {"conv": 0}},
    "lmm-noconv": {"pattern": ("lmm",), "memory": {"conv": 0}},
    # keys that begin as the query of the token before, and convolutions that hold a word or two
    "mag-induction": {"pattern": ("mag",), "memory": {"conv": 16, "induction": True}},
    "lmm-induction": {"pattern": ("lmm",), "memory": {"conv": 16, "induction": True}},
}
"""What differs from the others, in a model's configuration."""

TINY = {
    "dim": 64, "depth": 2, "window": 64, "segment": 64, "persistent": 16, "head_dim": 16, "store": 256, "rows": 2,
    "piece": 256, "reading": 512, "steps": 4, "length": 2048, "streams": 2,
}  # fmt: skip


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    """What the models of all runs have in common."""
    return {
        "vocab_size": 256, "dim": args.dim, "num_layers": args.depth, "heads": max(1, args.dim // 64),
        "window": args.window, "segment": args.segment, "persistent": args.persistent, "knn": {"size": args.store},
    }  # fmt: skip


def made(name: str, args: argparse.Namespace) -> ModelConfig:
    own = {**RUNS[name], "memory": {"head_dim": args.head_dim, **RUNS[name].get("memory", {})}}
    if name == "ttt":  # two layers are written: heads half as wide, which the kernels can hold
        own["memory"]["head_dim"] = args.head_dim // 2
    if own["pattern"] == "memorizing":
        own["pattern"] = memorizing(args.depth)
    return matched(ModelConfig(**{**config_of(args), **own}))


def one(name: str, what: Row, texts: dict[str, Any], args: argparse.Namespace, device: torch.device) -> Row:
    """Train a model, and read with it."""
    torch.manual_seed(what["seed"])
    model = Model(made(name, args)).to(device)
    reset_clamped()
    carry = "attention" not in model.config.pattern
    clock = Clock(device)
    training = Training(
        model, texts["train"], rows=args.rows, length=args.piece, steps=args.steps, lr=what["lr"],
        seed=what["seed"], carry=carry,
    )  # fmt: skip
    losses, norms = training.run()
    trained, captured, held = clock(), training.graphed is not None, clamped()
    model.zero_grad(set_to_none=True)
    del training
    # All splits at once: fewer and larger calls.
    counts = [len(texts[split]) for split in args.splits]
    x = torch.cat([texts[split] for split in args.splits]).to(device)
    found = {mode: by_octave(bits).split(counts) for mode, bits in readings(model, x, args).items()}
    every = max(1, len(losses) // 40)
    return {
        "what": what, "config": model.config.to_dict(), **machine(device),
        "parameters": sum(p.numel() for p in model.parameters()),
        "state_bytes": model.start(1).nbytes if carry else None,
        "bytes": len(losses) * args.rows * args.piece, "finished": len(losses) == args.steps, "captured": captured,
        "seconds": {"train": trained, "read": clock()}, "train": round(losses[-50:].mean().item(), 4),
        "curve": rounded(losses.unfold(0, every, every).mean(1), 3),
        "norm": rounded(norms.quantile(torch.tensor([0.5, 0.95, 1.0])), 3), "leash": held,
        "octaves": [last for _, last in octaves(args.length)],
        "bits": {
            split: {mode: rounded(parts[i]) for mode, parts in found.items()} for i, split in enumerate(args.splits)
        },
    }  # fmt: skip


def readings(model: Model, x: Tensor, args: argparse.Namespace) -> dict[str, Tensor]:
    """Bits of all streams by mode."""
    if "attention" in model.config.pattern:
        # From the start in one call, a stream at a time: nothing is cached.
        whole = torch.cat([bits_of(model, row.unsqueeze(0), keep=False)[0].cpu() for row in x])
        return {
            "on": whole,
            "restarted": read_restarted(model, x, args.piece, args.piece),
            "overlapped": read_restarted(model, x, args.piece, args.piece // 2),
        }
    modes = MODES if model.has_memory else ("on",)
    if (
        "knn" in model.config.pattern
    ):  # of a store that is not written, or lives for a window, nothing is found
        modes = ("on", "off")
    return {mode: read(model, x, args.reading, mode) for mode in modes}


# What was found


def per_stream(rows: list[Row], split: str, mode: str) -> Tensor:
    """Bits of one run ``[streams octaves + 1]``, a mean over seeds; the last column is of the whole stream."""
    bits = torch.tensor([row["bits"][split][mode] for row in rows], dtype=torch.float64).mean(0)
    ends = torch.tensor([0, *rows[0]["octaves"]], dtype=torch.float64)
    whole = (bits * ends.diff() / ends[-1]).sum(1, keepdim=True)
    return torch.cat([bits, whole], 1)


def chosen(rows: list[Row]) -> dict[str, list[Row]]:
    """Of each run the rows of all seeds at the learning rate that is best on the first split; lost runs last."""
    found: dict[str, list[Row]] = {}
    for name in dict.fromkeys(row["what"]["run"] for row in rows):
        mine = [row for row in rows if row["what"]["run"] == name]
        by_lr = {
            lr: [row for row in mine if row["what"]["lr"] == lr] for lr in {r["what"]["lr"] for r in mine}
        }
        split = mine[0]["what"]["splits"][0]
        bits = {lr: per_stream(some, split, "on")[:, -1].mean().item() for lr, some in by_lr.items()}
        best = min(by_lr, key=lambda lr: bits[lr] if bits[lr] == bits[lr] else float("inf"))
        found[name] = by_lr[best]
    return found


def groups(rows: list[Row]) -> list[list[Row]]:
    """Rows that may be compared: all but the run, its learning rate and its seed is the same."""
    return comparable(rows, "run", "lr", "seed")


def table(rows: list[Row]) -> str:
    """Bits by position, then what each memory adds; learning rates chosen on the first split."""
    runs, first, lines = chosen(rows), rows[0], []
    what, places = first["what"], [f"{end // 1024}K" for end in first["octaves"]]
    lines += [f"{what['steps']:,} steps of {what['rows']} x {what['piece']:,} bytes, {first['device']}", ""]
    for split in what["splits"]:
        lines += [f"**{split}**, bits per byte, {len(first['bits'][split]['on'])} streams", ""]
        head = ("run", "lr", "seeds", "parameters", *places, "all", "less the window's")
        lines += [table_row(*head), table_rule(len(head))]
        for name, some in runs.items():
            seeds = {row["what"]["seed"] for row in some}
            base = [row for row in runs.get("window", []) if row["what"]["seed"] in seeds]
            for mode in [m for m in some[0]["bits"][split] if m == "on" or m not in MODES]:
                bits, gap = per_stream(some, split, mode), ""
                if len(base) == len(some):  # the same seeds: the same pieces in the same order
                    gap = _signed(*mean_and_error((bits - per_stream(base, split, "on"))[:, -1]))
                title = name if mode == "on" else f"{name}, {mode}"
                about = (f"{some[0]['what']['lr']:g}", len(some), f"{some[0]['parameters']:,}")
                lines.append(table_row(title, *about, *[f"{v:.3f}" for v in bits.mean(0).tolist()], gap))
        lines += [
            "",
            f"**{split}**, bits with the memory on less those without, ± standard error over streams",
            "",
        ]
        lines += [table_row("run", "on less", *places, "all"), table_rule(len(places) + 3)]
        for name, some in runs.items():
            on = per_stream(some, split, "on")
            for mode in [m for m in some[0]["bits"][split] if m != "on"]:
                gaps = on - per_stream(some, split, mode)
                lines.append(table_row(name, mode, *[_signed(*mean_and_error(gap)) for gap in gaps.T]))
        lines.append("")
    lines += [
        "Every run, whole streams",
        "",
        table_row("run", "lr", "seed", "train", *what["splits"], "s"),
        table_rule(5 + len(what["splits"])),
    ]
    for row in rows:
        bits = [f"{per_stream([row], split, 'on')[:, -1].mean().item():.4f}" for split in what["splits"]]
        about = (row["what"]["run"], f"{row['what']['lr']:g}", row["what"]["seed"], row["train"])
        lines.append(table_row(*about, *bits, row["seconds"]["train"]))
    return "\n".join([*lines, ""])


def _signed(mean: float, error: float) -> str:
    return f"{mean:+.3f} ± {error:.3f}"


def plot(rows: list[Row], path: Path) -> None:
    """Training curves; held-out bits by position; and what the memory adds to a fresh one's."""
    from matplotlib.figure import Figure

    runs = chosen(rows)
    splits = rows[0]["what"]["splits"]
    figure = Figure(figsize=(6 * (1 + len(splits)), 9), layout="constrained")
    axes = figure.subplots(2, 1 + len(splits))
    places = rows[0]["octaves"]
    for color, (name, some) in enumerate(runs.items()):
        style = {"color": f"C{color % 10}", "ls": "-" if color < 10 else ":", "label": name}
        curve = torch.tensor([row["curve"] for row in some]).mean(0)
        steps = [some[0]["what"]["steps"] * (i + 0.5) / len(curve) for i in range(len(curve))]
        axes[0, 0].plot(steps, curve.tolist(), **style)
        for i, split in enumerate(splits):
            modes = some[0]["bits"][split]
            mode = "overlapped" if "overlapped" in modes else "on"
            bits = per_stream(some, split, mode)[:, :-1]
            axes[0, 1 + i].plot(places, bits.mean(0).tolist(), marker="o", **style)
            other = next((m for m in ("fresh", "off") if m in modes), None)
            if other is not None:
                gaps = [mean_and_error(g) for g in (bits - per_stream(some, split, other)[:, :-1]).T]
                axes[1, 1 + i].errorbar(
                    places, [g[0] for g in gaps], [g[1] for g in gaps], marker="o", **style
                )
    lowest = min(min(row["curve"]) for row in rows)
    axes[0, 0].set(
        xlabel="step", ylabel="bits per byte", title="training", ylim=(0.97 * lowest, lowest + 0.8)
    )
    axes[1, 0].legend(*axes[0, 0].get_legend_handles_labels(), frameon=False, loc="center")
    axes[1, 0].set_axis_off()
    for i, split in enumerate(splits):
        axes[0, 1 + i].set(
            xscale="log", xlabel="position, up to", ylabel="bits per byte", title=f"{split} books"
        )
        axes[1, 1 + i].set(
            xscale="log", xlabel="position, up to", ylabel="bits, on less fresh (a store: less off)"
        )
        axes[1, 1 + i].axhline(0.0, color="0.7")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("books")
    parser.add_argument("--runs", nargs="+", default=list(RUNS)[:7], choices=list(RUNS))
    parser.add_argument("--lrs", nargs="+", type=float, default=[2e-3])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rows", type=int, default=8, help="of a batch")
    parser.add_argument("--piece", type=int, default=4096, help="tokens of each, in one step")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument(
        "--segment", type=int, default=512, help="MAC's, and how long a memory lives in mode fresh"
    )
    parser.add_argument("--persistent", type=int, default=128)
    parser.add_argument("--head-dim", type=int, default=128, help="width of a memory's heads")
    parser.add_argument("--store", type=int, default=8192, help="pairs that the kNN layer holds")
    parser.add_argument("--splits", nargs="+", default=["validation", "test"])
    parser.add_argument("--length", type=int, default=262144, help="tokens of each held-out stream")
    parser.add_argument("--streams", type=int, default=8, help="at most so many of each split")
    parser.add_argument("--reading", type=int, default=8192, help="tokens of a piece when a stream is read")
    add_arguments(parser, "language.json")
    if "--tiny" in sys.argv:
        parser.set_defaults(**TINY)
    args = parser.parse_args()
    rows = Rows(args.out, args.commit, args.merge or ())
    if rows.shown(
        args,
        lambda found: "\n".join(map(table, groups(found))),
        lambda found, path: plot(groups(found)[-1], path),
    ):
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    began = time.time()
    texts: dict[str, Any] = {"train": load(args.books, "train")}
    for split in args.splits:
        texts[split] = streams(load(args.books, split), args.length, args.streams)
    settings = {name: getattr(args, name) for name in (*TINY, "splits")}
    for seed in args.seeds:
        for name in args.runs:
            for lr in args.lrs:
                what = {"run": name, "lr": lr, "seed": seed, **settings}
                if rows.has(what) or time.time() - began > args.seconds:
                    continue
                row = one(name, what, texts, args, device)
                rows.add(row)
                means = {
                    split: {
                        mode: round(per_stream([row], split, mode)[:, -1].mean().item(), 4) for mode in modes
                    }
                    for split, modes in row["bits"].items()
                }
                print(
                    name,
                    f"lr {lr:g} seed {seed}",
                    row["parameters"],
                    row["train"],
                    row["seconds"],
                    means,
                    flush=True,
                )
                release()


if __name__ == "__main__":
    main()
