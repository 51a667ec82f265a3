"""The interface of a mixer, the part of a layer that mixes tokens, and its decoder.

A new architecture is one file with a subclass of `Mixer` and one line in `MIXERS`. It needs `start` and `forward`;
streaming, decoding, memory files, the cost plan and training then work. What it can do better than the defaults here,
it overrides.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from remanence.config import Mode
from remanence.layers import Module
from remanence.layers.decoding import StepContext
from remanence.memory.neural import NeuralMemory
from remanence.ops import Gates
from remanence.ops.decode import overwrite_rows
from remanence.ops.state import memories
from remanence.runtime.state import TensorTuple, parts


class MemoryTrace(NamedTuple):
    """Surprise and log gates of each token and head ``[b t h]``."""

    surprise: Tensor
    gates: Gates

    @classmethod
    def mapped(cls, trace: MemoryTrace | None, function: Callable[[Tensor], Tensor]) -> MemoryTrace | None:
        return trace and cls(function(trace.surprise), trace.gates.map(function))

    @classmethod
    def join(
        cls, traces: Sequence[MemoryTrace | None], joined: Callable[[list[Tensor]], Tensor] | None = None
    ) -> MemoryTrace | None:
        """The trace of a call from those of its pieces."""
        if joined is None:
            joined = lambda pieces: torch.cat(pieces, 1)
        present = [trace for trace in traces if trace is not None]
        if len(present) < len(traces):
            return None
        columns = zip(*[trace.gates for trace in present], strict=True)
        gates = [None if column[0] is None else joined(list(column)) for column in columns]
        return cls(joined([trace.surprise for trace in present]), Gates._make(gates))


class MixerOutput(NamedTuple):
    """What a mixer or a block returns."""

    y: Tensor
    state: Any
    trace: MemoryTrace | None = None


class Text(NamedTuple):
    """What a language model knows beside the features: its tokens ``[b t]``, their log-frequencies ``[v]`` if the model
    has them, and its head.
    """

    tokens: Tensor
    log_unigrams: Tensor | None
    logits: Callable[[Tensor], Tensor]


class Shared:
    """Values that the layers of one call share: one object for all layers, even where their arguments are copied."""

    def __init__(self) -> None:
        self.entries: dict[str, Any] = {}

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """A value that several layers need, computed once. It has no gradient, since a layer whose activations are
        recomputed does not compute it again.
        """
        if name not in self.entries:
            with torch.no_grad():
                self.entries[name] = make()
        return self.entries[name]


class Context(NamedTuple):
    """What is known of a call, made once by the backbone and given to every layer.

    position
        Tokens that each row has read before ``[r]``.
    offsets
        Of packed documents: 0 and each one's end; None if each row is a document.
    mode
        What becomes of the memories.
    text
        The tokens, if the features are those of a language model.
    shared
        What layers of this call share; a layer writes what the next may use.
    keep
        Whether anyone outside of the call will see the state. What is not seen may lack what it does not need.
    """

    position: Tensor
    offsets: list[int] | None
    mode: Mode
    text: Text | None
    shared: Shared
    keep: bool = True


class MixerDecoder:
    """A mixer's state in fixed buffers, which a token ``[r 1 d]`` of each row changes in place."""

    room: int | None = None
    """How many more tokens the buffers can hold; None: any number."""

    captured: bool = True
    """Whether a step can be captured as a CUDA graph: fixed shapes, and nothing decided on the host."""

    def step(self, x: Tensor, now: StepContext) -> Tensor:
        raise NotImplementedError

    def finish(self, hidden: Tensor, now: StepContext) -> None:
        """Called after all layers have read the token, with the last one's output ``[r 1 d]``, normalised."""

    def state(self, position: Tensor) -> Any:
        raise NotImplementedError

    @property
    def diverged(self) -> Tensor | None:
        return None


RENAMED_METHODS = {
    "undecodable": "decode_unsupported_reason",
    "uncapturable": "capture_unsupported_reason",
}
"""Earlier names of methods that a mixer overrides."""


