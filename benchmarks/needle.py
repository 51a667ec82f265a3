"""What an evaluation costs beside reading: one needle against a plain forward of the same tokens, in one process on the
CPU.

python benchmarks/needle.py --length 65536 --variants lmm mag mac

The needle's time is all of it: the text is made, read, answered in 128 tokens, and ten values are weighed. The forward
is without gradient on the tokens that were read: as one call, and in pieces with the state carried, as evaluations
read. Each is the middle of so many rounds, measured in turn; the first is not counted. The model is untrained.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from remanence import Model, preset
from remanence.evaluate import TASKS, Subject, configured
from remanence.inference.reader import PIECE
from remanence.tokenizers.tokens import ByteTokenizer


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


@torch.no_grad()
def measured(name: str, variant: str, length: int, rounds: int) -> list[float]:
    """Seconds of the evaluation, of the forward, and of the forward in pieces."""
    torch.manual_seed(0)
    model = Model(preset(name, variant)).eval()
    subject = Subject(torch.device("cpu"), network=model, tokens=ByteTokenizer(), source=Path(variant))
    task = TASKS["niah"](
        subject, configured(TASKS["niah"], {"kinds": "pk", "lengths": str(length), "depths": "0.5"})
    )
    ((unit, *_),) = task.units()
    sample = task.sample(unit)  # type: ignore[attr-defined]
    read = [*sample.text.tolist(), *subject.tokenizer.encode(sample.prompt)]
    tokens = torch.tensor([read])
    assert tokens.shape == (1, length)

    def pieces() -> None:
        state = None
        for part in tokens.split(PIECE, 1):
            _, state = model(part, state)

    works = (lambda: task.measure([unit]), lambda: model(tokens), pieces)
    times = [[seconds(work) for work in works] for _ in range(rounds + 1)][1:]
    return [median(own) for own in zip(*times, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--variants", nargs="+", default=["lmm", "mag", "mac"])
    parser.add_argument("--length", type=int, default=65536)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    columns = ("variant", "needle, s", "forward, s", "ratio", "in pieces, s", "ratio")
    table = Table(*columns, title=f"{given.preset}, {given.length:,} tokens")
    for variant in given.variants:
        needle, *others = measured(given.preset, variant, given.length, given.rounds)
        ratios = [cell for own in others for cell in (f"{own:.2f}", f"{needle / own:.3f}")]
        table.add_row(variant, f"{needle:.2f}", *ratios)
    Console().print(table)


if __name__ == "__main__":
    main()
