"""Attention with an explicit state: full attention, sliding-window attention, and attention within the
segments of MAC, with persistent tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from remanence.layers.linear import Linear, project
from remanence.layers.masks import segment_mask
from remanence.layers.rotary import Rotary, rotary_from_start
from remanence.layers.softmax import (
    full_attention,
    masked_softmax,
    prepend,
    sliding_attention,
    whole_segment_attention,
)
from remanence.ops.layout import from_rows, gather_or_zero, to_rows
from remanence.runtime.module import Module
from remanence.runtime.positions import advance_position, with_host_copy
from remanence.runtime.state import TensorTuple, rewind, roll_history


class Heads(Module):
    """Projections to and from attention heads, with rotary positions and persistent tokens (eq. 19).
    Persistent tokens are not rotated.
    """

    def __init__(self, dim: int, heads: int, persistent: int, rotary: float) -> None:
        super().__init__()
        self.heads, self.width, self.rotary_base = heads, dim // heads, rotary
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (Linear(dim, dim) for _ in range(4))
        self.persistent = Persistent(persistent, dim) if persistent else None

    def queries(self, x: Tensor) -> Tensor:
        """Return the queries ``[... h e]`` of x, not rotated."""
        return self.q_proj(x).view(*x.shape[:-1], self.heads, self.width)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values ``[... h e]`` of x. The keys are not rotated."""
        k, v = (y.view(*x.shape[:-1], self.heads, self.width) for y in project(x, self.k_proj, self.v_proj))
        return k, v

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values ``[... h e]`` of the same tokens, not rotated."""
        q, k, v = (
            y.view(*x.shape[:-1], self.heads, self.width)
            for y in project(x, self.q_proj, self.k_proj, self.v_proj)
        )
        return q, k, v

    def persistent_keys_values(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values ``[p h e]`` of the persistent tokens, in the dtype of `like`. p is 0 if
        there are none.
        """
        if self.persistent is None:
            none = like.new_zeros(0, self.heads, self.width)
            return none, none
        k, v = self.keys_values(self.persistent.weight.to(like.dtype))
        return k.to(like.dtype), v.to(like.dtype)

    def prepend_persistent(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put the keys and values of the persistent tokens in front of the given ones ``[r s h e]``."""
        prefix = self.persistent_keys_values(k)
        return prepend(prefix[0], k), prepend(prefix[1], v)

    def rotary(self, position: Tensor, dtype: torch.dtype) -> Rotary:
        """Return the rotation of heads at the given positions."""
        return Rotary(position, self.width, self.rotary_base, dtype)

    def rotary_from_start(self, length: int, like: Tensor, repeats: int = 1) -> Rotary:
        """Return the rotation at positions 0 to length - 1, repeated for `repeats` concatenated sequences."""
        return rotary_from_start(length, repeats, self.width, self.rotary_base, like.dtype, like.device)

    def project_output(self, y: Tensor) -> Tensor:
        """Concatenate the heads and apply the output projection: ``[... h e]`` to ``[... d]``."""
        return self.o_proj(y.flatten(-2))


class Persistent(nn.Module):
    """Learned persistent tokens, which are the same for every input. They are initialised from a unit normal
    distribution.
    """

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
    """The KV cache. k, v ``[r s h e]`` are the rotated keys and the values of the last tokens, the newest
    last; position ``[r]`` is the number of tokens read; slack ``[r]`` is the number of tokens that `crop` can
    remove.

    For a sliding window s is fixed. For full attention s is the length of the longest row, and shorter rows
    are padded with zeros on the left.
    """

    __slots__ = ()

    def growing(self) -> tuple[str, ...]:
        """Return the fields whose second axis grows with the text, for an empty cache of full attention;
        otherwise none.
        """
        return ("k", "v") if self.k.shape[1] == 0 else ()

    def agrees(self, read: Tensor) -> Tensor:
        """Whether the state of each row is consistent with having read this many tokens ``[r]``."""
        good = (self.position == read) & (self.slack >= 0) & (self.slack <= read)
        return good & torch.tensor(self.k.shape == self.v.shape, device=read.device)

    def crop(self, tokens: int) -> AttentionState:
        """Return the state before the last `tokens` tokens of each row. Raise ValueError if it keeps too few
        tokens for that.
        """
        if bool((self.slack < tokens).any()):
            raise ValueError(
                f"tokens: expected at most {int(self.slack.min())}, as the window is not longer, got {tokens}"
            )
        k, v = rewind(self.k, tokens), rewind(self.v, tokens)
        return AttentionState(k, v, self.position - tokens, self.slack - tokens)

    @classmethod
    def concat(cls, states: Sequence[AttentionState]) -> AttentionState:
        """Concatenate states along the batch axis. Shorter caches of full attention are padded on the left."""
        longest = max(state.k.shape[1] for state in states)

        def joined(parts: list[Tensor]) -> Tensor:
            return torch.cat([F.pad(part, (0, 0, 0, 0, longest - part.shape[1], 0)) for part in parts])

        k, v, position, slack = (list(parts) for parts in zip(*states, strict=True))
        return cls(joined(k), joined(v), torch.cat(position), torch.cat(slack))


class AttentionOutput(NamedTuple):
    """The result of attention before the output projection, with one row per document: the output y ``[r t h
    e]`` of each head; queries and keys, not rotated, and values; the new state; and the index with which
    `from_rows` packs the rows again (None if they were not packed).
    """

    y: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    state: AttentionState
    row_index: Tensor | None


class Attention(Heads):
    """Causal attention: over a sliding window and persistent tokens, or full attention (window None) without
    persistent tokens.

    The state holds `slack` more tokens than the window needs, so that `crop` can remove up to `slack` tokens.
    """

    def __init__(
        self, dim: int, heads: int, window: int | None, persistent: int, rotary: float, slack: int = 0
    ) -> None:
        super().__init__(dim, heads, persistent if window else 0, rotary)
        self.window, self.slack = window, slack
        self.history = window - 1 + slack if window else 0

    def start(self, rows: int) -> AttentionState:
        """Return the state of `rows` documents before any token is read."""
        none = self.k_proj.weight.new_zeros(rows, self.history, self.heads, self.width)
        nothing = with_host_copy(torch.zeros(rows, dtype=torch.int64, device=none.device), [0] * rows)
        return AttentionState(none, none, nothing, nothing)

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        state: AttentionState | None = None,
        offsets: list[int] | None = None,
        *,
        fuse: Callable[[AttentionOutput], Tensor] | None = None,
        lse: bool = False,
    ) -> tuple[Float[Tensor, "b t d"], AttentionState]:
        """Return the attention output and the new state.

        `fuse`, if given, maps the output of the heads to another output ``[r t h e]`` before the output
        projection. With `lse`, the log-sum-exp of the window is appended to every head in the input of
        `fuse`.
        """
        seen = self.attend(x, state, offsets, lse=lse)
        y = seen.y if fuse is None else fuse(seen)
        return self.project_output(from_rows(y, seen.row_index)), seen.state

    def attend(
        self, x: Tensor, state: AttentionState | None, offsets: list[int] | None, *, lse: bool = False
    ) -> AttentionOutput:
        """Compute `forward` without the output projection. With `lse`, the log-sum-exp of the window is
        appended to every head.
        """
        fresh = state is None
        if state is None:
            state = self.start(x.shape[0] if offsets is None else len(offsets) - 1)
        (queries, index), (plain, _), (v, _) = (to_rows(y, offsets) for y in self.queries_keys_values(x))
        if fresh:
            rotary = self.rotary_from_start(queries.shape[1], queries)
        else:
            where = state.position.unsqueeze(-1) + torch.arange(queries.shape[1], device=x.device)
            rotary = self.rotary(where, queries.dtype)
        q, k = rotary(queries), rotary(plain)
        position = None if fresh else state.position
        keys, values = (
            (k, v)
            if fresh
            else (torch.cat([old.to(new.dtype), new], 1) for old, new in ((state.k, k), (state.v, v)))
        )
        if self.window is None:
            y = full_attention(q, keys, values, position)
        else:
            y = sliding_attention(q, keys, values, self.persistent_keys_values(k), self.window, position, lse)
        history = self.history if self.window else None
        after = next_attention_state(state, k, v, offsets, history, self.slack)
        return AttentionOutput(y, queries, plain, v, after, index)


def next_attention_state(
    state: AttentionState, k: Tensor, v: Tensor, offsets: list[int] | None, history: int | None, slack: int
) -> AttentionState:
    """Return the state after new keys and values, which have one row per document. The last `history` tokens
    are kept, or all tokens if `history` is None. `slack` is the largest number of tokens that `crop` may
    remove.
    """
    counts: int | Tensor = k.shape[1] if offsets is None else torch.tensor(offsets, device=k.device).diff()
    position = advance_position(state.position, counts)
    removable = position if history is None else (state.slack + counts).clamp(max=slack)
    if history is not None and offsets is None:
        return AttentionState(roll_history(state.k, k), roll_history(state.v, v), position, removable)
    k, v = (torch.cat([old, new.to(old.dtype)], 1) for old, new in ((state.k, k), (state.v, v)))
    if offsets is not None:
        length = int(position.max()) if history is None else history
        ends = state.k.shape[1] + torch.as_tensor(counts)
        place = ends.unsqueeze(-1) + torch.arange(-length, 0, device=k.device)
        first = torch.arange(len(position), device=k.device).unsqueeze(-1) * k.shape[1]
        index = torch.where(place >= 0, place + first, -1)
        k, v = gather_or_zero(k.flatten(0, 1), index), gather_or_zero(v.flatten(0, 1), index)
    return AttentionState(k, v, position, removable)


class _SegmentState(NamedTuple):
    retrieved: tuple[Tensor, Tensor]
    tokens: tuple[Tensor, Tensor]
    position: Tensor


class SegmentState(_SegmentState, TensorTuple):
    """The incomplete segment of MAC. `retrieved` and `tokens` are the keys and values ``[r C-1 h e]`` of the
    retrieved vectors and of the tokens, filled from the left; C is the length of a segment. `position`
    ``[r]`` is the number of tokens in the segment.
    """

    __slots__ = ()

    @property
    def size(self) -> int:
        """The length of a segment in tokens."""
        return self.tokens[0].shape[1] + 1

    def agrees(self, read: Tensor) -> Tensor:
        """Whether the position of each row is consistent with having read this many tokens ``[r]``."""
        return self.position == read % self.size

    def at(self, position: list[int]) -> SegmentState:
        """Return the same state, with host copies of its positions in the segment computed from these
        positions in the text.
        """
        return self._replace(
            position=with_host_copy(self.position.detach(), [place % self.size for place in position])
        )

    def crop(self, tokens: int) -> SegmentState:
        """Return the state without the last `tokens` tokens of each row, with zeros in their slots."""
        position = self.position - tokens
        kept = torch.arange(self.tokens[0].shape[1], device=position.device) < position.unsqueeze(-1)

        def cut(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return pair[0] * kept[..., None, None], pair[1] * kept[..., None, None]

        return SegmentState(cut(self.retrieved), cut(self.tokens), position)


class SegmentAttention(Heads):
    """Attention within a segment of MAC, over persistent tokens, vectors retrieved from the memory, and the
    tokens of the segment (eqs 22-23).
    """

    def __init__(self, dim: int, heads: int, segment: int, persistent: int, rotary: float) -> None:
        super().__init__(dim, heads, persistent, rotary)
        self.segment = segment

    def start(self, rows: int) -> SegmentState:
        """Return the state of `rows` empty segments."""
        like, shape = self.k_proj.weight, (rows, self.segment - 1, self.heads, self.width)
        # Four separate tensors: safetensors does not store tensors that share memory.
        none = lambda: torch.zeros(shape, dtype=like.dtype, device=like.device)
        nothing = with_host_copy(torch.zeros(rows, dtype=torch.int64, device=like.device), [0] * rows)
        return SegmentState((none(), none()), (none(), none()), nothing)

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        retrieved: Float[Tensor, "b t d"] | None,
        state: SegmentState,
        opened: list[int],
        offsets: list[int] | None = None,
    ) -> tuple[Float[Tensor, "b t d"], SegmentState]:
        """Return the attention output for the next tokens of one segment per row, and the new state. The
        tokens must not reach beyond the end of the segment. `retrieved` is None if nothing was retrieved;
        `opened` is ``state.position`` on the host.
        """
        most, rows = max(opened), len(opened)
        q, index = to_rows(self.queries(x), offsets)
        where = state.position.unsqueeze(-1) + torch.arange(q.shape[1], device=x.device)
        rotary = self.rotary(where, q.dtype)
        q = rotary(q)
        parts = []
        for source in (retrieved, x):
            if source is None:
                parts.append((torch.zeros_like(q), torch.zeros_like(q)))
                continue
            k, v = (to_rows(y, offsets)[0] for y in self.keys_values(source))
            parts.append((rotary(k), v))
        joined = [
            tuple(
                torch.cat([old[:, :most].to(new.dtype), new], 1) for old, new in zip(past, part, strict=True)
            )
            for past, part in zip((state.retrieved, state.tokens), parts, strict=True)
        ]
        seen = joined if retrieved is not None else joined[1:]
        prefix = self.persistent_keys_values(q)
        keys, values = (prepend(prefix[i], torch.cat([part[i] for part in seen], 1)) for i in (0, 1))
        uniform = offsets is None and len(set(opened)) == 1
        position = state.position[:1] if uniform else state.position
        mask = segment_mask(q.shape[1], most, prefix[0].shape[0], position, retrieved is not None)
        y = self.project_output(from_rows(masked_softmax(q, keys, values, mask), index))
        counts = [q.shape[1]] * rows if offsets is None else [b - a for a, b in itertools.pairwise(offsets)]
        if all(
            a + n == self.segment for a, n in zip(opened, counts, strict=True)
        ):  # every segment is complete
            return y, self.start(rows)
        kept = _open_places(opened, counts, most, self.segment, joined[0][0].shape[1])
        ends = [
            tuple(gather_or_zero(x.flatten(0, 1), kept).to(self.k_proj.weight.dtype) for x in part)
            for part in joined
        ]
        after = [(a + n) % self.segment for a, n in zip(opened, counts, strict=True)]
        position = with_host_copy(torch.tensor(after, device=x.device), after)
        return y, SegmentState((ends[0][0], ends[0][1]), (ends[1][0], ends[1][1]), position)

    def whole(
        self, x: Float[Tensor, "b c d"], retrieved: Float[Tensor, "b c d"] | None
    ) -> Float[Tensor, "b c d"]:
        """Return the output of `forward` for complete segments, which leave no state. `retrieved` must not be
        None.
        """
        assert retrieved is not None
        length = x.shape[1]
        q = self.queries(x)
        k, v = self.keys_values(torch.cat([retrieved, x], 1))
        keys, values = self.prepend_persistent(self.rotary_from_start(length, k, 2)(k), v)
        y = whole_segment_attention(self.rotary_from_start(length, q)(q), keys, values)
        return self.project_output(y)


def _open_places(opened: list[int], counts: list[int], most: int, segment: int, length: int) -> Tensor:
    """Return the indices ``[r C-1]`` of each row's incomplete segment in the flattened tokens ``[r most+t]``,
    with -1 for empty slots.
    """
    place = torch.arange(segment - 1)
    before, new = torch.tensor(opened).unsqueeze(-1), torch.tensor(counts).unsqueeze(-1)
    slot = torch.where(place < before, place, most + place - before)
    held = (place < before + new) & (before + new < segment)
    return torch.where(held, slot + length * torch.arange(len(opened)).unsqueeze(-1), -1)