class Mixer(Module):
    """``y, state, trace = mixer(x, state, ctx)``: x ``[b t d]`` normalised, or packed documents; the state None at
    their start.

    There is at least one row and one token: calls of none are answered by the backbone, which only asks for `start`.
    The result must not depend on how a text is cut into calls, nor on later tokens, nor on other rows:
    `remanence.testing` has these laws.
    """

    State: ClassVar[type] = tuple
    """The type of its state: a NamedTuple that is a `TensorTuple`, with ``crop(tokens)``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for old, new in RENAMED_METHODS.items():
            if old in cls.__dict__:
                warnings.warn(
                    f"{cls.__name__}.{old} is deprecated: use {new}", DeprecationWarning, stacklevel=2
                )
                setattr(cls, new, cls.__dict__[old])

    def start(self, rows: int) -> Any:
        """The state of so many documents of which nothing has been read."""
        raise NotImplementedError

    def forward(self, x: Tensor, state: Any, ctx: Context) -> MixerOutput:
        raise NotImplementedError

    # Defaults that hold for every mixer. Override those that a mixer can improve on.

    def decoder(self, state: Any, mode: Mode) -> MixerDecoder:
        """A decoder that reads one token at a time in place, starting from a state."""
        return ForwardDecoder(self, state, mode)

    def decode_unsupported_reason(self, mode: Mode) -> str | None:
        """Why there is no decoder in this mode; None if there is one. `ForwardDecoder` has room for states of fixed
        size, and does not wait for other layers.
        """
        if self.stride is None and type(self).decoder is not Mixer.decoder:
            return None
        return ForwardDecoder.unsupported(self)

    def capture_unsupported_reason(self, carries: bool) -> str | None:
        """Why `forward` cannot be captured as a CUDA graph, for rows that carry a state or begin; None if it can. A
        captured call must not decide anything on the host but by shapes and by whether rows stand at its `border`.
        """
        return f"{type(self).__name__} layers may decide on the host what to do"

    @property
    def has_memory(self) -> bool:
        """Whether the modes "off", "frozen" and "fresh" apply to it: here, if it has a neural memory."""
        return any(isinstance(part, NeuralMemory) for part in self.modules())

    @property
    def needs_unigrams(self) -> bool:
        """Whether a language model is to have log-frequencies of its tokens (`Text.log_unigrams`)."""
        return False

    @property
    def border(self) -> int:
        """At positions that are multiples of this, no chunk and no segment is open."""
        return 1

    @property
    def reach(self) -> int:
        """Tokens that sliding attention looks back; 0 without one."""
        return 0

    @property
    def stride(self) -> int | None:
        """Tokens after which all layers must have read before any goes on; None: each layer may read a whole call."""
        return None

    @property
    def segment_length(self) -> int | None:
        """Tokens of a segment, if layers may read whole segments in a wavefront; then there are also `carry`,
        `read_segment`, `segment_start` and `after_segments`, as in `MAC`.
        """
        return None

    def link(self, earlier: Sequence[Mixer]) -> None:
        """Called once, with the mixers of the layers below."""

    def finish(self, begun: Any, state: Any, hidden: Tensor, ctx: Context) -> Any:
        """The state after all layers have read a step of `stride` tokens: `begun` before it (None where documents
        begin), `hidden` the last layer's output.
        """
        return state

    def check(self, state: Any) -> None:
        """Refuse a state that is not this mixer's."""
        if not isinstance(state, self.State) or not isinstance(state, TensorTuple):
            own, other = self.State.__name__, type(state).__name__
            raise ValueError(f"state: expected one of this model ({own}), got another's ({other})")

    def flops(self, length: int) -> float:
        """Operations of a token, forward and backward, in a text of so many: here, every matrix is used once."""
        return 6.0 * sum(parameter.numel() for parameter in self.parameters() if parameter.dim() > 1)

    def activation_bytes(self, dim: int) -> float:
        """Bytes that a token leaves for backward in bfloat16, the block's norms and feed-forward included; an
        estimate.
        """
        return ACTIVATIONS["window"] * dim


ACTIVATIONS = {"attention": 65, "window": 60, "lmm": 107, "mag": 132, "mal": 128, "mac": 232, "matrix": 98}
"""Bytes per token, layer and unit of width that a forward pass leaves for backward: the growth of the peak from one
layer to three, at width 1024, 2 x 4,096 tokens, chunk 64, bfloat16 autocast, on an H200.
"""


class ForwardDecoder(MixerDecoder):
    """The call of any mixer, or of a block, as a decoder: one token at a time, the state in fixed buffers."""

    def __init__(self, mixer: Module, state: Any, mode: Mode) -> None:
        self.mixer, self.mode = mixer, mode
        self.captured = isinstance(mixer, Mixer) and mixer.capture_unsupported_reason(True) is None
        self.buffers: TensorTuple = state.detach().map(torch.clone)

    @staticmethod
    def unsupported(mixer: Mixer) -> str | None:
        """Why a mixer's calls cannot be used as a decoder; None if they can."""
        name = type(mixer).__name__
        if mixer.stride is not None:
            return f"{name} layers wait for all others"
        growing = any(part.growing() for _, part in parts(mixer.start(1)))
        return f"the state of {name} layers grows" if growing else None

    def step(self, x: Tensor, now: StepContext) -> Tensor:
        shared = now.cached("context", make=Shared)
        y, state, _ = self.mixer(x, self.buffers, Context(now.position, None, self.mode, now.text, shared))
        overwrite_rows(self.buffers.tensors(), state.tensors(), now.active)
        return y

    def state(self, position: Tensor) -> Any:
        return self.buffers.map(torch.clone)

    @property
    def diverged(self) -> Tensor | None:
        flags = [memory.diverged for memory in memories(self.buffers)]
        return torch.stack(flags).any(0) if flags else None
