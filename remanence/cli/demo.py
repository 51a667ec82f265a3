"""The demo: three tiny models learn to recall pairs, and are asked from further and further away; then a memory becomes a file.

A window forgets what has left it; a memory that was trained for 64 tokens still answers after 1,000. The models train in a
process each, as they are too small for two threads. All is made in a folder beside `out`, which takes its place when whole.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from remanence.config import ModelConfig
from remanence.core.device import resolve
from remanence.core.files import read_json, write_json
from remanence.inference import memfile
from remanence.model import Model
from remanence.tasks.recall import Recall
from remanence.train import DataConfig, OptimizerConfig, TrainConfig, fit

PAIRS, KEYS, NOISE = 8, 16, 4
WINDOW = 16
CHANCE = 1 / KEYS
DISTANCES = (16, 32, 64, 128, 256, 512, 1024)
"""Tokens from a pair to its question, give or take a round of pairs: the middle of those of one text."""
READ, SILENCE = 2 * PAIRS, 200
MARK = {"made_by": "remanence demo"}


class Recipe(NamedTuple):
    """How one of the models is trained: enough, when measured with several seeds, and no more."""

    title: str
    depth: int
    lr: float
    steps: int


# A window of one layer cannot compare a key with the token before a value, so the Transformer has two.
RECIPES = {
    "window": Recipe("sliding-window Transformer", 2, 4e-3, 300),
    "lmm": Recipe("LMM, memory alone", 1, 6e-3, 200),
    "mac": Recipe("MAC, memory and attention", 1, 4e-3, 320),
}
REACH = RECIPES["window"].depth * (WINDOW - 1) + 1
"""Tokens that the Transformer's window reaches back through all its layers."""


def main(out: Path, device: str, seed: int, steps: int | None) -> None:
    resolve(device)
    if seed < 0:
        raise ValueError(f"seed: expected a whole number of at least 0, got {seed}")
    console, started = Console(), time.monotonic()
    configs = {name: recipe_config(name, device, seed, steps) for name in RECIPES}
    with replaced(out) as folder:
        seconds = train(configs, folder)
        torch.set_num_threads(1)
        models = {name: Model.load(folder / name / "model", device=resolve(device)).eval() for name in RECIPES}
        accuracy = {name: [asked_from(model, distance, seed) for distance in DISTANCES] for name, model in models.items()}
        console.print(accuracy_table(accuracy))
        plot(accuracy, folder / "recall.png")
        recalled = remember(folder, device, seed)
        read = f"MAC read {' '.join(recalled['read'])}, then {recalled['noise']} tokens of noise."
        saved = f"Its memory: {out / 'pairs.mem'}, {recalled['bytes'] / 1000:,.0f} KB. A model loaded anew is asked:"
        console.print(f"{read}\n{saved}", soft_wrap=True, highlight=False, markup=False)
        console.print(memory_table(recalled))
        facts = {
            **MARK,
            "seed": seed,
            "steps": {name: config.steps for name, config in configs.items()},
            "training_seconds": seconds,
            "parameters": {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()},
            "chance": CHANCE,
            "window_reach": REACH,
            "distances": DISTANCES,
            "accuracy": accuracy,
            "memory_file": recalled,
        }
        write_json(folder / "recall.json", facts)
    written = f"plot: {out / 'recall.png'}   numbers: {out / 'recall.json'}   models: {out}/{{{','.join(RECIPES)}}}/model"
    console.print(f"{written}   {time.monotonic() - started:.0f} s in all", soft_wrap=True, highlight=False, markup=False)


def recipe_config(name: str, device: str, seed: int, steps: int | None) -> TrainConfig:
    """One model's run: the same task for all, whose rows are 64 tokens with three rounds of the pairs."""
    recipe = RECIPES[name]
    steps = recipe.steps if steps is None else steps
    model = ModelConfig(
        vocabulary=2 * KEYS + NOISE,
        dim=64,
        depth=recipe.depth,
        heads=2,
        pattern=(name,),
        window=WINDOW,
        segment=WINDOW,
        persistent=4,
        memory={"heads": 1},  # type: ignore[arg-type]
    )
    return TrainConfig(
        model=model,
        data=DataConfig(kind="recall", length=64, pairs=PAIRS, rounds=3, keys=KEYS, noise=NOISE),
        optimizer=OptimizerConfig(lr=recipe.lr, warmup=30, weight_decay=0.01),
        steps=steps,
        batch=32,
        seed=seed,
        save_every=steps,
        device=device,
    )


