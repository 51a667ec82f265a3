"""Train a memory of sentences for a pretrained model.

    python -m experiments.attach.sentences prepare BASE.gguf --books BOOKS --kamel kamel.jsonl.xz --cache CACHE
    python -m experiments.attach.sentences replies BASE.gguf --cache CACHE
    python -m experiments.attach.sentences train BASE.gguf --cache CACHE --out FOLDER

`BOOKS` is a folder with ``*.txt.xz``; the three in `HELD_BOOKS` are for tests only. `prepare` writes all
that training reads beside the pretrained model: tokens of books, relations, general questions and the tokenizer;
`replies` adds the pretrained model's own answers to these questions (faster on a GPU). Training can be stopped at any
time and continues from its last checkpoint. `experiments/attach/sentence_tests.py` measures the result.
"""

from __future__ import annotations

import argparse
import json
import lzma
import queue
import re
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import remanence
from experiments.attach.chats import BOS, SYSTEM, UNKNOWN, Chats, in_format, pick
from remanence.attached.sentences.config import SentenceConfig
from remanence.attached.sentences.segments import Segmenter
from remanence.attached.sentences.training import _spans, addressing_loss, answer_loss, chat_row, read_rows
from remanence.attached.sentences.vocabulary import MARKS
from remanence.io.files import write_json

FACTS = Path(__file__).parent / "facts"
HELD_BOOKS = ("great-expectations", "moby-dick", "frankenstein")
DTYPE = torch.bfloat16


