"""What a layer can be, on one page: attention, the neural memory alone, and Titans' three ways to have both.

A mixer is called as ``y, state, seen = mixer(x, state, offsets, mode)``: x ``[b t d]`` normalised, or packed documents with their
borders; `seen` is what can be told of its memory, or None. kNN layers are given an `Aside`, too. A new idea is an entry of
`BLOCKS`: anything that makes such a module, with ``start(rows)`` and the kind of its `state`, from a `ModelConfig`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from remanence.config import Mode, ModelConfig, known
from remanence.core.state import TensorTuple, aligned, places, take_back, where
from remanence.layers import RMSNorm, SwiGLU, operand
from remanence.layers.attention import Attention, AttentionState, SegmentAttention, SegmentState
from remanence.memory.neural import NeuralMemory, NeuralMemoryState
from remanence.mixers.knn import Aside, Knn
from remanence.ops import Gates
from remanence.ops.state import Weights
from remanence.ops.triton import layer


class Seen(NamedTuple):
    """What a memory did with each token and head: its surprise, and the log gates ``[b t h]``."""

    surprise: Tensor
    gates: Gates

    @classmethod
    def mapped(cls, seen: Seen | None, function: Callable[[Tensor], Tensor]) -> Seen | None:
        return seen and cls(function(seen.surprise), seen.gates.map(function))

    @classmethod
    def join(cls, noted: Sequence[Seen | None], joined: Callable[[list[Tensor]], Tensor] | None = None) -> Seen | None:
        """Of the pieces of a call, that of the whole."""
        if joined is None:
            joined = lambda pieces: torch.cat(pieces, 1)
        present = [seen for seen in noted if seen is not None]
        if len(present) < len(noted):
            return None
        columns = zip(*[seen.gates for seen in present], strict=True)
        gates = [None if column[0] is None else joined(list(column)) for column in columns]
        return cls(joined([seen.surprise for seen in present]), Gates._make(gates))


class Passed(NamedTuple):
    """What comes out of a mixer or a block."""

    y: Tensor
    state: Any
    seen: Seen | None


class Softmax(nn.Module):
    """Attention alone: over everything (Transformer++), or over a sliding window."""

    state = AttentionState

    def __init__(self, config: ModelConfig, sliding: bool) -> None:
        super().__init__()
        self.attention = attention_of(config) if sliding else Attention(config.dim, config.heads, None, 0, config.rotary)

    def start(self, rows: int) -> AttentionState:
        return self.attention.start(rows)

    def forward(self, x: Tensor, state: AttentionState | None, offsets: list[int] | None, mode: Mode) -> Passed:
        y, state = self.attention(x, state, offsets)
        return Passed(y, state, None)


class LMM(nn.Module):
    """The neural memory alone."""

    state = NeuralMemoryState

    def __init__(self, config: ModelConfig, **changes: Any) -> None:
        super().__init__()
        self.memory = Memory(config, **changes)

    def start(self, rows: int) -> NeuralMemoryState:
        return self.memory.start(rows)

    def forward(self, x: Tensor, state: NeuralMemoryState | None, offsets: list[int] | None, mode: Mode) -> Passed:
        return self.memory(x, state, offsets, mode)


class _BothState(NamedTuple):
    attention: AttentionState
    memory: NeuralMemoryState


class BothState(_BothState, TensorTuple):
    """Of a layer with a sliding window and a memory."""

    __slots__ = ()

    def crop(self, tokens: int) -> BothState:
        return BothState(self.attention.crop(tokens), self.memory.crop(tokens))


class Both(nn.Module):
    """What MAG and MAL share: a sliding window and a memory, each with its own state."""

    state = BothState

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = attention_of(config)
        self.memory = Memory(config)

    def start(self, rows: int) -> BothState:
        return BothState(self.attention.start(rows), self.memory.start(rows))


class MAG(Both):
    """Memory as a gate (eqs 26-28): sliding attention and memory see the same input, and a gate joins them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.join = Join(config.dim)

    def forward(self, x: Tensor, state: BothState | None, offsets: list[int] | None, mode: Mode) -> Passed:
        y, window = self.attention(x, state and state.attention, offsets)
        m, memory, seen = self.memory(x, state and state.memory, offsets, mode)
        return Passed(self.join(y, m), BothState(window, memory), seen)


