"""The laws on this machine: what every architecture promises, in every dtype, as numbers. Writes a table and JSON.

    python benchmarks/laws.py --out experiments/laws/cpu.json
    python benchmarks/laws.py --device cuda --out experiments/laws/cuda.json

Two promises hold to the bit and are counts of numbers that differ: a token changes nothing before it (causality), and a
memory that was saved and loaded is the one that was saved. The others are the same sum in another order: the largest
difference, as a share of the largest logit. `rounding` is that of the whole text from float64, the yardstick: what a
dtype costs by itself.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import remanence
from remanence import Model, preset
from remanence.inference import memfile
from remanence.inference.decoder import Decoder, unsupported
from remanence.mixers import MIXERS

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
LAWS = ("rounding", "causality", "saved", "cut", "rows", "packed", "padded", "decoded")


def far(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())


@torch.no_grad()
def measure(
    variant: str, dtype: torch.dtype, device: str, length: int, draws: int
) -> dict[str, float | None]:
    """The worst of several draws of tokens and cuts."""
    worst: dict[str, float | None] = {}
    for seed in range(draws):
        torch.manual_seed(seed)
        exact = Model(preset("tiny", variant, window=32, segment=64, knn={"size": 128, "k": 8})).double()
        exact = exact.to(device).eval()
        model = Model(exact.config).to(device).eval()
        model.load_state_dict(exact.state_dict())
        model = model.to(dtype)
        tokens = torch.randint(256, (3, length), device=device)
        for law, value in once(model, exact, tokens).items():
            before = worst.get(law)
            worst[law] = value if before is None or value is None else max(before, value)
    return worst


def once(model: Model, exact: Model, tokens: Tensor) -> dict[str, float | None]:
    rows, length = tokens.shape
    whole, state = model(tokens)
    found: dict[str, float | None] = {"rounding": far(whole, exact(tokens)[0])}
    place = int(torch.randint(1, length, ()))
    changed = tokens.clone()
    changed[:, place] = (changed[:, place] + 1) % 256
    found["causality"] = float((model(changed)[0][:, :place] != whole[:, :place]).sum())
    with tempfile.TemporaryDirectory() as folder:
        one = state.rows(0)
        memfile.save(Path(folder) / "a.mem", model, one)
        loaded = memfile.load(Path(folder) / "a.mem", model)
    pairs = zip(loaded.tensors(), one.tensors(), strict=True)
    found["saved"] = float(sum(int((a != b).sum()) for a, b in pairs))
    carried, pieces = None, []
    for piece in tokens.split([1, 6, place % 40 + 1, length - 8 - place % 40], 1):
        logits, carried = model(piece, carried)
        pieces.append(logits)
    found["cut"] = far(torch.cat(pieces, 1), whole)
    found["rows"] = max(far(model(tokens[row : row + 1])[0], whole[row : row + 1]) for row in range(rows))
    packed, _ = model(tokens.flatten().unsqueeze(0), offsets=[row * length for row in range(rows + 1)])
    found["packed"] = far(packed.view_as(whole), whole)
    before = torch.cat([torch.zeros_like(tokens[:, :5]), tokens], 1)
    mask = (torch.arange(length + 5, device=tokens.device) >= 5).expand(rows, -1)
    found["padded"] = far(model(before, mask=mask)[0][:, 5:], whole)
    found["decoded"] = decoded(model, tokens, whole)
    return found


def decoded(model: Model, tokens: Tensor, whole: Tensor) -> float | None:
    """Half of the text read at once, the rest token by token, in place where the architecture can."""
    half = tokens.shape[1] // 2
    _, state = model(tokens[:, :half])
    if unsupported(model) is not None:
        return None
    decoder = Decoder(model, state)
    steps = [decoder.step(tokens[:, index]) for index in range(half, tokens.shape[1])]
    return far(torch.stack(steps, 1), whole[:, half:])


def shown(law: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if law in ("causality", "saved") else f"{value:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--length", type=int, default=200)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--variants", nargs="+", default=list(MIXERS))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    gpu = given.device == "cuda"
    machine = torch.cuda.get_device_name() if gpu else platform.machine()
    about = {"device": given.device, "machine": machine, "torch": torch.__version__}
    about |= {"remanence": remanence.__version__, "length": given.length, "draws": given.draws}
    table = Table(title=f"{given.device}, torch {torch.__version__}, {given.draws} x {given.length} tokens")
    for column in ("architecture", "dtype", *LAWS):
        table.add_column(column, no_wrap=True)
    rows = []
    for variant in given.variants:
        for name, dtype in DTYPES.items():
            found = measure(variant, dtype, given.device, given.length, given.draws)
            rows.append({"variant": variant, "dtype": name, **found})
            table.add_row(variant, name, *(shown(law, found[law]) for law in LAWS))
    Console(width=150).print(table)
    if given.out is not None:
        given.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
