"""A kNN store in one layer of a frozen pretrained model: what it wins back of what a window loses.

    python -m experiments.knn.attached BASE --cache CACHE --out ROWS.json --seconds 400

`CACHE` is written by `experiments.knn.documents`. Only the store's own parameters are trained (`Reader`): with an empty
store, the model is the pretrained model with a window. As everything below the store is frozen and sees a window only,
its hidden states are computed once; the keys and values of a whole document are then a linear map of them, so they
are never of earlier weights, and gradients reach them.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from experiments.knn import documents
from experiments.shared import Row, Rows, add_arguments, machine, octaves, table_row, table_rule
from remanence.attached.base import PretrainedSource
from remanence.memory.search import exact
from remanence.memory.store import StoreState

WINDOW, SINKS = 512, 4


@dataclass(frozen=True)
class Setting:
    """One trained store.

    layer
        The layer with the store, counted from 0.
    data
        Parts of the cache that it is trained on, without "-train".
    memory
        Number of past tokens that a chunk can read in training.
    previous
        Whether a key sees the token before its own too, as it does in a store of contexts and what followed them.
    token
        Whether a value sees the embedding of its token, besides the hidden state.
    gate
        "match": the gates of a token depend on how well the entries match its queries; "head": they are one learned
        number for each head, as in the paper.
    search
        "dense": training reads all entries; "top": the `k` best.
    detach
        Whether entries get no gradients.
    whiten
        For keys that see the token before their own: how much the directions of a state are evened out at first, 0.5
        for wholly; 0: queries and keys begin as the layer's own queries.
    opened
        The gate's parameter at first; 0: closed.
    lora
        Rank of a low-rank update of the layers from the store's on; 0: none.
    controls
        Whether to test it with another document's entries, and by attention over all entries too.
    far
        Whether to test it in the longest documents.
    """

    name: str = "store"
    layer: int = 21
    data: str = "code"
    memory: int = 16384
    previous: bool = True
    token: bool = True
    gate: str = "match"
    search: str = "dense"
    detach: bool = False
    whiten: float = 0.25
    lora: int = 0
    rate: float = 2e-3
    gate_rate: float = 2e-2
    small_rate: float = 4e-3
    opened: float = 0.5
    warmup: int = 20
    seconds: float = 100.0
    steps: int = 100_000
    seed: int = 0
    controls: bool = False
    far: bool = False


class Base:
    """The pretrained model with a window and first tokens that stay visible, as `remanence.attach` narrows it, with
    hidden states of whole documents computed layer by layer.
    """

    def __init__(self, path: str, device: str, dtype: torch.dtype) -> None:
        model: Any = PretrainedSource.from_path(path).load_model(torch.float32)
        inner, config = model.model, model.config
        self.device, self.dtype = device, dtype
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.width = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.eps = config.rms_norm_eps
        put = lambda x: x.detach().to(device, dtype)
        self.embedding, self.norm = put(inner.embed_tokens.weight), put(inner.norm.weight)
        self.frequencies = inner.rotary_emb.inv_freq.detach().float().to(device)
        self.layers = [
            {name: put(weight) for name, weight in layer.named_parameters()} for layer in inner.layers
        ]
        self.depth, self.dim = len(self.layers), config.hidden_size

    def rms(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)

    def rotate(self, x: Tensor, position: Tensor) -> Tensor:
        """Rotate x ``[b t h e]`` to positions ``[b t]``."""
        angle = position.float().unsqueeze(-1) * self.frequencies
        angle = torch.cat([angle, angle], -1).unsqueeze(-2)
        a, b = x.chunk(2, -1)
        return (x * angle.cos() + torch.cat([-b, a], -1) * angle.sin()).to(x.dtype)

    def project(self, n: int, x: Tensor, extra: nn.ModuleDict | None) -> tuple[Tensor, Tensor, Tensor]:
        w, found = self.layers[n], []
        for name in "qkv":
            y = F.linear(x, w[f"self_attn.{name}_proj.weight"])
            if extra is not None:
                y = y + extra[name](x)
            found.append(y.unflatten(-1, (-1, self.width)))
        return found[0], found[1], found[2]

    def attend(
        self, n: int, x: Tensor, first: Tensor, sinks: Tensor, extra: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Windowed attention of layer n for inputs x ``[b t d]`` at positions from `first` ``[b]`` on, and for the
        first tokens `sinks` ``[b s d]`` alone.
        """
        b, t, _ = x.shape
        q, k, v = self.project(n, x, extra)
        qs, ks, vs = self.project(n, sinks, extra)
        place = first.unsqueeze(-1) + torch.arange(t, device=x.device)
        start = torch.arange(SINKS, device=x.device).expand(b, -1)
        q_far = self.rotate(q, place.clamp(max=WINDOW + SINKS - 1))
        q, k, qs, ks = (self.rotate(z, p) for z, p in ((q, place), (k, place), (qs, start), (ks, start)))
        repeat = lambda z: z.repeat_interleave(self.heads // self.groups, 2)
        k, v, ks, vs = (repeat(z) for z in (k, v, ks, vs))
        heads_first = lambda z: z.transpose(1, 2)
        ys = F.scaled_dot_product_attention(
            *(heads_first(z) for z in (qs, ks, vs)), is_causal=True
        ).transpose(1, 2)
        # One softmax over the window and the first tokens, whose queries are rotated otherwise: heads twice as wide.
        blocks = -(-t // WINDOW)
        pad = lambda z, front: F.pad(z, (0, 0, 0, 0, front, blocks * WINDOW - t))
        qq = pad(torch.cat([q, q_far], -1), 0).unflatten(1, (blocks, WINDOW))
        near = lambda z: torch.cat([pad(z, WINDOW)[:, :-WINDOW].unflatten(1, (blocks, WINDOW)),
                                    pad(z, 0).unflatten(1, (blocks, WINDOW))], 2)  # fmt: skip
        far = lambda z: F.pad(z, (0, 0, 0, 0, 0, 8 - SINKS)).unsqueeze(1).expand(-1, blocks, -1, -1, -1)
        kk = torch.cat([far(F.pad(ks, (self.width, 0))), F.pad(near(k), (0, self.width))], 2)
        vv = torch.cat([far(vs), near(v)], 2)
        if x.device.type == "cpu":  # whose fused attention needs values as wide as the keys
            vv = F.pad(vv, (0, self.width))
        group = blocks if torch.is_grad_enabled() else max(1, 64 // b)
        found = []
        for at in range(0, blocks, group):
            some = slice(at, at + group)
            mask = self.mask(first, at, min(group, blocks - at))
            one = lambda z, some=some: z[:, some].flatten(0, 1).transpose(1, 2)
            y = F.scaled_dot_product_attention(
                one(qq), one(kk), one(vv), attn_mask=mask, scale=self.width**-0.5
            )
            found.append(y[..., : self.width].transpose(1, 2).unflatten(0, (b, -1)))
        y = torch.cat(found, 1).flatten(1, 2)[:, :t]
        return y.flatten(2), ys.flatten(2)

    def mask(self, first: Tensor, at: int, count: int) -> Tensor:
        """Which of the first tokens and of two blocks of keys some blocks of queries see ``[b * count 1 W 8+2W]``."""
        device = first.device
        i, j = torch.arange(WINDOW, device=device), torch.arange(2 * WINDOW, device=device)
        distance = i.unsqueeze(-1) + WINDOW - j
        band = (distance >= 0) & (distance < WINDOW)
        block = torch.arange(at, at + count, device=device)
        exists = (block.unsqueeze(-1) > 0) | (j >= WINDOW)
        near = (band & exists.unsqueeze(1)).expand(len(first), -1, -1, -1)
        place = first.view(-1, 1, 1) + (block * WINDOW).unsqueeze(-1) + i
        sink = torch.arange(8, device=device)
        far = (place.unsqueeze(-1) - sink >= WINDOW) & (sink < SINKS)
        return torch.cat([far, near], -1).flatten(0, 1).unsqueeze(1)

    def layer(self, n: int, x: Tensor, first: Tensor, sinks: Tensor, add: Tensor | None = None,
              extra: Any = None) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Layer n. `add` is added to the output of attention."""
        w = self.layers[n]
        y = self.attend(n, self.rms(x, w["input_layernorm.weight"]), first,
                        self.rms(sinks, w["input_layernorm.weight"]), extra)  # fmt: skip
        o, out = w["self_attn.o_proj.weight"], []
        for z, part in zip((x, sinks), y, strict=True):
            mixed = F.linear(part, o)
            if extra is not None:
                mixed = mixed + extra["o"](part)
            z = z + mixed
            if add is not None and z.shape[1] == add.shape[1]:
                z = z + add
            out.append(self.feed_forward(n, z, extra))
        return out[0], out[1]

    def feed_forward(self, n: int, x: Tensor, extra: Any = None) -> Tensor:
        w = self.layers[n]
        z = self.rms(x, w["post_attention_layernorm.weight"])
        gate, up = F.linear(z, w["mlp.gate_proj.weight"]), F.linear(z, w["mlp.up_proj.weight"])
        if extra is not None:
            gate, up = gate + extra["gate"](z), up + extra["up"](z)
        z = F.silu(gate) * up
        y = F.linear(z, w["mlp.down_proj.weight"])
        return x + (y if extra is None else y + extra["down"](z))

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embedding)

    @torch.no_grad()
    def below(self, tokens: Tensor, layer: int) -> Tensor:
        """The hidden states of whole documents ``[b t]`` in front of a layer."""
        x = self.embed(tokens)
        sinks, first = x[:, :SINKS], torch.zeros(len(x), dtype=torch.int64, device=x.device)
        for n in range(layer):
            x, sinks = self.layer(n, x, first, sinks)
        return x

    def losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """The negative log-likelihood of targets ``[n]`` for outputs of the last layer ``[n d]``."""
        logits = F.linear(self.rms(x, self.norm), self.embedding)
        return F.cross_entropy(logits.float(), targets, reduction="none")

    @torch.no_grad()
    def bits(self, x: Tensor, targets: Tensor) -> Tensor:
        pairs = zip(x.split(4096), targets.split(4096), strict=True)
        return torch.cat([self.losses(a, b) for a, b in pairs]).cpu() / math.log(2)

    @torch.no_grad()
    def full(self, tokens: Tensor, context: int = 8192) -> Tensor:
        """Bits of the tokens ``[t]`` but the first, by full attention. Behind its context, half of it is read again in
        front of each next half.
        """
        half, found = context // 2, []
        for start in range(0, len(tokens) - 1, half):
            if start == half:
                continue
            begin = max(0, start - half)
            some = tokens[begin : max(start + half, context) + 1].unsqueeze(0)
            x = self.embed(some[:, :-1])
            place = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
            for n in range(self.depth):
                w = self.layers[n]
                q, k, v = self.project(n, self.rms(x, w["input_layernorm.weight"]), None)
                q, k = self.rotate(q, place), self.rotate(k, place)
                k, v = (z.repeat_interleave(self.heads // self.groups, 2) for z in (k, v))
                y = F.scaled_dot_product_attention(*(z.transpose(1, 2) for z in (q, k, v)), is_causal=True)
                x = x + F.linear(y.transpose(1, 2).flatten(2), w["self_attn.o_proj.weight"])
                x = self.feed_forward(n, x)
            found.append(self.bits(x[0, start - begin :], some[0, 1 + start - begin :]))
        return torch.cat(found)


class LowRank(nn.Module):
    """A low-rank addition to a projection, zero at first."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, inputs) * inputs**-0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.down.to(x.dtype)), self.up.to(x.dtype))


class Reader(nn.Module):
    """What the store adds to the pretrained model: projections of queries, keys, values and of the output, and for each
    head a temperature, the threshold of a match, and a gate.

    At first the key of a token is the query of the token before it, so that entries are contexts and what followed
    them, and the output is the embedding of that token.
    """

    def __init__(self, base: Base, setting: Setting) -> None:
        super().__init__()
        self.setting, self.base = setting, base
        heads, d = base.heads, base.dim
        w = {name: weight.detach().float() for name, weight in base.layers[setting.layer].items()}
        q = w["self_attn.q_proj.weight"]
        k, v = (
            w[f"self_attn.{name}_proj.weight"].unflatten(0, (base.groups, -1)).repeat_interleave(
                heads // base.groups, 0).flatten(0, 1) for name in "kv"
        )  # fmt: skip
        self.q = nn.Parameter(q.clone())
        self.k = nn.Parameter(torch.zeros_like(k) if setting.previous else k.clone())
        self.k_previous = nn.Parameter(q.clone()) if setting.previous else None
        self.v = nn.Parameter(torch.zeros_like(v) if setting.token else v.clone())
        self.v_token = nn.Parameter(torch.eye(d)) if setting.token else None
        self.o = nn.Parameter(8 * torch.eye(d) if setting.token else w["self_attn.o_proj.weight"].clone())
        self.q_bias, self.k_bias = nn.Parameter(q.new_zeros(len(q))), nn.Parameter(q.new_zeros(len(q)))
        self.log_scale = nn.Parameter(torch.full((heads,), math.log(22.0), device=q.device))
        self.threshold = nn.Parameter(torch.full((heads,), 0.85, device=q.device))
        self.match = nn.Parameter(torch.full((heads, heads), 0.5 / heads, device=q.device))
        self.match_bias = nn.Parameter(torch.zeros(heads, device=q.device))
        self.gate = nn.Parameter(torch.full((heads,), setting.opened, device=q.device))
        rank, ff = setting.lora, base.layers[0]["mlp.up_proj.weight"].shape[0]
        kv = base.groups * base.width
        sizes = {
            "q": (d, d),
            "k": (d, kv),
            "v": (d, kv),
            "o": (d, d),
            "gate": (d, ff),
            "up": (d, ff),
            "down": (ff, d),
        }
        self.extras = nn.ModuleList(
            nn.ModuleDict({name: LowRank(a, b, rank) for name, (a, b) in sizes.items()})
            for _ in range(setting.layer, base.depth) if rank
        )  # fmt: skip
        self.to(base.device)

    @torch.no_grad()
    def start(self, x: Tensor) -> None:
        """Set queries and keys for given hidden states ``[t d]``: without a common direction; and, if keys see the
        token before their own, as random projections of the state, in which no direction outweighs the others much.
        """
        z = self.normed(x).float()
        mean = z.mean(0)
        if self.k_previous is not None and self.setting.whiten:
            deviation = z.std(0) + 1e-3
            z = (z - mean) / deviation
            values, vectors = torch.linalg.eigh((z.T @ z / len(z)).cpu())
            even = (vectors * values.clamp(min=1e-3) ** -self.setting.whiten).to(z.device)
            random = torch.linalg.qr(torch.randn(len(self.q), len(self.q)))[0].to(z.device)
            weight = (even @ random).T / deviation
            self.q.copy_(weight)
            self.k_previous.copy_(weight)
        self.q_bias.copy_(-self.q @ mean)
        self.k_bias.copy_(-(self.k if self.k_previous is None else self.k_previous) @ mean)

    def normed(self, x: Tensor) -> Tensor:
        return self.base.rms(x, self.base.layers[self.setting.layer]["input_layernorm.weight"])

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
        return y.unflatten(-1, (self.base.heads, -1))

    def queries(self, x: Tensor) -> Tensor:
        """Queries of unit length ``[b t h e]`` for hidden states ``[b t d]``."""
        return F.normalize(self.linear(self.normed(x), self.q, self.q_bias).float(), dim=-1).to(x.dtype)

    def entries(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of consecutive tokens; of the first one, whose previous token is unknown, no good ones."""
        z = self.normed(x)
        k = self.linear(z, self.k, self.k_bias)
        if self.k_previous is not None:
            k = k + self.linear(F.pad(z[:, :-1], (0, 0, 1, 0)), self.k_previous)
        v = self.linear(z, self.v)
        if self.v_token is not None:
            v = v + self.linear(self.base.rms(self.base.embed(tokens), None), self.v_token)
        k = F.normalize(k.float(), dim=-1).to(x.dtype)
        return (k.detach(), v.detach()) if self.setting.detach else (k, v)

    def output(self, y: Tensor) -> Tensor:
        """What is added to the output of attention ``[b t d]``, for what `read_all` or `read_top` returned."""
        share = y[..., -1:].float()
        y = torch.where(share > 0, y[..., :-1].float() / share.clamp(min=1e-30), 0.0)
        if self.setting.gate == "match":
            y = y * F.linear(share.squeeze(-1).logit(1e-6), self.match, self.match_bias).sigmoid().unsqueeze(
                -1
            )
        y = y * torch.tanh(self.gate).unsqueeze(-1)
        return F.linear(y.flatten(2).to(self.base.dtype), self.o.to(self.base.dtype))

    def none(self) -> Tensor:
        """The score of each head for an entry that matches as well as the threshold."""
        return self.log_scale.exp() * self.threshold

    def read_all(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """Attention over all entries that are seen ``[b t m]``, m a multiple of 8, and an entry of zeros whose score is
        `none`; and the weight of the others as one more channel.
        """
        heads, width = len(self.log_scale), v.shape[-1]
        scaled = (q.float() * self.log_scale.exp().unsqueeze(-1)).to(q.dtype)
        qq = F.pad(torch.cat([scaled, torch.ones_like(q[..., :1])], -1), (0, 7))
        first = torch.cat([torch.zeros_like(k[:, :8]), F.pad(self.none().to(k.dtype).view(1, 1, heads, 1), (
            0, 7, 0, 0, 0, 7)).expand(len(k), -1, -1, -1)], -1)  # fmt: skip
        kk, vv = torch.cat([first, F.pad(k, (0, 8))], 1), F.pad(v, (0, 1), value=1.0)
        vv = F.pad(vv, (0, 7, 0, 0, 8, 0))
        mask = torch.cat([torch.zeros_like(seen[..., :8]), seen], -1)
        mask[..., 0] = True
        y = F.scaled_dot_product_attention(*(z.transpose(1, 2) for z in (qq, kk, vv)), attn_mask=mask.unsqueeze(1),
                                           scale=1.0)  # fmt: skip
        return y.transpose(1, 2)[..., : width + 1]

    def read_top(self, q: Tensor, k: Tensor, v: Tensor, last: Tensor, best: int, place: Tensor | None = None,
                 found: Any = None) -> Tensor:  # fmt: skip
        """The same over the `best` entries at places up to `last` ``[b t]``."""
        b, m, heads, _ = k.shape
        if place is None:
            place = torch.arange(m, device=k.device).expand(b, -1)
        state = StoreState(
            k.detach(), v.detach(), place, torch.zeros_like(place, dtype=torch.float32), last[:, 0]
        )
        index = exact(q.detach(), state, min(best, m), last).index
        if found is not None:
            found.append(index)
        row = torch.arange(b, device=k.device).view(-1, 1, 1, 1)
        head = torch.arange(heads, device=k.device).view(1, 1, -1, 1)
        at = index.clamp(min=0)
        keys, values = k[row, at, head], v[row, at, head]
        score = (q.unsqueeze(-2) * keys).float().sum(-1) * self.log_scale.exp().unsqueeze(-1)
        score = score.masked_fill(index < 0, -1e30)
        none = self.none().view(1, 1, -1, 1).expand(*score.shape[:3], 1)
        weight = torch.cat([score, none], -1).softmax(-1)[..., :-1]
        y = (weight.to(v.dtype).unsqueeze(-2) @ values).squeeze(-2)
        return torch.cat([y, weight.sum(-1, keepdim=True).to(y.dtype)], -1)

    def above(
        self, x: Tensor, first: Tensor, sinks: Tensor, add: Tensor | None, save: bool = False
    ) -> Tensor:
        """The output of the last layer for hidden states x ``[b t d]`` in front of the store's layer."""
        layer = self.setting.layer
        for n in range(layer, self.base.depth):
            extra = self.extras[n - layer] if len(self.extras) else None
            call = lambda x, sinks, n=n, extra=extra: self.base.layer(
                n, x, first, sinks, add if n == layer else None, extra)  # fmt: skip
            x, sinks = checkpoint(call, x, sinks, use_reentrant=False) if save else call(x, sinks)
        return x


class Corpus:
    """Documents with their hidden states in front of a layer."""

    def __init__(
        self, base: Base, named: list[tuple[str, np.ndarray]], layer: int, most: int, total: int
    ) -> None:
        self.names, self.tokens, self.hidden = [], [], []
        for name, tokens in named:
            if total <= 0:
                break
            ids = torch.from_numpy(tokens[:most].astype(np.int64)).to(base.device)
            total -= len(ids)
            self.names.append(name)
            self.tokens.append(ids)
            self.hidden.append(base.below(ids.unsqueeze(0), layer)[0])


class Chunks:
    """Random chunks of documents, each with the entries that it can read."""

    def __init__(self, corpora: list[Corpus], chunk: int, memory: int, rng: np.random.Generator) -> None:
        self.tokens = [each for corpus in corpora for each in corpus.tokens]
        self.hidden = [each for corpus in corpora for each in corpus.hidden]
        self.chunk, self.memory, self.rng = chunk, memory, rng
        sizes = np.array([max(0, len(each) - chunk - 2 * WINDOW) for each in self.tokens], np.float64)
        self.weights = sizes / sizes.sum()

    def draw(self, rows: int) -> tuple[Tensor, ...]:
        """Positions ``[b]``, hidden states and targets of chunks, hidden states of first tokens, and those, tokens and
        positions of entries ``[b m]``, -1 where there is none.
        """
        slots = self.memory + self.chunk - WINDOW
        slots += -slots % 8
        first, parts = [], []
        for _ in range(rows):
            n = int(self.rng.choice(len(self.weights), p=self.weights))
            ids, x = self.tokens[n], self.hidden[n]
            start = int(self.rng.integers(2 * WINDOW, len(ids) - self.chunk))
            stop = start + self.chunk
            begin = max(1, stop - WINDOW - slots)
            place = torch.arange(begin, stop - WINDOW, device=ids.device)
            more = slots - len(place)
            first.append(start)
            parts.append((
                x[start:stop], ids[start + 1 : stop + 1], x[:SINKS], F.pad(x[begin : stop - WINDOW], (0, 0, 0, more)),
                F.pad(ids[begin : stop - WINDOW], (0, more)), F.pad(place, (0, more), value=-1),
            ))  # fmt: skip
        return torch.tensor(first, device=parts[0][0].device), *(
            torch.stack(z) for z in zip(*parts, strict=True)
        )


def train(
    base: Base, setting: Setting, corpora: list[Corpus], args: argparse.Namespace
) -> tuple[Reader, list[Any]]:
    """Train a store for a number of steps or seconds."""
    torch.manual_seed(setting.seed)
    rng = np.random.default_rng(setting.seed)
    reader = Reader(base, setting)
    chunks = Chunks(corpora, args.chunk, setting.memory, rng)
    reader.start(torch.cat([each[::7] for each in chunks.hidden[:20]]))
    small = [reader.log_scale, reader.threshold, reader.match, reader.match_bias]
    others = [p for p in reader.parameters() if not any(p is each for each in (reader.gate, *small))]
    groups = [
        {"params": others, "lr": 0.0, "rate": setting.rate},
        {"params": [reader.gate], "lr": 0.0, "rate": setting.gate_rate},
        {"params": small, "lr": 0.0, "rate": setting.small_rate},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0)
    log: list[Any] = []
    started, recent = time.monotonic(), []
    for step in range(setting.steps):
        spent = time.monotonic() - started
        progress = max(step / setting.steps, spent / setting.seconds)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = (
                group["rate"] * min(1, (step + 1) / setting.warmup) * min(1, 2 * (1 - progress) + 0.02)
            )
        first, x, targets, sinks, past, tokens, place = chunks.draw(args.rows)
        q = reader.queries(x)
        k, v = reader.entries(past, tokens)
        last = first.unsqueeze(-1) + torch.arange(x.shape[1], device=x.device) - WINDOW
        if setting.search == "dense":
            seen = (place.unsqueeze(1) >= 0) & (place.unsqueeze(1) <= last.unsqueeze(-1))
            y = reader.read_all(q, k, v, seen)
        else:
            y = reader.read_top(q, k, v, last, args.k, place)
        y = reader.above(x, first, sinks, reader.output(y), save=args.save)
        y, targets = y[:, WINDOW:].flatten(0, 1), targets[:, WINDOW:].flatten()
        losses = [
            checkpoint(base.losses, a, b, use_reentrant=False)
            for a, b in zip(y.split(8192), targets.split(8192), strict=True)
        ]
        loss = torch.cat(losses).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(reader.parameters(), 1.0)
        optimizer.step()
        recent.append(loss.detach())
        if len(recent) == args.every:
            log.append([step + 1, round(time.monotonic() - started, 1), float(torch.stack(recent).mean())])
            recent = []
            temperature, gate = reader.log_scale.detach().exp(), reader.gate.detach().tanh()
            print(f"{setting.name}: step {log[-1][0]} {log[-1][1]:.0f} s, loss {log[-1][2]:.4f}; temperature "
                  f"{float(temperature.mean()):.1f}, gate {float(gate.abs().mean()):.2f}, threshold "
                  f"{float(reader.threshold.detach().mean()):.3f}", flush=True)  # fmt: skip
    return reader, log


@torch.no_grad()
def measured(
    reader: Reader,
    tokens: Tensor,
    x: Tensor,
    size: int,
    best: int,
    other: tuple[Tensor, Tensor] | None = None,
    found: list[Tensor] | None = None,
) -> Tensor:
    """Bits of the tokens of a document ``[t]`` but the first, with a store of `size` entries of which `best` are read
    (0: all). `other`: tokens and hidden states of the document whose entries are in the store instead.
    """
    base, x, ids = reader.base, x[:-1].unsqueeze(0), tokens[:-1].unsqueeze(0)
    q = reader.queries(x)
    k, v = (
        reader.entries(x, ids)
        if other is None
        else reader.entries(other[1].unsqueeze(0), other[0].unsqueeze(0))
    )
    parts = []
    for start in range(0, x.shape[1], WINDOW):
        stop = min(start + WINDOW, x.shape[1])
        low, high = max(0, start - size), min(stop - WINDOW, start)
        if other is not None:
            low, high = 0, min(start, size, k.shape[1])
        if high <= low:
            parts.append(F.pad(torch.zeros_like(q[:, start:stop]), (0, 1)))
            continue
        last = torch.arange(start - WINDOW, stop - WINDOW, device=x.device).unsqueeze(0)
        if other is not None:
            last = torch.full_like(last, high)
        place = torch.arange(low, high, device=x.device).unsqueeze(0)
        some = q[:, start:stop], k[:, low:high], v[:, low:high]
        if best:
            index: list[Tensor] = []
            parts.append(reader.read_top(*some, last, best, place, index))
            if found is not None:
                found.append((index[0] + low).cpu())
        else:
            more = -(high - low) % 8
            seen = F.pad(place.unsqueeze(1) <= last.unsqueeze(-1), (0, more))
            parts.append(reader.read_all(some[0], *(F.pad(z, (0, 0, 0, 0, 0, more)) for z in some[1:]), seen))
    add = reader.output(torch.cat(parts, 1))
    first = torch.zeros(1, dtype=torch.int64, device=x.device)
    y = reader.above(x, first, x[:, :SINKS], add)
    return base.bits(y[0], tokens[1:])


# Measures


RARE = (1, 10, 100, 1000, 10000)
"""Borders of the groups of tokens by their number of occurrences in the documents of training."""


def spans(bits: Tensor, sizes: Tensor) -> list[list[float]]:
    """Of each octave: its first position, all bits, bytes and tokens."""
    return [
        [first, round(float(bits[first:last].double().sum()), 2), int(sizes[first:last].sum()), last - first]
        for first, last in octaves(len(bits))
    ]


def recurrence(tokens: Tensor) -> Tensor:
    """For each token but the first: 0 if it is new in its document, 1 if it was seen only before the window, else 2."""
    found, last = [], {}
    for place, token in enumerate(tokens.tolist()):
        before = last.get(token)
        found.append(0 if before is None else 1 if place - before > WINDOW else 2)
        last[token] = place
    return torch.tensor(found[1:])


def grouped(window: Tensor, store: Tensor, group: Tensor, groups: int) -> list[list[float]]:
    """Of each group of tokens: bits with a window alone and with the store, and the number of tokens."""
    return [
        [round(float(x[group == n].double().sum()), 2) for x in (window, store)] + [int((group == n).sum())]
        for n in range(groups)
    ]


def examples(words: list[bytes], tokens: Tensor, gain: Tensor, found: list[Tensor], many: int) -> list[Row]:
    """Tokens that the store helps most, and the entries that most heads found for them."""
    text = lambda begin, stop: b"".join(words[n] for n in tokens[max(0, begin) : stop].tolist()).decode(
        "utf-8", "replace"
    )
    shown: list[Row] = []
    taken: set[int] = set()
    for place in gain.masked_fill(torch.arange(len(gain)) < 4096, 0).topk(8 * many).indices.tolist():
        if len(shown) == many:
            break
        token = int(tokens[place + 1])
        if token in taken:
            continue
        taken.add(token)
        index = found[(place - WINDOW) // WINDOW][0, place % WINDOW, :, 0]
        entry = int(index.mode().values)
        shown.append({
            "position": place + 1, "bits": round(float(gain[place]), 2), "before": text(place - 20, place + 1),
            "token": text(place + 1, place + 2), "entry": entry, "heads": int((index == entry).sum()),
            "read": text(entry - 12, entry), "followed": text(entry, entry + 4),
        })  # fmt: skip
    return shown


class Experiment:
    """The pretrained model, its documents, and the rows of the results."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.rows = args, Rows(args.out, args.commit)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.backends.cuda.enable_cudnn_sdp(False)  # which is slow with masks
        self.base = Base(args.base, device, torch.bfloat16)
        self.device = machine(torch.device(device))
        self.words = documents.vocabulary(args.cache)
        self.sizes = torch.tensor([len(word) for word in self.words])
        self.started = time.monotonic()
        self.known: dict[Any, Any] = {}

    def left(self) -> float:
        return float(self.args.seconds - (time.monotonic() - self.started))

    def corpus(self, data: str, layer: int) -> Corpus:
        args = self.args
        if ("train", data, layer) not in self.known:
            for key in [key for key in self.known if key[0] == "train" and key[2] != layer]:
                del self.known[key]
            named = documents.read(args.cache, f"{data}-train")
            most = args.train_tokens if data == "code" else args.train_tokens // 2
            least = args.chunk + 4 * WINDOW
            named = [each for each in named if len(each[1]) > least]
            self.known["train", data, layer] = Corpus(self.base, named, layer, args.longest, most)
            self.say(f"{data}: hidden states in front of layer {layer}")
        corpus: Corpus = self.known["train", data, layer]
        return corpus

    def counts(self, data: str) -> Tensor:
        """The number of occurrences of each token in the documents of training."""
        if ("counts", data) not in self.known:
            every = np.concatenate([tokens for _, tokens in documents.read(self.args.cache, f"{data}-train")])
            counts = np.bincount(every, minlength=len(self.words))
            self.known["counts", data] = torch.from_numpy(counts)
        counted: Tensor = self.known["counts", data]
        return counted

    def texts(self, data: str, reach: str) -> list[tuple[str, Tensor]]:
        """The names and tokens of the test documents that are long enough."""
        args = self.args
        length, most = (args.near, args.near_docs) if reach == "near" else (args.far, args.far_docs)
        named = [each for each in documents.read(args.cache, f"{data}-test") if len(each[1]) > length]
        return [
            (name, torch.from_numpy(tokens[: length + 1].astype(np.int64)).to(self.base.device))
            for name, tokens in named[:most]
        ]

    def hidden(self, data: str, reach: str, layer: int) -> list[Tensor]:
        if ("test", data, reach, layer) not in self.known:
            for key in [key for key in self.known if key[0] == "test" and key[3] != layer]:
                del self.known[key]
            self.known["test", data, reach, layer] = [
                self.base.below(tokens.unsqueeze(0), layer)[0] for _, tokens in self.texts(data, reach)
            ]
        states: list[Tensor] = self.known["test", data, reach, layer]
        return states

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:.0f} s] {text}", flush=True)

    def pretrained(self, data: str, reach: str) -> list[Tensor]:
        """Rows of the pretrained model: with a window and with full attention. Returns the bits with a window."""
        kept = []
        for arm in ("window", "full") if reach == "near" else ("window",):
            what, found = {"arm": arm, "test": data, "reach": reach}, []
            if arm == "full" and self.rows.has(what):
                continue
            for name, tokens in self.texts(data, reach):
                if arm == "full":
                    bits = self.base.full(tokens)
                else:
                    x = self.base.below(tokens[:-1].unsqueeze(0), self.base.depth)[0]
                    bits = self.base.bits(x, tokens[1:])
                    kept.append(bits)
                found.append({"name": name, "positions": spans(bits, self.sizes[tokens[1:].cpu()])})
            if not self.rows.has(what):
                self.rows.add({"what": what, "device": self.device, "documents": found})
        self.say(f"{data} {reach}: the pretrained model")
        return kept

    def run(self, setting: Setting) -> None:
        """Train a store and test it."""
        args, fields = self.args, asdict(setting)
        parts = ["code", "books"] if setting.data == "both" else [setting.data]
        corpora = [self.corpus(part, setting.layer) for part in parts]
        trained = sum(len(each) for corpus in corpora for each in corpus.tokens)
        reader, log = train(self.base, setting, corpora, args)
        if args.weights:
            args.weights.mkdir(parents=True, exist_ok=True)
            state = {name: p.detach().to("cpu", torch.bfloat16) for name, p in reader.named_parameters()}
            torch.save(state, args.weights / f"{setting.name}.pt")
        note = {"log": log, "chunk": args.chunk, "rows": args.rows, "tokens": trained,
                "parameters": sum(p.numel() for p in reader.parameters()),
                "temperature": [round(float(x), 2) for x in reader.log_scale.exp()],
                "gate": [round(float(x), 3) for x in reader.gate.tanh()],
                "threshold": [round(float(x), 3) for x in reader.threshold]}  # fmt: skip
        for reach in ("near", "far"):
            if reach == "far" and not setting.far:
                continue
            for part in parts:
                self.measure(reader, setting, fields, note, part, reach)

    def measure(
        self, reader: Reader, setting: Setting, fields: Row, note: Row, data: str, reach: str
    ) -> None:
        args = self.args
        if ("window", data, reach) not in self.known:
            self.known["window", data, reach] = self.pretrained(data, reach)
        window = self.known["window", data, reach]
        texts, states = self.texts(data, reach), self.hidden(data, reach, setting.layer)
        counts = self.counts(data)
        arms = [(f"{size}", size, args.k) for size in (args.sizes if reach == "near" else args.far_sizes)]
        if setting.controls and reach == "near":
            arms += [
                (f"all of {args.sizes[1]}", args.sizes[1], 0),
                (f"another's {args.sizes[1]}", args.sizes[1], args.k),
            ]
        if len(reader.extras):
            arms.append(("0", 0, args.k))
        for arm, size, best in arms:
            if self.left() < 0:
                self.say("no time is left")
                return
            found, rare, seen = [], [], []
            for n, ((name, tokens), x) in enumerate(zip(texts, states, strict=True)):
                other, index = None, []
                if arm.startswith("another"):
                    m = (n + 1) % len(texts)
                    other = texts[m][1][:size], states[m][:size]
                bits = measured(reader, tokens, x, size, best, other, index)
                targets = tokens[1:].cpu()
                item: Row = {"name": name, "positions": spans(bits, self.sizes[targets])}
                if size == max(args.sizes) and reach == "near" and best:
                    late = slice(min(4096, len(bits) // 2), None)
                    group = torch.bucketize(counts[targets], torch.tensor(RARE), right=True)
                    rare.append(grouped(window[n][late], bits[late], group[late], len(RARE) + 1))
                    seen.append(grouped(window[n][late], bits[late], recurrence(tokens.cpu())[late], 3))
                    if setting.controls and len(bits) > 8192:
                        item["examples"] = examples(self.words, tokens.cpu(), window[n] - bits, index, 10)
                found.append(item)
            what = {"arm": "store", "store": arm, "size": size, "test": data, "reach": reach, **fields}
            row = {"what": what, "device": self.device, "documents": found, **note}
            if rare:
                row["rare"], row["seen"] = (np.sum(each, 0).round(1).tolist() for each in (rare, seen))
            self.rows.add(row)
            self.say(f"{setting.name}: tested with {arm}, {data} {reach}")


# Tables


def per_byte(row: Row) -> dict[int, float]:
    """Bits per byte of each octave."""
    summed: dict[int, list[float]] = {}
    for each in row["documents"]:
        for first, bits, size, _ in each["positions"]:
            total = summed.setdefault(int(first), [0.0, 0.0])
            total[0] += bits
            total[1] += size
    return {first: bits / size for first, (bits, size) in summed.items()}


def table(rows: list[Row]) -> str:
    lines: list[str] = []
    for data in ("code", "books"):
        for reach in ("near", "far"):
            some = [row for row in rows if (row["what"]["test"], row["what"]["reach"]) == (data, reach)]
            if not some:
                continue
            octave = sorted(per_byte(some[0]))
            plain = {row["what"]["arm"]: per_byte(row) for row in some if row["what"]["arm"] != "store"}
            lines += ["", f"{data}, {reach}: {len(some[0]['documents'])} documents, bits per byte from position", "",
                      table_row("", *octave, "won back at 4096"), table_rule(len(octave) + 2)]  # fmt: skip
            for row in some:
                what, own = row["what"], per_byte(row)
                name = what["arm"] if what["arm"] != "store" else f"{what['name']}, {what['store']}"
                gap = plain["window"].get(4096, 0) - plain.get("full", {}).get(4096, 0)
                share = "" if "full" not in plain or not gap else (
                    f"{100 * (plain['window'].get(4096, 0) - own.get(4096, 0)) / gap:.0f} %")  # fmt: skip
                lines.append(table_row(name, *(f"{own[first]:.4f}" for first in octave), share))
    for row in rows:
        for kind, names in (
            ("rare", ("never", *(f"{n}+" for n in RARE))),
            ("seen", ("new", "before window", "in it")),
        ):
            if row.get(kind):
                gains = [
                    f"{name} {(a - b) / max(n, 1):+.3f}"
                    for name, (a, b, n) in zip(names, row[kind], strict=True)
                ]
                lines.append(
                    f"{row['what']['name']}, {row['what']['test']}: bits won per token, {kind}: {', '.join(gains)}"
                )
    return "\n".join(lines)


def parse(text: str, seconds: float) -> Setting:
    """A setting from ``layer=21,seed=1``."""
    setting, fields = Setting(seconds=seconds), {}
    for each in filter(None, text.split(",")):
        name, value = each.split("=", 1)
        kind = type(getattr(setting, name))
        fields[name] = value in ("1", "True") if kind is bool else kind(value)
    return replace(setting, **{"name": text.replace("=", "-").replace(",", "_") or "store", **fields})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", help="a GGUF file, a folder or a name")
    parser.add_argument("--cache", type=Path, required=True)
    add_arguments(parser, "attached.json")
    parser.add_argument("--runs", nargs="+", default=[""], help="settings, such as layer=21,seed=1")
    parser.add_argument("--train-seconds", type=float, default=90, help="of training, for each run")
    parser.add_argument("--weights", type=Path, help="folder for the trained parameters")
    for name, value in {"rows": 8, "chunk": 2560, "k": 32, "every": 50, "train-tokens": 10_000_000, "longest": 250_000,
                        "near": 65_536, "near-docs": 8, "far": 330_000, "far-docs": 2}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1536, 8192, 65536])
    parser.add_argument("--far-sizes", type=int, nargs="+", default=[8192, 65536, 262144])
    parser.add_argument(
        "--save", action="store_true", help="compute layers again in the backward pass, for less memory"
    )
    args = parser.parse_args()
    if args.table:
        print(table(Rows(args.out).rows))
        return
    experiment = Experiment(args)
    for text in args.runs:
        setting = parse(text, args.train_seconds)
        if experiment.left() < setting.seconds / 2:
            experiment.say(f"no time is left for {setting.name}")
            break
        experiment.run(setting)
    print(table(experiment.rows.rows))


if __name__ == "__main__":
    main()
