"""Pilot: a memory of sentences for SmolLM2-135M. What a question recalls is read by the pretrained model as text.

    python -m experiments.attach.recall BASE.gguf TOKENIZER.json BOOKS KAMEL.jsonl.xz --out FOLDER

Text is cut into segments, about a sentence each. A segment's key is a learned average of hidden states of the frozen
model, its value the segment's tokens. A user's turn is the query: the segments with the nearest keys are put into the
context in front of the answer, in the order in which they were read. Two parts are trained, at the same time:

- the encoder of keys and queries, with a contrastive loss on which segment states the answer;
- low-rank updates (LoRA) of the pretrained weights that act on the recalled text and the answer only, so that any
  other text has the logits of the pretrained model.

The questions that are tested concern relations and passages that training has none of.
"""

from __future__ import annotations

import argparse
import json
import math
import queue
import re
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from experiments.attach import more_passages, more_relations, relations
from experiments.attach.conversations import (
    ASSISTANT,
    END,
    Facts,
    _distinct,
    _of_kamel,
    _of_relations,
    _short,
    pick,
    user,
)
from experiments.attach.meaning import (
    DEVICE,
    DIM,
    DTYPE,
    KV_HEADS,
    LAYERS,
    WIDTH,
    Base,
    rms_norm,
    rotation,
    seen_mask,
)

ENCODED = (12, 20)
"""Layers whose inputs are averaged."""
LONGEST, SHORTEST = 48, 4
"""Tokens of a segment."""
RECALLED = 5
"""Segments that a turn recalls."""
USER = 4093
"""The token that names the user's role."""
RECALL = "<|im_start|>system\nFrom memory:\n"
UNKNOWN = ["I don't know.", "I don't know. You haven't told me.", "I don't know, you never told me that.",
           "I don't know. That has not come up yet.", "I don't know that one."]  # fmt: skip
UNCHECKPOINTED = 80_000 if torch.cuda.is_available() else 2_000
"""Tokens of a step up to which activations are kept for backward."""
ALL_RELATIONS = [*relations.TRAIN, *more_relations.TRAIN]
ALL_PASSAGES = [*relations.PASSAGES_TRAIN, *more_passages.PASSAGES_TRAIN]


