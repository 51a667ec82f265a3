"""Probe: from which hidden states can a question find the statement that answers it?

    python -m experiments.attach.probe BASE.gguf TOKENIZER.json BOOKS KAMEL.jsonl.xz

Keys and queries are linear maps of gated averages of a layer's input. For each design the maps and gates are trained
with a contrastive loss on addressing alone (no language model loss, no memory), and tested on relations that were not
trained: share of questions whose nearest key, among all tokens before the question, is the value's first token.

- ``before``: keys see the tokens before the value; ``both``: also those behind it (a memory can write with a delay);
- ``own``: the token before the value, and the token that predicts the answer, are added;
- ``borders``: gates start at a fit to sentence and turn borders; without, they start equal at every token.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.attach.conversations import ASSISTANT, END, user
from experiments.attach.meaning import DEVICE, DIM, Base, Rows, _stated, rms_norm, rotation, seen_mask, unit

WINDOW = 64
LAYERS = (8, 12, 16, 20, 24, 27)


def exam_row(rows: Rows, rng: np.random.Generator, kind: str, count: int, distance: int, books: np.ndarray):
    exam = rows.facts.exam(rng, count, kind)
    start = int(rng.integers(len(books) - distance - 1))
    tokens = rows.encode(exam.front)
    front = len(tokens)
    tokens += rows.encode("<|im_start|>user\nNow read this.\n") + books[start : start + distance].tolist()
    tokens += rows.encode(f"{END}{ASSISTANT}I have read it.{END}")
    weights, kinds = [0.0] * len(tokens), [""] * len(tokens)
    for question in exam.questions:
        lead = rows.encode(user(question.text) + ASSISTANT + "It's")
        value = rows.encode(f" {question.value}")
        tail = rows.encode("." + END)
        tokens += lead + value + tail
        weights += [0.0] * len(lead) + [1.0] * len(value) + [0.0] * len(tail)
        kinds += [""] * len(lead) + [question.kind] * len(value) + [""] * len(tail)
    tokens_, weights_ = np.array(tokens), np.array(weights, np.float32)
    return tokens_, _stated(tokens_, weights_, [(0, front)]), kinds


@torch.no_grad()
def hidden_states(base: Base, tokens: Tensor) -> dict[int, Tensor]:
    h, mask, turn = base.embedding[tokens], seen_mask(tokens.shape[1], 512), rotation(tokens.shape[1])
    found = {}
    for layer in range(max(LAYERS) + 1):
        if layer in LAYERS:
            found[layer] = rms_norm(h, base.weights[f"blk.{layer}.attn_norm.weight"]).to(torch.float16)
        h = base.block(layer, h, mask, turn)
    return found


def banded(cost: Tensor, weight: Tensor, u: Tensor, *, behind: bool) -> Tensor:
    """``sum_j weight_j exp(-|C_t - C_j|) u_j`` over the tokens from t - 64 to t, or from t to t + 64. C is the sum of
    costs of the tokens passed. [b t h], [b t h], [b t h e].
    """
    rows, tokens, heads, width = u.shape
    size, pad = WINDOW, -tokens % WINDOW
    fit = lambda y: F.pad(y, (0,) * (2 * (y.ndim - 2)) + (0, pad))
    cost, weight, u = fit(cost), fit(weight), fit(u)
    total = (cost.cumsum(1) - cost).view(rows, -1, size, heads).permute(0, 1, 3, 2)
    weighted = (u * weight[..., None]).view(rows, -1, size, heads, width).permute(0, 1, 3, 2, 4)
    shift = -1 if behind else 1
    other = lambda y: torch.roll(y, shift, 1)
    edge = torch.zeros(total.shape[1], device=u.device)
    edge[-1 if behind else 0] = -1e4
    place = torch.arange(size, device=u.device)
    back = place[:, None] - place
    same = back <= 0 if behind else back >= 0
    beyond = back >= 0 if behind else back <= 0  # in the neighbouring block, within the window
    inside = (-(total[..., :, None] - total[..., None, :]).abs()).masked_fill(~same, -1e4)
    outside = (-(total[..., :, None] - other(total)[..., None, :]).abs()).masked_fill(~beyond, -1e4)
    outside = outside + edge[None, :, None, None, None]
    found = inside.exp() @ weighted + outside.exp() @ other(weighted)
    return found.permute(0, 1, 3, 2, 4).reshape(rows, -1, heads, width)[:, :tokens]


class Addressing(nn.Module):
    """Keys and queries of several heads."""

    def __init__(self, heads: int, width: int, behind: bool, own: bool, costs: tuple[float, ...]) -> None:
        super().__init__()
        self.behind, self.own = behind, own
        start = torch.stack([torch.linalg.qr(torch.randn(DIM, width))[0] for _ in range(heads)], 1)
        self.shared = nn.Parameter(start)
        same = lambda scale: nn.Parameter(torch.eye(width).repeat(heads, 1, 1) * scale)
        self.pool_q, self.pool_k, self.pool_b = same(1.0), same(1.0), same(0.7)
        self.own_q, self.own_k = same(0.5), same(0.5)
        self.cost, self.weight = (nn.Parameter(torch.zeros(DIM, heads)) for _ in range(2))
        self.cost_bias = nn.Parameter(
            torch.tensor([costs[h % len(costs)] for h in range(heads)]).expm1().log()
        )
        self.weight_bias = nn.Parameter(torch.zeros(heads))

    @torch.no_grad()
    def fit_borders(self, x: Tensor, borders: Tensor) -> None:
        """Ridge regression of gates on marked tokens: costly to pass, of little weight."""
        y = borders.float()
        solve = torch.linalg.solve(
            x.mT @ x + 0.03 * len(x) * torch.eye(DIM, device=x.device), x.mT @ (y - y.mean())
        )
        scale = (x @ solve)[borders].mean() - (x @ solve)[~borders].mean()
        for h in range(self.cost.shape[1]):
            self.cost[:, h] = solve / scale * 5
            self.weight[:, h] = -solve / scale * 4
        self.cost_bias -= (x @ self.cost)[~borders].mean(0)
        self.weight_bias -= (x @ self.weight)[~borders].mean(0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        u = torch.einsum("btd,dhk->bthk", x, self.shared)
        cost = F.softplus(x @ self.cost + self.cost_bias)
        weight = (x @ self.weight + self.weight_bias).clamp(-8, 4).exp()
        by_head = lambda y, w: torch.einsum("bthk,hkj->bthj", unit(y), w)
        before = lambda y: F.pad(y, (0, 0, 0, 0, 1, 0))[:, :-1]
        after = lambda y: F.pad(y, (0, 0, 0, 0, 0, 1))[:, 1:]
        front = banded(cost, weight, u, behind=False)
        q, k = by_head(front, self.pool_q), by_head(before(front), self.pool_k)
        if self.behind:
            k = k + by_head(after(banded(cost, weight, u, behind=True)), self.pool_b)
        if self.own:
            q, k = q + by_head(u, self.own_q), k + by_head(before(u), self.own_k)
        return unit(q), unit(k)


def scores_of(q: Tensor, k: Tensor, sources: Tensor, skip: int = 128):
    """For each token of a value with a known source: scores over all keys of its row (mean over heads), the source."""
    row, place = (sources[:, 1:] >= 0).nonzero(as_tuple=True)
    source = sources[row, place + 1]
    old = source <= place - skip
    row, place, source = row[old], place[old], source[old]
    first = sources[row, place] != source - 1
    for each in row.unique().tolist():
        mine = row == each
        scores = torch.einsum("nhk,shk->hns", q[each, place[mine]], k[each])
        late = torch.arange(k.shape[1], device=k.device) > (place[mine] - skip)[:, None]
        yield scores.masked_fill(late, -1e4), source[mine], first[mine], place[mine], each


def train_one(
    data, tests, borders, *, layer, heads, width, behind, own, fit, steps, costs=(0.02, 0.08, 0.2, 0.6)
):
    torch.manual_seed(0)
    model = Addressing(heads, width, behind, own, costs).to(DEVICE)
    states, sources = data
    flat = states[layer][:16].float().flatten(0, 1)
    mean, deviation = flat.mean(0), flat.std(0) + 1e-3
    prepare = lambda y: (y.float() - mean) / deviation
    if fit:
        model.fit_borders(prepare(flat), borders[:16].flatten())
    slow = [p for name, p in model.named_parameters() if name in ("cost", "weight")]
    fast = [p for name, p in model.named_parameters() if name not in ("cost", "weight")]
    optimizer = torch.optim.Adam([{"params": fast, "lr": 1e-3}, {"params": slow, "lr": 2e-4}])
    result = {}

    def test() -> dict[str, float]:
        found: dict[str, list[float]] = {}
        with torch.no_grad():
            for name, (own_states, own_sources, kinds) in tests.items():
                for index in range(len(own_states)):
                    x = own_states[index][layer]
                    q, k = model(prepare(x))
                    for scores, source, first, place, _ in scores_of(q, k, own_sources[index]):
                        hit = (scores.mean(0).argmax(-1) == source).float()
                        for n in first.nonzero()[:, 0].tolist():
                            label = f"{name}/{kinds[index][int(place[n]) + 1]}"
                            found.setdefault(label, []).append(float(hit[n]))
                        rest = hit[~first]
                        if len(rest):
                            found.setdefault(f"{name}/continued", []).extend(rest.tolist())
        return {label: round(float(np.mean(values)), 3) for label, values in sorted(found.items())}

    result["raw"] = test()
    rng = np.random.default_rng(1)
    for step in range(steps):
        chosen = torch.from_numpy(rng.integers(len(sources), size=8)).to(DEVICE)
        for group in optimizer.param_groups:
            group["lr"] *= 1.0 if step < steps * 0.6 else 0.97
        q, k = model(prepare(states[layer][chosen]))
        total, count = 0.0, 0
        for scores, source, first, _, _ in scores_of(q, k, sources[chosen]):
            weight = first.float() + 0.3
            joint = F.cross_entropy(scores.mean(0) / 0.03, source, reduction="none")
            per_head = (
                F.cross_entropy(scores.flatten(0, 1) / 0.05, source.repeat(len(scores)), reduction="none")
                .view(len(scores), -1)
                .mean(0)
            )
            total, count = total + ((joint + 0.5 * per_head) * weight).sum(), count + len(source)
        (total / max(1, count)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    result["trained"] = test()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("base", "tokenizer", "books", "kamel"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--rows", type=int, default=192)
    parser.add_argument("--exams", type=int, default=12)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--facts", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began = time.time()
    base, rows, test_books = Base(args.base), Rows(args), np.load(args.books / "test.npy")
    drawn = [rows.row(np.random.default_rng([7, n]), 0.2) for n in range(args.rows)]
    tokens = torch.from_numpy(np.stack([d[0] for d in drawn])[:, :-1]).to(DEVICE)
    sources = torch.from_numpy(np.stack([d[2] for d in drawn])[:, :-1]).to(DEVICE)
    parts = [hidden_states(base, piece) for piece in tokens.split(8)]
    states = {layer: torch.cat([part[layer] for part in parts]) for layer in LAYERS}
    closing = (".", "?", "!", '."', '?"', '!"', ":", ";")
    names = [rows.tokenizer.id_to_token(index) or "" for index in range(49152)]
    ends = [n for n, t in enumerate(names) if t.strip("ĠĊ") in closing or "Ċ" in t or t.startswith("<|")]
    borders = torch.isin(tokens, torch.tensor(ends, device=DEVICE))
    tests = {}
    for kind, count in (("trained", 20), ("held out", 20), ("passages", 6)):
        own = [
            exam_row(rows, np.random.default_rng([5, n, count]), kind, count, 300, test_books)
            for n in range(args.exams)
        ]
        own_states, own_sources = [], []
        for t, s, _ in own:
            own_states.append(hidden_states(base, torch.from_numpy(t).to(DEVICE)[None]))
            own_sources.append(torch.from_numpy(s).to(DEVICE)[None])
        tests[kind] = own_states, own_sources, [k for _, _, k in own]
    print(f"prepared in {time.time() - began:.0f} s; borders {borders.float().mean():.3f}", flush=True)
    results = []
    place = {"behind": True, "own": True, "fit": True}
    designs = [
        {"layer": 12, "behind": False, "own": True, "fit": False},
        {"layer": 12, "behind": False, "own": True, "fit": True},
        {"layer": 12, **place},
        {"layer": 12, "behind": True, "own": False, "fit": True},
        {"layer": 24, "behind": False, "own": True, "fit": True},
        *({"layer": layer, **place} for layer in (24, 20, 16, 27, 8)),
        {"layer": 20, **place, "heads": 8, "width": 64},
        {"layer": 20, **place, "heads": 2, "width": 256},
        {"layer": 20, **place, "steps": 3 * args.steps},
    ]
    for design in designs:
        if time.time() - began > args.seconds:
            break
        start = time.time()
        setting = {"heads": 4, "width": 128, "steps": args.steps, **design}
        found = train_one((states, sources), tests, borders, **setting)
        results.append({"design": setting, **found})
        print(
            json.dumps(setting),
            f"{time.time() - start:.0f} s",
            "\n   raw",
            found["raw"],
            "\n   trained",
            found["trained"],
            flush=True,
        )
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
