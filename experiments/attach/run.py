"""A memory attached to a pretrained model: what it wins back of what a window loses, what it keeps, what it costs.

    python -m experiments.attach.run BASE --tokens TOKENS --books BOOKS --work out/attach --out attach.json
    python -m experiments.attach.run BASE --out attach.json --table --plot attach.png

BASE is the folder, name or GGUF file of a causal language model; TOKENS are books prepared with its tokenizer; BOOKS is
a folder of books with an index (see experiments/shared.py), of which the split "test" is read. Parts (--parts):

- train: attach (`remanence.attach`) and train by the recipe `attach`; into --work, unless it is there;
- near, far: bits per byte of held-out books by position, in many stretches and in whole books: the pretrained model
  with full attention up to its own length (then begun anew for every half of it), its attention narrowed to a window,
  and the window with the memory on, frozen and fresh; and full attention with the frozen memory, which has adapted to
  books as the others have and remembers nothing else;
- facts: facts told, tokens of a book read, every fact asked for by name; answers are generated;
- gates: what each head writes and forgets while facts are told and a book is read;
- speed: tokens per second of reading and decoding, and the memory that takes, against the pretrained model.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.attach.untrained import reading
from experiments.shared import Row, Rows, add_arguments, load, machine, octaves, table_row, table_rule
from remanence import attach
from remanence.attached.base import PretrainedSource
from remanence.attached.folder import load as load_attached
from remanence.attached.model import Attached
from remanence.inference.generate import Generation, Sampling
from remanence.inference.reader import read
from remanence.recipes import load_recipe
from remanence.tasks.answers import contains_value
from remanence.tasks.fact_dialogues import KINDS, Kind, Turns, draw_facts
from remanence.tokenizers.tokens import JsonTokenizer
from remanence.train import fit
from remanence.train.config import override

TINY = {"steps": 2, "changes": ["batch=2", "data.length=1024", "data.curriculum=1024", "data.pairs=4"], "length": 256,
        "long": 512, "stretches": 2, "distances": [64], "conversations": 2, "told": 3, "contexts": [128], "window": 64,
        "memory": ["heads=2", "head_dim=16", "chunk=16"], "piece": 128}  # fmt: skip


def tokenizer_of(base: str, work: Path) -> JsonTokenizer:
    """The pretrained model's, through its tokenizer.json."""
    folder = work / "tokenizer"
    if not (folder / "tokenizer.json").is_file():
        PretrainedSource.from_path(base).load_tokenizer().save_pretrained(folder)
    return JsonTokenizer(folder / "tokenizer.json")


OTHER = (
    Kind("{name} studied {value}.", "What did {name} study?",
         ("physics", "law", "history", "medicine", "music", "geology", "Latin", "botany")),
    Kind("{name} drives a {value}.", "What does {name} drive?",
         ("taxi", "tractor", "truck", "tram", "motorcycle", "limousine", "bus", "van")),
    Kind("The dog of {name} is called {value}.", "What is the dog of {name} called?",
         ("Rex", "Bella", "Rocky", "Luna", "Max", "Daisy", "Duke", "Molly")),
    Kind("{name} is allergic to {value}.", "What is {name} allergic to?",
         ("peanuts", "milk", "eggs", "dust", "pollen", "shrimp", "wheat", "honey")),
    Kind("{name} is married to {value}.", "Who is {name} married to?",
         ("Peter", "Anna", "George", "Maria", "Thomas", "Helen", "Robert", "Julia")),
    Kind("{name} lost a {value}.", "What did {name} lose?",
         ("ring", "wallet", "key", "phone", "passport", "watch", "glove", "ticket")),
)  # fmt: skip
"""Facts of kinds, and with values, that training has none of."""


# Training


def trained(args: argparse.Namespace, device: torch.device) -> Attached:
    """The attached model of --work, trained if it is not there."""
    run = args.work / "run"
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if not (run / "model" / "config.json").is_file():
        began = args.work / "attached"
        if not (began / "config.json").is_file():
            fields: dict[str, Any] = {}
            for each in args.memory:
                name, value = each.split("=", 1)
                try:
                    fields[name] = json.loads(value)
                except ValueError:
                    fields[name] = value
            torch.manual_seed(args.seed)
            attach(
                args.base, window=args.window, every=args.every, place=args.place, **fields
            ).save_pretrained(began)
        config = load_recipe("attach")
        data = replace(config.data, path=str(args.tokens))
        config = replace(
            config, init_from=str(began), data=data, seed=args.seed, device=device.type, log_every=20
        )
        if device.type == "cpu":
            config = replace(config, precision="float32")
        config = replace(config, **({"steps": args.steps} if args.steps else {}))
        config = override(config, dict(each.split("=", 1) for each in args.changes))
        start = time.monotonic()
        fit(config, run, resume=(run / "checkpoints").is_dir(), log=lambda line: print(
            f"step {line['step']} loss {line['loss']:.4f} answers {line.get('answers') or 0:.4f} gradient "
            f"{line['gradient']:.2f} {line['tokens_per_s']:,.0f} tokens/s", flush=True))  # fmt: skip
        (run / "seconds").write_text(f"{time.monotonic() - start:.0f}")
    return load_attached(run / "model", device=device, dtype=dtype).eval()


