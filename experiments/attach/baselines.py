"""What people use today instead of a trained memory, on the same questions: the pretrained model with its full context,
and with sentences that BM25 or sentence embeddings find.

    python -m experiments.attach.baselines retrieve --cache CACHE --embeddings MINILM --out retrieved.json
    python -m experiments.attach.baselines answer BASE.gguf --cache CACHE --retrieved retrieved.json --rows rows.json

`retrieve` finds the sentences (on a CPU), `answer` generates. With ``--model MODEL``, a trained memory of sentences
reads what the other methods found. `MINILM` is a folder with all-MiniLM-L6-v2.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import remanence
from experiments.attach.chats import SYSTEM, Asked
from experiments.attach.sentence_tests import Cell, answer_all, conversation, is_unknown, read_all, user
from experiments.attach.sentences import Source
from remanence.attached.folder import load
from remanence.attached.sentences.call import recalled_context
from remanence.attached.sentences.training import chat_row
from remanence.evaluate.bm25 import Bm25
from remanence.io.files import write_json

COMPARED = [
    Cell("as written", 20, 4000, 10), Cell("held out", 20, 4000, 10), Cell("reversed", 20, 4000, 30),
    Cell("free", 0, 4000, 50), Cell("updates", 20, 4000, 25), Cell("held out", 200, 4000, 1),
]  # fmt: skip
FOUND = 5
METHODS = ("bm25", "embedding", "full context")


class Embeddings:
    """Sentence embeddings: the mean of the last hidden states of MiniLM."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModel, AutoTokenizer

        self.tokenizer, self.model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)

    @torch.no_grad()
    def __call__(self, texts: list[str]) -> torch.Tensor:
        found = []
        for start in range(0, len(texts), 64):
            given = self.tokenizer(
                texts[start : start + 64], padding=True, truncation=True, return_tensors="pt"
            )
            hidden = self.model(**given).last_hidden_state
            mask = given["attention_mask"].unsqueeze(-1)
            found.append(F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1))
        return torch.cat(found)


def sentences_of(source: Source, ids: list[int]) -> list[list[int]]:
    """The sentences that a memory would store, as tokens."""
    row = chat_row(source, source.encode, source.decode, [torch.tensor(ids).numpy()], len(ids))
    return [row.tokens[a:b].tolist() for a, b in row.sentences]


def retrieve(args: argparse.Namespace) -> None:
    source, embed, rows = Source(args.cache), Embeddings(args.embeddings), []
    for cell in COMPARED:
        for number in range(min(args.conversations or cell.conversations, cell.conversations)):
            ids, asked = conversation(source, cell, number)
            stored = sentences_of(source, ids)
            texts = [source.decode(each).strip() for each in stored]
            bm25, vectors = Bm25(texts), embed(texts)
            near = (embed([q.text for q in asked]) @ vectors.mT).topk(FOUND, 1).indices.tolist()
            for index, q in enumerate(asked):
                best = bm25.top(q.text, FOUND)
                rows.append({
                    "cell": list(cell), "conversation": number, "question": index,
                    "bm25": [stored[n] for n in best],
                    "embedding": [stored[n] for n in sorted(near[index])],
                })  # fmt: skip
        print(cell, len(rows), flush=True)
    write_json(args.out, rows)


# ------------------------------------------------------------------ answers


@torch.no_grad()
def generate(model: Any, prompts: list[list[int]], batch: int, length: int = 28) -> list[list[int]]:
    """Greedy continuations of prompts by the pretrained model."""
    found: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda n: len(prompts[n]))
    for start in range(0, len(order), batch):
        some = order[start : start + batch]
        longest = max(len(prompts[n]) for n in some)
        ids = torch.tensor(
            [[2] * (longest - len(prompts[n])) + prompts[n] for n in some], device=model.device
        )
        seen = torch.tensor(
            [[0] * (longest - len(prompts[n])) + [1] * len(prompts[n]) for n in some], device=model.device
        )
        out = model.generate(
            input_ids=ids,
            attention_mask=seen,
            max_new_tokens=length,
            do_sample=False,
            pad_token_id=2,
            eos_token_id=2,
        )
        for n, ids_out in zip(some, out[:, longest:].tolist(), strict=True):
            found[n] = ids_out[: ids_out.index(2)] if 2 in ids_out else ids_out
    return found


