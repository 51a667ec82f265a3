"""MAC, memory as a context (eqs 21-25 of Titans).

For each segment of a text, the memory is queried with its weights at the start of the segment. The retrieved
vectors are prepended to the segment as a context for attention. The output of attention is written to the
memory, and gated by the output of the updated memory.
"""

from __future__ import annotations

from collections.abc import Callable
from math import lcm
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from remanence.config import Mode, ModelConfig
from remanence.layers import RMSNorm
from remanence.layers.attention import SegmentAttention, SegmentState
from remanence.layers.decoding import SegmentDecoder, StepContext
from remanence.memory.neural import NeuralMemoryState
from remanence.memory.observation import current_observer
from remanence.mixers.base import ACTIVATIONS, Context, MemoryTrace, MixerDecoder, MixerOutput
from remanence.mixers.lmm import scaled_activation_bytes
from remanence.mixers.memory import Memory, MemoryDecoder, MemoryMixer
from remanence.mixers.window_and_memory import Join
from remanence.ops import decode
from remanence.ops.state import Weights
from remanence.runtime.module import is_unmodified
from remanence.runtime.positions import host_copy, is_aligned, positions_of, with_host_copy
from remanence.runtime.ragged import SegmentSplit
from remanence.runtime.state import TensorTuple, rewind, where


class _MACState(NamedTuple):
    memory: NeuralMemoryState
    weights: Weights
    query_history: Tensor
    segment: SegmentState


class MACState(_MACState, TensorTuple):
    """The state of a MAC layer.

    memory
        The state of the memory.
    weights
        The memory's weights at the start of the open segment ``[r h ...]``.
    query_history
        The last inputs of the convolution of the queries.
    segment
        The attention state of the open segment.
    """

    __slots__ = ()

    def crop(self, tokens: int) -> MACState:
        return MACState(
            self.memory.crop(tokens),
            self.weights,
            rewind(self.query_history, tokens),
            self.segment.crop(tokens),
        )


class _SegmentCarry(NamedTuple):
    memory: NeuralMemoryState
    query_history: Tensor


class SegmentCarry(_SegmentCarry, TensorTuple):
    """The part of the state that one whole segment passes to the next: the memory, and the queries'
    convolution history.
    """

    __slots__ = ()


