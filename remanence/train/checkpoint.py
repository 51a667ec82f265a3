"""A run's checkpoints: folders that are whole or not there, the last few of them kept. Only safetensors and JSON."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remanence import memfile
from remanence.files import read_json, read_tensors, write_json, write_tensors
from remanence.model import Model, State


class Progress(NamedTuple):
    """Where a run stands: the next step, the tokens read so far, steps skipped in all and in a row."""

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0


def save(
    folder: Path, model: Model, optimizer: torch.optim.Optimizer, progress: Progress, carried: State | None, keep: int
) -> None:
    """Write a checkpoint under a temporary name and rename it; then remove all but the last `keep`."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".*.tmp"):
        shutil.rmtree(left)
    target, temporary = folder / f"{progress.step:08d}", folder / f".{progress.step:08d}.tmp"
    if target.exists():
        return
    try:
        model.save(temporary)
        write_tensors(temporary / "optimizer.safetensors", _moments(model, optimizer), {})
        write_tensors(temporary / "random.safetensors", {"cpu": torch.get_rng_state()}, {})
        if carried is not None:
            memfile.save(temporary / "carried.mem", model, carried)
        write_json(temporary / "progress.json", progress._asdict())
        os.replace(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)


def checkpoints(folder: Path) -> list[Path]:
    """The whole ones, oldest first."""
    return sorted(path for path in folder.glob("[0-9]*") if (path / "progress.json").is_file())


def load(path: Path, model: Model, optimizer: torch.optim.Optimizer) -> tuple[Progress, State | None]:
    """Take a checkpoint up: weights, moments and random numbers in place, and where the run stood."""
    saved = Model.load(path)
    model.load_state_dict(saved.state_dict())
    moments = read_tensors(path / "optimizer.safetensors").tensors
    for name, parameter in model.named_parameters():
        kept = {key.removeprefix(f"{name}:"): tensor for key, tensor in moments.items() if key.startswith(f"{name}:")}
        if kept:
            place = {key: tensor if key == "step" else tensor.to(parameter.device) for key, tensor in kept.items()}
            optimizer.state[parameter] = place
    torch.set_rng_state(read_tensors(path / "random.safetensors").tensors["cpu"])
    carried = memfile.load(path / "carried.mem", model) if (path / "carried.mem").is_file() else None
    return Progress(**read_json(path / "progress.json")), carried


def _moments(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        state: dict[str, Any] = optimizer.state.get(parameter, {})
        named |= {f"{name}:{key}": value for key, value in state.items() if isinstance(value, Tensor)}
    return named
