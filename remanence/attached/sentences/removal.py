"""Removing sentences from the state of a memory of sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from remanence.attached.sentences.segments import ANSWER, OTHER, TEXT, Position
from remanence.attached.sentences.state import SentenceState
from remanence.backbone import State
from remanence.runtime.positions import positions_of

if TYPE_CHECKING:
    from remanence.attached.sentences.model import SentenceModel


def without(model: SentenceModel, state: State, remove: Sequence[int]) -> State:
    """A state of one row without the stored sentences `remove`: the implementation of `SentenceModel.without`."""
    own: SentenceState = state.blocks[-1]
    gone, count = {int(index) for index in remove}, int(own.length)
    if any(not 0 <= index < count for index in gone):
        raise ValueError(f"remove: expected indices of the {count} stored sentences, got {list(remove)}")
    rest = [index for index in range(count) if index not in gone]
    kept = own._replace(
        keys=own.keys[:, rest],
        ids=own.ids[:, rest],
        spans=own.spans[:, rest],
        length=torch.full_like(own.length, len(rest)),
    )
    return _with_new_context(model, model.close_sentence(State((*state.blocks[:-1], kept), state.position)))


def _with_new_context(model: SentenceModel, state: State) -> State:
    """A state with the same stored sentences, from which the pretrained model goes on without any earlier token."""
    own: SentenceState = state.blocks[-1]
    (read,) = positions_of(state.position)
    place = Position(*own.scan[0, :-1].tolist())
    is_open_message = place.part == TEXT and place.question_start > place.question_end
    place = place._replace(
        part=OTHER if place.part == ANSWER else place.part,  # the rest of an answer is not stored
        start=read,
        question_start=read if is_open_message else place.question_start,
    )
    new = model.start(1)
    empty: SentenceState = new.blocks[-1]
    kept = own._replace(
        hidden=empty.hidden,
        recent=empty.recent,
        scan=torch.tensor([[*place, 0]], dtype=torch.int64, device=own.scan.device),
        pending=empty.pending,
        skipped=torch.full_like(own.skipped, read),
        answer=None,
    )
    return State((*new.blocks[:-1], kept), state.position)
