"""Does a variant learn to recall, and how far? Eight pairs at the start, noise, the same keys at the end in another
order; the window and the segment are 16 tokens, training is at 64, evaluation at lengths up to 4,096. One line per run.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

from remanence import Model, ModelConfig
from remanence.runtime.device import resolve

PAIRS, KEYS, NOISE = 8, 32, 16


def batch(rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Keys 0-31, values 32-63, noise 64-79; targets are the values where a key is asked, -100 elsewhere."""
    tokens = torch.randint(2 * KEYS, 2 * KEYS + NOISE, (rows, length))
    keys = torch.rand(rows, KEYS).argsort(1)[:, :PAIRS]
    values = torch.randint(KEYS, 2 * KEYS, (rows, PAIRS))
    order = torch.rand(rows, PAIRS).argsort(1)
    tokens[:, 0 : 2 * PAIRS : 2], tokens[:, 1 : 2 * PAIRS : 2] = keys, values
    asked = length - 2 * PAIRS
    tokens[:, asked::2], tokens[:, asked + 1 :: 2] = keys.gather(1, order), values.gather(1, order)
    targets = torch.full_like(tokens, -100)
    targets[:, asked::2] = tokens[:, asked + 1 :: 2]
    return tokens, targets


def right(logits: Tensor, targets: Tensor) -> float:
    asked = targets >= 0
    return float((logits.argmax(-1)[asked] == targets[asked]).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variant", default="mac")
    parser.add_argument("--forget", type=float, default=-10.0, help="bias of the forget gate")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    torch.set_default_device(resolve(options.device))
    torch.manual_seed(options.seed)
    memory = {"net": "titans", "heads": 2, "expansion": 2.0, "forget_bias": options.forget}
    shape = {
        "vocabulary": 2 * KEYS + NOISE,
        "dim": 64,
        "depth": 2,
        "heads": 2,
        "window": 16,
        "segment": 16,
        "persistent": 4,
    }
    model = Model(ModelConfig(pattern=(options.variant,), memory=memory, **shape))  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.01)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, total_iters=50)
    start, largest, learnt = time.perf_counter(), 0.0, None
    for step in range(1, options.steps + 1):
        tokens, targets = batch(32, 64)
        logits, _ = model(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        largest = max(largest, float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        warm.step()
        if learnt is None and step % 25 == 0 and right(logits, targets) > 0.9:
            learnt = step
    with torch.no_grad():
        found = {
            length: right(model(tokens)[0], targets)
            for length in (64, 256, 1024, 4096)
            for tokens, targets in [batch(16, length)]
        }
    share = ", ".join(f"{value:.2f} at {length}" for length, value in found.items())
    took = time.perf_counter() - start
    print(
        f"{options.variant} forget {options.forget:g} seed {options.seed}: 90 % after {learnt} steps; {share}; ",
        end="",
    )
    print(f"largest gradient {largest:.1f}; {took:.0f} s")


if __name__ == "__main__":
    main()
