"""What a kNN store is worth: pairs told far beyond the window, then asked.

    python -m experiments.knn.lookup [--fuse gate joint] [--steps 900] [--seeds 0 1] [--out lookup.json]

A model of two layers, a window of 16 tokens and a kNN store in the second, is trained on texts of 32 and 64 tokens that
tell pairs and ask for them again, and then asked in texts of up to 1,040. Pairs that come back within the window teach
it what to store, since no gradient reaches a store. The same weights are also asked with int8 keys and values. Then,
with the same weights and texts of frequent filler and rare names, what small stores of equal size hold by each policy:
all tokens (the newest), the rarest of every window, or random ones.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table

from remanence import Model, ModelConfig
from remanence.config import change
from remanence.data import Batch
from remanence.io.files import write_json
from remanence.memory.policies import unigrams
from remanence.tasks.recall import Recall

WINDOW, PAIRS, ROWS = 16, 8, 32
TIMES = (1, 2, 4, 8, 16, 32, 64)
STORES = (32, 64, 128)
FRACTION = 0.125


def told(distance: int, seed: int) -> Recall:
    return Recall(distance + 2 * PAIRS, ROWS, PAIRS, 2, seed)


def trained(fuse: str, steps: int, seed: int) -> Model:
    torch.manual_seed(seed)
    model = Model(
        ModelConfig(
            vocab_size=80, dim=64, num_layers=2, heads=2, pattern=("window", "knn"), window=WINDOW, segment=WINDOW, persistent=4,  # noqa: E501
            knn={"k": 8, "size": 2048, "fuse": fuse},
        )
    ).train()  # fmt: skip
    near, far = Recall(32, ROWS, 2, 8, seed), told(4 * WINDOW - 2 * PAIRS, seed + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    for step in track(range(steps), f"{fuse}, seed {seed}", console=Console(stderr=True)):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 50) * min(1.0, 0.05 + (steps - step) / (0.5 * steps))
        batch = (near if step % 4 else far).step(step)
        asked = batch.targets != -100
        loss = F.cross_entropy(model(batch.tokens)[0][asked], batch.targets[asked])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


@torch.no_grad()
def right(model: Model, batches: list[Batch], mode: str = "on") -> float:
    found = []
    for batch in batches:
        asked = batch.targets != -100
        found.append(
            (model(batch.tokens, memory_mode=mode)[0].argmax(-1)[asked] == batch.targets[asked])
            .float()
            .mean()
        )
    return float(torch.stack(found).mean())


def with_store(model: Model, knn: dict[str, object]) -> Model:
    """The same weights with another store."""
    other = Model(change(model.config, {"knn": knn})).eval()
    other.load_state_dict(model.state_dict(), strict=False)
    return other


def kept_by(model: Model, policy: str, size: int, table: torch.Tensor) -> Model:
    """The same weights with a store that a policy writes to."""
    fraction = 1.0 if policy == "all" else FRACTION
    other = with_store(model, {"write": policy, "size": size, "fraction": fraction})
    if other.log_unigrams is not None:
        other.log_unigrams.copy_(table)
    return other


def names(tokens: int, seed: int, count: int) -> list[Batch]:
    """Filler whose kinds are as frequent as a text's words (1 / rank), and in it eight pairs of rare tokens, told
    anywhere in the first half and asked at the end.
    """
    chance = np.random.default_rng(seed)
    weight = 1.0 / np.arange(1, 17)
    batches = []
    for _ in range(count):
        text = 64 + chance.choice(16, (ROWS, tokens), p=weight / weight.sum())
        targets = np.full_like(text, -100)
        for row in range(ROWS):
            keys, values = chance.permutation(32)[:PAIRS], 32 + chance.integers(0, 32, PAIRS)
            places = 2 * chance.permutation(tokens // 4)[:PAIRS]
            text[row, places], text[row, places + 1] = keys, values
            order = chance.permutation(PAIRS)
            end = tokens - 2 * PAIRS
            text[row, end::2], text[row, end + 1 :: 2] = keys[order], values[order]
            targets[row, end::2] = values[order]
        batches.append(Batch(torch.from_numpy(text), torch.from_numpy(targets), None, None, None))
    return batches


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fuse", nargs="+", choices=("gate", "joint"), default=["gate", "joint"])
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("lookup.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    reach = Table(
        title=f"right answers, {options.batches * ROWS * PAIRS:,} questions each; 1 in 32 is chance"
    )
    for column in ("fuse", "seed", "store", *[f"{times} x" for times in TIMES], "training s"):
        reach.add_column(column, justify="right")
    small = Table(
        title="rare names in 512 tokens of frequent filler, by what a store of so many entries keeps"
    )
    for column in ("fuse", "seed", "policy", *[f"{size:,}" for size in STORES]):
        small.add_column(column, justify="right")
    rows = []
    for fuse in options.fuse:
        for seed in options.seeds:
            begin = time.perf_counter()
            model = trained(fuse, options.steps, seed)
            took = time.perf_counter() - begin
            case = {"fuse": fuse, "seed": seed, "steps": options.steps, "training_s": round(took, 1)}
            rounded = with_store(model, {"store_dtype": "int8"})
            for name, asked, mode in (("on", model, "on"), ("int8", rounded, "on"), ("off", model, "off")):
                tasks = [told(times * WINDOW, 999) for times in TIMES]
                found = [right(asked, [task.step(i) for i in range(options.batches)], mode) for task in tasks]
                rows.append({**case, "store": name, "right": dict(zip(map(str, TIMES), found, strict=True))})
                reach.add_row(
                    fuse, str(seed), name, *[f"{x:.1%}" for x in found], f"{took:.0f}" if name == "on" else ""
                )
            texts = names(512, 7, options.batches)
            table = unigrams((batch.tokens for batch in names(512, 8, 4)), model.config.vocab_size)
            for policy in ("all", "random", "rare"):
                found = [right(kept_by(model, policy, size, table), texts) for size in STORES]
                rows.append(
                    {**case, "policy": policy, "right": dict(zip(map(str, STORES), found, strict=True))}
                )
                small.add_row(fuse, str(seed), policy, *[f"{x:.1%}" for x in found])
    console = Console(width=120)
    console.print(reach)
    console.print(small)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(
        options.out, {"torch": torch.__version__, "window": WINDOW, "rows": json.loads(json.dumps(rows))}
    )


if __name__ == "__main__":
    main()
