"""Which part of a memory does what? State tracking, the ablations of the paper's table 5, chunks, precision and gates.

    python -m experiments.mechanics.run construct --out mechanics.json
    python -m experiments.mechanics.run track --seeds 0 1 --out mechanics.json
    python -m experiments.mechanics.run recall --seeds 0 1 2 --out mechanics.json
    python -m experiments.mechanics.run language --books BOOKS --seeds 0 1 2 --out mechanics.json
    python -m experiments.mechanics.run --out mechanics.json --table --plot mechanics.png

**track**: the running parity of bits, and the running product of permutations of five (the word problem of S5, over its
four swaps of neighbours), trained on short texts and asked on longer ones. **construct**: the same by a matrix whose
keys, values and gates are set by hand, which says what a rule can do, training aside. **recall**: pairs shown once and
asked for at the end. **language**: bytes of books (``*.txt.xz`` with an ``index.json`` that names each book's split),
the state carried from piece to piece. The last two train the full memory and the same without one of its parts, all
with as many parameters and the same texts for a seed, and read with them once more with another chunk and with a state
that is rounded to bfloat16. A run that is in the file already is not run again.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.shared import (
    Clock,
    Row,
    Rows,
    Training,
    add_arguments,
    bits_of,
    comparable,
    load,
    machine,
    mean_and_error,
    release,
    rounded,
    streams,
    table_row,
)
from remanence import Model, ModelConfig
from remanence.config import change
from remanence.memory.neural import NeuralMemory
from remanence.mixers import LMM, MIXERS
from remanence.model import matched
from remanence.ops import NETS, RULES, Gates, current_weights, memorize, start
from remanence.tasks.recall import Recall


class WideStep(NeuralMemory):
    """A memory whose step gate goes up to 2: a write can then reflect what is stored, and not only replace it."""

    def log_gates(self, x: Tensor) -> Gates:
        gates = super().log_gates(x)
        return gates._replace(log_step=gates.log_step + math.log(2))


class WideLMM(LMM):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.memory.layer = WideStep(self.memory.layer.config)


MIXERS["wide"] = WideLMM

TITANS: Row = {"net": "titans", "expansion": 2.0}

# No convolution, which would see a few tokens by itself; gates that start where they neither forget nor hesitate.
_PLAIN: Row = {"conv": 0, "forget_bias": -10.0, "step_bias": 2.0}
_TOKEN: Row = {**TITANS, "chunk": 1, "conv": 0}  # the step starts at the net's own default
TRACK: dict[str, Row] = {
    "attention": {"pattern": ("attention",)},
    "window": {"pattern": ("window",)},
    "gated_delta": {"pattern": ("gated_delta",), "memory": _PLAIN},
    **{f"deep{n}": {"memory": {**_PLAIN, "depth": n}} for n in (1, 2, 3)},
    **{f"deep{n}-wide": {"pattern": ("wide",), "memory": {**_PLAIN, "depth": n}} for n in (1, 2, 3)},
    "deep1-wide-chunk1": {"pattern": ("wide",), "memory": {**_PLAIN, "depth": 1, "chunk": 1}},
    # gradient before forgetting: along a key the factor is 1 - alpha - theta, which open gates bring to -1
    "deep1-undecayed": {"memory": {**_PLAIN, "depth": 1, "rule": "no_momentum", "forget_bias": 0.0}},
    # the same with a learned initial memory, which a product of reflections can be applied to
    "linear-undecayed": {"memory": {**_PLAIN, "net": "linear", "rule": "no_momentum", "forget_bias": 0.0}},
    "deep1-momentum": {"memory": {**_PLAIN, "depth": 1, "rule": "titans", "step_bias": 0.0}},
    **{f"titans{n}": {"memory": {**_TOKEN, "depth": n}} for n in (1, 2, 3)},
    "titans2-large": {"memory": {**_TOKEN, "depth": 2, "step_bias": 0.0}},
    "titans2-open": {"memory": {**_TOKEN, "depth": 2, "step_bias": 0.0, "forget_bias": -2.0}},
    "titans1-chunk16": {"memory": {**_TOKEN, "depth": 1, "chunk": 16}},
    "titans2-chunk16": {"memory": {**_TOKEN, "depth": 2, "chunk": 16}},
}
"""Memories by name: net, layers, and what differs. Titans' take a step per token, but for those of chunk 16."""