@contextmanager
def replaced(out: Path) -> Iterator[Path]:
    """A new folder that takes the place of `out` when the block ends, and is removed if it fails.

    What stands there already is an earlier demo's, or nothing: anything else is refused before the work begins.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: expected a folder to write into, got the file {out}")
    if out.exists() and any(out.iterdir()):
        own = (out / "recall.json").is_file() and read_json(out / "recall.json").get("made_by") == MARK["made_by"]
        if not own:
            raise ValueError(f"out: expected a new or empty folder, or an earlier demo's, which is replaced, got {out}")
        print(f"{out} holds an earlier demo, which is replaced when this one is done", file=sys.stderr, flush=True)
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    new, old = (out.with_name(f".{out.name}.{os.getpid()}.{suffix}") for suffix in ("new", "old"))
    new.mkdir()
    try:
        yield new
        if out.exists():
            out.rename(old)
        try:
            new.rename(out)
        except BaseException:
            if old.exists():
                old.rename(out)
            raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def train(configs: dict[str, TrainConfig], folder: Path) -> dict[str, float]:
    """Train all models at once, in a process each; the seconds that each took. The first that fails ends the others."""
    context, began = get_context("spawn"), time.monotonic()
    running: dict[Any, tuple[str, Any]] = {}
    seconds = {}
    try:
        with uninterrupted():
            for name, config in configs.items():
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_train, args=(config, folder / name, theirs), daemon=True)
                process.start()
                theirs.close()  # the child's copy is then the only one, and its end is the end of the line
                running[ours] = name, process
        with Bars({name: config.steps for name, config in configs.items()}) as bars:
            while running:
                for line in connection.wait(list(running)):
                    name, process = running[line]
                    if said := _heard(line):
                        bars.update(name, said)
                        continue
                    process.join()
                    if process.exitcode:
                        raise ValueError(f"{name}: expected its training to end well, got exit code {process.exitcode}")
                    seconds[name] = round(time.monotonic() - began, 1)
                    del running[line]
    finally:
        for _, process in running.values():
            process.kill()
            process.join()
    return seconds


def _heard(line: Any) -> dict[str, Any] | None:
    """What a process has sent: metrics, or None at its end. What went wrong there is raised here."""
    try:
        said = line.recv()
    except EOFError:
        return None
    if isinstance(said, str):
        raise ValueError(said)
    return said


def _train(config: TrainConfig, folder: Path, line: Any) -> None:
    """In a process of its own: metrics go down the line as they come, and an error as text."""
    torch.set_num_threads(1)
    try:
        fit(config, folder, log=line.send)
    except (ValueError, OSError) as error:
        line.send(str(error))


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Processes started inside ignore Ctrl-C for good: it is for the one that started them, which ends them."""
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Bars:
    """Progress of every model: bars on a terminal, a plain line every ten seconds elsewhere."""

    def __init__(self, steps: dict[str, int]) -> None:
        self.steps = steps
        self.said = dict.fromkeys(steps, time.monotonic())
        self.console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
        )
        self.bar = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.tasks = {name: self.bar.add_task(RECIPES[name].title, total=total, note="") for name, total in steps.items()}

    def __enter__(self) -> Bars:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def update(self, name: str, line: dict[str, Any]) -> None:
        loss = "none" if line["loss"] is None else f"{line['loss']:.2f}"
        self.bar.update(self.tasks[name], completed=line["step"], note=f"loss {loss}")
        now, last = time.monotonic(), line["step"] == self.steps[name]
        if not self.console.is_terminal and (last or now - self.said[name] > 10):
            self.said[name] = now
            print(f"{name}: step {line['step']} of {self.steps[name]}, loss {loss}", file=sys.stderr, flush=True)


def task(length: int, seed: int) -> Recall:
    """Texts no model was trained on: told once at the start, asked once at the end."""
    return Recall(length, 32, PAIRS, 2, seed + 2**32, keys=KEYS, noise=NOISE)


@torch.no_grad()
def asked_from(model: Model, distance: int, seed: int) -> float:
    """The share of right answers when pairs and questions are so many tokens apart: 32 texts, 8 questions each."""
    batch = task(distance + 2 * PAIRS, seed).step(0)
    place = model.embed.weight.device
    hidden = model.trace(batch.tokens.to(place)).hidden
    asked = batch.targets >= 0
    answers = model.logits(hidden[asked.to(place)]).argmax(-1).cpu()
    return float((answers == batch.targets[asked]).float().mean())


