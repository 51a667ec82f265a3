"""The kNN layer is a loop: one document, one token, one head at a time, in float64, as docs/paper.md says it in words.

A model of such layers is compared with the loop in all that comes out of it: logits, stores, what waits to be stored,
and the gradients of every parameter, for settings and ways of reading random_score at random.
"""

import random
from itertools import accumulate, chain, pairwise
from math import ceil, inf, log, log2
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from remanence import Model, ModelConfig
from remanence.memory.policies import Tokens, random_score
from remanence.mixers import Knn
from remanence.testing import assert_close

VOCABULARY = 13


class Entry(NamedTuple):
    """A token for a store: its keys and values ``[h e]``, and its importance; -inf: not to be written."""

    position: int
    token_importance: float
    k: Tensor
    v: Tensor


class LayerLoop:
    """What a layer holds of one document: every key (rotated) and value so far, the open segment, and the store. Slots
    of a ring that mode "fresh" has emptied are None.
    """

    def __init__(self, mixer):
        self.mixer, self.attention = mixer, mixer.attention
        self.k, self.v, self.open, self.store, self.written = [], [], [], [], 0

    def rotated(self, x, position):
        half = self.attention.width // 2
        angle = torch.tensor(
            [position * self.attention.rotary_base ** -(i / half) for i in range(half)], dtype=x.dtype
        )
        a, b = x[:, :half], x[:, half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], 1)

    def end_segment(self):
        """The best of the open segment into the store."""
        c, w = self.mixer.config, self.attention.window
        chosen = range(w)
        if c.write != "all":
            best = sorted(chosen, key=lambda i: (-self.open[i].token_importance, i))[
                : max(1, ceil(c.fraction * w - 1e-9))
            ]
            best = [i for i in best if self.open[i].token_importance > -inf]
            chosen = [i for i in chosen if any(abs(i - other) <= c.neighbours for other in best)]
        for entry in [self.open[i] for i in chosen if self.open[i].token_importance > -inf]:
            self.written += 1
            self.store.append(entry._replace(token_importance=1.0) if c.write == "all" else entry)
            if len(self.store) > c.size and c.evict == "oldest":
                del self.store[0]
        while len(self.store) > c.size:
            del self.store[min(range(len(self.store)), key=self.value)]
        self.open = []

    def value(self, index):
        """By which a full store gives up an entry, the older of equals first."""
        entry, life = self.store[index], self.mixer.config.half_life
        age = 0.0 if life is None else entry.position / life
        return log2(max(entry.token_importance, torch.finfo(torch.float32).tiny)) + age

    def forget(self, first):
        """Entries from before a position."""
        old = [entry is not None and entry.position < first for entry in self.store]
        if self.mixer.config.evict == "oldest":
            self.store = [None if gone else entry for entry, gone in zip(self.store, old, strict=True)]
        else:
            self.store = [entry for entry, gone in zip(self.store, old, strict=True) if not gone]

    def read(self, x, position, token_importance, owner, mode):
        """One token's features ``[d]``; what is found is the owner's."""
        attention, w = self.attention, self.attention.window
        q, k, v = (
            proj(x).view(attention.heads, -1)
            for proj in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        self.k.append(self.rotated(k, position))
        self.v.append(v)
        asked, unit = self.rotated(q, position), F.normalize(q, dim=1)
        if isinstance(self.mixer, Knn):
            self.open.append(Entry(position, token_importance, F.normalize(k, dim=1).detach(), v.detach()))
        heads = []
        for head in range(attention.heads):
            keys, values = [k[head] for k in self.k[-w:]], [v[head] for v in self.v[-w:]]
            if attention.persistent is not None:
                for token in attention.persistent.weight:
                    keys.append(attention.k_proj(token).view(attention.heads, -1)[head])
                    values.append(attention.v_proj(token).view(attention.heads, -1)[head])
            near = torch.stack(keys) @ asked[head] * attention.width**-0.5
            values = torch.stack(values)
            y = near.softmax(0) @ values
            found = [] if owner is None or mode == "off" else owner.found(unit[head], head, position - w)
            if found:
                far = torch.stack([entry.k[head] for entry in found]) @ unit[head]
                far, told = far * self.mixer.log_scale[head].exp(), torch.stack([e.v[head] for e in found])
                if self.mixer.gate is None:
                    y = torch.cat([near, far]).softmax(0) @ torch.cat([values, told])
                else:
                    share = self.mixer.gate[head].sigmoid()
                    y = (1 - share) * y + share * (far.softmax(0) @ told)
            heads.append(y)
        return attention.o_proj(torch.cat(heads))

    def found(self, query, head, limit):
        """The nearest entries a whole window behind."""
        there = [entry for entry in self.store if entry is not None and entry.position <= limit]
        if self.mixer.config.search == "dense":
            return there
        return sorted(there, key=lambda entry: -float((entry.k[head] @ query).detach()))[
            : self.mixer.config.k
        ]


class DocumentLoop:
    """One document, read token after token by all layers of a model."""

    def __init__(self, model):
        self.model, self.position, self.expected = model, 0, None
        self.layers = [LayerLoop(mixer) for mixer in model.mixers]
        stores = [layer for layer in self.layers if isinstance(layer.mixer, Knn)]
        shared = model.config.knn.shared
        self.owners = stores[:1] if shared else stores
        self.store_owners = [
            (stores[0] if shared else layer) if isinstance(layer.mixer, Knn) else None
            for layer in self.layers
        ]

    def token_importance(self, token):
        write = self.model.config.knn.write
        if write == "rare":
            return -float(self.model.log_unigrams[token])
        if write == "random":
            where = torch.tensor([[self.position]])
            return float(random_score(Tokens(where, where, document=torch.tensor([0]))))
        if write == "surprise":
            return log(VOCABULARY) if self.expected is None else -float(self.expected.log_softmax(0)[token])
        return 0.0

    def read(self, token, mode):
        """The logits ``[v]`` of what follows a token."""
        model, c = self.model, self.model.config
        begin = self.position // c.window * c.window
        for layer in self.layers:
            if isinstance(layer.mixer, Knn) and self.position and self.position == begin:
                layer.end_segment() if layer in self.owners else layer.open.clear()
        if mode == "fresh":
            for layer in self.owners:
                layer.forget(begin // c.segment * c.segment)
        token_importance = self.token_importance(token) if mode in ("on", "fresh") else -inf
        x = model.embed.weight[token]
        for block, layer, owner in zip(model.blocks, self.layers, self.store_owners, strict=True):
            x = x + layer.read(block.norm_mixer(x), self.position, token_importance, owner, mode)
            x = x + block.ffn(block.norm_ffn(x))
        self.position += 1
        logits = model.logits(model.backbone.norm(x))
        self.expected = logits.detach()
        return logits

    def assert_state(self, blocks, row):
        """A model's state of this document is the loop's."""
        for layer, state in zip(self.layers, blocks, strict=True):
            if not isinstance(layer.mixer, Knn):
                continue
            assert int(state.open_length[row]) == len(layer.open)
            for name, tolerance in (("k", 1e-9), ("v", 1e-9), ("token_importance", 1e-5)):
                held = getattr(state, name)[row]
                waits = [torch.as_tensor(getattr(entry, name), dtype=held.dtype) for entry in layer.open]
                nothing = torch.zeros_like(held[len(waits) :])
                assert_close(
                    held, torch.cat([torch.stack(waits), nothing]) if waits else nothing, tolerance, name
                )
            size = layer.mixer.config.size if layer in self.owners else 0
            assert state.store.size == size
            if not size:
                continue
            assert int(state.store.written[row]) == layer.written
            held = state.store.rows([row])
            slots = [slot for slot, position in enumerate(held.position[0].tolist()) if position >= 0]
            entries = [entry for entry in layer.store if entry is not None]
            if layer.mixer.config.evict == "oldest":
                # The next one's slot is `written % size`.
                first = layer.written - len(layer.store)
                there = {
                    (first + i) % size: entry for i, entry in enumerate(layer.store) if entry is not None
                }
                assert slots == sorted(there)
                entries = [there[slot] for slot in slots]
            assert held.position[0, slots].tolist() == [entry.position for entry in entries]
            for slot, entry in zip(slots, entries, strict=True):
                assert_close([held.k[0, slot], held.v[0, slot]], [entry.k, entry.v], 1e-9, "stored pairs")
                assert abs(float(held.importance[0, slot]) - entry.token_importance) < 1e-5


def setting(chance):
    window = chance.randint(1, 6)
    size = chance.choice([1, window, 7, 12])
    return {
        "pattern": chance.choice([("knn",), ("knn",), ("knn", "window"), ("window", "knn")]),
        "heads": chance.choice([1, 2]),
        "window": window,
        "segment": chance.choice([4, 8]),
        "persistent": chance.choice([0, 2]),
        "knn": {
            "k": chance.randint(1, min(size, 6)),
            "size": size,
            "fuse": chance.choice(["gate", "joint"]),
            "search": chance.choice(["exact", "exact", "dense"]),
            "write": chance.choice(["all", "rare", "surprise", "random"]),
            "fraction": chance.choice([0.1, 0.4, 1.0]),
            "neighbours": chance.choice([0, 0, 1, 3]),
            "evict": chance.choice(["oldest", "importance"]),
            "half_life": chance.choice([None, 2.0, 50.0]),
            "shared": chance.random() < 0.6,
        },
    }


def model_of(fields, seed):
    torch.manual_seed(seed)
    memory = {"heads": 2, "chunk": 4}
    made = Model(
        ModelConfig(vocab_size=VOCABULARY, dim=8, num_layers=2, ffn=8, memory=memory, **fields)
    ).double()
    with torch.no_grad():
        for mixer in made.mixers:
            if isinstance(mixer, Knn):
                mixer.log_scale.normal_(1.0, 0.5)
                if mixer.gate is not None:
                    mixer.gate.normal_()
        if made.log_unigrams is not None:
            made.log_unigrams.copy_(torch.randn(VOCABULARY, dtype=torch.float64).log_softmax(0))
    return made


def calls(chance, rows):
    """Ways to read: how (plain, masked or packed), each row's count of tokens, and the memory's mode."""
    for _ in range(chance.randint(2, 3)):
        how = chance.choice(["plain", "masked", "packed"])
        counts = [chance.randint(0, 11) for _ in range(rows)]
        mode = chance.choice(["on", "on", "on", "frozen", "off", "fresh"])
        yield how, [counts[0]] * rows if how == "plain" else counts, mode


def read(model, how, texts, state, mode, chance):
    """The logits of each row's tokens, and the state."""
    if how == "packed":
        offsets = [0, *accumulate(map(len, texts))]
        logits, state = model(
            torch.tensor([[*chain(*texts)]], dtype=torch.int64), state, offsets=offsets, memory_mode=mode
        )
        return [logits[0, a:b] for a, b in pairwise(offsets)], state
    width = max(map(len, texts)) + (2 if how == "masked" else 0)
    tokens, mask = (
        torch.zeros(len(texts), width, dtype=torch.int64),
        torch.zeros(len(texts), width, dtype=torch.bool),
    )
    for row, text in enumerate(texts):
        places = sorted(chance.sample(range(width), len(text)))
        tokens[row, places], mask[row, places] = torch.tensor(text, dtype=torch.int64), True
    logits, state = model(tokens, state, mask=mask if how == "masked" else None, memory_mode=mode)
    return [logits[row, mask[row]] for row in range(len(texts))], state


@pytest.mark.parametrize("seed", range(24))
def test_a_model_is_the_loop(seed):
    chance = random.Random(seed)
    fields = setting(chance)
    model, rows = model_of(fields, seed), chance.randint(1, 2)
    documents = [DocumentLoop(model) for _ in range(rows)]
    state, losses = None, [torch.zeros((), dtype=torch.float64) for _ in range(2)]
    for how, counts, mode in calls(chance, rows):
        texts = [[chance.randrange(VOCABULARY) for _ in range(count)] for count in counts]
        before, copy = state or (), state.clone() if state else ()
        logits, state = read(model, how, texts, state, mode, chance)
        assert_close(before, copy, 0.0, "the state that was given")
        for row, (text, ours) in enumerate(zip(texts, logits, strict=True)):
            if text:
                theirs = torch.stack([documents[row].read(token, mode) for token in text])
                assert_close(ours, theirs, 1e-9, f"{fields}: logits of row {row}, {how}, {mode}")
                weight = torch.randn_like(theirs)
                losses = [loss + (y * weight).sum() for loss, y in zip(losses, (ours, theirs), strict=True)]
            documents[row].assert_state(state.blocks, row)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ours, theirs = (
        torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True) for loss in losses
    )
    assert_close(ours, theirs, 1e-8, f"{fields}: gradients")