class MAC(MemoryMixer):
    """Memory as a context. Segments are read one after the other, because each needs the memory after the
    previous segment.
    """

    State: ClassVar[type] = MACState

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.size, self.dim, self.persistent = config.segment, config.dim, config.persistent
        self.memory = Memory(config)
        self.attention = SegmentAttention(
            config.dim, config.heads, config.segment, config.persistent, config.rotary
        )
        self.norm_retrieved, self.norm_written = RMSNorm(config.dim), RMSNorm(config.dim)
        self.join = Join(config.dim)

    def start(self, rows: int) -> MACState:
        memory = self.memory.start(rows)
        return MACState(memory, memory.memory.weights, memory.conv[0], self.attention.start(rows))

    def segment(
        self,
        x: Tensor,
        retrieve: Callable[[Tensor], Tensor] | None,
        attend: Callable[[Tensor, Tensor | None], Tensor],
        write: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Compute MAC's equations for tokens x of one segment: a whole segment, a part of it, or a single
        token.

        The caller holds the state, and passes three functions that use it. `retrieve` queries the memory with
        its weights at the start of the segment (None: the memory is off). `attend` computes attention over
        the segment and the retrieved vectors. `write` writes to the memory and returns its output.
        """
        h = None if retrieve is None else self.norm_retrieved(retrieve(x))  # (21)
        y = attend(x, h)  # (22, 23)
        m = torch.zeros_like(y) if retrieve is None else write(self.norm_written(x + y))  # (24)
        return self.join(y, m)  # (25)

    def forward(self, x: Tensor, state: MACState | None, ctx: Context) -> MixerOutput:
        new = state is None
        if state is None:
            state = self.start(x.shape[0] if ctx.offsets is None else len(ctx.offsets) - 1)
        aligned = (new and self.size % self.memory.chunk == 0) or self.is_at_segment_start(state)
        whole = ctx.mode == "on" and ctx.offsets is None and aligned and x.shape[1] >= self.size
        # Not for replaced modules or modules with hooks: `SegmentAttention.whole` is not a call of the module, and a
        # replaced memory may not accept `aligned`.
        if whole and is_unmodified(self.attention, SegmentAttention) and is_unmodified(self.memory, Memory):
            return self._read_whole_segments(x, state)
        opened = [0] * len(state.segment.position) if new else positions_of(state.segment.position)
        return self._read_parts(x, state, ctx.offsets, ctx.mode, opened, aligned and ctx.offsets is None)

    def is_at_segment_start(self, state: MACState) -> bool:
        """Whether all rows are known to be at the start of a segment and of a chunk."""
        return is_aligned(state.segment.position, self.size) and is_aligned(
            state.memory.memory.position, self.memory.chunk
        )

    def _read_whole_segments(self, x: Tensor, state: MACState) -> MixerOutput:
        """Read x, which begins at the start of a segment: first whole segments, then the remaining tokens."""
        *segments, rest = (
            (*x.split(self.size, 1), None) if x.shape[1] % self.size == 0 else x.split(self.size, 1)
        )
        carry, weights = self.carry(state), state.weights
        pieces, traces = [], []
        for segment in segments:
            weights = tuple(weight.contiguous() for weight in carry.memory.memory.weights)
            y, carry, trace = self.read_segment(segment, carry)
            pieces.append(y)
            traces.append(trace)
        state = MACState(carry.memory, weights, carry.query_history, self.attention.start(x.shape[0]))
        if rest is not None:
            last = self._read_parts(rest, state, None, "on", [0] * x.shape[0], True)
            state = last.state
            pieces.append(last.y)
            traces.append(last.trace)
        return MixerOutput(torch.cat(pieces, 1), state, MemoryTrace.join(traces))

    def _read_parts(
        self,
        x: Tensor,
        state: MACState,
        offsets: list[int] | None,
        memory_mode: Mode,
        opened: list[int],
        aligned: bool,
    ) -> MixerOutput:
        """Read x, which may begin anywhere in a segment, in any mode. `opened` is the number of tokens in the
        open segment of each row. `aligned`: whether each segment is known to begin at the start of a chunk.
        """
        if memory_mode == "fresh":
            old = [place > self.size for place in positions_of(state.memory.memory.position)]
            state = self._reset_memory(state, old) if any(old) else state
        split = SegmentSplit(x, offsets, opened, self.size)
        pieces, traces = [], []
        for part in split:
            starts = [place == 0 and count > 0 for place, count in zip(opened, part.counts, strict=True)]
            if any(starts):
                state = self._reset_memory(state, starts) if memory_mode == "fresh" else state
                known = aligned or is_aligned(state.memory.memory.position, self.memory.chunk)
                current = (
                    state.memory.memory.weights if known else self.memory.layer.current_weights(state.memory)
                )
                current_weights = tuple(weight.contiguous() for weight in current)
                state = state._replace(weights=where(starts, current_weights, state.weights))
            y, state, trace = self._read_part(split.take(part), state, opened, part.offsets, memory_mode)
            opened = [(place + count) % self.size for place, count in zip(opened, part.counts, strict=True)]
            pieces.append(y)
            traces.append(trace)
        return MixerOutput(split.join(pieces), state, MemoryTrace.join(traces, split.join))

    def _reset_memory(self, state: MACState, rows: list[bool]) -> MACState:
        """Reset the memories of the given rows; the convolution histories and the open segments are kept."""
        fresh = self.memory.start(len(rows))._replace(conv=state.memory.conv)
        weights = where(rows, fresh.memory.weights, state.weights)
        return state._replace(memory=where(rows, fresh, state.memory), weights=weights)

    def _read_part(
        self, x: Tensor, state: MACState, opened: list[int], offsets: list[int] | None, memory_mode: Mode
    ) -> tuple[Tensor, MACState, MemoryTrace | None]:
        """Read tokens x that are in one segment of each row. Returns the output, the new state and the trace."""
        memory, weights, query_history, segment = state
        trace: MemoryTrace | None = None

        def retrieve(x: Tensor) -> Tensor:
            nonlocal query_history
            h, query_history = self.memory.layer.query(x, weights, query_history, offsets)
            return h

        def attend(x: Tensor, retrieved: Tensor | None) -> Tensor:
            nonlocal segment
            y, segment = self.attention(x, retrieved, segment, opened, offsets)
            return y

        def write(x: Tensor) -> Tensor:
            nonlocal memory, trace
            m, memory, trace = self.memory(x, memory, offsets, "frozen" if memory_mode == "frozen" else "on")
            return m

        y = self.segment(x, None if memory_mode == "off" else retrieve, attend, write)
        return y, MACState(memory, weights, query_history, segment), trace

    # The methods of `remanence.mixers.wavefront.SegmentMixer`, for the wavefront schedule.

    @property
    def segment_length(self) -> int | None:
        """Number of tokens in a segment, for schedules that read whole segments. None if they cannot be used:
        a segment is not a multiple of the chunk, or a recording of the memories is under way.
        """
        return self.size if self.size % self.memory.chunk == 0 and current_observer() is None else None

    def carry(self, state: MACState) -> SegmentCarry:
        """The part of a state at the start of a segment that is needed to read further whole segments."""
        return SegmentCarry(state.memory, state.query_history)

    def read_segment(self, x: Tensor, carry: SegmentCarry) -> tuple[Tensor, SegmentCarry, MemoryTrace | None]:
        """Read one whole segment of every row, in mode "on". Returns the output, the carry after the segment,
        and the trace. The segment begins and ends at the border of a chunk.
        """
        memory, query_history = carry
        trace: MemoryTrace | None = None

        def retrieve(x: Tensor) -> Tensor:
            nonlocal query_history
            h, query_history = self.memory.layer.query(x, memory.memory.weights, query_history)
            return h

        def write(x: Tensor) -> Tensor:
            nonlocal memory, trace
            m, memory, trace = self.memory(x, memory, None, "on", aligned=True)
            return m

        y = self.segment(x, retrieve, self.attention.whole, write)
        return y, SegmentCarry(memory, query_history), trace

    def segment_start(self, carry: SegmentCarry) -> Weights:
        """The memory's weights at the start of a segment."""
        return carry.memory.memory.weights

    def after_segments(
        self, carry: SegmentCarry, weights: Weights, previous: MACState, tokens: int
    ) -> MACState:
        """The state after whole segments with `tokens` tokens in total. `weights` are the memory's weights at
        the start of the last segment, `previous` is the state before the first segment.
        """
        memory, known = carry.memory.memory, host_copy(previous.memory.memory.position)
        if known is not None:
            memory = memory._replace(
                position=with_host_copy(memory.position, [place + tokens for place in known])
            )
        rows = len(memory.position)
        return MACState(
            NeuralMemoryState(memory, carry.memory.conv),
            weights,
            carry.query_history,
            self.attention.start(rows),
        )

    # Decoding and cost.

    def decoder(self, state: MACState, memory_mode: Mode) -> MACDecoder:
        return MACDecoder(self, state, memory_mode)

    @property
    def alignment(self) -> int:
        return lcm(self.size, self.memory.chunk)

    def flops(self, length: int) -> float:
        # Attention covers the retrieved vectors and the tokens of the segment, 2 * size in total. As it is causal, a
        # query sees half of them on average.
        seen = self.size + self.persistent
        return super().flops(length) + 12.0 * self.dim * seen

    def activation_bytes(self, dim: int) -> float:
        return scaled_activation_bytes(ACTIVATIONS["mac"], self.memory) * dim


class MACDecoder(MixerDecoder):
    """The decoder of `MAC`, which reads one token at a time."""

    def __init__(self, mixer: MAC, state: MACState, memory_mode: Mode) -> None:
        self.mixer = mixer
        self.memory = MemoryDecoder(mixer.memory, state.memory, memory_mode)
        self.segment = SegmentDecoder(mixer.attention, state.segment)
        contiguous = torch.contiguous_format
        self.weights = tuple(weight.detach().clone(memory_format=contiguous) for weight in state.weights)
        self.query_history = state.query_history.detach().clone()
        # If segments and chunks are in phase, a chunk begins with each segment, and the current weights of the memory
        # are those at the start of the chunk. They are not in phase if the memory did not read some token.
        chunk, memory = state.memory.memory.chunk, state.memory.memory.position
        self.aligned = memory_mode == "on" and torch.equal(state.segment.position % chunk, memory % chunk)

    def step(self, x: Tensor, ctx: StepContext) -> Tensor:
        mixer = self.mixer
        begins = ctx.cached("begins", mixer.size, make=lambda: (ctx.position % mixer.size == 0) & ctx.active)
        if self.aligned:
            self.memory.running.copy_weights(self.weights, begins)
        else:
            decode.overwrite_rows(self.weights, self.memory.current_weights(), begins)
        return mixer.segment(
            x,
            None
            if self.memory.memory_mode == "off"
            else lambda x: self.memory.query(x, self.weights, self.query_history, ctx),
            lambda x, retrieved: self.segment.step(x, retrieved, ctx),
            lambda x: self.memory.step(x, ctx),
        )

    def state(self, position: Tensor) -> MACState:
        weights = tuple(weight.clone() for weight in self.weights)
        return MACState(
            self.memory.state(), weights, self.query_history.clone(), self.segment.state(position)
        )

    @property
    def diverged(self) -> Tensor:
        return self.memory.diverged
