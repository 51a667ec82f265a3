"""The stack of layers of a model: maps features to features and keeps one state for all layers.

A language model adds an embedding and a head (`remanence.model`). Other inputs, such as a time series or the
embeddings of another model, can be passed directly.
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
from remanence.layers import Module, RMSNorm
from remanence.mixers import Context, MemoryTrace, Mixer, MixerOutput, SharedValues, Text, wavefront
from remanence.mixers.block import Block
from remanence.ops.checks import check_offsets, count_documents
from remanence.ops.layout import gather_or_zero, pad_to_mask
from remanence.ops.state import memories
from remanence.runtime.choices import check_choice
from remanence.runtime.keywords import show_fields
from remanence.runtime.mode import RenamedMode, renamed_mode
from remanence.runtime.module import is_package_module
from remanence.runtime.positions import advance_position, positions_of, with_host_copy
from remanence.runtime.ragged import SegmentSplit
from remanence.runtime.state import TensorTuple
from remanence.trace import Trace

__all__ = ["Backbone", "Block", "Schedule", "State", "Trace", "memories"]

Schedule = Literal["wavefront", "layers"]
"""How layers that read by segments are computed: "wavefront", several layers at once where possible, or
"layers", one layer after the other.
"""


class _State(NamedTuple):
    """The fields of `State`: the state of each block, and the number of tokens read ``[r]``."""

    blocks: tuple[Any, ...]
    position: Tensor


class State(_State, TensorTuple):
    """The recurrent state of a model, one row per document: the state of each block, and the number of tokens read
    ``[r]``.

    Every call returns a new state and never changes one in place: keep a state to continue from it later. Its size does
    not depend on the number of tokens read, except with full attention.
    """

    __slots__ = ()

    @property
    def diverged(self) -> Bool[Tensor, " r"]:
        """Per row: whether any memory has become infinite, NaN or too large since the start of the document."""
        flags = [memory.diverged for memory in memories(self)]
        return torch.stack(flags).any(0) if flags else torch.zeros_like(self.position, dtype=torch.bool)

    def agrees(self, read: Tensor) -> Tensor:
        """Whether each row can have read this many tokens ``[r]``: true unless the number is negative. The
        nested states have their own checks.
        """
        return read >= 0

    def crop(self, tokens: int) -> State:
        """Return the state before the last `tokens` tokens. These tokens must all be in the current chunk of
        every memory, and every memory must have read them.
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


