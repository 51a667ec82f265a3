"""The layers of a model in one loop: features in, features out, with one state for all of it.

A language model puts an embedding in front and a head behind (`remanence.model`); other inputs, such as numbers of a
time series or another model's embeddings, can be given directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd
from typing import Any, Literal, NamedTuple, Unpack

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from remanence.config import MODES, Mode, ModelConfig, ModelFields, change
from remanence.layers import Module, RMSNorm, SwiGLU, matmul_dtype
from remanence.mixers import MIXERS, Context, MemoryTrace, Mixer, MixerOutput, Shared, Text, wavefront
from remanence.ops.checks import check_offsets, count_documents
from remanence.ops.layout import gather_or_zero, pad_to_mask
from remanence.ops.state import memories
from remanence.runtime.choices import check_choice
from remanence.runtime.keywords import show_fields
from remanence.runtime.mode import RenamedMode, renamed_mode
from remanence.runtime.module import ours
from remanence.runtime.positions import advance_position, positions_of, with_host_copy
from remanence.runtime.ragged import SegmentSplit
from remanence.runtime.state import TensorTuple

Schedule = Literal["wavefront", "layers"]


class _State(NamedTuple):
    blocks: tuple[Any, ...]
    position: Tensor


class State(_State, TensorTuple):
    """All that a model carries from call to call, one row per document: each block's state, and the tokens read
    ``[r]``.

    Returned by every call and never changed in place, so keeping one is enough to come back to it. Its size does not
    depend on how much was read, except with full attention.
    """

    __slots__ = ()

    @property
    def diverged(self) -> Bool[Tensor, " r"]:
        """Per row: whether any memory has been infinite, NaN or too large to be of use since the document began."""
        flags = [memory.diverged for memory in memories(self)]
        return torch.stack(flags).any(0) if flags else torch.zeros_like(self.position, dtype=torch.bool)

    def agrees(self, read: Tensor) -> Tensor:
        return read >= 0

    def crop(self, tokens: int) -> State:
        """The state before the last `tokens` tokens, which must lie in the memories' open chunk and have been written
        to them.
        """
        if tokens < 0 or bool((self.position < tokens).any()):
            raise ValueError(
                f"tokens: expected at most the {int(self.position.min())} tokens read, got {tokens}"
            )
        for memory in memories(self):
            if tokens and not torch.equal(memory.position, self.position):
                raise ValueError(
                    "tokens: expected a state read with its memory on, got one whose memory did not read every token"
                )
        return State(tuple(block.crop(tokens) for block in self.blocks), self.position - tokens)


class Trace(NamedTuple):
    """All that can be seen of a call: the last layer's output, normalised ``[b t d]``; the state; what each layer's
    memory did, or None; the input of each layer ``[b t d]``.
    """

    hidden: Tensor
    state: State
    traces: Sequence[MemoryTrace | None]
    layers: Sequence[Tensor]

    @classmethod
    def join(cls, pieces: Sequence[Trace]) -> Trace:
        """Of a call that was read in pieces, one behind the other."""
        depth = len(pieces[0].traces)
        traces = wavefront.LazySequence(
            depth, lambda layer: MemoryTrace.join([piece.traces[layer] for piece in pieces])
        )
        layers = wavefront.LazySequence(
            depth, lambda layer: torch.cat([piece.layers[layer] for piece in pieces], 1)
        )
        return cls(torch.cat([piece.hidden for piece in pieces], 1), pieces[-1].state, traces, layers)

    @property
    def surprise(self) -> Tensor | None:
        """Per token ``[b t]``, the mean over layers and heads; None without a memory that was written."""
        present = [trace.surprise.mean(-1) for trace in self.traces if trace is not None]
        return torch.stack(present).mean(0) if present else None


class Block(Module):
    """One layer: a mixer over tokens and a feed-forward net, each behind a norm and beside a residual connection."""

    mixer: Mixer

    def __init__(self, name: str, config: ModelConfig) -> None:
        super().__init__()
        check_choice("pattern", name, MIXERS, {"titans": ("mac", "mag", "mal", "lmm")})
        self.norm_mixer, self.norm_ffn = RMSNorm(config.dim), RMSNorm(config.dim)
        self.mixer = MIXERS[name](config)
        self.ffn = SwiGLU(config.dim, config.hidden)

    def forward(self, x: Float[Tensor, "b t d"], state: Any, ctx: Context) -> MixerOutput:
        y, state, trace = self.mixer(self.norm_mixer(x, matmul_dtype(x)), state, ctx)
        return MixerOutput(self.residual_ffn(x, y), state, trace)

    def start(self, rows: int) -> Any:
        return self.mixer.start(rows)

    def residual_ffn(self, x: Tensor, y: Tensor) -> Tensor:
        """What goes on to the next layer, from a layer's input and its mixer's output."""
        x = x + y
        # What torch may have compiled is for one layer's weights.
        feed = self.ffn if self.ffn.gate.weight.dim() == 2 else self.ffn.forward
        return x + feed(self.norm_ffn(x, matmul_dtype(x)))


class Backbone(Module):
    """``y, state = Backbone(config)(x, state)``: features ``[b t d]`` in, normalised features out.

    Pass None at a document's start, and what you got afterwards. ``memory_mode`` says what becomes of the memories,
    neural and kNN: "on"; "off", as if there were none; "frozen", read but not written; "fresh", reset at every segment.
    It is an argument of each call; ``backbone.memory_mode`` is the default of calls that give none.
    ``backbone.checkpointing`` trades a second forward pass for memory in training. ``backbone.schedule`` is how layers
    that read segment after segment do it: "wavefront", several layers at once where possible, or "layers", one after
    the other.
    """

    @show_fields(ModelConfig, default_of="config")
    def __init__(self, config: ModelConfig, **fields: Unpack[ModelFields]) -> None:
        super().__init__()
        if not isinstance(config, ModelConfig):
            raise ValueError(f"config: expected a ModelConfig, as preset('tiny') makes one, got {config!r}")
        self.config = change(config, fields)
        self.blocks = nn.ModuleList(Block(name, self.config) for name in self.config.blocks)
        self.norm = RMSNorm(self.config.dim)
        for index, mixer in enumerate(self.mixers):
            mixer.link(self.mixers[:index])
        self.checkpointing = False
        self._schedule: Schedule = "wavefront"
        self._memory_mode: Mode = "on"
        self.reset_own_parameters()

    def reset_own_parameters(self) -> None:
        """Scale residual branches so that they do not grow with depth; see docs/paper.md."""
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if name.endswith(("o_proj.weight", "down.weight")):
                    weight.mul_((2 * self.config.num_layers) ** -0.5)

    @property
    def mixers(self) -> list[Mixer]:
        return [block.mixer for block in self.blocks]  # type: ignore[misc]

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def memory_mode(self) -> Mode:
        return self._memory_mode

    @memory_mode.setter
    def memory_mode(self, mode: Mode) -> None:
        self._memory_mode = self.check_mode(mode)

    memory = RenamedMode()

    @property
    def schedule(self) -> Schedule:
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: Schedule) -> None:
        check_choice("schedule", schedule, ("wavefront", "layers"))
        self._schedule = schedule

    @property
    def has_memory(self) -> bool:
        return any(mixer.has_memory for mixer in self.mixers)

    def check_mode(self, mode: Mode) -> Mode:
        """The mode, if this model has it; a model without a memory has "on" alone."""
        check_choice("memory_mode", mode, MODES)
        if mode != "on" and not self.has_memory:
            raise ValueError(
                f"memory_mode: expected 'on', as the blocks {self.config.pattern} have no memory, got {mode!r}"
            )
        return mode

    def start(self, rows: int) -> State:
        """The state of `rows` documents of which nothing has been read."""
        return State(tuple(block.start(rows) for block in self.blocks), self._nothing(rows, self.device))  # type: ignore[operator]

    def _nothing(self, rows: int, device: torch.device) -> Tensor:
        return with_host_copy(torch.zeros(rows, dtype=torch.int64, device=device), [0] * rows)

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        state: State | None = None,
        *,
        mask: Bool[Tensor, "b t"] | None = None,
        offsets: Int[Tensor, " r+1"] | Sequence[int] | None = None,
        memory_mode: Mode | None = None,
        keep: bool = True,
        text: Text | None = None,
        traced: bool = False,
        memory: Mode | None = None,
    ) -> tuple[Float[Tensor, "b t d"], State] | Trace:
        """The last layer's output, normalised, and the state.

        Args:
            x: features of the configuration's dim.
            state: None at a document's start, then what the call before returned.
            mask: true where a token counts. Padding, wherever it stands, is not read; its output is zero.
            offsets: for documents packed one behind the other in a single row: 0, each one's end, the last being t.
            memory_mode: of this call; None: ``backbone.memory_mode``.
            keep: whether to return the state, as in `trace`.
            text: the tokens and their statistics, as in `trace`.
            traced: return all that `trace` does.
            memory: deprecated: use `memory_mode`.
        """
        if memory is not None:
            memory_mode = renamed_mode(memory, level=5)  # through the calls of nn.Module
        trace = self.trace(
            x, state, mask=mask, offsets=offsets, memory_mode=memory_mode, keep=keep, text=text
        )
        return trace if traced else (trace.hidden, trace.state)

    def trace(
        self,
        x: Float[Tensor, "b t d"],
        state: State | None = None,
        *,
        mask: Bool[Tensor, "b t"] | None = None,
        offsets: Int[Tensor, " r+1"] | Sequence[int] | None = None,
        memory_mode: Mode | None = None,
        keep: bool = True,
        text: Text | None = None,
        memory: Mode | None = None,
    ) -> Trace:
        """`forward`, with what each memory did beside it.

        If the state is not to be kept, as in training on packed documents, it has no blocks: MAC is then read several
        layers and documents at once, and kNN stores are as long as the documents. `text` is what a language model knows
        of x.
        """
        if memory is not None:
            memory_mode = renamed_mode(memory)
        self.check(x, state, mask, offsets)
        mode = self._memory_mode if memory_mode is None else self.check_mode(memory_mode)
        if mask is not None and not bool(mask.all()):
            return self._trace_masked(x, state, mask, mode, keep, text)
        rows = x.shape[0] if offsets is None else count_documents(offsets)
        borders = check_offsets(
            offsets, x.shape[0], x.shape[1], rows if state is None else len(state.position)
        )
        if x.shape[0] == 0 or x.shape[1] == 0:
            return Trace(x, state or self.start(rows), (None,) * len(self.blocks), (x,) * len(self.blocks))
        position = self._nothing(rows, x.device) if state is None else state.position
        ctx = Context(position, borders, mode, text, Shared(), keep)
        strides = [stride for stride in [mixer.stride for mixer in self.mixers] if stride is not None]
        if borders is not None and state is None and not keep and mode == "on" and self._reads_in_wavefront():
            return self._read_lanes(x, ctx, borders)
        trace = self._read_strides(x, state, ctx, gcd(*strides)) if strides else self._read(x, state, ctx)
        return trace if keep else trace._replace(state=State((), trace.state.position))

    def _read(self, x: Tensor, state: State | None, ctx: Context) -> Trace:
        """One layer after the other, or whole segments in a wavefront where that is faster."""
        whole = self._whole_segments(x.shape[1], state, ctx)
        if whole is None:
            return self._read_layers(x, state, ctx)
        sizes = [whole.start, whole.stop - whole.start, x.shape[1] - whole.stop]
        parts = x.split(sizes, 1) if sizes[1] < x.shape[1] else (x[:, :0], x, x[:, :0])
        first = 0
        schedules: list[Callable[[Tensor, State | None, Context], Trace]]
        schedules = [self._read_layers, self._read_wavefront, self._read_layers]
        pieces: list[Trace] = []
        for some, schedule in zip(parts, schedules, strict=True):
            if some.shape[1]:
                last = first + some.shape[1]
                text = ctx.text and ctx.text._replace(tokens=ctx.text.tokens[:, first:last])
                position = ctx.position if state is None else state.position
                here = Context(position, None, ctx.mode, text, Shared(), ctx.keep)
                pieces.append(schedule(some, state, here))
                state, first = pieces[-1].state, last
        return pieces[0] if len(pieces) == 1 else Trace.join(pieces)

    def _read_layers(self, x: Tensor, state: State | None, ctx: Context) -> Trace:
        ends: list[Any] = []
        traces, layers = [], []
        for index, block in enumerate(self.blocks):
            layers.append(x)
            x, end, trace = self._call(block, x, None if state is None else state.blocks[index], ctx)
            ends.append(end)
            traces.append(trace)
        tokens = layers[0].shape[1]
        counts = (
            tokens if ctx.offsets is None else torch.tensor(ctx.offsets, device=ctx.position.device).diff()
        )
        return Trace(
            self.norm(x),
            State(tuple(ends), advance_position(ctx.position, counts)),
            tuple(traces),
            tuple(layers),
        )

    def _call(self, block: nn.Module, x: Tensor, state: Any, ctx: Context) -> MixerOutput:
        if self._checkpoints:
            return checkpoint(block, x, state, ctx, use_reentrant=False)
        return block(x, state, ctx)

    @property
    def _checkpoints(self) -> bool:
        return self.checkpointing and self.training and torch.is_grad_enabled()

    def _whole_segments(self, tokens: int, state: State | None, ctx: Context) -> slice | None:
        """The whole segments of a call, if they are to be read in a wavefront."""
        size = self.mixers[0].segment_length
        if (
            size is None
            or ctx.mode != "on"
            or ctx.offsets is not None
            or tokens < wavefront.MIN_SEGMENTS * size
        ):
            return None
        if not self._reads_in_wavefront():
            return None
        at = {0} if state is None else {place % size for place in positions_of(state.position)}
        start = -min(at) % size
        count = max(0, tokens - start) // size
        if len(at) > 1 or count < wavefront.MIN_SEGMENTS or not (state is None or self.remembers_all(state)):
            return None
        return slice(start, start + count * size)

    def _reads_in_wavefront(self) -> bool:
        if self.schedule == "layers" or torch.compiler.is_compiling() or not ours(self):
            return False
        return wavefront.unsupported(list(self.blocks)) is None

    def _read_wavefront(self, x: Tensor, state: State | None, ctx: Context) -> Trace:
        begun = (state or self.start(x.shape[0])).blocks
        passage = wavefront.read(list(self.blocks), x, begun, checkpointing=self._checkpoints)
        after = State(passage.states, advance_position(ctx.position, x.shape[1]))
        return Trace(self.norm(passage.x), after, passage.traces, passage.layers)

    def _read_lanes(self, x: Tensor, ctx: Context, borders: list[int]) -> Trace:
        """Packed documents from their starts, laid side by side in a wavefront; their states are lost."""
        segment = self.mixers[0].segment_length or 1
        there, back, begins = (index.to(x.device) for index in wavefront.pack_rows(borders, segment))
        start = self.start(len(there)).blocks
        lanes = gather_or_zero(x[0], there)
        passage = wavefront.read(
            list(self.blocks), lanes, start, begins=begins, checkpointing=self._checkpoints
        )
        packed = lambda rows: rows.flatten(0, 1).index_select(0, back).unsqueeze(0)
        depth = len(self.blocks)
        traces = wavefront.LazySequence(
            depth, lambda layer: MemoryTrace.mapped(passage.traces[layer], packed)
        )
        layers = wavefront.LazySequence(depth, lambda layer: packed(passage.layers[layer]))
        counts = torch.tensor(borders, device=ctx.position.device).diff()
        return Trace(self.norm(packed(passage.x)), State((), ctx.position + counts), traces, layers)

    def _read_strides(self, x: Tensor, state: State | None, ctx: Context, stride: int) -> Trace:
        """So many tokens through all layers before the next, as some mixers need it."""
        position = ctx.position
        split = SegmentSplit(x, ctx.offsets, [place % stride for place in positions_of(position)], stride)
        pieces, traces, layers = [], [], []
        for part in split:
            text = ctx.text and ctx.text._replace(tokens=split.take(part, ctx.text.tokens))
            keep = ctx.keep and part is split.parts[-1]
            here = Context(position, part.offsets, ctx.mode, text, Shared(), keep)
            trace = self._read(split.take(part), state, here)
            begun = (None,) * len(self.mixers) if state is None else state.blocks
            pairs = zip(self.mixers, begun, trace.state.blocks, strict=True)
            ends = tuple(mixer.finish(old, new, trace.hidden, here) for mixer, old, new in pairs)
            position = trace.state.position
            state = State(ends, position)
            pieces.append(trace.hidden)
            traces.append(trace.traces)
            layers.append(trace.layers)
        columns = tuple(MemoryTrace.join(list(column), split.join) for column in zip(*traces, strict=True))
        joined = tuple(split.join(list(column)) for column in zip(*layers, strict=True))
        assert state is not None
        return Trace(split.join(pieces), state, columns, joined)

    def _trace_masked(
        self, x: Tensor, state: State | None, mask: Tensor, mode: Mode, keep: bool, text: Text | None
    ) -> Trace:
        """Only the tokens that count, packed behind one another: padding then cannot touch memory, position or
        window.
        """
        borders = [0, *mask.sum(1).cumsum(0).tolist()]
        packed = lambda full: full[mask].unsqueeze(0)
        text = text and text._replace(tokens=packed(text.tokens))
        inside = self.trace(packed(x), state, offsets=borders, memory_mode=mode, keep=keep, text=text)
        traces = tuple(
            MemoryTrace.mapped(trace, lambda tensor: pad_to_mask(tensor, mask)) for trace in inside.traces
        )
        layers = tuple(pad_to_mask(layer, mask) for layer in inside.layers)
        return Trace(pad_to_mask(inside.hidden, mask), inside.state, traces, layers)

    def remembers_all(self, state: State) -> bool:
        """Whether the memories have read what the model has: after a call with its memory off their chunks begin
        elsewhere.
        """
        return all(
            positions_of(memory.position) == positions_of(state.position) for memory in memories(state)
        )

    def check(self, x: Tensor, state: object, mask: object, offsets: object) -> None:
        dim = self.config.dim
        if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[-1] != dim or not x.is_floating_point():
            got = f"{list(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"x: expected floating-point features [batch, tokens, {dim}], got {got}")
        self.check_state(state)
        if mask is not None:
            if offsets is not None:
                raise ValueError(
                    "offsets: expected None beside a mask, got both; a mask already says where each document lies"
                )
            if not isinstance(mask, Tensor) or mask.shape != x.shape[:2] or mask.dtype != torch.bool:
                got = f"{list(mask.shape)} {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
                raise ValueError(
                    f"mask: expected booleans of shape {list(x.shape[:2])}, true where a token counts, got {got}"
                )

    def check_state(self, state: object) -> None:
        """Refuse what is not a state of this model; None is one."""
        if state is None:
            return
        if not isinstance(state, State) or len(state.blocks) != len(self.blocks):
            raise ValueError(
                f"state: expected the State this model returned, or None, got {type(state).__name__}"
            )
        for mixer, part in zip(self.mixers, state.blocks, strict=True):
            mixer.check(part)