class MAL(Both):
    """Memory as a layer (eqs 29-31): the memory's answer joins the input, and sliding attention works on that."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.norm = RMSNorm(config.dim)

    def forward(self, x: Tensor, state: BothState | None, offsets: list[int] | None, mode: Mode) -> Passed:
        m, memory, seen = self.memory(x, state and state.memory, offsets, mode)
        y, window = self.attention(self.norm(x + m), state and state.attention, offsets)
        return Passed(y, BothState(window, memory), seen)


class _MACState(NamedTuple):
    memory: NeuralMemoryState
    weights: Weights
    asked: Tensor
    segment: SegmentState


class MACState(_MACState, TensorTuple):
    """The memory; its weights ``[r h ...]`` when the open segment began; the questions' own convolution history; the segment."""

    __slots__ = ()

    def crop(self, tokens: int) -> MACState:
        return MACState(self.memory.crop(tokens), self.weights, take_back(self.asked, tokens), self.segment.crop(tokens))


class MAC(nn.Module):
    """Memory as a context (eqs 21-25): what the memory knew when a segment began stands in front of the segment's attention,
    whose output is written to the memory and gated by what it then answers.

    One step per segment, because each needs the memory that the one before left.
    """

    state = MACState

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.size = config.segment
        self.memory = Memory(config)
        self.attention = SegmentAttention(config.dim, config.heads, config.segment, config.persistent, config.rotary)
        self.norm_retrieved, self.norm_written = RMSNorm(config.dim), RMSNorm(config.dim)
        self.join = Join(config.dim)

    def start(self, rows: int) -> MACState:
        memory = self.memory.start(rows)
        return MACState(memory, memory.memory.weights, memory.conv[0], self.attention.start(rows))

    def forward(self, x: Tensor, state: MACState | None, offsets: list[int] | None, mode: Mode) -> Passed:
        new = state is None
        if state is None:
            state = self.start(x.shape[0] if offsets is None else len(offsets) - 1)
        begins = (new and self.size % self.memory.layer.config.chunk == 0) or self.begins(state)
        if mode == "on" and offsets is None and begins and x.shape[1] >= self.size:
            return self._wholes(x, state)
        opened = [0] * len(state.segment.position) if new else places(state.segment.position)
        return self._parts(x, state, offsets, mode, opened, begins and offsets is None)

    def begins(self, state: MACState) -> bool:
        """Whether every row is known to stand where a segment begins, and a chunk with it."""
        return aligned(state.segment.position, self.size) and aligned(
            state.memory.memory.position, self.memory.layer.config.chunk
        )

    def _wholes(self, x: Tensor, state: MACState) -> Passed:
        """Whole segments from the start of one, then what is left."""
        *segments, left = (*x.split(self.size, 1), None) if x.shape[1] % self.size == 0 else x.split(self.size, 1)
        memory, asked, weights = state.memory, state.asked, state.weights
        pieces, noted = [], []
        for segment in segments:
            weights = tuple(weight.contiguous() for weight in memory.memory.weights)
            y, memory, asked, seen = self.whole(segment, memory, asked)
            pieces.append(y)
            noted.append(seen)
        state = MACState(memory, weights, asked, self.attention.start(x.shape[0]))
        if left is not None:
            last = self._parts(left, state, None, "on", [0] * x.shape[0], True)
            state = last.state
            pieces.append(last.y)
            noted.append(last.seen)
        return Passed(torch.cat(pieces, 1), state, Seen.join(noted))

    def _parts(
        self, x: Tensor, state: MACState, offsets: list[int] | None, mode: Mode, opened: list[int], begins: bool
    ) -> Passed:
        """Wherever rows stand in their segments (`opened`); whether it is known that a chunk begins with each of these."""
        if mode == "fresh":
            old = [place > self.size for place in places(state.memory.memory.position)]
            state = self._anew(state, old) if any(old) else state
        cuts = Cuts(x, offsets, opened, self.size)
        pieces, noted = [], []
        for part in cuts:
            starts = [place == 0 and count > 0 for place, count in zip(opened, part.counts, strict=True)]
            if any(starts):
                state = self._anew(state, starts) if mode == "fresh" else state
                known = begins or aligned(state.memory.memory.position, self.memory.layer.config.chunk)
                settled = state.memory.memory.weights if known else self.memory.layer.settle(state.memory)
                now = tuple(weight.contiguous() for weight in settled)
                state = state._replace(weights=where(starts, now, state.weights))
            y, state, seen = self._step(cuts.take(part), state, opened, part.borders, mode)
            opened = [(place + count) % self.size for place, count in zip(opened, part.counts, strict=True)]
            pieces.append(y)
            noted.append(seen)
        return Passed(cuts.join(pieces), state, cuts.join_seen(noted))

    def whole(self, x: Tensor, memory: NeuralMemoryState, asked: Tensor) -> tuple[Tensor, NeuralMemoryState, Tensor, Seen | None]:
        """One whole segment of every row, where a chunk begins with it, in mode "on": nothing is looked up, nothing left open."""
        h, asked = self.memory.layer.ask(x, memory.memory.weights, asked)  # (21)
        y = self.attention.whole(x, self.norm_retrieved(h))  # (22, 23)
        m, memory, seen = self.memory(self.norm_written(x + y), memory, None, "on", aligned=True)  # (24)
        return self.join(y, m), memory, asked, seen  # (25)

    def _anew(self, state: MACState, rows: list[bool]) -> MACState:
        """These rows' memories as they were before anything was read; convolutions and segment go on."""
        fresh = self.memory.start(len(rows))._replace(conv=state.memory.conv)
        return state._replace(memory=where(rows, fresh, state.memory), weights=where(rows, fresh.memory.weights, state.weights))

    def _step(
        self, x: Tensor, state: MACState, opened: list[int], borders: list[int] | None, mode: Mode
    ) -> tuple[Tensor, MACState, Seen | None]:
        """Tokens of one segment per row."""
        if mode == "off":
            y, segment = self.attention(x, None, state.segment, opened, borders)
            return self.join(y, torch.zeros_like(y)), state._replace(segment=segment), None
        h, asked = self.memory.layer.ask(x, state.weights, state.asked, borders)  # (21)
        y, segment = self.attention(x, self.norm_retrieved(h), state.segment, opened, borders)  # (22, 23)
        written = self.norm_written(x + y)
        m, memory, seen = self.memory(written, state.memory, borders, "frozen" if mode == "frozen" else "on")  # (24)
        return self.join(y, m), MACState(memory, state.weights, asked, segment), seen  # (25)


