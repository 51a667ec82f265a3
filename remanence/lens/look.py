"""What a model's memories do with a text, token by token, while it is read. The text may be of any length."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf, nan
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from remanence.inference.reader import PIECE
from remanence.inference.session import Session
from remanence.inference.threads import threads_for
from remanence.layers import unit
from remanence.memory.neural import NeuralMemory
from remanence.mixers import MemoryTrace
from remanence.model import CausalModel, Model, State, memories
from remanence.ops import current_weights
from remanence.runtime.errors import DivergedError

SIGNALS = ("surprise", "step", "momentum", "forget")
"""What is recorded of each token and memory, as the mean over heads: inner loss, step size, momentum, forget gate."""

TOP = 3
"""How many of the best matches are shown for each token, memory and head."""

REACH = 8_192
"""How many tokens back a token's matches are looked for."""

FARTHEST = 2**16 - 1  # a match is written as a distance in two bytes
PACKED = {
    "xz": rb"\xfd7zXZ\0",
    "gzip": rb"\x1f\x8b\x08",
    "bzip2": rb"BZh[1-9]1AY&SY",
    "zstd": rb"\x28\xb5\x2f\xfd",
}
"""How compressed files begin, by their kind."""
POINTS = 256  # about so many norms are taken along a text
ROWS, BLOCK = 64, 64  # answers that are compared at a time; values whose best is found first
NONE = -2.0  # below every cosine


class Look(NamedTuple):
    """What was recorded of some tokens.

    signals
        ``[t l 4]``, `SIGNALS` by token and memory; NaN where a memory has no such gate.
    keep
        ``[t l h]``: the logarithm of the share that each head kept at a token, 1 - forget; NaN without a forget gate.
    distance, cosine
        ``[t l h k]``: how far back the earlier tokens lie whose values are most like what the memory answered here,
        and how alike they are; distance 0 where there is none.
    norm
        ``[l]``: the norm of each memory's weights after these tokens.
    passed
        How many tokens of the document have been read.
    """

    tokens: list[int]
    signals: Float[Tensor, "t l signals"]
    keep: Float[Tensor, "t l h"]
    distance: Int[Tensor, "t l h k"]
    cosine: Float[Tensor, "t l h k"]
    norm: Float[Tensor, " l"]
    passed: int


def watched(model: CausalModel, only: Sequence[int] = ()) -> dict[int, NeuralMemory]:
    """The model's memories by layer, counted from 0; of all layers, or `only` of some."""
    if not isinstance(model, Model):
        raise ValueError(
            "model: expected one of ours, got one attached to a pretrained model, whose layers are not ours"
        )
    parts = ((index, part) for index, block in enumerate(model.blocks) for part in block.modules())
    found = {index: part for index, part in parts if isinstance(part, NeuralMemory)}
    if not found:
        blocks = " ".join(model.config.pattern)
        raise ValueError(f"model: expected one with a neural memory, got the blocks {blocks}")
    for index in only:
        if index not in found:
            numbers = ", ".join(str(layer + 1) for layer in found)
            raise ValueError(f"--layers: expected layers with a memory ({numbers}), got {index + 1}")
    return {index: layer for index, layer in found.items() if index in only or not only}


