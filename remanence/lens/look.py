"""What the memories of a model do with a text while it is read: token by token, in memory that does not grow with the text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import nan
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from remanence.core.errors import DivergedError
from remanence.inference.reader import PIECE
from remanence.inference.session import Session
from remanence.layers import unit
from remanence.memory.neural import NeuralMemory
from remanence.mixers import MemoryTrace
from remanence.model import Model, State, memories
from remanence.ops import settle

SIGNALS = ("surprise", "step", "momentum", "forget")
"""What is told of each token and memory, as the mean over heads: inner loss, step size, momentum, forget gate."""

KEPT = 3
"""Matches kept of each token, memory and head."""

REACH = 8_192
"""How many tokens back a token's matches are looked for."""

FARTHEST = 2**16 - 1  # a match is written as a distance in two bytes
PACKED = {"xz": rb"\xfd7zXZ\0", "gzip": rb"\x1f\x8b\x08", "bzip2": rb"BZh[1-9]1AY&SY", "zstd": rb"\x28\xb5\x2f\xfd"}
POINTS = 256  # about so many norms are taken along a text
ROWS, BLOCK = 64, 64  # answers that are compared at a time; values whose best is found first
NONE = -2.0  # below every cosine


class Look(NamedTuple):
    """What was seen of some tokens.

    signals
        ``[t l 4]``, `SIGNALS` by token and memory; NaN where a memory has no such gate.
    keep
        ``[t l h]``: the logarithm of what each head kept of all it knew at a token, 1 - forget; NaN without a forget gate.
    distance, cosine
        ``[t l h k]``: how far back the earlier tokens lie whose values are most like what the memory answered here, and how
        alike they are; distance 0 where there is none.
    norm
        ``[l]``: the length of each memory's weights after these tokens.
    passed
        How many tokens the document has now.
    """

    tokens: list[int]
    signals: Float[Tensor, "t l signals"]
    keep: Float[Tensor, "t l h"]
    distance: Int[Tensor, "t l h k"]
    cosine: Float[Tensor, "t l h k"]
    norm: Float[Tensor, " l"]
    passed: int


def watched(model: Model, only: Sequence[int] = ()) -> dict[int, NeuralMemory]:
    """The model's memories, by the number of their layer from 0 on; of all layers, or `only` of some."""
    parts = ((index, part) for index, block in enumerate(model.blocks) for part in block.modules())
    found = {index: part for index, part in parts if isinstance(part, NeuralMemory)}
    if not found:
        raise ValueError(f"model: expected one with a neural memory, got the blocks {' '.join(model.config.pattern)}")
    for index in only:
        if index not in found:
            known = ", ".join(str(layer + 1) for layer in found)
            raise ValueError(f"--layers: expected layers with a memory ({known}), got {index + 1}")
    return {index: layer for index, layer in found.items() if index in only or not only}


