"""What the commands around training do: preparing data, a run, its cost, its model. Imported only when one runs."""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from remanence.config import known
from remanence.data import prepare
from remanence.recipes import find_recipe
from remanence.train import SOURCES, TrainConfig, export, fit, override, resolve_config, run_config
from remanence.train.metrics import check_trackers
from remanence.train.plan import plan


def prepare_data(
    sources: Sequence[str],
    out: Path,
    tokenizer: Path | None,
    field: str,
    workers: int,
    max_tokens: int | None,
    max_documents: int | None,
) -> None:
    """Texts to token shards, with a bar on a terminal and plain lines elsewhere: by tokens if they are limited, else by files."""
    if not sources:
        raise ValueError("sources: expected at least one file or folder, or hf:NAME, got none")
    console = Console(stderr=True)
    said = time.monotonic()
    columns = (BarColumn(), TextColumn("{task.fields[note]}"), TimeRemainingColumn())
    with Progress("preparing", *columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("preparing", total=None, note="")

        def done(finished: int, total: int, tokens: int) -> None:
            nonlocal said
            note = f"{tokens:,} tokens, {finished:,} of {total:,} files"
            if max_tokens is None:
                bar.update(task, completed=finished, total=total, note=note)
            else:
                bar.update(task, completed=tokens, total=max_tokens, note=note)
            if not console.is_terminal and time.monotonic() - said > 30:
                said = time.monotonic()
                print(f"preparing: {note}", file=sys.stderr, flush=True)

        told = prepare(
            sources,
            out,
            tokenizer=tokenizer,
            field=field,
            workers=workers,
            max_tokens=max_tokens,
            max_documents=max_documents,
            done=done,
        )
    without = f"; {told['nulls']:,} without a text passed over" if told["nulls"] else ""
    print(f"{out}: {told['tokens']:,} tokens in {told['documents']:,} documents from {told['files']:,} files{without}")


def train(recipe: Path, out: Path, overrides: dict[str, str], resume: bool) -> None:
    """Train by a recipe, with a bar on a terminal and plain lines elsewhere; of several processes, the first one speaks."""
    if resume and overrides:
        raise ValueError(f"--{next(iter(overrides))}: expected no changes beside --resume, as the run's own config counts")
    config = run_config(out) if resume else override(read_recipe(recipe), overrides)
    console, begun = Console(stderr=True), time.monotonic()
    done: list[int] = []
    columns = (
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )
    with Progress("training", *columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("training", total=config.steps, note="", visible=_first_process())

        def show(line: dict[str, Any]) -> None:
            done.append(line["step"])
            bar.update(task, completed=line["step"], note=_noted(line))
            if not console.is_terminal:
                passed = line["step"] - done[0] + config.log_every
                left = (time.monotonic() - begun) * (config.steps - line["step"]) / passed
                print(f"step {line['step']}: {_noted(line)}, {left:.0f} s left", file=sys.stderr, flush=True)

        try:
            model = fit(None if resume else config, out, resume=resume, log=show)
        except KeyboardInterrupt:
            if (out / "checkpoints").is_dir() and _first_process():
                print(f"{out}: --resume goes on from the last checkpoint", file=sys.stderr)
            raise
    if not _first_process():
        return
    count = sum(parameter.numel() for parameter in model.parameters())
    if (out / "model" / "config.json").is_file():
        print(f"{out}: {count:,} parameters, see metrics.jsonl; the model is in {out / 'model'}")
    else:
        last = sorted((out / "checkpoints").glob("[0-9]*"))[-1]
        print(f"{out}: stopped and saved after step {int(last.name)}; --resume goes on")


def _first_process() -> bool:
    """Of those that torchrun started, if it did."""
    return os.environ.get("RANK", "0") == "0"


def _noted(line: dict[str, Any]) -> str:
    """A logged step in words."""
    words = ["loss none" if line["loss"] is None else f"loss {line['loss']:.4f}", f"{line['tokens_per_s']:,.0f} tokens/s"]
    words += [f"MFU {line['mfu']:.1%}"] if line.get("mfu") is not None else []
    words += [f"{line['memory_gib']:.1f} GiB"]
    words += [f"surprise {line['surprise']:.3f}"] if line.get("surprise") is not None else []
    words += [f"step {line['step_size']:.4f}"] if line.get("step_size") is not None else []
    words += [f"keep {line['keep']:.5f}"] if line.get("keep") is not None else []
    words += [f"{line['skipped']} skipped"] if line["skipped"] else []
    words += [f"{line['leash']} leashed"] if line["leash"] else []
    return ", ".join(words)


def dry_run(recipe: Path, overrides: dict[str, str], gpus: int | None, gpu: str) -> None:
    """What a run would cost; an error if it cannot fit."""

    config = resolve_config(override(read_recipe(recipe), overrides))
    known("data.kind", config.data.kind, SOURCES)
    check_trackers(config.trackers)
    if gpus is not None and gpus < 1:
        raise ValueError(f"--gpus: expected at least 1, got {gpus}")
    made = plan(config, gpus, gpu)
    table = Table(title=f"{recipe.name}: what it would cost (estimates)", show_header=False)
    table.add_row("parameters", f"{made.parameters:,}")
    table.add_row("blocks", " ".join(config.model.pattern) + f", {config.model.depth} layers")
    table.add_row("tokens", f"{made.tokens:,} in {config.steps:,} steps of {config.batch * config.data.length:,}")
    table.add_row("operations", f"{made.flops:.2e}, forward and backward")
    for part, size in made.memory.items():
        table.add_row(f"memory: {part}", f"{size / 1e9:.2f} GB")
    table.add_row("memory of a device", f"{made.needed / 1e9:.2f} GB of {made.available / 1e9:.0f}")
    table.add_row("tokens per second", f"{made.rate:,.0f} ({made.basis})")
    table.add_row("hours", f"{made.hours:,.2f}")
    Console().print(table)


def export_run(run: Path, out: Path, memory: Path | None, row: int) -> None:
    print(f"{out}: the model of {export(run, out, memory, row)}, for remanence and Hugging Face")
    if memory is not None:
        print(f"{memory}: what row {row} remembered")


def read_recipe(path: Path) -> Any:
    """What a recipe's `recipe()` returns. A recipe is code: run your own, or ones you have read."""
    path = find_recipe(path)
    try:
        found = runpy.run_path(str(path)).get("recipe")
        if not callable(found):
            raise ValueError(f"{path}: expected a function recipe() that returns a TrainConfig, got none")
        config = found()
    except (SyntaxError, ImportError, TypeError, NameError, AttributeError) as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from None
    if not isinstance(config, TrainConfig):
        raise ValueError(f"{path}: expected recipe() to return a TrainConfig, got {type(config).__name__}")
    return config
