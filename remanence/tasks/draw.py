"""Random draws that depend only on a seed and a step or setting, and batches made of drawn rows."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from remanence.data import Batch

IGNORED = -100
"""The target at a position that is left out of the loss."""
HELD_OUT = 2**32
"""A number added to the seed in evaluation, so that no evaluation text is drawn in training."""


def step_rng(seed: int, step: int) -> np.random.Generator:
    """Return the random generator of one training step. It is the same whenever the step is drawn."""
    return np.random.Generator(np.random.Philox(key=[seed, step]))


def ramp_progress(step: int, ramp: int) -> float:
    """Return the progress of a ramp of `ramp` steps, from 0 to 1, as the square of the share of steps done.
    It is 1 if `ramp` is 0.
    """
    return min(1.0, step / ramp) ** 2 if ramp else 1.0


def unit_rng(seed: int, unit: Mapping[str, object]) -> np.random.Generator:
    """Return the random generator of one unit of an evaluation, such as one text at one length. It depends only on
    the seed and the settings of the unit.
    """
    digest = hashlib.sha256(f"{seed} {sorted(unit.items())}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16])))


def rank_rows(batch: int, rank: int) -> slice:
    """Return the slice of one process's rows among the rows drawn for all processes."""
    return slice(rank * batch, (rank + 1) * batch)


def plain_batch(tokens: np.ndarray, targets: np.ndarray) -> Batch:
    """Return a batch of rows of equal length, each of which is a separate document."""
    return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), None, None, None)


def answer_batch(rows: Sequence[np.ndarray], answer_lengths: Sequence[int]) -> Batch:
    """Return a batch in which each row ends with its answer. Only the answers' tokens are targets.
    `answer_lengths` are in tokens.
    """
    tokens = np.stack(rows).astype(np.int64)
    targets = np.full_like(tokens, IGNORED)
    for row, length in enumerate(answer_lengths):
        targets[row, -length - 1 : -1] = tokens[row, -length:]
    return plain_batch(tokens, targets)
