"""Random draws that depend on a seed and a number or a setting alone, and batches made of drawn rows."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from remanence.data import Batch

IGNORED = -100
"""The target of a position that does not count in the loss."""
HELD_OUT = 2**32
"""Added to the seed in evaluation, so that no text is one that a model was trained on."""


def step_rng(seed: int, step: int) -> np.random.Generator:
    """The random numbers of one training step. They are the same whenever the step is drawn."""
    return np.random.Generator(np.random.Philox(key=[seed, step]))


def ramp_progress(step: int, ramp: int) -> float:
    """The progress of a warm-up of `ramp` steps, from 0 to 1: quadratic in the step. Without a ramp it is 1."""
    return min(1.0, step / ramp) ** 2 if ramp else 1.0


def unit_rng(seed: int, unit: Mapping[str, object]) -> np.random.Generator:
    """The random numbers of one evaluation unit, a function of the seed and the unit's setting."""
    digest = hashlib.sha256(f"{seed} {sorted(unit.items())}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16])))


def rank_rows(batch: int, rank: int) -> slice:
    """The rows of one process, of those drawn for all processes together."""
    return slice(rank * batch, (rank + 1) * batch)


def plain_batch(tokens: np.ndarray, targets: np.ndarray) -> Batch:
    """A batch of rows of equal length, each a document of its own."""
    return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), None, None, None)


def answer_batch(rows: Sequence[np.ndarray], answer_lengths: Sequence[int]) -> Batch:
    """A batch in which each row ends with its answer. Only the answer's tokens are targets."""
    tokens = np.stack(rows).astype(np.int64)
    targets = np.full_like(tokens, IGNORED)
    for row, length in enumerate(answer_lengths):
        targets[row, -length - 1 : -1] = tokens[row, -length:]
    return plain_batch(tokens, targets)
