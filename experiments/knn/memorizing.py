"""Memorizing Transformers' results in small: what does a kNN store add, by its size, and to which words?

    python -m experiments.knn.memorizing BOOKS --corpora books python --trained 0 2048 8192 --out rows.json
    python -m experiments.knn.memorizing BOOKS --out all.json --merge rows.json more.json --table --plot memorizing.png

Byte models of sliding windows with one kNN layer, trained with a store of one size and tested with others: the weights
do not depend on it. Some are then tuned for a few steps with a larger store, beside the same steps with their own
(--tuned FROM:TO). The corpora are books (a folder of ``*.txt.xz`` with an ``index.json``) and the modules of the Python
that runs this. Bits are also given by how often a byte's word stands in the training texts, and by whether the stream
has had the word before: not yet, within the window, or farther back, where only the store can have it. The table prints
the paper's numbers beside these.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import re
import sys
import sysconfig
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.shared import (
    Clock,
    Row,
    Rows,
    Training,
    add_arguments,
    by_octave,
    comparable,
    load,
    machine,
    mean_and_error,
    octaves,
    read,
    release,
    rounded,
    streams,
    table_row,
    table_rule,
)
from remanence import Model, ModelConfig
from remanence.config import change, memorizing
from remanence.model import matched

WORDS = {"books": rb"[A-Za-z]+", "python": rb"[A-Za-z_][A-Za-z0-9_]*"}
EDGES = (1, 10, 100, 1000, 10000)
RARITY = ("never", "1 to 9", "10 to 99", "100 to 999", "1K to 10K", "10K and more")
"""Bins of how often a word stands in the training texts."""
BEFORE = ("first", "within the window", "farther back")

PAPER = {
    "books": {"none": 12.34, 8192: 11.93, 65536: 11.62, "from": "PG-19, table 4"},
    "python": {"none": 2.26, 8192: 2.03, 65536: 1.87, "from": "GitHub, table 4"},
}
"""Perplexity of a token of Memorizing Transformers: context 512, a cache of 512, trained with the store tested."""
PAPER_TUNED = (2.37, 2.32, "arXiv, table 5")
"""Trained with a store of 8K; and tuned to 65K."""

TINY = {
    "dim": 64, "depth": 2, "window": 64, "persistent": 16, "rows": 2, "piece": 256, "steps": 4, "tune_steps": 2,
    "length": 2048, "python_length": 2048, "streams": 2, "reading": 512, "trained": [0, 128, 256],
    "tested": [0, 128, 256, 1024], "tuned": ["128:128", "128:1024", "0:0", "0:256"],
}  # fmt: skip

# Corpora


def python_library(root: Path | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """The modules of Python's own library, without tests and without tables (encodings, pydoc's topics): those that are
    trained on and those held out, by a hash of their paths; each package is one text, its files in order.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"}
    packages: list[dict[str, bytes]] = [{}, {}]
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if left_out.isdisjoint(name.parts):
            held_out = int(hashlib.sha256(name.as_posix().encode()).hexdigest()[:8], 16) % 5 == 0
            package = name.parts[0] if len(name.parts) > 1 else ""
            texts = packages[held_out]
            texts[package] = texts.get(package, b"") + path.read_bytes()
    train, held = (
        [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts.values() if text]
        for texts in packages
    )
    return train, held


