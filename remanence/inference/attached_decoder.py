"""Decoding of pretrained models with a window, one token at a time, with keys, values and memories in fixed buffers
that are updated in place.

A step calls the code of the pretrained model, so hooks on its modules run. On CUDA, a step is captured as one graph if
the pretrained model is of a known family and nothing but this package has changed its modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from remanence.attached.layer import AttachedLayer, AttachedLayerState
from remanence.attached.model import Attached
from remanence.attached.reading import Call, memory_input, set_current_call, sink_rotations
from remanence.attached.window import (
    SeenSinks,
    WindowSpec,
    WindowState,
    as_bias,
    rotated,
    score_dtype,
    sink_bias,
    window_softmax,
)
from remanence.backbone import State
from remanence.config import Mode
from remanence.inference.decoder import DECODERS, Decoder
from remanence.layers.attention import AttentionState
from remanence.layers.decoding import StepContext
from remanence.memory.neural import NeuralMemoryState
from remanence.mixers import Text
from remanence.mixers.memory import Memory, MemoryDecoder
from remanence.runtime.module import GLOBAL_HOOKS, hooks_of, replaced_method


class WindowSlots:
    """The keys and values ``[r h s e]`` of the first tokens, then of the last tokens, in which the slot of a token is
    its position modulo the number of slots. Inactive rows write to one more slot, which is never read.
    """

    def __init__(self, spec: WindowSpec, state: WindowState) -> None:
        self.spec, self.count, self.size = spec, state.k.shape[1], spec.history + 1
        self.begin, self.slack = state.position.clone(), state.window.slack.clone()
        self.dtype = state.k.dtype
        rows, _, heads, width = state.window.k.shape
        self.rows = torch.arange(rows, device=state.k.device)
        # Whether any first token is still to be read.
        self.fills = self.count > 0 and int(self.begin.min()) < self.count
        shape = rows, heads, self.count + self.size + 1, width
        with torch.no_grad():
            self.k, self.v = (state.k.new_zeros(shape, dtype=score_dtype(state.k)) for _ in range(2))
        index = self._ring_index(state.position, self.rows)
        for buffer, first, last in (
            (self.k, state.k, state.window.k),
            (self.v, state.v, state.window.v),
        ):
            by_slot = buffer.transpose(1, 2)
            by_slot[:, : self.count] = first.detach().to(buffer.dtype)
            by_slot[index] = last.detach().to(buffer.dtype)

    def _ring_index(self, position: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The indices of some rows, and those of the slots of their last tokens, the newest last."""
        token = position[rows].unsqueeze(-1) + torch.arange(-self.spec.history, 0, device=position.device)
        return rows.unsqueeze(-1), self.count + token % self.size

    def _slot(self, ctx: StepContext) -> Tensor:
        """The slot of the token of each row ``[r]``."""
        return torch.where(ctx.active, self.count + ctx.position % self.size, self.count + self.size)

    def _first_slot(self, ctx: StepContext) -> Tensor:
        """The slot of the token of each row among the first tokens ``[r]``."""
        here = ctx.active & (ctx.position < self.count)
        return torch.where(here, ctx.position, self.count + self.size)

    def _ring_bias(self, position: Tensor) -> Tensor:
        """The bias ``[r 1 s]`` of the scores of a token at this position with the last tokens."""
        position = position.unsqueeze(-1)
        age = (position - torch.arange(self.size, device=position.device)) % self.size
        return as_bias((age <= position) & (age < self.spec.window), self.k.dtype).unsqueeze(1)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scaling: float,
        rotation: tuple[Tensor, Tensor] | None,
        cap: float | None,
        ctx: StepContext,
    ) -> Tensor:
        """Write the keys and values of a token ``[r 1 h e]`` and compute its attention ``[r 1 h e]``, as
        `attached.window.attend`.
        """
        shape = self.size, self.count, self.spec
        slots = [ctx.cached("slot", *shape, make=lambda: self._slot(ctx))]
        if self.fills:
            slots.append(ctx.cached("first slot", *shape, make=lambda: self._first_slot(ctx)))
        for buffer, new in ((self.k, k), (self.v, v)):
            for slot in slots:
                buffer[self.rows, :, slot] = new[:, 0].to(buffer.dtype)
        bias = ctx.cached("bias", *shape, make=lambda: self._ring_bias(ctx.position))
        own, last, far = q * scaling, slice(self.count, self.count + self.size), None
        if self.spec.is_narrowed and self.count:
            make = lambda: sink_bias(ctx.position.unsqueeze(-1), self.count, self.spec.window, self.k.dtype)
            far_bias = ctx.cached("first bias", *shape, make=make)
            first = self.k[:, :, : self.count], self.v[:, :, : self.count]
            far = SeenSinks(*first, rotated(own, rotation), far_bias)
        return window_softmax(own, self.k[:, :, last], self.v[:, :, last], bias, far, cap).to(q.dtype)

    def state(self, position: Tensor, rows: Tensor | None = None) -> WindowState:
        """A copy of the contents as a state, for rows at these positions; with `rows`, of some of them."""
        rows = self.rows if rows is None else rows
        index = self._ring_index(position, rows)
        by_slot = self.k.transpose(1, 2), self.v.transpose(1, 2)
        first, last = (
            [x[rows, : self.count].to(self.dtype).contiguous() for x in by_slot],
            [x[index].to(self.dtype) for x in by_slot],
        )
        slack = (self.slack + position - self.begin).clamp(max=self.spec.slack)
        window = AttentionState(last[0], last[1], position[rows], slack[rows])
        return WindowState(first[0], first[1], window)