def answer(args: argparse.Namespace) -> None:
    source = Source(args.cache)
    dtype = torch.bfloat16
    if args.model:
        model = load(args.model, base=args.base, device=torch.device(args.device), dtype=dtype).eval()
    else:
        model = remanence.attach(args.base, kind="sentences", window=512).model.to(args.device).eval()
        model.base.to(dtype)
    model.attached.window = None  # the pretrained model with its own attention
    known = json.loads(args.retrieved.read_text())
    rows = []
    for cell in COMPARED:
        own = [each for each in known if each["cell"] == list(cell)]
        if not own:
            continue
        drawn = [conversation(source, cell, n) for n in range(1 + max(each["conversation"] for each in own))]
        asked: list[Asked] = [drawn[each["conversation"]][1][each["question"]] for each in own]
        for method in args.methods or METHODS[: 2 if args.model else 3]:
            prompts, began = [], time.time()
            for each, q in zip(own, asked, strict=True):
                texts = "\n".join(source.decode(ids).strip() for ids in each.get(method, []))
                if args.model:  # as the trained reader sees recalled sentences, without the text before
                    block = recalled_context(model.sentences.format, source.segmenter.flags, each[method])
                    prompts.append([*source.encode(SYSTEM + user(q.text)), *block])
                else:
                    told = f"From our earlier conversation:\n{texts}\n\nAnswer in a few words: {q.text}"
                    prompts.append(source.encode(SYSTEM + user(told)))
            if args.model:
                with model.adapter.active():
                    out = generate(model.base, prompts, args.batch)
            elif method != "full context":
                out = generate(model.base, prompts, args.batch)
            if method == "full context":
                state = read_all(model.attached, [ids for ids, _ in drawn], "off", 1)
                pairs = [(each["conversation"], q) for each, q in zip(own, asked, strict=True)]
                answers = list(answer_all(model.attached, state, pairs, "off", 8))
            else:
                answers = [source.decode(ids) for ids in out]
            correct = [
                any(v.lower() in text.lower() for v in q.values)
                for q, text in zip(asked, answers, strict=True)
            ]
            given = [source.decode(list(chain(*each.get(method, [])))).lower() for each in own]
            stated = [any(v.lower() in text for v in q.values) for q, text in zip(asked, given, strict=True)]
            rows.append({
                **cell._asdict(), "method": method,
                "correct": sum(correct), "questions": len(correct), "stated": sum(stated),
                "unknown": sum(map(is_unknown, answers)), "seconds": round(time.time() - began, 1),
                "examples": [[q.text, text.strip()] for q, text in zip(asked, answers, strict=True)][:4],
            })  # fmt: skip
            print({k: v for k, v in rows[-1].items() if k != "examples"}, flush=True)
            write_json(args.rows, {"model": str(args.model), "rows": rows})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    own = commands.add_parser("retrieve")
    own.set_defaults(run=retrieve)
    for name in ("cache", "embeddings", "out"):
        own.add_argument(f"--{name}", type=Path, required=True)
    own.add_argument("--conversations", type=int, help="number of conversations of each cell")
    own = commands.add_parser("answer")
    own.set_defaults(run=answer)
    own.add_argument("base", type=Path)
    for name in ("cache", "retrieved", "rows"):
        own.add_argument(f"--{name}", type=Path, required=True)
    own.add_argument("--model", type=Path, help="a trained memory of sentences, whose reader is used")
    own.add_argument("--methods", nargs="*", choices=METHODS, help="default: all")
    own.add_argument("--batch", type=int, default=100)
    own.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
