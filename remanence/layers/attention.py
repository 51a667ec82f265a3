"""Softmax attention: full, sliding, and MAC's segments, each with persistent tokens in front, carrying what it has
seen.

The masks are drawn beside the functions that make them (``#`` is seen, ``.`` is not; a row is a query, a column a key),
and the tests compare them with the drawings.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from remanence.core.cache import cached_by_size
from remanence.core.state import TensorTuple, advanced, carry_on, note_positions, noted_positions, take_back
from remanence.layers import Linear, Rotary, from_start, project
from remanence.ops.layout import from_rows, pick, to_rows


def causal_mask(
    queries: int, cached: int, prefix: int, position: Int[Tensor, " r"], window: int | None = None
) -> Bool[Tensor, "r queries keys"]:
    """Persistent tokens, then a cache whose newest entry stands last, then the call's own tokens.

    Three queries, a window of three, two persistent tokens and a cache of four in which two tokens have been read so
    far::

        p p   c c c c   x x x
        # #   . . # #   # . .
        # #   . . . #   # # .
        # #   . . . .   # # #
    """
    query = torch.arange(queries, device=position.device).unsqueeze(-1)
    key = torch.arange(-cached, queries, device=position.device)
    seen = key <= query
    if window is not None:
        seen = seen & (key > query - window)
    seen = seen & (key >= -position.view(-1, 1, 1))
    return torch.cat([seen.new_ones(*seen.shape[:2], prefix), seen], -1)


def band_mask(
    queries: int, window: int, prefix: int, device: torch.device | None = None
) -> Bool[Tensor, "queries keys"]:
    """A block of queries in the middle of a long text: every one has a whole window of keys, its own last.

    Three queries, a window of three, one persistent token::

        p   k k k k k
        #   # # # . .
        #   . # # # .
        #   . . # # #
    """
    query = torch.arange(queries, device=device).unsqueeze(-1)
    key = torch.arange(queries + window - 1, device=device)
    seen = (key >= query) & (key < query + window)
    return torch.cat([seen.new_ones(queries, prefix), seen], -1)


def segment_mask(
    queries: int, opened: int, prefix: int, position: Int[Tensor, " r"], retrieved: bool = True
) -> Bool[Tensor, "r queries keys"]:
    """MAC's segment (eq. 22): persistent tokens, what the memory answered to each token, the tokens themselves.

    Token i sees answer j and token j for j <= i only: answer j was asked by token j, so a later one would tell the
    future. The state holds the first `opened` places of the segment, of which each row has read its own `position`.

    Two queries behind two places of which one has been read, one persistent token::

        p   h h h h   x x x x
        #   # . # .   # . # .
        #   # . # #   # . # #
    """
    query = torch.arange(queries, device=position.device).unsqueeze(-1)
    old = (torch.arange(opened, device=position.device) < position.view(-1, 1, 1)).expand(-1, queries, -1)
    new = (torch.arange(queries, device=position.device) <= query).expand(old.shape[0], -1, -1)
    parts = [new.new_ones(*new.shape[:2], prefix), *[old, new] * (2 if retrieved else 1)]
    return torch.cat(parts, -1)


def _softmax(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool = False, lse: bool = False
) -> Tensor:
    """SDPA on ``[r t h e]``; a mask is ``[r or 1, queries, keys]``. With `lse` the log-sum-exp stands behind the
    output, as one more number of every head, and both are float32 at least.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = None if mask is None else mask.unsqueeze(1)
    if lse:
        assert mask is not None
        wide = torch.promote_types(q.dtype, torch.float32)
        with torch.autocast(q.device.type, enabled=False):
            score = (q.to(wide) @ k.to(wide).mT) * q.shape[-1] ** -0.5
            score = score.masked_fill(~mask, -torch.inf)
            total = score.logsumexp(-1, keepdim=True)
            return torch.cat([(score - total).exp() @ v.to(wide), total], -1).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal).transpose(1, 2)


def full_attention(q: Tensor, k: Tensor, v: Tensor, position: Tensor | None) -> Tensor:
    """Queries ``[r t h e]`` over a cache and their own tokens ``[r s+t h e]``; position None says that nothing is
    cached.
    """
    if position is None:
        return _softmax(q, k, v, None, causal=True)
    return _softmax(q, k, v, causal_mask(q.shape[1], k.shape[1] - q.shape[1], 0, position))


