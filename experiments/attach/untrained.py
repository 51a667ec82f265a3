"""What a memory finds before it was trained, by what is written into it.

    python -m experiments.attach.untrained BASE --books BOOKS --layers 3 7 15 23

Facts are told, tokens of a held-out book are read, and every fact is asked for, all in one reading of the pretrained
model BASE with its attention narrowed. Each layer's inputs then go through a new memory (`remanence.attach`'s, weights
drawn at random), whose gates are set from outside: every token is written, or those of the telling, or the values
alone. It finds a fact if the value, of all that were told, is the nearest to what the memory returns at the word
before the value (by cosine over all heads, less the mean over the questions).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.shared import load, table_row, table_rule
from remanence import attach
from remanence.attached.base import PretrainedSource
from remanence.attached.layer import zero_output
from remanence.memory.components import CLOSED_LOG_GATE
from remanence.memory.neural import NeuralMemory
from remanence.ops import Gates, memorize
from remanence.tasks.fact_dialogues import Turns, draw_facts

WRITTEN = ("everything", "what is told", "the values")


def reading(
    turns: Turns, encode: Any, book: list[int], rng: np.random.Generator, args: Any
) -> dict[str, Any]:
    """Tokens; where values stand in the telling, and the words before them in the answers, by fact; where it ends."""
    facts = draw_facts(rng, args.told, held_out=True)
    front, end = turns.user("Please remember this.\0").split("\0")
    tokens, (opened, closed) = encode(front), turns.reading()
    values = []
    for fact in facts:
        tokens += encode(" " + fact.statement.removesuffix(f" {fact.value}."))
        values.append(len(tokens))
        tokens += encode(f" {fact.value}.")
    told = len(tokens)
    start = int(rng.integers(len(book) - args.distance))
    tokens += encode(end + turns.answer_prefix + turns.answer("I will remember it.") + opened)
    tokens += book[start : start + args.distance] + encode(closed)
    asked = [0] * len(facts)
    for index in rng.permutation(len(facts)):
        fact = facts[index]
        begun = turns.answer(fact.statement.removesuffix(f" {fact.value}."), ended=False)
        tokens += encode(turns.question(fact) + begun)
        asked[index] = len(tokens) - 1
        tokens += encode(turns.answer(fact.statement).removeprefix(begun))
    said = [fact.value for fact in facts]
    return {"tokens": tokens, "values": values, "asked": asked, "told": told, "said": said}


def inputs(model: Any, tokens: list[int], layers: list[int]) -> dict[int, Tensor]:
    """What the attention modules of some layers read."""
    found: dict[int, Tensor] = {}

    def note(index: int) -> Any:
        def hook(_: Any, args: Any, kwargs: Any) -> None:
            found[index] = args[0] if args else kwargs["hidden_states"]

        return hook

    modules = [layer.self_attn for layer in model.base.base_model.layers]
    hooks = [modules[n].register_forward_pre_hook(note(n), with_kwargs=True) for n in layers]
    model.trace(torch.tensor([tokens]), memory_mode="off", keep=False)
    for hook in hooks:
        hook.remove()
    return found


def share_found(layer: NeuralMemory, x: Tensor, text: dict[str, Any], written: str, step: float) -> float:
    start = layer.start(1)
    q, k, v, gates, _ = layer.prepare(x, start.conv)
    places = {"everything": slice(None), "what is told": slice(0, text["told"]), "the values": text["values"]}
    log_step = torch.full_like(gates.log_step, CLOSED_LOG_GATE)
    log_step[:, places[written]] = float(np.log(step))
    answers, *_ = memorize(
        q, k, v, Gates(log_step, gates.log_momentum, gates.log_keep), start.memory, net=layer.net,
        rule=layer.rule, chunk=layer.config.chunk, check=False,
    )  # fmt: skip
    known = v[0, text["values"]].flatten(1)
    found = F.normalize(answers[0, text["asked"]], dim=-1).flatten(1)
    known, found = (F.normalize(each - each.mean(0), dim=-1) for each in (known, found))
    best = (found @ known.T).argmax(-1).tolist()
    return float(np.mean([text["said"][one] == own for one, own in zip(best, text["said"], strict=True)]))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", help="folder, name or GGUF file of the pretrained model")
    parser.add_argument("--books", required=True, help="folder of books, whose split 'test' is read")
    parser.add_argument("--layers", nargs="+", type=int, default=[3, 7, 15, 23])
    parser.add_argument("--convs", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--told", type=int, default=20, help="facts of a conversation")
    parser.add_argument(
        "--distance", type=int, default=4096, help="tokens of a book between telling and asking"
    )
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--window", type=int, default=512)
    args = parser.parse_args()
    tokenizer = PretrainedSource.from_path(args.base).load_tokenizer()
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    texts = [encode(bytes(book.numpy()).decode("utf-8", "replace")) for book in load(args.books, "test")]
    model = attach(args.base, window=args.window).model.eval()
    config, turns = model.config.memory, Turns(SimpleNamespace(encode=encode))
    found: dict[tuple[int, int, str], list[float]] = {}
    for number in range(args.conversations):
        text = reading(turns, encode, texts[number % len(texts)], np.random.default_rng([1, number]), args)
        for index, x in inputs(model, text["tokens"], args.layers).items():
            for conv in args.convs:
                torch.manual_seed(0)
                layer = NeuralMemory(replace(config, conv=conv)).eval()
                zero_output(layer)
                for written in WRITTEN:
                    share = share_found(layer, x.float(), text, written, 0.5)
                    found.setdefault((index, conv, written), []).append(share)
    print(table_row("layer", "conv", *(f"written: {written}" for written in WRITTEN)))
    print(table_rule(2 + len(WRITTEN)))
    for index in args.layers:
        for conv in args.convs:
            shares = [np.mean(found[index, conv, written]) for written in WRITTEN]
            print(table_row(index, conv, *(f"{100 * share:.0f} %" for share in shares)))


if __name__ == "__main__":
    main()
