"""How far does a memory reach? Pairs stated once and asked for after 1K to 1M tokens of noise, by models trained on 1K.

    python -m experiments.recall.distance --runs lmm mac window --seeds 0 1 2 --out rows.json
    python -m experiments.recall.distance --out rows.json --table --plot recall-distance.png

All models have as many parameters and are trained on the same texts (`remanence.tasks.recall`): first rows of 64
tokens, then of 1,040, then states that are carried through up to 80K tokens of noise. Each then reads pairs and noise.
Its state is asked at every distance, and the reading goes on as if it had not been; beyond 64K, with fewer texts.
*late* are new pairs, stated after so much noise and asked for 1,024 tokens later: a memory that keeps must also still
learn. Beside the answers, every run gives what its memory's gates do with noise and with values. Rows in --out are not
made again.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.shared import Clock, Row, Rows, add_arguments, machine
from remanence import Model, ModelConfig
from remanence.config import Mode, change
from remanence.evaluate.task import wilson
from remanence.inference.reader import read
from remanence.model import State, Trace, matched, parameters
from remanence.runtime.state import where
from remanence.tasks.recall import Recall, vocabulary
from remanence.train.config import OptimizerConfig, TrainConfig
from remanence.train.engine import make_optimizer
from remanence.train.graphed import write_cost_at, writing

PAIRS, KEYS, NOISE = 8, 16, 16
STATED = 2 * PAIRS
LATE = 1024
HELD_OUT = 2**32

KEEPING = {"conv": 2, "forget_bias": -14.0, "step_bias": -4.0}
"""A convolution over a value and the key before it; a forget gate that starts where 1M tokens leave 42 %; a step gate
that starts nearly shut, so that training opens it for what is worth writing, and noise is not written.
"""

SHUT = {"threshold": 0.05, "step_bias": 0.0, "forget_bias": -6.0}
"""Gates that begin where they do by default, and can shut; writing costs something then (--write-cost)."""

RUNS: dict[str, dict[str, Any]] = {  # what differs from a MAC of one layer
    "lmm": {"pattern": ("lmm",)},
    "mac": {"pattern": ("mac",)},
    "mag": {"pattern": ("mag",)},
    "gated_delta": {"pattern": ("lmm",), "memory": {"net": "linear", "rule": "gated_delta"}},
    "window": {"pattern": ("conv_window",)},
    "window-1K": {"pattern": ("conv_window",), "window": 1040},
    "memorizing": {"pattern": ("conv_window", "knn"), "num_layers": 2},
    "lmm-forget10": {"pattern": ("lmm",), "memory": {"forget_bias": -10.0}},
    "lmm-forget6": {"pattern": ("lmm",), "memory": {"forget_bias": -6.0}},
    "lmm-step0": {"pattern": ("lmm",), "memory": {"step_bias": 0.0}},
    "lmm-conv4": {"pattern": ("lmm",), "memory": {"conv": 4}},
    "lmm-threshold": {"pattern": ("lmm",), "memory": SHUT},
    "gated_delta-threshold": {
        "pattern": ("lmm",),
        "memory": {"net": "linear", "rule": "gated_delta", **SHUT},
    },
    "mac-threshold": {"pattern": ("mac",), "memory": SHUT},
    "mag-threshold": {"pattern": ("mag",), "memory": SHUT},
}
TINY = {"steps": [2, 2, 2], "distances": [64, 128], "texts": [2, 1], "late": 32}


def config_of(name: str, args: argparse.Namespace) -> ModelConfig:
    """A run's model, with as many parameters as a MAC of one layer."""
    base = ModelConfig(
        vocab_size=vocabulary(KEYS, NOISE), dim=64, num_layers=1, heads=2, window=32, segment=16, persistent=4,
        memory={"heads": 1, **KEEPING}, knn={"size": args.store, "k": 16},
    )  # fmt: skip
    own = change(base, {**RUNS[name], "memory": {"heads": 1, **KEEPING, **RUNS[name].get("memory", {})}})
    return matched(own, parameters(base))


# Training


STAGES = ((64, 32, 3), (1040, 4, 2))
"""Tokens, rows and rounds of the pairs in the texts of the first two stages of training."""
CARRIED, PIECE, RESTART = 8, 1024, 1 / 64
"""Rows of the third stage, the noise that each reads in a step, and how often one begins anew with other pairs."""


