"""Adaptive Markov models of DNA: the baseline for a language model's bits per base."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RECENT = 20
"""The number of preceding bases whose cost determines the weights of the models in the mixture."""
MOST = 12
"""The highest order. Its table of counts has 4 ** 13 entries, 256 MiB."""


class Markov:
    """A model that counts, in one pass, how often each base has followed the `order` bases before it.

    The cost of a base is -log2 of its share of the counts, with `prior` added to each count. The first
    `order` bases and every N cost two bits and are not counted.
    """

    def __init__(self, order: int, prior: float | None = None) -> None:
        if not 0 <= order <= MOST:
            raise ValueError(f"order: expected from 0 to {MOST}, got {order}")
        self.order = order
        self.prior = (1 / 16 if order > 9 else 1 / 2) if prior is None else prior
        self.counts = np.zeros(4 ** (order + 1), np.int32)
        self.before = np.empty(0, np.uint8)

    def bits(self, tokens: np.ndarray) -> np.ndarray:
        """Return the cost in bits of each of the next tokens, and update the counts. Tokens may come in
        pieces of any length.
        """
        text = np.concatenate([self.before, tokens.astype(np.uint8)])
        known, found = len(self.before), np.full(len(tokens), 2.0)
        self.before = text[max(0, len(text) - self.order) :]
        at = np.arange(max(known, self.order), len(text))
        words = np.zeros(
            len(at), np.int64
        )  # the preceding bases and the current one, as a number in base four
        clear = np.ones(len(at), bool)
        for back in range(self.order, -1, -1):
            base = text[at - back]
            words, clear = words * 4 + (base & 3), clear & (base < 4)
        words, at = words[clear], at[clear] - known
        contexts = words >> 2
        of_base = self.counts[words] + _earlier(words)
        of_all = self.counts.reshape(-1, 4)[contexts].sum(1) + _earlier(contexts)
        found[at] = -np.log2((of_base + self.prior) / (of_all + 4 * self.prior))
        changed, times = np.unique(words, return_counts=True)
        self.counts[changed] += times.astype(np.int32)
        return found


def _earlier(values: np.ndarray) -> np.ndarray:
    """For each element, count how often its value occurs before it."""
    order = np.argsort(values, kind="stable")
    ordered, places = values[order], np.arange(len(values))
    first = np.concatenate([[True], ordered[1:] != ordered[:-1]]) if len(values) else np.empty(0, bool)
    found = np.empty(len(values), np.int64)
    found[order] = places - np.maximum.accumulate(np.where(first, places, 0))
    return found


class Mixture:
    """Markov models of several orders, and a mixture that weights each by how well it predicted the last
    `RECENT` bases.
    """

    def __init__(self, orders: Sequence[int]) -> None:
        self.models = [Markov(order) for order in orders]
        self.recent = np.zeros((len(orders), RECENT))

    def bits(self, tokens: np.ndarray) -> np.ndarray:
        """Return the cost in bits of each token ``[orders + 1, t]``: one row per order, and the mixture in
        the last row.
        """
        found = np.stack([model.bits(tokens) for model in self.models])
        history = np.concatenate([self.recent, found], 1)
        self.recent = history[:, -RECENT:]
        sums = np.concatenate([np.zeros((len(found), 1)), history.cumsum(1)], 1)
        last = sums[:, RECENT:-1] - sums[:, : -RECENT - 1]  # without the current base
        shares = np.exp2(last.min(0) - last)
        mixed = -np.log2((shares * np.exp2(-found)).sum(0) / shares.sum(0))
        return np.concatenate([found, mixed[None]])
