"""The kNN memory in a layer (Memorizing Transformers): sliding attention, and top-k attention over stored pairs of
older tokens.

A document is cut into segments of one window, counted from its start. A segment's pairs are written to the store when
the next one begins, and a query finds only entries a whole window behind it: every token is met once, by the window or
in the store, and nothing depends on how a text is cut into calls. Keys and queries of the store are of unit length and
not rotated; each head has its own temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remanence.config import Mode, ModelConfig
from remanence.layers.attention import Attended, AttentionState
from remanence.layers.decoding import StepContext, WindowDecoder
from remanence.memory.policies import POLICIES, Tokens, keep
from remanence.memory.search import CAPTURED, SEARCHES, attend, combine, unit
from remanence.memory.store import Store, StoreState
from remanence.mixers.attention import keys_seen, sliding_window
from remanence.mixers.base import ACTIVATIONS, Context, Mixer, MixerDecoder, MixerOutput, Shared, Text
from remanence.mixers.columns import SegmentColumns
from remanence.ops import decode
from remanence.ops.layout import from_rows, to_rows
from remanence.runtime.choices import check_choice
from remanence.runtime.state import TensorTuple

SCALE = 10.0
"""The store's softmax begins with scores of unit vectors times this: enough to prefer one entry among thousands."""


class _KnnState(NamedTuple):
    attention: AttentionState
    k: Tensor
    v: Tensor
    token_importance: Tensor
    last: Tensor
    store: StoreState


class KnnState(_KnnState, TensorTuple):
    """The attention window; keys and values of the open segment ``[r w h e]``, from the left, not yet in the store, and
    the importance of each token ``[r w]`` (-inf: not to be written); the model's last output ``[r d]``, from which the
    next token's surprise is computed; the store.
    """

    __slots__ = ()
    minus_infinity = ("token_importance",)

    @property
    def opened(self) -> Tensor:
        """Tokens of the open segment ``[r]``. A whole one stays open until the next token comes."""
        return opened(self.attention.position, self.token_importance.shape[1])

    def crop(self, tokens: int) -> KnnState:
        room = torch.where(self.attention.position == self.opened, self.opened, self.opened - 1)
        if bool((room < tokens).any()):
            raise ValueError(
                f"tokens: expected at most {int(room.min())}, as earlier ones are in the store, got {tokens}"
            )
        if tokens and self.last.shape[1]:
            raise ValueError(
                "tokens: expected 0, as a store that is written by surprise goes by the last token read, got more"
            )
        kept = torch.arange(self.token_importance.shape[1], device=self.token_importance.device) < (
            self.opened - tokens
        ).unsqueeze(-1)
        k, v = (x * kept[..., None, None] for x in (self.k, self.v))
        return KnnState(
            self.attention.crop(tokens), k, v, self.token_importance.where(kept, 0.0), self.last, self.store
        )


def opened(position: Tensor, window: int) -> Tensor:
    return torch.where(position > 0, (position - 1) % window + 1, 0)