class Text:
    """Tokens of texts and how they are cut."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(path))
        tokens = [self.tokenizer.id_to_token(index) or "" for index in range(self.tokenizer.get_vocab_size())]
        self.special = np.array([token.startswith("<|") for token in tokens])
        self.newline = np.array(["Ċ" in token for token in tokens])
        self.ends = np.array(
            [token.rstrip("\"')*_\u201d\u2019")[-1:] in (".", "?", "!") and token != "" for token in tokens]
        )
        self.opens = np.array([token[:1] in ("Ġ", "Ċ") or token.startswith("<|") for token in tokens])

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def segments(self, tokens: np.ndarray) -> list[tuple[int, int]]:
        """Spans without special tokens, cut behind sentences and lines; short ones belong to the next."""
        special, newline = self.special[tokens], self.newline[tokens]
        follows = np.append(self.opens[tokens[1:]], True)
        border = newline | (self.ends[tokens] & follows)
        found: list[tuple[int, int]] = []
        start, skipped = 0, False
        for place in range(len(tokens)):
            if special[place]:
                if place - start >= 2 and not skipped:
                    found.append((start, place))
                start, skipped = place + 1, False
                if tokens[place] == 1:  # the role and its line; what the assistant says is not remembered
                    skipped = place + 1 < len(tokens) and tokens[place + 1] != USER
                    start = place + 3
            elif skipped or place < start:
                continue
            elif place - start + 1 >= LONGEST or (border[place] and place - start + 1 >= SHORTEST):
                found.append((start, place + 1))
                start = place + 1
        if len(tokens) - start >= 2 and not skipped:
            found.append((start, len(tokens)))
        return found


class Question(NamedTuple):
    kind: str
    text: str
    answers: list[str]
    value: str
    """What a correct answer contains; empty: it was never stated."""
    sources: tuple[int, ...]
    """Numbers of the turns that state it, and..."""
    stated: str
    """...the value in the words of the statement."""


class Dialogue(NamedTuple):
    turns: list[str]
    questions: list[Question]


ROLES = re.compile(r"<\|im_start\|>(user|assistant)\n?")


def dialogue(facts: Facts, rng: np.random.Generator, count: int, kind: str) -> Dialogue:
    """Facts stated in turns, and questions about them. `kind`: "train", "trained", "held out", "passages",
    "held out updates", "held out reversed", "held out unknown".
    """
    held, exam = kind not in ("train", "trained"), kind != "train"
    everyday = relations.HELD if held else ALL_RELATIONS
    kamel = facts.held_out if held else facts.trained
    draw = lambda r: (
        _of_kamel(r, kamel) if r.random() < (0.4 if held else 0.2) else _of_relations(r, everyday)
    )
    turns: list[str] = []
    questions: list[Question] = []
    acks = list(relations.ACKS) + list(more_passages.ACKS)
    say = lambda text: turns.append(user(text) + ASSISTANT + str(pick(rng, acks)) + END)
    if kind == "passages" or (kind == "train" and rng.random() < 0.6):
        known = relations.PASSAGES_HELD if held else ALL_PASSAGES
        for index in rng.permutation(len(known))[: 2 if exam else int(rng.integers(1, 5))]:
            passage = relations.draw_passage(rng, known[index])
            say(passage["text"])
            questions += [
                Question("passage", q["question"], [q["answer_full"], q["answer_short"]], q["answer_short"],
                         (len(turns) - 1,), passage["values"][q["slot"]])
                for q in passage["qas"]
            ]  # fmt: skip
    drawn = [] if kind == "passages" else _distinct(rng, count, draw)
    subjects = {}
    for fact in drawn:
        subjects.setdefault((fact["subject"] or "").lower(), []).append(fact)
    place, where = 0, {}
    while place < len(drawn):
        several = 4 if exam else int(rng.integers(1, 6))
        prefix = "Please remember this." if exam else str(pick(rng, relations.STATE_PREFIXES))
        group = drawn[place : place + several]
        stated = " ".join(fact["statement"] for fact in group)
        for fact in group:
            where[id(fact)] = len(turns)
        say(relations.with_prefix(prefix, stated))
        place += several
        if not exam and rng.random() < 0.25:
            remark, reply = pick(rng, [*relations.SMALLTALK, *more_passages.SMALLTALK])
            turns.append(user(remark) + ASSISTANT + reply + END)
    values = [fact["value"].lower() for fact in drawn]
    changed: dict[int, int] = {}
    for fact in drawn:
        chance = 0.1 if not exam else 1.0 if kind == "held out updates" and rng.random() < 0.5 else 0.0
        if rng.random() < chance and fact["other"].lower() not in values:
            say(fact["update"](fact["other"]))
            changed[id(fact)] = len(turns) - 1
    for fact in drawn:
        label = fact["source"]
        if id(fact) in changed:
            new = fact["other"]
            answers = [new if fact["answer_full"] is None or fact["value"] not in fact["answer_full"]
                       else fact["answer_full"].replace(fact["value"], new)]  # fmt: skip
            questions.append(Question("update", fact["question"], answers, new, (changed[id(fact)],), new))
            continue
        if kind == "held out updates":
            continue
        chance = {"train": 0.2, "held out reversed": 1.0}.get(kind, 0.0)
        if fact.get("reverse") and rng.random() < chance and values.count(fact["value"].lower()) == 1:
            answer = fact["reverse_answer"]
            questions.append(
                Question("reversed", fact["reverse"], [answer], answer, (where[id(fact)],), fact["subject"])
            )
            continue
        if kind == "held out reversed":
            continue
        answers = [fact["answer_full"], _short(fact)] if fact["answer_full"] else [_short(fact)]
        questions.append(
            Question(label, fact["question"], answers, _short(fact), (where[id(fact)],), fact["value"])
        )
    stated_pairs = {(fact["id"], fact["subject"]) for fact in drawn}
    unknown = max(1, len(questions) // 6) if not exam else 10 if kind == "held out unknown" else 0
    for _ in range(unknown):
        fact = draw(rng)
        if (fact["id"], fact["subject"]) not in stated_pairs and fact["subject"]:
            questions.append(Question("unknown", fact["question"], UNKNOWN, "", (), ""))
    if kind == "held out unknown":
        questions = [q for q in questions if q.kind == "unknown"]
    return Dialogue(turns, [questions[index] for index in rng.permutation(len(questions))])


class Row(NamedTuple):
    """Turns, a text, then the questions as turns of their own. Spans are of tokens."""

    tokens: np.ndarray
    segments: list[tuple[int, int]]
    queries: list[tuple[int, int]]
    positive: list[list[int]]
    """For each question the segments that state its answer."""
    prompts: list[list[int]]
    answers: list[list[int]]
    questions: list[Question]


def make_row(
    text: Text, drawn: Dialogue, rng: np.random.Generator, book: np.ndarray, length: int | None
) -> Row:
    """A dialogue as tokens: what does not fit into `length` is left out."""
    tokens: list[int] = []
    spans = []
    order = rng.permutation(len(drawn.turns)) if length else np.arange(len(drawn.turns))
    order = (
        order
        if rng.random() < 0.5 and not any(q.kind == "update" for q in drawn.questions)
        else np.sort(order)
    )
    turn_spans: dict[int, tuple[int, int]] = {}
    for number in order.tolist():
        ids = text.encode(drawn.turns[number])
        if length and len(tokens) + len(ids) > length * 0.55:
            continue
        turn_spans[number] = (len(tokens), len(tokens) + len(ids))
        tokens += ids
    if len(book):
        tokens += text.encode(f"<|im_start|>user\n{pick(rng, more_passages.READ)}\n") + book.tolist()
        tokens += text.encode(f"{END}{ASSISTANT}{pick(rng, more_passages.DONE)}{END}")
    front = len(tokens)
    segments = text.segments(np.array(tokens))
    queries, positive, prompts, answers, questions = [], [], [], [], []
    for question in drawn.questions:
        if any(number not in turn_spans for number in question.sources):
            continue
        ids = text.encode(user(question.text))
        answer = text.encode(str(pick(rng, question.answers)) + "<|im_end|>")
        if length and len(tokens) + len(ids) + len(answer) + 8 > length:
            break
        own: list[int] = []
        for number in question.sources:
            begin, end = turn_spans[number]
            inside = [i for i, (a, b) in enumerate(segments) if a >= begin and b <= end]
            own += [
                i
                for i in inside
                if question.stated.lower() in text.decode(tokens[slice(*segments[i])]).lower()
            ]
        if question.sources and not own:
            continue
        queries.append((len(tokens) + 3, len(tokens) + len(ids) - 2))
        positive.append(own)
        prompts.append(ids)
        answers.append(answer)
        questions.append(question)
        tokens += ids + text.encode(ASSISTANT) + answer + text.encode("\n")
    spans = [span for span in segments if span[1] <= front]
    return Row(np.array(tokens), spans, queries, positive, prompts, answers, questions)


class Encoder(nn.Module):
    """Keys and queries of spans: per head a learned average of hidden states, then a linear map to unit length."""

    def __init__(self, heads: int = 8, width: int = 96, size: int = 384) -> None:
        super().__init__()
        dim = DIM * len(ENCODED)
        self.heads = heads
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("deviation", torch.ones(dim))
        self.value = nn.Parameter(torch.randn(dim, heads * width) / math.sqrt(dim))
        self.weight_key = nn.Parameter(torch.zeros(dim, heads))
        self.weight_query = nn.Parameter(torch.zeros(dim, heads))
        start = torch.linalg.qr(torch.randn(heads * width, size))[0]
        self.key, self.query = nn.Parameter(start.clone()), nn.Parameter(start.clone())
        self.temperature = nn.Parameter(torch.tensor(0.05).log())

    def forward(self, x: Tensor, spans: Tensor, *, query: bool) -> Tensor:
        """x ``[t, d]``, spans ``[n, 2]`` of at most `LONGEST` tokens -> ``[n, size]``."""
        reach = LONGEST + 8
        places = spans[:, :1] + torch.arange(reach, device=x.device)
        inside = places < spans[:, 1:]
        taken = (x[places.clamp(max=len(x) - 1)].float() - self.mean) / self.deviation
        score = taken @ (self.weight_query if query else self.weight_key)
        weight = score.masked_fill(~inside[..., None], -1e4).softmax(1)
        value = (taken @ self.value).unflatten(-1, (self.heads, -1))
        pooled = torch.einsum("nlh,nlhe->nhe", weight, value).flatten(1)
        return F.normalize(F.normalize(pooled, dim=-1) @ (self.query if query else self.key), dim=-1)


class Lora(nn.Module):
    """Low-rank updates of every matrix of the layers."""

    SHAPES: ClassVar = {
        "attn_q": (DIM, DIM), "attn_k": (DIM, KV_HEADS * WIDTH), "attn_v": (DIM, KV_HEADS * WIDTH),
        "attn_output": (DIM, DIM), "ffn_gate": (DIM, 1536), "ffn_up": (DIM, 1536), "ffn_down": (1536, DIM),
    }  # fmt: skip

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()
        for layer in range(LAYERS):
            for name, (inner, outer) in self.SHAPES.items():
                self.down[f"{layer}_{name}"] = nn.Parameter(torch.randn(inner, rank) / math.sqrt(inner))
                self.up[f"{layer}_{name}"] = nn.Parameter(torch.zeros(rank, outer))

    def forward(self, layer: int, name: str, x: Tensor, active: Tensor) -> Tensor:
        key = f"{layer}_{name}"
        return ((x * active) @ self.down[key].to(x.dtype)) @ self.up[key].to(x.dtype) * 2


def adapted_block(base: Base, lora: Lora | None, layer: int, h: Tensor, turn: Any, active: Tensor) -> Tensor:
    def linear(name: str, x: Tensor) -> Tensor:
        y = F.linear(x, base.weights[f"blk.{layer}.{name}.weight"])
        return y if lora is None else y + lora(layer, name, x, active)

    rows, tokens, _ = h.shape
    x = rms_norm(h, base.weights[f"blk.{layer}.attn_norm.weight"])
    q, k, v = (linear(f"attn_{c}", x).view(rows, tokens, -1, WIDTH).transpose(1, 2) for c in "qkv")
    rotate = lambda y: y * turn[0] + torch.cat([-y[..., WIDTH // 2 :], y[..., : WIDTH // 2]], -1) * turn[1]
    seen = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
    h = h + linear("attn_output", seen.transpose(1, 2).reshape(h.shape))
    x = rms_norm(h, base.weights[f"blk.{layer}.ffn_norm.weight"])
    return h + linear("ffn_down", F.silu(linear("ffn_gate", x)) * linear("ffn_up", x))


def adapted(base: Base, lora: Lora | None, tokens: Tensor, active: Tensor) -> Tensor:
    """Last hidden states of rows shorter than the window."""
    h, turn, mask = base.embedding[tokens], rotation(tokens.shape[1]), active[..., None].to(DTYPE)
    for layer in range(LAYERS):
        if torch.is_grad_enabled() and tokens.numel() > UNCHECKPOINTED:
            h = checkpoint(adapted_block, base, lora, layer, h, turn, mask, use_reentrant=False)
        else:
            h = adapted_block(base, lora, layer, h, turn, mask)
    return rms_norm(h, base.weights["output_norm.weight"])


@torch.no_grad()
def encode_states(base: Base, tokens: Tensor) -> Tensor:
    """Inputs of the encoded layers ``[b t 2d]``; attention over 512 tokens."""
    h, mask, turn = base.embedding[tokens], seen_mask(tokens.shape[1], 512), rotation(tokens.shape[1])
    found = []
    for layer in range(max(ENCODED) + 1):
        if layer in ENCODED:
            found.append(rms_norm(h, base.weights[f"blk.{layer}.attn_norm.weight"]))
        if layer < max(ENCODED):
            h = base.block(layer, h, mask, turn)
    return torch.cat(found, -1)


def long_states(base: Base, tokens: np.ndarray, piece: int = 3072, overlap: int = 512) -> Tensor:
    """The same of a long text, in pieces that see the last `overlap` tokens of the piece before."""
    found = []
    for start in range(0, len(tokens), piece - overlap):
        begin = max(0, start)
        states = encode_states(
            base, torch.from_numpy(tokens[begin : begin + piece].astype(np.int64)).to(DEVICE)[None]
        )[0]
        found.append(states if start == 0 else states[overlap:])
        if begin + piece >= len(tokens):
            break
    return torch.cat(found)


def recall_block(text: Text, segments: list[list[int]], lead: list[int], tail: list[int]) -> list[int]:
    block = list(lead)
    for ids in segments:
        own = list(ids)
        while own and text.newline[own[-1]]:
            own.pop()
        while own and text.newline[own[0]]:
            own.pop(0)
        block += [*own, 198]
    return block + tail


class Recaller:
    """Fixed token sequences around what is recalled."""

    def __init__(self, text: Text) -> None:
        self.text = text
        self.lead, self.tail = text.encode(RECALL), text.encode(END + ASSISTANT)

    def rows(
        self, contexts: list[list[int]], recalled: list[list[list[int]]]
    ) -> tuple[list[list[int]], list[int]]:
        """Prompts up to the answer, and where the recalled part starts."""
        rows, starts = [], []
        for context, segments in zip(contexts, recalled, strict=True):
            block = recall_block(self.text, segments, self.lead, self.tail)
            starts.append(len(context))
            rows.append(context + block)
        return rows, starts


def padded(rows: list[list[int]]) -> Tensor:
    size = max(map(len, rows))
    size += -size % 32
    out = np.zeros((len(rows), size), np.int64)
    for index, row in enumerate(rows):
        out[index, : len(row)] = row
    return torch.from_numpy(out).to(DEVICE)


# ------------------------------------------------------------------ training


class Source:
    def __init__(self, args: argparse.Namespace) -> None:
        self.text, self.facts = Text(args.tokenizer), Facts(args.kamel)
        self.books, self.args = np.load(args.books / "train.npy", mmap_mode="r"), args

    def row(self, rng: np.random.Generator) -> Row:
        count = int(rng.integers(4, 56))
        size = int(rng.integers(100, 500))
        start = int(rng.integers(len(self.books) - size))
        book = np.asarray(self.books[start : start + size])
        return make_row(self.text, dialogue(self.facts, rng, count, "train"), rng, book, self.args.length)

    def step(self, number: int) -> list[Row]:
        return [
            self.row(np.random.default_rng([self.args.seed, number, row])) for row in range(self.args.rows)
        ]


_SOURCE: dict[str, Source] = {}


def _draw(args: argparse.Namespace, number: int) -> list[Row]:
    return _SOURCE.setdefault("own", Source(args)).step(number)


def batches(args: argparse.Namespace):
    ready: queue.Queue[list[Row]] = queue.Queue(8)

    def feed() -> None:
        with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
            waiting: list[Any] = []
            for number in range(args.steps):
                waiting.append(pool.submit(_draw, args, number))
                if len(waiting) == 3 * args.workers:
                    ready.put(waiting.pop(0).result())
            for job in waiting:
                ready.put(job.result())

    threading.Thread(target=feed, daemon=True).start()
    for _ in range(args.steps):
        yield ready.get()


def train(
    base: Base, encoder: Encoder, lora: Lora, text: Text, args: argparse.Namespace
) -> list[dict[str, float]]:
    recaller, rng = Recaller(text), np.random.default_rng(args.seed + 1)
    groups = [
        {"params": list(encoder.parameters()), "lr": args.encoder_lr},
        {"params": list(lora.parameters()), "lr": args.lr},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.01)
    rates, began, log, history = [args.encoder_lr, args.lr], time.time(), [], []
    for number, rows in enumerate(batches(args)):
        progress = max(number / args.steps, (time.time() - began) / args.seconds)
        rate = min(1, (number + 1) / 30) * min(1, max(0.02, (1 - progress) / 0.4))
        for group, own in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = own * rate
        states = encode_states(base, padded([row.tokens.tolist() for row in rows]))
        loss, count, found = torch.zeros((), device=DEVICE), 0, 0
        contexts, recalled, answers, kinds = [], [], [], []
        keys = [
            encoder(states[i], torch.tensor(row.segments, device=DEVICE), query=False)
            for i, row in enumerate(rows)
        ]
        for index, row in enumerate(rows):
            if not row.queries:
                continue
            q = encoder(states[index], torch.tensor(row.queries, device=DEVICE), query=True)
            scores = q @ keys[index].mT / encoder.temperature.exp()
            # Segments of other rows' books cannot hold the answer: more wrong ones to tell apart.
            other = torch.cat([keys[j][-20:] for j in range(len(rows)) if j != index][:24])
            all_scores = torch.cat([scores, q @ other.mT / encoder.temperature.exp()], 1)
            target = torch.zeros_like(scores)
            for n, own in enumerate(row.positive):
                target[n, own] = 1
            known = target.sum(1) > 0
            if known.any():
                log_p = all_scores.log_softmax(1)[:, : scores.shape[1]].masked_fill(target == 0, -1e4)
                loss = loss - log_p[known].logsumexp(1).sum()
                best = scores.argmax(1)
                found += int(target[torch.arange(len(best)), best][known].sum())
                count += int(known.sum())
            top = scores.topk(min(RECALLED, scores.shape[1]), 1).indices.tolist()
            for n in rng.permutation(len(row.queries))[: args.read].tolist():
                chosen, own = list(top[n]), row.positive[n]
                stated = True
                if own:
                    chance = rng.random()
                    if chance < 0.06:  # not recalled: not known
                        chosen, stated = [c for c in chosen if c not in own], False
                    elif not set(own) & set(chosen):
                        chosen = [*chosen[:-1], own[-1]]
                if rng.random() < 0.3:
                    drop = int(rng.integers(0, 3))
                    chosen = [c for i, c in enumerate(chosen) if c in own or i < len(chosen) - drop]
                begin = row.queries[n][0] - 3
                back = int(rng.integers(0, 100)) if rng.random() < 0.5 else 0
                contexts.append(row.tokens[max(0, begin - back) : begin].tolist() + row.prompts[n])
                recalled.append([row.tokens[slice(*row.segments[c])].tolist() for c in sorted(chosen)])
                answers.append(
                    row.answers[n] if stated else text.encode(str(pick(rng, UNKNOWN)) + "<|im_end|>")
                )
                kinds.append("unknown" if not stated else row.questions[n].kind)
        prompts, starts = recaller.rows(contexts, recalled)
        tokens = padded([p + a for p, a in zip(prompts, answers, strict=True)])
        place = torch.arange(tokens.shape[1], device=DEVICE)
        active = place >= torch.tensor(starts, device=DEVICE)[:, None]
        begin = torch.tensor([len(p) for p in prompts], device=DEVICE)[:, None]
        end = torch.tensor([len(p) + len(a) for p, a in zip(prompts, answers, strict=True)], device=DEVICE)[
            :, None
        ]
        counted = ((place >= begin - 1) & (place < end - 1))[:, :-1]
        hidden = adapted(base, lora, tokens, active)[:, :-1][counted]
        reading = F.cross_entropy(F.linear(hidden, base.embedding).float(), tokens[:, 1:][counted])
        addressing = loss / max(1, count)
        (addressing * 0.3 + reading).backward()
        nn.utils.clip_grad_norm_(list(lora.parameters()), 1.0)
        nn.utils.clip_grad_norm_(list(encoder.parameters()), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        log.append(
            (
                float(addressing.detach()),
                found / max(1, count),
                float(reading.detach()),
                len(contexts),
                tokens.numel(),
            )
        )
        if number % 25 == 24 or number == 2:
            mean = np.mean(log[-25:], 0)
            history.append({"step": number + 1, "addressing": mean[0], "found": mean[1], "reading": mean[2]})
            print(f"step {number + 1} {time.time() - began:.0f} s: addressing {mean[0]:.3f} nats, {mean[1]:.3f} first; "
                  f"reading {mean[2]:.4f} nats; {mean[3]:.0f} questions, {mean[4]:.0f} tokens", flush=True)  # fmt: skip
        if progress >= 1:
            break
    return history


# ------------------------------------------------------------------ tests


@torch.no_grad()
def generate(
    base: Base, lora: Lora | None, text: Text, rows: list[list[int]], starts: list[int], most: int = 28
) -> list[str]:
    """Greedy answers."""
    rows, done, sizes = [list(row) for row in rows], [False] * len(rows), [len(row) for row in rows]
    for _ in range(most):
        tokens = padded(rows)
        active = torch.arange(tokens.shape[1], device=DEVICE) >= torch.tensor(starts, device=DEVICE)[:, None]
        last = torch.tensor([len(row) - 1 for row in rows], device=DEVICE)
        hidden = torch.cat(
            [adapted(base, lora, t, a) for t, a in zip(tokens.split(64), active.split(64), strict=True)]
        )
        chosen = F.linear(hidden[torch.arange(len(rows)), last], base.embedding).argmax(-1).tolist()
        for index, token in enumerate(chosen):
            if not done[index]:
                rows[index].append(token)
                done[index] = token == 2
        if all(done):
            break
    return [text.decode(row[size:]).replace("<|im_end|>", "") for row, size in zip(rows, sizes, strict=True)]


class Bm25:
    """Okapi BM25 over segments, as a control."""

    def __init__(self, documents: list[str]) -> None:
        self.words = [re.findall(r"\w+", document.lower()) for document in documents]
        self.mean = np.mean([len(words) for words in self.words])
        self.frequency: dict[str, int] = {}
        for words in self.words:
            for word in set(words):
                self.frequency[word] = self.frequency.get(word, 0) + 1

    def top(self, query: str, count: int) -> list[int]:
        scores = np.zeros(len(self.words))
        for word in re.findall(r"\w+", query.lower()):
            known = self.frequency.get(word, 0)
            if not known:
                continue
            weight = math.log(1 + (len(self.words) - known + 0.5) / (known + 0.5))
            for index, words in enumerate(self.words):
                if n := words.count(word):
                    scores[index] += weight * n * 2.2 / (n + 1.2 * (0.25 + 0.75 * len(words) / self.mean))
        return np.argsort(-scores, kind="stable")[:count].tolist()


def is_correct(question: Question, answer: str) -> bool:
    if not question.value:
        return "don't know" in answer.lower()
    return re.search(rf"(?<!\w){re.escape(question.value.lower())}(?!\w)", answer.lower()) is not None


@torch.no_grad()
def examine(
    base, encoder, lora, text, facts, books, kind, count, distance, dialogues, mode="on", show=0
) -> dict[str, Any]:
    recaller = Recaller(text)
    right: dict[str, list[int]] = {}
    found, said_unknown, shown = [], [], []
    for number in range(dialogues):
        rng = np.random.default_rng([11, number, count, len(kind)])
        start = int(rng.integers(len(books) - distance)) if distance < len(books) else 0
        book = np.asarray(books[start : start + distance])
        row = make_row(text, dialogue(facts, rng, count, kind), rng, book, None)
        if not row.queries:
            continue
        front = row.queries[0][0] - 3
        stream = row.tokens[:front]
        keys_x = long_states(base, stream)
        spans = torch.tensor(row.segments, device=DEVICE)
        keys = torch.cat([encoder(keys_x, part, query=False) for part in spans.split(512)])
        tail = stream[-300:].tolist()
        contexts, recalled = [], []
        stored = [stream[slice(*span)].tolist() for span in row.segments]
        bm25 = Bm25([text.decode(ids) for ids in stored]) if mode == "bm25" else None
        query_rows = [tail + prompt for prompt in row.prompts]
        states = torch.cat([encode_states(base, part) for part in padded(query_rows).split(32)])
        for n, prompt in enumerate(row.prompts):
            span = torch.tensor([[len(tail) + 3, len(tail) + len(prompt) - 2]], device=DEVICE)
            q = encoder(states[n], span, query=True)
            top = (q @ keys.mT)[0].topk(min(RECALLED, len(keys))).indices.tolist()
            if mode == "bm25":
                top = bm25.top(row.questions[n].text, RECALLED)
            if row.positive[n]:
                found.append(len(set(top) & set(row.positive[n])) > 0)
            contexts.append(tail[-100:] + prompt)
            recalled.append(
                []
                if mode in ("frozen", "base")
                else [stream[slice(*row.segments[i])].tolist() for i in sorted(top)]
            )
        if mode == "base":
            rows, starts = [c + text.encode(ASSISTANT) for c in contexts], [10**6] * len(contexts)
        else:
            rows, starts = recaller.rows(contexts, recalled)
        answers = generate(base, None if mode == "base" else lora, text, rows, starts)
        for n, (question, answer) in enumerate(zip(row.questions, answers, strict=True)):
            ok = is_correct(question, answer)
            right.setdefault(question.kind, []).append(int(ok))
            if question.value:
                said_unknown.append("don't know" in answer.lower())
            if not ok and len(shown) < show:
                shown.append({"q": question.text, "value": question.value, "answer": answer,
                              "recalled": [text.decode(ids) for ids in recalled[n]]})  # fmt: skip
    result = {"kind": kind, "facts": count, "distance": distance, "mode": mode,
              "correct": {label: [sum(own), len(own)] for label, own in right.items()},
              "recalled": round(float(np.mean(found)), 3) if found else None,
              "wrongly unknown": round(float(np.mean(said_unknown)), 3) if said_unknown else None}  # fmt: skip
    return result if not show else {**result, "errors": shown}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("base", "tokenizer", "books", "kamel"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--exam-seconds", type=float, default=150)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--read", type=int, default=12, help="questions of a row that are answered")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--encoder-lr", type=float, default=1e-3)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--init", type=Path, help="weights to continue from")
    parser.add_argument("--small", action="store_true", help="few exams, to try the script")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    text, base = Text(args.tokenizer), Base(args.base)
    encoder, lora = Encoder().to(DEVICE), Lora(args.rank).to(DEVICE)
    source = Source(args)
    some = padded([source.row(np.random.default_rng([3, n])).tokens.tolist() for n in range(4)])
    flat = encode_states(base, some).float()[:, 8:].flatten(0, 1)
    encoder.mean.copy_(flat.mean(0))
    encoder.deviation.copy_(flat.std(0) + 1e-3)
    if args.init:
        from safetensors.torch import load_file

        saved = {name: w.float() for name, w in load_file(args.init).items()}
        for part, module in (("encoder.", encoder), ("lora.", lora)):
            module.load_state_dict({n.removeprefix(part): w for n, w in saved.items() if n.startswith(part)})
    history = train(base, encoder, lora, text, args)
    weights = {**{f"encoder.{n}": p for n, p in encoder.state_dict().items()},
               **{f"lora.{n}": p for n, p in lora.state_dict().items()}}  # fmt: skip
    from safetensors.torch import save_file

    save_file(
        {n: p.to(torch.bfloat16).contiguous().cpu() for n, p in weights.items()},
        args.out / "recall.safetensors",
    )
    facts, books, began = Facts(args.kamel), np.load(args.books / "test.npy"), time.time()
    exams = [
        ("trained", 20, 4000, 10, "on"),
        ("held out", 20, 4000, 10, "on"),
        ("passages", 6, 4000, 14, "on"),
        ("held out reversed", 20, 4000, 12, "on"),
        ("held out updates", 20, 4000, 14, "on"),
        ("held out unknown", 20, 4000, 12, "on"),
        ("held out", 60, 4000, 4, "on"),
        ("held out", 200, 4000, 1, "on"),
        ("held out", 20, 1000, 10, "on"),
        ("held out", 20, 64000, 3, "on"),
        ("held out", 20, 256000, 2, "on"),
        ("held out", 20, 4000, 4, "frozen"),
        ("held out", 20, 4000, 4, "base"),
        ("held out", 20, 4000, 10, "bm25"),
    ]
    results = []
    for kind, count, distance, dialogues, mode in exams[:3] if args.small else exams:
        if time.time() - began > args.exam_seconds:
            break
        show = 12 if mode == "on" and distance == 4000 else 0
        dialogues = 1 if args.small else dialogues
        results.append(
            examine(base, encoder, lora, text, facts, books, kind, count, distance, dialogues, mode, show)
        )
        print(
            json.dumps({k: v for k, v in results[-1].items() if k != "errors"}),
            f"{time.time() - began:.0f} s",
            flush=True,
        )
    settings = {k: str(v) for k, v in vars(args).items()}
    (args.out / "recall.json").write_text(
        json.dumps({"settings": settings, "history": history, "rows": results}, indent=1)
    )


if __name__ == "__main__":
    main()