class Source:
    """What rows are drawn from, without the pretrained model: the tokenizer, the segmenter, books and conversations.

    It has `sentences` and `segmenter` like a `SentenceModel`.
    """

    def __init__(self, cache: Path) -> None:
        from tokenizers import Tokenizer

        known = json.loads((cache / "config.json").read_text())
        self.sentences = SentenceConfig(**known)
        self.segmenter = Segmenter(self.sentences, np.load(cache / "flags.npy"))
        self.tokenizer = Tokenizer.from_file(str(cache / "tokenizer.json"))
        self.vocabulary = self.tokenizer.get_vocab()
        general = [tuple(each) for each in json.loads((cache / "general.json").read_text())]
        self.bos = BOS if BOS in self.vocabulary else ""
        # A model with a first token has seen no text without it.
        self.chats = Chats(cache / "kamel.jsonl.xz", general, system_share=1.0 if self.bos else 0.5)
        self.books = np.load(cache / "books-train.npy", mmap_mode="r")
        self.held_books = np.load(cache / "books-held.npy", mmap_mode="r")

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(in_format(text, self.vocabulary), add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def rows(self, args: argparse.Namespace, number: int) -> list[Any]:
        """The rows of a step."""
        found = []
        for n in range(args.rows):
            rng = np.random.default_rng([args.seed, number, n])
            items = self.chats.items(rng, self.books, (60, args.book))
            found.append(chat_row(self, self.encode, self.decode, items, args.length))
        return found


_SOURCE: dict[Path, Source] = {}


def _draw(args: argparse.Namespace, number: int) -> list[Any]:
    if args.cache not in _SOURCE:
        _SOURCE[args.cache] = Source(args.cache)
    return _SOURCE[args.cache].rows(args, number)


def batches(args: argparse.Namespace, first: int) -> Iterator[list[Any]]:
    """The rows of each step from `first` on, drawn by other processes."""
    ready: queue.Queue[Any] = queue.Queue(4)

    def feed() -> None:
        with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
            waiting: list[Any] = []
            for number in range(first, args.steps):
                waiting.append(pool.submit(_draw, args, number))
                if len(waiting) == 3 * args.workers:
                    ready.put(waiting.pop(0).result())
            for job in waiting:
                ready.put(job.result())

    threading.Thread(target=feed, daemon=True).start()
    for _ in range(first, args.steps):
        yield ready.get()


# ------------------------------------------------------------------ preparation


def book_texts(folder: Path, *, held: bool) -> Iterator[str]:
    """The texts of books for training, or of those for tests."""
    for path in sorted(folder.glob("*.txt.xz")):
        if any(name in path.name for name in HELD_BOOKS) == held:
            with lzma.open(path, "rt", encoding="utf-8") as file:
                yield file.read()


def prepare(args: argparse.Namespace) -> None:
    model = remanence.attach(args.base, kind="sentences", window=512).model
    tokenizer = model.pretrained_tokenizer()
    args.cache.mkdir(parents=True, exist_ok=True)
    model.source.load_tokenizer().save_pretrained(args.cache)
    write_json(args.cache / "config.json", model.config.to_dict()["sentences"])
    np.save(args.cache / "flags.npy", model.flags.numpy())
    shutil.copyfile(args.kamel, args.cache / "kamel.jsonl.xz")
    for name, held, characters in (("train", False, 400_000), ("held", True, 2_000_000)):
        parts = [
            np.array(tokenizer.encode(t[:characters]), np.uint32) for t in book_texts(args.books, held=held)
        ]
        np.save(args.cache / f"books-{name}.npy", np.concatenate(parts))
    shutil.copyfile(FACTS / "general.txt", args.cache / "general.txt")


def answer_general(args: argparse.Namespace) -> None:
    """Write the pretrained model's own replies to general questions, as examples of answers without a memory."""
    model = remanence.attach(args.base, kind="sentences", window=512).model.to(args.device)
    model.base.to(DTYPE)
    tokenizer, (user, assistant, end, _) = model.pretrained_tokenizer(), model_marks(model)
    model.attached.window = None
    prompts = (args.cache / "general.txt").read_text().splitlines()
    system = in_format(SYSTEM, model.source.load_tokenizer().get_vocab())
    asked = [tokenizer.encode(f"{system}{user}{prompt}{end}\n{assistant}") for prompt in prompts]
    found: list[list[Any]] = []
    for start in range(0, len(asked), args.batch):
        for own in continuations(model, asked[start : start + args.batch], args.tokens):
            found.append(
                [prompts[len(found)], *whole_sentences(tokenizer.decode(own), len(own) < args.tokens)]
            )
        print(f"{len(found)} of {len(asked)}", flush=True)
    write_json(args.cache / "general.json", found)


def model_marks(model: Any) -> tuple[str, str, str, str]:
    """The texts around messages in the chat format of a model (see `vocabulary.MARKS`)."""
    decode = model.pretrained_tokenizer().decode
    return next(known for known in MARKS.values() if known[0] == decode(list(model.sentences.format.user)))


@torch.no_grad()
def continuations(model: Any, prompts: list[list[int]], most: int) -> list[list[int]]:
    """Greedy continuations of prompts by the pretrained model, up to the end of the message."""
    end, longest = model.sentences.format.end, max(map(len, prompts))
    ids = torch.tensor([[end] * (longest - len(x)) + x for x in prompts], device=model.device)
    seen = torch.tensor([[0] * (longest - len(x)) + [1] * len(x) for x in prompts], device=model.device)
    out = model.base.generate(
        input_ids=ids, attention_mask=seen, max_new_tokens=most, do_sample=False, repetition_penalty=1.1,
        pad_token_id=end, eos_token_id=end,
    )  # fmt: skip
    return [row[: row.index(end)] if end in row else row for row in out[:, longest:].tolist()]


def whole_sentences(text: str, ended: bool) -> tuple[str, bool]:
    """The text, and whether it ended; if it did not, the text up to the last end of a sentence."""
    if ended:
        return text.strip(), True
    ends = [m.end() for m in re.finditer(r"[.!?](?=\s|$)", text)]
    return (text[: ends[-1]] if ends else text).strip(), False


# ------------------------------------------------------------------ training


@torch.no_grad()
def draw_distractors(model: Any, source: Source, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Sentences of books as hidden states and masks (see `answer_loss`)."""
    found = []
    for _ in range(16):
        start = int(rng.integers(len(source.books) - 768))
        ids = source.books[start : start + 768].astype(np.int64)
        row = chat_row(source, source.encode, source.decode, [source.bos, ids], len(ids) + 1)
        hidden, _ = read_rows(model, [row])
        found.append(_spans(hidden, [(0, a, b) for a, b in row.sentences], model.sentences.longest))
    return torch.cat([x for x, _ in found]), torch.cat([inside for _, inside in found])


def set_statistics(model: Any, rows: list[Any]) -> None:
    """Set the mean and deviation by which the encoder standardises hidden states."""
    with torch.no_grad():
        hidden, _ = read_rows(model, rows)
    flat = torch.cat([x[8 : len(row.tokens)] for x, row in zip(hidden, rows, strict=True)]).float()
    model.encoder.mean.data.copy_(flat.mean(0))
    model.encoder.deviation.data.copy_(flat.std(0) + 1e-3)


def untrained(args: argparse.Namespace) -> Any:
    """The pretrained model with a new memory, ready for training."""
    torch.manual_seed(args.seed)
    made = remanence.attach(args.base, kind="sentences", window=512, rank=args.rank, recalled=args.recalled)
    model = made.model.to(args.device)
    model.base.to(DTYPE)
    model.attached.window = None  # rows are read with a mask of their own
    if args.device == "cuda":
        fuse_norms(model.base)
    else:
        use_grouped_attention(model.base)
    return model


def fuse_norms(base: nn.Module) -> None:
    """Compute the norms of a pretrained model with one kernel each, which takes less time in training."""
    for module in base.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            weight, eps = module.weight, module.variance_epsilon
            module.forward = lambda x, weight=weight, eps=eps: F.rms_norm(x, weight.shape, weight, eps)


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Attention as matrix products, which on a CPU takes a third of the time of the fused operator when gradients are
    needed. Long inputs are computed in blocks of queries, each with the keys that its rows see.
    """
    rows, heads, length, dim = query.shape
    shared, found = key.shape[1], []
    for start in range(0, length, length if torch.is_grad_enabled() else 128):
        stop = length if torch.is_grad_enabled() else start + 128
        allowed = mask[:, :, start:stop]
        seen = slice(None) if stop - start == length else allowed.any((0, 1, 2)).nonzero().squeeze(1)
        allowed = allowed[..., seen]
        q = (query[:, :, start:stop] * scaling).reshape(rows, shared, -1, dim)
        score = (q @ key[:, :, seen].mT).view(rows, shared, heads // shared, *allowed.shape[2:])
        bias = torch.zeros_like(allowed, dtype=score.dtype).masked_fill(~allowed, -1e4)
        weight = (score + bias.unsqueeze(2)).softmax(-1).view(rows, shared, -1, allowed.shape[3])
        found.append((weight @ value[:, :, seen]).view(rows, heads, -1, dim))
    return torch.cat(found, 2).transpose(1, 2), None


def use_grouped_attention(base: nn.Module) -> None:
    """Compute the attention of a pretrained model with `grouped_attention`. Every call must be given a mask."""
    from transformers import AttentionInterface

    AttentionInterface.register("grouped", grouped_attention)
    base.config._attn_implementation = "grouped"


class Replay:
    """Earlier rows with their hidden states. Further updates of the encoder with them need no pretrained model."""

    def __init__(self, rows: int, rng: np.random.Generator) -> None:
        self.rows, self.rng, self.stored = rows, rng, []

    def add(self, rows: list[Any], hidden: Tensor) -> None:
        """Store rows and their hidden states ``[b t d]``."""
        self.stored += [(row, own[: len(row.tokens)].clone()) for row, own in zip(rows, hidden, strict=True)]

    def draw(self) -> tuple[list[Any], Tensor]:
        """Random rows and their hidden states, padded."""
        some = self.rng.permutation(len(self.stored))[: self.rows]
        rows, hidden = zip(*(self.stored[n] for n in some), strict=True)
        return list(rows), nn.utils.rnn.pad_sequence(hidden, batch_first=True)


def train(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    model, source = untrained(args), Source(args.cache)
    x, inside = draw_distractors(model, source, np.random.default_rng(args.seed))
    parameters = [p for _, p in model.saved_parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in model.encoder.parameters() if p.requires_grad], "lr": args.encoder_lr},
        {"params": list(model.adapter.parameters()), "lr": args.lr},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.01, fused=args.device == "cuda")
    rates = [args.encoder_lr, args.lr]
    checkpoint, log = args.out / "checkpoint.pt", []
    first, spent = 0, 0.0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True, map_location=args.device)
        first, spent, log = saved["step"], saved["seconds"], saved["log"]
        for name, parameter in model.saved_parameters():
            parameter.data.copy_(saved["weights"][name])
        optimizer.load_state_dict(saved["optimizer"])
    else:
        set_statistics(model, source.rows(args, 10**6))
    encode_unknown = lambda rng: [*source.encode(str(pick(rng, UNKNOWN))), model.sentences.format.end]
    feed, replay = batches(args, first), Replay(args.replay, np.random.default_rng(args.seed))
    rows = next(feed)
    started, call, saved_at, recent, step = time.time() - spent, time.time(), time.time(), [], first
    for number in range(first, args.steps):
        progress = max(number / args.steps, (time.time() - started) / args.seconds)
        if progress >= 1 or time.time() - call > args.pause:
            break
        rate = min(1, (number + 1) / args.warmup) * min(1, max(0.02, (1 - progress) / args.decay))
        for group, own in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = own * rate
        rng = np.random.default_rng([args.seed, number, 10**6])
        some = torch.from_numpy(rng.permutation(len(x))[:96]).to(x.device)
        others = (x[some], inside[some])
        hidden, cache = read_rows(model, rows)
        losses = answer_loss(
            model, rows, rng, answers=args.answers, unknown=encode_unknown, part=args.part, distractors=others,
            window=None if rng.random() < args.whole_window else 128, read=(hidden, cache),
        )  # fmt: skip
        if args.replay:
            if replay.stored:
                addressing_loss(model, *replay.draw(), distractors=others).backward()
            replay.add(rows, hidden)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent.append(losses)
        step = number + 1
        if len(recent) == args.every:
            mean = np.mean([each[:3] for each in recent], 0).tolist()
            count, tokens = np.sum([each[3:] for each in recent], 0).tolist()
            log.append([step, time.time() - started, *mean, count])
            recent = []
            print(f"seed {args.seed} step {step} {log[-1][1]:.0f} s: addressing {mean[0]:.3f}, {mean[1]:.3f} first; "
                  f"reading {mean[2]:.4f} nats; {count} answers, {tokens} tokens", flush=True)  # fmt: skip
        if step < args.steps:
            rows = next(feed)
        if time.time() - saved_at > args.save_every:
            save_checkpoint(model, optimizer, step, time.time() - started, log, args.out)
            saved_at = time.time()
    save_checkpoint(model, optimizer, step, time.time() - started, log, args.out)
    save_model(model, log, args)


def save_checkpoint(
    model: Any, optimizer: Any, step: int, seconds: float, log: list[Any], folder: Path
) -> None:
    """Write all that training continues from."""
    weights = {name: p.detach() for name, p in model.saved_parameters()}
    data = {"step": step, "seconds": seconds, "log": log, "weights": weights}
    torch.save(data | {"optimizer": optimizer.state_dict()}, folder / "checkpoint.new")
    (folder / "checkpoint.new").rename(folder / "checkpoint.pt")


def save_model(model: Any, log: list[Any], args: argparse.Namespace) -> None:
    """Write the model folder with parameters in bfloat16, and the log. The model is no longer trained after this."""
    for _, parameter in model.saved_parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16)
    model.attached.window = model.config.window
    model.save(args.out / "model")
    settings = {name: str(value) for name, value in vars(args).items() if name != "run"}
    write_json(args.out / "log.json", {"settings": settings, "log": log})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    own = commands.add_parser("prepare")
    own.set_defaults(run=prepare)
    own.add_argument("base", type=Path)
    for name in ("books", "kamel", "cache"):
        own.add_argument(f"--{name}", type=Path, required=True)
    own = commands.add_parser("replies")
    own.set_defaults(run=answer_general)
    own.add_argument("base", type=Path)
    own.add_argument("--cache", type=Path, required=True)
    own.add_argument("--tokens", type=int, default=96, help="the longest reply")
    own.add_argument("--batch", type=int, default=640 if torch.cuda.is_available() else 40)
    own.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    own = commands.add_parser("train")
    own.set_defaults(run=train)
    own.add_argument("base", type=Path)
    for name in ("cache", "out"):
        own.add_argument(f"--{name}", type=Path, required=True)
    for name, value in {"steps": 3000, "rows": 16, "answers": 14, "part": 128, "length": 1152, "book": 400, "rank": 32,
                        "recalled": 5, "warmup": 30, "every": 25, "workers": 4, "replay": 0, "threads": 2,
                        "seed": 0}.items():  # fmt: skip
        own.add_argument(f"--{name}", type=int, default=value)
    for name, value in {
        "seconds": 3600.0,
        "pause": 1e9,
        "save-every": 120.0,
        "lr": 1e-3,
        "encoder-lr": 1e-3,
        "decay": 0.5,
        "whole-window": 0.25,
    }.items():
        own.add_argument(f"--{name}", type=float, default=value)
    own.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
