"""The metrics of a run: one line of JSON for every logged step, which is also sent to the trackers in the
config.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Protocol
from uuid import uuid4

import torch

from remanence.io.files import replacing
from remanence.memory.components import CLOSED_LOG_GATE
from remanence.model import Trace
from remanence.runtime.choices import check_choice
from remanence.runtime.errors import first_line
from remanence.train.checkpoint import Progress
from remanence.train.config import TrainConfig
from remanence.train.engine import Step
from remanence.train.plan import flops_per_token, peak

Line = dict[str, float | None]
"""The metrics of a logged step by name; None for a value that is not finite."""


class Tracker(Protocol):
    """A destination of metrics in addition to metrics.jsonl."""

    def write(self, line: Line) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Writes metrics for TensorBoard to the folder `tensorboard` of the run."""

    def __init__(self, out: Path, config: Mapping[str, object], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Hide the steps after the checkpoint that the run resumes from.
        self.writer = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)
        self.writer.add_text("config", f"```json\n{json.dumps(config, indent=2)}\n```")

    def write(self, line: Line) -> None:
        for name, value in line.items():
            if name != "step" and value is not None:
                self.writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        self.writer.close()


class WandB:
    """Sends metrics to Weights & Biases.

    A resumed run continues its curves, since its id is in the run's folder.
    """

    def __init__(self, out: Path, config: Mapping[str, object], step: int) -> None:
        import wandb  # type: ignore[import-not-found, unused-ignore]

        own = {"name": out.name, "dir": str(out), "id": _identity(out)}
        self.run = wandb.init(project="remanence", config=config, resume="allow", **own)

    def write(self, line: Line) -> None:
        self.run.log({name: value for name, value in line.items() if value is not None}, step=line["step"])

    def close(self) -> None:
        self.run.finish()


def _identity(out: Path) -> str:
    """Return the id of the run for Weights & Biases, stored in the run's folder."""
    path = out / "wandb-id.txt"
    if not path.is_file():
        path.write_text(uuid4().hex[:16], encoding="utf-8")
    return path.read_text(encoding="utf-8")


TRACKERS: dict[str, Callable[[Path, Mapping[str, object], int], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
}
"""The classes of trackers by name. They are called with the run folder, the config and the current step."""


def _tracker(name: str, out: Path, config: Mapping[str, object], step: int) -> Tracker:
    """Start a tracker; any failure becomes a ValueError of one line."""
    try:
        return TRACKERS[name](out, config, step)
    except Exception as error:  # for example no login or no network
        raise ValueError(f"trackers: {name!r} could not be started ({first_line(error)})") from None


def check_trackers(names: tuple[str, ...]) -> None:
    """Raise an error if a tracker is unknown or not installed."""
    for name in names:
        check_choice("trackers", name, TRACKERS)
        found = find_spec(name)
        if (
            found is None or found.origin is None
        ):  # a folder of that name, such as wandb's logs, is not the package
            raise ValueError(
                f"trackers: {name!r} needs the extra of that name; pip install 'remanence[{name}]'"
            )


class Metrics:
    """Writes ``metrics.jsonl``. Lines after the checkpoint that a run resumes from are removed first."""

    def __init__(
        self,
        out: Path,
        config: TrainConfig,
        progress: Progress,
        log: Callable[[Line], None] | None,
        device: torch.device,
    ) -> None:
        self.path, self.config, self.log, self.device = out / "metrics.jsonl", config, log, device
        self.trackers = [_tracker(name, out, config.to_dict(), progress.step) for name in config.trackers]
        text = self.path.read_text(encoding="utf-8", errors="replace") if self.path.exists() else ""
        found = text.splitlines()
        lines = [line for line in found if _step_of(line) <= progress.step]
        with replacing(self.path) as temporary:
            temporary.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        self.written = len(lines)
        self.before = time.perf_counter(), progress.tokens
        causal = config.data.causal_lm  # otherwise config.model describes only a part of the model
        self.flops = flops_per_token(config.model, config.data.length) if causal else None

    def __enter__(self) -> Metrics:
        self.file = self.path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as ends:
            for tracker in self.trackers:
                ends.callback(tracker.close)
            ends.callback(self.file.close)

    def flush(self) -> None:
        """Sync the file to disk.

        Called before a checkpoint is written, which must not be newer than the metrics.
        """
        os.fsync(self.file.fileno())

    def write(
        self, progress: Progress, step: Step, world_size: int, clamped: int, validation: float | None = None
    ) -> None:
        """Write a line of metrics.

        `clamped` is how many memory gradients all processes have clipped since the last line. `validation` is
        the validation loss, or None if the step was not validated.
        """
        now = time.perf_counter()
        first, tokens = self.before
        rate = (progress.tokens - tokens) / max(now - first, 1e-9)
        line: Line = {
            "step": progress.step,
            "loss": step.loss,
            "lr": self.config.optimizer.rate(progress.step - 1, self.config.steps),
            "gradient": step.gradient,
            "tokens": progress.tokens,
            "tokens_per_s": round(rate, 1),
            "skipped": progress.skipped,
            "clamped": clamped,
            "memory_gib": round(memory_in_use(self.device) / 2**30, 3),
            **memory_facts(step.trace),
        }
        if step.answers is not None:
            line["answers"] = step.answers
        if validation is not None:
            line["validation"] = validation
        if self.flops is not None and (most := peak(self.device)) is not None:
            line["mfu"] = round(rate * self.flops / (most * world_size), 4)
        self.before = now, progress.tokens
        bad = [name for name, value in line.items() if isinstance(value, float) and not isfinite(value)]
        line.update(dict.fromkeys(bad))
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        self.written += 1
        for tracker in self.trackers:
            tracker.write(line)
        if self.log:
            self.log(line)


def _step_of(line: str) -> float:
    """Return the step of a line, or infinity if the line is incomplete because the run was killed."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return float("inf")


def memory_in_use(device: torch.device) -> int:
    """Return the peak memory use so far in bytes: of the GPU, or of this process. 0 if unknown (Windows)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


@torch.no_grad()
def memory_facts(seen: Trace) -> dict[str, float]:
    """Return the mean surprise, the mean gates and the fraction of tokens written, over layers, heads and
    tokens.

    Empty if the model has no neural memory.
    """
    present = [each for each in seen.traces if each is not None]
    if not present:
        return {}
    facts = {"surprise": float(torch.stack([each.surprise.mean() for each in present]).mean())}
    for name, field in (("step_size", "log_step"), ("momentum", "log_momentum"), ("keep", "log_keep")):
        gates = [getattr(each.gates, field) for each in present if getattr(each.gates, field) is not None]
        if gates:
            facts[name] = float(torch.stack([gate.exp().mean() for gate in gates]).mean())
    written = [(each.gates.log_step > CLOSED_LOG_GATE).float().mean() for each in present]
    if (share := float(torch.stack(written).mean())) < 1:  # only logged if some tokens are not written
        facts["written"] = share
    return facts
