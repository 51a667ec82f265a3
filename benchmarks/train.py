"""What the training loop costs beside the model: `remanence.train.fit` against the same steps in a bare hand-written
loop.

python benchmarks/train.py [--variant mac] [--steps 40] [--device cuda]

Both sides run in one process, taking turns; the ratio is of the medians over the turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from remanence import Model
from remanence.config import preset
from remanence.runtime.device import resolve
from remanence.train import DataConfig, TrainConfig, fit
from remanence.train.engine import make_optimizer
from remanence.train.sources import SOURCES


def bare(config: TrainConfig, device: torch.device) -> float:
    """What anyone would write: no log, no checkpoint, no look at what is finite. Seconds per step, after the
    first two.
    """
    torch.manual_seed(config.seed)
    model = Model(config.model).to(device).train()
    optimizer = make_optimizer(model, config)
    source = SOURCES[config.data.kind](config, config.batch, 0, 1)
    for number in range(config.steps):
        if number == 2:
            begun = now(device)
        batch = source.step(number)
        tokens, targets = batch.tokens.to(device), batch.targets.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bfloat16"):
            hidden = model.trace(tokens).hidden
            asked = targets >= 0
            loss = F.cross_entropy(model.logits(hidden[asked]).float(), targets[asked])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip)
        for group in optimizer.param_groups:
            group["lr"] = config.optimizer.rate(number, config.steps)
        optimizer.step()
    return (now(device) - begun) / (config.steps - 2)


def ours(config: TrainConfig, device: torch.device) -> float:
    """The same through `fit`, with its log; what happens once (folders, the last checkpoint) is not a step's."""
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        fit(config, Path(folder) / "run", log=lambda line: times.append(now(device)))
    return (times[-1] - times[1]) / (config.steps - 2)


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variant", nargs="+", default=["attention", "lmm", "mac"])
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    device = resolve(given.device)
    for variant in given.variant:
        config = TrainConfig(
            model=preset(given.preset, variant),
            data=DataConfig(kind="recall", length=given.length, pairs=16),
            steps=given.steps,
            batch=given.batch,
            log_every=1,
            save_every=10**6,
            precision="bfloat16" if device.type == "cuda" else "float32",
            device=given.device,
        )
        pairs = [(bare(config, device), ours(config, device)) for _ in range(given.turns)]
        plain, full = (statistics.median(side) for side in zip(*pairs, strict=True))
        each = statistics.median(b / a for a, b in pairs)
        times = f"bare {1e3 * plain:.1f} ms, fit {1e3 * full:.1f} ms a step"
        print(f"{variant}: {times}, ratio {full / plain:.3f}, of pairs {each:.3f}", flush=True)


if __name__ == "__main__":
    main()
