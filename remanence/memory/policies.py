"""Policies that choose which tokens are stored. A policy scores each token; `keep` marks the best tokens of
each segment.

Scores depend only on the token, its position and its document, and segments are counted from the document's
start. Therefore the stored tokens do not depend on how a text is split into calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor


class Tokens(NamedTuple):
    """The input of a policy: tokens and positions ``[r t]``, and what only some policies need.

    log_unigrams
        Log-probabilities of the vocabulary ``[v]``, from `unigrams`.
    surprise
        The model's -log p of each token ``[r t]``, or another measure of surprise.
    document
        A number for the document of each row ``[r]``, hashed by the random policy. Default: the row index.
    seed
        Seed of the random policy.
    """

    tokens: Tensor
    position: Tensor
    log_unigrams: Tensor | None = None
    surprise: Tensor | None = None
    document: Tensor | None = None
    seed: int = 0


Policy = Callable[[Tokens], Tensor]
"""A function that returns the scores ``[r t]`` of tokens."""


def equal_score(read: Tokens) -> Float[Tensor, "r t"]:
    """Return the same score for every token."""
    return torch.ones(read.tokens.shape, device=read.tokens.device)


def rarity(read: Tokens) -> Float[Tensor, "r t"]:
    """Return -log p of each token in a table of unigrams, so that rare tokens score high."""
    if read.log_unigrams is None:
        raise ValueError(
            "log_unigrams: expected a table from unigrams(), which the policy 'rare' needs, got None"
        )
    return -read.log_unigrams[read.tokens]


def surprise_score(read: Tokens) -> Float[Tensor, "r t"]:
    """Return the given surprise of each token."""
    if read.surprise is None:
        raise ValueError(
            "surprise: expected a number for each token, which the policy 'surprise' needs, got None"
        )
    return read.surprise


def random_score(read: Tokens) -> Float[Tensor, "r t"]:
    """Return random scores, uniform in [0, 1), as a control. They are a hash of seed, document and position,
    so that they do not depend on how a text is split into calls.
    """
    document = read.document
    if document is None:
        document = torch.arange(len(read.tokens), device=read.tokens.device)
    x = _hash(_hash(document.long() + read.seed * 0x632BE5AB).unsqueeze(-1) ^ read.position.long())
    return (x & 0xFFFFFF).float() / 2**24


def _hash(x: Tensor) -> Tensor:
    """Return the finalizer of splitmix64, a 64-bit hash. Overflow of the products is intended."""
    x = x + -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (
            x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))
        ) * factor  # >> extends the sign, which is masked out
    return x ^ ((x >> 31) & ((1 << 33) - 1))


POLICIES: dict[str, Policy] = {
    "all": equal_score,
    "rare": rarity,
    "surprise": surprise_score,
    "random": random_score,
}
"""The policies by name."""


def keep(score: Float[Tensor, "r t"], fraction: float, segment: int) -> Bool[Tensor, "r t"]:
    """Return a mask of the best `fraction` of the tokens of each complete segment, at least one token. Of
    equal scores, the earlier token is preferred. Tokens with a score of -inf are never marked.

    The first score must be at a segment boundary. Tokens after the last complete segment are not marked yet.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction: expected above 0 and at most 1, got {fraction!r}")
    rows, tokens = score.shape
    whole = tokens // segment
    parts = score[:, : whole * segment].reshape(rows, whole, segment)
    # Minus a small epsilon: 0.1 * 30 must give 3 and not, by rounding, 4.
    best = parts.argsort(dim=-1, descending=True, stable=True)[
        ..., : max(1, math.ceil(fraction * segment - 1e-9))
    ]
    marked = torch.zeros(parts.shape, dtype=torch.bool, device=score.device).scatter_(-1, best, True)
    marked = (marked & (parts > -torch.inf)).flatten(1)
    return torch.cat([marked, marked.new_zeros(rows, tokens - whole * segment)], 1)


def dilate(mask: Bool[Tensor, "r t"], distance: int) -> Bool[Tensor, "r t"]:
    """Return the mask with all tokens within `distance` tokens of a marked token marked as well."""
    distance = min(distance, mask.shape[1])
    if not distance:
        return mask
    return F.max_pool1d(mask.float().unsqueeze(1), 2 * distance + 1, 1, distance).squeeze(1) > 0


def unigrams(corpus: Tensor | Iterable[Tensor], vocabulary: int) -> Float[Tensor, " v"]:
    """Return the log-probabilities ``[v]`` of the tokens of a corpus with add-one smoothing. The corpus is
    one tensor or several.
    """
    counts = torch.zeros(vocabulary, dtype=torch.int64, device="cpu")
    for tokens in [corpus] if isinstance(corpus, Tensor) else corpus:
        found = torch.bincount(tokens.flatten().cpu(), minlength=vocabulary)
        if len(found) > vocabulary:
            raise ValueError(f"tokens: expected below vocabulary={vocabulary}, got {len(found) - 1}")
        counts += found
    return ((counts + 1.0).double().log() - math.log(int(counts.sum()) + vocabulary)).float()
