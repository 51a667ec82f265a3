"""The loop. Everything a step needs is a function of its number or lies in the checkpoint, so a run that was killed goes on as
if it had not been.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remanence.config import known
from remanence.data import Batch, Tokens
from remanence.device import resolve
from remanence.files import read_json, write_json, write_tensors
from remanence.model import Model, State, Trace
from remanence.ops.state import where
from remanence.train import checkpoint
from remanence.train.checkpoint import Progress
from remanence.train.config import TrainConfig
from remanence.train.plots import plot
from remanence.train.sources import SOURCES


class TrainingError(ValueError):
    """A run that could not go on: too many steps in a row had a loss or a gradient that is not finite."""


class Step(NamedTuple):
    """What one step came to."""

    loss: float
    gradient: float
    taken: bool
    tokens: int
    seen: Trace


def fit(
    config: TrainConfig | None,
    out: str | Path,
    *,
    resume: bool = False,
    log: Callable[[dict[str, Any]], None] | None = None,
) -> Model:
    """Train a model in a new folder, or go on in one: ``out`` then holds config.json, metrics (.jsonl, .png), checkpoints, model.

    An existing run is never overwritten. With `resume` the run's own config counts, and `config` may be None. `log` gets each
    line of the metrics. SIGTERM saves a checkpoint and returns.
    """
    out = Path(out)
    config = _config(config, out, resume)
    device = resolve(config.device)
    torch.manual_seed(config.seed)
    model = Model(config.model).to(device).train()
    model.checkpointing = config.checkpointing
    optimizer = make_optimizer(model, config)
    known("data.kind", config.data.kind, SOURCES)
    source = SOURCES[config.data.kind](config, config.batch // config.accumulate, 0, 1)
    if not resume:  # only now: a config that cannot be run leaves nothing behind
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "config.json", config.to_dict())
    progress, carried = Progress(), None
    if found := checkpoint.checkpoints(out / "checkpoints"):
        progress, carried = checkpoint.load(found[-1], model, optimizer)
    metrics = Metrics(out / "metrics.jsonl", progress.step, log)
    with _terminated() as asked, metrics:
        while progress.step < config.steps and not asked:
            batches = [source.step(progress.step * config.accumulate + part) for part in range(config.accumulate)]
            batches = [Batch._make(x.to(device) if isinstance(x, Tensor) else x for x in batch) for batch in batches]
            state = _renewed(model, carried, batches[0]) if config.carry else None
            step = take_step(model, optimizer, config, batches, state, progress.step)
            if config.carry and step.taken:
                carried = step.seen.state.detach()
            in_a_row = 0 if step.taken else progress.skipped_in_a_row + 1
            progress = Progress(progress.step + 1, progress.tokens + step.tokens, progress.skipped + (not step.taken), in_a_row)
            if progress.step % config.log_every == 0 or progress.step == config.steps:
                metrics.write(config, progress, step)
            if in_a_row >= config.patience:
                write_tensors(out / "bad-batch.safetensors", {"tokens": batches[0].tokens, "targets": batches[0].targets}, {})
                raise TrainingError(
                    f"loss: expected finite numbers, got {in_a_row} steps in a row without; see {out}/bad-batch.safetensors"
                )
            if progress.step % config.save_every == 0:
                checkpoint.save(out / "checkpoints", model, optimizer, progress, carried, config.keep)
    checkpoint.save(out / "checkpoints", model, optimizer, progress, carried, config.keep)
    if metrics.written:
        plot(out)
    if progress.step == config.steps:
        model.save(out / "model")
        _save_tokenizer(config, out / "model")
    return model


def export(run: str | Path, out: str | Path) -> Path:
    """A run's model as a folder of its own, for `Model.load` and Hugging Face: the finished one, or its last checkpoint's."""
    run, out = Path(run), Path(out)
    config = _config(None, run, resume=True)
    found = [run / "model"] if (run / "model" / "config.json").is_file() else checkpoint.checkpoints(run / "checkpoints")[-1:]
    if not found:
        raise ValueError(f"run: expected a model or a checkpoint in {run}, got neither")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out: expected a new or empty folder, got {out}, which is not; nothing is ever overwritten")
    Model.load(found[0]).save(out)
    _save_tokenizer(config, out)
    return found[0]


def _save_tokenizer(config: TrainConfig, folder: Path) -> None:
    """The data's tokenizer beside the model: the folder is then all that reading and generating need."""
    if config.data.path is not None:
        Tokens(config.data.path).tokenizer.save(folder)


def _config(config: TrainConfig | None, out: Path, resume: bool) -> TrainConfig:
    """The run's config: the one given if there is room for a new run, or the run's own if it goes on."""
    if resume:
        if not (out / "config.json").is_file():
            raise ValueError(f"out: expected a run to resume, with its config.json, got {out}")
        return TrainConfig.from_dict(read_json(out / "config.json"))
    if config is None:
        raise ValueError("config: expected a TrainConfig for a new run, got None")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out: expected a new or empty folder, got {out}; --resume goes on with a run that is there")
    return config


