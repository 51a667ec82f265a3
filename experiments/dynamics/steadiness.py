"""Is a memory steady? Three questions, each a small table, all kept in one JSON file.

twins        Two copies, a millionth apart after some reading, read the same text: how far apart are they then?
Untrained, with
             gates and features drawn large, and after some training. Law: at most 1e-5, at any time.
plasticity   A small model learns to keep pairs in rows of 64 tokens. Does it still take in new ones after it has read
much
             else? Law: at least 95 % of what a fresh memory recalls.
capacity     The inner loop alone: pairs written once, then asked for. How many are told from all others, per KiB of
state?

python -m experiments.dynamics.steadiness twins plasticity capacity --text BOOK.txt.xz  # one core is enough
python -m experiments.dynamics.steadiness all --quick                                   # seconds, to see that it runs
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from remanence import Model
from remanence.config import ModelConfig
from remanence.data import Batch
from remanence.layers import Features
from remanence.memory.neural import NeuralMemory
from remanence.model import State, memories
from remanence.ops import MLP, NETS, RULES, Gates, memorize, recall, start
from remanence.tasks.recall import Recall
from remanence.train import DataConfig, TrainConfig
from remanence.train.distributed import ProcessGroup
from remanence.train.initial_state import make_initial_state

Row = dict[str, Any]
APART = 1e-6
KEYS, NOISE = 16, 16


def lmm(dim: int, vocabulary: int, memory: Row, seed: int) -> Model:
    torch.manual_seed(seed)
    shape: Row = {
        "vocab_size": vocabulary,
        "dim": dim,
        "num_layers": 2,
        "heads": 2,
        "segment": memory["chunk"],
        "persistent": 0,
    }
    return Model(ModelConfig(pattern=("lmm",), memory={"heads": 2, **memory}, **shape))


def fit(
    model: Model, batch_of: Callable[[int], Batch], steps: int, rate: float, begin: Any = None
) -> tuple[float, float]:
    """The last steps' mean loss, and the largest gradient norm."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    losses, largest = [], 0.0
    for step in range(steps):
        batch = batch_of(step)
        optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / 30) * (1 - 0.9 * step / steps)
        state = model.start(len(batch.tokens))
        logits, state = model(batch.tokens, state if begin is None else begin.start(state, batch, step))
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100)
        loss.backward()
        largest = max(largest, float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        if begin is not None:
            begin.after_step(state.detach(), batch)
        losses.append(loss.item())
    return sum(losses[-20:]) / max(1, len(losses[-20:])), largest


TWINS: list[tuple[str, int, int, float, str]] = [
    ("deep", 1, 64, -10.0, ""), ("deep", 2, 16, -10.0, "features"), ("deep", 2, 64, -5.0, "features"),
    ("deep", 2, 128, -3.0, "features"), ("deep", 3, 64, -10.0, "features"), ("deep", 4, 64, -10.0, "features"),
    ("deep", 1, 16, -10.0, "gates"), ("deep", 2, 64, -10.0, "features, gates"), ("deep", 3, 128, -5.0, "features, gates"),  # noqa: E501
    ("deep", 4, 16, -3.0, "features, gates"), ("deep", 2, 64, -6.0, "trained"), ("deep", 2, 64, -10.0, "trained"),
    ("titans", 2, 16, -10.0, ""), ("titans", 2, 16, -5.0, ""), ("titans", 2, 64, -5.0, ""), ("titans", 2, 16, -10.0, "gates"),  # noqa: E501
]  # fmt: skip
"""A memory, its depth, chunk and forget bias, and what is changed: features as long as the keys, gates' weights drawn
with a spread of a half (their logits then spread by 5.7 at width 128), or 300 steps of training.
"""


def read_text(path: Path, tokens: int) -> Tensor:
    raw = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    return torch.frombuffer(bytearray(raw * (1 + tokens // len(raw))), dtype=torch.uint8).long()


def draw(model: Model, drawn: str, text: Tensor) -> None:
    chance = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for layer in [module for module in model.modules() if isinstance(module, NeuralMemory)]:
            if "gates" in drawn:
                layer.gates.weight.normal_(0, 0.5, generator=chance)
            for up, down in layer.features.layers if "features" in drawn and layer.features else []:
                up.normal_(0, 2 / math.sqrt(up.shape[1]), generator=chance)
                down.normal_(0, 1 / math.sqrt(down.shape[2]), generator=chance)

    def batch_of(step: int) -> Batch:
        at = torch.randint(0, len(text) - 257, (8, 1), generator=chance) + torch.arange(257)
        return Batch(text[at[:, :-1]], text[at[:, 1:]], None, None, None)

    fit(model, batch_of, 300 if "trained" in drawn else 0, 2e-3)


def apart(state: State) -> float:
    a, b = torch.cat([layer.flatten(1) for memory in memories(state) for layer in memory.weights], 1)
    return float((a - b).norm() / a.norm())


def moved(state: State) -> State:
    """With the memories of the second row a millionth off: of all in a state, they alone have five axes."""
    chance = torch.Generator().manual_seed(1)

    def off(tensor: Tensor) -> Tensor:
        if tensor.dim() < 5:
            return tensor
        noise = torch.randn(tensor[1].shape, generator=chance, dtype=tensor.dtype)
        return torch.stack([tensor[0], tensor[1] + APART * tensor[1].norm() / noise.norm() * noise])

    return state.map(off)


def twins(args: argparse.Namespace, keep: Callable[[Row], None]) -> None:
    marks, dim = ((1024, 2048), 32) if args.quick else ((1024, 4096, 16384, 65536), 128)
    text = read_text(args.text, 2 * marks[-1])
    for name, depth, chunk, forget, drawn in (TWINS[1], TWINS[9], TWINS[12]) if args.quick else TWINS:
        fields = {
            "net": name,
            "depth": depth,
            "chunk": chunk,
            "forget_bias": forget,
            "expansion": 2.0 if name == "titans" else 1.0,
        }
        model = lmm(dim, 256, fields, args.seed)
        draw(model, drawn, text)
        model = model.double()
        state, largest, holds = None, 0.0, True
        row: Row = {
            "memory": name,
            "depth": depth,
            "chunk": chunk,
            "forget": forget,
            "drawn": drawn,
            "seed": args.seed,
        }
        with torch.no_grad():
            for at in range(0, marks[-1] + 1024, 1024):  # the first piece is read alike
                logits, state = model(text[at : at + 1024].expand(2, -1), state)
                if not at:
                    state = moved(state)
                    continue
                states, answers = apart(state), float((logits[0] - logits[1]).norm() / logits[0].norm())
                largest, holds = max(largest, states, answers), holds and max(states, answers) <= 10 * APART
                if at in marks:
                    row |= {f"states {at}": states, f"logits {at}": answers}
        keep({**row, "largest": largest, "holds": holds})


PLASTIC: dict[str, Row] = {
    "deep": {"chunk": 16, "forget_bias": -6.0},
    "matrix": {"depth": 1, "chunk": 16, "forget_bias": -6.0},
    "titans": {"net": "titans", "expansion": 2.0, "chunk": 16, "forget_bias": -10.0},
}
READING = ("noise", "repeated", "random")


def reading(rows: int, length: int, vocabulary: int, chance: torch.Generator) -> Tensor:
    """`rows` rows of each kind: tokens of noise, one token again and again, any tokens."""
    noise = torch.randint(2 * KEYS, vocabulary, (rows, length), generator=chance)
    fixed = torch.randint(0, vocabulary, (rows, 1), generator=torch.Generator().manual_seed(7)).expand(
        rows, length
    )
    return torch.cat([noise, fixed, torch.randint(0, vocabulary, (rows, length), generator=chance)])


@torch.no_grad()
def right(model: Model, task: Recall, number: int, state: State | None) -> float:
    batch = task.step(number)
    asked = batch.targets >= 0
    return float((model(batch.tokens, state)[0].argmax(-1) == batch.targets)[asked].float().mean())


@torch.no_grad()
def after_reading(model: Model, task: Recall, marks: list[int], readings: int, seed: int) -> tuple[Row, Row]:
    """Share right after so many tokens of each kind of reading, and the size of what is held. Past 100,000 tokens, half
    of the readings go on.
    """
    chance = torch.Generator().manual_seed(seed + 5)
    shares, sizes, state, read = {}, {}, model.start(len(READING) * readings), 0
    for mark in marks:
        if mark > 100_000 and readings > 1:
            kept = [kind * readings + i for kind in range(len(READING)) for i in range(readings // 2)]
            state, readings = state.rows(kept), readings // 2
        while read < mark:
            length = min(4096 if mark > 100_000 else 1024, mark - read)
            _, state = model(reading(readings, length, task.vocabulary, chance), state)
            read += length
        for index, kind in enumerate(READING):
            own = state.rows(slice(index * readings, (index + 1) * readings))
            sizes[f"{kind} {mark}"] = (
                float(sum(w.square().sum() for m in memories(own) for w in m.weights) / readings) ** 0.5
            )
            shares[f"{kind} {mark}"] = right(
                model, task, mark, own.rows(torch.arange(task.batch) * readings // task.batch)
            )
    return shares, sizes


def plasticity(args: argparse.Namespace, keep: Callable[[Row], None]) -> None:
    for kind in args.kinds:
        marks = (
            [64, 128]
            if args.quick
            else [n for n in args.reading if n <= (32768 if kind == "titans" else args.reading[-1])]
        )
        for way in args.begins:
            fields = {**PLASTIC[kind], **({} if args.forget is None else {"forget_bias": args.forget})}
            task = Recall(64, 32, 8, 3, args.seed, keys=KEYS, noise=NOISE)
            model = lmm(64, task.vocabulary, fields, args.seed)
            ways = {
                "initial_state": {"passed": "neighbor"}.get(way, way),
                "initial_state_share": args.share,
                "batch": 32,
                "seed": args.seed,
            }
            config = TrainConfig(model=model.config, data=DataConfig(kind="recall"), **ways)
            loss, norm = fit(
                model,
                task.step,
                args.steps,
                3e-3,
                make_initial_state(config, ProcessGroup(torch.device("cpu"))),
            )
            test = Recall(128, 8 if args.quick else 128, 8, 2, args.seed + 1000, keys=KEYS, noise=NOISE)
            fresh = right(model, test, 0, None)
            shares, sizes = after_reading(model, test, marks, 2 if args.quick else 4, args.seed)
            kept = {what: share / max(fresh, 1e-9) for what, share in shares.items()}
            row: Row = {
                "memory": kind,
                "begin": way,
                "share": args.share * (way != "fresh"),
                "forget": fields["forget_bias"],
            }
            row |= {
                "seed": args.seed,
                "steps": args.steps,
                "loss": loss,
                "norm": norm,
                "fresh": fresh,
                **kept,
                "size": sizes,
            }
            keep({**row, "least": min(kept.values()), "holds": min(kept.values()) >= 0.95})


MATRIX = NETS["linear"]
CAPACITY: list[tuple[str, Any, int, int, float]] = [
    ("matrix 64 x 64", MATRIX, 64, 64, 0.0), ("matrix 128 x 64", MATRIX, 128, 64, 0.0),
    ("matrix 128 x 128", MATRIX, 128, 128, 0.0), ("deep 64 x 64, features of length 1", MATRIX, 64, 64, 1.0),
    ("deep 64 x 64, features of length 4", MATRIX, 64, 64, 4.0), ("deep 128 x 128, features of length 1", MATRIX, 128, 128, 1.0),  # noqa: E501
    ("titans 64, expansion 2", MLP(expansion=2.0), 64, 64, 0.0),
]  # fmt: skip
"""A memory, the net that is written, the widths of keys and values, and how long random features are beside the key's
1.
"""


@torch.no_grad()
def written(
    net: MLP, keys: int, values: int, length: float, pairs: int, shared: bool, seed: int
) -> tuple[float, int]:
    """Share of pairs whose nearest value is their own, and bytes of one head's state. As many trials as heads."""
    heads, chance = 32, torch.Generator().manual_seed(seed + pairs)
    k = torch.randn(1, pairs, heads, keys, generator=chance)
    k = F.normalize(k + shared * torch.randn(1, 1, heads, keys, generator=chance), dim=-1)
    v = torch.randn(1, pairs, heads, values, generator=chance)
    if length:
        torch.manual_seed(seed)
        features = Features(heads, keys, keys)
        features.down0.normal_(0, length / math.sqrt(keys), generator=chance)
        k = features(k)
    weights, rule, step = (torch.zeros(heads, keys, values),), RULES["delta"], 0.9
    if not net.linear:
        weights, rule, step = net.init(heads, keys, chance), RULES["titans"], 1 / 21
    full = lambda x: torch.full((1, pairs, heads), math.log(x))
    gates = Gates(full(step), full(0.01) if rule.momentum else None, full(1.0) if rule.forget else None)
    state = start(weights, 1, rule=rule, chunk=32, keys=keys)
    _, state, _ = memorize(k, k, v, gates, state, net=net, rule=rule, chunk=32)
    y = recall(k, state, net=net, rule=rule)
    near = torch.einsum("bihe,bjhe->bhij", F.normalize(y, dim=-1), F.normalize(v, dim=-1)).argmax(-1)
    return float((near == torch.arange(pairs)).float().mean()), sum(
        layer.nbytes for layer in state.layers
    ) // heads


def capacity(args: argparse.Namespace, keep: Callable[[Row], None]) -> None:
    counts = (32, 64) if args.quick else (32, 64, 128, 256)
    for shared in (False, True):
        for name, net, keys, values, length in CAPACITY:
            row: Row = {"memory": name, "keys": "shared" if shared else "random", "seed": args.seed}
            for n in counts:
                share, size = written(net, keys, values, length, n, shared, args.seed)
                row |= {"KiB": size / 1024, f"right of {n}": share, f"per KiB, {n}": share * n * 1024 / size}
            keep(row)


PARTS = {"twins": twins, "plasticity": plasticity, "capacity": capacity}
NAMES = ("memory", "depth", "chunk", "forget", "drawn", "begin", "share", "steps", "keys", "seed")
"""What makes a row the same row."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=[*PARTS, "all"])
    paper = Path(__file__).parents[2] / "docs/paper.md"
    parser.add_argument("--text", type=Path, default=paper, help="what twins read (.xz too)")
    parser.add_argument(
        "--kinds", nargs="+", default=list(PLASTIC), choices=list(PLASTIC), help="memories, for plasticity"
    )
    parser.add_argument(
        "--begins", nargs="+", default=["fresh", "passed"], choices=["fresh", "passed", "noise"]
    )
    parser.add_argument(
        "--share", type=float, default=0.5, help="of the rows, those that do not begin afresh"
    )
    parser.add_argument("--forget", type=float, help="another forget bias, for plasticity")
    parser.add_argument("--steps", type=int, default=400, help="of training, for plasticity")
    parser.add_argument(
        "--reading",
        nargs="+",
        type=int,
        default=[1024, 8192, 32768, 1048576],
        help="tokens (titans: to 32,768)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a run of seconds, whose figures mean nothing")
    parser.add_argument("--out", type=Path, default=Path("steadiness.json"))
    args = parser.parse_args()
    args.steps = 3 if args.quick else args.steps
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    for part in PARTS if "all" in args.parts else args.parts:
        header: list[str] = []

        def keep(row: Row, part: str = part, header: list[str] = header) -> None:
            row = json.loads(json.dumps(row), parse_float=lambda x: float(f"{float(x):.4g}"))
            old = [
                other
                for other in results.get(part, [])
                if any(other.get(name) != row.get(name) for name in NAMES)
            ]
            results[part] = [*old, row]
            args.out.write_text(json.dumps(results).replace('{"memory"', '\n{"memory"') + "\n")
            cells = {
                name: f"{value:.3g}" if isinstance(value, float) else str(value)
                for name, value in row.items()
                if name != "size"
            }
            if not header:
                header += cells
                print(part, " | ".join(cells), sep="\n")
            print(" | ".join(cell.ljust(len(name)) for name, cell in cells.items()), flush=True)

        PARTS[part](args, keep)


if __name__ == "__main__":
    main()
