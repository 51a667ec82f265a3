"""The demo command. A pretrained model with a memory reads messages that state facts, then a book, and answers
questions about the facts. A small model of ours does the same with numbers. Then three tiny models are trained to
recall pairs and are tested at increasing distances, and a memory is saved and restored.

A sliding window loses tokens that have left it, while a memory trained on 64 tokens still answers after 2,000. All
files are written to a temporary folder, which replaces `out` when it is complete. `demo_chat.py` has the conversation,
`demo_book.py` reads the book, and `demo_models.py` trains and tests the models.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from remanence.cli.arguments import Device
from remanence.io.files import read_json, write_json
from remanence.runtime.terminal import echo

if TYPE_CHECKING:
    from rich.table import Table

PAIRS, KEYS, NOISE = 8, 16, 4
"""Number of pairs in a text, of different keys (and values), and of different noise tokens."""
WINDOW, SEGMENT = 32, 16
"""Attention window and MAC segment of the trained models, in tokens."""
CHANCE = 1 / KEYS
"""Accuracy of random answers."""
DISTANCES = (16, 24, 32, 64, 128, 256, 512, 1024, 2048)
"""Numbers of tokens from a pair to its question: three inside the window, then up to 64 windows."""
MARK = {"made_by": "remanence demo"}
"""Entry of recall.json that identifies the folder of a demo."""


class Recipe(NamedTuple):
    """Training settings of one of the models: title in tables, type of layer, learning rate, and a number of steps
    that was enough for several seeds.
    """

    title: str
    mixer: str
    lr: float
    steps: int


# Each model has one layer. To associate a value with its key, a layer must see the previous token. The memories have a
# short convolution for this, so the Transformer has one too.
RECIPES = {
    "window": Recipe("window, attention alone", "conv_window", 4e-3, 180),
    "lmm": Recipe("LMM, memory alone", "lmm", 6e-3, 280),
    "mac": Recipe("MAC, memory and attention", "mac", 4e-3, 220),
}
"""The trained models by name."""


@dataclass(frozen=True)
class Demo:
    """State facts to a pretrained model with a memory, let it read a book, and ask about the facts; do the same with a
    small model and numbers; then train a sliding-window Transformer, an LMM and a MAC to recall pairs over long
    distances. About three minutes on two idle cores.

    Prints and plots accuracy by distance; then saves a memory, loads it into a new model and queries it.
    """

    out: Path = Path("out/demo")
    """Folder for the plot, the numbers, the trained models and the memory file. An earlier demo there is replaced."""
    device: Device = "cpu"
    """Device to run on. The figures in README were measured on a CPU."""
    seed: int = 2
    """Random seed of the models and texts."""
    steps: int | None = None
    """Training steps of each model. Default: enough for each."""
    tokens: int = 32_768
    """Bytes of the book between the facts and the questions, at most about 430,000."""
    chat_tokens: int = 60_000
    """Tokens of the book between the conversation and the questions about it, at most about 100,000; 0: no
    conversation.
    """

    def run(self) -> None:
        import torch

        from remanence.cli import demo_book, demo_chat, demo_models
        from remanence.cli.console import Console
        from remanence.model import Model, parameters
        from remanence.runtime.device import resolve

        out, device, seed = self.out, resolve(self.device), self.seed
        if seed < 0:
            raise ValueError(f"seed: expected an integer of at least 0, got {seed}")
        if self.tokens < 1024:
            raise ValueError(f"tokens: expected an integer of at least 1024, got {self.tokens}")
        if self.chat_tokens < 0:
            raise ValueError(f"chat_tokens: expected an integer of at least 0, got {self.chat_tokens}")
        console, started = Console(), time.monotonic()
        configs = {name: demo_models.recipe_config(name, self.device, seed, self.steps) for name in RECIPES}
        with replaced(out) as folder:
            chat = None
            if self.chat_tokens and (reason := demo_chat.unavailable_reason()) is not None:
                echo(f"No conversation with a pretrained model: {reason}")
            elif self.chat_tokens:
                chat = demo_chat.converse(folder, device, self.chat_tokens)
                demo_chat.show(chat, console, out)
            book = demo_book.read_book(folder, device, seed, self.tokens)
            echo(f"{book['model']}, whose window is {book['window']} tokens wide, has read {book['book']}.")
            echo(f"Asked {book['distance']:,} tokens after the facts in it, from {out / 'book.mem'}:")
            titles = {
                "on": "with its memory",
                "frozen": "frozen memory (no test-time writes)",
                "off": "memory off",
            }
            console.print(answers_table(book, titles))
            seconds = demo_models.train(configs, folder)
            torch.set_num_threads(1)
            models = {name: Model.load(folder / name / "model", device=device).eval() for name in RECIPES}
            accuracy = {name: demo_models.accuracies(models[name], DISTANCES, seed) for name in models}
            console.print(accuracy_table(accuracy))
            plot(accuracy, folder / "recall.png")
            recalled = demo_models.remember(folder, device, seed)
            pairs = " ".join(recalled["read"])
            echo(f"MAC read {pairs}, then {recalled['noise']} tokens of noise.")
            size = f"{recalled['bytes'] / 1000:,.0f} KB"
            echo(f"Its memory: {out / 'pairs.mem'}, {size}. A model loaded anew is asked:")
            titles = {"from_the_file": "from the file", "without_it": "without it"}
            console.print(answers_table(recalled, titles))
            facts = {
                **MARK,
                "seed": seed,
                "steps": {name: config.steps for name, config in configs.items()},
                "training_seconds": seconds,
                "parameters": {name: parameters(config.model) for name, config in configs.items()},
                "chance": CHANCE,
                "window": WINDOW,
                "distances": DISTANCES,
                "accuracy": accuracy,
                "memory_file": recalled,
                "book": book,
                "chat": chat,
            }
            write_json(folder / "recall.json", facts)
        folders = f"{out}/{{{','.join(RECIPES)}}}/model"
        files = f"plot: {out / 'recall.png'}   numbers: {out / 'recall.json'}   models: {folders}"
        echo(f"{files}   {time.monotonic() - started:.0f} s in all")


@contextmanager
def replaced(out: Path) -> Iterator[Path]:
    """Context manager that yields a new folder, which replaces `out` when the block ends and is removed if
    the block fails.

    `out` may be missing, empty, or hold an earlier demo. Anything else raises an error before the work begins.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: expected a folder to write into, got the file {out}")
    if out.exists() and any(out.iterdir()):
        path = out / "recall.json"
        if not path.is_file() or read_json(path).get("made_by") != MARK["made_by"]:
            expected = "expected a new or empty folder, or an earlier demo's, which is replaced"
            raise ValueError(f"out: {expected}, got {out}")
        echo(f"{out} holds an earlier demo, which is replaced when this one is done", error=True)
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


