"""Which tokens are worth storing. A policy gives each token a score; `keep` marks the best of each segment.

Scores depend on a token, its position and its row's document alone, and segments are counted from the document's start,
so that what is stored never depends on the calls a text comes in.
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
    """What a policy may go by: tokens and positions ``[r t]``, and, where it needs them, the rest.

    log_unigrams
        The vocabulary's log-probabilities ``[v]``, from `unigrams`.
    surprise
        ``[r t]``: the model's own -log p of each token, or any other measure of how little it was expected.
    document
        A number for each row's document ``[r]``, which the random policy draws by. Default: the row's place.
    seed
        The random policy's.
    """

    tokens: Tensor
    position: Tensor
    log_unigrams: Tensor | None = None
    surprise: Tensor | None = None
    document: Tensor | None = None
    seed: int = 0


Policy = Callable[[Tokens], Tensor]


def everything(read: Tokens) -> Float[Tensor, "r t"]:
    return torch.ones(read.tokens.shape, device=read.tokens.device)


def rare(read: Tokens) -> Float[Tensor, "r t"]:
    """-log p of a unigram table: what the corpus seldom says."""
    if read.log_unigrams is None:
        raise ValueError(
            "log_unigrams: expected a table from unigrams(), which the policy 'rare' needs, got None"
        )
    return -read.log_unigrams[read.tokens]


def surprising(read: Tokens) -> Float[Tensor, "r t"]:
    if read.surprise is None:
        raise ValueError(
            "surprise: expected a number for each token, which the policy 'surprise' needs, got None"
        )
    return read.surprise


def drawn(read: Tokens) -> Float[Tensor, "r t"]:
    """Uniform in [0, 1): the control. A hash of seed, document and position, as a generator would count calls."""
    document = read.document
    if document is None:
        document = torch.arange(len(read.tokens), device=read.tokens.device)
    x = _mixed(_mixed(document.long() + read.seed * 0x632BE5AB).unsqueeze(-1) ^ read.position.long())
    return (x & 0xFFFFFF).float() / 2**24


def _mixed(x: Tensor) -> Tensor:
    """splitmix64's finish: every bit of the input decides half of the output's. Products wrap around, as they
    should.
    """
    x = x + -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (
            x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))
        ) * factor  # >> keeps the sign, which is masked away
    return x ^ ((x >> 31) & ((1 << 33) - 1))


POLICIES: dict[str, Policy] = {"all": everything, "rare": rare, "surprise": surprising, "random": drawn}


def keep(score: Float[Tensor, "r t"], fraction: float, segment: int) -> Bool[Tensor, "r t"]:
    """Marks the best `fraction` of each whole segment, at least one token; the earlier of equals; never a score of
    -inf.

    Scores begin at a segment's border. What is behind the last whole segment is not marked: it waits for its segment's
    end.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction: expected above 0 and at most 1, got {fraction!r}")
    rows, tokens = score.shape
    whole = tokens // segment
    parts = score[:, : whole * segment].reshape(rows, whole, segment)
    # Less a hair, so that 0.1 of 30 is 3 and not, by rounding, 4.
    best = parts.argsort(dim=-1, descending=True, stable=True)[
        ..., : max(1, math.ceil(fraction * segment - 1e-9))
    ]
    marked = torch.zeros(parts.shape, dtype=torch.bool, device=score.device).scatter_(-1, best, True)
    marked = (marked & (parts > -torch.inf)).flatten(1)
    return torch.cat([marked, marked.new_zeros(rows, tokens - whole * segment)], 1)


def dilate(mask: Bool[Tensor, "r t"], distance: int) -> Bool[Tensor, "r t"]:
    """The marked tokens of a segment, and those within `distance` of one."""
    distance = min(distance, mask.shape[1])
    if not distance:
        return mask
    return F.max_pool1d(mask.float().unsqueeze(1), 2 * distance + 1, 1, distance).squeeze(1) > 0


def unigrams(corpus: Tensor | Iterable[Tensor], vocabulary: int) -> Float[Tensor, " v"]:
    """Log-probabilities of a corpus's tokens, whole or in pieces, each counted once more than it is there: none is
    impossible.
    """
    counts = torch.zeros(vocabulary, dtype=torch.int64, device="cpu")
    for tokens in [corpus] if isinstance(corpus, Tensor) else corpus:
        found = torch.bincount(tokens.flatten().cpu(), minlength=vocabulary)
        if len(found) > vocabulary:
            raise ValueError(f"tokens: expected below vocabulary={vocabulary}, got {len(found) - 1}")
        counts += found
    return ((counts + 1.0).double().log() - math.log(int(counts.sum()) + vocabulary)).float()