def sliding_attention(
    q: Float[Tensor, "r t h e"],
    k: Float[Tensor, "r s+t h e"],
    v: Float[Tensor, "r s+t h e"],
    prefix: tuple[Tensor, Tensor],
    window: int,
    position: Int[Tensor, " r"] | None,
    lse: bool = False,
) -> Float[Tensor, "r t h e"]:
    """Each query over the persistent keys ``[p h e]`` and a window of keys, itself included; cost grows with t, not
    with t^2.

    A long call is cut into blocks of queries, each of which meets only the keys in its reach::

        keys     [ window - 1 | block ]
                     [ window - 1 | block ]
                         [ window - 1 | block ]
    """
    rows, queries, cached = q.shape[0], q.shape[1], k.shape[1] - q.shape[1]
    persistent = prefix[0].shape[0]
    block = max(window // 2, 16)
    if q.is_cuda and q.dtype != torch.float64 and queries > block and q.shape[-1] >= 16 and not lse:
        return flexible_attention(q, k, v, prefix, window, position)
    if position is None:
        position = torch.zeros(1, dtype=torch.int64, device=q.device)
    reach = window - 1
    if queries <= block:
        keep = min(cached, reach)
        mask = causal_mask(queries, keep, persistent, position, window)
        keys, values = (_behind(p, x[:, cached - keep :]) for p, x in zip(prefix, (k, v), strict=True))
        return _softmax(q, keys, values, mask, lse=lse)
    blocks = -(-queries // block)
    missing = blocks * block - queries
    q = F.pad(q, (0, 0, 0, 0, 0, missing)).reshape(rows, blocks, block, *q.shape[2:])
    left = reach - cached  # negative: a cache may hold more than the window reaches
    k, v = (
        F.pad(x, (0, 0, 0, 0, left, missing)).unfold(1, block + reach, block).movedim(-1, 2) for x in (k, v)
    )
    # Only the first blocks reach back to before the call, where a row may not have read a whole window yet.
    edge = min(blocks, -(-reach // block)) if reach else 0
    band = band_mask(block, window, persistent, q.device).unsqueeze(0)
    key = (
        torch.arange(block + reach, device=q.device)
        - reach
        + block * torch.arange(edge, device=q.device).unsqueeze(-1)
    )
    read = (key >= -position.view(-1, 1, 1)).flatten(0, 1).unsqueeze(1)
    outer = band & torch.cat([read.new_ones(*read.shape[:2], persistent), read], -1)
    if len(position) < rows:
        outer = outer.repeat(rows, 1, 1)
    pieces = []
    for part, mask in ((slice(0, edge), outer), (slice(edge, blocks), band)):
        if part.start < part.stop:
            keys, values = (_behind(p, x[:, part].flatten(0, 1)) for p, x in zip(prefix, (k, v), strict=True))
            y = _softmax(q[:, part].flatten(0, 1), keys, values, mask, lse=lse)
            pieces.append(y.reshape(rows, -1, *y.shape[1:]))
    return torch.cat(pieces, 1).flatten(1, 2)[:, :queries]


def flexible_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix: tuple[Tensor, Tensor],
    window: int,
    position: Tensor | None = None,
) -> Tensor:
    """The same by FlexAttention, for a document from its start (position None) and for one that goes on. On an H200,
    with a window of 2,048 tokens and 128 persistent ones, forward and backward take 3.8 ms where the blocks take 13.9
    (8 x 4,096 tokens, 16 heads), and 6.3 where they take 12.5 (1 x 32,768). Compiled when first used.
    """
    cached = k.shape[1] - q.shape[1]
    reached = (
        -(-(window - 1) // BLOCK) * BLOCK
    )  # what a query can reach, in whole blocks: cut elsewhere, more of them are mixed
    if cached > reached:
        k, v = (x[:, cached - reached :] for x in (k, v))
        cached = reached
    keys, values = (_behind(p, x).transpose(1, 2) for p, x in zip(prefix, (k, v), strict=True))
    mask = _flexible_mask(q.shape[1], cached, window, prefix[0].shape[0], q.device)
    known = None if position is None else noted_positions(position)
    score = None
    if position is not None and (known is None or min(known) < min(cached, window - 1)):
        # Rows that have not read a whole window yet: what stands before their start is nothing.
        score = _from(
            prefix[0].shape[0], (prefix[0].shape[0] + cached - position).clamp(min=prefix[0].shape[0])
        )
    return _flex((*q.shape, cached, score is None), q.device)(
        q.transpose(1, 2), keys, values, mask, score
    ).transpose(1, 2)


def _from(prefix: int, first: Tensor) -> Callable[..., Tensor]:
    """Scores of keys behind the persistent ones from each row's `first` ``[r]`` on."""

    def begun(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return torch.where((key < prefix) | (key >= first[row]), score, -float("inf"))

    return begun


BLOCK = 128
"""Keys that FlexAttention skips, or reads without a look at the mask, together."""

FIXED = 6
"""Shapes of calls that FlexAttention is compiled for one by one; those that come after them share a build that is good
for any, but slower (on an H200 96 ms where 68 ms were for the layers of a 340m MAG). torch builds a function eight
times at most.
"""

_fixed: set[tuple[Any, ...]] = set()


def _flex(shape: tuple[Any, ...], device: torch.device) -> Callable[..., Tensor]:
    key = (*shape, device, torch.is_grad_enabled())
    if key not in _fixed and len(_fixed) < FIXED:
        _fixed.add(key)
    return _compiled_flex("fixed" if key in _fixed else "windows")


@cache
def _compiled_flex(kind: str) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    # Each kind has a function of its own: torch remembers of a function that its shapes change.
    def fixed(q: Tensor, k: Tensor, v: Tensor, mask: Any, score: Any) -> Tensor:
        return flex_attention(q, k, v, score_mod=score, block_mask=mask)

    def windows(q: Tensor, k: Tensor, v: Tensor, mask: Any, score: Any) -> Tensor:
        return flex_attention(q, k, v, score_mod=score, block_mask=mask)

    def segments(q: Tensor, k: Tensor, v: Tensor, mask: Any, score: Any) -> Tensor:
        return flex_attention(q, k, v, score_mod=score, block_mask=mask)

    return torch.compile(
        {"fixed": fixed, "windows": windows, "segments": segments}[kind],
        dynamic=False if kind == "fixed" else None,
    )


@lru_cache(maxsize=16)
def _flexible_mask(queries: int, cached: int, window: int, prefix: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        token = key - prefix - cached
        return (key < prefix) | ((token <= query) & (token > query - window))

    return create_block_mask(seen, None, None, queries, queries + cached + prefix, device=device)


def _behind(prefix: Tensor, x: Tensor) -> Tensor:
    """Persistent entries ``[p h e]`` in front of every row of ``[r s h e]``; several layers' ``[n p h e]``, each its
    rows'.
    """
    if not prefix.shape[-3]:
        return x
    if prefix.dim() == 3:
        return torch.cat([prefix.expand(x.shape[0], *prefix.shape), x], 1)
    rows = x.shape[0] // len(prefix)
    return torch.cat([prefix.unsqueeze(1).expand(-1, rows, -1, -1, -1).flatten(0, 1), x], 1)


class Heads(nn.Module):
    """Projections to and from attention heads, rotary positions, and persistent tokens (eq. 19), which are never
    rotated.
    """

    def __init__(self, dim: int, heads: int, persistent: int, rotary: float) -> None:
        super().__init__()
        self.heads, self.width, self.rotary = heads, dim // heads, rotary
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (Linear(dim, dim) for _ in range(4))
        self.persistent = Persistent(persistent, dim) if persistent else None

    def queries(self, x: Tensor) -> Tensor:
        return self.q_proj(x).view(*x.shape[:-1], self.heads, self.width)

    def pairs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, not yet rotated, and values."""
        k, v = (y.view(*x.shape[:-1], self.heads, self.width) for y in project(x, self.k_proj, self.v_proj))
        return k, v

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the same tokens, not rotated."""
        q, k, v = (
            y.view(*x.shape[:-1], self.heads, self.width)
            for y in project(x, self.q_proj, self.k_proj, self.v_proj)
        )
        return q, k, v

    def prefix(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """The persistent tokens' keys and values ``[p h e]``."""
        if self.persistent is None:
            none = like.new_zeros(0, self.heads, self.width)
            return none, none
        k, v = self.pairs(self.persistent.weight.to(like.dtype))
        return k.to(like.dtype), v.to(like.dtype)

    def behind_prefix(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[r s h e]`` with the persistent tokens' in front."""
        prefix = self.prefix(k)
        return _behind(prefix[0], k), _behind(prefix[1], v)

    def turn(self, position: Tensor, dtype: torch.dtype) -> Rotary:
        return Rotary(position, self.width, self.rotary, dtype)

    def turn_from_start(self, length: int, like: Tensor, times: int = 1) -> Rotary:
        return from_start(length, times, self.width, self.rotary, like.dtype, like.device)

    def out(self, y: Tensor) -> Tensor:
        return self.o_proj(y.flatten(-2))


class Persistent(nn.Module):
    """Learned tokens of unit scale, the same for every input."""

    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)


class _AttentionState(NamedTuple):
    k: Tensor
    v: Tensor
    position: Tensor
    slack: Tensor


class AttentionState(_AttentionState, TensorTuple):
    """Keys (rotated) and values ``[r s h e]`` of the tokens read last, the newest in the last place; how many tokens
    have been read ``[r]``, and how many of them can be taken back ``[r]``.

    A sliding window's s is fixed; full attention's grows to the longest row's length, and shorter rows have zeros in
    front.
    """

    __slots__ = ()

    def growing(self) -> tuple[str, ...]:
        return ("k", "v") if self.k.shape[1] == 0 else ()

    def agrees(self, read: Tensor) -> Tensor:
        good = (self.position == read) & (self.slack >= 0) & (self.slack <= read)
        return good & torch.tensor(self.k.shape == self.v.shape, device=read.device)

    def crop(self, tokens: int) -> AttentionState:
        if bool((self.slack < tokens).any()):
            raise ValueError(
                f"tokens: expected at most {int(self.slack.min())}, as the window is not longer, got {tokens}"
            )
        k, v = take_back(self.k, tokens), take_back(self.v, tokens)
        return AttentionState(k, v, self.position - tokens, self.slack - tokens)

    @classmethod
    def concat(cls, states: Sequence[AttentionState]) -> AttentionState:
        """Several states as one, row after row; the shorter of full attention's get zeros in front."""
        longest = max(state.k.shape[1] for state in states)

        def joined(parts: list[Tensor]) -> Tensor:
            return torch.cat([F.pad(part, (0, 0, 0, 0, longest - part.shape[1], 0)) for part in parts])

        k, v, position, slack = (list(parts) for parts in zip(*states, strict=True))
        return cls(joined(k), joined(v), torch.cat(position), torch.cat(slack))


class Attended(NamedTuple):
    """Attention before its heads are joined, a row for each document: y ``[r t h e]``; queries and keys, not rotated,
    and values; the state; how to go back from rows.
    """

    y: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    state: AttentionState
    back: Tensor | None


class Attention(Heads):
    """Causal attention over a sliding window with persistent tokens in front, or over everything (window None, no such
    tokens).

    `slack` more tokens than the window are kept in the state, so that as many can be taken back.
    """

    def __init__(
        self, dim: int, heads: int, window: int | None, persistent: int, rotary: float, slack: int = 0
    ) -> None:
        super().__init__(dim, heads, persistent if window else 0, rotary)
        self.window, self.slack = window, slack
        self.history = window - 1 + slack if window else 0

    def start(self, rows: int) -> AttentionState:
        none = self.k_proj.weight.new_zeros(rows, self.history, self.heads, self.width)
        nothing = note_positions(torch.zeros(rows, dtype=torch.int64, device=none.device), [0] * rows)
        return AttentionState(none, none, nothing, nothing)

    def forward(
        self, x: Float[Tensor, "b t d"], state: AttentionState | None = None, offsets: list[int] | None = None
    ) -> tuple[Float[Tensor, "b t d"], AttentionState]:
        seen = self.attend(x, state, offsets)
        return self.out(from_rows(seen.y, seen.back)), seen.state

    def attend(
        self, x: Tensor, state: AttentionState | None, offsets: list[int] | None, *, lse: bool = False
    ) -> Attended:
        """`forward` up to where heads are joined; with `lse`, a window's log-sum-exp behind its output (`_softmax`)."""
        fresh = state is None
        if state is None:
            state = self.start(x.shape[0] if offsets is None else len(offsets) - 1)
        (asked, back), (plain, _), (v, _) = (to_rows(y, offsets) for y in self.projected(x))
        if fresh:
            turn = self.turn_from_start(asked.shape[1], asked)
        else:
            where = state.position.unsqueeze(-1) + torch.arange(asked.shape[1], device=x.device)
            turn = self.turn(where, asked.dtype)
        q, k = turn(asked), turn(plain)
        position = None if fresh else state.position
        keys, values = (
            (k, v)
            if fresh
            else (torch.cat([old.to(new.dtype), new], 1) for old, new in ((state.k, k), (state.v, v)))
        )
        if self.window is None:
            y = full_attention(q, keys, values, position)
        else:
            y = sliding_attention(q, keys, values, self.prefix(k), self.window, position, lse)
        return Attended(y, asked, plain, v, self._carry(state, k, v, offsets), back)

    def _carry(
        self, state: AttentionState, k: Tensor, v: Tensor, offsets: list[int] | None
    ) -> AttentionState:
        counts: Any = k.shape[1] if offsets is None else torch.tensor(offsets, device=k.device).diff()
        position = advanced(state.position, counts)
        slack = position if self.window is None else (state.slack + counts).clamp(max=self.slack)
        if self.window is not None and offsets is None:
            return AttentionState(carry_on(state.k, k), carry_on(state.v, v), position, slack)
        k, v = (torch.cat([old, new.to(old.dtype)], 1) for old, new in ((state.k, k), (state.v, v)))
        if offsets is not None:
            length = self.history if self.window else int(position.max())
            place = (state.k.shape[1] + counts).unsqueeze(-1) + torch.arange(-length, 0, device=k.device)
            first = torch.arange(len(position), device=k.device).unsqueeze(-1) * k.shape[1]
            index = torch.where(place >= 0, place + first, -1)
            k, v = pick(k.flatten(0, 1), index), pick(v.flatten(0, 1), index)
        return AttentionState(k, v, position, slack)


class _SegmentState(NamedTuple):
    retrieved: tuple[Tensor, Tensor]
    tokens: tuple[Tensor, Tensor]
    position: Tensor


class SegmentState(_SegmentState, TensorTuple):
    """The open segment of MAC: keys and values ``[r C-1 h e]`` of what was retrieved and of the tokens, and how many of
    them ``[r]`` there are; they stand from the left.
    """

    __slots__ = ()

    @property
    def size(self) -> int:
        return self.tokens[0].shape[1] + 1

    def agrees(self, read: Tensor) -> Tensor:
        return self.position == read % self.size

    def at(self, position: list[int]) -> SegmentState:
        return self._replace(
            position=note_positions(self.position.detach(), [place % self.size for place in position])
        )

    def crop(self, tokens: int) -> SegmentState:
        position = self.position - tokens
        kept = torch.arange(self.tokens[0].shape[1], device=position.device) < position.unsqueeze(-1)

        def cut(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return pair[0] * kept[..., None, None], pair[1] * kept[..., None, None]

        return SegmentState(cut(self.retrieved), cut(self.tokens), position)


class SegmentAttention(Heads):
    """Attention inside a segment of MAC: over persistent tokens, what the memory retrieved, and the segment (eqs
    22-23).
    """

    def __init__(self, dim: int, heads: int, segment: int, persistent: int, rotary: float) -> None:
        super().__init__(dim, heads, persistent, rotary)
        self.segment = segment

    def start(self, rows: int) -> SegmentState:
        like, shape = self.k_proj.weight, (rows, self.segment - 1, self.heads, self.width)
        none = lambda: torch.zeros(
            shape, dtype=like.dtype, device=like.device
        )  # each its own: files refuse shared tensors
        nothing = note_positions(torch.zeros(rows, dtype=torch.int64, device=like.device), [0] * rows)
        return SegmentState((none(), none()), (none(), none()), nothing)

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        retrieved: Float[Tensor, "b t d"] | None,
        state: SegmentState,
        opened: list[int],
        offsets: list[int] | None = None,
    ) -> tuple[Float[Tensor, "b t d"], SegmentState]:
        """Some tokens of one segment per row, none beyond its end. `opened` is ``state.position`` as numbers."""
        most, rows = max(opened), len(opened)
        q, back = to_rows(self.queries(x), offsets)
        where = state.position.unsqueeze(-1) + torch.arange(q.shape[1], device=x.device)
        turn = self.turn(where, q.dtype)
        q = turn(q)
        parts = []
        for source in (retrieved, x):
            if source is None:
                parts.append((torch.zeros_like(q), torch.zeros_like(q)))
                continue
            k, v = (to_rows(y, offsets)[0] for y in self.pairs(source))
            parts.append((turn(k), v))
        joined = [
            tuple(
                torch.cat([old[:, :most].to(new.dtype), new], 1) for old, new in zip(past, part, strict=True)
            )
            for past, part in zip((state.retrieved, state.tokens), parts, strict=True)
        ]
        seen = joined if retrieved is not None else joined[1:]
        prefix = self.prefix(q)
        keys, values = (_behind(prefix[i], torch.cat([part[i] for part in seen], 1)) for i in (0, 1))
        uniform = offsets is None and len(set(opened)) == 1
        position = state.position[:1] if uniform else state.position
        mask = segment_mask(q.shape[1], most, prefix[0].shape[0], position, retrieved is not None)
        y = self.out(from_rows(_softmax(q, keys, values, mask), back))
        counts = [q.shape[1]] * rows if offsets is None else [b - a for a, b in itertools.pairwise(offsets)]
        if all(a + n == self.segment for a, n in zip(opened, counts, strict=True)):  # nothing is left open
            return y, self.start(rows)
        index = _open_places(opened, counts, most, self.segment, joined[0][0].shape[1])
        ends = [
            tuple(pick(x.flatten(0, 1), index).to(self.k_proj.weight.dtype) for x in part) for part in joined
        ]
        after = [(a + n) % self.segment for a, n in zip(opened, counts, strict=True)]
        position = note_positions(torch.tensor(after, device=x.device), after)
        return y, SegmentState((ends[0][0], ends[0][1]), (ends[1][0], ends[1][1]), position)

    def whole(self, x: Float[Tensor, "b c d"], retrieved: Float[Tensor, "b c d"]) -> Float[Tensor, "b c d"]:
        """`forward` of whole segments, which leave nothing open."""
        length = x.shape[1]
        q = self.queries(x)
        k, v = self.pairs(torch.cat([retrieved, x], 1))
        keys, values = self.behind_prefix(self.turn_from_start(length, k, 2)(k), v)
        return self.out(whole_attention(self.turn_from_start(length, q)(q), keys, values))


def whole_attention(
    q: Float[Tensor, "r c h e"], k: Float[Tensor, "r keys h e"], v: Float[Tensor, "r keys h e"]
) -> Tensor:
    """Of whole segments: keys are persistent ones, then what each token retrieved, then the tokens. Half of the scores
    are of what no query sees: on a GPU they are skipped (39 ms of a 340m MAC's step on an H200, where torch's with a
    mask takes 50).
    """
    length, prefix = q.shape[1], k.shape[1] - 2 * q.shape[1]
    if not (q.is_cuda and q.dtype != torch.float64 and length >= 128 and q.shape[-1] >= 16):
        return _softmax(q, k, v, whole_mask(length, prefix, q.device))
    mask = _segment_blocks(length, prefix, q.device)
    return _compiled_flex("segments")(*(x.transpose(1, 2) for x in (q, k, v)), mask, None).transpose(1, 2)


@lru_cache(maxsize=16)
def _segment_blocks(length: int, prefix: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        token = key - prefix
        return (key < prefix) | (torch.where(token < length, token, token - length) <= query)

    return create_block_mask(seen, None, None, length, prefix + 2 * length, device=device)


@cached_by_size
def whole_mask(length: int, prefix: int, device: torch.device) -> Bool[Tensor, "1 length keys"]:
    """`segment_mask` of a segment read at once."""
    return segment_mask(length, 0, prefix, torch.zeros(1, dtype=torch.int64, device=device))


def _open_places(opened: list[int], counts: list[int], most: int, segment: int, length: int) -> Tensor:
    """Where each row's open segment stands in ``[r most+t]`` laid flat, as ``[r C-1]``; -1 is nowhere."""
    place = torch.arange(segment - 1)
    before, new = torch.tensor(opened).unsqueeze(-1), torch.tensor(counts).unsqueeze(-1)
    slot = torch.where(place < before, place, most + place - before)
    held = (place < before + new) & (before + new < segment)
    return torch.where(held, slot + length * torch.arange(len(opened)).unsqueeze(-1), -1)
