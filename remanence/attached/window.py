"""A pretrained model's attention, narrowed to a sliding window that goes on to see the first tokens of its text.

A text's first tokens take up what attention has no use for elsewhere; a window that slides off them breaks the model
(StreamingLLM). Their distance to a query never grows beyond that at which they leave the window, as a model may have
been trained on no more: a query meets them as if it stood there. Everything else keeps its true distance, so that
nothing depends on how a text is cut into calls.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from remanence.layers.attention import AttentionState, next_attention_state
from remanence.layers.masks import causal_mask
from remanence.layers.softmax import sliding_attention
from remanence.ops.layout import from_rows, to_rows
from remanence.runtime.positions import host_copy, with_host_copy
from remanence.runtime.state import TensorTuple

UNSEEN = -1e30
"""The score of a first token that the window itself still sees. Finite, so that where all are, gradients are too."""


class _WindowState(NamedTuple):
    k: Tensor
    v: Tensor
    window: AttentionState


class WindowState(_WindowState, TensorTuple):
    """Keys and values ``[r s h e]`` of each text's first tokens, zeros where they have not been read; the window."""

    __slots__ = ()

    @property
    def position(self) -> Tensor:
        return self.window.position

    def crop(self, tokens: int) -> WindowState:
        window = self.window.crop(tokens)
        read = torch.arange(self.k.shape[1], device=self.k.device) < window.position.unsqueeze(-1)
        k, v = (x * read[..., None, None] for x in (self.k, self.v))
        return WindowState(k, v, window)

    def narrowed(self, history: int) -> WindowState:
        """With a shorter window's history."""
        k, v, position, slack = self.window
        cut = k.shape[1] - history
        if not cut:
            return self
        return self._replace(window=AttentionState(k[:, cut:], v[:, cut:], position, slack.clamp(max=0)))


class WindowSpec(NamedTuple):
    """What a layer's attention sees: tokens of the window, first tokens, and how many more are kept to be taken back.
    `narrowed` is false where the window is the model's own: such a layer sees no first tokens outside of it, as the
    model was made.
    """

    window: int
    sinks: int
    slack: int
    narrowed: bool = True

    @classmethod
    def of(cls, window: int, own: int | None, sinks: int, slack: int) -> WindowSpec:
        """The smaller of a window and the layer's own."""
        if own is not None and own <= window:
            return cls(own, sinks, slack, False)
        return cls(window, sinks, slack)

    @property
    def history(self) -> int:
        return self.window - 1 + self.slack

    def start(self, rows: int, heads: int, like: Tensor, width: int) -> WindowState:
        none = lambda length: like.new_zeros(rows, length, heads, width, requires_grad=False)
        nothing = with_host_copy(torch.zeros(rows, dtype=torch.int64, device=like.device), [0] * rows)
        window = AttentionState(none(self.history), none(self.history), nothing, nothing)
        return WindowState(none(self.sinks), none(self.sinks), window)


