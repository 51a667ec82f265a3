"""Reading without answering: the one loop that takes a long text through a model piece by piece, in constant memory.

On a GPU, whole pieces of documents that have begun are one captured graph each: the host looks after nothing while they
run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from remanence.config import Mode
from remanence.inference.graphs import longest_window, unsupported
from remanence.inference.threads import threads_for
from remanence.model import CausalModel, Model, State, Trace
from remanence.runtime.graphs import capture, copy_all
from remanence.runtime.module import modules_of
from remanence.runtime.positions import positions_of

PIECE = 2048
"""Tokens of one call when a long text is read. Cut where the document's position is a multiple of it, so that a text
read with an interruption gives the same numbers to the last bit.
"""

LARGE = 8192
"""The same on a GPU."""

PATIENCE = 2
"""Whole pieces that a model reads before they are captured, which takes as long as some pieces."""


def piece_of(model: CausalModel) -> int:
    return max(PIECE, LARGE) if model.embed.weight.device.type == "cuda" else PIECE


def token_pieces(
    lists: Iterable[Sequence[int]], size: int, position: int = 0, overlap: int = 0
) -> Iterator[list[int]]:
    """The tokens of a document, given as lists of any lengths, in pieces of `size` tokens.

    A piece ends where the position in the document is a multiple of `size`; the document starts at `position`. The last
    piece may be shorter. With `overlap`, every piece also contains the first tokens of the next one.
    """
    pending: list[int] = []
    for tokens in lists:
        pending += tokens
        while len(pending) >= (count := size - position % size) + overlap:
            yield pending[: count + overlap]
            pending, position = pending[count:], position + count
    if len(pending) > overlap:
        yield pending


def piece_slices(length: int, size: int, position: int = 0) -> Iterator[slice]:
    """`token_pieces` of a tensor of `length` tokens, as slices."""
    start = 0
    while start < length:
        stop = min(start + size - (position + start) % size, length)
        yield slice(start, stop)
        start = stop


def traces(
    model: CausalModel,
    tokens: Tensor,
    state: State | None = None,
    *,
    mask: Tensor | None = None,
    offsets: Tensor | Sequence[int] | None = None,
    memory_mode: Mode | None = None,
    size: int | None = None,
) -> Iterator[tuple[slice, Trace]]:
    """Tokens ``[b t]`` in pieces, for who wants to see what each token did: the piece's slice of the tokens, and its
    trace.
    """
    # Packed documents are read in one call.
    size = (size or PIECE) if offsets is None else max(1, tokens.shape[1])
    for part in piece_slices(tokens.shape[1], size):
        here = None if mask is None else mask[:, part]
        with threads_for(model):  # and not while the caller works on what is yielded
            trace = model.trace(tokens[:, part], state, mask=here, offsets=offsets, memory_mode=memory_mode)
        state = trace.state
        yield part, trace


class Read(NamedTuple):
    """What comes of reading: each row's last hidden vector ``[b d]``, the state, summed surprise and how many tokens
    had one, and whether any row's memory has diverged.
    """

    last: Tensor
    state: State
    surprise: float
    surprised: int
    diverged: bool


@torch.no_grad()
def read(
    model: CausalModel,
    tokens: Tensor,
    state: State | None = None,
    *,
    mask: Tensor | None = None,
    memory_mode: Mode | None = None,
) -> Read:
    """Read tokens ``[b t]`` of any length in pieces, without computing logits. The device is asked once, at the end."""
    with threads_for(model):
        return _read(model, tokens, state, mask, memory_mode or model.memory_mode)


def _read(model: CausalModel, tokens: Tensor, state: State | None, mask: Tensor | None, mode: Mode) -> Read:
    state = model.start(tokens.shape[0]) if state is None else state
    last = model.embed.weight.new_zeros(tokens.shape[0], model.config.dim)
    size, count = piece_of(model), 0
    surprises: list[Tensor] = []
    # One document is split where its position is a multiple of the piece's length; rows with a mask differ in position.
    position = positions_of(state.position)[0] if mask is None else 0
    for part in piece_slices(tokens.shape[1], size, position):
        some, here = tokens[:, part], None if mask is None else mask[:, part]
        graph = None if mask is not None else _captured(model, some, state, size, mode)
        if graph is not None:
            last, state, surprise = graph(some, state)
        else:
            seen = model.trace(some, state, mask=here, memory_mode=mode)
            state, surprise = seen.state, None if seen.surprise is None else seen.surprise.sum()
            last = seen.hidden[:, -1] if here is None else _last(seen.hidden, here, last)
        if surprise is not None:
            surprises.append(surprise)
            count += some.numel() if here is None else int(here.sum())
    *found, bad = torch.stack(
        [*[each.double() for each in surprises], state.diverged.any().double()]
    ).tolist()
    return Read(last, state, sum(found), count, bool(bad))


def _last(hidden: Tensor, mask: Tensor, before: Tensor) -> Tensor:
    """Each row's vector where its mask is true for the last time; what it was before where there is no such place."""
    place = (torch.arange(mask.shape[1], device=mask.device) * mask).argmax(1)
    return torch.where(
        mask.any(1, keepdim=True), hidden[torch.arange(len(place), device=place.device), place], before
    )


