"""The forward pass of a pretrained model with memories, in two versions: with the model's own attention and
cache, or with a sliding window.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from remanence.attached.layer import AttachedLayer, AttachedLayerState
from remanence.attached.store import AttachedKnn
from remanence.attached.window import WindowState, attend, relative_rotation
from remanence.backbone import State, Trace
from remanence.config import Mode
from remanence.layers.attention import AttentionState
from remanence.memory.neural import NeuralMemoryState
from remanence.mixers import KnnState, MemoryTrace, SharedValues, Text
from remanence.mixers.memory import Memory
from remanence.ops.layout import from_rows, pad_to_mask, to_rows
from remanence.runtime.positions import advance_position, positions_of, with_host_copy

if TYPE_CHECKING:
    from transformers.cache_utils import DynamicCache

    from remanence.attached.model import Attached


class Call:
    """One forward pass of the pretrained model: the arguments that its layers need, and the results that they add.

    position
        Number of tokens that each row has read before this call ``[r]``.
    offsets
        For packed documents, or rows with padding removed: 0, then the end of each document; None otherwise.
    mask
        True at tokens, false at padding ``[b t]``; None without padding.
    rotations
        For each `Family.rotation_key`, the cosines and sines that rotate queries to where they see the first tokens.
    attention_states, memories, traces
        The results of each layer, by its index.
    inputs
        The inputs of attention modules with a kNN store, by layer index.
    """

    def __init__(
        self,
        model: Attached,
        memory_mode: Mode,
        state: State | None,
        position: Tensor,
        offsets: list[int] | None,
        mask: Tensor | None,
    ) -> None:
        self.model, self.memory_mode, self.state, self.position = model, memory_mode, state, position
        self.offsets, self.mask = offsets, mask
        self.rotations: dict[str, tuple[Tensor, Tensor]] = {}
        self.text: Text | None = None
        self.shared = SharedValues()
        self.keep = True
        self.attention_states: dict[int, AttentionState | WindowState] = {}
        self.inputs: dict[int, Tensor] = {}
        self.memories: dict[int, NeuralMemoryState | KnnState] = {}
        self.traces: dict[int, MemoryTrace | None] = {}

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
        """The output of windowed attention of a layer ``[b t h e]`` for rotated queries, keys and values. It also reads
        the kNN store of the layer, if there is one.
        """
        assert layer.window_spec is not None
        index, memory = layer.index, layer.memory
        state = None if self.state is None else self.state.blocks[index]
        attention = state and state.attention
        seen = attend(q, k, v, attention, layer.window_spec, scaling, rotation, self.offsets, cap)
        self.attention_states[index] = seen.state
        if not isinstance(memory, AttachedKnn):
            return from_rows(seen.y, seen.packed_index)
        owner = layer.owner
        queries_keys = owner.family.queries_keys(layer.module, self.inputs.pop(index), owner.config.heads)
        y, self.memories[index] = memory.read(seen, queries_keys, state and state.memory, self)
        return y

    def read_memory(self, layer: AttachedLayer, memory: Memory, x: Tensor) -> Tensor:
        """The output of the neural memory of a layer for the input of its attention module ``[b t d]``."""
        index = layer.index
        state = None if self.state is None else self.state.blocks[index].memory
        inner = x if self.mask is None else x[self.mask].unsqueeze(0)
        inner = memory_input(memory, inner)
        m, self.memories[index], self.traces[index] = memory(inner, state, self.offsets, self.memory_mode)
        return (m if self.mask is None else pad_to_mask(m, self.mask)).to(x.dtype)


def memory_input(memory: Memory, x: Tensor) -> Tensor:
    """The input of a neural memory in its dtype, which may be wider than that of the pretrained model."""
    return x if torch.is_autocast_enabled(x.device.type) else x.to(memory.layer.o_proj.weight.dtype)


CURRENT_CALL: ContextVar[Call | None] = ContextVar("call", default=None)
"""The running call in this thread; None if there is none. Hooks read it from here, because the code of the
pretrained model cannot pass additional arguments to its attention modules.
"""


@contextmanager
def set_current_call(call: Call | None) -> Iterator[None]:
    """A context manager that sets `CURRENT_CALL`."""
    token = CURRENT_CALL.set(call)
    try:
        yield
    finally:
        CURRENT_CALL.reset(token)


def read_windowed(
    model: Attached, tokens: Tensor, state: State | None, mask: Tensor | None, borders: list[int] | None,
    memory_mode: Mode, keep: bool, layers: bool,
) -> Trace:  # fmt: skip
    """Run the model with sliding windows. If there is a mask, padding is removed and the rows are read as
    packed documents, as in `Backbone`. `keep`: whether to return a complete state; `layers`: whether to
    return the inputs of the layers.
    """
    if mask is not None:
        borders = [0, *mask.sum(1).cumsum(0).tolist()]
        inside = read_windowed(
            model, tokens[mask].unsqueeze(0), state, None, borders, memory_mode, keep, layers
        )
        traces = tuple(
            MemoryTrace.map_tensors(trace, lambda x: pad_to_mask(x, mask)) for trace in inside.traces
        )
        return Trace(
            pad_to_mask(inside.hidden, mask),
            inside.state,
            traces,
            tuple(pad_to_mask(x, mask) for x in inside.layers),
        )
    rows = len(tokens) if borders is None else len(borders) - 1
    position = start_position(model, rows, state)
    place = position.unsqueeze(-1) + torch.arange(tokens.shape[1], device=tokens.device)
    if borders is not None:
        counts = torch.tensor(borders, device=tokens.device).diff()
        begin = position - torch.tensor(borders[:-1], device=tokens.device)
        place = (
            begin.repeat_interleave(counts) + torch.arange(tokens.shape[1], device=tokens.device)
        ).unsqueeze(0)
    call = Call(model, memory_mode, state, position, borders, None)
    call.keep = keep
    call.text = Text(tokens, None, model.logits)
    call.rotations = sink_rotations(model, place)
    hidden, inner = run_base(model, call, layers, input_ids=tokens, position_ids=place, use_cache=False)
    return make_trace(model, call, hidden, inner, borders, tokens.shape[1])


def sink_rotations(model: Attached, place: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """The cosines and sines that rotate queries at positions `place` ``[b t]`` to where they see the first tokens, by
    `Family.rotation_key`; empty if these are not seen.
    """
    if not model.config.sinks:
        return {}
    # Queries beyond this position see the first tokens as if they were at this position.
    like, farthest = model.embed.weight[:1].float(), (model._window or 0) + model.config.sinks - 1
    now, then = (model.family.rotations(model.base, like, at) for at in (place, place.clamp(max=farthest)))
    return {name: relative_rotation(now[name], then[name]) for name in now}


def read_full_attention(
    model: Attached, tokens: Tensor, state: State | None, mask: Tensor | None, borders: list[int] | None,
    memory_mode: Mode, keep: bool, layers: bool,
) -> Trace:  # fmt: skip
    """Run the model with its own attention, masks and cache. The arguments are those of `read_windowed`."""
    if borders is not None:  # unpack the documents to one row each
        rows, back = to_rows(tokens, borders)
        counts = torch.tensor(borders, device=tokens.device).diff()
        inner_mask = torch.arange(rows.shape[1], device=tokens.device) < counts.unsqueeze(-1)
        inside = model.trace(rows, state, mask=inner_mask, memory_mode=memory_mode, keep=keep, layers=layers)
        packed = lambda x: x.flatten(0, 1).index_select(0, back).unsqueeze(0)
        traces = tuple(MemoryTrace.map_tensors(trace, packed) for trace in inside.traces)
        return Trace(packed(inside.hidden), inside.state, traces, tuple(packed(x) for x in inside.layers))
    if model._checkpointing and model.training and torch.is_grad_enabled():
        # transformers supports no cache with activation checkpointing.
        if state is not None:
            raise ValueError(
                "state: expected None while checkpointing, with attention that is not narrowed, got one"
            )
        keep = False
    if mask is not None and model.has_windows and bool((mask[:, 1:] > mask[:, :-1]).any()):
        # transformers counts padding as a part of a sliding window, so padding is moved to the end of each row.
        order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)
        inside = read_full_attention(
            model, tokens.gather(1, order), state, mask.gather(1, order), None, memory_mode, keep, layers
        )
        return _reordered(inside, order.argsort(dim=1))
    position = start_position(model, len(tokens), state)
    offsets = None if mask is None else [0, *mask.sum(1).cumsum(0).tolist()]
    call = Call(model, memory_mode, state, position, offsets, mask)
    call.keep = keep
    arguments: dict[str, Tensor | bool | DynamicCache] = {
        "input_ids": tokens,
        "use_cache": keep or state is not None,
    }
    positions = positions_of(position)
    longest = max(positions)
    is_cached = torch.arange(-longest, 0, device=tokens.device) >= -position.unsqueeze(-1)
    is_token = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    is_known_token = torch.cat([is_cached, is_token], 1)
    cache = restore_cache(model, state, longest) if arguments["use_cache"] else None
    if cache is not None:
        arguments["past_key_values"] = cache
    if mask is not None or min(positions) < longest:
        arguments |= {
            "attention_mask": is_known_token.long(),
            "position_ids": (is_known_token.cumsum(1) - 1).clamp(min=0)[:, longest:],
        }
    hidden, inner = run_base(model, call, layers, **arguments)
    if keep and cache is not None:
        record_cache(model, call, cache, is_known_token, position + is_token.sum(1))
    trace = make_trace(model, call, hidden, inner, None, tokens.shape[1])
    if mask is None:
        return trace
    traces = tuple(MemoryTrace.map_tensors(each, lambda x: pad_to_mask(x, mask)) for each in trace.traces)
    # The hidden vectors at padding are meaningless. They are not set to zero.
    return trace._replace(traces=traces, state=trace.state._replace(position=position + mask.sum(1)))


def start_position(model: Attached, rows: int, state: State | None) -> Tensor:
    """The number of tokens that each row has read before the call ``[r]``; zeros if `state` is None."""
    if state is not None:
        return state.position
    return with_host_copy(torch.zeros(rows, dtype=torch.int64, device=model.device), [0] * rows)


def restore_cache(model: Attached, state: State | None, longest: int) -> DynamicCache:
    """Create a transformers cache that contains the last `longest` keys and values of a state ``[r h s e]``.
    The cache is empty if `longest` is 0.
    """
    cache = model.family.cache(model.base)
    for layer in cache.layers:
        if getattr(layer, "is_sliding", False):
            layer.update = _keep_all_keys(layer)  # type: ignore[method-assign,union-attr]
    if longest:
        assert state is not None
        for index, block in enumerate(state.blocks):
            k, v = (
                x[:, x.shape[1] - longest :].transpose(1, 2) for x in (block.attention.k, block.attention.v)
            )
            cache.update(k, v, index)
    return cache


def record_cache(model: Attached, call: Call, cache: DynamicCache, read: Tensor, position: Tensor) -> None:
    """Store the keys and values of a cache as attention states in `call`. Each row is sorted so that padding
    comes first and the newest token last. `read` is true at tokens ``[r s]``, `position` the number of tokens
    read ``[r]``.
    """
    order = None
    if not bool((read[:, 1:] >= read[:, :-1]).all()):  # there is padding between or after tokens
        order = read.to(torch.uint8).argsort(dim=1, stable=True)
    for index, layer in enumerate(cache.layers):
        pair: tuple[Tensor, Tensor] = getattr(layer, "whole", None) or (layer.keys, layer.values)  # type: ignore[union-attr,assignment]
        k, v = (x.transpose(1, 2) for x in pair)
        if order is not None:
            place = order[..., None, None].expand(-1, -1, *k.shape[2:])
            k, v = k.gather(1, place), v.gather(1, place)
        call.attention_states[index] = AttentionState(k, v, position, position)


def run_base(
    model: Attached, call: Call, layers: bool, **given: Tensor | bool | DynamicCache
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Call the pretrained model with the arguments `given`. Return its last hidden state ``[b t d]``, and the
    inputs of its layers (empty unless `layers`).
    """
    with set_current_call(call):
        out = model.base.base_model(**given, output_hidden_states=layers or None)
    return out.last_hidden_state, out.hidden_states[:-1] if layers else ()


