"""Softmax attention as functions: full, sliding-window, and over complete segments of MAC. On a GPU,
FlexAttention computes the last two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from remanence.layers.masks import band_mask, causal_mask, whole_segment_mask
from remanence.runtime.positions import host_copy

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""The type of FlexAttention's `score_mod`: a function of score, row, head, query and key that returns the
changed score.
"""


class FlexAttention(Protocol):
    """Compiled FlexAttention on ``[r h t e]``. It returns the output, and the log-sum-exp or None if that is
    not requested.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: BlockMask,
        score: ScoreMod | None,
        lse: bool = False,
        /,
    ) -> tuple[Tensor, Tensor | None]: ...


def masked_softmax(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool = False, lse: bool = False
) -> Tensor:
    """Compute scaled dot-product attention on ``[r t h e]``, with a mask ``[r or 1, queries, keys]``. With
    `lse`, the log-sum-exp is appended to the output of every head, and both are at least float32.
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
    """Compute causal attention of queries ``[r t h e]`` over cached tokens and their own tokens ``[r s+t h
    e]``. If position is None, the cache is empty.
    """
    if position is None:
        return masked_softmax(q, k, v, None, causal=True)
    return masked_softmax(q, k, v, causal_mask(q.shape[1], k.shape[1] - q.shape[1], 0, position))


