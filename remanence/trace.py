"""`Trace`: everything that a forward pass computes, including the surprise and gates of each layer's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from remanence.mixers import MemoryTrace, wavefront

if TYPE_CHECKING:
    from remanence.backbone import State


class Trace(NamedTuple):
    """The results of a forward pass.

    hidden
        The normalised output of the last layer ``[b t d]``.
    state
        The state after the call.
    traces
        Surprise and gates of each layer's memory; None where a layer has no memory or did not write to it.
    layers
        The input of each layer ``[b t d]``.
    """

    hidden: Tensor
    state: State
    traces: Sequence[MemoryTrace | None]
    layers: Sequence[Tensor]

    @classmethod
    def join(cls, pieces: Sequence[Trace]) -> Trace:
        """Concatenate the traces of consecutive pieces of a text along the token axis."""
        depth = len(pieces[0].traces)
        traces = wavefront.LazySequence(
            depth, lambda layer: MemoryTrace.join([piece.traces[layer] for piece in pieces])
        )
        layers = wavefront.LazySequence(
            depth, lambda layer: torch.cat([piece.layers[layer] for piece in pieces], 1)
        )
        return cls(torch.cat([piece.hidden for piece in pieces], 1), pieces[-1].state, traces, layers)

    @property
    def surprise(self) -> Tensor | None:
        """Surprise per token ``[b t]``, the mean over layers and heads; None if no memory was written."""
        present = [trace.surprise.mean(-1) for trace in self.traces if trace is not None]
        return torch.stack(present).mean(0) if present else None
