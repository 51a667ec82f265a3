"""An attention module of a pretrained model, and the memory that stands beside it or in front of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from remanence.attached.store import StoreBeside
from remanence.attached.window import WindowSpec, WindowState, attend, to_transformers
from remanence.layers.attention import AttentionState
from remanence.memory.neural import NeuralMemory
from remanence.mixers.memory import Memory
from remanence.ops.layout import pad_to_mask
from remanence.runtime.state import TensorTuple

if TYPE_CHECKING:
    from remanence.attached.model import Attached


class _SiteState(NamedTuple):
    attention: Any
    memory: Any


class SiteState(_SiteState, TensorTuple):
    """A layer's keys and values (`AttentionState`, or `WindowState` of a narrowed model), and its memory if it has
    one.
    """

    __slots__ = ()

    def crop(self, tokens: int) -> SiteState:
        return SiteState(
            self.attention.crop(tokens), None if self.memory is None else self.memory.crop(tokens)
        )


class Site:
    """What happens at one attention module. It is no module itself: the memory belongs to the attached model."""

    def __init__(self, owner: Attached, index: int, module: nn.Module) -> None:
        self.owner, self.index = owner, index
        self.own_window = owner.family.window_of(module)
        config = owner.config
        self.has_memory = index in config.layers
        self.module = module
        self.hook: RemovableHandle | None = None
        module.remanence_site = self  # type: ignore[assignment]
        if not self.has_memory:
            return
        if config.kind == "knn":
            owner.memories[str(index)] = StoreBeside(config)
            self.hook = module.register_forward_pre_hook(self._record_input, with_kwargs=True)
            return
        memory = Memory(config)
        zero_output(memory.layer)
        owner.memories[str(index)] = memory
        if config.place == "front":
            self.hook = module.register_forward_pre_hook(self._before, with_kwargs=True)
        else:
            self.hook = module.register_forward_hook(self._after, with_kwargs=True)

    def remove(self) -> None:
        """Leave the attention module as it was."""
        del self.module.remanence_site
        if self.hook is not None:
            self.hook.remove()

    @property
    def memory(self) -> Any:
        return self.owner.memories[str(self.index)] if self.has_memory else None

    @property
    def reach(self) -> WindowSpec:
        """What a narrowed layer sees: the smaller of the model's window and its own."""
        window, config = self.owner.window, self.owner.config
        assert window is not None
        return WindowSpec.of(window, self.own_window, config.sinks, config.memory.chunk - 1)

    def start(self, rows: int) -> SiteState:
        return SiteState(
            self.owner.start_attention(rows, self), self.memory.start(rows) if self.memory else None
        )

    def check(self, state: Any) -> None:
        """Refuse a state of another model, or of this one with another window."""
        kind = AttentionState if self.owner.window is None else WindowState
        if not isinstance(state, SiteState) or not isinstance(state.attention, kind):
            raise ValueError(
                f"state: expected one of this model ({kind.__name__}), got another's ({type(state).__name__})"
            )
        if (
            isinstance(state.attention, WindowState)
            and state.attention.window.k.shape[1] != self.reach.history
        ):
            got = state.attention.window.k.shape[1] - self.reach.slack + 1
            raise ValueError(f"state: expected a window of {self.reach.window} tokens, got one of {got}")

    def narrowed(self, state: SiteState) -> SiteState:
        return state._replace(attention=state.attention.narrowed(self.reach.history))

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scaling: float, cap: float | None
    ) -> Tensor:
        """A narrowed model's attention."""
        call = self.owner.current_call()
        assert call is not None
        state = None if call.state is None else call.state.blocks[self.index].attention
        key, reach = self.owner.family.rotation_key(module), self.reach
        rotation = None if key is None or not reach.narrowed else call.rotations.get(key)
        seen = attend(q, k, v, state, reach, scaling, rotation, call.offsets, cap)
        call.attention_states[self.index] = seen.state
        if not isinstance(self.memory, StoreBeside):
            return to_transformers(seen)
        old = None if call.state is None else call.state.blocks[self.index].memory
        plain = self.owner.family.queries_keys(module, call.inputs.pop(self.index), self.owner.config.heads)
        y, call.memories[self.index] = self.memory.read(seen, plain, old, call, call.mode)
        return y

    def _read(self, x: Tensor) -> Tensor:
        """The output of the memory for a layer's input ``[b t d]``."""
        call, memory = self.owner.current_call(), self.memory
        assert memory is not None
        if call is None:  # the pretrained model is called by itself
            return torch.zeros_like(x)
        state = None if call.state is None else call.state.blocks[self.index].memory
        inner = x if call.mask is None else x[call.mask].unsqueeze(0)
        if not torch.is_autocast_enabled(x.device.type):  # new weights may be wider than the others
            inner = inner.to(memory.layer.o_proj.weight.dtype)
        m, call.memories[self.index], call.traces[self.index] = memory(inner, state, call.offsets, call.mode)
        return (m if call.mask is None else pad_to_mask(m, call.mask)).to(x.dtype)

    def _record_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Save a layer's input for the store, which is queried after attention."""
        call = self.owner.current_call()
        if call is not None:
            call.inputs[self.index] = args[0] if args else kwargs["hidden_states"]

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """MAL: the input of attention is x plus the output of the memory."""
        x = args[0] if args else kwargs["hidden_states"]
        y = x + self._read(x)
        return ((y, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": y})

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """MAG: the output of the memory is added to that of attention."""
        m = self._read(args[0] if args else kwargs["hidden_states"])
        return output + m if isinstance(output, Tensor) else (output[0] + m, *output[1:])


@torch.no_grad()
def zero_output(layer: NeuralMemory) -> None:
    """Initialise the output to zero, and values to the token alone, without a convolution over the tokens before it."""
    layer.o_proj.weight.zero_()
    if layer.v_conv.weight is not None:
        layer.v_conv.weight.zero_()
        layer.v_conv.weight[:, -1] = 1