# Books


class Measure:
    """Bits of tokens, by a model with full attention, with a window, or with a memory beside it."""

    def __init__(self, model: Attached, device: torch.device, piece: int, context: int) -> None:
        self.model, self.device, self.piece, self.context = model, device, piece, context

    def _arm(self, arm: str) -> str:
        self.model.window = None if arm in ("full", "adapted") else self.model.config.window
        return {"full": "off", "window": "off", "adapted": "frozen"}.get(arm, arm)

    @torch.no_grad()
    def bits(self, tokens: Tensor, arm: str) -> Tensor:
        """Of every token of ``[r t+1]`` but the first."""
        mode = self._arm(arm)
        if arm in ("full", "adapted"):
            return self._restarted(tokens, mode)
        state, found = self.model.start(len(tokens)), []
        for first in range(0, tokens.shape[1] - 1, self.piece):
            some = tokens[:, first : first + self.piece + 1].to(self.device)
            trace = self.model.trace(some[:, :-1], state, memory_mode=mode)
            state = trace.state
            found.append(self._losses(trace.hidden, some[:, 1:]))
        return torch.cat(found, 1)

    def _restarted(self, tokens: Tensor, mode: Any) -> Tensor:
        """No more than `context` tokens are seen: beyond, half of them are read again in front of every next half."""
        found, half = [], self.context // 2
        for first in range(0, tokens.shape[1] - 1, half):
            if first == half:
                continue  # the first two halves are read together
            begin = max(0, first - half)
            some = tokens[:, begin : max(first + half, self.context) + 1].to(self.device)
            hidden = self.model.trace(some[:, :-1], memory_mode=mode, keep=False).hidden
            found.append(self._losses(hidden, some[:, 1:])[:, first - begin :])
        return torch.cat(found, 1)

    def _losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """In bits; some rows at a time, as logits are large."""
        found = [
            F.cross_entropy(self.model.logits(some).flatten(0, 1).float(), wanted.flatten(), reduction="none")
            for some, wanted in zip(hidden.split(2048, 1), targets.split(2048, 1), strict=True)
        ]
        rows = [each.view(len(hidden), -1) for each in found]
        return torch.cat(rows, 1).cpu() / math.log(2)


def by_position(bits: Tensor, sizes: Tensor) -> list[list[float]]:
    """Of every octave: its first position, all bits and all bytes."""
    return [
        [first, float(bits[:, first:last].double().sum()), float(sizes[:, first:last].sum())]
        for first, last in octaves(bits.shape[1])
    ]


def books(
    model: Attached, tokenizer: JsonTokenizer, what: Row, args: argparse.Namespace, device: torch.device
) -> Row:
    texts = [bytes(book.numpy()).decode("utf-8", "replace") for book in load(args.books, "test")]
    streams = [torch.tensor(tokenizer.encode(text)) for text in texts]
    # Tokens of byte-level BPE have a character for each byte.
    length = torch.tensor(
        [len(tokenizer.inner.id_to_token(token) or "") for token in range(tokenizer.vocabulary)]
    )
    measure = Measure(model, device, args.piece, what["context"])
    if what["reach"] == "near":
        size = args.length
        cut = [each[at : at + size + 1] for each in streams for at in range(0, len(each) - size, size + 1)]
        rows = torch.stack(cut[: args.stretches])
        found = torch.cat([measure.bits(some, what["arm"]) for some in rows.split(16)])
        return {"positions": by_position(found, length[rows[:, 1:]]), "streams": len(rows)}
    parts = []
    for each in streams:
        each = each[: args.long + 1].unsqueeze(0)
        parts.append(by_position(measure.bits(each, what["arm"]), length[each[:, 1:]]))
    depth = max(map(len, parts))
    summed = [
        [parts_at[0][0], sum(p[1] for p in parts_at), sum(p[2] for p in parts_at)]
        for index in range(depth)
        if (parts_at := [part[index] for part in parts if len(part) > index])
    ]
    return {"positions": summed, "streams": len(streams)}


