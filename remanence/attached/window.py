"""Sliding-window attention with attention sinks for a pretrained model.

Models put a large part of their attention on the first tokens of a text (attention sinks: StreamingLLM), and
fail when a sliding window no longer contains them. Therefore the first tokens always stay visible. After they
have left the window, their distance to a query no longer grows, because the model may not have been trained
on larger distances. All other tokens keep their true distance, so that results do not depend on how a text is
split into calls.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from remanence.layers.attention import AttentionState, next_attention_state
from remanence.layers.masks import band_mask, causal_mask
from remanence.layers.softmax import sliding_attention
from remanence.ops.layout import to_rows
from remanence.runtime.cache import cached_by_size
from remanence.runtime.positions import host_copy, with_host_copy
from remanence.runtime.state import TensorTuple

CPU_BLOCK = 128
"""The number of queries in a block of `blockwise_attention` on a CPU, whose scores then fit into its caches."""

UNSEEN = -1e30
"""The score that masks a first token while it is still inside the window, so that it does not count twice. It
is finite, because the gradients of a softmax over only -inf are NaN.
"""


class _WindowState(NamedTuple):
    k: Tensor
    v: Tensor
    window: AttentionState


class WindowState(_WindowState, TensorTuple):
    """The keys and values of the first tokens ``[r s h e]``, zero for tokens not read yet; and the state of
    the window.
    """

    __slots__ = ()

    @property
    def position(self) -> Tensor:
        """Number of tokens that each row has read ``[r]``."""
        return self.window.position

    def crop(self, tokens: int) -> WindowState:
        window = self.window.crop(tokens)
        read = torch.arange(self.k.shape[1], device=self.k.device) < window.position.unsqueeze(-1)
        k, v = (x * read[..., None, None] for x in (self.k, self.v))
        return WindowState(k, v, window)

    def shorten(self, history: int) -> WindowState:
        """The state of a smaller window: only the last `history` tokens are kept."""
        k, v, position, slack = self.window
        cut = k.shape[1] - history
        if not cut:
            return self
        return self._replace(window=AttentionState(k[:, cut:], v[:, cut:], position, slack.clamp(max=0)))


class WindowSpec(NamedTuple):
    """The window of a layer.

    window
        Number of tokens that attention sees, including the current one.
    sinks
        Number of tokens at the start of a text that attention sees in addition.
    slack
        Number of additional tokens that the state keeps, so that up to this many tokens can be cropped.
    is_narrowed
        False if the window is the one of the pretrained model; the layer then does not see additional first tokens.
    """

    window: int
    sinks: int
    slack: int
    is_narrowed: bool = True

    @classmethod
    def smaller(cls, window: int, native: int | None, sinks: int, slack: int) -> WindowSpec:
        """The spec for the smaller of `window` and the window of the pretrained model, `native` (None: it has
        none).
        """
        if native is not None and native <= window:
            return cls(native, sinks, slack, False)
        return cls(window, sinks, slack)

    @property
    def history(self) -> int:
        """Number of past tokens that the state keeps."""
        return self.window - 1 + self.slack

    def start(self, rows: int, heads: int, like: Tensor, width: int) -> WindowState:
        """The initial state of `rows` documents, with the dtype and device of `like`."""
        none = lambda length: like.new_zeros(rows, length, heads, width, requires_grad=False)
        nothing = with_host_copy(torch.zeros(rows, dtype=torch.int64, device=like.device), [0] * rows)
        window = AttentionState(none(self.history), none(self.history), nothing, nothing)
        return WindowState(none(self.sinks), none(self.sinks), window)


def relative_rotation(source: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The cosines and sines that rotate a vector from position `source` to position `target`, given the cosines
    and sines of both positions. The model's rotary embedding may have scaled these; the result is not scaled.
    """
    (cos, sin), (c, s) = ([x.double() for x in pair] for pair in (source, target))
    size = cos.square() + sin.square()
    return ((c * cos + s * sin) / size).float(), ((s * cos - c * sin) / size).float()


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x ``[r t h e]`` by cosines and sines ``[r t e]``. Channel i of the first half of a head is
    paired with channel i of the second half. If there are fewer cosines than channels, only the first
    channels are rotated.
    """
    cos, sin = (each.unsqueeze(-2) for each in rotation)
    x, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    a, b = x.chunk(2, -1)
    return torch.cat([x * cos + torch.cat([-b, a], -1) * sin, rest], -1)


class WindowOutput(NamedTuple):
    """The result of `attend`."""

    y: Tensor
    """The output of attention ``[r t h e]``, with one row per document."""
    v: Tensor
    """The values of the call, repeated so that each query head has its own ``[r t h e]``."""
    state: WindowState
    """The state after the call."""
    packed_index: Tensor | None
    """The index with which `from_rows` packs the rows again; None if the call was not packed."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: WindowState | None,
    spec: WindowSpec,
    scaling: float,
    rotation: tuple[Tensor, Tensor] | None,
    offsets: list[int] | None,
    cap: float | None = None,
) -> WindowOutput:
    """Compute attention over the window and the first tokens. Queries, keys and values ``[b t h e]`` are
    those of the call, after rotation; several query heads may share one key head. `rotation` rotates queries
    to the position from which they see the first tokens; None if keys have no positions. `cap` is the soft
    cap of the scores (Gemma 2).
    """
    (q, packed_index), (k, _), (v, _) = (to_rows(x, offsets) for x in (q, k, v))
    rows, tokens, heads, width = q.shape
    fresh = state is None
    if state is None:
        state = spec.start(rows, k.shape[2], k, width)
    position, old = state.position, state.window
    sinks = [_sink_tensor(new, kept, position, offsets) for new, kept in ((k, state.k), (v, state.v))]
    keys, values = (
        x if fresh else torch.cat([past.to(x.dtype), x], 1) for past, x in ((old.k, k), (old.v, v))
    )
    repeat_heads = lambda x: x.repeat_interleave(heads // x.shape[2], 2) if x.shape[2] < heads else x
    host_position = [0] * rows if fresh else host_copy(position)
    inside = host_position is not None and max(host_position) + tokens <= spec.window
    is_window_enough = inside or not spec.sinks or not spec.is_narrowed
    if rotation is not None and not is_window_enough:
        rotation = to_rows(rotation[0], offsets)[0], to_rows(rotation[1], offsets)[0]
    if cap is not None or (q.device.type == "cpu" and not torch.is_grad_enabled()):
        first = None if is_window_enough else (sinks[0], sinks[1])
        y = blockwise_attention(q, keys, values, first, spec.window, position, scaling, rotation, cap)
    else:
        scaled_q = q * (scaling * width**0.5)  # attention divides the scores by the root of the width
        y = sliding_attention(
            scaled_q,
            repeat_heads(keys),
            repeat_heads(values),
            (k.new_zeros(0, heads, width),) * 2,
            spec.window,
            None if fresh else position,
            lse=not is_window_enough,
            compiled=torch.is_grad_enabled(),  # texts that are read have many lengths, rows for training have one
        )
        if not is_window_enough:
            place = position.unsqueeze(-1) + torch.arange(tokens, device=q.device)
            first = repeat_heads(sinks[0]), repeat_heads(sinks[1])
            y = _add_sinks(y, scaled_q, *first, place, rotation, spec.window)
        y = y.to(q.dtype)
    window = next_attention_state(old, k, v, offsets, spec.history, spec.slack)
    return WindowOutput(y, repeat_heads(v), WindowState(sinks[0], sinks[1], window), packed_index)


def blockwise_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: tuple[Tensor, Tensor] | None,
    window: int,
    position: Tensor,
    scaling: float,
    rotation: tuple[Tensor, Tensor] | None,
    cap: float | None = None,
) -> Tensor:
    """Compute attention of queries ``[r t h e]`` over a window of cached and new keys ``[r s+t h e]``, and over the
    keys and values of the first tokens that have left the window, `sinks`, if they are given. One softmax in blocks of
    queries, so memory is linear in t. Scores can be soft-capped, which the fused kernels of torch do not support.

    On a CPU without gradients it computes in bfloat16 if the queries have this dtype, otherwise at least in float32.
    """
    queries, cached = q.shape[1], k.shape[1] - q.shape[1]
    dtype, block = score_dtype(q), CPU_BLOCK if q.device.type == "cpu" else max(window // 2, 16)
    known = host_copy(position)
    far = None if sinks is None else SeenSinks(*(x.transpose(1, 2).to(dtype) for x in sinks))
    pieces = []
    with torch.autocast(q.device.type, enabled=False):
        for start in range(0, queries, block):
            stop = min(start + block, queries)
            begin = max(0, cached + start - window + 1)
            if known is not None and begin and min(known) + start >= window - 1:
                bias = _band_bias(stop - start, window, dtype, q.device)
            else:
                mask = causal_mask(stop - start, cached + start - begin, 0, position + start, window)
                bias = as_bias(mask, dtype)
            own = q[:, start:stop] * scaling
            keys, values = (x[:, begin : cached + stop].transpose(1, 2).to(dtype) for x in (k, v))
            if far is not None:
                part = None if rotation is None else (rotation[0][:, start:stop], rotation[1][:, start:stop])
                place = position.unsqueeze(-1) + torch.arange(start, stop, device=q.device)
                far = far._replace(q=rotated(own, part), bias=sink_bias(place, far.k.shape[2], window, dtype))
            pieces.append(window_softmax(own, keys, values, bias, far, cap))
    return torch.cat(pieces, 1).to(q.dtype)


class SeenSinks(NamedTuple):
    """The first tokens of a text as seen by some queries: keys and values ``[r h s e]``, the rotated queries
    ``[r t h e]``, and the bias of their scores ``[r t s]``.
    """

    k: Tensor
    v: Tensor
    q: Tensor | None = None
    bias: Tensor | None = None


def window_softmax(
    q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, sinks: SeenSinks | None, cap: float | None
) -> Tensor:
    """Attention of scaled queries ``[r t h e]`` over the first tokens and over other keys and values ``[r h s e]``, in
    one softmax with the dtype of the keys. `bias` ``[r or 1, t, s]`` is added to the scores.
    """
    groups, queries = keys.shape[1], q.shape[1]

    def scores(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
        # Heads that share a key are put beside each other, as more queries of this key.
        q = q.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3).to(k.dtype)
        score = _capped(q @ k.mT, cap)
        score.unflatten(2, (-1, queries)).add_(bias[:, None, None])
        return score

    near = scores(q, keys, bias)
    if sinks is None:
        y = near.softmax(-1) @ values
    else:
        assert sinks.q is not None and sinks.bias is not None
        weight = torch.cat([scores(sinks.q, sinks.k, sinks.bias), near], -1).softmax(-1)
        count = sinks.k.shape[2]
        y = weight[..., :count] @ sinks.v + weight[..., count:] @ values
    return y.unflatten(2, (-1, queries)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def score_dtype(q: Tensor) -> torch.dtype:
    """The dtype of scores in `blockwise_attention` and decoding: bfloat16 for such queries on a CPU without gradients,
    otherwise at least float32.
    """
    fast = q.device.type == "cpu" and q.dtype == torch.bfloat16 and not torch.is_grad_enabled()
    return q.dtype if fast else torch.promote_types(q.dtype, torch.float32)


def sink_bias(place: Tensor, count: int, window: int, dtype: torch.dtype) -> Tensor:
    """The bias ``[r t s]`` of the scores of `count` first tokens for queries at positions `place` ``[r t]``: first
    tokens that are still inside the window are masked.
    """
    left = place.unsqueeze(-1) - torch.arange(count, device=place.device) >= window
    return torch.zeros(left.shape, dtype=dtype, device=place.device).masked_fill_(~left, UNSEEN)


def as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as numbers to add to scores: 0 where it is true, otherwise -inf."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


@cached_by_size
def _band_bias(queries: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The bias of a block of queries that all see a whole window ``[1 t s]``."""
    return as_bias(band_mask(queries, window, 0, device).unsqueeze(0), dtype)


def _capped(score: Tensor, cap: float | None) -> Tensor:
    """Scores limited smoothly to the range from -cap to cap; unchanged if `cap` is None."""
    return score if cap is None else (score / cap).tanh() * cap


def rotated(q: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
    """Queries ``[r t h e]`` rotated to where they see the first tokens, at least in float32; None: unchanged."""
    q = q.to(torch.promote_types(q.dtype, torch.float32))
    return q if rotation is None else _rotate(q, rotation)


def _sink_tensor(new: Tensor, kept: Tensor, position: Tensor, offsets: list[int] | None) -> Tensor:
    """The keys or values of the first tokens after the call ``[r s h e]``: those from the state, `kept`, and
    those among the tokens of the call, `new`.
    """
    if not kept.shape[1]:
        return kept
    slot = torch.arange(kept.shape[1], device=new.device) - position.unsqueeze(-1)  # index in the call
    count = (
        torch.full_like(position, new.shape[1])
        if offsets is None
        else torch.tensor(offsets, device=new.device).diff()
    )
    index = slot.clamp(0, new.shape[1] - 1)[..., None, None].expand(-1, -1, *new.shape[2:])
    here = ((slot >= 0) & (slot < count.unsqueeze(-1)))[..., None, None]
    return torch.where(here, new.gather(1, index).to(kept.dtype), kept)


def _add_sinks(
    window_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    place: Tensor,
    rotation: tuple[Tensor, Tensor] | None,
    window: int,
) -> Tensor:
    """The output of one softmax over the window and the first tokens that have left the window ``[r t h e]``.
    `window_output` is the output over the window with its log-sum-exp ``[r t h e+1]``, `place` the position of each
    query ``[r t]``.
    """
    y, total = window_output[..., :-1], window_output[..., -1:]
    wide = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        score = torch.einsum("rthe,rshe->rths", rotated(q, rotation), k.to(wide)) * q.shape[-1] ** -0.5
        left = place.unsqueeze(-1) - torch.arange(k.shape[1], device=place.device) >= window
        score = score.masked_fill(~left.unsqueeze(2), UNSEEN)
        both = torch.logaddexp(total, score.logsumexp(-1, keepdim=True))
        return y * (total - both).exp() + torch.einsum("rths,rshe->rthe", (score - both).exp(), v.to(wide))
