"""Pilot: can a memory attached to SmolLM2-135M find facts by their meaning, asked in other words than stated?

    python -m experiments.attach.meaning BASE.gguf TOKENIZER.json BOOKS KAMEL.jsonl.xz --layers 10 17 24 --features 1024

BOOKS is a folder with ``train.npy`` and ``test.npy``, the tokens of books. The pretrained model is written out here
(weights frozen, attention over a window and the first tokens), so that a memory is some hundred lines that can all be
changed. What differs from `remanence.attach`:

- keys and queries are a gated causal average of the layer's input, per head, beside the input itself (`pool`);
- values are embeddings of tokens, and outputs begin as their transpose: what is found is a token to say, at once;
- the memory is read as it was two chunks ago, since a slow average finds its own last tokens first (`lag`);
- keys are widened to sparse features, the largest few kept (`features`, `kept`);
- some heads write an average of tokens at the average that includes them, for values stated before their subject
  (`sentence`);
- an auxiliary loss asks each head to find, among all keys of the row, the one at which a value was stated (`address`).

Results: docs/results/attach.md, rows in meaning.json beside this file.
"""

from __future__ import annotations

import argparse
import json
import math
import queue
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from experiments.attach.conversations import ASSISTANT, DONE, END, READ, Facts, Rng, pick, user

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
LAYERS, HEADS, KV_HEADS, WIDTH, DIM, THETA, EPS = 30, 9, 3, 64, 576, 100_000.0, 1e-5
"""SmolLM2-135M's."""
SINKS = 4
CHUNK = 64


