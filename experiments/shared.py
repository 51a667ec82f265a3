"""Shared by the experiments: books, the order of training pieces, training with carried state, reading, result rows.

A folder of books holds ``*.txt.xz`` and an ``index.json`` that names each book's split.
"""

from __future__ import annotations

import argparse
import gc
import json
import lzma
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from remanence import Model
from remanence.config import Mode
from remanence.inference.graphs import unsupported
from remanence.io.files import replacing
from remanence.runtime.graphs import capture
from remanence.runtime.state import where
from remanence.train.config import OptimizerConfig, TrainConfig
from remanence.train.engine import make_optimizer
from remanence.train.graphed import Graphed

RESTART = 1 / 48
"""How often a row leaves its book for a place in another one."""

Row = dict[str, Any]

# Texts


def load(folder: str, split: str) -> list[Tensor]:
    index = json.loads((Path(folder) / "index.json").read_text())
    names = [book["file"] for book in index if book["split"] == split]
    return [
        torch.frombuffer(bytearray(lzma.open(Path(folder) / name).read()), dtype=torch.uint8)
        for name in names
    ]


def streams(books: list[Tensor], length: int, most: int) -> Tensor:
    """Separate stretches of the books, none of which overlap."""
    cut = [book[at : at + length + 1] for book in books for at in range(0, len(book) - length, length + 1)]
    return torch.stack(cut[:most])


def plan_of(
    books: list[Tensor], rows: int, length: int, steps: int, seed: int, restart: float = RESTART
) -> tuple[Tensor, Tensor]:
    """Where each row's piece begins in all books one behind the other ``[steps rows]``, and whether the row begins anew
    with it. Rows go through a book in order and leave it at its end, or now and then before.
    """
    draw = torch.Generator().manual_seed(seed + 1)
    sizes = torch.tensor([len(book) for book in books], dtype=torch.float)
    ends = torch.tensor([len(book) for book in books]).cumsum(0).tolist()
    plan, new = torch.empty(steps, rows, dtype=torch.long), torch.zeros(steps, rows, dtype=torch.bool)
    place: list[list[int]] = [[0, 0] for _ in range(rows)]
    for step in range(steps):
        for row in range(rows):
            if place[row][0] + length + 1 >= place[row][1] or float(torch.rand((), generator=draw)) < restart:
                book = int(torch.multinomial(sizes, 1, generator=draw))
                at = int(torch.randint(0, len(books[book]) - length - 2, (1,), generator=draw))
                place[row] = [ends[book] - len(books[book]) + at, ends[book]]
                new[step, row] = True
            plan[step, row] = place[row][0]
            place[row][0] += length
    return plan, new


# Training


def captured(step: Callable[[], Any], device: str) -> Callable[[], Any]:
    """A function of no arguments that works in place, as a CUDA graph where there is one."""
    return capture(step, torch.device(device))[0].replay if device == "cuda" else step


