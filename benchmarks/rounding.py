"""How much of float32's rounding is left in the logits after a thousand tokens: a memory whose dynamics are chaotic
turns the last bit into noise. Untrained models, float32 against float64 copies of the same weights, for several biases
of the forget gate.
"""

from __future__ import annotations

import argparse
import copy

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from remanence import Model, preset


@torch.no_grad()
def error(variant: str, depth: int, tokens: int, seed: int, **memory: float) -> float:
    """Spread of the difference over the last hundred tokens, relative to the spread of the logits."""
    torch.manual_seed(seed)
    exact = (
        Model(preset("small", variant, depth=depth, memory={"net": "titans", "expansion": 2.0, **memory}))
        .double()
        .eval()
    )
    text = torch.randint(257, (1, tokens))
    truth, _ = exact(text)
    rounded, _ = copy.deepcopy(exact).float()(text)
    return float((rounded.double() - truth)[:, -100:].std() / truth.std())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", nargs="+", default=["lmm", "mag", "mac"])
    parser.add_argument("--forget", nargs="+", type=float, default=[-3, -5, -8, -10, -12])
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    table = Table(
        "forget_bias",
        *options.variants,
        title=f"float32 against float64, {options.depth} layers, {options.tokens} tokens",
    )
    for bias in track(options.forget, "running"):
        cells = [
            " ".join(
                f"{error(v, options.depth, options.tokens, s, forget_bias=bias):.0e}"
                for s in range(options.seeds)
            )
            for v in options.variants
        ]
        table.add_row(f"{bias:g}", *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