class Base:
    """SmolLM2-135M from a GGUF file, frozen."""

    def __init__(self, path: Path) -> None:
        import gguf

        weights = {
            tensor.name: torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
            for tensor in gguf.GGUFReader(path).tensors
        }
        for layer in range(LAYERS):
            for name, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS)):
                key = f"blk.{layer}.{name}.weight"
                weights[key] = _unpermuted(weights[key], heads)
        self.weights = {name: w.to(torch.bfloat16).to(DEVICE, DTYPE) for name, w in weights.items()}
        self.embedding = self.weights["token_embd.weight"]

    def block(
        self, layer: int, h: Tensor, mask: Tensor, turn: tuple[Tensor, Tensor], memory: Any = None
    ) -> Tensor:
        weight = lambda name: self.weights[f"blk.{layer}.{name}.weight"]
        rows, tokens, _ = h.shape
        x = rms_norm(h, weight("attn_norm"))
        q, k, v = (
            F.linear(x, weight(f"attn_{c}")).view(rows, tokens, -1, WIDTH).transpose(1, 2) for c in "qkv"
        )
        rotate = lambda y: (
            y * turn[0] + torch.cat([-y[..., WIDTH // 2 :], y[..., : WIDTH // 2]], -1) * turn[1]
        )
        seen = F.scaled_dot_product_attention(rotate(q), rotate(k), v, attn_mask=mask, enable_gqa=True)
        h = h + F.linear(seen.transpose(1, 2).reshape(h.shape), weight("attn_output"))
        if memory is not None:
            h = h + memory(x).to(h.dtype)
        x = rms_norm(h, weight("ffn_norm"))
        return h + F.linear(
            F.silu(F.linear(x, weight("ffn_gate"))) * F.linear(x, weight("ffn_up")), weight("ffn_down")
        )

    def forward(
        self, tokens: Tensor, window: int, memories: dict[int, Memory], *, write: bool = True
    ) -> Tensor:
        """The last hidden states ``[b t d]``, normalised."""
        h, mask, turn = self.embedding[tokens], seen_mask(tokens.shape[1], window), rotation(tokens.shape[1])
        first = min(memories, default=LAYERS)
        with torch.no_grad():  # nothing below the first memory is trained
            for layer in range(first):
                h = self.block(layer, h, mask, turn)
        for layer in range(first, LAYERS):
            memory = memories.get(layer)
            if memory is not None:
                h = self.block(
                    layer, h, mask, turn, lambda x, own=memory: own(x, self.embedding[tokens], write)
                )
            elif torch.is_grad_enabled():
                h = checkpoint(self.block, layer, h, mask, turn, use_reentrant=False)
            else:
                h = self.block(layer, h, mask, turn)
        return rms_norm(h, self.weights["output_norm.weight"])

    @torch.no_grad()
    def measure(self, tokens: Tensor, memories: dict[int, Memory]) -> None:
        """Set each memory's input statistics, and the scale of its output, from some text."""
        h, mask, turn = self.embedding[tokens], seen_mask(tokens.shape[1], 512), rotation(tokens.shape[1])
        for layer in range(LAYERS):
            if layer in memories:
                x = rms_norm(h, self.weights[f"blk.{layer}.attn_norm.weight"]).float()[:, 8:].flatten(0, 1)
                scale = 2 * h.float()[:, 8:].norm(dim=-1).median()
                memories[layer].set_statistics(x, scale, self.embedding.float().mean(0))
            h = self.block(layer, h, mask, turn)


def _unpermuted(weight: Tensor, heads: int) -> Tensor:
    """A projection of queries or keys as the model has it: GGUF interleaves the halves that rotate."""
    return weight.reshape(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return (F.rms_norm(x.float(), (x.shape[-1],), None, EPS) * weight.float()).to(DTYPE)


def seen_mask(tokens: int, window: int) -> Tensor:
    place = torch.arange(tokens, device=DEVICE)
    back = place[:, None] - place
    return (back >= 0) & ((back < window) | (place < SINKS))


def rotation(tokens: int) -> tuple[Tensor, Tensor]:
    frequency = THETA ** -(torch.arange(0, WIDTH, 2, device=DEVICE).float() / WIDTH)
    angle = torch.arange(tokens, device=DEVICE).float()[:, None] * frequency
    return torch.cat([angle.cos()] * 2, -1).to(DTYPE), torch.cat([angle.sin()] * 2, -1).to(DTYPE)


def unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1, eps=1e-6)


def decayed_sum(log_decay: Tensor, x: Tensor, size: int = 128) -> Tensor:
    """``p_t = exp(log_decay_t) p_(t-1) + x_t`` of x ``[b t h e]`` and log_decay ``[b t h]``."""
    rows, tokens, heads, width = x.shape
    pad = -tokens % size
    log_decay, x = F.pad(log_decay, (0, 0, 0, pad)), F.pad(x, (0, 0, 0, 0, 0, pad))
    log_decay = log_decay.view(rows, -1, size, heads).permute(0, 1, 3, 2)
    x = x.view(rows, -1, size, heads, width).permute(0, 1, 3, 2, 4)
    total = log_decay.cumsum(-1)
    later = torch.ones(size, size, device=x.device, dtype=torch.bool).tril()
    inside = (total[..., :, None] - total[..., None, :]).masked_fill(~later, -60).exp() @ x
    carry, found = torch.zeros_like(inside[:, 0, :, 0]), []
    for index in range(inside.shape[1]):
        found.append(inside[:, index] + total[:, index].exp()[..., None] * carry[:, :, None])
        carry = found[-1][:, :, -1]
    return torch.stack(found, 1).permute(0, 1, 3, 2, 4).reshape(rows, -1, heads, width)[:, :tokens]


def delta_rule(q: Tensor, k: Tensor, v: Tensor, step: Tensor, lag: int) -> Tensor:
    """Answers of a matrix written by the delta rule. `lag` 0 reads after writing a token; n reads the state that was
    there n - 1 chunks before the token's own chunk.
    """
    rows, tokens, heads, width = q.shape
    pad = -tokens % CHUNK
    split = lambda x: F.pad(x, (0, 0, 0, 0, 0, pad)).view(rows, -1, CHUNK, heads, x.shape[-1]).transpose(2, 3)
    q, k, v, step = split(q), split(k), split(v), split(step[..., None])
    system = torch.eye(CHUNK, device=q.device) + (step * (k @ k.mT)).tril(-1)
    inside = None if lag else (q @ k.mT).tril()
    weights = q.new_zeros(rows, heads, width, v.shape[-1])
    answers, past = [], [weights] * max(1, lag)
    for index in range(q.shape[1]):
        error = step[:, index] * (v[:, index] - k[:, index] @ weights)
        written = torch.linalg.solve_triangular(system[:, index], error, upper=False, unitriangular=True)
        answer = q[:, index] @ (past[0] if lag else weights)
        answers.append(answer if inside is None else answer + inside[:, index] @ written)
        weights = weights + k[:, index].mT @ written
        past = [*past[1:], weights] if lag else past
    return torch.stack(answers, 1).transpose(2, 3).reshape(rows, tokens + pad, heads, -1)[:, :tokens]


class Memory(nn.Module):
    """One memory, beside a layer's attention. Its output is zero before training (`gain`)."""

    def __init__(self, args: argparse.Namespace, values: int = 192, width: int = 128) -> None:
        super().__init__()
        heads, self.sentence, self.kept, self.lag = args.heads, args.sentence, args.kept, args.lag
        parameter = lambda *shape: nn.Parameter(torch.zeros(*shape))
        orthonormal = lambda size: torch.stack(
            [torch.linalg.qr(torch.randn(DIM, size))[0] for _ in range(heads)], 1
        )
        self.register_buffer("mean", torch.zeros(DIM))
        self.register_buffer("deviation", torch.ones(DIM))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("mean_embedding", torch.zeros(DIM))
        self.key_proj = nn.Parameter(orthonormal(width))
        same = torch.eye(width).repeat(heads, 1, 1)
        self.pooled_key, self.pooled_query, self.own_key, self.own_query = (
            nn.Parameter(same.clone()) for _ in range(4)
        )
        self.conv = None if args.pool else nn.Parameter(torch.randn(heads * width, 1, 8) / math.sqrt(8))
        decays = [(0.05, 0.6, 0.85, 0.95)[index % 4] for index in range(heads - args.sentence)] + [
            0.9
        ] * args.sentence
        self.decay, self.decay_bias = parameter(DIM, heads), nn.Parameter(torch.tensor(decays).logit())
        self.input, self.step, self.gate = (parameter(DIM, heads) for _ in range(3))
        self.input_bias, self.step_bias, self.gate_bias = (parameter(heads) for _ in range(3))
        self.value_input, self.value_decay = (parameter(DIM, args.sentence) for _ in range(2))
        self.value_input_bias = parameter(args.sentence)
        self.value_decay_bias = nn.Parameter(torch.ones(args.sentence))
        spread = orthonormal(values)
        self.value_proj, self.output = nn.Parameter(spread), nn.Parameter(spread.permute(1, 2, 0).clone())
        self.gain = parameter(heads)
        wide = torch.randn(heads, width, args.features) / math.sqrt(width)
        self.features = nn.Parameter(wide) if args.features else None
        self.last: tuple[Tensor, Tensor] | None = None

    def set_statistics(self, x: Tensor, scale: Tensor, mean_embedding: Tensor) -> None:
        self.mean.copy_(x.mean(0))
        self.deviation.copy_(x.std(0) + 1e-3)
        self.scale.copy_(scale)
        self.mean_embedding.copy_(mean_embedding)

    def widened(self, x: Tensor) -> Tensor:
        """Sparse features of unit length: the largest of many projections."""
        if self.features is None:
            return x
        z = torch.einsum("bthk,hkf->bthf", x, self.features)
        least = z.topk(self.kept, -1).values[..., -1:]
        return unit(F.relu(z - least * 0.5) * (z >= least))

    def _mixed(self, pooled: Tensor, own: Tensor, of_pooled: Tensor, of_own: Tensor) -> Tensor:
        by_head = lambda y, weight: torch.einsum("bthk,hkj->bthj", unit(y), weight)
        return unit(by_head(pooled, of_pooled) + by_head(own, of_own))

    def _keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        u = torch.einsum("btd,dhk->bthk", x, self.key_proj)
        before = lambda y: F.pad(y, (0, 0, 0, 0, 1, 0))[:, :-1]
        if self.conv is not None:  # a short convolution instead of an average, keys one token behind
            taps = F.conv1d(F.pad(u.flatten(2).mT, (7, 0)), self.conv, groups=len(self.conv)).mT
            pooled = F.silu(taps).view_as(u)
            by_head = lambda y, weight: unit(torch.einsum("bthk,hkj->bthj", y, weight))
            return by_head(pooled, self.pooled_query), by_head(before(pooled), self.pooled_key)
        amount = (x / 10 @ self.input + self.input_bias).clamp(-8, 4).exp()
        pooled = decayed_sum(F.logsigmoid(x / 10 @ self.decay + self.decay_bias), u * amount[..., None])
        tokens = u.shape[2] - self.sentence
        earlier = lambda y: torch.cat([before(y[:, :, :tokens]), y[:, :, tokens:]], 2)
        q = self._mixed(pooled, u, self.pooled_query, self.own_query)
        return q, self._mixed(earlier(pooled), earlier(u), self.pooled_key, self.own_key)

    def _values(self, x: Tensor, embedded: Tensor) -> Tensor:
        v = torch.einsum("btd,dhe->bthe", embedded.float() - self.mean_embedding, self.value_proj)
        if not self.sentence:
            return unit(v)
        amount = (x / 10 @ self.value_input * 3 + self.value_input_bias).clamp(-8, 4).exp()
        log_decay = F.logsigmoid(x / 10 @ self.value_decay + self.value_decay_bias)
        averaged = decayed_sum(log_decay, unit(v[:, :, -self.sentence :]) * amount[..., None])
        return unit(torch.cat([v[:, :, : -self.sentence], averaged], 2))

    def forward(self, x: Tensor, embedded: Tensor, write: bool) -> Tensor:
        x = (x.float() - self.mean) / self.deviation
        q, k = self._keys(x)
        tokens = q.shape[2] - self.sentence
        self.last = (q[:, :, :tokens], k[:, :, :tokens])
        q, k = (checkpoint(self.widened, y, use_reentrant=False) for y in (q, k))
        step = (x / 10 @ self.step * 3 + self.step_bias).sigmoid() * float(write)
        answers = delta_rule(q, k, self._values(x, embedded), step, self.lag)
        gate = (x / 10 @ self.gate * 3 + self.gate_bias).sigmoid() * self.gain.tanh() * self.scale
        return torch.einsum("bthe,hed->btd", answers * gate[..., None], self.output)


def address(
    memory: Memory, sources: Tensor, temperature: float = 0.05, skip: int = 2 * CHUNK
) -> tuple[Tensor, float]:
    """Cross-entropy of finding, among the keys of its row, the one at which a value's token was stated; and the share
    of first tokens that are found by the mean over heads.
    """
    assert memory.last is not None
    q, k = memory.last
    row, place = (sources[:, 1:] >= 0).nonzero(as_tuple=True)
    source = sources[row, place + 1]
    old = source <= place - skip
    row, place, source = row[old], place[old], source[old]
    if not len(row):
        return q.sum() * 0, 0.0
    first = (sources[row, place] != source - 1).float()
    weight, total, found = first + 0.2, q.sum() * 0, 0.0
    positions = torch.arange(q.shape[1], device=q.device)
    for each in row.unique().tolist():
        mine = row == each
        scores = torch.einsum("nhk,shk->hns", q[each, place[mine]], k[each]) / temperature
        scores = scores.masked_fill(positions > (place[mine] - skip)[None, :, None], -1e4)
        wanted = source[mine].repeat(len(scores))
        losses = F.cross_entropy(scores.flatten(0, 1), wanted, reduction="none").view(len(scores), -1)
        total = total + (losses * weight[mine]).sum(1).mean()
        found += float(((scores.mean(0).argmax(-1) == source[mine]) * first[mine]).sum())
    return total / weight.sum(), found / max(1.0, float(first.sum()))


class Rows:
    """Training rows: conversations with a text in between, which grows from next to nothing."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.tokenizer, self.facts = Tokenizer.from_file(str(args.tokenizer)), Facts(args.kamel)
        self.books, self.length, self.most, self.seed = (
            np.load(args.books / "train.npy"),
            args.length,
            args.facts,
            args.seed,
        )

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def row(self, rng: Rng, share: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, weights, and for each token of an answer's value where it was stated (-1: unknown)."""
        tokens: list[int] = []
        weights: list[float] = []
        fronts: list[tuple[int, int]] = []
        size = self.length + 1

        def add(ids: list[int], weight: float) -> None:
            tokens.extend(ids)
            weights.extend([weight] * len(ids))

        def read(count: int) -> None:
            start = int(rng.integers(len(self.books) - count - 1))
            tokens.extend(self.books[start : start + count].tolist())
            weights.extend(((rng.random(count) < 0.15) * (0.1 * share)).tolist())

        while len(tokens) < size - 200:
            room = size - len(tokens)
            count = min(int(rng.integers(1, self.most + 1, 2).max()), max(1, room // 70))
            said = self.facts.conversation(rng, count)
            front = [(self.encode(text), weight) for text, weight in said.front]
            asked = [(self.encode(text), weight) for turns in said.questions for text, weight in turns]
            left = room - sum(len(ids) for ids, _ in [*front, *asked]) - 40
            begin = len(tokens)
            for ids, weight in front:
                add(ids, weight)
            fronts.append((begin, len(tokens)))
            add(self.encode(f"<|im_start|>user\n{pick(rng, READ)}\n"), 0.0)
            read(16 + int(rng.integers(int(max(0, left) * share) + 1)))
            add(self.encode(f"{END}{ASSISTANT}{pick(rng, DONE)}{END}"), 0.0)
            for ids, weight in asked:
                add(ids, weight)
        if len(tokens) < size:
            read(size - len(tokens))
        row = np.array(tokens[:size]), np.array(weights[:size], np.float32)
        return *row, _stated(*row, fronts)

    def step(self, number: int, rows: int, share: float) -> list[np.ndarray]:
        drawn = [self.row(np.random.default_rng([self.seed, number, row]), share) for row in range(rows)]
        return [np.stack(part) for part in zip(*drawn, strict=True)]


def _stated(tokens: np.ndarray, weights: np.ndarray, fronts: list[tuple[int, int]]) -> np.ndarray:
    """Where each value of an answer stands in the statements before it, if it stands there once."""
    sources, place = np.full(len(tokens), -1, np.int64), 0
    while place < len(tokens):
        end = place
        while end < len(tokens) and weights[end] == 1:
            end += 1
        if end == place:
            place += 1
            continue
        begin, stop = [front for front in fronts if front[0] < place][-1]
        value, count = tokens[place:end], end - place
        starts = np.flatnonzero(tokens[begin : stop - count + 1] == value[0]) + begin
        hits = [start for start in starts if (tokens[start : start + count] == value).all()]
        if len(hits) == 1:
            sources[place:end] = np.arange(hits[0], hits[0] + count)
        place = end
    return sources


_ROWS: dict[str, Rows] = {}


def _draw(args: argparse.Namespace, number: int, share: float) -> list[np.ndarray]:
    """A step's rows, in a process of its own."""
    return _ROWS.setdefault("own", Rows(args)).step(number, args.rows, share)


def batches(args: argparse.Namespace, share: Any) -> Any:
    """Steps in order, drawn ahead by other processes."""
    ready: queue.Queue[list[np.ndarray]] = queue.Queue(4)

    def feed() -> None:
        with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
            waiting: list[Any] = []
            for number in range(args.steps):
                waiting.append(pool.submit(_draw, args, number, share(number)))
                if len(waiting) == 8:
                    ready.put(waiting.pop(0).result())
            for job in waiting:
                ready.put(job.result())

    threading.Thread(target=feed, daemon=True).start()
    for _ in range(args.steps):
        yield (torch.from_numpy(part).to(DEVICE) for part in ready.get())


def train(base: Base, memories: dict[int, Memory], args: argparse.Namespace) -> None:
    named = [(name, p) for memory in memories.values() for name, p in memory.named_parameters()]
    quick = [p for name, p in named if name == "gain" or name.endswith("_bias")]
    slow = [p for name, p in named if not (name == "gain" or name.endswith("_bias"))]
    groups = [{"params": slow, "lr": 1e-3}, {"params": quick, "lr": 5e-3}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0)
    rates, began, costs = [1e-3, 5e-3], time.time(), []
    share = lambda number: min(1.0, (number + 1) / (0.4 * args.steps)) ** 2
    for number, (tokens, weights, sources) in enumerate(batches(args, share)):
        progress = max(number / args.steps, (time.time() - began) / args.seconds)
        rate = min(1, (number + 1) / 20) * min(1, max(0.02, (1 - progress) / 0.3))
        for group, own in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = own * rate
        hidden = base.forward(tokens[:, :-1], 128 if progress < 0.5 else 512, memories)
        counted = weights[:, 1:] > 0
        weight = weights[:, 1:][counted]
        losses = F.cross_entropy(
            F.linear(hidden[counted], base.embedding).float(), tokens[:, 1:][counted], reduction="none"
        )
        loss, found = (losses * weight).sum() / weights[:, 1:].sum(), 0.0
        for memory in memories.values() if args.auxiliary else ():
            extra, found = address(memory, sources)
            loss = loss + args.auxiliary * extra / len(memories)
        loss.backward()
        nn.utils.clip_grad_norm_([p for _, p in named], 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        costs.append(float(losses.detach()[weight == 1].mean()))
        if number % 20 == 19:
            print(
                f"step {number + 1}: answers {np.mean(costs[-20:]):.3f} nats, addressed {found:.2f}",
                flush=True,
            )
        if progress >= 1:
            break


@torch.no_grad()
def examine(
    base: Base, memories: dict[int, Memory], args: argparse.Namespace, kind: str, count: int, distance: int,
    conversations: int, *, write: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Share of questions whose whole value is the likeliest, token by token, behind "It's"."""
    rows, books = Rows(args), np.load(args.books / "test.npy")
    correct: dict[str, list[int]] = {}
    for number in range(conversations):
        rng = np.random.default_rng([5, number, count])
        exam = rows.facts.exam(rng, count, kind)
        start = int(rng.integers(len(books) - distance - 1))
        tokens = rows.encode(exam.front + "<|im_start|>user\nNow read this.\n")
        tokens += books[start : start + distance].tolist()
        tokens += rows.encode(f"{END}{ASSISTANT}I have read it.{END}")
        spans = []
        for question in exam.questions:
            tokens += rows.encode(user(question.text) + ASSISTANT + "It's")
            value = rows.encode(f" {question.value}")
            spans.append((question.kind, len(tokens), len(tokens) + len(value)))
            tokens += value + rows.encode(END)
        hidden = base.forward(torch.tensor([tokens], device=DEVICE), 512, memories, write=write)[0]
        for label, begin, end in spans:
            likeliest = F.linear(hidden[begin - 1 : end - 1], base.embedding).argmax(-1).tolist()
            correct.setdefault(label, []).append(int(likeliest == tokens[begin:end]))
    result = {label: [sum(own), len(own)] for label, own in correct.items()}
    return {
        "kind": kind,
        "facts": count,
        "distance": distance,
        "mode": "on" if write else "frozen",
        "correct": result,
    }


@torch.no_grad()
def text_cost(base: Base, memories: dict[int, Memory], books: np.ndarray, *, write: bool) -> float:
    """Nats per token of 32 pieces of held-out books."""
    rows = torch.from_numpy(
        np.stack([books[n * 9000 : n * 9000 + 2049] for n in range(32)]).astype(np.int64)
    ).to(DEVICE)
    costs = []
    for row in rows.split(4):
        logits = F.linear(base.forward(row[:, :-1], 512, memories, write=write), base.embedding)
        costs.append(float(F.cross_entropy(logits.float().flatten(0, 1), row[:, 1:].flatten())))
    return float(np.mean(costs))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("base", "tokenizer", "books", "kamel"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--layers", nargs="+", type=int, default=[10, 17, 24])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--sentence", type=int, default=3, help="heads that write averages of tokens")
    parser.add_argument(
        "--features", type=int, default=1024, help="0: none, the memory is a matrix of the keys' width"
    )
    parser.add_argument("--kept", type=int, default=32)
    parser.add_argument("--lag", type=int, default=2)
    parser.add_argument(
        "--pool", action=argparse.BooleanOptionalAction, default=True, help="no: a convolution of 8"
    )
    parser.add_argument("--auxiliary", type=float, default=0.3, help="weight of the loss on addressing")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seconds", type=float, default=530)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--facts", type=int, default=24)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    base, test = Base(args.base), np.load(args.books / "test.npy")
    memories = {layer: Memory(args).to(DEVICE) for layer in args.layers}
    train_tokens = np.load(args.books / "train.npy")
    some = np.stack([train_tokens[n * 5000 : n * 5000 + 512] for n in range(8)]).astype(np.int64)
    base.measure(torch.from_numpy(some).to(DEVICE), memories)
    train(base, memories, args)
    rows: list[dict[str, Any]] = [
        {"text": "window alone", "nats": text_cost(base, {}, test, write=True)},
        {"text": "on", "nats": text_cost(base, memories, test, write=True)},
        {"text": "frozen", "nats": text_cost(base, memories, test, write=False)},
    ]
    for kind, count, distance, several, write in (
        ("trained", 20, 1000, 6, True), ("held out", 20, 1000, 12, True), ("held out", 20, 1000, 3, False),
        ("passages", 6, 1000, 14, True), ("held out", 20, 4000, 6, True), ("held out", 60, 1000, 4, True),
        ("trained", 60, 1000, 3, True),
    ):  # fmt: skip
        rows.append(examine(base, memories, args, kind, count, distance, several, write=write))
    print(*map(json.dumps, rows), sep="\n")
    if args.out:
        args.out.write_text(
            json.dumps({"settings": {k: str(v) for k, v in vars(args).items()}, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
