"""Reading a long text without computing logits: piece by piece, in constant memory.

On a GPU, a whole piece in the middle of a document is replayed as one captured CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from remanence.config import Mode
from remanence.inference.graphs import longest_window, unsupported
from remanence.inference.threads import threads_for
from remanence.model import CausalModel, Model, Schedule, State, Trace
from remanence.runtime.graphs import capture, copy_all
from remanence.runtime.module import modules_of
from remanence.runtime.positions import positions_of

PIECE = 2048
"""Number of tokens in one call when a long text is read. The text is split where the position in the document is a
multiple of it, so that an interrupted and resumed reading gives bit-identical results.
"""

GPU_PIECE = 8192
"""`PIECE` on a GPU."""

PIECES_BEFORE_CAPTURE = 2
"""Number of whole pieces read without a graph: capturing one takes as long as reading several pieces."""


def piece_size(model: CausalModel) -> int:
    """Number of tokens in one call when this model reads a long text."""
    return max(PIECE, GPU_PIECE) if model.embed.weight.device.type == "cuda" else PIECE


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
    """Forward passes over tokens ``[b t]`` in pieces: yields the slice of each piece and its trace."""
    # Packed documents are read in one call.
    size = (size or PIECE) if offsets is None else max(1, tokens.shape[1])
    for part in piece_slices(tokens.shape[1], size):
        here = None if mask is None else mask[:, part]
        with threads_for(model):  # not while the caller works between the pieces
            trace = model.trace(tokens[:, part], state, mask=here, offsets=offsets, memory_mode=memory_mode)
        state = trace.state
        yield part, trace


class ReadResult(NamedTuple):
    """The result of reading a text.

    last
        The hidden vector of the last token of each row ``[b d]``.
    state
        The state after the text.
    surprise, surprise_count
        The sum of the surprise over tokens, and the number of tokens in it.
    diverged
        Whether the memory of any row has diverged.
    """

    last: Tensor
    state: State
    surprise: float
    surprise_count: int
    diverged: bool


@torch.no_grad()
def read(
    model: CausalModel,
    tokens: Tensor,
    state: State | None = None,
    *,
    mask: Tensor | None = None,
    memory_mode: Mode | None = None,
) -> ReadResult:
    """Read tokens ``[b t]`` of any length in pieces, without logits. Synchronises with the device once, at the end."""
    with threads_for(model):
        return _read(model, tokens, state, mask, memory_mode or model.memory_mode)


def _read(
    model: CausalModel, tokens: Tensor, state: State | None, mask: Tensor | None, mode: Mode
) -> ReadResult:
    state = model.start(tokens.shape[0]) if state is None else state
    last = model.embed.weight.new_zeros(tokens.shape[0], model.config.dim)
    size, count = piece_size(model), 0
    surprises: list[Tensor] = []
    # One document is split where its position is a multiple of the piece's length; rows with a mask differ in position.
    position = positions_of(state.position)[0] if mask is None else 0
    for part in piece_slices(tokens.shape[1], size, position):
        some, here = tokens[:, part], None if mask is None else mask[:, part]
        graph = None if mask is not None else _captured_piece(model, some, state, size, mode)
        if graph is not None:
            last, state, surprise = graph(some, state)
        else:
            trace = model.trace(some, state, mask=here, memory_mode=mode)
            state, surprise = trace.state, None if trace.surprise is None else trace.surprise.sum()
            last = trace.hidden[:, -1] if here is None else _last(trace.hidden, here, last)
        if surprise is not None:
            surprises.append(surprise)
            count += some.numel() if here is None else int(here.sum())
    *found, bad = torch.stack(
        [*[surprise.double() for surprise in surprises], state.diverged.any().double()]
    ).tolist()
    return ReadResult(last, state, sum(found), count, bool(bad))


def _last(hidden: Tensor, mask: Tensor, before: Tensor) -> Tensor:
    """The hidden vector of the last unmasked token of each row; `before` for rows that are masked entirely."""
    place = (torch.arange(mask.shape[1], device=mask.device) * mask).argmax(1)
    return torch.where(
        mask.any(1, keepdim=True), hidden[torch.arange(len(place), device=place.device), place], before
    )


class CapturedPiece:
    """A whole piece as a CUDA graph, for rows whose attention windows are full. States are copied in and out."""

    def __init__(self, model: Model, tokens: Tensor, state: State) -> None:
        self.model, self.size = model, tokens.shape[1]
        self.tokens, fixed = tokens.clone(), state.map(torch.clone)
        # The host only knows that positions are multiples of a piece and that windows are full.
        self.state = fixed.at([self.size] * len(tokens))
        self.graph, (self.last, self.after, self.surprise) = capture(self._read, tokens.device)

    def _read(self) -> tuple[Tensor, State, Tensor | None]:
        trace = self.model.trace(self.tokens, self.state, memory_mode="on")
        surprise = trace.surprise
        return trace.hidden[:, -1], trace.state, None if surprise is None else surprise.sum()

    def __call__(self, tokens: Tensor, state: State) -> tuple[Tensor, State, Tensor | None]:
        self.tokens.copy_(tokens)
        copy_all(self.state.tensors(), state.tensors())
        self.graph.replay()
        after = self.after.map(torch.clone).at([place + self.size for place in positions_of(state.position)])
        return self.last.clone(), after, None if self.surprise is None else self.surprise.clone()


_CaptureKey = tuple[int, Schedule, list[nn.Module], list[int]]
"""Batch size, schedule, modules, and addresses of the weights."""


class _Capture(NamedTuple):
    """The number of whole pieces that a model has read with the same weights in the same place, and its graph."""

    key: _CaptureKey
    pieces: int
    graph: CapturedPiece | None


_CAPTURES: WeakKeyDictionary[CausalModel, _Capture] = WeakKeyDictionary()


def _captured_piece(
    model: CausalModel, tokens: Tensor, state: State, size: int, mode: Mode
) -> CapturedPiece | None:
    """The graph that reads a whole piece, once enough pieces have been read; else None."""
    if not tokens.is_cuda or tokens.shape[1] != size or mode != "on" or _uses_autocast(tokens):
        return None
    model = cast(Model, model)  # only its layers can be captured
    window = longest_window(model)
    if unsupported(model, size, True) is not None or window > size:
        return None
    if any(
        place < window or place % size for place in positions_of(state.position)
    ) or not model.backbone.remembers_all(state):
        return None
    places = [parameter.data_ptr() for parameter in model.parameters()]
    key = (len(tokens), model.schedule, modules_of(model)[1:], places)
    known = _CAPTURES.get(model)
    count, graph = (known.pieces + 1, known.graph) if known is not None and known.key == key else (1, None)
    if graph is None and count > PIECES_BEFORE_CAPTURE:
        graph = CapturedPiece(model, tokens, state)
    _CAPTURES[model] = _Capture(key, count, graph)
    return graph


def _uses_autocast(tokens: Tensor) -> bool:
    return torch.is_autocast_enabled(tokens.device.type)
