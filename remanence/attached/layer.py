"""One layer of a pretrained model: its attention module, the hooks on that module, and the memory, if it has
one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from remanence.attached.store import AttachedKnn
from remanence.attached.window import WindowSpec, WindowState
from remanence.layers.attention import AttentionState
from remanence.memory.neural import NeuralMemory, NeuralMemoryState
from remanence.mixers.knn import KnnState
from remanence.mixers.memory import Memory
from remanence.runtime.positions import with_host_copy
from remanence.runtime.state import TensorTuple

if TYPE_CHECKING:
    from remanence.attached.model import Attached

HookArgs = tuple[Any, ...]
"""The positional arguments of a hooked attention module."""
HookKwargs = dict[str, Any]
"""The keyword arguments of a hooked attention module."""


class _AttachedLayerState(NamedTuple):
    attention: AttentionState | WindowState
    memory: NeuralMemoryState | KnnState | None


class AttachedLayerState(_AttachedLayerState, TensorTuple):
    """The state of one layer: its keys and values (a `WindowState` if the model has a window), and the state
    of its memory (None if it has no memory).
    """

    __slots__ = ()

    def crop(self, tokens: int) -> AttachedLayerState:
        return AttachedLayerState(
            self.attention.crop(tokens), None if self.memory is None else self.memory.crop(tokens)
        )


class AttachedLayer:
    """The attention module of one layer, with a hook that calls the layer's memory. This class is not an
    `nn.Module`: the `Attached` model (`owner`) registers the parameters of the memory.
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
        """Set the attention window. The layer uses the smaller of `window` and the window that the pretrained
        model gives it, and a kNN store begins behind it. None: use the attention of the pretrained model.
        """
        config = self.owner.config
        self.window_spec = (
            None
            if window is None
            else WindowSpec.smaller(window, self.native_window, config.sinks, config.slack)
        )
        if self.window_spec is not None and isinstance(self.memory, AttachedKnn):
            self.memory.window = self.window_spec.window

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
        return call.read_memory(self, memory, x)

    def _record_input(self, module: nn.Module, args: HookArgs, kwargs: HookKwargs) -> None:
        """A hook that saves the input of the attention module for the kNN store, which is queried after
        attention.
        """
        call = self.owner.current_call()
        if call is not None:
            call.inputs[self.index] = args[0] if args else kwargs["hidden_states"]

    def _add_to_input(
        self, module: nn.Module, args: HookArgs, kwargs: HookKwargs
    ) -> tuple[HookArgs, HookKwargs]:
        """A hook that adds the output of the memory to the input of attention, as in MAL."""
        x = args[0] if args else kwargs["hidden_states"]
        y = x + self._read(x)
        return ((y, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": y})

    def _add_to_output(
        self, module: nn.Module, args: HookArgs, kwargs: HookKwargs, output: Tensor | tuple[Tensor, ...]
    ) -> Tensor | tuple[Tensor, ...]:
        """A hook that adds the output of the memory to the output of attention, in parallel as in MAG."""
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
    """The attention function of a model with a window. It also reads the kNN store of the layer, if there is
    one. transformers calls it with rotated queries, keys and values ``[b h t e]``, and expects an output
    ``[b t h e]`` and the attention weights, which are always None here.
    """
    layer: AttachedLayer = module.remanence_layer  # type: ignore[assignment]
    call, spec = layer.owner.current_call(), layer.window_spec
    assert call is not None and spec is not None
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    rotation = None
    if layer.rotation_key is not None and spec.is_narrowed:
        rotation = call.rotations.get(layer.rotation_key)
    return call.attend(layer, q, k, v, scaling, rotation, softcap), None


@torch.no_grad()
def zero_output(layer: NeuralMemory) -> None:
    """Initialise the output projection of a memory to zero, so that attaching it does not change the model,
    and the convolution of its values to the identity.
    """
    layer.o_proj.weight.zero_()
    if layer.v_conv.weight is not None:
        layer.v_conv.weight.zero_()
        layer.v_conv.weight[:, -1] = 1
