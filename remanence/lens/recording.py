"""Records what a model's memories do with each token of a text, which may have any length."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import nan
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from remanence.inference.reader import PIECE, token_pieces
from remanence.inference.session import Session
from remanence.inference.threads import threads_for
from remanence.layers import l2_normalize
from remanence.memory.neural import NeuralMemory
from remanence.memory.observation import observing_memories
from remanence.mixers import MemoryTrace
from remanence.model import CausalModel, Model, State, memories
from remanence.ops import current_weights
from remanence.runtime.errors import DivergedError

SIGNALS = ("surprise", "step", "momentum", "forget")
"""The numbers recorded for each token and memory, as means over heads: inner loss, step size, momentum,
forget gate.
"""

TOP = 3
"""Number of best matches that are recorded for each token, memory and head."""

REACH = 8_192
"""Default number of earlier tokens among which the matches of a token are searched."""

MAX_REACH = 2**16 - 1  # largest `reach`: a page stores the distance of a match in two bytes
COMPRESSED = {
    "xz": rb"\xfd7zXZ\0",
    "gzip": rb"\x1f\x8b\x08",
    "bzip2": rb"BZh[1-9]1AY&SY",
    "zstd": rb"\x28\xb5\x2f\xfd",
}
"""Regular expressions for the first bytes of compressed files, by format."""
POINTS = 256  # approximate number of weight norms recorded along a text
ROWS, BLOCK = 64, 64  # number of predictions compared at a time; number of values in a block
NONE = -2.0  # score of values that are not allowed as matches, below every cosine


class Recording(NamedTuple):
    """Measurements of all memories on one piece of a text: t tokens, l memories, h heads, k matches.

    signals
        ``[t l 4]``: `SIGNALS` by token and memory; NaN where a memory has no such gate.
    keep
        ``[t l h]``: log(1 - forget) of each head at each token; NaN without a forget gate.
    distance, cosine
        ``[t l h k]``: the distances to the earlier tokens whose values are most similar to the memory's prediction for
        this token, and the cosine similarities. The distance is 0 if there is no such token.
    norm
        ``[l]``: the norm of each memory's weights after these tokens.
    tokens_read
        Number of tokens of the document read so far.
    """

    tokens: list[int]
    signals: Float[Tensor, "t l signals"]
    keep: Float[Tensor, "t l h"]
    distance: Int[Tensor, "t l h k"]
    cosine: Float[Tensor, "t l h k"]
    norm: Float[Tensor, " l"]
    tokens_read: int


def memory_layers(model: CausalModel, layers: Sequence[int] = ()) -> dict[int, NeuralMemory]:
    """Return the neural memories of a model by layer index, counted from 0. With `only`, return just those of
    the given layers.
    """
    if not isinstance(model, Model):
        raise ValueError(
            "model: expected a remanence Model, got a memory attached to a pretrained model, whose layers are not ours"
        )
    parts = ((index, part) for index, block in enumerate(model.blocks) for part in block.modules())
    found = {index: part for index, part in parts if isinstance(part, NeuralMemory)}
    if not found:
        blocks = " ".join(model.config.pattern)
        raise ValueError(f"model: expected one with a neural memory, got the blocks {blocks}")
    for index in layers:
        if index not in found:
            numbers = ", ".join(str(layer + 1) for layer in found)
            raise ValueError(f"--layers: expected layers with a memory ({numbers}), got {index + 1}")
    return {index: layer for index, layer in found.items() if index in layers or not layers}


def piece_length(model: CausalModel, tokens: int) -> int:
    """Return the number of tokens to read at a time, a multiple of the chunk. A text of `tokens` tokens then
    has about `POINTS` pieces, and weight norms are recorded after each.
    """
    chunk = model.config.memory.chunk
    return min(max(1, PIECE // chunk), -(-tokens // (POINTS * chunk)) or 1) * chunk


def describe_surprise(model: CausalModel) -> str:
    """Return a phrase that explains the number reported as surprise for this model: the loss of its memories'
    rule, and over how many dimensions it is summed.
    """
    found = {
        (layer.rule.loss, layer.head_dim) for layer in model.modules() if isinstance(layer, NeuralMemory)
    }
    loss, dim = found.pop() if len(found) == 1 else (None, 0)
    if loss == "squared":
        return (
            f"half of the squared error of the memory's answer, summed over the {dim} dimensions of a value"
        )
    return "the loss of the memory's rule on each token, before it is written"


@torch.no_grad()
def weight_norms(layers: Mapping[int, NeuralMemory], state: State) -> Float[Tensor, " l"]:
    """Return the norm of each memory's current weights, over all its heads ``[l]``."""
    found = []
    for index, layer in layers.items():
        weights = current_weights(memories(state.blocks[index])[0], net=layer.net, rule=layer.rule)
        found.append(torch.cat([weight.float().flatten() for weight in weights]).norm())
    return torch.stack(found).cpu()