class Training:
    """Texts in the order of `plan_of`, each row's state carried from piece to piece or, without `carry`, dropped.

    Forward and backward are one CUDA graph where the model can be captured; nothing waits for the device.
    """

    CHECKED = 100
    """Steps after which the gradients are looked at: a run that is lost is not run to its end."""

    def __init__(
        self,
        model: Model,
        texts: list[Tensor],
        *,
        rows: int,
        length: int,
        steps: int,
        lr: float,
        seed: int,
        carry: bool = True,
    ) -> None:
        self.model, self.length, self.steps, self.carry = model, length, steps, carry
        self.device = model.device
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else None
        self.text = torch.cat(texts).to(self.device)
        plan, self.new = plan_of(texts, rows, length, steps, seed)
        self.plan = plan.to(self.device)
        self.rates = OptimizerConfig(lr=lr, warmup=min(60, max(1, steps // 10)))
        self.optimizer = make_optimizer(model, TrainConfig(model=model.config, optimizer=self.rates))
        reason = unsupported(model, length, carry)
        self.graphed = Graphed(model, self.dtype) if reason is None else None
        self.state: Any = None
        if carry:
            with torch.no_grad():
                self.state = model.start(rows)

    def run(self) -> tuple[Tensor, Tensor]:
        """Losses in bits and gradient norms of every step; fewer than all steps if they are no longer finite."""
        losses, norms = [], []
        span = torch.arange(self.length + 1, device=self.device)
        for step in range(self.steps):
            x = self.text[self.plan[step].unsqueeze(1) + span].long()
            losses.append(self.backward(x[:, :-1], x[:, 1:], self.new[step]))
            norms.append(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.rates.clip))
            for group in self.optimizer.param_groups:
                group["lr"] = self.rates.rate(step, self.steps)
            self.optimizer.step()
            if step % self.CHECKED == self.CHECKED - 1 and not bool(norms[-1].isfinite()):
                break
        return torch.stack(losses).cpu() / math.log(2), torch.stack(norms).cpu()

    def backward(self, tokens: Tensor, targets: Tensor, new: Tensor) -> Tensor:
        """The gradients of a step; its loss. Rows that are `new` ``[b]``, on the host, begin a text."""
        if self.graphed is not None:
            loss, seen = self.graphed(
                tokens, targets, self.state, new if self.carry else None, targets.numel()
            )
            self.state = seen.state if self.carry else None
            return loss.clone()
        self.optimizer.zero_grad(set_to_none=True)
        state = self.state
        if self.carry and bool(new.any()):
            state = where(new.tolist(), self.model.start(len(new)), state)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
            seen = self.model.trace(tokens, state, keep=self.carry)
            logits = self.model.logits(seen.hidden).flatten(0, 1)
            loss = F.cross_entropy(logits.float(), targets.flatten())
        loss.backward()
        self.state = seen.state.detach() if self.carry else None
        return loss.detach()


# Reading


@torch.no_grad()
def bits_of(
    model: Model, x: Tensor, state: Any = None, mode: Mode | None = None, keep: bool = True
) -> tuple[Tensor, Any]:
    """The bits of every byte of ``[r t+1]`` but the first ``[r t]``, and the state."""
    x = x.to(model.device).long()
    cuda = model.device.type == "cuda"
    with torch.autocast(model.device.type, torch.bfloat16, enabled=cuda):
        seen = model.trace(x[:, :-1], state, memory_mode=mode, keep=keep)
        logits = model.logits(seen.hidden).flatten(0, 1)
    loss = F.cross_entropy(logits.float(), x[:, 1:].flatten(), reduction="none")
    return loss.view(len(x), -1) / math.log(2), seen.state


@torch.no_grad()
def read(model: Model, x: Tensor, piece: int, mode: Mode | None = None) -> Tensor:
    """Bits of streams ``[r t+1]``, read in pieces with the state carried ``[r t]``. Pieces are long and of many
    rows, so that the host is ahead of the device.
    """
    state, found = model.start(len(x)), []
    for first in range(0, x.shape[1] - 1, piece):
        bits, state = bits_of(model, x[:, first : first + piece + 1], state, mode)
        found.append(bits)
    return torch.cat(found, 1).cpu()


def read_restarted(model: Model, x: Tensor, length: int, stride: int) -> Tensor:
    """Bits of streams by a model that sees no more than `length` tokens: after the first so many its context is begun
    anew for every `stride` of them, with the `length - stride` before in front.
    """
    found = [bits_of(model, x[:, : length + 1], keep=False)[0]]
    for first in range(length, x.shape[1] - 1, stride):
        last = min(first + stride, x.shape[1] - 1)
        bits, _ = bits_of(model, x[:, last - length : last + 1], keep=False)
        found.append(bits[:, first - last :])
    return torch.cat(found, 1).cpu()


def octaves(length: int) -> list[tuple[int, int]]:
    """The first 1,024 positions, then each twice as far as the one before."""
    spans, first = [], 0
    while first < length:
        spans.append((first, min(length, max(1024, 2 * first))))
        first = spans[-1][1]
    return spans


def by_octave(bits: Tensor) -> Tensor:
    """Of each stream the mean of every octave, ``[r t]`` to ``[r octaves]``."""
    return torch.stack([bits[:, a:b].double().mean(1) for a, b in octaves(bits.shape[1])], 1)


def rounded(x: Tensor, digits: int = 5) -> Any:
    """A tensor as lists of short numbers, for a file."""
    return [round(x, digits) for x in x.tolist()] if x.dim() == 1 else [rounded(part, digits) for part in x]


def mean_and_error(x: Tensor) -> tuple[float, float]:
    """A mean over streams and its standard error."""
    x = x.double()
    return x.mean().item(), (x.std() / math.sqrt(len(x))).item() if len(x) > 1 else math.nan


# Rows in a file


class Rows:
    """Finished rows in a JSON file, each saved at once. A row's "what" says all that was asked for; it is run once."""

    def __init__(self, path: Path, commit: str | None = None, also: Iterable[Path] = ()) -> None:
        self.path = path
        self.data: dict[str, Any] = {"commands": [], "commits": [], "rows": []}
        for each in (path, *also):
            if each.exists() or each != path:
                self._take(json.loads(each.read_text()))
        self.note = {"commands": command_line(), "commits": commit or _commit()}

    def _take(self, other: dict[str, Any]) -> None:
        for name in ("commands", "commits", "rows"):
            known = [row["what"] for row in self.rows] if name == "rows" else self.data[name]
            new = [each for each in other[name] if (each["what"] if name == "rows" else each) not in known]
            self.data[name] += new

    @property
    def rows(self) -> list[Row]:
        return self.data["rows"]

    def has(self, what: Row) -> bool:
        return any(row["what"] == json.loads(json.dumps(what)) for row in self.rows)

    def add(self, row: Row) -> None:
        self._take({"rows": [json.loads(json.dumps(row))], **{k: [v] for k, v in self.note.items()}})
        self.save()

    def shown(
        self,
        args: argparse.Namespace,
        table: Callable[[list[Row]], str],
        plot: Callable[[list[Row], Path], None],
    ) -> bool:
        """Merge, print and draw what is asked for (`add_arguments`); whether any of it was, and nothing is to run."""
        if args.merge:
            self.save()
        if args.table:
            print(table(self.rows))
        if args.plot:
            plot(self.rows, args.plot)
        return bool(args.merge or args.table or args.plot)

    def save(self) -> None:
        with replacing(self.path) as temporary:
            temporary.write_text(json.dumps(self.data) + "\n")


def comparable(rows: Iterable[Row], *differ: str) -> list[list[Row]]:
    """Groups of rows of one device in which all that was asked for is the same, but for what is named."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        same = sorted((name, value) for name, value in row["what"].items() if name not in differ)
        found.setdefault(str([row["device"], *same]), []).append(row)
    return list(found.values())


def table_row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def table_rule(count: int) -> str:
    return "|" + "---|" * count


def command_line() -> str:
    """The command that started this process, as a results page gives it."""
    spec = sys.modules["__main__"].__spec__
    program = sys.argv[0] if spec is None else f"-m {spec.name}"
    return " ".join([program, *sys.argv[1:]])


def _commit() -> str:
    root = Path(__file__).parent
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def machine(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"device": name, "torch": torch.__version__}


def release() -> None:
    """Give back what a finished run has held on the device."""
    gc.collect()
    torch.cuda.empty_cache()


class Clock:
    """Seconds since the last look, the device's work included."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.last = device, 0.0
        self()

    def __call__(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        before, self.last = self.last, time.time()
        return round(self.last - before, 1)


def add_arguments(parser: argparse.ArgumentParser, out: str) -> None:
    """The arguments that all experiments with result rows share."""
    parser.add_argument("--seconds", type=float, default=1e9, help="start no run after so long")
    parser.add_argument("--out", type=Path, default=Path(out), help="rows; those in it are not run again")
    parser.add_argument("--commit", help="of the code, where there is no repository to ask")
    parser.add_argument(
        "--merge", nargs="+", type=Path, metavar="JSON", help="take these files' rows into --out"
    )
    parser.add_argument("--table", action="store_true", help="print what --out holds, and run nothing")
    parser.add_argument("--plot", type=Path, help="draw what --out holds, and run nothing")
    parser.add_argument(
        "--tiny", action="store_true", help="two small layers and four steps, to try the script"
    )