# Facts


@torch.no_grad()
def facts(
    model: Attached, tokenizer: JsonTokenizer, what: Row, args: argparse.Namespace, device: torch.device
) -> Row:
    """Facts told, so many tokens of a held-out book read, each asked for from the state after it."""
    texts = [
        tokenizer.encode(bytes(book.numpy()).decode("utf-8", "replace")) for book in load(args.books, "test")
    ]
    turns, measure = Turns(tokenizer), Measure(model, device, args.piece, 0)
    mode: Any = measure._arm(what["arm"])
    opened, closed = turns.reading()
    kinds = OTHER if what.get("other") else KINDS
    draws = [np.random.default_rng([args.seed, number, 7]) for number in range(args.conversations)]
    told = [draw_facts(rng, what["told"], held_out=True, kinds=kinds) for rng in draws]
    fronts, behind = (
        [tokenizer.encode(turns.statements(own) + opened) for own in told],
        tokenizer.encode(closed),
    )
    # As many tokens in every conversation: those of the facts and the words around them, and of a book.
    around = max(24 * what["told"] + 64, max(map(len, fronts)) + len(behind))
    length, rows = what["distance"] + around, []
    for number, (rng, front) in enumerate(zip(draws, fronts, strict=True)):
        book, room = texts[number % len(texts)], length - len(front) - len(behind)
        start = int(rng.integers(max(1, len(book) - room)))
        rows.append([*front, *book[start : start + room], *behind])
    right, shown = [], []
    model.memory_mode = mode
    for some in range(0, len(rows), args.together):
        tokens = torch.tensor(rows[some : some + args.together], device=device)
        state = read(model, tokens).state
        facts = [(row, fact) for row, own in enumerate(told[some : some + args.together]) for fact in own]
        answers = Generation(
            model, [turns.question(fact) for _, fact in facts],
            Sampling(max_tokens=20, temperature=0.0, stop=("\n",)), tokenizer=tokenizer,
            state=state.rows([row for row, _ in facts]),
        ).run().texts  # fmt: skip
        for (_, fact), answer in zip(facts, answers, strict=True):
            right.append(contains_value(answer, fact.value))
            shown.append([fact.statement, answer])
    model.memory_mode = "on"
    return {
        "right": sum(right),
        "asked": len(right),
        "read": min(map(len, rows)),
        "shown": shown[:: what["told"]][:8],
    }