def make_optimizer(model: Model, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices only: not gains, biases, embeddings' rows of rare tokens, or where a memory begins."""
    decayed = [parameter for name, parameter in model.named_parameters() if name.endswith("proj.weight") or ".ffn." in name]
    kept = {id(parameter) for parameter in decayed}
    others = [parameter for parameter in model.parameters() if id(parameter) not in kept]
    o = config.optimizer
    groups = [{"params": decayed, "weight_decay": o.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=o.lr, betas=o.betas, eps=o.eps, fused=model.embed.weight.is_cuda or None)


def take_step(
    model: Model, optimizer: torch.optim.Optimizer, config: TrainConfig, batches: list[Batch], state: State | None, number: int
) -> Step:
    """Forward and backward of every part, then the update; skipped if the loss or the gradient is not finite."""
    count = sum(int((batch.targets >= 0).sum()) for batch in batches)
    optimizer.zero_grad(set_to_none=True)
    device = batches[0].tokens.device.type
    total = 0.0
    for batch in batches:
        with torch.autocast(device, torch.bfloat16, enabled=config.precision == "bfloat16"):
            seen = model.trace(batch.tokens, state, mask=batch.mask, offsets=batch.offsets)
            asked = batch.targets >= 0
            logits = model.logits(seen.hidden[asked])
            loss = F.cross_entropy(logits.float(), batch.targets[asked], reduction="sum") / max(1, count)
        loss.backward()
        total += float(loss.detach())
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip))
    taken = isfinite(total) and isfinite(norm)
    if taken:
        for group in optimizer.param_groups:
            group["lr"] = config.optimizer.rate(number, config.steps)
        optimizer.step()
    return Step(total, norm, taken, sum(batch.tokens.numel() for batch in batches), seen)


def _renewed(model: Model, carried: State | None, batch: Batch) -> State:
    """The state that rows carry into a step: what they had, or a new one where a document begins."""
    rows = batch.tokens.shape[0]
    if carried is None:
        return model.start(rows)
    if batch.begins is None or not bool(batch.begins.any()):
        return carried
    return where(batch.begins.tolist(), model.start(rows), carried)


class Metrics:
    """One line of JSON for each logged step. Lines beyond the checkpoint a run resumes from are taken back first."""

    def __init__(self, path: Path, step: int, log: Callable[[dict[str, Any]], None] | None) -> None:
        self.path, self.log = path, log
        lines = [line for line in path.read_text().splitlines() if _step_of(line) <= step] if path.exists() else []
        path.write_text("".join(line + "\n" for line in lines))
        self.written = len(lines)
        self.start = time.perf_counter()
        self.before: tuple[float, int] | None = None

    def __enter__(self) -> Metrics:
        self.file = self.path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, config: TrainConfig, progress: Progress, step: Step) -> None:
        now = time.perf_counter()
        first, tokens = self.before or (self.start, progress.tokens - step.tokens)
        line: dict[str, Any] = {
            "step": progress.step,
            "loss": step.loss,
            "lr": config.optimizer.rate(progress.step - 1, config.steps),
            "gradient": step.gradient,
            "tokens": progress.tokens,
            "tokens_per_s": round((progress.tokens - tokens) / max(now - first, 1e-9), 1),
            "skipped": progress.skipped,
            **_memory_facts(step.seen),
        }
        self.before = now, progress.tokens
        line = {name: None if isinstance(value, float) and not isfinite(value) else value for name, value in line.items()}
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        self.written += 1
        if self.log:
            self.log(line)


def _step_of(line: str) -> float:
    """The step a line tells of; a line cut short by a kill belongs to none."""
    try:
        return float(json.loads(line)["step"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return float("inf")


@torch.no_grad()
def _memory_facts(seen: Trace) -> dict[str, float]:
    """Mean surprise and mean gates over layers, heads and tokens."""
    present = [each for each in seen.seen if each is not None]
    if not present:
        return {}
    facts = {"surprise": float(torch.stack([each.surprise.mean() for each in present]).mean())}
    for name, field in (("step_size", "log_step"), ("momentum", "log_momentum"), ("keep", "log_keep")):
        gates = [getattr(each.gates, field) for each in present if getattr(each.gates, field) is not None]
        if gates:
            facts[name] = float(torch.stack([gate.exp().mean() for gate in gates]).mean())
    return facts


@contextmanager
def _terminated() -> Iterator[list[int]]:
    """A list that is no longer empty once SIGTERM has come."""
    asked: list[int] = []
    try:
        before = signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    except ValueError:  # not in the main thread, where signals do not come
        yield asked
        return
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)