def stride(model: CausalModel, tokens: int) -> int:
    """Tokens to read at a time, in full chunks, so that a text of about `tokens` has enough points for its norms."""
    chunk = model.config.memory.chunk
    return min(max(1, PIECE // chunk), -(-tokens // (POINTS * chunk)) or 1) * chunk


def surprise_unit(model: CausalModel) -> str:
    """What surprise is, for who reads its mean: the loss of the memory's rule, and over how many numbers it sums."""
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
def norms(layers: Mapping[int, NeuralMemory], state: State) -> Float[Tensor, " l"]:
    """The norm of each memory's weights, of all its heads together, after all that was read."""
    found = []
    for index, layer in layers.items():
        weights = current_weights(memories(state.blocks[index])[0], net=layer.net, rule=layer.rule)
        found.append(torch.cat([weight.float().flatten() for weight in weights]).norm())
    return torch.stack(found).cpu()


@torch.no_grad()
def look(
    session: Session,
    source: Iterable[str | bytes],
    step: int,
    reach: int = REACH,
    only: Sequence[int] = (),
    most: int | None = None,
) -> Iterator[Look]:
    """Read a text, or its first `most` tokens, into the session, `step` tokens at a time, and record the memories of
    all layers, or `only` of some.

    The session is then at the end of what was read.
    """
    if not 1 <= reach <= FARTHEST:
        raise ValueError(f"--reach: expected from 1 to {FARTHEST:,} tokens, got {reach}")
    layers = watched(session.model, only)
    past = [Past(layer.heads, layer.head_dim, reach, session.model.embed.weight) for layer in layers.values()]
    pending: list[int] = []
    left = inf if most is None else most
    for tokens in session.tokenizer.stream(_plain(source)):
        taken = tokens[: int(min(left, len(tokens)))]
        pending, left = pending + taken, left - len(taken)
        while len(pending) >= step:
            with threads_for(session.model):
                seen = _look(session, layers, past, pending[:step])
            yield seen
            pending = pending[step:]
        if not left:
            break
    if pending:
        with threads_for(session.model):
            seen = _look(session, layers, past, pending)
        yield seen


def _plain(source: Iterable[str | bytes]) -> Iterator[str | bytes]:
    """The source, refused if it is a compressed file: its bytes are no text."""
    for number, piece in enumerate(source):
        begin = piece[:16] if number == 0 and isinstance(piece, bytes) else b""
        for kind, sign in PACKED.items():
            if re.match(sign, begin):
                raise ValueError(f"--text: expected a plain text, got one packed as {kind}; unpack it first")
        yield piece


def _look(session: Session, layers: dict[int, NeuralMemory], past: list[Past], tokens: list[int]) -> Look:
    model, before = session.model, session.tokens
    inputs = torch.tensor([tokens], device=model.embed.weight.device)
    with _watching(layers.values()) as shown:
        trace = model.trace(inputs, session.state, memory_mode="on")
    if bool(trace.state.diverged.any()):
        raise DivergedError(
            f"memory: expected finite numbers, got a memory that diverged near token {before:,}"
        )
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
    """Every memory's values and answers, call by call: MAC makes one call for each segment."""
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
    parts = seen.surprise, seen.gates.log_step.exp(), momentum, forget
    return torch.stack([part[0].mean(-1).float() for part in parts], -1)


def _keep(seen: MemoryTrace) -> Float[Tensor, "t h"]:
    log_keep = seen.gates.log_keep
    return (torch.full_like(seen.surprise, nan) if log_keep is None else log_keep)[0].float()


Values = Float[Tensor, "t h e"]


class Past:
    """The values that were written to one memory in the last `reach` tokens, normalized; older ones are dropped."""

    def __init__(self, heads: int, width: int, reach: int, like: Tensor) -> None:
        self.reach = reach
        self.values = like.new_zeros(heads, 0, width, dtype=torch.float32)

    def compare(self, values: Values, answers: Values) -> tuple[Tensor, Tensor]:
        """The best matches of each answer among the values before its own; these values are then added."""
        both = torch.cat([self.values, unit(values.float()).transpose(0, 1)], 1)
        found = matches(unit(answers.float()).transpose(0, 1), both, self.reach)
        self.values = both[:, -self.reach :]
        return found


def matches(
    answers: Float[Tensor, "h t e"], values: Float[Tensor, "h n e"], reach: int, top: int = TOP
) -> tuple[Int[Tensor, "t h k"], Float[Tensor, "t h k"]]:
    """For each answer the values most like it, as distance and cosine, best first. All vectors are normalized.

    The answers belong to the last t values, and each looks at `reach` values before its own. The best value of every
    block is found first: the best of all lie in the blocks whose best are best, and few numbers are left to sort.
    """
    first = values.shape[1] - answers.shape[1]
    # Blocks are counted from the end and may begin before the text.
    padded = torch.nn.functional.pad(values, (0, 0, top * BLOCK, 0))
    distances, cosines = [], []
    for start in range(0, answers.shape[1], ROWS):
        part = answers[:, start : start + ROWS]
        # The index of each answer's own value.
        own = first + start + torch.arange(part.shape[1], device=part.device).unsqueeze(-1)
        end = first + start + part.shape[1]
        blocks = max(top, -(-(end - max(0, first + start - reach)) // BLOCK))
        index = end - blocks * BLOCK + torch.arange(blocks * BLOCK, device=part.device)
        score = part @ padded[:, index[0] + top * BLOCK : end + top * BLOCK].mT
        # Between these edges every answer may look at every value.
        for edge in (slice(0, ROWS + top * BLOCK), slice(-ROWS, None)):
            at = index[edge]
            score[..., edge].masked_fill_((at >= own) | (at < own - reach) | (at < 0), NONE)
        best = score.unflatten(-1, (blocks, BLOCK)).amax(-1).topk(top, -1).indices.sort(-1).values
        among = (best.unsqueeze(-1) * BLOCK + torch.arange(BLOCK, device=part.device)).flatten(-2)
        cosine, chosen = score.gather(-1, among).topk(top, -1)
        distance = own - index[among.gather(-1, chosen)]
        distances.append(torch.where(cosine > NONE, distance, 0))
        cosines.append(torch.where(cosine > NONE, cosine, 0.0))
    return torch.cat(distances, 1).transpose(0, 1), torch.cat(cosines, 1).transpose(0, 1)