@torch.no_grad()
def record(
    session: Session,
    source: Iterable[str | bytes],
    step: int,
    reach: int = REACH,
    layers: Sequence[int] = (),
    max_tokens: int | None = None,
) -> Iterator[Recording]:
    """Read a text into a session and yield a `Recording` for every `step` tokens.

    Args:
        session: reads the text; afterwards its state is that after the text.
        source: the text, in strings or bytes of any length.
        step: number of tokens in a piece.
        reach: number of earlier tokens among which the matches of a token are searched.
        layers: indices of the layers to record, counted from 0; by default all layers that have a memory.
        max_tokens: largest number of tokens to read. None means the whole text.
    """
    if not 1 <= reach <= MAX_REACH:
        raise ValueError(f"--reach: expected from 1 to {MAX_REACH:,} tokens, got {reach}")
    memories = memory_layers(session.model, layers)
    histories = [
        ValueHistory(layer.heads, layer.head_dim, reach, session.model.embed.weight)
        for layer in memories.values()
    ]
    lists = _first_tokens(session.tokenizer.stream(_refuse_compressed(source)), max_tokens)
    for tokens in token_pieces(lists, step):
        with threads_for(session.model):  # the setting must not apply while the caller processes a recording
            recording = _record_piece(session, memories, histories, tokens)
        yield recording


def _first_tokens(lists: Iterable[list[int]], count: int | None) -> Iterator[list[int]]:
    """Yield the lists of tokens, cut off after `count` tokens in all. None means no limit."""
    for tokens in lists:
        if count is None:
            yield tokens
            continue
        yield tokens[:count]
        count -= len(tokens)
        if count <= 0:
            return


def _refuse_compressed(source: Iterable[str | bytes]) -> Iterator[str | bytes]:
    """Yield the parts of a source. Raises an error if its first bytes are those of a compressed file."""
    for number, piece in enumerate(source):
        first = piece[:16] if number == 0 and isinstance(piece, bytes) else b""
        for kind, signature in COMPRESSED.items():
            if re.match(signature, first):
                raise ValueError(f"--text: expected plain text, got a {kind} file; decompress it first")
        yield piece


def _record_piece(
    session: Session, layers: dict[int, NeuralMemory], histories: list[ValueHistory], tokens: list[int]
) -> Recording:
    """Read one piece of tokens, update the session's state, and return what the memories did."""
    model, before = session.model, session.tokens
    inputs = torch.tensor([tokens], device=model.embed.weight.device)
    calls: dict[NeuralMemory, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in layers.values()}

    def keep_call(layer: NeuralMemory, values: Tensor, predictions: Tensor) -> None:
        if layer in calls:
            calls[layer].append((values, predictions))

    with observing_memories(keep_call):
        trace = model.trace(inputs, session.state, memory_mode="on")
    if bool(trace.state.diverged.any()):
        raise DivergedError(
            f"memory: expected finite numbers, got a memory that diverged near token {before:,}"
        )
    session.state = trace.state
    matches = []
    for history, pairs in zip(histories, calls.values(), strict=True):
        values, predictions = (torch.cat(parts, 1)[0] for parts in zip(*pairs, strict=True))
        matches.append(history.match(values, predictions))
    traces = [part for index, part in enumerate(trace.traces) if part is not None and index in layers]
    return Recording(
        tokens,
        torch.stack([_signals(part) for part in traces], 1).cpu(),
        torch.stack([_log_keep(part) for part in traces], 1).cpu(),
        torch.stack([distance for distance, _ in matches], 1).cpu(),
        torch.stack([cosine for _, cosine in matches], 1).cpu(),
        weight_norms(layers, trace.state),
        session.tokens,
    )


