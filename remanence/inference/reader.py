"""Reading a long text without computing logits: piece by piece, in constant memory.

On a GPU, a whole piece in the middle of a document is replayed as one captured CUDA graph.
"""

from __future__ import annotations

import threading
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
"""`PIECE` for a model on a GPU."""

PIECES_BEFORE_CAPTURE = 2
"""Number of whole pieces read without a graph: capturing one takes as long as reading several pieces."""


def piece_size(model: CausalModel) -> int:
    """Return the number of tokens in one call when this model reads a long text."""
    return max(PIECE, GPU_PIECE) if model.embed.weight.device.type == "cuda" else PIECE


def token_pieces(
    lists: Iterable[Sequence[int]], size: int, position: int = 0, overlap: int = 0
) -> Iterator[list[int]]:
    """Yield the tokens of a document, given as lists of any lengths, in pieces of `size` tokens.

    A piece ends where the position in the document is a multiple of `size`; the first token is at `position`. The first
    and last pieces may be shorter. With `overlap`, every piece also contains the first `overlap` tokens of
    the next one.
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
    """Yield the slices that split `length` tokens, the first of them at `position`, as `token_pieces` does."""
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
    """Run the model over tokens ``[b t]`` in pieces of `size` tokens, and yield the slice and the trace of
    each piece.
    """
    # Packed documents are read in one call.
    size = (size or PIECE) if offsets is None else max(1, tokens.shape[1])
    for part in piece_slices(tokens.shape[1], size):
        here = None if mask is None else mask[:, part]
        with threads_for(model):  # the setting must not apply while the caller processes a piece
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
    model: CausalModel, tokens: Tensor, state: State | None, mask: Tensor | None, memory_mode: Mode
) -> ReadResult:
    """Read tokens in pieces; see `read`."""
    state = model.start(tokens.shape[0]) if state is None else state
    last = model.embed.weight.new_zeros(tokens.shape[0], model.config.dim)
    size, count = piece_size(model), 0
    surprises: list[Tensor] = []
    # Without a mask, all rows are split where the position is a multiple of the piece; with one, positions differ.
    position = positions_of(state.position)[0] if mask is None else 0
    for part in piece_slices(tokens.shape[1], size, position):
        some, here = tokens[:, part], None if mask is None else mask[:, part]
        graph = None if mask is not None else _captured_piece(model, some, state, size, memory_mode)
        if graph is not None:
            last, state, surprise = graph(some, state)
        else:
            trace = model.trace(some, state, mask=here, memory_mode=memory_mode)
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
    """Return the hidden vector of the last unmasked token of each row ``[b d]``; that in `before` for rows
    without one.
    """
    place = (torch.arange(mask.shape[1], device=mask.device) * mask).argmax(1)
    return torch.where(
        mask.any(1, keepdim=True), hidden[torch.arange(len(place), device=place.device), place], before
    )


class CapturedPiece:
    """A CUDA graph that reads one whole piece, for rows whose attention windows are full. Tokens and state
    are copied into its buffers, and results out of them.
    """

    def __init__(self, model: Model, tokens: Tensor, state: State) -> None:
        self.model, self.size = model, tokens.shape[1]
        self.tokens, fixed = tokens.clone(), state.map(torch.clone)
        # Positions known to the host become constants in the graph. This one represents all later ones: a multiple
        # of the piece, with full windows.
        self.state = fixed.at([self.size] * len(tokens))
        self.graph, (self.last, self.after, self.surprise) = capture(self._read, tokens.device)
        self.lock = threading.Lock()  # sessions in several threads share the buffers

    def _read(self) -> tuple[Tensor, State, Tensor | None]:
        """Read the piece in the buffers; returns the last hidden vectors, the state, and the sum of the
        surprise or None.
        """
        trace = self.model.trace(self.tokens, self.state, memory_mode="on")
        surprise = trace.surprise
        return trace.hidden[:, -1], trace.state, None if surprise is None else surprise.sum()

    def __call__(self, tokens: Tensor, state: State) -> tuple[Tensor, State, Tensor | None]:
        """Read a piece from a state; returns the last hidden vectors ``[b d]``, the new state, and the sum of
        the surprise (None if no memory was written).
        """
        places = [place + self.size for place in positions_of(state.position)]
        with self.lock:
            self.tokens.copy_(tokens)
            copy_all(self.state.tensors(), state.tensors())
            self.graph.replay()
            after = self.after.map(torch.clone).at(places)
            return self.last.clone(), after, None if self.surprise is None else self.surprise.clone()


_CaptureKey = tuple[int, Schedule, list[nn.Module], list[int]]
"""The values that a captured graph depends on: batch size, schedule, modules, and addresses of the weights."""


class _Capture(NamedTuple):
    """For one model: the key that the graph is valid for, the number of whole pieces read with that key, and
    the graph (None until it is captured).
    """

    key: _CaptureKey
    pieces: int
    graph: CapturedPiece | None


_CAPTURES: WeakKeyDictionary[CausalModel, _Capture] = WeakKeyDictionary()
"""The graph of each model, and the number of pieces that it has read."""


def _captured_piece(
    model: CausalModel, tokens: Tensor, state: State, size: int, memory_mode: Mode
) -> CapturedPiece | None:
    """Return the CUDA graph that reads this piece, capturing it once enough pieces have been read. None if
    the piece cannot be read with a graph, or not yet.
    """
    if not tokens.is_cuda or tokens.shape[1] != size or memory_mode != "on" or _uses_autocast(tokens):
        return None
    model = cast(Model, model)  # only models with our own layers can be captured
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
    """Whether autocast is enabled on the device of the tokens."""
    return torch.is_autocast_enabled(tokens.device.type)