def sliding_attention(
    q: Float[Tensor, "r t h e"],
    k: Float[Tensor, "r s+t h e"],
    v: Float[Tensor, "r s+t h e"],
    prefix: tuple[Tensor, Tensor],
    window: int,
    position: Int[Tensor, " r"] | None,
    lse: bool = False,
    compiled: bool = True,
) -> Float[Tensor, "r t h e"]:
    """Attention of each query over the persistent keys ``[p h e]`` and a window of keys that ends with its own. The
    cost is linear in t. With `compiled`, FlexAttention is used where it is supported; it is compiled for each shape.

    A long call is split into blocks of queries, each of which is multiplied only with the keys in its window::

        keys     [ window - 1 | block ]
                     [ window - 1 | block ]
                         [ window - 1 | block ]
    """
    rows, queries, cached = q.shape[0], q.shape[1], k.shape[1] - q.shape[1]
    persistent = prefix[0].shape[0]
    block = max(window // 2, 16)
    if compiled and q.is_cuda and q.dtype != torch.float64 and queries > block and q.shape[-1] >= 16:
        return flex_sliding_attention(q, k, v, prefix, window, position, lse)
    if position is None:
        position = torch.zeros(1, dtype=torch.int64, device=q.device)
    reach = window - 1
    if queries <= block:
        keep = min(cached, reach)
        mask = causal_mask(queries, keep, persistent, position, window)
        keys, values = (prepend(p, x[:, cached - keep :]) for p, x in zip(prefix, (k, v), strict=True))
        return masked_softmax(q, keys, values, mask, lse=lse)
    blocks = -(-queries // block)
    missing = blocks * block - queries
    q = F.pad(q, (0, 0, 0, 0, 0, missing)).reshape(rows, blocks, block, *q.shape[2:])
    left = reach - cached  # negative if the cache is longer than the window
    k, v = (
        F.pad(x, (0, 0, 0, 0, left, missing)).unfold(1, block + reach, block).movedim(-1, 2) for x in (k, v)
    )
    # Only the first blocks see cached keys, and a row may have read less than a window of them.
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
            keys, values = (prepend(p, x[:, part].flatten(0, 1)) for p, x in zip(prefix, (k, v), strict=True))
            y = masked_softmax(q[:, part].flatten(0, 1), keys, values, mask, lse=lse)
            pieces.append(y.reshape(rows, -1, *y.shape[1:]))
    return torch.cat(pieces, 1).flatten(1, 2)[:, :queries]


def flex_sliding_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix: tuple[Tensor, Tensor],
    window: int,
    position: Tensor | None = None,
    lse: bool = False,
) -> Tensor:
    """`sliding_attention` by FlexAttention, from a document's start (position None) or continued; compiled on first
    use.

    On an H200, with a window of 2,048 tokens and 128 persistent tokens, forward and backward take 3.8 ms instead of
    13.9 ms (8 x 4,096 tokens, 16 heads), and 6.3 ms instead of 12.5 ms (1 x 32,768).
    """
    cached = k.shape[1] - q.shape[1]
    # The cache is cut at a multiple of the block size: otherwise more blocks would be partly masked.
    reached = -(-(window - 1) // BLOCK) * BLOCK
    if cached > reached:
        k, v = (x[:, cached - reached :] for x in (k, v))
        cached = reached
    keys, values = (prepend(p, x).transpose(1, 2) for p, x in zip(prefix, (k, v), strict=True))
    mask = _sliding_block_mask(q.shape[1], cached, window, prefix[0].shape[0], q.device)
    known = None if position is None else host_copy(position)
    score = None
    if position is not None and (known is None or min(known) < min(cached, window - 1)):
        # Rows that have read less than a window: the cache before their start is empty.
        score = _mask_before(
            prefix[0].shape[0], (prefix[0].shape[0] + cached - position).clamp(min=prefix[0].shape[0])
        )
    grads = q.requires_grad, keys.requires_grad, values.requires_grad
    shape = (*q.shape, q.dtype, cached, window, prefix[0].shape[0], score is None, lse, grads)
    y, total = _flex_for_shape(shape, q.device)(q.transpose(1, 2), keys, values, mask, score, lse)
    return (y if total is None else torch.cat([y.float(), total.unsqueeze(-1)], -1)).transpose(1, 2)


def _mask_before(prefix: int, first: Tensor) -> ScoreMod:
    """Return a `score_mod` that masks the keys after the persistent keys and before the key `first` ``[r]``
    of each row.
    """

    def score_mod(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return torch.where((key < prefix) | (key >= first[row]), score, -float("inf"))

    return score_mod


BLOCK = 128
"""The block size of FlexAttention in keys. A block is skipped, or computed without the mask, as a whole."""

STATIC_SHAPES = 6
"""The number of call shapes for which FlexAttention is compiled separately. Later shapes share a kernel with
dynamic shapes, which is slower (on an H200 96 ms instead of 68 ms for the layers of a 340m MAG).
"""

RECOMPILE_LIMIT = 64
"""How often torch may recompile a function. After the default of eight recompilations, torch would run
FlexAttention uncompiled, with all scores in memory: 18 GiB for two rows of 16K tokens.
"""

_static_shapes: set[tuple[object, ...]] = set()


def _flex_for_shape(shape: tuple[object, ...], device: torch.device) -> FlexAttention:
    """Return FlexAttention compiled for this shape, or compiled with dynamic shapes if there are too many
    shapes.
    """
    key = (*shape, device, torch.is_grad_enabled())
    if key not in _static_shapes and len(_static_shapes) < STATIC_SHAPES:
        _static_shapes.add(key)
    return _compiled_flex("fixed" if key in _static_shapes else "windows")


@cache
def _compiled_flex(kind: str) -> FlexAttention:
    """Return compiled FlexAttention: "fixed" for static shapes, "windows" or "segments" for dynamic shapes."""
    from torch.nn.attention.flex_attention import flex_attention

    Result = tuple[Tensor, Tensor | None]
    Score = ScoreMod | None

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, score: Score, lse: bool) -> Result:
        if not lse:
            return flex_attention(q, k, v, score_mod=score, block_mask=mask), None
        return flex_attention(q, k, v, score_mod=score, block_mask=mask, return_lse=True)

    # A separate function for each kind: torch decides per function whether its shapes are dynamic.
    def fixed(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, score: Score, lse: bool = False) -> Result:
        return attend(q, k, v, mask, score, lse)

    def windows(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, score: Score, lse: bool = False) -> Result:
        return attend(q, k, v, mask, score, lse)

    def segments(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, score: Score, lse: bool = False) -> Result:
        return attend(q, k, v, mask, score, lse)

    compiled = torch.compile(
        {"fixed": fixed, "windows": windows, "segments": segments}[kind],
        dynamic=False if kind == "fixed" else None,
    )

    def call(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, score: Score, lse: bool = False) -> Result:
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
            return compiled(q, k, v, mask, score, lse)

    return call


@lru_cache(maxsize=16)
def _sliding_block_mask(
    queries: int, cached: int, window: int, prefix: int, device: torch.device
) -> BlockMask:
    """Return FlexAttention's mask for a sliding window over persistent, cached and new keys."""
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        token = key - prefix - cached
        return (key < prefix) | ((token <= query) & (token > query - window))

    return create_block_mask(seen, None, None, queries, queries + cached + prefix, device=device)


def prepend(prefix: Tensor, x: Tensor) -> Tensor:
    """Put persistent entries ``[p h e]`` in front of every row of x ``[r s h e]``. The entries of stacked
    layers ``[n p h e]`` are put in front of the rows of their layer.
    """
    if not prefix.shape[-3]:
        return x
    if prefix.dim() == 3:
        return torch.cat([prefix.expand(x.shape[0], *prefix.shape), x], 1)
    rows = x.shape[0] // len(prefix)
    return torch.cat([prefix.unsqueeze(1).expand(-1, rows, -1, -1, -1).flatten(0, 1), x], 1)


def whole_segment_attention(
    q: Float[Tensor, "r c h e"], k: Float[Tensor, "r keys h e"], v: Float[Tensor, "r keys h e"]
) -> Tensor:
    """Compute attention within complete segments of MAC. The keys are those of the persistent tokens, then of
    the retrieved vectors, then of the tokens. Half of the scores are masked; on a GPU these blocks are
    skipped, which takes 39 ms of a 340m MAC's step on an H200, instead of 50 ms with torch's masked
    attention.
    """
    length, prefix = q.shape[1], k.shape[1] - 2 * q.shape[1]
    if not (q.is_cuda and q.dtype != torch.float64 and length >= 128 and q.shape[-1] >= 16):
        return masked_softmax(q, k, v, whole_segment_mask(length, prefix, q.device))
    mask = _segment_block_mask(length, prefix, q.device)
    y, _ = _compiled_flex("segments")(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, None)
    return y.transpose(1, 2)


@lru_cache(maxsize=16)
def _segment_block_mask(length: int, prefix: int, device: torch.device) -> BlockMask:
    """Return FlexAttention's mask for a complete segment of MAC."""
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        token = key - prefix
        return (key < prefix) | (torch.where(token < length, token, token - length) <= query)

    return create_block_mask(seen, None, None, length, prefix + 2 * length, device=device)