class Knn(Mixer):
    """Attention over a window and over a store, joined by a gate for each head, or under one softmax."""

    State: ClassVar[type] = KnnState

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = config.knn
        check_choice("knn.search", c.search, SEARCHES)
        check_choice("knn.write", c.write, POLICIES)
        self.config, self.window, self.segment = c, config.window, config.segment
        self.dim, self.persistent = config.dim, config.persistent
        self.attention = sliding_window(config)
        self.shares_store = self.owns_store = False
        self.store = Store(c.size, config.heads, self.attention.width, c.evict, half_life=c.half_life)
        self.search = SEARCHES[c.search]()
        self.hidden = config.dim if c.write == "surprise" else 0
        self.log_scale = nn.Parameter(torch.empty(config.heads))
        self.gate = nn.Parameter(torch.empty(config.heads)) if c.fuse == "gate" else None
        self.reset_own_parameters()

    def reset_own_parameters(self) -> None:
        nn.init.constant_(self.log_scale, SCALE)
        with torch.no_grad():
            self.log_scale.log_()
        if self.gate is not None:
            nn.init.zeros_(self.gate)

    def link(self, earlier: Sequence[Mixer]) -> None:
        """Where layers share a store, the first one owns it, and the others have none."""
        if not self.config.shared:
            return
        first = next((mixer for mixer in earlier if isinstance(mixer, Knn)), None)
        if first is not None:
            first.owns_store = self.shares_store = True
            self.store = Store(0, self.store.heads, self.store.width)

    @property
    def stride(self) -> int | None:
        # What a store is to hold is known only when all layers have read a window, or is another layer's to say.
        return (
            self.window if self.config.write == "surprise" or self.owns_store or self.shares_store else None
        )

    @property
    def needs_unigrams(self) -> bool:
        """Whether the model is to have log-frequencies of its tokens."""
        return self.config.write == "rare"

    @property
    def has_memory(self) -> bool:
        return True

    @property
    def reach(self) -> int:
        return self.window

    def start(self, rows: int) -> KnnState:
        return self._start(rows, self.store)

    def _start(self, rows: int, store: Store) -> KnnState:
        attention = self.attention.start(rows)
        like = self.attention.k_proj.weight
        k, v = (
            like.new_zeros(rows, self.window, self.attention.heads, self.attention.width) for _ in range(2)
        )
        importance = torch.zeros(rows, self.window, device=like.device)
        return KnnState(
            attention, k, v, importance, like.new_zeros(rows, self.hidden), store.start(rows, like)
        )

    def check(self, state: KnnState) -> None:
        """Refuse the state of a layer with another window, store or width."""
        super().check(state)
        heads = [self.attention.heads, self.attention.width]
        for name, part, expected in (
            ("window", state.token_importance, [self.window]),
            ("heads and their width", state.k[:, 0], heads),
            ("store", state.store.k[:, :, 0, 0], [self.store.size]),
            ("last output", state.last, [self.hidden]),
        ):
            if list(part.shape[1:]) != expected:
                got = list(part.shape[1:])
                raise ValueError(
                    f"state: expected a {name} of {expected}, as this model's kNN layers have, got {got}"
                )

    def forward(self, x: Tensor, state: KnnState | None, ctx: Context) -> MixerOutput:
        offsets, mode = ctx.offsets, ctx.mode
        fresh = state is None
        if state is None:
            # Stores come to have the slots that the call can fill, and the others at its end if they are kept: many
            # short documents then need no more memory, nor time to search it, than their tokens.
            state = self._start(x.shape[0] if offsets is None else len(offsets) - 1, self.store.resized(0))
        local = self.attention.attend(x, None if fresh else state.attention, offsets, lse=self.gate is None)
        importance = ctx.shared.once("importance", lambda: self.importance(x, ctx))
        if mode not in ("on", "fresh"):
            importance = torch.full_like(importance, -torch.inf)
        columns = SegmentColumns(
            local, [0] * len(state.k) if fresh else state.opened.tolist(), offsets, self.window
        )
        k, v = (
            columns.columns(old, new.detach()) for old, new in ((state.k, unit(local.k)), (state.v, local.v))
        )
        importance = columns.columns(state.token_importance, to_rows(importance, offsets)[0])
        shared_store = ctx.shared.entries["store"] if self.shares_store else None
        y, store = self._read(local, columns, k, v, importance, state, shared_store, mode, fresh)
        if self.owns_store:
            ctx.shared.entries["store"] = store
        y = self.attention.out(from_rows(y.to(local.v.dtype), local.back))
        left = (columns.left(k), columns.left(v), columns.left(importance))
        store = store.widened(self.store.size) if ctx.keep else store
        return MixerOutput(y, KnnState(local.state, *left, state.last, store))

    @torch.no_grad()
    def importance(self, x: Tensor, ctx: Context) -> Tensor:
        """The importance of each token for a store ``[b t]``, as far as it is known before the token is read."""
        write, text = self.config.write, ctx.text
        if write not in ("rare", "random"):
            return torch.zeros(x.shape[:2], device=x.device)
        if write == "rare" and text is None:
            raise ValueError(
                "knn.write: expected 'all' or 'random' without tokens, got 'rare', which goes by their frequency"
            )
        # 'random' goes by positions alone.
        tokens = torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device) if text is None else text.tokens
        rows, back = to_rows(tokens, ctx.offsets)
        position = ctx.position.unsqueeze(-1) + torch.arange(rows.shape[1], device=x.device)
        # Not the row's index, which says nothing of its document: all rows draw alike.
        same = torch.zeros(len(rows), dtype=torch.int64, device=x.device)
        read = Tokens(rows, position, None if text is None else text.log_unigrams, document=same)
        return from_rows(POLICIES[write](read), back).float()

    @torch.no_grad()
    def finish(self, begun: KnnState | None, state: KnnState, hidden: Tensor, ctx: Context) -> KnnState:
        """With "surprise", a token's importance is its negative log-likelihood, known once all layers have read it."""
        if self.config.write != "surprise":
            return state
        index, surprise, newest = ctx.shared.once("surprise", lambda: self._surprise(state, hidden, ctx))
        importance = state.token_importance
        if ctx.mode in ("on", "fresh"):
            # What is no token goes into one column more.
            importance = F.pad(importance, (0, 1)).scatter(1, index, surprise)[:, :-1]
        return state._replace(token_importance=importance, last=newest.to(state.last.dtype))

    def _surprise(self, state: KnnState, hidden: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Of each token its column in the window ``[r t]`` and its surprise ``[r t]``; and each row's last output
        ``[r d]``.
        """
        if ctx.text is None:
            raise ValueError(
                "knn.write: expected 'all' or 'random' without tokens, got 'surprise', which needs a head"
            )
        (rows, _), (out, _) = to_rows(ctx.text.tokens, ctx.offsets), to_rows(hidden, ctx.offsets)
        counts = torch.tensor(
            [rows.shape[1]] * len(rows) if ctx.offsets is None else ctx.offsets, device=rows.device
        )
        counts = counts if ctx.offsets is None else counts.diff()
        predicted = torch.cat([state.last.unsqueeze(1).to(out.dtype), out[:, :-1]], 1)
        surprise = token_surprise(ctx.text, predicted, rows, ctx.position)
        last = (counts - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, out.shape[-1])
        newest = torch.where(
            (counts > 0).unsqueeze(-1), out.gather(1, last).squeeze(1), state.last.to(out.dtype)
        )
        column = torch.arange(rows.shape[1], device=rows.device)
        index = (ctx.position % self.window).unsqueeze(-1) + column
        return index.where(column < counts.unsqueeze(-1), self.window), surprise, newest

    def decoder(self, state: KnnState, mode: Mode) -> KnnDecoder:
        return KnnDecoder(self, state, mode)

    def decode_unsupported_reason(self, mode: Mode) -> str | None:
        return None  # though it may have a stride: what a store is to hold of a token is known when the next one comes

    def flops(self, length: int) -> float:
        # Scores of the whole store, values of what was found, and no way back through either.
        seen = keys_seen(self.attention, length, self.persistent) + self.config.size / 6 + self.config.k
        return super().flops(length) + 12.0 * self.dim * seen

    def activation_bytes(self, dim: int) -> float:
        """The window's, and the pairs that were found."""
        return (ACTIVATIONS["window"] + 4.0 * self.config.k) * dim

    def _read(
        self,
        local: Attended,
        columns: SegmentColumns,
        k: Tensor,
        v: Tensor,
        importance: Tensor,
        state: KnnState,
        shared_store: StoreState | None,
        mode: Mode,
        ours: bool,
    ) -> tuple[Tensor, StoreState]:
        """Segment by segment: what the one before left is written, then the store is asked. The local attention, joined
        by what was found, and the store; its tensors may be written to if they are `ours`.
        """
        # Room for all that can be written; and a slot, if an empty one, so that gate and temperature get gradients.
        slots = max(1, state.store.size + (columns.segments - 1) * self.window)
        store = state.store.widened(min(self.store.size, slots))
        ours = ours or store is not state.store
        if (store if shared_store is None else shared_store).size == 0:
            return self.joined(local.y, None), store
        q = columns.queries(unit(local.q))
        base = state.attention.position - state.opened
        found, lengths = [], []
        for part in columns.parts:
            begin = base.unsqueeze(-1) + part.segment * self.window
            if part.ended is not None and shared_store is None:
                before = slice((part.segment - 1) * self.window, part.segment * self.window)
                segment = (k[:, before], v[:, before], importance[:, before], begin - self.window)
                store = self.write(store, *segment, part.ended, ours)
                ours = True
            if mode == "off":
                continue
            column = torch.arange(part.first, part.last, device=base.device)
            live = columns.live(column)
            if mode == "fresh":  # no entries from before the segment of the model's that this one begins in
                old = (store.position < begin // self.segment * self.segment) & live.any(1, keepdim=True)
                store = store._replace(position=store.position.masked_fill(old, -1))
            here = store if shared_store is None else shared_store
            limit = (base.unsqueeze(-1) + column - self.window).masked_fill(~live, -1)
            met = self.query_store(q[:, part.first : part.last], here, limit)
            # What autograd holds must not be written to: of what `dense` has read, it holds the store itself.
            ours = ours and not (torch.is_grad_enabled() and self.config.search == "dense")
            found.append(torch.cat([met[0].to(met[1].dtype), met[1].unsqueeze(-1)], -1))
            lengths.append((part.first, part.last))
        if not found:
            return self.joined(local.y, None), store
        far = columns.back(found, lengths)
        return self.joined(local.y, (far[..., :-1], far[..., -1])), store

    def write(
        self,
        store: StoreState,
        k: Tensor,
        v: Tensor,
        importance: Tensor,
        begin: Tensor,
        rows: Tensor,
        ours: bool,
    ) -> StoreState:
        """The best of a whole segment ``[r w ...]``, which begins at ``[r 1]``, into the store, in the rows that have
        come to its end. The store's tensors may be written to if they are `ours`.
        """
        c = self.config
        mask = importance > -torch.inf
        if c.write != "all":
            mask = mask & dilate(keep(importance, c.fraction, self.window), c.neighbours)
        place = begin + torch.arange(self.window, device=begin.device)
        scored = None if c.write == "all" else importance.masked_fill(~mask, 0.0)
        return self.store.resized(store.size).add(
            store, k, v, place, scored, mask & rows.unsqueeze(-1), reuse=ours
        )

    def query_store(self, q: Tensor, store: StoreState, limit: Tensor) -> tuple[Tensor, Tensor]:
        """What unit queries find in a store, and its log-sum-exp."""
        found = self.search(q.detach(), store, min(self.config.k, store.size), limit)
        return attend(q, found, store, self.log_scale.exp())

    def joined(self, y: Tensor, met: tuple[Tensor, Tensor] | None) -> Tensor:
        """The window's attention, with its log-sum-exp behind it if there is no gate, and what the store was found to
        say.
        """
        near, near_lse = (y, None) if self.gate is not None else (y[..., :-1], y[..., -1])
        if met is None:
            return near
        return combine(near, near_lse, met[0].to(near.dtype), met[1], self.gate)


class KnnDecoder(MixerDecoder):
    """A kNN layer, one token at a time: the window, the open segment and the store are written in place."""

    def __init__(self, mixer: Knn, state: KnnState, mode: Mode) -> None:
        self.captured = mixer.search in CAPTURED
        self.mixer, self.mode, self.size = mixer, mode, mixer.window
        self.window = WindowDecoder(mixer.attention, state.attention)
        own = state.detach().clone()
        self.k, self.v, self.token_importance, self.last, self.store = (
            own.k,
            own.v,
            own.token_importance,
            own.last,
            own.store,
        )

    def step(self, x: Tensor, now: StepContext) -> Tensor:
        mixer = self.mixer
        self._end_segment(now)
        y, q, k, v = self.window.attend(x, now, lse=mixer.gate is None)
        importance = now.once("importance", make=lambda: self._importance(x, now))
        slot = now.once("open slot", self.size, make=lambda: now.position % self.size)
        for buffer, new in ((self.k, unit(k)[:, 0]), (self.v, v[:, 0]), (self.token_importance, importance)):
            decode.put(buffer, slot, new, now.active)
        if mixer.owns_store:
            now.shared["store"] = self.store
        store = now.shared["store"] if mixer.shares_store else self.store
        met = None
        if store.size and self.mode != "off":
            met = mixer.query_store(unit(q), store, (now.position - self.size).unsqueeze(-1))
        return mixer.attention.out(mixer.joined(y, met).to(v.dtype))

    def _end_segment(self, now: StepContext) -> None:
        """Write the open segment of the rows whose next one begins."""
        if not self.store.size:
            return
        ended = now.active & (now.position > 0) & (now.position % self.size == 0)
        # On a GPU to ask would be to wait for it.
        if not ended.is_cuda and not bool(ended.any()):
            return
        begin = (now.position - self.size).unsqueeze(-1)
        store = self.mixer.write(self.store, self.k, self.v, self.token_importance, begin, ended, ours=True)
        for buffer, new in zip(self.store, store, strict=True):
            if new is not buffer:
                buffer.copy_(new)

    def _importance(self, x: Tensor, now: StepContext) -> Tensor:
        """The importance of the token for a store ``[r]``."""
        if self.mode != "on":
            return torch.full_like(self.token_importance[:, 0], -torch.inf)
        if self.mixer.hidden:
            return token_surprise(now.text, self.last.unsqueeze(1), now.text.tokens, now.position)[:, 0]
        return self.mixer.importance(x, Context(now.position, None, self.mode, now.text, Shared()))[:, 0]

    def finish(self, hidden: Tensor, now: StepContext) -> None:
        if self.mixer.hidden:
            decode.keep((self.last,), (hidden[:, 0].to(self.last.dtype),), now.active)

    def state(self, position: Tensor) -> KnnState:
        held = torch.arange(self.size, device=position.device) < opened(position, self.size).unsqueeze(-1)
        k, v = (torch.where(held[..., None, None], x, 0.0) for x in (self.k, self.v))
        attention, importance = self.window.state(position), torch.where(held, self.token_importance, 0.0)
        return KnnState(attention, k, v, importance, self.last.clone(), self.store.clone())


def token_surprise(text: Text, predicted: Tensor, tokens: Tensor, position: Tensor) -> Tensor:
    """How little a model expected tokens ``[r t]``: -log p by what the outputs before them ``[r t d]`` predicted. Of a
    document's first token nothing is expected.
    """
    logits = text.logits(predicted).float()
    surprise = F.cross_entropy(logits.flatten(0, 1), tokens.flatten().long(), reduction="none")
    surprise = surprise.view_as(tokens)
    nothing = torch.full_like(surprise[:, 0], log(logits.shape[-1]))
    first = torch.where(position == 0, nothing, surprise[:, 0])
    return torch.cat([first.unsqueeze(-1), surprise[:, 1:]], 1)


def dilate(mask: Tensor, reach: int) -> Tensor:
    """Marked tokens, and those at most so far from one in the same segment."""
    reach = min(reach, mask.shape[1])
    if not reach:
        return mask
    return F.max_pool1d(mask.float().unsqueeze(1), 2 * reach + 1, 1, reach).squeeze(1) > 0