def stride(model: Model, tokens: int) -> int:
    """Tokens read at a time: whole chunks, so many that a text of about `tokens` gives enough points for its norms."""
    chunk = model.config.memory.chunk
    return min(max(1, PIECE // chunk), -(-tokens // (POINTS * chunk)) or 1) * chunk


@torch.no_grad()
def norms(layers: Mapping[int, NeuralMemory], state: State) -> Float[Tensor, " l"]:
    """The length of each memory's weights, of all its heads together, after all that was read."""
    held = {index: memories(state.blocks[index])[0] for index in layers}
    weights = [settle(held[index], net=layer.net, rule=layer.rule) for index, layer in layers.items()]
    return torch.stack([torch.cat([weight.float().flatten() for weight in each]).norm() for each in weights]).cpu()


@torch.no_grad()
def look(
    session: Session, source: Iterable[str | bytes], step: int, reach: int = REACH, only: Sequence[int] = ()
) -> Iterator[Look]:
    """Read a text on from where the session stands, `step` tokens at a time, and tell of the memories of all layers, or of some.

    The session is then where the text ends.
    """
    if not 1 <= reach <= FARTHEST:
        raise ValueError(f"--reach: expected from 1 to {FARTHEST:,} tokens, got {reach}")
    layers = watched(session.model, only)
    past = [Past(layer.heads, layer.head_dim, reach, session.model.embed.weight) for layer in layers.values()]
    held: list[int] = []
    for tokens in session.tokenizer.stream(_plain(source)):
        held += tokens
        while len(held) >= step:
            yield _look(session, layers, past, held[:step])
            held = held[step:]
    if held:
        yield _look(session, layers, past, held)


def _plain(source: Iterable[str | bytes]) -> Iterator[str | bytes]:
    """The source, refused if it is a packed file: its bytes are no text."""
    for number, piece in enumerate(source):
        begin = piece[:16] if number == 0 and isinstance(piece, bytes) else b""
        for kind, sign in PACKED.items():
            if re.match(sign, begin):
                raise ValueError(f"--text: expected a plain text, got one packed as {kind}; unpack it first")
        yield piece


def _look(session: Session, layers: dict[int, NeuralMemory], past: list[Past], tokens: list[int]) -> Look:
    model, before = session.model, session.tokens
    with _watching(layers.values()) as shown:
        trace = model.trace(torch.tensor([tokens], device=model.embed.weight.device), session.state, memory="on")
    if bool(trace.state.diverged.any()):
        raise DivergedError(f"memory: expected finite numbers, got a memory that diverged near token {before:,}")
    session.state = trace.state
    found = []
    for each, calls in zip(past, shown, strict=True):
        values, answers = (torch.cat(parts, 1)[0] for parts in zip(*calls, strict=True))
        found.append(each.compare(values, answers))
    shown_layers = [seen for index, seen in enumerate(trace.traces) if seen is not None and index in layers]
    return Look(
        tokens,
        torch.stack([_signals(seen) for seen in shown_layers], 1).cpu(),
        torch.stack([_keep(seen) for seen in shown_layers], 1).cpu(),
        torch.stack([distance for distance, _ in found], 1).cpu(),
        torch.stack([cosine for _, cosine in found], 1).cpu(),
        norms(layers, trace.state),
        session.tokens,
    )


@contextmanager
def _watching(layers: Iterable[NeuralMemory]) -> Iterator[list[list[tuple[Tensor, Tensor]]]]:
    """Every memory's values and answers, call by call: MAC makes one for each segment."""
    layers = list(layers)
    shown: list[list[tuple[Tensor, Tensor]]] = [[] for _ in layers]
    try:
        for layer, calls in zip(layers, shown, strict=True):
            layer.watch = lambda values, answers, calls=calls: calls.append((values, answers))
        yield shown
    finally:
        for layer in layers:
            layer.watch = None


def _signals(seen: MemoryTrace) -> Float[Tensor, "t signals"]:
    nothing = torch.full_like(seen.surprise, nan)
    momentum = nothing if seen.gates.log_momentum is None else seen.gates.log_momentum.exp()
    forget = nothing if seen.gates.log_keep is None else -seen.gates.log_keep.expm1()
    return torch.stack([part[0].mean(-1).float() for part in (seen.surprise, seen.gates.log_step.exp(), momentum, forget)], -1)


def _keep(seen: MemoryTrace) -> Float[Tensor, "t h"]:
    kept = seen.gates.log_keep
    return (torch.full_like(seen.surprise, nan) if kept is None else kept)[0].float()


class Past:
    """What one memory was told in the last `reach` tokens, each value at length one; nothing older is kept."""

    def __init__(self, heads: int, width: int, reach: int, like: Tensor) -> None:
        self.reach = reach
        self.values = like.new_zeros(heads, 0, width, dtype=torch.float32)

    def compare(self, values: Float[Tensor, "t h e"], answers: Float[Tensor, "t h e"]) -> tuple[Tensor, Tensor]:
        """The best matches of each answer among the values before its own; these values then belong to the past."""
        known = torch.cat([self.values, unit(values.float()).transpose(0, 1)], 1)
        found = matches(unit(answers.float()).transpose(0, 1), known, self.reach)
        self.values = known[:, -self.reach :]
        return found


def matches(
    answers: Float[Tensor, "h t e"], values: Float[Tensor, "h n e"], reach: int, kept: int = KEPT
) -> tuple[Int[Tensor, "t h k"], Float[Tensor, "t h k"]]:
    """For each answer the values most like it, as distance and cosine, best first. Vectors of length one.

    The answers belong to the last t values, and each looks at the `reach` before its own. The best of every block of values is
    found first: the best of all lie in the blocks whose best are best, and few numbers are left to sort.
    """
    first = values.shape[1] - answers.shape[1]
    padded = torch.nn.functional.pad(
        values, (0, 0, kept * BLOCK, 0)
    )  # blocks are counted from behind and may begin before the text
    distances, cosines = [], []
    for start in range(0, answers.shape[1], ROWS):
        part = answers[:, start : start + ROWS]
        own = first + start + torch.arange(part.shape[1], device=part.device).unsqueeze(-1)  # where each answer's value stands
        end = first + start + part.shape[1]
        blocks = max(kept, -(-(end - max(0, first + start - reach)) // BLOCK))
        place = end - blocks * BLOCK + torch.arange(blocks * BLOCK, device=part.device)
        score = part @ padded[:, place[0] + kept * BLOCK : end + kept * BLOCK].mT
        for edge in (slice(0, ROWS + kept * BLOCK), slice(-ROWS, None)):  # in between, every answer may look at every value
            at = place[edge]
            score[..., edge].masked_fill_((at >= own) | (at < own - reach) | (at < 0), NONE)
        best = score.unflatten(-1, (blocks, BLOCK)).amax(-1).topk(kept, -1).indices.sort(-1).values
        among = (best.unsqueeze(-1) * BLOCK + torch.arange(BLOCK, device=part.device)).flatten(-2)
        cosine, chosen = score.gather(-1, among).topk(kept, -1)
        distance = own - place[among.gather(-1, chosen)]
        distances.append(torch.where(cosine > NONE, distance, 0))
        cosines.append(torch.where(cosine > NONE, cosine, 0.0))
    return torch.cat(distances, 1).transpose(0, 1), torch.cat(cosines, 1).transpose(0, 1)