def train(model: Model, seed: int, args: argparse.Namespace) -> list[float]:
    """Rows of 64 tokens with three rounds of the pairs, longer ones, and states that are carried; every step's loss."""
    rates, losses = OptimizerConfig(lr=args.lr, warmup=30, weight_decay=0.01, final=0.2), []
    optimizer = make_optimizer(model, TrainConfig(model=model.config, optimizer=rates))
    batches = [
        batch
        for (length, rows, rounds), steps in zip(STAGES, args.steps, strict=False)
        for batch in map(Recall(length, rows, PAIRS, rounds, seed, keys=KEYS, noise=NOISE).step, range(steps))
    ]
    carried, threshold = Carried(model, seed), model.config.memory.threshold if model.has_memory else 0.0
    for step in range(sum(args.steps)):
        if step < len(batches):
            tokens, targets = (x.to(model.device) for x in (batches[step].tokens, batches[step].targets))
            seen = model.trace(tokens, keep=False)
            loss = F.cross_entropy(model.logits(seen.hidden[targets >= 0]), targets[targets >= 0])
        else:
            loss, seen = carried.loss()
        optimizer.zero_grad(set_to_none=True)
        cost = write_cost_at(args.write_cost, step, sum(args.steps))
        (loss + cost * writing(seen, threshold) if threshold else loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), rates.clip)
        for group in optimizer.param_groups:
            group["lr"] = rates.rate(step, sum(args.steps))
        optimizer.step()
        losses.append(round(loss.item(), 4))
    return losses


class Carried:
    """Rows that read noise from step to step, their states carried without gradients, and are asked at each step's end.

    The questions are not read into what is carried, so a pair is stated once and grows older until its row begins anew.
    """

    def __init__(self, model: Model, seed: int) -> None:
        self.model, self.texts = model, Texts(CARRIED, seed - HELD_OUT + 2**31)
        self.pairs, self.state = self.texts.pairs(), model.start(CARRIED)
        self.new = np.ones(CARRIED, bool)

    def loss(self) -> tuple[Tensor, Trace]:
        if self.new.any():
            self.pairs = torch.where(torch.from_numpy(self.new)[:, None], self.texts.pairs(), self.pairs)
            begun = read(self.model, self.pairs.to(self.model.device)).state
            self.state = where(self.new.tolist(), begun, self.state)
        seen = self.model.trace(self.texts.noise(PIECE).to(self.model.device), self.state)
        order = self.texts.rng.random((CARRIED, PAIRS)).argsort(1)
        asked = self.pairs.view(CARRIED, PAIRS, 2)[torch.arange(CARRIED)[:, None], torch.from_numpy(order)]
        asked = asked.flatten(1).to(self.model.device)
        hidden = self.model.trace(asked, seen.state, keep=False).hidden[:, ::2]
        self.state, self.new = seen.state.detach(), self.texts.rng.random(CARRIED) < RESTART
        return F.cross_entropy(self.model.logits(hidden).flatten(0, 1), asked[:, 1::2].flatten()), seen


# Asking


class Texts:
    """Rows of held-out pairs and noise."""

    def __init__(self, rows: int, seed: int) -> None:
        self.rng, self.rows = np.random.default_rng(seed + HELD_OUT), rows

    def pairs(self) -> Tensor:
        """New pairs for every row ``[rows 2n]``: a key, its value, the next key, ..."""
        keys = self.rng.random((self.rows, KEYS)).argsort(1)[:, :PAIRS]
        values = self.rng.integers(KEYS, 2 * KEYS, (self.rows, PAIRS))
        return torch.from_numpy(np.stack([keys, values], -1).reshape(self.rows, STATED))

    def noise(self, count: int) -> Tensor:
        return torch.from_numpy(self.rng.integers(2 * KEYS, 2 * KEYS + NOISE, (self.rows, count)))


@torch.no_grad()
def right(model: Model, state: State, pairs: Tensor, memory: Mode | None) -> int:
    """How many values follow their keys, each asked alone from the same state."""
    rows = [row for row in range(len(pairs)) for _ in range(PAIRS)]
    keys, values = pairs[:, ::2].reshape(-1, 1), pairs[:, 1::2].flatten()
    logits, _ = model(keys.to(model.device), state.rows(rows), memory_mode=memory)
    return int((logits[:, -1].argmax(-1).cpu() == values).sum())