@torch.no_grad()
def gates(
    model: Attached, tokenizer: JsonTokenizer, what: Row, args: argparse.Namespace, device: torch.device
) -> Row:
    """Of each layer and head: its mean step at values, at the other tokens of a telling and at those of a book, and of
    how many tokens of a book it forgets half.
    """
    book = tokenizer.encode(bytes(load(args.books, "test")[0].numpy()).decode("utf-8", "replace"))
    about = argparse.Namespace(told=what["told"], distance=what["distance"])
    text = reading(Turns(tokenizer), tokenizer.encode, book, np.random.default_rng(args.seed), about)
    told, values = text["told"], torch.tensor(text["values"])
    others = torch.ones(told, dtype=torch.bool)
    others[values] = False
    Measure(model, device, args.piece, 0)._arm("on")
    read_then = slice(told + what["distance"] // 8, told + what["distance"])
    seen = model.trace(torch.tensor([text["tokens"]], device=device), memory_mode="on", keep=False).traces
    found = []
    for layer, trace in enumerate(seen):
        if trace is None:
            continue
        step = trace.gates.log_step[0].exp().cpu()
        forgotten = torch.zeros(step.shape[1])
        if trace.gates.log_keep is not None:
            forgotten = -trace.gates.log_keep[0, read_then].mean(0).cpu()
        means = step[values].mean(0), step[:told][others].mean(0), step[read_then].mean(0)
        for head in range(step.shape[1]):
            half = math.log(2) / max(float(forgotten[head]), 1e-9)
            found.append([layer, head, *(round(float(mean[head]), 4) for mean in means), round(half)])
    return {"gates": found}


# Speed


@torch.no_grad()
def speed(model: Attached, what: Row, args: argparse.Namespace, device: torch.device) -> Row:
    """Reading a text of so many tokens in pieces, and decoding behind it; the pretrained model by its own cache."""
    from transformers.cache_utils import DynamicCache

    mode: Any = Measure(model, device, args.piece, 0)._arm(what["arm"])
    tokens = torch.randint(model.config.vocab_size, (1, what["context"]), device=device)
    cuda = device.type == "cuda"

    def clock() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.monotonic()

    def reading() -> Any:
        if what["arm"] == "full":
            cache = DynamicCache()
            for some in tokens.split(args.piece, 1):
                model.base.base_model(some, past_key_values=cache, use_cache=True)
            return cache
        state = model.start(1)
        for some in tokens.split(args.piece, 1):
            state = model.trace(some, state, memory_mode=mode).state
        return state

    reading()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    begin = clock()
    state = reading()
    took = clock() - begin
    peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else 0.0
    token, steps = tokens[:, :1], 32
    for count in (4, steps):
        begin = clock()
        for _ in range(count):
            if what["arm"] == "full":
                hidden = model.base.base_model(token, past_key_values=state, use_cache=True).last_hidden_state
            else:
                trace = model.trace(token, state, memory_mode=mode)
                hidden, state = trace.hidden, trace.state
            token = model.logits(hidden[:, -1]).argmax(-1, keepdim=True)
        decoded = clock() - begin
    held = state.nbytes if what["arm"] != "full" else sum(2 * x.keys.nbytes for x in state.layers)
    return {
        "read": what["context"] / took,
        "decoded": steps / decoded,
        "peak_mib": round(peak, 1),
        "state_bytes": held,
    }


# What was found

PARTS = ("train", "facts", "near", "far", "gates", "speed")
ARMS = {
    "full": "full attention",
    "window": "window",
    "on": "window and memory",
    "fresh": "memory fresh",
    "frozen": "memory frozen",
    "adapted": "full attention, memory frozen",
}


def table(rows: list[Row]) -> str:
    parts = (_books_table(rows), _facts_table(rows), _gates_table(rows), _speed_table(rows))
    return "\n".join(line for part in parts for line in [*part, ""])


def _books_table(rows: list[Row]) -> Any:
    for reach in ("near", "far"):
        own = [row for row in rows if row["what"]["part"] == "books" and row["what"]["reach"] == reach]
        if not own:
            continue
        heads = [f"{int(first / 1024)}K" for first, *_ in max((row["positions"] for row in own), key=len)]
        yield table_row("bits per byte", "seed", *(f"from {head}" for head in heads))
        yield table_rule(len(heads) + 2)
        for row in own:
            yield table_row(
                ARMS[row["what"]["arm"]],
                row["what"]["seed"],
                *(f"{a / b:.4f}" for _, a, b in row["positions"]),
            )
        yield ""


def _facts_table(rows: list[Row]) -> Any:
    yield table_row("facts told", "kinds", "tokens read then", "arm", "threshold", "seed", "answered")
    yield table_rule(7)
    for row in rows:
        what = row["what"]
        if what["part"] == "facts":
            yield table_row(
                what["told"],
                "others" if what.get("other") else "as trained",
                what["distance"],
                ARMS[what["arm"]],
                what.get("threshold", 0),
                what["seed"],
                f"{row['right']} of {row['asked']}",
            )


def _gates_table(rows: list[Row]) -> Any:
    yield table_row("layer", "head", "seed", "step at values", "telling", "book", "half is forgotten after")
    yield table_rule(7)
    for row in rows:
        for layer, head, *steps, half in row.get("gates", ()):
            yield table_row(layer, head, row["what"]["seed"], *(f"{step:.3f}" for step in steps), f"{half:,}")


def _speed_table(rows: list[Row]) -> Any:
    yield table_row("tokens", "arm", "tokens/s read", "tokens/s decoded", "peak MiB", "state MiB")
    yield table_rule(6)
    for row in rows:
        if row["what"]["part"] == "speed":
            yield table_row(
                row["what"]["context"], ARMS[row["what"]["arm"]], f"{row['read']:,.0f}", f"{row['decoded']:,.1f}",
                f"{row['peak_mib']:,.0f}", f"{row['state_bytes'] / 2**20:,.1f}",
            )  # fmt: skip


def plot(rows: list[Row], path: Path) -> None:
    """Bits per byte over the position, one line for each arm."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axis = figure.subplots()
    for row in rows:
        if row["what"]["part"] == "books" and row["what"]["reach"] == "far":
            places = [max(first, 512) for first, *_ in row["positions"]]
            axis.plot(places, [a / b for _, a, b in row["positions"]], "o-", label=ARMS[row["what"]["arm"]])
    axis.set_xscale("log", base=2)
    axis.set(xlabel="tokens of the book read before", ylabel="bits per byte")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=130)


# The command


def work_of(args: argparse.Namespace) -> list[Row]:
    """Everything to measure, in order."""
    own = {"seed": args.seed, "name": args.name}
    if args.threshold:
        own["threshold"] = args.threshold
    context = args.length
    near = [{"part": "books", "reach": "near", "arm": arm, "context": context} for arm in ARMS]
    far = [
        {"part": "books", "reach": "far", "arm": arm, "context": context}
        for arm in ("full", "window", "on", "fresh", "adapted")
    ]
    told = [
        {"part": "facts", "arm": arm, "told": args.told, "distance": distance}
        for distance in args.distances
        for arm in ("on", "frozen", "window", "full")
        if arm == "on" or distance == min(args.distances)
    ]
    told += [
        {"part": "facts", "arm": arm, "told": args.told, "distance": min(args.distances), "other": True}
        for arm in ("on", "frozen")
    ]
    fast = [
        {"part": "speed", "arm": arm, "context": size}
        for size in args.contexts
        for arm in ("full", "window", "on")
    ]
    look = [{"part": "gates", "told": args.told, "distance": 1024}]
    asked = [*told, *near, *far, *look, *fast]
    return [{**what, **own} for what in asked if what.get("reach", what["part"]) in args.parts]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", help="folder, name or GGUF file of the pretrained model")
    parser.add_argument("--tokens", type=Path, help="books prepared with its tokenizer, to train on")
    parser.add_argument("--books", help="folder of books, whose split 'test' is read")
    parser.add_argument("--work", type=Path, default=Path("out/attach"), help="folder for models")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--name", default="attach", help="of the settings, in the rows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--every", type=int)
    parser.add_argument("--place", default="beside")
    parser.add_argument("--memory", nargs="*", default=[], help="fields of the memory: heads=4 head_dim=128")
    parser.add_argument(
        "--threshold", type=float, default=0.0, help="set after training: smaller steps are none"
    )
    parser.add_argument("--steps", type=int, help="of training")
    parser.add_argument("--changes", nargs="*", default=[], help="to the recipe: optimizer.lr=1e-3 batch=16")
    parser.add_argument("--length", type=int, default=8192, help="the pretrained model's own context")
    parser.add_argument("--long", type=int, default=262_144, help="tokens of each book, at most")
    parser.add_argument("--stretches", type=int, default=64, help="of --length tokens")
    parser.add_argument("--distances", nargs="+", type=int, default=[4096, 1024, 16384, 65536])
    parser.add_argument("--conversations", type=int, default=25)
    parser.add_argument("--together", type=int, default=5, help="conversations at a time")
    parser.add_argument("--told", type=int, default=20, help="facts of a conversation")
    parser.add_argument("--contexts", nargs="+", type=int, default=[8192, 65_536, 262_144])
    parser.add_argument("--piece", type=int, default=8192, help="tokens of a call")
    add_arguments(parser, "attach.json")
    if "--tiny" in sys.argv:
        parser.set_defaults(**TINY)
    args = parser.parse_args()
    rows = Rows(args.out, args.commit, args.merge or ())
    if rows.shown(args, table, plot):
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    began = time.monotonic()
    args.work.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_of(args.base, args.work)
    model = trained(args, device)
    if args.threshold:
        model.threshold = args.threshold
    for what in work_of(args):
        if rows.has(what) or time.monotonic() - began > args.seconds:
            continue
        start = time.monotonic()
        if what["part"] == "books":
            found = books(model, tokenizer, what, args, device)
        elif what["part"] == "facts":
            found = facts(model, tokenizer, what, args, device)
        elif what["part"] == "gates":
            found = gates(model, tokenizer, what, args, device)
        else:
            found = speed(model, what, args, device)
        took = round(time.monotonic() - start, 1)
        rows.add({"what": what, **machine(device), "seconds": took, **found})
        short = {key: value for key, value in found.items() if key not in ("positions", "shown", "gates")}
        if "positions" in found:
            short["bits"] = [round(a / b, 4) for _, a, b in found["positions"]]
        print(
            {**{k: v for k, v in what.items() if k not in ("seed", "name")}}, short, f"{took} s", flush=True
        )
    if rows.rows and "shown" in rows.rows[0]:
        print(rows.rows[0]["shown"][:4])


if __name__ == "__main__":
    main()