def make_trace(
    model: Attached,
    call: Call,
    hidden: Tensor,
    inner: tuple[Tensor, ...],
    borders: list[int] | None,
    tokens: int,
) -> Trace:
    """Build the trace of a call from the results that the layers stored in it. `hidden` is the output of the
    last layer, `inner` the inputs of the layers, `tokens` the number of columns of the call.
    """
    counts: Tensor | int = tokens if borders is None else torch.tensor(borders, device=hidden.device).diff()
    position = advance_position(call.position, counts)
    blocks: tuple[AttachedLayerState, ...] = ()
    if call.keep:
        blocks = tuple(
            AttachedLayerState(call.attention_states[n], call.memories.get(n))
            for n in range(len(model.attached_layers))
        )
    traces = tuple(call.traces.get(n) for n in range(len(model.attached_layers)))
    return Trace(hidden, State(blocks, position), traces, inner)


def _keep_all_keys(layer: Any) -> Any:
    """Return a replacement for the `update` method of a cache layer with a sliding window. It also keeps all
    keys and values, as ``layer.whole``. States contain these, so that tokens can be cropped. Attention is not
    changed.
    """
    plain = layer.update

    def update(keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        old = getattr(layer, "whole", None)
        new = keys, values
        layer.whole = new if old is None else tuple(torch.cat(x, 2) for x in zip(old, new, strict=True))
        return plain(keys, values, *args, **kwargs)

    return update


def _reordered(trace: Trace, order: Tensor) -> Trace:
    """A copy of a trace with its columns permuted: column i of the result is column `order[:, i]` ``[b t]``."""

    def pick(x: Tensor) -> Tensor:
        index = order.reshape(*order.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:])
        return x.gather(1, index)

    traces = tuple(MemoryTrace.map_tensors(each, pick) for each in trace.traces)
    return Trace(pick(trace.hidden), trace.state, traces, tuple(pick(x) for x in trace.layers))
