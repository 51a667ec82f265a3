"""The recurrent state that rows carry from step to step, for documents that are read over several steps."""

from __future__ import annotations

import torch

from remanence.data import Batch
from remanence.model import Model, State
from remanence.runtime.positions import positions_of, with_host_copy
from remanence.runtime.state import where
from remanence.train.initial_state import InitialState


def carry_in(
    model: Model,
    carried: State | None,
    batch: Batch,
    initial_state: InitialState | None = None,
    number: int = 0,
) -> State:
    """Return the state at the start of a step.

    Rows in which a document begins, or whose memory has diverged, get a new state; the others keep the
    carried one. The new state is always computed and part of the autograd graph, since with sharded weights
    its forward and backward pass are collective calls.
    """
    fresh = model.start(batch.tokens.shape[0])
    if initial_state is not None:
        fresh = initial_state.start(fresh, batch, number, carried)
    if carried is None or (batch.begins is not None and bool(batch.begins.all())):  # batch size may differ
        return fresh
    renewed = carried.diverged
    if batch.begins is not None:
        renewed = renewed | batch.begins.to(carried.position.device)
    return where(renewed.tolist(), fresh, carried)


def carry_out(model: Model, state: State, batch: Batch, captured: bool) -> State:
    """Return the state that rows carry from this step to the next one, detached.

    A row whose document ended has read padding after it. Its position is set to 0, and the next step starts
    it with a new state. After a captured step, rows whose memory diverged get a new state here; otherwise in
    `carry_in`.
    """
    if captured and bool((bad := state.diverged).any()):
        state = where(bad.tolist(), model.start(len(bad)).detach(), state)
    if batch.begins is not None and batch.mask is not None and not bool(batch.mask.all()):
        ended = (~batch.mask.all(1)).tolist()
        known = [0 if over else at for over, at in zip(ended, positions_of(state.position), strict=True)]
        state = state._replace(
            position=with_host_copy(torch.tensor(known, device=state.position.device), known)
        )
    return state.detach()
