"""Attention masks. Each docstring shows the mask that its function makes (``#``: attended, ``.``: masked; rows are
queries, columns are keys), and the tests compare the two.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from remanence.runtime.cache import cached_by_size


def causal_mask(
    queries: int, cached: int, prefix: int, position: Int[Tensor, " r"], window: int | None = None
) -> Bool[Tensor, "r queries keys"]:
    """Causal mask over persistent tokens, a cache whose newest entry is last, and the tokens of the call.

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
    """Mask of a block of queries in the middle of a long text: each has a full window of keys, its own last.

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
    """Mask within MAC's segment (eq. 22): persistent tokens, the vector retrieved for each token, the tokens.

    Token i attends to retrieved vector j and token j for j <= i only: vector j was retrieved with token j as the query,
    so a later one would leak the future. The state has slots for the first `opened` positions of the segment; row
    r has read only the first ``position[r]`` of them, and the other slots are empty.

    Two queries after two cached positions of which one has been read, one persistent token::

        p   h h h h   x x x x
        #   # . # .   # . # .
        #   # . # #   # . # #
    """
    query = torch.arange(queries, device=position.device).unsqueeze(-1)
    old = (torch.arange(opened, device=position.device) < position.view(-1, 1, 1)).expand(-1, queries, -1)
    new = (torch.arange(queries, device=position.device) <= query).expand(old.shape[0], -1, -1)
    parts = [new.new_ones(*new.shape[:2], prefix), *[old, new] * (2 if retrieved else 1)]
    return torch.cat(parts, -1)


@cached_by_size
def whole_segment_mask(length: int, prefix: int, device: torch.device) -> Bool[Tensor, "1 length keys"]:
    """Return the `segment_mask` of a complete segment that is read at once."""
    return segment_mask(length, 0, prefix, torch.zeros(1, dtype=torch.int64, device=device))