class Join(nn.Module):
    """The paper's ⊗: attention's output times a gate that is the memory's, both normalised with learned gains first.

    A memory that says nothing (zero) leaves the gate half open.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_memory = RMSNorm(dim), RMSNorm(dim)

    def forward(self, y: Float[Tensor, "b t d"], m: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        a, b = self.norm_attention, self.norm_memory
        if layer.fits(y, channels=a.width) and layer.fits(m):
            return layer.join(y, m, a.weight, b.weight, a.eps)
        return a(y) * torch.sigmoid(b(m))


class Memory(nn.Module):
    """A neural memory in a layer: does with it what the model's mode says."""

    def __init__(self, config: ModelConfig, **changes: Any) -> None:
        super().__init__()
        self.segment = config.segment
        self.layer = NeuralMemory(replace(config.memory, **changes))
        self.layer.checks = False

    def start(self, rows: int) -> NeuralMemoryState:
        wide = self.layer.q_proj.weight.dtype == torch.float64
        return self.layer.start(rows, torch.float64 if wide else torch.float32)

    def forward(
        self, x: Tensor, state: NeuralMemoryState | None, offsets: list[int] | None, mode: Mode, aligned: bool = False
    ) -> Passed:
        if mode == "on":
            seen = self.layer.trace(x, state, offsets=offsets, aligned=aligned)
            return Passed(seen.y, seen.state, Seen(seen.surprise, seen.gates))
        if state is None:
            state = self.start(x.shape[0] if offsets is None else len(offsets) - 1)
        if mode == "off":
            return Passed(torch.zeros_like(x), state, None)
        if mode == "frozen":
            return Passed(*self.layer.peek(x, state, offsets=offsets), None)
        return self._fresh(x, state, offsets)

    def _fresh(self, x: Tensor, state: NeuralMemoryState, offsets: list[int] | None) -> Passed:
        """A memory that lives for one segment only; one older than that is not used at all."""
        lived = places(state.memory.position)
        old = [place > self.segment for place in lived]
        if any(old):
            state = where(old, self.start(len(lived))._replace(conv=state.conv), state)
            lived = places(state.memory.position)
        cuts = Cuts(x, offsets, [place % self.segment for place in lived], self.segment)
        pieces, noted = [], []
        for part in cuts:
            ended = [place == self.segment and n > 0 for place, n in zip(lived, part.counts, strict=True)]
            if any(ended):
                state = where(ended, self.start(len(lived))._replace(conv=state.conv), state)
            lived = [(0 if over else place) + n for place, over, n in zip(lived, ended, part.counts, strict=True)]
            y, state, seen = self(cuts.take(part), state, part.borders, "on")
            pieces.append(y)
            noted.append(seen)
        return Passed(cuts.join(pieces), state, cuts.join_seen(noted))


class Part(NamedTuple):
    """Some of a call's tokens, at most one segment of each row's: where they stand, their borders if packed, how many each."""

    where: slice | Tensor
    borders: list[int] | None
    counts: list[int]