def measure(model: Model, seed: int, mode: Mode, args: argparse.Namespace) -> list[Row]:
    """Right answers at every distance, in one reading."""
    texts, memory = Texts(args.texts[0], seed), mode if model.has_memory else None
    pairs, found = texts.pairs(), []
    state, done = read(model, pairs.to(model.device), memory_mode=memory).state, STATED
    for distance in args.distances[: args.reach]:
        if distance > args.many and texts.rows > args.texts[1]:  # the first rows alone go on
            texts.rows = args.texts[1]
            pairs, state = pairs[: texts.rows], state.rows(range(texts.rows))
        while done < distance:
            count = min(2**16, distance - done)
            state = read(model, texts.noise(count).to(model.device), state, memory_mode=memory).state
            done += count
        new = texts.pairs()
        after = torch.cat([new, texts.noise(args.late - STATED)], 1)
        late = read(model, after.to(model.device), state, memory_mode=memory).state
        for kind, asked, from_ in (("early", pairs, state), ("late", new, late)):
            count = right(model, from_, asked, memory)
            interval = [round(x, 4) for x in wilson(count, asked.numel() // 2)]
            found.append(
                {"kind": kind, "mode": mode, "distance": distance, "right": count, "count": asked.numel() // 2,
                 "share": round(count / (asked.numel() // 2), 4), "interval": interval}
            )  # fmt: skip
        print(f"  {distance:,}: {found[-2]['share']:.1%} {found[-1]['share']:.1%} {mode}", flush=True)
    return found


@torch.no_grad()
def gates_of(model: Model, seed: int) -> dict[str, list[float]] | None:
    """What a memory does with a token of noise, and with a value: the mean step, and the mean share forgotten."""
    texts = Texts(32, seed + 1)
    tokens = torch.cat([texts.pairs(), texts.noise(256)], 1).to(model.device)
    seen = model.trace(tokens).traces[-1]
    if seen is None:  # no neural memory
        return None
    step, keep = seen.gates.log_step.exp(), seen.gates.log_keep
    forget = -torch.expm1(keep) if keep is not None else torch.zeros_like(step)
    noise, value = slice(STATED + 16, None), slice(1, STATED, 2)
    parts = {"noise": noise, "value": value}
    return {
        name: [f"{gate[:, part].mean().item():.3g}" for part in parts.values()]
        for name, gate in (("step", step), ("forget", forget))
    } | {"order": list(parts)}


def one(name: str, what: Row, args: argparse.Namespace, device: torch.device) -> Row:
    torch.manual_seed(what["seed"])
    clock, model = Clock(device), Model(config_of(name, args)).to(device)
    losses = train(model, what["seed"], args)
    trained = clock()
    print(
        f"  {trained} s, loss {losses[args.steps[0] - 1]} {losses[-1]}",
        gates_of(model, what["seed"]),
        flush=True,
    )
    model.eval()
    rows = measure(model, what["seed"], "on", args)
    if model.has_memory:
        near = argparse.Namespace(**{**vars(args), "distances": [d for d in args.distances if d <= args.off]})
        rows += measure(model, what["seed"], "off", near)
    return {
        "what": what, **machine(device), "parameters": parameters(model.config), "config": model.config.to_dict(),
        "state_bytes": model.start(1).nbytes, "losses": losses[:: max(1, len(losses) // 40)],
        "seconds": {"train": trained, "read": clock()}, "gates": gates_of(model, what["seed"]), "answers": rows,
    }  # fmt: skip


# What was found


def shares(rows: list[Row], kind: str, mode: str) -> dict[int, tuple[int, int]]:
    """Right answers and questions by distance, of all seeds together."""
    found: dict[int, tuple[int, int]] = {}
    for each in (answer for row in rows for answer in row["answers"]):
        if (each["kind"], each["mode"]) == (kind, mode):
            before = found.get(each["distance"], (0, 0))
            found[each["distance"]] = before[0] + each["right"], before[1] + each["count"]
    return found


def by_run(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows by run, in the order of `RUNS`; those whose training had no third stage are runs of their own."""
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (list(RUNS).index(row["what"]["run"]), -row["what"]["steps"][2])):
        name = row["what"]["run"] + ("" if row["what"]["steps"][2] else ", not carried")
        found.setdefault(name, []).append(row)
    return found


def brief(distance: int) -> str:
    return (
        f"{distance // 2**20}M"
        if distance >= 2**20
        else f"{distance // 1024}K"
        if distance >= 1024
        else f"{distance}"
    )


def table(rows: list[Row]) -> str:
    """Right answers by distance with 95 % intervals, then the gates."""
    distances = sorted({answer["distance"] for row in rows for answer in row["answers"]})
    head = ["run", "seeds", "pairs", "memory", *map(brief, distances)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, some in by_run(rows).items():
        for kind, mode in (("early", "on"), ("late", "on"), ("early", "off")):
            found = shares(some, kind, mode)
            if not found:
                continue
            cells = []
            for distance in distances:
                count, of = found.get(distance, (0, 0))
                low, high = wilson(count, of) if of else (0, 0)
                cells.append(f"{count / of:.1%} ({low:.0%}-{high:.0%})" if of else "")
            lines.append("| " + " | ".join([name, str(len(some)), kind, mode, *cells]) + " |")
    lines += [
        "",
        "| run | seed | step: noise, value | forgotten: noise, value | train s | read s | parameters |",
    ]
    lines.append("|" + "---|" * 7)
    for name, some in by_run(rows).items():
        for row in some:
            gates = row["gates"] or {"step": [""], "forget": [""]}
            cells = [name, row["what"]["seed"], ", ".join(gates["step"]), ", ".join(gates["forget"])]
            cells += [row["seconds"]["train"], row["seconds"]["read"], f"{row['parameters']:,}"]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join([*lines, ""])


def plot(rows: list[Row], path: Path) -> None:
    """Right answers by distance: the architectures, and the same LMM with other gates."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.6), layout="constrained")
    for axis, gates in zip(figure.subplots(1, 2, sharey=True), (False, True), strict=True):
        runs = {n: r for n, r in by_run(rows).items() if n == "lmm" or n.startswith("lmm-") == gates}
        runs = {n: r for n, r in runs.items() if not gates or n.startswith("lmm")}
        for color, (name, some) in enumerate(runs.items()):
            found = shares(some, "early", "on")
            middle = [100 * a / b for a, b in found.values()]
            bounds = [[100 * x for x in wilson(a, b)] for a, b in found.values()]
            around = [[m - low for m, (low, _) in zip(middle, bounds, strict=True)]]
            around.append([high - m for m, (_, high) in zip(middle, bounds, strict=True)])
            places = [d * 1.06 ** (color - len(runs) / 2) for d in found]  # beside each other
            style = {"color": f"C{color}", "linestyle": ("-", "--", ":")[color % 3]}
            axis.errorbar(places, middle, around, marker="o", markersize=4, label=name, **style)
        axis.axhline(100 / KEYS, color="0.6", linestyle=":", linewidth=1)
        ticks = sorted({answer["distance"] for row in rows for answer in row["answers"]})
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [brief(tick) for tick in ticks])
        axis.set(xlabel="tokens from the pairs to the question", ylim=(0, 103))
        axis.set_title(
            "an LMM, by its gates, carried or not" if gates else "by architecture",
            fontsize=11,
        )
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=9, loc="center left" if gates else "center right")
    figure.axes[0].set_ylabel("right answers, % (dotted: guessing)")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", nargs=3, type=int, default=[280, 60, 80], help="of the stages of training")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--write-cost", type=float, default=0.03, help="where gates have a threshold")
    parser.add_argument(
        "--distances", nargs="+", type=int, default=[2**n for n in (5, 10, 12, 14, 16, 18, 20)]
    )
    parser.add_argument("--reach", type=int, help="ask at the first so many distances alone")
    parser.add_argument("--texts", nargs=2, type=int, default=[52, 13], help="of 8 questions; beyond --many")
    parser.add_argument("--many", type=int, default=2**16)
    parser.add_argument("--off", type=int, default=2**14, help="how far to ask with the memory off")
    parser.add_argument("--late", type=int, default=LATE, help="tokens from late pairs to their questions")
    parser.add_argument("--store", type=int, default=4096, help="pairs that the kNN layer holds")
    add_arguments(parser, "recall-distance.json")
    if "--tiny" in sys.argv:
        parser.set_defaults(**TINY)
    args = parser.parse_args()
    rows = Rows(args.out, args.commit, args.merge or ())
    if rows.shown(args, table, plot):
        return
    device, began = torch.device("cuda" if torch.cuda.is_available() else "cpu"), time.time()
    settings = {name: getattr(args, name) for name in ("steps", "lr", "distances", "texts", "late", "store")}
    for seed in args.seeds:
        for name in args.runs:
            what = {"run": name, "seed": seed, **settings}
            if "threshold" in name:
                what["write_cost"] = args.write_cost
            if not rows.has(what) and time.time() - began < args.seconds:
                print(name, seed, flush=True)
                rows.add(one(name, what, args, device))


if __name__ == "__main__":
    main()
