"""Which memory should be the default? Prototypes of memory rules on byte books, in plain torch, all in one small
language model.

    python benchmarks/designs.py BOOKS --runs matrix,deep64 --steps 600 --out out/designs.json

BOOKS is a folder of ``*.txt.xz`` with an ``index.json`` that says each book's split. The models are Titans' LMM (memory
and feed-forward, no attention) with equal parameters and tokens; the memory is carried from piece to piece. Reported,
on held-out books: bits per byte by position with the memory carried (on) and begun anew every 256 tokens (fresh), and
the gradient norm. What was learned from it is in docs/results/dynamics.md.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BASE = {
    "heads": 8, "width": 64, "chunk": 64, "features": 0, "layers": 1, "skip": True, "static": True, "momentum": False,
    "forget": -6.0, "spread": False, "kind": "delta", "top": 1.0, "step": 0.0, "keys": 1,
}  # fmt: skip
RUNS = {
    "matrix-bare": {"static": False},
    "matrix": {},
    "matrix-spread": {"spread": True},
    "matrix128": {"heads": 4, "width": 128},
    "matrix128-spread": {"heads": 4, "width": 128, "spread": True},
    "wide-keys": {"keys": 2, "spread": True},
    "matrix-momentum": {"momentum": True, "spread": True},
    "deep64": {"features": 64, "spread": True},
    "deep128": {"features": 128, "spread": True},
    "deep64-flat": {"features": 64},
    "deep64-momentum": {"features": 64, "momentum": True, "spread": True},
    "deep128-noskip": {"features": 128, "skip": False, "spread": True},
    "deep64-twice": {"features": 64, "layers": 2, "spread": True},
    "deep64-top2": {"features": 64, "top": 2.0, "spread": True},
    "matrix-top2": {"top": 2.0, "spread": True},
    "deep64-lifted": {"features": 64, "static": "lifted"},
    "deep64-lifted-momentum": {"features": 64, "static": "lifted", "momentum": True},
    "matrix-lifted": {
        "features": 64,
        "static": "lifted",
        "kind": "control",
    },  # the static path alone sees the features
    "matrix32": {"heads": 16, "width": 32},
    "deep32": {"heads": 16, "width": 32, "features": 96},
    "deep32-top2": {"heads": 16, "width": 32, "features": 96, "top": 2.0},
    "repaired": {"kind": "repaired", "features": 128},
    "titans": {"kind": "titans", "features": 128, "step": -3.0, "forget": -10.0},
}


class _Inverse(torch.autograd.Function):
    """(I + A)^-1 of strictly lower triangular A: blocks of 16 by the series of powers, then merged two by two."""

    @staticmethod
    def forward(ctx, A: Tensor) -> Tensor:
        c = A.shape[-1]
        t = torch.arange(c, device=A.device)
        eye = torch.eye(c, device=A.device, dtype=A.dtype)
        tf32, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
        near = A * (t[:, None] // 16 == t // 16)
        X, power = eye - near, near @ near
        for _ in range(3):
            X, power = X + X @ power, power @ power
        size = 16
        while size < c:
            block = t // size
            between = (block[:, None] % 2 == 1) & (block == block[:, None] - 1)
            X = X - X @ (A * between) @ X
            size *= 2
        torch.backends.cuda.matmul.allow_tf32 = tf32
        ctx.save_for_backward(X)
        return X

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        (X,) = ctx.saved_tensors
        return -(X.mT @ g @ X.mT).tril(-1)


def delta(q, k, v, beta, log_keep, eta, N, M):
    """Gated delta rule, token-exact; with eta, the answers lag behind (pending writes): M_t = (1 - eta) N_t + eta gamma
    M_{t-1}.

    q, k [b h n c f], v [b h n c e], gates [b h n c], N, M [b h f e].
    """
    c = q.shape[-2]
    low = log_keep.cumsum(-1)
    causal = torch.ones(c, c, device=q.device).tril()
    G = torch.exp((low.unsqueeze(-1) - low.unsqueeze(-2)).masked_fill(causal == 0, -1e9))
    P = G * beta.unsqueeze(-2)
    T = _Inverse.apply((P * (k @ k.mT)).tril(-1))
    a = low.exp().unsqueeze(-1)
    U, W = T @ (a * k), T @ v
    read, past = P, None
    if eta is not None:
        moved = eta.log().cumsum(-1)
        E = torch.exp((moved.unsqueeze(-1) - moved.unsqueeze(-2)).masked_fill(causal == 0, -1e9))
        read = P * (1 - E * eta.unsqueeze(-2))
        past = moved.exp().unsqueeze(-1)
    n = q.shape[2]
    fold = (P[..., -1, :].unsqueeze(-1) * k).mT.unbind(2)
    fold_read = (read[..., -1, :].unsqueeze(-1) * k).mT.unbind(2) if eta is not None else None
    U_, W_, last = U.unbind(2), W.unbind(2), a[..., -1:, :].unbind(2)
    kept, asked, errors = [], [], []
    for i in range(n):
        kept.append(N)
        asked.append(M)
        e = U_[i] @ N - W_[i]
        errors.append(e)
        if eta is not None:
            p = past[:, :, i, -1:]
            M = last[i] * ((1 - p) * N + p * M) - fold_read[i] @ e
        N = last[i] * N - fold[i] @ e
    kept, errors = torch.stack(kept, 2), torch.stack(errors, 2)
    y = q @ kept if eta is None else (1 - past) * (q @ kept) + past * (q @ torch.stack(asked, 2))
    return a * y - ((q @ k.mT) * read) @ errors, N, M


def dgelu(z):
    return 0.5 * (1 + torch.erf(z * 0.7071067811865476)) + z * torch.exp(-z * z / 2) * 0.3989422804014327


def layer_norm(x):
    x = x - x.mean(-1, keepdim=True)
    s = (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return x / s, s


def deep(q, k, v, beta, beta1, log_keep, I1, I2, D1, D2, repaired):
    """x -> LN(gelu(x W1) W2), both layers fast, gradients at the chunk's start; W = I + D, and D forgets.

    repaired: steps in units of the answer per layer, shared by tokens with similar keys, values of the answer's length,
    an input that reaches GELU's bend. Otherwise the printed rule without momentum and with a residual, but for what it
    forgets towards.
    """
    n, c, d = q.shape[2], q.shape[-2], q.shape[-1]
    low = log_keep.cumsum(-1)
    causal = torch.ones(c, c, device=q.device).tril()
    G = torch.exp((low.unsqueeze(-1) - low.unsqueeze(-2)).masked_fill(causal == 0, -1e9))
    a, end = low.exp().unsqueeze(-1), low[..., -1:].exp().unsqueeze(-1)
    if repaired:
        near = (k @ k.mT).abs().tril(-1)
        share = torch.log1p(-(near * beta.unsqueeze(-2)).clamp(max=0.999)).sum(-1).exp()
        share1 = torch.log1p(-(near * beta1.unsqueeze(-2)).clamp(max=0.999)).sum(-1).exp()
        v = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6)
    gain = math.sqrt(d) if repaired else 1.0
    ys = []
    for i in range(n):
        Q, K, V, P0 = q[:, :, i], k[:, :, i], v[:, :, i], G[:, :, i]
        W1, W2 = I1 + D1, I2 + D2
        z = gain * (K @ W1)
        h = F.gelu(z)
        x, s = layer_norm(h @ W2)
        e = x - V if repaired else K + x - V
        do = (e - e.mean(-1, keepdim=True) - x * (e * x).mean(-1, keepdim=True)) / s
        slope = dgelu(z)
        d1 = gain * (do @ W2.mT) * slope
        if repaired:
            do = (
                do
                * (s * s / (h.square().sum(-1, keepdim=True) + 1e-6))
                * (beta * share)[:, :, i].unsqueeze(-1)
            )
            felt = slope.square() @ W2.square().sum(-1, keepdim=True) * gain**2
            d1 = d1 * (s * s / (felt + 1e-6)) * (beta1 * share1)[:, :, i].unsqueeze(-1)
        else:
            do, d1 = do * beta[:, :, i].unsqueeze(-1), d1 * beta[:, :, i].unsqueeze(-1)
        zq = gain * (Q @ I1 + a[:, :, i] * (Q @ D1) - ((Q @ K.mT) * P0) @ d1)
        hq = F.gelu(zq)
        o = hq @ I2 + a[:, :, i] * (hq @ D2) - ((hq @ h.mT) * P0) @ do
        ys.append(layer_norm(o)[0] if repaired else Q + layer_norm(o)[0])
        w = P0[..., -1, :].unsqueeze(-1)
        D1 = end[:, :, i] * D1 - K.mT @ (w * d1)
        D2 = end[:, :, i] * D2 - h.mT @ (w * do)
    return torch.stack(ys, 2), D1, D2


def unit(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class Memory(nn.Module):
    def __init__(self, dim, c):
        super().__init__()
        self.c = c
        h, w = c["heads"], c["width"]
        self.h, self.w, self.kw = h, w, w * c["keys"]
        self.widths = [h * self.kw, h * self.kw, h * w]
        self.q, self.k, self.v, self.g = (nn.Linear(dim, n, bias=False) for n in (*self.widths, h * w))
        self.o = nn.Linear(h * w, dim, bias=False)
        self.conv = nn.Parameter(torch.empty(sum(self.widths), 4).uniform_(-0.5, 0.5))
        f = c["features"]
        self.gates = nn.Linear(dim, 4 * h)
        nn.init.normal_(self.gates.weight, std=0.02)
        with torch.no_grad():
            forget = torch.linspace(-4, -10, h) if c["spread"] else torch.full((h,), c["forget"])
            self.gates.bias.copy_(
                torch.cat(
                    [torch.full((h,), c["step"]), torch.full((h,), -2.0), forget, torch.full((h,), -2.0)]
                )
            )
        self.norm = nn.Parameter(torch.ones(w))
        self.deep = c["kind"] not in ("delta", "control")
        if self.deep:
            self.I1 = nn.Parameter(torch.randn(h, w, f) / w**0.5)
            self.I2 = nn.Parameter(torch.randn(h, f, w) * 2 / f**0.5)
            self.sizes = [(w, f), (f, w)]
        else:
            width = self.kw
            if f:
                self.up = nn.ParameterList(
                    [
                        nn.Parameter(
                            torch.randn(h, self.kw if i == 0 else f, 2 * f)
                            / (self.kw if i == 0 else f) ** 0.5
                        )
                        for i in range(c["layers"])
                    ]
                )
                self.mix = nn.Parameter(torch.zeros(h))
                width = self.kw + f if c["skip"] else f
            self.sizes = [(self.kw if c["kind"] == "control" else width, w)] * 2
        if c["static"]:
            self.static = nn.Parameter(
                torch.randn(h, width if c["static"] == "lifted" else self.kw, w) * 0.5 / w**0.5
            )

    def phi(self, x):
        if not self.c["features"]:
            return x
        y = x
        for up in self.up:
            gate, value = (8.0 * torch.einsum("bthe,hef->bthf", y, up)).chunk(2, -1)
            y = unit(F.silu(gate) * value)
        if not self.c["skip"]:
            return y
        share = torch.sigmoid(self.mix)[:, None]  # squared length of the features
        return torch.cat([x * (1 - share).sqrt(), y * share.sqrt()], -1)

    def forward(self, x, state):
        b, t, _ = x.shape
        h, w, c = self.h, self.w, self.c["chunk"]
        xs = torch.cat([self.q(x), self.k(x), self.v(x)], -1)
        past, A, B = state
        full = torch.cat([past, xs], 1)
        conv = self.conv.to(xs.dtype)
        y = F.silu(sum(full[:, i : i + t] * conv[:, i] for i in range(4)))
        q, k, v = y.split(self.widths, -1)
        with torch.autocast(x.device.type, enabled=False):
            q, k = (unit(z.float().view(b, t, h, self.kw)) for z in (q, k))
            v = v.float().view(b, t, h, w)
            logits = F.linear(
                x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6),
                self.gates.weight,
                self.gates.bias,
            )
            step, eta, forget, step1 = logits.view(b, t, 4, h).permute(2, 0, 3, 1).unflatten(-1, (t // c, c))
            chunks = lambda z: z.permute(0, 2, 1, 3).unflatten(2, (t // c, c))
            beta, log_keep = self.c["top"] * torch.sigmoid(step), F.logsigmoid(-forget)
            if self.deep:
                answer, A, B = deep(
                    chunks(q),
                    chunks(k),
                    chunks(v),
                    beta,
                    torch.sigmoid(step1),
                    log_keep,
                    self.I1,
                    self.I2,
                    A,
                    B,
                    self.c["kind"] == "repaired",
                )
            else:
                eta = torch.sigmoid(eta) if self.c["momentum"] else None
                lifted = self.phi(q)
                own = self.c["kind"] != "control"
                keys = chunks(self.phi(k)) if own else chunks(k)
                answer, A, B = delta(
                    chunks(lifted) if own else chunks(q), keys, chunks(v), beta, log_keep, eta, A, B
                )
                q = lifted if self.c["static"] == "lifted" else q
            answer = answer.flatten(2, 3).permute(0, 2, 1, 3)
            if self.c["static"]:
                answer = answer + torch.einsum("bthe,hef->bthf", q, self.static)
            answer = answer * torch.rsqrt(answer.square().mean(-1, keepdim=True) + 1e-6) * self.norm
        return self.o(answer.flatten(2).to(xs.dtype) * F.silu(self.g(x))), (full[:, t:].to(past.dtype), A, B)

    def start(self, rows, device):
        make = lambda *shape: torch.zeros(rows, *shape, device=device)
        return (make(3, sum(self.widths)), *(make(self.h, *size) for size in self.sizes))


class Block(nn.Module):
    def __init__(self, dim, ffn, c):
        super().__init__()
        self.memory = Memory(dim, c)
        self.n1, self.n2 = nn.RMSNorm(dim, eps=1e-6), nn.RMSNorm(dim, eps=1e-6)
        self.gate, self.up, self.down = (
            nn.Linear(dim, ffn, bias=False),
            nn.Linear(dim, ffn, bias=False),
            nn.Linear(ffn, dim, bias=False),
        )

    def forward(self, x, state):
        y, state = self.memory(self.n1(x), state)
        x = x + y
        z = self.n2(x)
        return x + self.down(F.silu(self.gate(z)) * self.up(z)), state


class Model(nn.Module):
    def __init__(self, dim, depth, ffn, c):
        super().__init__()
        self.embed = nn.Embedding(256, dim)
        self.blocks = nn.ModuleList([Block(dim, ffn, c) for _ in range(depth)])
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        for p in self.modules():
            if isinstance(p, nn.Linear) and p.bias is None:
                nn.init.normal_(p.weight, std=0.02)
        nn.init.normal_(self.embed.weight, std=0.02)
        for block in self.blocks:
            for p in (block.memory.o.weight, block.down.weight):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * depth))

    def forward(self, tokens, states):
        x, new = self.embed(tokens), []
        for block, state in zip(self.blocks, states, strict=True):
            x, state = block(x, state)
            new.append(state)
        return self.norm(x) @ self.embed.weight.T.to(x.dtype), new

    def start(self, rows, device):
        return [block.memory.start(rows, device) for block in self.blocks]


def count(model):
    return sum(p.numel() for p in model.parameters())


def build(dim, depth, c, heads, device):
    base = -(-8 * dim // 24) * 8
    if heads != 8:
        c = {**c, "heads": max(1, c["heads"] * heads // 8)}
    with torch.device("meta"):
        target = count(Model(dim, depth, base, {**BASE, "heads": heads, "static": True}))
        rest = count(Model(dim, depth, 0, c))
    ffn = round((target - rest) / (3 * dim * depth) / 8) * 8
    return Model(dim, depth, ffn, c).to(device)


def load(folder, split):
    folder = Path(folder)
    index = json.loads((folder / "index.json").read_text())
    return [
        torch.frombuffer(bytearray(lzma.open(folder / b["file"]).read()), dtype=torch.uint8)
        for b in index
        if b["split"] == split
    ]


class Trainer:
    """Carried training, the whole step as one CUDA graph."""

    def __init__(self, model, books, rows, length, steps, lr, seed, device):
        self.model, self.rows, self.length, self.device, self.steps, self.lr = (
            model,
            rows,
            length,
            device,
            steps,
            lr,
        )
        self.text = torch.cat(books).to(device)
        g = torch.Generator().manual_seed(seed + 1)
        sizes = torch.tensor([len(b) for b in books], dtype=torch.float)
        starts = torch.tensor([0, *[len(b) for b in books]]).cumsum(0)
        plan, new = torch.empty(steps, rows, dtype=torch.long), torch.zeros(steps, rows)
        place = [None] * rows
        for s in range(steps):
            for r in range(rows):
                if (
                    place[r] is None
                    or place[r][0] + length + 1 >= place[r][1]
                    or float(torch.rand((), generator=g)) < 1 / 48
                ):
                    i = int(torch.multinomial(sizes, 1, generator=g))
                    at = int(torch.randint(0, len(books[i]) - length - 2, (1,), generator=g))
                    place[r] = [int(starts[i]) + at, int(starts[i + 1])]
                    new[s, r] = 1
                plan[s, r] = place[r][0]
                place[r][0] += length
        self.plan, self.new = plan.to(device), new.to(device)
        decay = [p for p in model.parameters() if p.dim() >= 2]
        rest = [p for p in model.parameters() if p.dim() < 2]
        self.rate = torch.tensor(0.0, device=device)
        self.opt = torch.optim.AdamW(
            [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
            lr=self.rate, betas=(0.9, 0.95), fused=device == "cuda", capturable=device == "cuda",
        )  # fmt: skip
        self.state = model.start(rows, device)
        self.at, self.fresh = self.plan[0].clone(), self.new[0].clone()
        self.loss = torch.zeros((), device=device)
        self.norm = torch.zeros((), device=device)
        self.graph = None

    def _step(self):
        span = torch.arange(self.length + 1, device=self.device)
        x = self.text[self.at.unsqueeze(1) + span].long()
        keep = 1 - self.fresh
        state = [tuple(s * keep.view(-1, *[1] * (s.dim() - 1)) for s in layer) for layer in self.state]
        with torch.autocast(self.device, torch.bfloat16, cache_enabled=False):
            logits, after = self.model(x[:, :-1], state)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), x[:, 1:].flatten())
        loss.backward()
        self.norm.copy_(nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
        self.opt.step()
        self.opt.zero_grad(set_to_none=False)
        for old, new in zip(self.state, after, strict=True):
            for a, b in zip(old, new, strict=True):
                a.copy_(b.detach())
        self.loss.copy_(loss.detach())

    def run(self, log):
        losses, norms = [], []
        for s in range(self.steps):
            self.at.copy_(self.plan[s])
            self.fresh.copy_(self.new[s])
            self.rate.fill_(
                self.lr * min(1, (s + 1) / 60) * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * s / self.steps)))
            )
            if self.device == "cuda" and s == 3:
                torch.cuda.synchronize()
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph):
                    self._step()
            if self.graph is not None:
                self.graph.replay()
            elif self.device == "cuda":  # warms up beside the default stream, as a graph needs it
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    self._step()
                torch.cuda.current_stream().wait_stream(side)
            else:
                self._step()
            losses.append(self.loss.clone())
            norms.append(self.norm.clone())
            if s in (10, 60):
                log(f"step {s}: {float(self.loss) / math.log(2):.3f} bits, norm {float(self.norm):.2f}")
        return torch.stack(losses).cpu() / math.log(2), torch.stack(norms).cpu()


@torch.no_grad()
def measure(model, streams, length, device, piece=2048, segment=256):
    x = streams[:, : length + 1].long().to(device)
    rows = {}
    for mode, size, upto in (("on", piece, length), ("fresh", segment, min(length, 16384))):
        state, out = model.start(len(x), device), []
        for a in range(0, upto, size):
            if mode == "fresh":
                state = [(s[0], *(torch.zeros_like(z) for z in s[1:])) for s in state]
            with torch.autocast(device, torch.bfloat16):
                logits, state = model(x[:, a : a + size], state)
            nll = F.cross_entropy(
                logits.float().flatten(0, 1), x[:, a + 1 : a + size + 1].flatten(), reduction="none"
            )
            out.append(nll.view(len(x), -1).mean(0) / math.log(2))
        rows[mode] = torch.cat(out)
    edges = [e for e in (0, 1024, 4096, 16384, 65536, 131072, 262144) if e <= length]
    return {
        mode: [round(nll[a:b].mean().item(), 4) for a, b in pairwise(edges) if b <= len(nll)]
        for mode, nll in rows.items()
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("books")
    parser.add_argument("--runs", default="matrix,deep64")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no run after so long")
    parser.add_argument("--out", default="designs.json")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    small = device == "cpu"
    dim, depth, rows, length, heads = (128, 2, 8, 256, 2) if small else (512, 6, 16, 2048, 8)
    upto = 16384 if small else 65536
    train, held = load(args.books, "train"), load(args.books, "validation")
    streams = torch.stack(
        [b[at : at + upto + 1] for b in held for at in range(0, 4 * 150_000, 150_000)][: 2 if small else None]
    )
    begun, results = time.time(), []
    for name in args.runs.split(","):
        if time.time() - begun > args.seconds:
            print(f"{name}: not begun, out of time", flush=True)
            continue
        try:
            torch.manual_seed(args.seed)
            c = {**BASE, **RUNS[name]}
            if small:
                c["chunk"] = 32
            model = build(dim, depth, c, heads, device)
            began = time.time()
            trainer = Trainer(model, train, rows, length, args.steps, args.lr, args.seed, device)
            losses, norms = trainer.run(lambda line, name=name: print(f"  {name}: {line}", flush=True))
            took = time.time() - began
            bits = measure(model, streams, upto, device, 2048 if not small else 256, 256 if not small else 64)
            state = sum(
                a * b * c["heads"] * (1 + c["momentum"])
                for a, b in model.blocks[0].memory.sizes[: 2 if model.blocks[0].memory.deep else 1]
            )
            row = {
                "name": name, "lr": args.lr, "seed": args.seed, "steps": args.steps, "parameters": count(model), "state": state,  # noqa: E501
                "train": round(losses[-50:].mean().item(), 4),
                "curve": [round(x, 3) for x in losses.view(-1, 50).mean(1).tolist()],
                "norm": [round(norms.quantile(p).item(), 3) for p in (0.5, 0.95, 1.0)], "seconds": round(took), **bits,
            }  # fmt: skip
            mix = [
                torch.sigmoid(b.memory.mix).mean().item() for b in model.blocks if hasattr(b.memory, "mix")
            ]
            row["mix"] = [round(x, 3) for x in mix]
            print(json.dumps({k: v for k, v in row.items() if k != "curve"}), flush=True)
            results.append(row)
            Path(args.out).write_text(json.dumps(results, indent=1))
            del trainer, model
            torch.cuda.empty_cache() if device == "cuda" else None
        except Exception as error:  # the others still run
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)


if __name__ == "__main__":
    main()