def accuracy_table(accuracy: dict[str, list[float]]) -> Table:
    """Return a table of the accuracy of each model at each distance."""
    from rich.table import Table

    title = f"{PAIRS} pairs: accuracy by distance in tokens to the question (chance: {CHANCE:.0%})"
    table = Table("model", title=title)
    for distance in DISTANCES:
        table.add_column(f"{distance:,}", justify="right")
    for name, row in accuracy.items():
        table.add_row(RECIPES[name].title, *[f"{share:.0%}" for share in row])
    table.caption = f"trained on 64 tokens; the window is {WINDOW} tokens wide"
    return table


def plot(accuracy: dict[str, list[float]], path: Path) -> None:
    """Write a plot of the accuracy of each model by distance to an image file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    edge = WINDOW * 1.12
    axis.axvspan(DISTANCES[0] / 1.3, edge, color="#f1efe8", linewidth=0)
    axis.annotate("in the window", (edge / 1.06, 42), ha="right", fontsize=9, color="#6b675c")
    axis.axhline(100 * CHANCE, color="#6b675c", linewidth=1, linestyle=":")
    point = (DISTANCES[0], 100 * CHANCE)
    axis.annotate("chance", point, (0, -12), textcoords="offset points", ha="left", fontsize=9)
    # The lines of both memories overlap where both are right, so the line of the LMM is dashed and drawn on top.
    looks = {"window": ("#8a8a8a", "s-", 2), "lmm": ("#e07a1f", "^--", 3), "mac": ("#1b6ca8", "o-", 2)}
    for name, row in accuracy.items():
        colour, line, layer = looks[name]
        percent, title = [100 * share for share in row], RECIPES[name].title
        (drawn,) = axis.plot(DISTANCES, percent, line, color=colour, linewidth=2, label=title)
        drawn.set(zorder=layer, clip_on=False)
    axis.set_xscale("log", base=2)
    axis.set_xticks(DISTANCES, [f"{distance:,}" for distance in DISTANCES])
    axis.set(xlim=(DISTANCES[0] / 1.3, DISTANCES[-1] * 1.15), ylim=(0, 103))
    axis.set(xlabel="tokens between a pair and its question", ylabel="accuracy, %")
    title = f"{PAIRS} pairs recalled from further and further away, by models trained on 64 tokens"
    axis.set_title(title, fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="center right", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def answers_table(recalled: dict[str, Any], titles: dict[str, str]) -> Table:
    """Return a table of questions and answers from `recalled`, with one column of answers for each key of
    `titles`.
    """
    from rich.table import Table

    from remanence.cli.console import coloured

    table = Table("question", *titles.values())
    for question, expected, *answers in zip(
        *(recalled[name] for name in ("questions", "answers", *titles)), strict=True
    ):
        verdicts = [("right", "green") if answer == expected else ("wrong", "red") for answer in answers]
        cells = zip(answers, verdicts, strict=True)
        table.add_row(
            question if question.endswith("?") else f"{question}?",
            *(coloured(f"{answer:>2} {word}", colour) for answer, (word, colour) in cells),
        )
    return table