def _signals(trace: MemoryTrace) -> Float[Tensor, "t signals"]:
    """Return the `SIGNALS` of one memory for each token, averaged over heads; NaN for a gate that the memory
    does not have.
    """
    nothing = torch.full_like(trace.surprise, nan)
    momentum = nothing if trace.gates.log_momentum is None else trace.gates.log_momentum.exp()
    forget = nothing if trace.gates.log_keep is None else -trace.gates.log_keep.expm1()
    parts = trace.surprise, trace.gates.log_step.exp(), momentum, forget
    return torch.stack([part[0].mean(-1).float() for part in parts], -1)


def _log_keep(trace: MemoryTrace) -> Float[Tensor, "t h"]:
    """Return log(1 - forget) of each token and head of one memory; NaN if it has no forget gate."""
    log_keep = trace.gates.log_keep
    return (torch.full_like(trace.surprise, nan) if log_keep is None else log_keep)[0].float()


Values = Float[Tensor, "t h e"]
"""Value vectors of a memory, by token and head."""


class ValueHistory:
    """The normalized values that one memory stored during the last `reach` tokens."""

    def __init__(self, heads: int, width: int, reach: int, like: Tensor) -> None:
        self.reach = reach
        self.values = like.new_zeros(heads, 0, width, dtype=torch.float32)

    def match(self, values: Values, predictions: Values) -> tuple[Tensor, Tensor]:
        """Return the distances and cosines ``[t h k]`` of the best matches of each prediction among earlier
        values, and append `values` to the history.
        """
        both = torch.cat([self.values, l2_normalize(values.float()).transpose(0, 1)], 1)
        found = nearest_values(l2_normalize(predictions.float()).transpose(0, 1), both, self.reach)
        self.values = both[:, -self.reach :]
        return found


def nearest_values(
    predictions: Float[Tensor, "h t e"], values: Float[Tensor, "h n e"], reach: int, top: int = TOP
) -> tuple[Int[Tensor, "t h k"], Float[Tensor, "t h k"]]:
    """Find the `top` most similar earlier values of each prediction; return their distances and cosines, best first.

    All vectors are normalized. The predictions belong to the last t values; each is compared with the `reach` values
    before its own. The maximum of every block is computed first. The best values are in the blocks with the largest
    maxima, so that only those few blocks are searched.
    """
    first = values.shape[1] - predictions.shape[1]
    # Blocks are counted from the end, so the first block may begin before the text.
    padded = torch.nn.functional.pad(values, (0, 0, top * BLOCK, 0))
    distances, cosines = [], []
    for start in range(0, predictions.shape[1], ROWS):
        part = predictions[:, start : start + ROWS]
        # The index of the value that belongs to each prediction.
        current = first + start + torch.arange(part.shape[1], device=part.device).unsqueeze(-1)
        end = first + start + part.shape[1]
        blocks = max(top, -(-(end - max(0, first + start - reach)) // BLOCK))
        index = end - blocks * BLOCK + torch.arange(blocks * BLOCK, device=part.device)
        score = part @ padded[:, index[0] + top * BLOCK : end + top * BLOCK].mT
        # Between these two edges, every value is within reach of every prediction, so only the edges need a mask.
        for edge in (slice(0, ROWS + top * BLOCK), slice(-ROWS, None)):
            at = index[edge]
            score[..., edge].masked_fill_((at >= current) | (at < current - reach) | (at < 0), NONE)
        best = score.unflatten(-1, (blocks, BLOCK)).amax(-1).topk(top, -1).indices.sort(-1).values
        among = (best.unsqueeze(-1) * BLOCK + torch.arange(BLOCK, device=part.device)).flatten(-2)
        cosine, chosen = score.gather(-1, among).topk(top, -1)
        distance = current - index[among.gather(-1, chosen)]
        distances.append(torch.where(cosine > NONE, distance, 0))
        cosines.append(torch.where(cosine > NONE, cosine, 0.0))
    return torch.cat(distances, 1).transpose(0, 1), torch.cat(cosines, 1).transpose(0, 1)
