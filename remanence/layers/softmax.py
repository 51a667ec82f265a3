"""Softmax attention as functions: full, sliding, and over MAC's whole segments; on a GPU by FlexAttention."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from remanence.layers.masks import band_mask, causal_mask, whole_mask
from remanence.runtime.positions import host_copy


def masked_softmax(
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
    if q.is_cuda and q.dtype != torch.float64 and queries > block and q.shape[-1] >= 16:
        return flexible_attention(q, k, v, prefix, window, position, lse)
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
            keys, values = (prepend(p, x[:, part].flatten(0, 1)) for p, x in zip(prefix, (k, v), strict=True))
            y = masked_softmax(q[:, part].flatten(0, 1), keys, values, mask, lse=lse)
            pieces.append(y.reshape(rows, -1, *y.shape[1:]))
    return torch.cat(pieces, 1).flatten(1, 2)[:, :queries]


def flexible_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix: tuple[Tensor, Tensor],
    window: int,
    position: Tensor | None = None,
    lse: bool = False,
) -> Tensor:
    """The same by FlexAttention, for a document from its start (position None) and for one that goes on. On an H200,
    with a window of 2,048 tokens and 128 persistent ones, forward and backward take 3.8 ms where the blocks take 13.9
    (8 x 4,096 tokens, 16 heads), and 6.3 where they take 12.5 (1 x 32,768). Compiled when first used.
    """
    cached = k.shape[1] - q.shape[1]
    # What a query can reach, in whole blocks: cut elsewhere, more of them are mixed.
    reached = -(-(window - 1) // BLOCK) * BLOCK
    if cached > reached:
        k, v = (x[:, cached - reached :] for x in (k, v))
        cached = reached
    keys, values = (prepend(p, x).transpose(1, 2) for p, x in zip(prefix, (k, v), strict=True))
    mask = _flexible_mask(q.shape[1], cached, window, prefix[0].shape[0], q.device)
    known = None if position is None else host_copy(position)
    score = None
    if position is not None and (known is None or min(known) < min(cached, window - 1)):
        # Rows that have not read a whole window yet: what stands before their start is nothing.
        score = _from(
            prefix[0].shape[0], (prefix[0].shape[0] + cached - position).clamp(min=prefix[0].shape[0])
        )
    grads = q.requires_grad, keys.requires_grad, values.requires_grad
    built = (*q.shape, q.dtype, cached, window, prefix[0].shape[0], score is None, lse, grads)
    y, total = _flex(built, q.device)(q.transpose(1, 2), keys, values, mask, score, lse)
    return (y if total is None else torch.cat([y.float(), total.unsqueeze(-1)], -1)).transpose(1, 2)


def _from(prefix: int, first: Tensor) -> Callable[..., Tensor]:
    """Scores of keys behind the persistent ones from each row's `first` ``[r]`` on."""

    def begun(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return torch.where((key < prefix) | (key >= first[row]), score, -float("inf"))

    return begun


BLOCK = 128
"""Keys that FlexAttention skips, or reads without a look at the mask, together."""

FIXED = 6
"""Shapes of calls that FlexAttention is compiled for one by one; those that come after them share a build that is good
for any, but slower (on an H200 96 ms where 68 ms were for the layers of a 340m MAG).
"""

BUILDS = 64
"""How often torch may build a function anew. By itself it does so eight times, and then runs FlexAttention as it is
written: with all scores at once, 18 GiB for two rows of 16K tokens.
"""

_fixed: set[tuple[Any, ...]] = set()


def _flex(shape: tuple[Any, ...], device: torch.device) -> Callable[..., Any]:
    key = (*shape, device, torch.is_grad_enabled())
    if key not in _fixed and len(_fixed) < FIXED:
        _fixed.add(key)
    return _compiled_flex("fixed" if key in _fixed else "windows")


@cache
def _compiled_flex(kind: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    def attended(q: Tensor, k: Tensor, v: Tensor, mask: Any, score: Any, lse: bool) -> Any:
        """The output, and the log-sum-exp if it is wanted."""
        if not lse:
            return flex_attention(q, k, v, score_mod=score, block_mask=mask), None
        return flex_attention(q, k, v, score_mod=score, block_mask=mask, return_lse=True)

    # Each kind has a function of its own: torch remembers of a function that its shapes change.
    def fixed(q: Tensor, k: Tensor, v: Tensor, mask: Any, score: Any, lse: bool = False) -> Any:
        return attended(q, k, v, mask, score, lse)

    def windows(q: Tensor, k: Tensor, v: Tensor, mask: Any, score: Any, lse: bool = False) -> Any:
        return attended(q, k, v, mask, score, lse)

    def segments(q: Tensor, k: Tensor, v: Tensor, mask: Any, score: Any, lse: bool = False) -> Any:
        return attended(q, k, v, mask, score, lse)

    compiled = torch.compile(
        {"fixed": fixed, "windows": windows, "segments": segments}[kind],
        dynamic=False if kind == "fixed" else None,
    )

    def called(*args: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=BUILDS):
            return compiled(*args)

    return called


@lru_cache(maxsize=16)
def _flexible_mask(queries: int, cached: int, window: int, prefix: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        token = key - prefix - cached
        return (key < prefix) | ((token <= query) & (token > query - window))

    return create_block_mask(seen, None, None, queries, queries + cached + prefix, device=device)


def prepend(prefix: Tensor, x: Tensor) -> Tensor:
    """Persistent entries ``[p h e]`` in front of every row of ``[r s h e]``; several layers' ``[n p h e]``, each its
    rows'.
    """
    if not prefix.shape[-3]:
        return x
    if prefix.dim() == 3:
        return torch.cat([prefix.expand(x.shape[0], *prefix.shape), x], 1)
    rows = x.shape[0] // len(prefix)
    return torch.cat([prefix.unsqueeze(1).expand(-1, rows, -1, -1, -1).flatten(0, 1), x], 1)


def whole_attention(
    q: Float[Tensor, "r c h e"], k: Float[Tensor, "r keys h e"], v: Float[Tensor, "r keys h e"]
) -> Tensor:
    """Of whole segments: keys are persistent ones, then what each token retrieved, then the tokens. Half of the scores
    are of what no query sees: on a GPU they are skipped (39 ms of a 340m MAC's step on an H200, where torch's with a
    mask takes 50).
    """
    length, prefix = q.shape[1], k.shape[1] - 2 * q.shape[1]
    if not (q.is_cuda and q.dtype != torch.float64 and length >= 128 and q.shape[-1] >= 16):
        return masked_softmax(q, k, v, whole_mask(length, prefix, q.device))
    mask = _segment_blocks(length, prefix, q.device)
    y, _ = _compiled_flex("segments")(*(x.transpose(1, 2) for x in (q, k, v)), mask, None)
    return y.transpose(1, 2)


@lru_cache(maxsize=16)
def _segment_blocks(length: int, prefix: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        token = key - prefix
        return (key < prefix) | (torch.where(token < length, token, token - length) <= query)

    return create_block_mask(seen, None, None, length, prefix + 2 * length, device=device)