class LayerDecoder:
    """The attention window and the memory of one layer."""

    remaining_capacity: int | None = None
    is_capturable = True

    def __init__(self, layer: AttachedLayer, state: AttachedLayerState, memory_mode: Mode) -> None:
        assert layer.window_spec is not None and isinstance(state.attention, WindowState)
        self.window = WindowSlots(layer.window_spec, state.attention)
        self.memory: MemoryDecoder | None = None
        if layer.memory is not None:
            assert isinstance(layer.memory, Memory) and isinstance(state.memory, NeuralMemoryState)
            self.memory = MemoryDecoder(layer.memory, state.memory, memory_mode)

    def state(self, position: Tensor, rows: Tensor | None = None) -> AttachedLayerState:
        """A copy of the state, for rows at these positions; with `rows`, of some of them."""
        memory = None if self.memory is None else self.memory.state()
        if memory is not None and rows is not None:
            memory = memory.rows(rows)
        return AttachedLayerState(self.window.state(position, rows), memory)

    @property
    def diverged(self) -> Tensor | None:
        return None if self.memory is None else self.memory.diverged

    def finish(self, hidden: Tensor, ctx: StepContext) -> None:
        """Nothing is left to do after the last layer."""


class StepCall(Call):
    """A call of the pretrained model for one token per row, whose layers use buffers."""

    def __init__(
        self, model: Attached, memory_mode: Mode, layers: list[LayerDecoder], ctx: StepContext
    ) -> None:
        super().__init__(model, memory_mode, None, ctx.position, None, None)
        self.layers, self.ctx, self.text = layers, ctx, ctx.text
        self.rotations = sink_rotations(model, ctx.position.unsqueeze(-1))

    def attend(
        self,
        layer: AttachedLayer,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scaling: float,
        rotation: tuple[Tensor, Tensor] | None,
        cap: float | None,
    ) -> Tensor:
        return self.layers[layer.index].window.attend(q, k, v, scaling, rotation, cap, self.ctx)

    def read_memory(self, layer: AttachedLayer, memory: Memory, x: Tensor) -> Tensor:
        decoder = self.layers[layer.index].memory
        assert decoder is not None
        return decoder.step(memory_input(memory, x), self.ctx).to(x.dtype)


class AttachedDecoder(Decoder):
    """Decodes a pretrained model with a window token by token, as `Decoder`.

    `context` makes a context manager in which the pretrained model is called; `own_hooks` are the ids of hooks that
    belong to it.
    """

    model: Any
    decoders: Any
    is_faster_on_cpu = True

    def __init__(
        self,
        model: Attached,
        state: State,
        memory_mode: Mode | None = None,
        graph: bool | None = None,
        *,
        context: Callable[[], AbstractContextManager[None]] = nullcontext,
        own_hooks: Iterable[int] = (),
    ) -> None:
        self.context = context
        self.own_hooks = {*own_hooks, *(layer.hook.id for layer in model.attached_layers if layer.hook)}
        super().__init__(model, state, memory_mode, graph)  # type: ignore[arg-type]

    @staticmethod
    def layers_unsupported_reason(model: Any) -> str | None:
        return None  # the code of the pretrained model is called

    def _check(self, state: State) -> None:
        self.model.check_state(state)

    def _make_decoders(self, state: State) -> Any:
        pairs = zip(self.model.attached_layers, state.blocks, strict=True)
        return [LayerDecoder(layer, part, self.memory_mode) for layer, part in pairs]

    @torch.no_grad()
    def rows(self, index: list[int]) -> State:
        if self.called is not None:
            return self.called.rows(index)
        rows = torch.tensor(index, device=self.device)
        blocks = tuple(decoder.state(self.position, rows) for decoder in self.decoders)
        return State(blocks, self.position[rows])

    def _altered(self) -> bool:
        return (
            not self.model.family.is_supported
            or foreign_code_reason(self.watch.modules, self.own_hooks) is not None
        )

    def _forward(self) -> Tensor:
        text = Text(self.tokens.unsqueeze(1), None, self.model.logits)
        ctx = StepContext(self.position, self.active, {}, text)
        with torch.autocast(self.device.type, enabled=False), self.context():
            call = StepCall(self.model, self.memory_mode, self.decoders, ctx)
            with set_current_call(call):
                out = self.model.base.base_model(
                    input_ids=self.tokens.unsqueeze(1),
                    position_ids=self.position.unsqueeze(1),
                    use_cache=False,
                )
            logits = self.model.logits(out.last_hidden_state)[:, 0]
        self.position += self.active
        return logits


def _is_from_transformers(hook: Any) -> bool:
    """Whether transformers defines a hook. It installs hooks that record the outputs of layers when these are wanted,
    which they are not in decoding.
    """
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


def foreign_code_reason(modules: Iterable[nn.Module], own_hooks: set[int]) -> str | None:
    """Why calling these modules may run code of the user: hooks with other ids than `own_hooks`, or methods replaced on
    the instance; None if it does not.
    """
    if any(GLOBAL_HOOKS):
        return "torch has global module hooks"
    for module in modules:
        name = type(module).__name__
        if any(
            key not in own_hooks and not _is_from_transformers(hook)
            for hooks in hooks_of(module)
            for key, hook in hooks.items()
        ):
            return f"a module ({name}) has hooks"
        if (method := replaced_method(module)) is not None:
            return f"the method {method} of a module ({name}) is replaced"
    return None


DECODERS[Attached] = AttachedDecoder
