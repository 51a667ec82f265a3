"""One layer of a pretrained model: its attention module, the hooks on it, and the memory that it may have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from remanence.attached.store import AttachedKnn
from remanence.attached.window import WindowSpec, WindowState, attend
from remanence.layers.attention import AttentionState
from remanence.memory.neural import NeuralMemory, NeuralMemoryState
from remanence.mixers.knn import KnnState
from remanence.mixers.memory import Memory
from remanence.ops.layout import from_rows, pad_to_mask
from remanence.runtime.positions import with_host_copy
from remanence.runtime.state import TensorTuple

if TYPE_CHECKING:
    from remanence.attached.model import Attached

HookArgs = tuple[Any, ...]
HookKwargs = dict[str, Any]


class _AttachedLayerState(NamedTuple):
    attention: AttentionState | WindowState
    memory: NeuralMemoryState | KnnState | None


class AttachedLayerState(_AttachedLayerState, TensorTuple):
    """The keys and values of a layer (a `WindowState` if the model has a window), and the state of its memory, if it
    has one.
    """

    __slots__ = ()

    def crop(self, tokens: int) -> AttachedLayerState:
        return AttachedLayerState(
            self.attention.crop(tokens), None if self.memory is None else self.memory.crop(tokens)
        )


class AttachedLayer:
    """The attention module of one layer, with hooks that call the layer's memory. It is not an `nn.Module`: the
    parameters of the memory belong to the `Attached` model.
    """

    def __init__(self, owner: Attached, index: int, module: nn.Module) -> None:
        self.owner, self.index, self.module = owner, index, module
        self.native_window = owner.family.window_of(module)
        self.rotation_key = owner.family.rotation_key(module)
        self.window_spec: WindowSpec | None = None
        self.memory: Memory | AttachedKnn | None = None
        self.hook: RemovableHandle | None = None
        module.remanence_layer = self  # type: ignore[assignment]
        config = owner.config
        if index not in config.layers:
            return
        if config.kind == "knn":
            self.memory = AttachedKnn(config)
            self.hook = module.register_forward_pre_hook(self._record_input, with_kwargs=True)
        else:
            self.memory = Memory(config)
            zero_output(self.memory.layer)
            if config.place == "front":
                self.hook = module.register_forward_pre_hook(self._add_to_input, with_kwargs=True)
            else:
                self.hook = module.register_forward_hook(self._add_to_output, with_kwargs=True)
        owner.memories[str(index)] = self.memory

    def remove(self) -> None:
        """Remove the hook from the attention module."""
        del self.module.remanence_layer
        if self.hook is not None:
            self.hook.remove()

    def set_window(self, window: int | None) -> None:
        """Set the window of the model; the layer uses the smaller of it and its native window."""
        config = self.owner.config
        self.window_spec = (
            None
            if window is None
            else WindowSpec.smaller(window, self.native_window, config.sinks, config.memory.chunk - 1)
        )

    def start(self, rows: int) -> AttachedLayerState:
        """The initial state of `rows` documents."""
        _, heads, width = self.owner.config.heads
        like = self.owner.embed.weight
        memory = None if self.memory is None else self.memory.start(rows)
        if self.window_spec is not None:
            return AttachedLayerState(self.window_spec.start(rows, heads, like.detach(), width), memory)
        none = like.new_zeros(rows, 0, heads, width, requires_grad=False)
        zero = with_host_copy(torch.zeros(rows, dtype=torch.int64, device=like.device), [0] * rows)
        return AttachedLayerState(AttentionState(none, none, zero, zero), memory)

    def check(self, state: object) -> None:
        """Raise a ValueError for a state of another model, or of this one with another window."""
        spec = self.window_spec
        kind = AttentionState if spec is None else WindowState
        if not isinstance(state, AttachedLayerState) or not isinstance(state.attention, kind):
            raise ValueError(
                f"state: expected one of this model ({kind.__name__}), got another's ({type(state).__name__})"
            )
        if spec is not None and isinstance(state.attention, WindowState):
            history = state.attention.window.k.shape[1]
            if history != spec.history:
                got = history - spec.slack + 1
                raise ValueError(f"state: expected a window of {spec.window} tokens, got one of {got}")

    def _read(self, x: Tensor) -> Tensor:
        """The output of the neural memory for the input of the attention module ``[b t d]``."""
        call, memory = self.owner.current_call(), self.memory
        assert isinstance(memory, Memory)
        if call is None:  # the pretrained model was called directly
            return torch.zeros_like(x)
        state = None if call.state is None else call.state.blocks[self.index].memory
        inner = x if call.mask is None else x[call.mask].unsqueeze(0)
        if not torch.is_autocast_enabled(x.device.type):  # the memory may have a wider dtype than the base
            inner = inner.to(memory.layer.o_proj.weight.dtype)
        m, call.memories[self.index], call.traces[self.index] = memory(inner, state, call.offsets, call.mode)
        return (m if call.mask is None else pad_to_mask(m, call.mask)).to(x.dtype)

    def _record_input(self, module: nn.Module, args: HookArgs, kwargs: HookKwargs) -> None:
        """Save the input of the attention module for the kNN store, which is queried after attention."""
        call = self.owner.current_call()
        if call is not None:
            call.inputs[self.index] = args[0] if args else kwargs["hidden_states"]

    def _add_to_input(
        self, module: nn.Module, args: HookArgs, kwargs: HookKwargs
    ) -> tuple[HookArgs, HookKwargs]:
        """As in MAL: the input of attention is x plus the output of the memory."""
        x = args[0] if args else kwargs["hidden_states"]
        y = x + self._read(x)
        return ((y, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": y})

    def _add_to_output(
        self, module: nn.Module, args: HookArgs, kwargs: HookKwargs, output: Tensor | tuple[Tensor, ...]
    ) -> Tensor | tuple[Tensor, ...]:
        """As in MAG, with a sum: the output of the memory is added to that of attention."""
        m = self._read(args[0] if args else kwargs["hidden_states"])
        return output + m if isinstance(output, Tensor) else (output[0] + m, *output[1:])


def windowed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The attention function of a model with a window, with the kNN store of the layer if it has one. transformers
    calls it with rotated queries, keys and values ``[b h t e]``, and expects ``[b t h e]``.
    """
    layer: AttachedLayer = module.remanence_layer  # type: ignore[assignment]
    owner, index, spec = layer.owner, layer.index, layer.window_spec
    call = owner.current_call()
    assert call is not None and spec is not None
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    state = None if call.state is None else call.state.blocks[index]
    rotation = None
    if layer.rotation_key is not None and spec.is_narrowed:
        rotation = call.rotations.get(layer.rotation_key)
    seen = attend(q, k, v, state and state.attention, spec, scaling, rotation, call.offsets, softcap)
    call.attention_states[index] = seen.state
    if not isinstance(layer.memory, AttachedKnn):
        return from_rows(seen.y, seen.packed_index), None
    queries_keys = owner.family.queries_keys(module, call.inputs.pop(index), owner.config.heads)
    y, call.memories[index] = layer.memory.read(seen, queries_keys, state and state.memory, call)
    return y, None


@torch.no_grad()
def zero_output(layer: NeuralMemory) -> None:
    """Initialise the output projection to zero, and the convolution of values to the identity."""
    layer.o_proj.weight.zero_()
    if layer.v_conv.weight is not None:
        layer.v_conv.weight.zero_()
        layer.v_conv.weight[:, -1] = 1