class Backbone(Module):
    """A stack of layers: ``y, state = Backbone(config)(x, state)``, features ``[b t d]`` in, normalised features out.

    Pass ``state=None`` at the start of a document, and the returned state in the following calls. ``memory_mode``
    controls the neural and kNN memories: "on"; "off", no memory; "frozen", read but not written; "fresh", reset at
    every segment. Each call takes it as an argument; the default is ``backbone.memory_mode``. Set
    ``backbone.checkpointing`` to use activation checkpointing in training. ``backbone.schedule`` is the order
    in which layers that read by segments are computed; see `Schedule`.
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
        """Scale the residual branches down with the number of layers; see docs/paper.md."""
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if name.endswith(("o_proj.weight", "down.weight")):
                    weight.mul_((2 * self.config.num_layers) ** -0.5)

    @property
    def mixers(self) -> list[Mixer]:
        """The mixer of each block, in the order of the layers."""
        return [block.mixer for block in self.blocks]  # type: ignore[misc]

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def memory_mode(self) -> Mode:
        """The memory mode of calls without a `memory_mode` argument."""
        return self._memory_mode

    @memory_mode.setter
    def memory_mode(self, mode: Mode) -> None:
        self._memory_mode = self.check_mode(mode)

    memory = RenamedMode()
    """Deprecated name of `memory_mode`."""

    @property
    def schedule(self) -> Schedule:
        """The order in which layers that read by segments are computed; see `Schedule`."""
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: Schedule) -> None:
        check_choice("schedule", schedule, ("wavefront", "layers"))
        self._schedule = schedule

    @property
    def has_memory(self) -> bool:
        """Whether any layer has a memory."""
        return any(mixer.has_memory for mixer in self.mixers)

    def check_mode(self, mode: Mode) -> Mode:
        """Return the mode; raise an error if the model does not support it (without a memory, only "on" is)."""
        check_choice("memory_mode", mode, MODES)
        if mode != "on" and not self.has_memory:
            raise ValueError(
                f"memory_mode: expected 'on', as the blocks {self.config.pattern} have no memory, got {mode!r}"
            )
        return mode

    def start(self, rows: int) -> State:
        """Return the initial state of `rows` documents, before the first token."""
        blocks = tuple(block.start(rows) for block in self.blocks)  # type: ignore[operator]
        return State(blocks, self._zero_position(rows, self.device))

    def _zero_position(self, rows: int, device: torch.device) -> Tensor:
        """Return the position 0 for each of `rows` documents ``[r]``. On a GPU, the host keeps a copy of it."""
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
        """Return the normalised output of the last layer ``[b t d]`` and the new state.

        Args:
            x: features of width `config.dim`.
            state: None at the start of a document; otherwise the state that the previous call returned.
            mask: true for tokens, false for padding, which may be anywhere. Padding does not change the state; its
                output is zero.
            offsets: for documents packed into a single row: 0 and the end of each document.
            memory_mode: the memory mode of this call. None means ``backbone.memory_mode``.
            keep: whether to return the state of the blocks; see `trace`.
            text: the tokens and their statistics; see `trace`. None if the features are not from tokens.
            traced: whether to return a `Trace`, as `trace` does.
            memory: deprecated: use `memory_mode`.
        """
        if memory is not None:
            memory_mode = renamed_mode(
                memory, level=5
            )  # the caller is 5 frames up, because nn.Module adds frames
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
        """Run `forward` and return a `Trace`, which also has the surprise and gates of each memory.

        With ``keep=False``, as in training on packed documents, the returned state has no blocks. This allows MAC
        to compute several layers and documents at once, and kNN stores to be only as long as the documents. `text`
        holds the tokens of a language model, which some mixers use.
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
        position = self._zero_position(rows, x.device) if state is None else state.position
        ctx = Context(position, borders, mode, text, SharedValues(), keep)
        strides = [stride for stride in [mixer.stride for mixer in self.mixers] if stride is not None]
        if borders is not None and state is None and not keep and mode == "on" and self._reads_in_wavefront():
            return self._read_lanes(x, ctx, borders)
        trace = self._read_strides(x, state, ctx, gcd(*strides)) if strides else self._read(x, state, ctx)
        return trace if keep else trace._replace(state=State((), trace.state.position))

    def _read(self, x: Tensor, state: State | None, ctx: Context) -> Trace:
        """Run the layers one after the other, or compute whole segments in a wavefront where that is
        possible.
        """
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
                here = Context(position, None, ctx.mode, text, SharedValues(), ctx.keep)
                pieces.append(schedule(some, state, here))
                state, first = pieces[-1].state, last
        return pieces[0] if len(pieces) == 1 else Trace.join(pieces)

    def _read_layers(self, x: Tensor, state: State | None, ctx: Context) -> Trace:
        """Run the layers one after the other on all tokens of the call."""
        states: list[TensorTuple] = []
        traces, layers = [], []
        for index, block in enumerate(self.blocks):
            layers.append(x)
            x, after, trace = self._call(block, x, None if state is None else state.blocks[index], ctx)
            states.append(after)
            traces.append(trace)
        tokens = layers[0].shape[1]
        counts = (
            tokens if ctx.offsets is None else torch.tensor(ctx.offsets, device=ctx.position.device).diff()
        )
        return Trace(
            self.norm(x),
            State(tuple(states), advance_position(ctx.position, counts)),
            tuple(traces),
            tuple(layers),
        )

    def _call(self, block: nn.Module, x: Tensor, state: TensorTuple | None, ctx: Context) -> MixerOutput:
        """Call one block, with activation checkpointing if it is enabled."""
        if self._checkpoints:
            return checkpoint(block, x, state, ctx, use_reentrant=False)
        return block(x, state, ctx)

    @property
    def _checkpoints(self) -> bool:
        """Whether the current call uses activation checkpointing: enabled, in training mode, with gradients."""
        return self.checkpointing and self.training and torch.is_grad_enabled()

    def _whole_segments(self, tokens: int, state: State | None, ctx: Context) -> slice | None:
        """Return the slice of the tokens that consists of whole segments, or None if they cannot be read in a
        wavefront.
        """
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
        """Whether the schedule and the blocks allow several layers to be computed at once."""
        if self.schedule == "layers" or torch.compiler.is_compiling() or not is_package_module(self):
            return False
        return wavefront.unsupported_reason(list(self.blocks)) is None

    def _read_wavefront(self, x: Tensor, state: State | None, ctx: Context) -> Trace:
        """Read whole segments and compute several layers at once."""
        initial = (state or self.start(x.shape[0])).blocks
        passage = wavefront.read(list(self.blocks), x, initial, checkpointing=self._checkpoints)
        after = State(passage.states, advance_position(ctx.position, x.shape[1]))
        return Trace(self.norm(passage.x), after, passage.traces, passage.layers)

    def _read_lanes(self, x: Tensor, ctx: Context, borders: list[int]) -> Trace:
        """Read packed documents, each from its start, as the rows of a wavefront. Their states are not
        returned.
        """
        segment = self.mixers[0].segment_length or 1
        rows, inverse, begins = (index.to(x.device) for index in wavefront.pack_rows(borders, segment))
        start = self.start(len(rows)).blocks
        lanes = gather_or_zero(x[0], rows)
        passage = wavefront.read(
            list(self.blocks), lanes, start, begins=begins, checkpointing=self._checkpoints
        )
        packed = lambda lanes: lanes.flatten(0, 1).index_select(0, inverse).unsqueeze(0)
        depth = len(self.blocks)
        traces = wavefront.LazySequence(
            depth, lambda layer: MemoryTrace.map_tensors(passage.traces[layer], packed)
        )
        layers = wavefront.LazySequence(depth, lambda layer: packed(passage.layers[layer]))
        counts = torch.tensor(borders, device=ctx.position.device).diff()
        return Trace(self.norm(packed(passage.x)), State((), ctx.position + counts), traces, layers)

    def _read_strides(self, x: Tensor, state: State | None, ctx: Context, stride: int) -> Trace:
        """Run all layers on `stride` tokens before the next `stride` tokens, for mixers that require it."""
        position = ctx.position
        split = SegmentSplit(x, ctx.offsets, [place % stride for place in positions_of(position)], stride)
        pieces, traces, layers = [], [], []
        for part in split:
            text = ctx.text and ctx.text._replace(tokens=split.take(part, ctx.text.tokens))
            keep = ctx.keep and part is split.parts[-1]
            here = Context(position, part.offsets, ctx.mode, text, SharedValues(), keep)
            trace = self._read(split.take(part), state, here)
            before = (None,) * len(self.mixers) if state is None else state.blocks
            pairs = zip(self.mixers, before, trace.state.blocks, strict=True)
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
        self, x: Tensor, state: State | None, mask: Tensor, memory_mode: Mode, keep: bool, text: Text | None
    ) -> Trace:
        """Remove the padding, read the tokens packed into one row, and restore the padding in the results.
        Padding therefore cannot change a state.
        """
        borders = [0, *mask.sum(1).cumsum(0).tolist()]
        packed = lambda full: full[mask].unsqueeze(0)
        text = text and text._replace(tokens=packed(text.tokens))
        inside = self.trace(packed(x), state, offsets=borders, memory_mode=memory_mode, keep=keep, text=text)
        traces = tuple(
            MemoryTrace.map_tensors(trace, lambda tensor: pad_to_mask(tensor, mask))
            for trace in inside.traces
        )
        layers = tuple(pad_to_mask(layer, mask) for layer in inside.layers)
        return Trace(pad_to_mask(inside.hidden, mask), inside.state, traces, layers)

    def remembers_all(self, state: State) -> bool:
        """Whether every memory has read all tokens of the state. After a call with the memory off, a memory
        has read fewer, and its chunks no longer start at the same positions.
        """
        return all(
            positions_of(memory.position) == positions_of(state.position) for memory in memories(state)
        )

    def check(self, x: Tensor, state: object, mask: object, offsets: object) -> None:
        """Raise an error if the arguments of a call have wrong types or shapes."""
        dim = self.config.dim
        if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[-1] != dim or not x.is_floating_point():
            got = f"{list(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"x: expected floating-point features [batch, tokens, {dim}], got {got}")
        self.check_state(state)
        if mask is not None:
            if offsets is not None:
                raise ValueError(
                    "offsets: expected None beside a mask, got both; a mask already separates documents"
                )
            if not isinstance(mask, Tensor) or mask.shape != x.shape[:2] or mask.dtype != torch.bool:
                got = f"{list(mask.shape)} {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
                raise ValueError(
                    f"mask: expected booleans of shape {list(x.shape[:2])}, true where a token counts, got {got}"
                )

    def check_state(self, state: object) -> None:
        """Raise an error if a state does not belong to this model. None is accepted."""
        if state is None:
            return
        if not isinstance(state, State) or len(state.blocks) != len(self.blocks):
            raise ValueError(
                f"state: expected the State this model returned, or None, got {type(state).__name__}"
            )
        for mixer, part in zip(self.mixers, state.blocks, strict=True):
            mixer.check(part)
