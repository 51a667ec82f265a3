"""The loss of language modelling, for training, validation and the evaluation after a run."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from remanence.data import Batch
from remanence.model import CausalModel, State, Trace


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each target in nats.

    It is 0 where the target is -100, which means no target.
    """
    return F.cross_entropy(logits.float(), targets, reduction="none")


def summed_loss(logits: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the cross-entropy summed over targets (-100 means no target), each times its weight (default 1)."""
    if weights is None:
        return F.cross_entropy(logits.float(), targets, reduction="sum")
    return (token_losses(logits, targets) * weights).sum()


def target_count(batch: Batch) -> float:
    """Return the number of targets of a batch, or the sum of their weights if they have weights."""
    asked = batch.targets >= 0
    return float(asked.sum() if batch.weights is None else batch.weights[asked].sum())


def batch_loss(
    model: CausalModel, batch: Batch, state: State | None, device: torch.device, *, keep: bool, dense: bool
) -> tuple[Tensor, Trace, Tensor]:
    """Return the summed cross-entropy of a batch, its trace, and the losses of the targets with weight 1.

    The third part [n] is for logging: it has no gradient, and is empty if the batch has no weights. `dense`
    is whether every position has a target; `keep`, whether the state after the batch is needed.
    """
    # With `begins`, padding only follows the end of a document, and the row then gets a new state: no mask needed.
    mask = batch.mask if batch.begins is None else None
    tokens, targets = (x.to(device, non_blocking=True) for x in (batch.tokens, batch.targets))
    mask = None if mask is None else mask.to(device, non_blocking=True)
    trace = model.trace(tokens, state, mask=mask, offsets=batch.offsets, keep=keep)
    chosen = slice(None) if dense else targets >= 0
    weights = None if batch.weights is None else batch.weights.to(device, non_blocking=True)[chosen].flatten()
    logits, wanted = model.logits(trace.hidden[chosen]).flatten(0, -2), targets[chosen].flatten()
    with torch.no_grad():
        whole = weights == 1 if weights is not None else slice(0)
        known = token_losses(logits[whole], wanted[whole])
    return summed_loss(logits, wanted, weights), trace, known
