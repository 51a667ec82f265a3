"""Second part of the demo: three small models are trained, each in its own process, and tested."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from remanence.cli.demo import KEYS, NOISE, PAIRS, RECIPES, SEGMENT, WINDOW
from remanence.cli.progress import Progress
from remanence.config import ModelConfig, change
from remanence.inference import memfile
from remanence.model import Model, State, matched, parameters
from remanence.tasks.recall import Recall
from remanence.train import OptimizerConfig, RecallData, TrainConfig, fit

READ, SILENCE = 2 * PAIRS, 200
"""Number of tokens of the pairs, and of the noise that follows, in the text whose memory is saved to a file.
"""
CONV = 2
"""Kernel size of the convolutions, which covers a value and the key before it. With 4, noise has 256
different keys instead of 16 and overwrites more of the memory: the accuracy of an LMM was then 88 % at 2,048
tokens.
"""
FORGET = -12.0
"""Initial bias of the forget gate, with which half of a memory is left after 110,000 tokens. With the default
of -6, half is left after 280 tokens, and training on 64 tokens does not teach a gate to keep much more.
"""


def recipe_config(name: str, device: str, seed: int, steps: int | None) -> TrainConfig:
    """Return the training configuration of one model. All models have the same task (rows of 64 tokens with
    three rounds of the pairs) and, within a few per cent, the same number of parameters.
    """
    recipe = RECIPES[name]
    steps = recipe.steps if steps is None else steps
    largest = ModelConfig(
        vocab_size=2 * KEYS + NOISE,
        dim=64,
        num_layers=1,
        heads=2,
        pattern=("mac",),
        window=WINDOW,
        segment=SEGMENT,
        persistent=4,
        memory={"heads": 1, "conv": CONV, "forget_bias": FORGET},  # type: ignore[arg-type]
    )
    model = matched(change(largest, {"pattern": (recipe.mixer,)}), parameters(largest))
    return TrainConfig(
        model=model,
        data=RecallData(length=64, pairs=PAIRS, rounds=3, keys=KEYS, noise=NOISE),
        optimizer=OptimizerConfig(lr=recipe.lr, warmup=30, weight_decay=0.01),
        steps=steps,
        batch=32,
        seed=seed,
        save_every=steps,
        device=device,
    )


def train(configs: dict[str, TrainConfig], folder: Path) -> dict[str, float]:
    """Train all models at the same time, each in its own process. Returns the seconds that each took. If one
    fails, the others are ended.
    """
    context, began = get_context("spawn"), time.monotonic()
    running: dict[Connection, tuple[str, SpawnProcess]] = {}
    seconds = {}
    try:
        with uninterrupted():
            for name, config in configs.items():
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_train, args=(config, folder / name, theirs), daemon=True)
                process.start()
                theirs.close()  # only the child has the other end now, so that we notice when the child ends
                running[ours] = name, process
        with Progress(steps=True, last=True, keep=True) as progress:
            bars = {name: progress.add(name, configs[name].steps, RECIPES[name].title) for name in configs}
            while running:
                ready = connection.wait(list(running))
                for line in [each for each in running if each in ready]:
                    name, process = running[line]
                    if metrics := _receive(line):
                        loss = "none" if metrics["loss"] is None else f"{metrics['loss']:.2f}"
                        bars[name].update(metrics["step"], f"loss {loss}")
                        continue
                    process.join()
                    if code := process.exitcode:
                        raise ValueError(f"{name}: expected its training to end well, got exit code {code}")
                    seconds[name] = round(time.monotonic() - began, 1)
                    del running[line]
    finally:
        for _, process in running.values():
            process.kill()
            process.join()
    return seconds


def _receive(line: Connection) -> dict[str, Any] | None:
    """Return the metrics that a process has sent, or None if the process has ended. An error in the process
    is raised here.
    """
    try:
        message = line.recv()
    except EOFError:
        return None
    if isinstance(message, str):
        raise ValueError(message)
    return message


def _train(config: TrainConfig, folder: Path, line: Connection) -> None:
    """Train one model; runs in a separate process. Metrics are sent through `line` as they are logged, and an
    error as text.
    """
    torch.set_num_threads(1)
    try:
        fit(config, folder, log=line.send)
    except (ValueError, OSError) as error:
        line.send(str(error))


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Context manager in which started processes ignore Ctrl-C. The parent process ends them instead."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread can handle signals
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def task(length: int, seed: int) -> Recall:
    """Return the recall task for testing, with texts that no model was trained on: the pairs are stated at
    the start and asked at the end.
    """
    return Recall(length, 32, PAIRS, 2, seed + 2**32, keys=KEYS, noise=NOISE)


def accuracies(model: Model, distances: Sequence[int], seed: int) -> list[float]:
    """Return the accuracy at each distance, in tokens from a pair to its question, over 32 texts with 8
    questions each.
    """
    return [_accuracy(model, distance, seed) for distance in distances]


@torch.no_grad()
def _accuracy(model: Model, distance: int, seed: int) -> float:
    """Return the share of right answers at one distance."""
    tokens = task(distance + READ, seed).step(0).tokens
    # The keys are asked in the order in which they were stated, so that all have the same distance.
    tokens[:, distance:] = tokens[:, :READ]
    hidden = model.trace(tokens.to(model.device)).hidden[:, distance::2]
    return float((model.logits(hidden).argmax(-1).cpu() == tokens[:, 1:READ:2]).float().mean())


def remember(folder: Path, device: torch.device, seed: int) -> dict[str, Any]:
    """Read pairs and noise and save the memory, then query a newly loaded model with and without the memory
    file. Returns the results for recall.json.
    """
    text = task(READ + SILENCE + READ, seed).step(1).tokens[:1]
    pairs, questions = text[:, :READ], text[:, READ + SILENCE :: 2]
    path = folder / "pairs.mem"
    reader = load_mac(folder, device)
    with torch.no_grad():
        memfile.save(path, reader, reader(text[:, : READ + SILENCE].to(device))[1])
    model = load_mac(folder, device)
    restored = answer(model, questions, memfile.load(path, model))
    values = dict(pairs.view(-1, 2).tolist())
    return {
        "read": [f"{symbol(key)}={symbol(value)}" for key, value in values.items()],
        "noise": SILENCE,
        "bytes": path.stat().st_size,
        "questions": [symbol(key) for key in questions[0].tolist()],
        "answers": [symbol(values[key]) for key in questions[0].tolist()],
        "from_the_file": restored,
        "without_it": answer(model, questions, model.start(1)),
    }


def load_mac(folder: Path, device: torch.device) -> Model:
    """Load the trained MAC model of the demo."""
    return Model.load(folder / "mac" / "model", device=device).eval()


@torch.no_grad()
def answer(model: Model, questions: Tensor, state: State) -> list[str]:
    """Return the model's answer to each key. Each key is asked separately from the same state."""
    keys = questions.view(-1, 1).to(model.device)
    logits, _ = model(keys, state.rows([0] * len(keys)))
    return [symbol(token) for token in logits[:, -1].argmax(-1).tolist()]


def symbol(token: int) -> str:
    """Return a token as readable text: a letter for a key, a number for a value, a dot for noise."""
    return chr(ord("a") + token) if token < KEYS else str(token - KEYS) if token < 2 * KEYS else "."