def corpus_of(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Training texts, held-out streams, and the class of each of the streams' bytes."""
    if name == "books":
        train, held = load(args.books, "train"), [book for s in args.splits for book in load(args.books, s)]
    else:
        train, held = python_library()
    length = args.length if name == "books" else args.python_length
    train = [text for text in train if len(text) > args.piece + 3]
    x = streams(held, length, args.streams)
    pattern = re.compile(WORDS[name])
    counts = Counter(word for text in train for word in pattern.findall(text.numpy().tobytes()))
    classes = torch.stack([classes_of(row, pattern, counts, args.window) for row in x])
    return {"train": train, "x": x, "classes": classes, "length": length}


def classes_of(x: Tensor, pattern: re.Pattern[bytes], counts: Counter[bytes], window: int) -> Tensor:
    """Of every byte but the first, the class of its word: 3 x its rarity + whether it stood before; the last class is
    that of bytes that belong to no word.
    """
    found = torch.full((len(x),), len(RARITY) * len(BEFORE))
    last: dict[bytes, int] = {}
    for match in pattern.finditer(x.numpy().tobytes()):
        word = match.group()
        rarity = sum(counts[word] >= edge for edge in EDGES)
        before = 0 if word not in last else 1 if match.start() - last[word] < window else 2
        found[match.start() : match.end()] = rarity * len(BEFORE) + before
        last[word] = match.start()
    return found[1:]


def by_class(values: Tensor, classes: Tensor) -> Tensor:
    """Sums over each stream's bytes of a class ``[r classes]``."""
    sums = torch.zeros(len(classes), len(RARITY) * len(BEFORE) + 1, dtype=torch.float64)
    return sums.scatter_add(1, classes, values.double())


# Runs


def model_of(store: int, args: argparse.Namespace, device: torch.device, weights: Any = None) -> Model:
    config = ModelConfig(
        vocab_size=256, dim=args.dim, num_layers=args.depth, heads=max(1, args.dim // 64), window=args.window,
        persistent=args.persistent, pattern=memorizing(args.depth),
    )  # fmt: skip
    model = Model(change(matched(config), {"knn": {"k": args.k, "size": store, "fuse": args.fuse}})).to(
        device
    )
    if weights is not None:
        model.load_state_dict(weights)  # strictly: a store has no parameters
    return model


def train(
    model: Model, corpus: dict[str, Any], steps: int, lr: float, seed: int, args: argparse.Namespace
) -> Row:
    clock = Clock(model.device)
    training = Training(
        model, corpus["train"], rows=args.rows, length=args.piece, steps=steps, lr=lr, seed=seed
    )
    losses, norms = training.run()
    model.zero_grad(set_to_none=True)
    every = max(1, len(losses) // 40)
    return {
        "parameters": sum(p.numel() for p in model.parameters()), "bytes": len(losses) * args.rows * args.piece,
        "finished": len(losses) == steps, "train": round(losses[-50:].mean().item(), 4),
        "curve": rounded(losses.unfold(0, every, every).mean(1), 3), "norm": round(norms.max().item(), 3),
        "gates": [rounded(m.gate.detach().sigmoid(), 3) for m in model.mixers if getattr(m, "gate", None) is not None],
        "train_seconds": clock(),
    }  # fmt: skip


def test(weights: Any, corpus: dict[str, Any], args: argparse.Namespace, device: torch.device) -> Row:
    """Bits with every store, by octave and by class of word."""
    clock = Clock(device)
    x, classes, length = corpus["x"], corpus["classes"], corpus["length"]
    bits, sums, seconds = {}, {}, {}
    for store in tested(args, length):
        model = model_of(store, args, device, weights)
        found = read(model, x.to(device), args.reading)
        bits[str(store)] = rounded(by_octave(found))
        sums[str(store)] = rounded(by_class(found, classes), 2)
        seconds[str(store)] = clock()
        del model
        release()
    counts = by_class(torch.ones(classes.shape), classes).long().tolist()
    ends = [last for _, last in octaves(length)]
    return {"octaves": ends, "bits": bits, "sums": sums, "counts": counts, "test_seconds": seconds}


def tested(args: argparse.Namespace, length: int) -> list[int]:
    """Stores up to the first that holds a whole stream: larger ones are the same."""
    stores = sorted(args.tested)
    return [s for i, s in enumerate(stores) if i == 0 or stores[i - 1] < length]


def run(
    corpus: dict[str, Any], whats: list[Row], rows: Rows, args: argparse.Namespace, device: torch.device
) -> None:
    """Train with one store and test; then tune the same weights with others. Only what is not in the file is tested."""
    base = whats[0]
    torch.manual_seed(base["seed"])
    model = model_of(base["trained"], args, device)
    done = train(model, corpus, args.steps, base["lr"], base["seed"], args)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for what in whats:
        if rows.has(what):
            continue
        here, after = done, weights
        if what["tuned"] is not None:
            model = model_of(what["tuned"], args, device, weights)
            here = train(model, corpus, args.tune_steps, args.tune_lr, base["seed"] + 1000, args)
            after = model.state_dict()
        row = {"what": what, "config": model.config.to_dict(), **machine(device), **here}
        rows.add({**row, **test(after, corpus, args, device)})
        last = rows.rows[-1]
        bits = {store: round(mean_bits([last], int(store)).mean().item(), 4) for store in last["bits"]}
        name = f"{what['corpus']} {what['trained']}" + (
            f" to {what['tuned']}" if what["tuned"] is not None else ""
        )
        print(
            name,
            "seed",
            what["seed"],
            "train",
            here["train"],
            here["train_seconds"],
            "s, by store",
            bits,
            flush=True,
        )


# What was found


def mean_bits(rows: list[Row], store: int) -> Tensor:
    """Bits of each whole stream, a mean over seeds ``[streams]``."""
    bits = torch.tensor([row["bits"][str(store)] for row in rows], dtype=torch.float64).mean(0)
    ends = torch.tensor([0, *rows[0]["octaves"]], dtype=torch.float64)
    return (bits * ends.diff() / ends[-1]).sum(1)


def gain(
    rows: list[Row], store: int, others: list[Row], other: int, classes: list[int]
) -> tuple[float, float, int]:
    """How many bits a byte of these classes costs less with a store than with another, by other rows' weights perhaps;
    the standard error over streams; and the bytes.
    """
    sums = lambda some, size: torch.tensor(
        [row["sums"][str(size)] for row in some], dtype=torch.float64
    ).mean(0)
    less = (sums(others, other) - sums(rows, store))[:, classes].sum(1)
    count = torch.tensor(rows[0]["counts"], dtype=torch.float64)[:, classes].sum(1)
    total = count.sum()
    if not total:
        return math.nan, math.nan, 0
    mean, streams = less.sum() / total, len(less)
    error = ((less - mean * count).square().sum() * streams / max(1, streams - 1)).sqrt() / total
    return mean.item(), error.item(), int(total)


def named(rows: list[Row]) -> dict[tuple[int, int | None], list[Row]]:
    """Rows of all seeds by the stores they were trained with and tuned to."""
    found: dict[tuple[int, int | None], list[Row]] = {}
    for row in rows:
        found.setdefault((row["what"]["trained"], row["what"]["tuned"]), []).append(row)
    return found


def groups(rows: list[Row]) -> list[list[Row]]:
    """Rows that may be compared: all but the store and the seed is the same."""
    return comparable(rows, "trained", "tuned", "seed")


def table(rows: list[Row]) -> str:
    """Of one corpus: bits by store, the paper's claims, gains by word."""
    runs, what = named(rows), rows[0]["what"]
    stores = [int(store) for store in rows[0]["bits"]]
    count = len(rows[0]["counts"])
    lines = [
        f"**{what['corpus']}**, bits per byte by the store tested; {count} streams of {rows[0]['octaves'][-1]:,}; "
        f"{what['steps']:,} steps of {what['rows']} x {what['piece']:,} bytes, tuned for {what['tune_steps']:,}; "
        f"{rows[0]['device']}",
        "",
        table_row("trained with", "seeds", *[_size(store) for store in stores], "gate"),
        table_rule(len(stores) + 3),
    ]
    for (trained, tuned), some in runs.items():
        bits = [f"{mean_bits(some, store).mean().item():.4f}" for store in stores]
        gates = torch.tensor([row["gates"] for row in some]).mean().item() if some[0]["gates"] else math.nan
        lines.append(table_row(_title(trained, tuned), len(some), *bits, f"{gates:.2f}"))
    lines += ["", table_row("claim", "the paper", f"here ({what['corpus']})", "same sign"), table_rule(4)]
    lines += [table_row(*cells) for cells in claims(runs, what["corpus"], stores)]
    for title, some, store, others, other in comparisons(runs, stores):
        lines += ["", f"Bits per byte less, {title} (± standard error over streams; thousands of bytes)", ""]
        lines += [
            table_row("the word in the training texts", *BEFORE, "all"),
            table_rule(5),
        ]
        for i, rarity in enumerate((*RARITY, "no word")):
            classes = [3 * i + j for j in range(3)] if i < len(RARITY) else [3 * i]
            parts = [[c] for c in classes] if i < len(RARITY) else [[]] * 3
            cells = [gain(some, store, others, other, each) for each in (*parts, classes)]
            lines.append(
                table_row(
                    rarity, *["" if not n else f"{m:+.3f} ± {e:.3f} ({n // 1000})" for m, e, n in cells]
                )
            )
    return "\n".join([*lines, ""])


def claims(runs: dict[tuple[int, int | None], list[Row]], corpus: str, stores: list[int]) -> list[list[str]]:
    """What the paper found in bits of a token, and what was found here in bits of a byte; less is better."""
    paper, found = PAPER[corpus], []
    bits = lambda ratio: f"{math.log2(ratio):+.3f} bits per token"
    plain, least, most = runs.get((0, None)), min(s for s in stores if s), max(stores)

    def add(claim: str, theirs: str, pair: tuple[list[Row], int, list[Row], int]) -> None:
        some, store, others, other = pair
        mean, error = mean_and_error(mean_bits(some, store) - mean_bits(others, other))
        sign = "yes" if mean < -2 * error else "no" if mean > 2 * error else "not told apart"
        found.append([claim, theirs, f"{mean:+.4f} ± {error:.4f} bits per byte", sign])

    for (trained, tuned), some in runs.items():
        if tuned is None and trained and trained in stores:
            if plain:
                theirs = bits(paper[8192] / paper["none"])
                title = f"trained and tested with {_size(trained)} less than with none"
                add(title, f"{theirs} (8K; {paper['from']})", (some, trained, plain, 0))
            theirs = bits(paper[65536] / paper[8192])
            title = (
                f"trained with {_size(trained)}: tested with {_size(most)} less than with {_size(trained)}"
            )
            add(title, f"{theirs} (65K trained less 8K trained)", (some, most, some, trained))
            title = f"trained with {_size(trained)}: tested with {_size(least)} less than with none"
            add(
                title,
                f"{math.log2(12.50 / 13.71):+.3f} (1.5K, no cache, PG-19, trained so)",
                (some, least, some, 0),
            )
    for (trained, tuned), some in runs.items():
        same = runs.get((trained, trained))
        if tuned is not None and tuned != trained and same and tuned in stores and trained in stores:
            theirs = f"{bits(PAPER_TUNED[1] / PAPER_TUNED[0])} (8K to 65K; {PAPER_TUNED[2]})"
            theirs = theirs if trained else "less (1B, 65K, figure 6)"
            title = f"{_size(trained)} tuned to {_size(tuned)} less than going on with {_size(trained)}"
            add(title, theirs, (some, tuned, same, trained))
    whole = runs.get((8192, None))
    if plain and whole and (0, 0) in runs and (0, 8192) in runs:
        closed = (mean_bits(runs[0, 0], 0) - mean_bits(runs[0, 8192], 8192)).mean()
        gap = (mean_bits(plain, 0) - mean_bits(whole, 8192)).mean()
        share = f"{100 * (closed / gap).item():.0f} %" if gap > 0 else "no gap"
        found.append(
            [
                "share of the gap that tuning a model without a store closes",
                "85 % (65K, 4 % of steps)",
                share,
                "",
            ]
        )
    return found


def comparisons(
    runs: dict[tuple[int, int | None], list[Row]], stores: list[int]
) -> list[tuple[str, list[Row], int, list[Row], int]]:
    """Pairs of which the gains are given by word: the largest store trained with against none."""
    bases = [trained for trained, tuned in runs if tuned is None and trained]
    if not bases:
        return []
    trained, store = max(bases), max(stores)
    some, plain = runs[trained, None], runs.get((0, None))
    title = f"trained with {_size(trained)}, tested with {_size(store)} against none"
    found = [(title, some, store, some, 0)]
    if plain:
        found.append((f"{title}, which was trained with none", some, store, plain, 0))
    return found


def _title(trained: int, tuned: int | None) -> str:
    return _size(trained) if tuned is None else f"{_size(trained)}, tuned with {_size(tuned)}"


def _size(store: int) -> str:
    return f"{store / 1024:g}K" if store else "none"


def plot(rows: list[Row], path: Path) -> None:
    """Of each corpus: bits by the store tested, and the gain by rarity of word."""
    from matplotlib.figure import Figure

    corpora = groups(rows)
    figure = Figure(figsize=(12, 4 * len(corpora)), layout="constrained")
    axes = figure.subplots(len(corpora), 2, squeeze=False)
    for (left, right), some in zip(axes, corpora, strict=True):
        runs, corpus = named(some), some[0]["what"]["corpus"]
        stores = [int(store) for store in some[0]["bits"]]
        for (trained, tuned), mine in runs.items():
            bits = [mean_bits(mine, store).mean().item() for store in stores]
            style = "-" if tuned is None else "--"
            left.plot(range(len(stores)), bits, ls=style, marker="o", label=_title(trained, tuned))
        left.set_xticks(range(len(stores)), [_size(store) for store in stores])
        left.set(xlabel="store tested", ylabel="bits per byte", title=corpus)
        left.legend(frameon=False, fontsize="small", title="trained with")
        for title, *pair in comparisons(runs, stores)[:1]:
            for j, name in enumerate(BEFORE):
                gains = [gain(*pair, [3 * i + j]) for i in range(len(RARITY))]
                places = [i + 0.25 * (j - 1) for i in range(len(RARITY))]
                right.bar(places, [g[0] for g in gains], 0.25, yerr=[g[1] for g in gains], label=name)
            right.set_xticks(range(len(RARITY)), RARITY, fontsize="small")
            right.set(xlabel="the word in the training texts", ylabel="bits per byte less", title=title)
            right.legend(frameon=False, fontsize="small", title="the word before")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("books")
    parser.add_argument("--corpora", nargs="+", default=["books", "python"], choices=list(WORDS))
    parser.add_argument("--trained", nargs="+", type=int, default=[0, 2048, 8192], help="stores in training")
    parser.add_argument(
        "--tested", nargs="+", type=int, default=[0, 1536, 8192, 65536, 262144], help="stores in tests"
    )
    parser.add_argument(
        "--tuned", nargs="*", default=["2048:2048", "2048:65536", "0:0", "0:8192"], metavar="FROM:TO"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--tune-lr", type=float, default=5e-4)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--tune-steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=8, help="of a batch")
    parser.add_argument("--piece", type=int, default=4096, help="tokens of each, in one step")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--persistent", type=int, default=128)
    parser.add_argument("--k", type=int, default=32, help="entries that a query attends to")
    parser.add_argument("--fuse", default="gate", choices=["gate", "joint"])
    parser.add_argument("--splits", nargs="+", default=["test"], help="of the books, to be tested on")
    parser.add_argument("--length", type=int, default=262144, help="tokens of each held-out stream of books")
    parser.add_argument("--python-length", type=int, default=65536, help="the same of modules")
    parser.add_argument("--streams", type=int, default=24, help="at most so many")
    parser.add_argument("--reading", type=int, default=8192, help="tokens of a piece when a stream is read")
    add_arguments(parser, "memorizing.json")
    if "--tiny" in sys.argv:
        parser.set_defaults(**TINY)
    args = parser.parse_args()
    rows = Rows(args.out, args.commit, args.merge or ())
    if rows.shown(args, lambda found: "\n".join(map(table, groups(found))), plot):
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    began = time.time()
    own = ("tuned", "trained")
    same = {
        name: getattr(args, name)
        for name in (*TINY, "lr", "tune_lr", "k", "fuse", "splits")
        if name not in own
    }
    pairs = [tuple(map(int, pair.split(":"))) for pair in args.tuned]
    for name in args.corpora:
        corpus: dict[str, Any] = {}
        for seed in args.seeds:
            for trained in args.trained:
                tunes = [None, *[to for start, to in pairs if start == trained]]
                whats = [
                    {"corpus": name, "trained": trained, "tuned": to, "seed": seed, **same} for to in tunes
                ]
                if all(map(rows.has, whats)) or time.time() - began > args.seconds:
                    continue
                corpus = corpus or corpus_of(name, args)
                run(corpus, whats, rows, args, device)


if __name__ == "__main__":
    main()