def relative_rotation(now: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The cosines and sines that rotation what stands at one position to another. Both come from the model's own rotary
    embedding, scaled as it may be.
    """
    (cos, sin), (c, s) = ([x.double() for x in pair] for pair in (now, wanted))
    size = cos.square() + sin.square()
    return ((c * cos + s * sin) / size).float(), ((s * cos - c * sin) / size).float()


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """``[r t h e]`` by cosines and sines ``[r t e]``, halves of a head being pairs; with fewer of them than a head is
    wide, only its first numbers.
    """
    cos, sin = (each.unsqueeze(-2) for each in rotation)
    x, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    a, b = x.chunk(2, -1)
    return torch.cat([x * cos + torch.cat([-b, a], -1) * sin, rest], -1)


class Attended(NamedTuple):
    """Attention ``[r t h e]``, a row for each document; with it values of as many heads, the state, and the way back
    from rows.
    """

    y: Tensor
    v: Tensor
    state: WindowState
    back: Tensor | None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: WindowState | None,
    reach: WindowSpec,
    scaling: float,
    rotation: tuple[Tensor, Tensor] | None,
    offsets: list[int] | None,
    cap: float | None = None,
) -> Attended:
    """Queries over keys and values ``[b t h e]`` of their own call and of the state, all rotated; several heads of
    queries may share one of keys. `rotation` moves queries to the position from which they see the first tokens; None
    where keys have no positions. `cap` is the soft cap of the scores (Gemma 2).
    """
    (q, back), (k, _), (v, _) = (to_rows(x, offsets) for x in (q, k, v))
    rows, tokens, heads, width = q.shape
    fresh = state is None
    if state is None:
        state = reach.start(rows, k.shape[2], k, width)
    position, old = state.position, state.window
    firsts = [_first_tokens(new, kept, position, offsets) for new, kept in ((k, state.k), (v, state.v))]
    keys, values = (
        x if fresh else torch.cat([past.to(x.dtype), x], 1) for past, x in ((old.k, k), (old.v, v))
    )
    wide = lambda x: x.repeat_interleave(heads // x.shape[2], 2) if x.shape[2] < heads else x
    asked = q * (scaling * width**0.5)  # softmax divides by the root of the width
    none = (k.new_zeros(0, heads, width),) * 2
    known = [0] * rows if fresh else host_copy(position)
    inside = known is not None and max(known) + tokens <= reach.window
    both = inside or not reach.sinks or not reach.narrowed
    near: Tensor
    if cap is None:
        near = sliding_attention(
            asked, wide(keys), wide(values), none, reach.window, None if fresh else position, lse=not both
        )
    else:
        near = _capped_attention(asked, wide(keys), wide(values), reach.window, position, cap)
    y = near[..., :width].to(q.dtype)
    if not both:
        rotation = (
            None if rotation is None else (to_rows(rotation[0], offsets)[0], to_rows(rotation[1], offsets)[0])
        )
        place = position.unsqueeze(-1) + torch.arange(tokens, device=q.device)
        y = _with_firsts(near, asked, wide(firsts[0]), wide(firsts[1]), place, rotation, reach.window, cap)
        y = y.to(q.dtype)
    window = next_attention_state(old, k, v, offsets, reach.history, reach.slack)
    return Attended(y, wide(v), WindowState(firsts[0], firsts[1], window), back)


def _capped(score: Tensor, cap: float | None) -> Tensor:
    return score if cap is None else (score / cap).tanh() * cap


def _capped_attention(q: Tensor, k: Tensor, v: Tensor, window: int, position: Tensor, cap: float) -> Tensor:
    """`sliding_attention` with soft-capped scores, which no fused kernel of torch has: the output and the log-sum-exp
    ``[r t h e+1]``, block after block of queries, so that memory grows with t and not with t^2.
    """
    queries, cached, wide = q.shape[1], k.shape[1] - q.shape[1], torch.promote_types(q.dtype, torch.float32)
    block, pieces = max(window // 2, 16), []
    with torch.autocast(q.device.type, enabled=False):
        for start in range(0, queries, block):
            stop = min(start + block, queries)
            first = max(0, cached + start - window + 1)
            keys, values = (x[:, first : cached + stop].to(wide) for x in (k, v))
            score = torch.einsum("rthe,rshe->rhts", q[:, start:stop].to(wide), keys) * q.shape[-1] ** -0.5
            mask = causal_mask(stop - start, cached + start - first, 0, position + start, window)
            score = _capped(score, cap).masked_fill(~mask.unsqueeze(1), -torch.inf)
            total = score.logsumexp(-1, keepdim=True)
            y = torch.cat([torch.einsum("rhts,rshe->rhte", (score - total).exp(), values), total], -1)
            pieces.append(y.transpose(1, 2))
    return torch.cat(pieces, 1)


def _first_tokens(new: Tensor, kept: Tensor, position: Tensor, offsets: list[int] | None) -> Tensor:
    """The first tokens' keys or values ``[r s h e]``, with those that this call reads."""
    if not kept.shape[1]:
        return kept
    slot = torch.arange(kept.shape[1], device=new.device) - position.unsqueeze(-1)  # of the call's tokens
    count = (
        torch.full_like(position, new.shape[1])
        if offsets is None
        else torch.tensor(offsets, device=new.device).diff()
    )
    index = slot.clamp(0, new.shape[1] - 1)[..., None, None].expand(-1, -1, *new.shape[2:])
    here = ((slot >= 0) & (slot < count.unsqueeze(-1)))[..., None, None]
    return torch.where(here, new.gather(1, index).to(kept.dtype), kept)


def _with_firsts(
    near: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    place: Tensor,
    rotation: tuple[Tensor, Tensor] | None,
    window: int,
    cap: float | None,
) -> Tensor:
    """One softmax over a window, of which the output and the log-sum-exp are known ``[r t h e+1]``, and over the first
    tokens that have left it.
    """
    y, total = near[..., :-1], near[..., -1:]
    wide = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        q = q.to(wide) if rotation is None else _rotate(q.to(wide), rotation)
        score = _capped(torch.einsum("rthe,rshe->rths", q, k.to(wide)) * q.shape[-1] ** -0.5, cap)
        left = place.unsqueeze(-1) - torch.arange(k.shape[1], device=place.device) >= window
        score = score.masked_fill(~left.unsqueeze(2), UNSEEN)
        both = torch.logaddexp(total, score.logsumexp(-1, keepdim=True))
        return y * (total - both).exp() + torch.einsum("rths,rshe->rthe", (score - both).exp(), v.to(wide))


def to_transformers(seen: Attended, y: Tensor | None = None) -> Tensor:
    """What transformers expects of attention: ``[b t h e]``, as its queries came."""
    return from_rows(seen.y if y is None else y, seen.back)
