"""The loss of language modelling, for training, validation and what is measured after a run."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from remanence.data import Batch
from remanence.model import CausalModel, State, Trace


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of each target; 0 where it is -100, which is none."""
    return F.cross_entropy(logits.float(), targets, reduction="none")


def summed_loss(logits: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Cross-entropy, summed over targets (-100 is none), each times its weight."""
    if weights is None:
        return F.cross_entropy(logits.float(), targets, reduction="sum")
    return (token_losses(logits, targets) * weights).sum()


def target_count(batch: Batch) -> float:
    """Targets of a batch, each times its weight."""
    asked = batch.targets >= 0
    return float(asked.sum() if batch.weights is None else batch.weights[asked].sum())


def batch_loss(
    model: CausalModel, batch: Batch, state: State | None, device: torch.device, *, keep: bool, dense: bool
) -> tuple[Tensor, Trace, Tensor]:
    """The summed cross-entropy of a batch, its trace, and the cross-entropy of each target with weight 1, where others
    have less. `dense` means that every position has a target; `keep`, that the state after the batch is needed.
    """
    # Where documents are read to their ends, padding follows the last token of one, and its row begins anew.
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
