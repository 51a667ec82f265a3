"""The neural memory inside a mixer: calling it in each memory mode, the base class of mixers with a memory,
and its decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, Unpack

import torch
from torch import Tensor

from remanence.config import MemoryConfig, Mode
from remanence.layers import Linear, Module, ShortConv
from remanence.layers.decoding import StepContext
from remanence.memory.neural import NeuralMemory, NeuralMemoryState
from remanence.memory.observation import current_observer
from remanence.mixers.base import MemoryTrace, Mixer, MixerOutput
from remanence.ops import decode, query
from remanence.ops.state import Weights
from remanence.runtime.keywords import MemoryFields
from remanence.runtime.module import is_unmodified
from remanence.runtime.positions import positions_of
from remanence.runtime.ragged import SegmentSplit
from remanence.runtime.state import where


class HasMemoryConfig(Protocol):
    """A configuration with a neural memory, such as `ModelConfig` or `AttachConfig`. `segment` is the number
    of tokens after which the memory is reset in mode "fresh".
    """

    @property
    def segment(self) -> int: ...

    @property
    def memory(self) -> MemoryConfig: ...


class Memory(Module):
    """A `NeuralMemory` inside a mixer, which is called according to the memory mode. `changes` are fields of
    `MemoryConfig` that replace those of `config.memory`.
    """

    def __init__(self, config: HasMemoryConfig, **changes: Unpack[MemoryFields]) -> None:
        super().__init__()
        self.segment = config.segment
        self.layer = NeuralMemory(replace(config.memory, **changes))
        self.layer.checks = False

    def start(self, rows: int) -> NeuralMemoryState:
        """Return the initial state of `rows` documents, in float32, or in float64 if the parameters are
        float64.
        """
        wide = self.layer.q_proj.weight.dtype == torch.float64
        return self.layer.start(rows, torch.float64 if wide else torch.float32)

    @property
    def chunk(self) -> int:
        """Number of tokens in a chunk of the memory."""
        return self.layer.config.chunk

    def flops(self) -> float:
        """Floating-point operations per token, forward and backward. Projections are counted once. The
        memory's network is counted four times: forward for keys, backward for errors, writing, and reading.
        The first layers of a deep memory, which are not updated, are counted twice: for queries and for keys.
        """
        initial = sum(weight.numel() for weight in self.layer.initial.parameters())
        features = (
            sum(weight.numel() for weight in self.layer.features.parameters()) if self.layer.features else 0
        )
        matrices = sum(weight.numel() for weight in self.parameters() if weight.dim() > 1)
        return 6.0 * (matrices - initial + features) + 24.0 * initial

    def relative_activations(self) -> float:
        """The size of the memory's activations relative to those of the paper's network."""
        config = self.layer.config
        # A deep memory stores no activations of its first layers except the keys.
        depth = 1 if self.layer.deep else config.depth or 2
        return (1 + (depth - 1) * (config.expansion or 4.0) / 4) / 2

    def decode_unsupported_reason(self) -> str | None:
        """Why the memory cannot be decoded token by token; None if it can."""
        if current_observer() is not None:
            return "a recording of the memories is under way"
        return decode.unsupported_reason(self.layer.net, self.layer.rule)

    def capture_unsupported_reason(self) -> str | None:
        """Why a call of the memory cannot be captured as a CUDA graph; None if it can."""
        return None if current_observer() is None else "a recording of the memories is under way"

    def forward(
        self,
        x: Tensor,
        state: NeuralMemoryState | None,
        offsets: list[int] | None,
        memory_mode: Mode,
        aligned: bool = False,
    ) -> MixerOutput:
        """Read x ``[b t d]`` in a memory mode. Returns the output ``[b t d]`` (zero in mode "off"), the new
        state, and the trace (None in modes "off" and "frozen"). `aligned`: whether x is known to begin at the
        start of a chunk.
        """
        if memory_mode == "on":
            if not is_unmodified(self.layer, NeuralMemory):
                return self._call_layer(x, state, offsets)
            trace = self.layer.trace(x, state, offsets=offsets, aligned=aligned)
            return MixerOutput(trace.y, trace.state, MemoryTrace(trace.surprise, trace.gates))
        if state is None:
            state = self.start(x.shape[0] if offsets is None else len(offsets) - 1)
        if memory_mode == "off":
            return MixerOutput(torch.zeros_like(x), state, None)
        if memory_mode == "frozen":
            return MixerOutput(*self.layer.read_frozen(x, state, offsets=offsets), None)
        return self._read_fresh(x, state, offsets)

    def _call_layer(
        self, x: Tensor, state: NeuralMemoryState | None, offsets: list[int] | None
    ) -> MixerOutput:
        """Call the layer as a module, so that its hooks and an overridden `forward` run. The output
        has no memory trace if an overridden `forward` returns only the layer's output and state, without surprise
        and gates.
        """
        traced = {"traced": True} if type(self.layer).forward is NeuralMemory.forward else {}
        y, after, *seen = self.layer(x, state, offsets=offsets, **traced)
        return MixerOutput(y, after, MemoryTrace(*seen) if seen else None)

    def _read_fresh(self, x: Tensor, state: NeuralMemoryState, offsets: list[int] | None) -> MixerOutput:
        """Read x in mode "fresh": the memory is reset at the start of each segment. A memory that has already
        read more than one segment is reset first.
        """
        lived = positions_of(state.memory.position)
        old = [place > self.segment for place in lived]
        if any(old):
            state = where(old, self.start(len(lived))._replace(conv=state.conv), state)
            lived = positions_of(state.memory.position)
        split = SegmentSplit(x, offsets, [place % self.segment for place in lived], self.segment)
        pieces, traces = [], []
        for part in split:
            ended = [place == self.segment and n > 0 for place, n in zip(lived, part.counts, strict=True)]
            if any(ended):
                state = where(ended, self.start(len(lived))._replace(conv=state.conv), state)
            lived = [
                (0 if over else place) + n for place, over, n in zip(lived, ended, part.counts, strict=True)
            ]
            y, state, trace = self(split.take(part), state, part.offsets, "on")
            pieces.append(y)
            traces.append(trace)
        return MixerOutput(split.join(pieces), state, MemoryTrace.join(traces, split.join))


class MemoryMixer(Mixer):
    """The base class of mixers with one neural memory, which determines whether they can be decoded and
    captured.
    """

    memory: Memory

    def decode_unsupported_reason(self, memory_mode: Mode) -> str | None:
        return self.memory.decode_unsupported_reason()

    def capture_unsupported_reason(self, carries: bool) -> str | None:
        return self.memory.capture_unsupported_reason()

    @property
    def alignment(self) -> int:
        return self.memory.chunk

    def flops(self, length: int) -> float:
        size = lambda module: sum(weight.numel() for weight in module.parameters() if weight.dim() > 1)
        return 6.0 * (size(self) - size(self.memory)) + self.memory.flops()


class MemoryDecoder:
    """The decoder of `Memory`. It reads one token at a time, and updates its state in place."""

    def __init__(self, module: Memory, state: NeuralMemoryState, memory_mode: Mode) -> None:
        self.layer, self.memory_mode = module.layer, memory_mode
        self.layer.check_state(state.memory)
        q, k, v = (past.detach().clone() for past in state.conv)
        self.conv = (q, k, v)
        self.memory = state.memory
        self.fused = decode.is_supported(q, self.layer.head_dim) and self.layer.q_conv.weight is not None
        if memory_mode == "on":
            self.running = decode.InPlaceMemory(state.memory, self.layer.net, self.layer.rule)
        else:  # the memory is not written, so its weights do not change
            self.weights = tuple(weight.detach().contiguous() for weight in self.layer.current_weights(state))

    def current_weights(self) -> Weights:
        """The weights of the memory after the last token that was read."""
        return self.running.current_weights() if self.memory_mode == "on" else self.weights

    def step(self, x: Tensor, ctx: StepContext) -> Tensor:
        """Read one token of each row, x ``[r 1 d]``, and return the output of the memory ``[r 1 d]``."""
        if self.memory_mode == "off":
            return torch.zeros_like(x)
        layer = self.layer
        if self.memory_mode == "frozen":
            y, past_q = layer.query(x, self.weights, self.conv[0])
            past_k = layer.k_conv.advance(layer.k_proj(x), self.conv[1], None)
            past_v = layer.v_conv.advance(layer.v_proj(x), self.conv[2], None)
            decode.overwrite_rows(self.conv, (past_q, past_k, past_v), ctx.active)
            return y
        if self.fused:
            parts = ((layer.q_proj, layer.q_conv), (layer.k_proj, layer.k_conv), (layer.v_proj, layer.v_conv))
            q, k, v = self._convolve(x, parts, self.conv, ctx)
            q, k = (layer.key_features(each.unsqueeze(1))[:, 0] for each in (q, k))
            gates = layer.log_gates(x)
        else:
            q, k, v, gates, conv = layer.prepare(x, self.conv)
            decode.overwrite_rows(self.conv, conv, ctx.active)
            q, k, v = q[:, 0], k[:, 0], v[:, 0]
        answers, _ = self.running.step(q, k, v, gates.map(lambda gate: gate[:, 0]), ctx.active)
        return layer.output(q.unsqueeze(1), answers.unsqueeze(1).to(x.dtype), layer.g_proj(x))

    def query(self, x: Tensor, weights: Weights, conv_state: Tensor, ctx: StepContext) -> Tensor:
        """The output for one token of each row, x ``[r 1 d]``, of a memory with given weights; the memory is
        not written. `conv_state` is the convolution history of the queries, which is updated in place.
        """
        layer = self.layer
        if not self.fused:
            y, new = layer.query(x, weights, conv_state)
            decode.overwrite_rows((conv_state,), (new,), ctx.active)
            return y
        (q,) = self._convolve(x, ((layer.q_proj, layer.q_conv),), (conv_state,), ctx)
        q = layer.key_features(q.unsqueeze(1))
        return layer.output(q, query(q, weights, net=layer.net), layer.g_proj(x))

    def _convolve(
        self,
        x: Tensor,
        parts: Sequence[tuple[Linear, ShortConv]],
        pasts: tuple[Tensor, ...],
        ctx: StepContext,
    ) -> list[Tensor]:
        """Apply each projection in `parts` to a token, and convolve the result with its history in `pasts`.
        The histories are updated in place.
        """
        xs = [projection(x)[:, 0] for projection, _ in parts]
        weights = [conv.weight for _, conv in parts if conv.weight is not None]
        return decode.convolve(xs, pasts, weights, self.layer.heads, ctx.active)

    @property
    def diverged(self) -> Tensor:
        return self.running.diverged if self.memory_mode == "on" else self.memory.diverged

    def state(self) -> NeuralMemoryState:
        q, k, v = (past.clone() for past in self.conv)
        return NeuralMemoryState(self.running.state if self.memory_mode == "on" else self.memory, (q, k, v))