class Captured:
    """A whole piece as a CUDA graph, of rows that have read a window at least; states come and go as the
    caller's own.
    """

    def __init__(self, model: Model, tokens: Tensor, state: State) -> None:
        self.model, self.size = model, tokens.shape[1]
        self.tokens, fixed = tokens.clone(), state.map(torch.clone)
        # What the host knows of positions: that they are multiples of a piece, and that windows are full.
        self.state = fixed.at([self.size] * len(tokens))
        self.graph, (self.last, self.after, self.surprise) = capture(self._read, tokens.device)

    def _read(self) -> tuple[Tensor, State, Tensor | None]:
        seen = self.model.trace(self.tokens, self.state, memory_mode="on")
        surprise = seen.surprise
        return seen.hidden[:, -1], seen.state, None if surprise is None else surprise.sum()

    def __call__(self, tokens: Tensor, state: State) -> tuple[Tensor, State, Tensor | None]:
        self.tokens.copy_(tokens)
        copy_all(self.state.tensors(), state.tensors())
        self.graph.replay()
        after = self.after.map(torch.clone).at([place + self.size for place in positions_of(state.position)])
        return self.last.clone(), after, None if self.surprise is None else self.surprise.clone()


class _Counted(NamedTuple):
    """How many whole pieces a model has read, with weights that lie where they do, and the graph of them."""

    key: Any
    pieces: int
    graph: Captured | None


_COUNTED: WeakKeyDictionary[CausalModel, _Counted] = WeakKeyDictionary()


def _captured(model: CausalModel, tokens: Tensor, state: State, size: int, mode: Mode) -> Captured | None:
    """The graph that reads a piece, if it is a whole one and one of many; else None."""
    if not tokens.is_cuda or tokens.shape[1] != size or mode != "on" or _narrows(tokens):
        return None
    model = cast(Model, model)  # what can be captured has our own layers
    window = longest_window(model)
    if unsupported(model, size, True) is not None or window > size:
        return None
    if any(
        place < window or place % size for place in positions_of(state.position)
    ) or not model.backbone.remembers_all(state):
        return None
    places = [parameter.data_ptr() for parameter in model.parameters()]
    key = (len(tokens), model.schedule, modules_of(model)[1:], places)
    known = _COUNTED.get(model)
    count, graph = (known.pieces + 1, known.graph) if known is not None and known.key == key else (1, None)
    if graph is None and count > PATIENCE:
        graph = Captured(model, tokens, state)
    _COUNTED[model] = _Counted(key, count, graph)
    return graph


def _narrows(tokens: Tensor) -> bool:
    return torch.is_autocast_enabled(tokens.device.type)
