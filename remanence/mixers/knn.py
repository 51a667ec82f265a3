"""The kNN memory (Memorizing Transformers): sliding-window attention, combined with attention over the k
nearest stored keys and values of older tokens.

A document is split into segments with the length of the window, counted from its start. The keys and values
of a segment are written to the store when the next segment begins. A query retrieves only entries that are at
least one window behind it. Each token is therefore seen once, in the window or in the store, and results do
not depend on how a text is split into calls. Keys and queries of the store are normalised to unit length and
have no rotary positions. Each head has its own temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remanence.config import Mode, ModelConfig
from remanence.layers.attention import AttentionOutput
from remanence.layers.decoding import StepContext, WindowDecoder
from remanence.memory.policies import POLICIES, Tokens, dilate, keep
from remanence.memory.search import CAPTURED, SEARCHES, attend, l2_normalize
from remanence.memory.search import combine as combine_attention
from remanence.memory.store import Store, StoreState
from remanence.mixers.attention import keys_seen, sliding_window
from remanence.mixers.base import ACTIVATIONS, Context, Mixer, MixerDecoder, MixerOutput, SharedValues, Text
from remanence.mixers.columns import SegmentColumns
from remanence.mixers.knn_state import KnnState, open_tokens
from remanence.ops import decode
from remanence.ops.layout import from_rows, to_rows
from remanence.runtime.choices import check_choice

INITIAL_SCALE = 10.0
"""The initial factor of the scores in the softmax over stored entries (the inverse temperature). Scores are
products of unit vectors; the factor is large enough that one entry among thousands can get most of the
weight.
"""


class Knn(Mixer):
    """Attention over a sliding window and over a store of older keys and values. The two are combined by a
    gate for each head, or by one softmax.
    """

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
        self.store = Store(
            c.size, config.heads, self.attention.width, c.evict,
            half_life=c.half_life, dtype=c.store_dtype, device=c.store_device,
        )  # fmt: skip
        self.search = SEARCHES[c.search]()
        self.output_dim = config.dim if c.write == "surprise" else 0
        self.log_scale = nn.Parameter(torch.empty(config.heads))
        self.gate = nn.Parameter(torch.empty(config.heads)) if c.fuse == "gate" else None
        self.reset_own_parameters()

    def reset_own_parameters(self) -> None:
        """Initialise the temperatures to `INITIAL_SCALE` and the gates to zero."""
        nn.init.constant_(self.log_scale, INITIAL_SCALE)
        with torch.no_grad():
            self.log_scale.log_()
        if self.gate is not None:
            nn.init.zeros_(self.gate)

    def link(self, earlier: Sequence[Mixer]) -> None:
        """If layers share a store (`KnnConfig.shared`), the first kNN layer owns it, and the others have a
        store of size 0.
        """
        if not self.config.shared:
            return
        first = next((mixer for mixer in earlier if isinstance(mixer, Knn)), None)
        if first is not None:
            first.owns_store = self.shares_store = True
            self.store = self.store.with_size(0)

    @property
    def stride(self) -> int | None:
        # Writing by surprise depends on the outputs of all layers; a shared store, on the layer that owns it.
        waits = self.config.write == "surprise" or self.owns_store or self.shares_store
        return self.window if waits else None

    @property
    def needs_unigrams(self) -> bool:
        return self.config.write == "rare"

    @property
    def has_memory(self) -> bool:
        return True

    @property
    def window_size(self) -> int:
        return self.window

    def start(self, rows: int) -> KnnState:
        return self._start(rows, self.store)

    def _start(self, rows: int, store: Store) -> KnnState:
        """The initial state of `rows` documents with a given store."""
        like, shape = (
            self.attention.k_proj.weight,
            (rows, self.window, self.attention.heads, self.attention.width),
        )
        k, v = like.new_zeros(shape), like.new_zeros(shape)
        importance, last = (
            torch.zeros(rows, self.window, device=like.device),
            like.new_zeros(rows, self.output_dim),
        )
        return KnnState(self.attention.start(rows), k, v, importance, last, store.start(rows, like))

    def check(self, state: KnnState) -> None:
        """Raise a ValueError if a state is from a layer with another window, store size, or width."""
        super().check(state)
        self.store.check_dtype(state.store)
        heads = [self.attention.heads, self.attention.width]
        for name, part, expected in (
            ("window", state.token_importance, [self.window]),
            ("heads and their width", state.k[:, 0], heads),
            ("store", state.store.position, [self.store.size]),
            ("last output", state.last, [self.output_dim]),
        ):
            if list(part.shape[1:]) != expected:
                got = list(part.shape[1:])
                raise ValueError(
                    f"state: expected a {name} of {expected}, as this model's kNN layers have, got {got}"
                )

    def forward(self, x: Tensor, state: KnnState | None, ctx: Context) -> MixerOutput:
        fresh = state is None
        before = None if state is None else state.attention
        if state is None:
            # During the call, a store has only as many slots as the call can fill, so that the memory and search time
            # of many short documents depend only on their tokens. The other slots are added at the end if the state is
            # kept.
            rows = x.shape[0] if ctx.offsets is None else len(ctx.offsets) - 1
            state = self._start(rows, self.store.with_size(0))
        after: KnnState | None = None

        def fuse(local: AttentionOutput) -> Tensor:
            """Combine attention over the window with the store; the new state is kept in `after`."""
            nonlocal after
            y, after = self._fuse(local, self._importance(x, ctx), state, ctx, fresh)
            return y

        y, window = self.attention(x, before, ctx.offsets, fuse=fuse, lse=self.gate is None)
        if after is None:
            raise ValueError(
                f"attention: expected {type(self.attention).__name__}.forward to call fuse, got no call"
            )
        return MixerOutput(y, after._replace(attention=window))

    def _importance(self, x: Tensor, ctx: Context) -> Tensor:
        """The result of `importance` ``[b t]``, computed once for all layers; -inf in memory modes that do
        not write.
        """
        importance = ctx.shared.once("importance", lambda: self.importance(x, ctx))
        return importance if ctx.mode in ("on", "fresh") else torch.full_like(importance, -torch.inf)

    def _fuse(
        self, local: AttentionOutput, importance: Tensor, state: KnnState, ctx: Context, fresh: bool
    ) -> tuple[Tensor, KnnState]:
        """Query and update the store. Returns attention over the window, `local`, combined with the retrieved
        values ``[r t h e]``, and the state after the call. `fresh`: whether the call begins at the start of
        documents.
        """
        lead = [0] * len(state.k) if fresh else state.open_length.tolist()
        columns = SegmentColumns(local, lead, ctx.offsets, self.window)
        k, v = (
            columns.align(old, new.detach())
            for old, new in ((state.k, l2_normalize(local.k)), (state.v, local.v))
        )
        importance = columns.align(state.token_importance, to_rows(importance, ctx.offsets)[0])
        shared_store = ctx.shared.entries["store"] if self.shares_store else None
        y, store = self._read_segments(local, columns, k, v, importance, state, shared_store, ctx.mode, fresh)
        if self.owns_store:
            ctx.shared.entries["store"] = store
        open_segment = (columns.open_segment(k), columns.open_segment(v), columns.open_segment(importance))
        store = store.enlarge(self.store.size) if ctx.keep else store
        return y.to(local.v.dtype), KnnState(local.state, *open_segment, state.last, store)

    @torch.no_grad()
    def importance(self, x: Tensor, ctx: Context) -> Tensor:
        """The importance of each token ``[b t]``, by which the write policy chooses the tokens to store. It
        is 0 for policies that do not need it, and for "surprise", which sets it later, in `finish`.
        """
        write, text = self.config.write, ctx.text
        if write not in ("rare", "random"):
            return torch.zeros(x.shape[:2], device=x.device)
        if write == "rare" and text is None:
            raise ValueError(
                "knn.write: expected 'all' or 'random' without tokens, got 'rare', which needs their frequencies"
            )
        # The policy 'random' depends only on positions.
        tokens = torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device) if text is None else text.tokens
        rows, back = to_rows(tokens, ctx.offsets)
        position = ctx.position.unsqueeze(-1) + torch.arange(rows.shape[1], device=x.device)
        # All rows draw the same random numbers. The index of a row cannot be used, because it does not identify the
        # document.
        same = torch.zeros(len(rows), dtype=torch.int64, device=x.device)
        read = Tokens(rows, position, None if text is None else text.log_unigrams, document=same)
        return from_rows(POLICIES[write](read), back).float()

    @torch.no_grad()
    def finish(self, previous: KnnState | None, state: KnnState, hidden: Tensor, ctx: Context) -> KnnState:
        """Set the importance of tokens for the policy "surprise". It is the negative log-likelihood of each
        token, which is known only after all layers have read the tokens before it.
        """
        if self.config.write != "surprise":
            return state
        index, surprise, newest = ctx.shared.once("surprise", lambda: self._surprise(state, hidden, ctx))
        importance = state.token_importance
        if ctx.mode in ("on", "fresh"):
            # Padding is written to an additional column, which is dropped.
            importance = F.pad(importance, (0, 1)).scatter(1, index, surprise)[:, :-1]
        return state._replace(token_importance=importance, last=newest.to(state.last.dtype))

    def _surprise(self, state: KnnState, hidden: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        """The column of each token in the open segment ``[r t]`` (`window` for padding), the surprise of each
        token ``[r t]``, and the model's output for the last token of each row ``[r d]``.
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

    def decoder(self, state: KnnState, memory_mode: Mode) -> KnnDecoder:
        return KnnDecoder(self, state, memory_mode)

    def decode_unsupported_reason(self, memory_mode: Mode) -> str | None:
        return None  # possible despite `stride`: importance is needed only when a segment is written

    def flops(self, length: int) -> float:
        # Counts the scores of the whole store and the values of the retrieved entries. Neither has a backward pass.
        seen = keys_seen(self.attention, length, self.persistent) + self.config.size / 6 + self.config.k
        return super().flops(length) + 12.0 * self.dim * seen

    def activation_bytes(self, dim: int) -> float:
        """Estimated bytes of activations per token: those of a window layer, and the retrieved keys and
        values.
        """
        return (ACTIVATIONS["window"] + 4.0 * self.config.k) * dim

    def _read_segments(
        self,
        local: AttentionOutput,
        columns: SegmentColumns,
        k: Tensor,
        v: Tensor,
        importance: Tensor,
        state: KnnState,
        shared_store: StoreState | None,
        memory_mode: Mode,
        in_place: bool,
    ) -> tuple[Tensor, StoreState]:
        """For each segment, write the previous segment to the store, then query the store. Returns attention
        over the window, `local`, combined with the retrieved values ``[r t h e]``, and the new store. `k`,
        `v` and `importance` are arranged in `columns`. `shared_store` is the store of another layer, to query
        instead; None: the layer's own. With `in_place`, the tensors of the store may be changed.
        """
        # One slot for each token that can be written. At least one, so that gate and temperature get gradients.
        slots = max(1, state.store.size + (columns.segments - 1) * self.window)
        store = state.store.enlarge(min(self.store.size, slots))
        in_place = in_place or store is not state.store
        if (store if shared_store is None else shared_store).size == 0:
            return self.combine(local.y, None), store
        q = columns.queries(l2_normalize(local.q))
        base = state.attention.position - state.open_length
        found, lengths = [], []
        for part in columns.spans:
            begin = base.unsqueeze(-1) + part.segment * self.window
            if part.ended is not None and shared_store is None:
                before = slice((part.segment - 1) * self.window, part.segment * self.window)
                segment = (k[:, before], v[:, before], importance[:, before], begin - self.window)
                store = self.write(store, *segment, part.ended, in_place)
                in_place = True
            if memory_mode == "off":
                continue
            column = torch.arange(part.first, part.last, device=base.device)
            live = columns.is_call_token(column)
            if memory_mode == "fresh":
                # Remove entries that are older than the current `segment` of the model.
                old = (store.position < begin // self.segment * self.segment) & live.any(1, keepdim=True)
                store = store._replace(position=store.position.masked_fill(old, -1))
            here = store if shared_store is None else shared_store
            max_position = (base.unsqueeze(-1) + column - self.window).masked_fill(~live, -1)
            retrieved = self.query_store(q[:, part.first : part.last], here, max_position)
            # The search "dense" saves the store for backward, so the store must not be changed in place after it.
            in_place = in_place and not (torch.is_grad_enabled() and self.config.search == "dense")
            found.append(torch.cat([retrieved[0].to(retrieved[1].dtype), retrieved[1].unsqueeze(-1)], -1))
            lengths.append((part.first, part.last))
        if not found:
            return self.combine(local.y, None), store
        far = columns.to_call_rows(found, lengths)
        return self.combine(local.y, (far[..., :-1], far[..., -1])), store

    def write(
        self,
        store: StoreState,
        k: Tensor,
        v: Tensor,
        importance: Tensor,
        begin: Tensor,
        rows: Tensor,
        in_place: bool,
    ) -> StoreState:
        """Write the most important tokens of a segment to the store, and return the new store. `k`, `v` and
        `importance` are those of the segment ``[r w ...]``, `begin` its first position ``[r 1]``, `rows`
        whether to write each row ``[r]``. With `in_place`, the tensors of the store may be changed.
        """
        c = self.config
        mask = importance > -torch.inf
        if c.write != "all":
            mask = mask & dilate(keep(importance, c.fraction, self.window), c.neighbours)
        place = begin + torch.arange(self.window, device=begin.device)
        scored = None if c.write == "all" else importance.masked_fill(~mask, 0.0)
        return self.store.with_size(store.size).add(
            store, k, v, place, scored, mask & rows.unsqueeze(-1), reuse=in_place
        )

    def query_store(self, q: Tensor, store: StoreState, max_position: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of queries q, which have unit length, over the nearest entries of a store at positions up
        to `max_position` ``[r t]``. Returns the output ``[r t h e]`` and its log-sum-exp ``[r t h]``.
        """
        found = self.search(q.detach(), store, min(self.config.k, store.size), max_position)
        return attend(q, found, store, self.log_scale.exp())

    def combine(self, y: Tensor, retrieved: tuple[Tensor, Tensor] | None) -> Tensor:
        """Combine attention over the window, `y`, with attention over the store. `retrieved` is the output of
        the latter and its log-sum-exp; None: only the window is used. Without a gate, the last channel of `y`
        is the log-sum-exp of the window.
        """
        near, near_lse = (y, None) if self.gate is not None else (y[..., :-1], y[..., -1])
        if retrieved is None:
            return near
        return combine_attention(near, near_lse, retrieved[0].to(near.dtype), retrieved[1], self.gate)


class KnnDecoder(MixerDecoder):
    """The decoder of `Knn`. It updates the window, the open segment and the store in place."""

    def __init__(self, mixer: Knn, state: KnnState, memory_mode: Mode) -> None:
        # A store on the host is read and written by the host.
        self.is_capturable = mixer.search in CAPTURED and mixer.store.device == "auto"
        self.mixer, self.memory_mode, self.size = mixer, memory_mode, mixer.window
        self.window = WindowDecoder(mixer.attention, state.attention)
        _, self.k, self.v, self.token_importance, self.last, self.store = state.detach().clone()

    def step(self, x: Tensor, ctx: StepContext) -> Tensor:
        mixer = self.mixer
        self._end_segment(ctx)
        y, q, k, v = self.window.attend(x, ctx, lse=mixer.gate is None)
        importance = ctx.cached("importance", make=lambda: self._importance(x, ctx))
        slot = ctx.cached("open slot", self.size, make=lambda: ctx.position % self.size)
        for buffer, new in (
            (self.k, l2_normalize(k)[:, 0]),
            (self.v, v[:, 0]),
            (self.token_importance, importance),
        ):
            decode.write_slots(buffer, slot, new, ctx.active)
        if mixer.owns_store:
            ctx.shared["store"] = self.store
        store = ctx.shared["store"] if mixer.shares_store else self.store
        retrieved = None
        if store.size and self.memory_mode != "off":
            retrieved = mixer.query_store(l2_normalize(q), store, (ctx.position - self.size).unsqueeze(-1))
        return mixer.attention.project_output(mixer.combine(y, retrieved).to(v.dtype))

    def _end_segment(self, ctx: StepContext) -> None:
        """Write the open segment to the store, for rows whose next token begins a new segment."""
        if not self.store.size:
            return
        ended = ctx.active & (ctx.position > 0) & (ctx.position % self.size == 0)
        # Skip the write if no row needs it. This is not checked on a GPU, where reading the result is slow.
        if not (ended.is_cuda and self.is_capturable) and not bool(ended.any()):
            return
        begin = (ctx.position - self.size).unsqueeze(-1)
        store = self.mixer.write(
            self.store, self.k, self.v, self.token_importance, begin, ended, in_place=True
        )
        for buffer, new in zip(self.store.tensors(), store.tensors(), strict=True):
            if new is not buffer:
                buffer.copy_(new)

    def _importance(self, x: Tensor, ctx: StepContext) -> Tensor:
        """The importance of the current token of each row ``[r]``; -inf if the mode does not write."""
        if self.memory_mode != "on":
            return torch.full_like(self.token_importance[:, 0], -torch.inf)
        if self.mixer.output_dim:
            return token_surprise(ctx.text, self.last.unsqueeze(1), ctx.text.tokens, ctx.position)[:, 0]
        return self.mixer.importance(
            x, Context(ctx.position, None, self.memory_mode, ctx.text, SharedValues())
        )[:, 0]

    def finish(self, hidden: Tensor, ctx: StepContext) -> None:
        if self.mixer.output_dim:
            decode.overwrite_rows((self.last,), (hidden[:, 0].to(self.last.dtype),), ctx.active)

    def state(self, position: Tensor) -> KnnState:
        held = torch.arange(self.size, device=position.device) < open_tokens(position, self.size).unsqueeze(
            -1
        )
        k, v = (torch.where(held[..., None, None], x, 0.0) for x in (self.k, self.v))
        attention, importance = self.window.state(position), torch.where(held, self.token_importance, 0.0)
        return KnnState(attention, k, v, importance, self.last.clone(), self.store.clone())


def token_surprise(text: Text, predicted: Tensor, tokens: Tensor, position: Tensor) -> Tensor:
    """The negative log-likelihood of tokens ``[r t]``. `predicted` are the model's outputs for the tokens
    before them ``[r t d]``, `position` the position of the first token of each row ``[r]``. The first token
    of a document has no prediction, and gets the value of a uniform distribution.
    """
    logits = text.logits(predicted).float()
    surprise = F.cross_entropy(logits.flatten(0, 1), tokens.flatten().long(), reduction="none")
    surprise = surprise.view_as(tokens)
    uniform = torch.full_like(surprise[:, 0], log(logits.shape[-1]))
    first = torch.where(position == 0, uniform, surprise[:, 0])
    return torch.cat([first.unsqueeze(-1), surprise[:, 1:]], 1)