HAND: dict[str, Row] = {
    # along the key a write multiplies by keep - step, across it by keep: -1 and 0, or -1/2 and 1/2
    "paper": {"rule": "no_momentum", "parity": (1.0, 0.0, 1.0), "s5": (1.0, 0.5, 0.0)},
    # by keep (1 - step) and keep: -1 and 1
    "wide": {"rule": "gated_delta", "parity": (2.0, 1.0, 0.5), "s5": (2.0, 1.0, 0.0)},
}
"""Rules that can track a state, with the step gate, the kept share and the value that do it. The paper's gates are at
most 1, but it takes its gradient at weights that have not been decayed.
"""

RUNS: dict[str, Row] = {
    "titans": {"memory": TITANS},
    "titans-no-momentum": {"memory": {**TITANS, "rule": "no_momentum"}},
    "titans-no-forgetting": {"memory": {**TITANS, "rule": "no_forget"}},
    "titans-no-conv": {"memory": {**TITANS, "conv": 0}},
    "titans-linear": {"memory": {"net": "linear", "rule": "titans"}},
    "titans-depth1": {"memory": {**TITANS, "depth": 1}},
    "titans-depth3": {"memory": {**TITANS, "depth": 3}},
    "titans-depth4": {"memory": {**TITANS, "depth": 4}},
    "titans-chunk4": {"memory": {**TITANS, "chunk": 4}},
    "titans-chunk64": {"memory": {**TITANS, "chunk": 64}},
    "titans-mag": {"pattern": ("mag",), "memory": TITANS},
    "titans-mag-no-persistent": {"pattern": ("mag",), "memory": TITANS, "persistent": 0},
    "deep": {},
    "deep-momentum": {"memory": {"rule": "titans"}},
    "deep-undecayed": {"memory": {"rule": "no_momentum"}},
    "deep-no-forgetting": {"memory": {"rule": "delta"}},
    "deep-no-conv": {"memory": {"conv": 0}},
    "deep-depth1": {"memory": {"depth": 1}},
    "deep-depth3": {"memory": {"depth": 3}},
    "deep-depth4": {"memory": {"depth": 4}},
    "deep-chunk16": {"memory": {"chunk": 16}},
    "deep-mag": {"pattern": ("mag",)},
    "deep-mag-no-persistent": {"pattern": ("mag",), "persistent": 0},
}
"""What is changed in the run that a name begins with: the paper's memory, the default one, and each beside a window."""

BASES = ("titans-mag", "deep-mag", "titans", "deep")
CHUNKS = (1, 4, 16, 64, 256)
"""Chunks to read with; a model's segments are a multiple of all."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
PAIRS, KEYS = 8, 16

DEFAULTS: dict[str, Row] = {
    "construct": {"length": 32, "texts": 64, "farthest": 65536},
    "track": {
        "dim": 64, "depth": 1, "head_dim": 32, "lr": 5e-3, "steps": 300, "rows": 64, "length": 32, "texts": 64,
    },
    "recall": {
        "dim": 64, "depth": 2, "head_dim": 32, "lr": 3e-3, "steps": 400, "rows": 32, "length": 64, "texts": 64,
        "farthest": 1024,
    },
    "language": {
        "dim": 128, "depth": 2, "head_dim": 32, "lr": 2e-3, "steps": 300, "rows": 8, "length": 256, "texts": 8,
        "farthest": 4096,
    },
}  # fmt: skip
TINY: Row = {"dim": 64, "depth": 1, "steps": 2, "rows": 2, "texts": 2}
TASKS = ("parity", "s5")

# Texts


def tracked(task: str, rows: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens, and after each of them the state that they have led to ``[rows length]``."""
    draw = torch.Generator().manual_seed(seed)
    if task == "parity":
        tokens = torch.randint(2, (rows, length), generator=draw)
        return tokens, tokens.cumsum(1) % 2
    swaps = torch.arange(5).repeat(4, 1)
    for i in range(4):
        swaps[i, [i, i + 1]] = swaps[i, [i + 1, i]]
    tokens = torch.randint(4, (rows, length), generator=draw)
    product, states = torch.arange(5).expand(rows, 5), []
    for swap in tokens.T:
        product = swaps[swap].gather(1, product)  # first what came before, then the swap
        states.append(numbered(product))
    return tokens, torch.stack(states, 1)