def accuracy_table(accuracy: dict[str, list[float]]) -> Table:
    title = f"{PAIRS} pairs, asked so many tokens later: right answers (guessing: {CHANCE:.0%})"
    table = Table("model", title=title)
    for distance in DISTANCES:
        table.add_column(f"{distance:,}", justify="right")
    for name, row in accuracy.items():
        table.add_row(RECIPES[name].title, *[f"{share:.0%}" for share in row])
    table.caption = f"trained on 64 tokens; the window reaches {REACH} tokens back"
    return table


def plot(accuracy: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axis.axvspan(DISTANCES[0] / 1.3, REACH, color="#f1efe8", linewidth=0)
    axis.annotate("within reach\nof the window", (REACH / 1.06, 42), ha="right", fontsize=9, color="#6b675c")
    axis.axhline(100 * CHANCE, color="#6b675c", linewidth=1, linestyle=":")
    axis.annotate("guessing", (DISTANCES[0], 100 * CHANCE), xytext=(0, -12), textcoords="offset points", ha="center", fontsize=9)
    # Where both memories are right the lines lie on each other: LMM's is broken, and on top.
    looks = {"window": ("#8a8a8a", "s-", 2), "lmm": ("#e07a1f", "^--", 3), "mac": ("#1b6ca8", "o-", 2)}
    for name, row in accuracy.items():
        colour, line, layer = looks[name]
        percent = [100 * share for share in row]
        axis.plot(DISTANCES, percent, line, color=colour, zorder=layer, linewidth=2, label=RECIPES[name].title, clip_on=False)
    axis.set_xscale("log", base=2)
    axis.set_xticks(DISTANCES, [f"{distance:,}" for distance in DISTANCES])
    axis.set(xlim=(DISTANCES[0] / 1.3, DISTANCES[-1] * 1.15), ylim=(0, 103))
    axis.set(xlabel="tokens between a pair and its question", ylabel="right answers, %")
    axis.set_title(f"{PAIRS} pairs recalled from further and further away, by models trained on 64 tokens", fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="center right", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def remember(folder: Path, device: str, seed: int) -> dict[str, Any]:
    """Read pairs and noise, save the memory; then, with a model loaded anew, ask from the file and without it."""
    text = task(READ + SILENCE + READ, seed).step(1).tokens[:1]
    told, asked = text[:, :READ], text[:, READ + SILENCE :: 2]
    path = folder / "pairs.mem"
    reader = load_mac(folder, device)
    with torch.no_grad():
        memfile.save(path, reader, reader(text[:, : READ + SILENCE].to(resolve(device)))[1])
    model = load_mac(folder, device)
    restored = answers(model, asked, memfile.load(path, model))
    values = dict(told.view(-1, 2).tolist())
    return {
        "read": [f"{symbol(key)}={symbol(value)}" for key, value in values.items()],
        "noise": SILENCE,
        "bytes": path.stat().st_size,
        "asked": [symbol(key) for key in asked[0].tolist()],
        "told": [symbol(values[key]) for key in asked[0].tolist()],
        "from_the_file": restored,
        "without_it": answers(model, asked, model.start(1)),
    }


def load_mac(folder: Path, device: str) -> Model:
    return Model.load(folder / "mac" / "model", device=resolve(device)).eval()


@torch.no_grad()
def answers(model: Model, asked: Tensor, state: Any) -> list[str]:
    """What the model says to each key, each asked by itself from the same state."""
    questions = asked.view(-1, 1).to(model.embed.weight.device)
    logits, _ = model(questions, state.rows([0] * len(questions)))
    return [symbol(token) for token in logits[:, -1].argmax(-1).tolist()]


def symbol(token: int) -> str:
    """A token as a person reads it: keys are letters, values are numbers, noise is a dot."""
    return chr(ord("a") + token) if token < KEYS else str(token - KEYS) if token < 2 * KEYS else "."


def memory_table(recalled: dict[str, Any]) -> Table:
    table = Table("asked", "from the file", "without it")
    for key, told, *given in zip(*(recalled[name] for name in ("asked", "told", "from_the_file", "without_it")), strict=True):
        cells = [f"{answer:>2} {'[green]right' if answer == told else '[red]wrong'}[/]" for answer in given]
        table.add_row(f"{key}?", *cells)
    return table