class Cuts:
    """A call cut where its rows' segments end, which is at different places if they stand at different ones."""

    def __init__(self, x: Tensor, offsets: list[int] | None, opened: list[int], size: int) -> None:
        self.x, (self.batch, self.tokens) = x, x.shape[:2]
        self.parts: list[Part] = []
        self.pieces: dict[int, Tensor] = {}  # split at once: a slice's gradient is as long as the whole call
        self.uniform = offsets is None and len(set(opened)) == 1
        if self.uniform:
            borders = [0, *range(size - opened[0], self.tokens, size), self.tokens]
            for a, b in itertools.pairwise(borders):
                self.parts.append(Part(slice(a, b), None, [b - a] * self.batch))
            self.pieces = dict(zip(borders, x.split([part.counts[0] for part in self.parts], 1), strict=False))
            return
        starts = offsets or [row * self.tokens for row in range(self.batch + 1)]
        counts = [b - a for a, b in itertools.pairwise(starts)]
        steps = max(1, *[-(-(place + count) // size) for place, count in zip(opened, counts, strict=True)])
        for step in range(steps):
            index: list[int] = []
            borders = [0]
            for start, count, place in zip(starts, counts, opened, strict=False):
                first, last = max(0, step * size - place), min(count, (step + 1) * size - place)
                index.extend(range(start + first, start + last))
                borders.append(len(index))
            here = [b - a for a, b in itertools.pairwise(borders)]
            self.parts.append(Part(torch.tensor(index, dtype=torch.int64, device=x.device), borders, here))

    def __iter__(self) -> Iterator[Part]:
        return iter(self.parts)

    def take(self, part: Part) -> Tensor:
        if isinstance(part.where, slice):
            return self.pieces[part.where.start]
        return self.x.flatten(0, 1).index_select(0, part.where).unsqueeze(0)

    def join(self, pieces: list[Tensor]) -> Tensor:
        whole = torch.cat(pieces, 1)
        if self.uniform:
            return whole
        order = torch.cat([part.where for part in self.parts if isinstance(part.where, Tensor)])
        return whole[0].index_select(0, order.argsort()).unflatten(0, (self.batch, self.tokens))

    def join_seen(self, noted: list[Seen | None]) -> Seen | None:
        return Seen.join(noted, self.join)


def attention_of(config: ModelConfig) -> Attention:
    return Attention(config.dim, config.heads, config.window, config.persistent, config.rotary, slack=config.memory.chunk - 1)


# A matrix for a memory, and gates that start half open: a single linear layer does not run away.
LINEAR: dict[str, Any] = {"net": "linear", "depth": None, "expansion": None, "activation": None, "bias": None, "step_bias": 0.0}


def _ttt(config: ModelConfig) -> LMM:
    """TTT writes a whole net: Titans', where the model's own memories write their last layer alone."""
    return LMM(config, rule="ttt", **({"net": "titans", "step_bias": None} if config.memory.net == "deep" else {}))


BLOCKS: dict[str, Callable[[ModelConfig], nn.Module]] = {
    "mac": MAC,
    "mag": MAG,
    "mal": MAL,
    "lmm": LMM,
    "attention": partial(Softmax, sliding=False),
    "window": partial(Softmax, sliding=True),
    "knn": Knn,
    "linear_attention": partial(LMM, rule="linear_attention", **LINEAR),
    "delta": partial(LMM, rule="delta", **LINEAR),
    "gated_delta": partial(LMM, rule="gated_delta", **LINEAR),
    "ttt": _ttt,
}


class Block(nn.Module):
    """One layer of a model: a mixer over tokens and a feed-forward net, each behind a norm and beside a residual connection."""

    def __init__(self, name: str, config: ModelConfig) -> None:
        super().__init__()
        known("pattern", name, BLOCKS)
        self.norm_mixer, self.norm_ffn = RMSNorm(config.dim), RMSNorm(config.dim)
        self.mixer = BLOCKS[name](config)
        self.ffn = SwiGLU(config.dim, config.hidden)

    def start(self, rows: int) -> Any:
        return self.mixer.start(rows)  # type: ignore[operator]

    def added(self, x: Tensor, y: Tensor) -> Tensor:
        """What goes on to the next layer, from a layer's input and what its mixer made of it."""
        x = x + y
        # What torch may have compiled is for one layer's weights.
        feed = self.ffn if self.ffn.gate.weight.dim() == 2 else self.ffn.forward
        return x + feed(self.norm_ffn(x, operand(x)))

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        state: Any = None,
        offsets: list[int] | None = None,
        mode: Mode = "on",
        aside: Aside | None = None,
    ) -> Passed:
        y, state, seen = self.mixer(self.norm_mixer(x, operand(x)), state, offsets, mode, *([] if aside is None else [aside]))
        return Passed(self.added(x, y), state, seen)