_DIGITS = 5 ** torch.arange(5)
_NUMBERS = torch.zeros(5**5, dtype=torch.long)
_NUMBERS[(torch.tensor(list(permutations(range(5)))) * _DIGITS).sum(1)] = torch.arange(120)


def numbered(product: Tensor) -> Tensor:
    """Permutations ``[... 5]`` by number, in the order of `itertools.permutations`; 0 for what is none."""
    return _NUMBERS[(product * _DIGITS).sum(-1)]


def base_of(name: str) -> str:
    """The run that a name is a change of."""
    return next(base for base in BASES if name.startswith(base))


# Models


def made(what: Row, device: torch.device) -> Model:
    """The model of a run, with as many parameters as attention has in this shape."""
    torch.manual_seed(what["seed"])
    part = what["part"]
    own = TRACK[what["run"]] if part == "track" else RUNS[what["run"]]
    vocabulary = {"parity": 2, "s5": 120, "recall": 2 * KEYS + 16, "language": 256}[what["task"]]
    window = {"track": what["length"] // 2, "recall": 16, "language": 64}[part]
    common: Row = {
        "vocab_size": vocabulary, "dim": what["dim"], "num_layers": what["depth"], "heads": max(2, what["dim"] // 64),
        "window": window, "segment": max(CHUNKS), "persistent": 0 if part == "track" else 16,
        "tie": part != "track", "pattern": ("lmm",),
    }  # fmt: skip
    memory = {"head_dim": what["head_dim"], **own.get("memory", {})}
    if part == "track":
        memory = {"heads": 1, **memory}
    return Model(matched(ModelConfig(**{**common, **own, "memory": memory}))).to(device)


def with_chunk(model: Model, chunk: int) -> Model:
    """The same weights, read with another chunk."""
    other = Model(change(model.config, {"memory": {"chunk": chunk}})).to(model.device)
    other.load_state_dict(model.state_dict())
    return other


def fit(
    model: Model, batch_of: Callable[[int], tuple[Tensor, Tensor]], steps: int, lr: float
) -> tuple[Tensor, float]:
    """The losses, and the largest norm of a gradient."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    losses, largest = [], torch.zeros((), device=model.device)
    for step in range(steps):
        tokens, targets = (x.to(model.device) for x in batch_of(step))
        optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / 30) * (1 - 0.9 * step / steps)
        logits = model.logits(model.trace(tokens, keep=False).hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        largest = torch.maximum(largest, norm)
    return torch.stack(losses).cpu(), largest.item()


def to_bfloat16(state: Any) -> Any:
    return state.map(lambda x: x.bfloat16().to(x.dtype) if x.is_floating_point() else x)


@torch.no_grad()
def in_pieces(model: Model, tokens: Tensor, piece: int, between: Callable[[Any], Any]) -> Tensor:
    """Logits ``[r t v]`` of texts read in pieces, with something done to the state after each."""
    state, found = model.start(len(tokens)), []
    for part in tokens.split(piece, 1):
        logits, state = model(part, state)
        state = between(state)
        found.append(logits)
    return torch.cat(found, 1)


@torch.no_grad()
def gates_of(model: Model, tokens: Tensor) -> list[dict[str, list[float]]]:
    """Quantiles of each layer's gates over tokens and heads."""
    seen = []
    for trace in model.trace(tokens).traces:
        if trace is None:
            continue
        gates, levels = trace.gates, torch.tensor(QUANTILES, device=tokens.device)
        found = {"step": gates.log_step, "momentum": gates.log_momentum, "keep": gates.log_keep}
        quantiles = {
            k: x.exp().flatten()[:1_000_000].quantile(levels) for k, x in found.items() if x is not None
        }
        if "keep" in quantiles:  # of what is forgotten, in the same order
            quantiles["forget"] = -torch.expm1(gates.log_keep.flatten()[:1_000_000].quantile(levels.flip(0)))
            del quantiles["keep"]
        seen.append({name: rounded(x, 6) for name, x in quantiles.items()})
    return seen


# Parts


@torch.no_grad()
def construct(what: Row, device: torch.device) -> Row:
    """Texts written into a matrix of one head by hand: whether it holds their last state."""
    own, parity, clock = HAND[what["run"]], what["task"] == "parity", Clock(device)
    net, rule = NETS["linear"], replace(RULES[own["rule"]], anchor="token")
    opened, kept, written = own[what["task"]]
    found, length = {}, what["length"]
    while length <= what["farthest"]:
        tokens, states = tracked(what["task"], what["texts"], length, 2**40 + what["seed"])
        if parity:  # bits of 0 leave the memory alone
            first, keys, acts = torch.zeros(1, 1), torch.ones(*tokens.shape, 1), tokens == 1
        else:
            apart = torch.eye(5)[:4] - torch.eye(5)[1:]
            first, keys, acts = torch.eye(5), apart[tokens] / math.sqrt(2), tokens >= 0
        keys = keys.unsqueeze(2).to(device)
        step, keep = torch.where(acts, opened, 0.0).log(), torch.where(acts, kept, 1.0).log()
        log_gates = Gates(step.unsqueeze(-1).to(device), None, keep.unsqueeze(-1).to(device))
        state = start((first.unsqueeze(0).to(device),), rows=len(tokens), rule=rule, chunk=16)
        values = torch.full_like(keys, written)
        _, state, _ = memorize(
            keys, keys, values, log_gates, state, net=net, rule=rule, chunk=16, check=False
        )
        weights = current_weights(state, net=net, rule=rule)[0].squeeze(1).cpu()
        last = (weights.flatten() > 0.5).long() if parity else numbered(weights.argmax(-2))
        found[length] = round((last == states[:, -1]).float().mean().item(), 4)
        length *= 2
    return {"parameters": 0, "seconds": clock(), "train": None, "right": found, **machine(device)}


def track(what: Row, device: torch.device) -> Row:
    model, clock = made(what, device), Clock(device)
    batch_of = lambda step: tracked(what["task"], what["rows"], what["length"], 10_000 * what["seed"] + step)
    losses, norm = fit(model, batch_of, what["steps"], what["lr"])
    found = {}
    for times in (1, 2, 4, 8):
        tokens, states = tracked(what["task"], what["texts"], times * what["length"], 2**40 + what["seed"])
        with torch.no_grad():
            right = model(tokens.to(device))[0].argmax(-1).cpu() == states
        found[times * what["length"]] = round(right[:, right.shape[1] // 2 :].float().mean().item(), 4)
    return about(model, clock, losses, norm) | {"right": found}


def recall(what: Row, device: torch.device) -> Row:
    model, clock = made(what, device), Clock(device)
    task = Recall(what["length"], what["rows"], PAIRS, 3, what["seed"], keys=KEYS)

    def batch_of(step: int) -> tuple[Tensor, Tensor]:
        batch = task.step(step)
        return batch.tokens, batch.targets

    losses, norm = fit(model, batch_of, what["steps"], what["lr"])

    def right(reader: Model, length: int, between: Callable[[Any], Any] = lambda state: state) -> float:
        test = Recall(length, what["texts"], PAIRS, 2, what["seed"] + 1000, keys=KEYS).step(0)
        answers = in_pieces(reader, test.tokens.to(device), what["length"], between).argmax(-1).cpu()
        asked = test.targets >= 0
        return round((answers == test.targets)[asked].float().mean().item(), 4)

    lengths, length = [], what["length"]
    while length <= what["farthest"]:
        lengths.append(length)
        length *= 2
    middle = lengths[len(lengths) // 2]
    row = about(model, clock, losses, norm)
    row["right"] = {length: right(model, length) for length in lengths}
    row["bfloat16"] = {length: right(model, length, to_bfloat16) for length in lengths}
    if reads_in_chunks(what["run"]):
        row["chunks"] = {chunk: right(with_chunk(model, chunk), middle) for chunk in CHUNKS}
    row["gates"] = gates_of(model, task.step(what["steps"]).tokens.to(device))
    return row


def language(what: Row, device: torch.device, texts: dict[str, Any]) -> Row:
    model, clock = made(what, device), Clock(device)
    training = Training(
        model, texts["train"], rows=what["rows"], length=what["length"], steps=what["steps"], lr=what["lr"],
        seed=what["seed"],
    )  # fmt: skip
    losses, norms = training.run()
    row = about(model, clock, losses, norms.max().item())
    x = texts["held out"].to(device)

    def bits(
        reader: Model, piece: int, mode: Any = None, between: Callable[[Any], Any] = lambda s: s
    ) -> list[float]:
        """Of each stream, the mean."""
        state, found = reader.start(len(x)), []
        for first in range(0, x.shape[1] - 1, piece):
            part, state = bits_of(reader, x[:, first : first + piece + 1], state, mode)
            state = between(state)
            found.append(part)
        return rounded(torch.cat(found, 1).double().mean(1).cpu())

    row["bits"] = {mode: bits(model, what["length"], mode) for mode in ("on", "fresh")}
    row["bits"]["bfloat16"] = bits(model, 64, between=to_bfloat16)
    if reads_in_chunks(what["run"]):
        row["chunks"] = {chunk: bits(with_chunk(model, chunk), what["length"]) for chunk in CHUNKS}
    row["gates"] = gates_of(model, x[:, : what["length"]].long())
    return row


def reads_in_chunks(name: str) -> bool:
    """Whether a run is read once more with every chunk: the full memories, by depth and by chunk in training."""
    return name in ("titans", "deep") or "chunk" in name or "depth" in name


def about(model: Model, clock: Clock, losses: Tensor, norm: float) -> Row:
    """What every part's row begins with, made right after training."""
    every = max(1, len(losses) // 20)
    return {
        "parameters": sum(p.numel() for p in model.parameters()), "seconds": clock(), "norm": round(norm, 3),
        "train": round(losses[-20:].mean().item(), 4), "curve": rounded(losses.unfold(0, every, every).mean(1), 3),
        "config": model.config.to_dict(), **machine(model.device),
    }  # fmt: skip


# What was found


def of(rows: Sequence[Row], **what: Any) -> list[Row]:
    return [row for row in rows if all(row["what"].get(name) == value for name, value in what.items())]


def groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one part that may be compared: all but the run, its seed and its task is the same."""
    return comparable(rows, "run", "seed", "task")


def names(rows: Sequence[Row]) -> list[str]:
    """The runs, in the order in which they are listed above."""
    present = {row["what"]["run"] for row in rows}
    return [name for name in (*HAND, *TRACK, *RUNS) if name in present]


def figure_of(row: Row) -> float:
    """One figure of a run: bits per byte, or the share recalled at lengths beyond the one trained at."""
    if row["what"]["part"] == "language":
        return sum(row["bits"]["on"]) / len(row["bits"]["on"])
    far = [share for length, share in row["right"].items() if int(length) > row["what"]["length"]]
    return sum(far) / len(far)


def differences(rows: Sequence[Row], name: str) -> Tensor:
    """A run's figures less its base's, for each seed that both have."""
    base = {row["what"]["seed"]: figure_of(row) for row in of(rows, run=base_of(name))}
    mine = {row["what"]["seed"]: figure_of(row) for row in of(rows, run=name)}
    return torch.tensor([mine[seed] - base[seed] for seed in mine if seed in base], dtype=torch.float64)


def _head(*cells: object) -> list[str]:
    return [table_row(*cells), "|" + "---|" * len(cells)]


def _all(values: Sequence[float], digits: int = 2) -> str:
    """Every seed's figure."""
    return ", ".join(f"{value:.{digits}f}" for value in values)


def table(rows: Sequence[Row]) -> str:
    """Of rows that may be compared."""
    what = {name: value for name, value in rows[0]["what"].items() if name not in ("run", "seed", "task")}
    lines = ["", f"{rows[0]['device']}: {', '.join(f'{name} {value}' for name, value in what.items())}"]
    part = what["part"]
    if part in ("recall", "language"):
        lines += ablations(part, rows) + chunks(part, rows) + precision(part, rows) + gates(part, rows)
    for task in TASKS:
        if mine := of(rows, task=task):
            lengths = list(mine[0]["right"])
            where = "after the last token" if part == "construct" else "in a text's second half"
            lines += ["", f"**{part}: {task}**, share right {where}, a figure for each seed", ""]
            lines += _head("memory", "parameters", *lengths, "loss", "seconds")
            for name in names(mine):
                runs = of(mine, run=name)
                shares = [_all([row["right"][length] for row in runs]) for length in lengths]
                loss, seconds = (
                    _all([row["train"] for row in runs if row["train"] is not None]),
                    _all([row["seconds"] for row in runs], 0),
                )
                lines.append(table_row(name, runs[0]["parameters"], *shares, loss, seconds))
    return "\n".join([*lines, ""])


def ablations(part: str, rows: Sequence[Row]) -> list[str]:
    digits = 3 if part == "language" else 2
    columns = list(rows[0]["right"]) if part == "recall" else ["bits", "fresh"]
    also = ["kept"] if part == "recall" else []  # the last column's share of the first, of each seed
    title = "share recalled by length" if part == "recall" else "bits per byte"
    lines = [
        "",
        f"**{part}**, {title}, a mean over seeds; the full memory's subtracted, ± standard error",
        "",
    ]
    lines += _head(
        "run", "seeds", "parameters", *columns, *also, "difference", "of each seed", "norm", "seconds"
    )
    for name in names(rows):
        mine = of(rows, run=name)
        if part == "recall":
            means = [sum(row["right"][c] for row in mine) / len(mine) for c in columns]
        else:
            means = [torch.tensor([r["bits"][m] for r in mine]).mean().item() for m in ("on", "fresh")]
        gap = differences(rows, name)
        mean, error = mean_and_error(gap) if len(gap) else (math.nan, math.nan)
        shown = ("", "")
        if name not in BASES:
            shown = (
                f"{mean:+.{digits}f} ± {error:.{digits}f}",
                ", ".join(f"{x:+.{digits}f}" for x in gap.tolist()),
            )
        largest, seconds = max(row["norm"] for row in mine), sum(row["seconds"] for row in mine) / len(mine)
        cells = [f"{value:.{digits}f}" for value in means]
        if also:
            cells.append(
                _all([row["right"][columns[-1]] / max(row["right"][columns[0]], 1e-9) for row in mine])
            )
        lines.append(
            table_row(
                name, len(mine), mine[0]["parameters"], *cells, *shown, f"{largest:.3g}", f"{seconds:.0f}"
            )
        )
    return lines


def chunk_means(rows: Sequence[Row]) -> list[float]:
    """By chunk at test, over seeds (and streams)."""
    return [torch.tensor([row["chunks"][str(chunk)] for row in rows]).mean().item() for chunk in CHUNKS]


def chunks(part: str, rows: Sequence[Row]) -> list[str]:
    rows = [row for row in rows if "chunks" in row]
    lines = ["", f"**{part}**, by the chunk that is read with, a mean over seeds", ""]
    lines += _head("run", "trained with", *CHUNKS)
    for name in names(rows):
        mine = of(rows, run=name)
        shown = [f"{x:.3f}" for x in chunk_means(mine)]
        lines.append(table_row(name, mine[0]["config"]["memory"]["chunk"], *shown))
    return lines


def precision(part: str, rows: Sequence[Row]) -> list[str]:
    lines = ["", f"**{part}**, with a state in bfloat16 between pieces, less float32, a mean over seeds", ""]
    if part == "recall":
        columns = list(rows[0]["right"])
        lines += _head("run", *columns)
        for name in names(rows):
            mine = of(rows, run=name)
            gaps = [sum(r["bfloat16"][c] - r["right"][c] for r in mine) / len(mine) for c in columns]
            lines.append(table_row(name, *[f"{x:+.3f}" for x in gaps]))
        return lines
    lines += _head("run", "bits")
    for name in names(rows):
        bits = [row["bits"] for row in of(rows, run=name)]
        gap = torch.tensor([each["bfloat16"] for each in bits]) - torch.tensor([each["on"] for each in bits])
        lines.append(table_row(name, f"{gap.mean().item():+.4f}"))
    return lines


def gates(part: str, rows: Sequence[Row]) -> list[str]:
    """Of the first seed of every run."""
    lines = ["", f"**{part}**, gates after training (first seed): 5, 50, 95 % of tokens and heads", ""]
    lines += _head("run", "layer", "step", "momentum", "forget")
    for name in names(rows):
        for layer, found in enumerate(of(rows, run=name)[0]["gates"]):
            cells = [
                ", ".join(f"{found[gate][i]:.2g}" for i in (0, 2, 4)) if gate in found else ""
                for gate in ("step", "momentum", "forget")
            ]
            lines.append(table_row(name, layer, *cells))
    return lines


def plot(rows: Sequence[Row], path: Path) -> None:
    """State tracking by length, what each part is worth, the chunk that is read with, and gates after training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 13), layout="constrained")
    axes = figure.subplots(3, 2)
    for panel, task in zip(axes[0], TASKS, strict=True):
        mine = of(rows, part="track", task=task)
        lengths = list(mine[0]["right"]) if mine else []
        best = [[max(row["right"][n] for row in of(mine, run=name)) for n in lengths] for name in names(mine)]
        if best:
            panel.imshow(best, vmin=0, vmax=1, cmap="Blues", aspect="auto")
        for i, shares in enumerate(best):
            for j, share in enumerate(shares):
                color = "w" if share > 0.6 else "k"
                panel.text(j, i, f"{share:.2f}", ha="center", va="center", color=color, fontsize="small")
        panel.set_xticks(range(len(lengths)), lengths)
        panel.set_yticks(range(len(best)), names(mine), fontsize="small")
        panel.set(xlabel="length", title=f"{task}: share right, best seed")
    labels = {
        "recall": "share recalled, less the full memory's",
        "language": "bits per byte, less the full memory's",
    }
    for panel, (part, label) in zip(axes[1], labels.items(), strict=True):
        mine = of(rows, part=part)
        changed = [name for name in names(mine) if name not in BASES and len(differences(mine, name))]
        for place, name in enumerate(reversed(changed)):
            gap = differences(mine, name)
            mean, error = mean_and_error(gap)
            color = "C0" if name.startswith("titans") else "C1"
            panel.barh(place, mean, xerr=error if error == error else 0.0, color=color, alpha=0.6)
            panel.plot(gap.tolist(), [place] * len(gap), "k.", ms=3)
        panel.set_yticks(range(len(changed)), list(reversed(changed)), fontsize="small")
        panel.axvline(0.0, color="0.5")
        panel.set(xlabel=label, title=part)
    mine = [row for row in of(rows, part="language") or of(rows, part="recall") if "chunks" in row]
    for i, name in enumerate(names(mine)):
        style = {"color": f"C{i % 10}", "ls": "-" if name.startswith("titans") else "--", "label": name}
        axes[2, 0].plot(CHUNKS, chunk_means(of(mine, run=name)), marker="o", **style)
    part = mine[0]["what"]["part"] if mine else "language"
    axes[2, 0].set(
        xscale="log", xlabel="chunk at test", ylabel="bits per byte" if part == "language" else "share"
    )
    axes[2, 0].set_xticks(CHUNKS, [str(chunk) for chunk in CHUNKS], minor=False)
    axes[2, 0].minorticks_off()
    axes[2, 0].set_title(f"{part}, by the chunk that is read with")
    if mine:
        axes[2, 0].legend(fontsize="x-small", frameon=False)
    bars = [
        (f"{name} {layer} {gate}", levels)
        for name in ("titans", "deep")
        for row in of(mine, run=name)[:1]
        for layer, found in enumerate(row["gates"])
        for gate, levels in found.items()
    ]
    for place, (_, levels) in enumerate(reversed(bars)):
        low, first, median, third, high = [max(level, 1e-6) for level in levels]
        axes[2, 1].plot([low, high], [place] * 2, color="0.6")
        axes[2, 1].plot([first, third], [place] * 2, color="C0", lw=5)
        axes[2, 1].plot([median], [place], "k|", ms=10)
    axes[2, 1].set_yticks(range(len(bars)), [label for label, _ in reversed(bars)], fontsize="small")
    axes[2, 1].set(
        xscale="log", xlabel="gate: 5, 25, 50, 75, 95 %", title=f"{part}, gates by memory and layer"
    )
    figure.savefig(path, dpi=80)


def plot_last(rows: list[Row], path: Path) -> None:
    """The newest settings of each part."""
    last = {group[0]["what"]["part"]: group for group in groups(rows)}
    plot([row for group in last.values() for row in group], path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=list(DEFAULTS))
    parser.add_argument("--books", help="a folder, for language")
    parser.add_argument("--runs", nargs="+", choices=[*HAND, *TRACK, *RUNS])
    parser.add_argument(
        "--tasks", nargs="+", default=list(TASKS), choices=TASKS, help="of the first two parts"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    meanings = {
        "dim": "width of the model", "depth": "its layers", "head_dim": "width of a memory's heads",
        "lr": "learning rate", "steps": "of training", "rows": "of a batch", "length": "of a row in training",
        "texts": "to test on", "farthest": "the longest of them",
    }  # fmt: skip
    for name, meaning in meanings.items():
        own = ", ".join(str(defaults[name]) for defaults in DEFAULTS.values() if name in defaults)
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=float if name == "lr" else int, help=f"{meaning}: {own}")
    add_arguments(parser, "mechanics.json")
    args = parser.parse_args()
    rows = Rows(args.out, args.commit, args.merge or ())
    if rows.shown(args, lambda found: "\n".join(map(table, groups(found))), plot_last):
        return
    if args.part is None or (args.part == "language" and args.books is None):
        sys.exit("expected a part to run (and --books FOLDER for language), or --table, --plot or --merge")
    given = {name: value for name, value in vars(args).items() if name in meanings and value is not None}
    chosen = {**DEFAULTS[args.part], **(TINY if args.tiny else {}), **given}
    settings = {name: chosen[name] for name in DEFAULTS[args.part]}
    device, began, texts = torch.device("cuda" if torch.cuda.is_available() else "cpu"), time.time(), {}
    if args.part == "language":
        texts["train"] = load(args.books, "train")
        texts["held out"] = streams(load(args.books, "validation"), settings["farthest"], settings["texts"])
    parts = {
        "construct": construct,
        "track": track,
        "recall": recall,
        "language": partial(language, texts=texts),
    }
    known = {"construct": HAND, "track": TRACK}.get(args.part, RUNS)
    for task in args.tasks if args.part in ("construct", "track") else [args.part]:
        for seed in args.seeds:
            for name in args.runs or known:
                what = {"part": args.part, "task": task, "run": name, "seed": seed, **settings}
                if name not in known or rows.has(what) or time.time() - began > args.seconds:
                    continue
                row = parts[args.part](what, device)
                rows.add({"what": what, **row})
                shown = row.get("right") or {k: round(sum(v) / len(v), 4) for k, v in row["bits"].items()}
                print(
                    task,
                    name,
                    seed,
                    row["parameters"],
                    row["train"],
                    shown,
                    f"{row['seconds']} s",
                    flush=True,
                )
                release()


if __name__ == "__main__":
    main()
