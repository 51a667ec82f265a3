"""The interface of a mixer (the part of a layer that exchanges information between tokens) and of its
decoder.

A new architecture needs one file with a subclass of `Mixer`, and one line in `MIXERS`. The subclass must
implement `start` and `forward`; streaming, decoding, memory files, the cost plan and training then work. The
other methods have defaults, which a subclass may override.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from remanence.config import Mode
from remanence.layers import Module
from remanence.layers.decoding import StepContext
from remanence.memory.neural import NeuralMemory
from remanence.ops import Gates
from remanence.ops.decode import overwrite_rows
from remanence.ops.state import memories
from remanence.runtime.deprecation import renamed_attribute, renamed_overrides
from remanence.runtime.state import TensorTuple, parts

T = TypeVar("T")


class MemoryTrace(NamedTuple):
    """The values by which a neural memory was updated, for each token and head."""

    surprise: Tensor
    """The surprise of each token ``[b t h]``."""
    gates: Gates
    """The logarithms of the gates, each ``[b t h]``."""

    @classmethod
    def map_tensors(
        cls, trace: MemoryTrace | None, function: Callable[[Tensor], Tensor]
    ) -> MemoryTrace | None:
        """Apply a function to each tensor of a trace, and return the new trace; None if `trace` is None."""
        return trace and cls(function(trace.surprise), trace.gates.map(function))

    @classmethod
    def join(
        cls, traces: Sequence[MemoryTrace | None], concat: Callable[[list[Tensor]], Tensor] | None = None
    ) -> MemoryTrace | None:
        """Concatenate the traces of consecutive pieces of a call; None if any of them is None. `concat` is
        the function that joins their tensors; by default, they are joined along the token axis.
        """
        if concat is None:
            concat = lambda pieces: torch.cat(pieces, 1)
        present = [trace for trace in traces if trace is not None]
        if len(present) < len(traces):
            return None
        columns = zip(*[trace.gates for trace in present], strict=True)
        gates = [None if column[0] is None else concat(list(column)) for column in columns]
        return cls(concat([trace.surprise for trace in present]), Gates._make(gates))


class MixerOutput(NamedTuple):
    """The result of calling a mixer or a block."""

    y: Tensor
    """The output ``[b t d]``."""
    state: Any
    """The state after the call."""
    trace: MemoryTrace | None = None
    """The trace of the neural memory; None if there is no memory, or it was not written."""


class Text(NamedTuple):
    """The tokens of a call, and the parts of the language model that mixers may need."""

    tokens: Tensor
    """Token ids ``[b t]``."""
    log_unigrams: Tensor | None
    """The log-frequency of each token of the vocabulary ``[v]``; None if the model does not have them."""
    logits: Callable[[Tensor], Tensor]
    """The language model head: maps hidden vectors to logits."""


class SharedValues:
    """Values that the layers of one call share, by name. Activation checkpointing does not copy this object,
    so layers that are recomputed find the same values.
    """

    def __init__(self) -> None:
        self.entries: dict[str, Any] = {}

    def once(self, name: str, make: Callable[[], T]) -> T:
        """Return the value with this name. On first use, it is computed by `make`, without gradient:
        activation checkpointing would not compute it a second time.
        """
        if name not in self.entries:
            with torch.no_grad():
                self.entries[name] = make()
        return self.entries[name]


class Context(NamedTuple):
    """The arguments of a call that are the same for all layers. The backbone creates one `Context` per call.

    position
        Number of tokens that each row has read before this call ``[r]``.
    offsets
        For packed documents: 0, then the end of each document; None if each row is a document.
    mode
        The memory mode.
    text
        The tokens and the head, if the model is a language model; else None.
    shared
        Values that the layers of this call share.
    keep
        Whether the caller uses the returned state. If not, a layer may return an incomplete state.
    """

    position: Tensor
    offsets: list[int] | None
    mode: Mode
    text: Text | None
    shared: SharedValues
    keep: bool = True


class MixerDecoder:
    """The base class of decoders, which read one token at a time. The state of the mixer is updated in place."""

    remaining_capacity: int | None = None
    """Number of further tokens that fit into the buffers of the state; None: no limit."""

    is_capturable: bool = True
    """Whether a step can be captured as a CUDA graph: shapes are fixed, and no branch depends on tensor
    values.
    """

    room = renamed_attribute("room", "remaining_capacity")
    captured = renamed_attribute("captured", "is_capturable")

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        renamed_overrides(cls, {"room": "remaining_capacity", "captured": "is_capturable"})

    def step(self, x: Tensor, ctx: StepContext) -> Tensor:
        """Read one token of each row, x ``[r 1 d]``, and return the output ``[r 1 d]``. Inactive rows keep
        their state.
        """
        raise NotImplementedError

    def finish(self, hidden: Tensor, ctx: StepContext) -> None:
        """Called after all layers have read the token. `hidden` is the normalised output of the last layer
        ``[r 1 d]``.
        """

    def state(self, position: Tensor) -> TensorTuple:
        """Return a copy of the state, equal to that of `Mixer.forward` after `position` tokens of each row
        ``[r]``.
        """
        raise NotImplementedError

    @property
    def diverged(self) -> Tensor | None:
        """Whether the memory of each row has diverged ``[r]``; None if there is no memory."""
        return None


RENAMED_METHODS = {
    "undecodable": "decode_unsupported_reason",
    "uncapturable": "capture_unsupported_reason",
    "border": "alignment",
    "reach": "window_size",
}
"""Deprecated names of methods and properties that a mixer may override, and their current names."""


class Mixer(Module):
    """The part of a layer that exchanges information between tokens:
    ``y, state, trace = mixer(x, state, ctx)``.

    The input x ``[b t d]`` is normalised. If `ctx.offsets` is given, x is one row of packed documents. The
    state is None at the start of a document. There is always at least one row and one token, because the
    backbone handles empty calls itself. The result must not depend on how a text is split into calls, on
    later tokens, or on other rows; `remanence.testing` has functions that check this.
    """

    State: ClassVar[type] = tuple
    """The class of the state: a NamedTuple that inherits from `TensorTuple`."""

    border = renamed_attribute("border", "alignment")
    reach = renamed_attribute("reach", "window_size")

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        renamed_overrides(cls, RENAMED_METHODS)

    def start(self, rows: int) -> TensorTuple:
        """Return the initial state of `rows` documents, before any token is read."""
        raise NotImplementedError

    def forward(self, x: Tensor, state: Any, ctx: Context) -> MixerOutput:
        """Return the output for x ``[b t d]``, the new state, and the trace of the memory (None without one)."""
        raise NotImplementedError

    # The methods below have defaults that are correct for every mixer.

    def decoder(self, state: Any, memory_mode: Mode) -> MixerDecoder:
        """Return a decoder that starts from a state and reads one token at a time."""
        return ForwardDecoder(self, state, memory_mode)

    def decode_unsupported_reason(self, memory_mode: Mode) -> str | None:
        """Why the mixer cannot be decoded token by token in this mode; None if it can. The default decoder,
        `ForwardDecoder`, needs a state of fixed size and no `stride`.
        """
        if self.stride is None and type(self).decoder is not Mixer.decoder:
            return None
        return ForwardDecoder.unsupported(self)

    def capture_unsupported_reason(self, carries: bool) -> str | None:
        """Why `forward` cannot be captured as a CUDA graph; None if it can. `carries`: whether the call is
        given a state.

        A captured call may branch on shapes, and on whether positions are multiples of `alignment`, but not
        on other tensor values.
        """
        return f"{type(self).__name__} layers may branch on values"

    @property
    def has_memory(self) -> bool:
        """Whether the memory modes "off", "frozen" and "fresh" have an effect. Default: if there is a
        `NeuralMemory`.
        """
        return any(isinstance(part, NeuralMemory) for part in self.modules())

    @property
    def needs_unigrams(self) -> bool:
        """Whether the mixer needs the log-frequencies of tokens (`Text.log_unigrams`)."""
        return False

    @property
    def alignment(self) -> int:
        """Number of tokens at whose multiples a new chunk and a new segment begin; 1 without chunks and
        segments.
        """
        return 1

    @property
    def window_size(self) -> int:
        """Number of tokens in the window of sliding attention; 0 without sliding attention."""
        return 0

    @property
    def stride(self) -> int | None:
        """Number of tokens in a step, if all layers must have read one step before any layer reads the next;
        None if each layer can read the whole call at once.
        """
        return None

    @property
    def segment_length(self) -> int | None:
        """Number of tokens in a segment, if the wavefront schedule can be used; None if it cannot. A mixer
        that returns a number must have the methods of `remanence.mixers.wavefront.SegmentMixer`.
        """
        return None

    def link(self, earlier: Sequence[Mixer]) -> None:
        """Called once when the model is built, with the mixers of the layers before this one."""

    def finish(self, previous: Any, state: Any, hidden: Tensor, ctx: Context) -> Any:
        """Return the final state after a step of `stride` tokens. Called after all layers have read the step.
        `previous` is the state before the step (None at the start of documents), `state` the state that
        `forward` returned, `hidden` the output of the last layer.
        """
        return state

    def check(self, state: Any) -> None:
        """Raise a ValueError if a state does not belong to this mixer."""
        if not isinstance(state, self.State) or not isinstance(state, TensorTuple):
            expected, got = self.State.__name__, type(state).__name__
            raise ValueError(f"state: expected one of this model ({expected}), got another's ({got})")

    def flops(self, length: int) -> float:
        """Floating-point operations per token, forward and backward, in a text of `length` tokens. The
        default assumes that each matrix is used once per token.
        """
        return 6.0 * sum(parameter.numel() for parameter in self.parameters() if parameter.dim() > 1)

    def activation_bytes(self, dim: int) -> float:
        """Estimated bytes of activations per token in bfloat16, including the block's norms and feed-forward
        network.
        """
        return ACTIVATIONS["window"] * dim


ACTIVATIONS = {"attention": 65, "window": 60, "lmm": 107, "mag": 132, "mal": 128, "mac": 232, "matrix": 98}
"""Bytes of activations per token, layer and unit of width, for each kind of layer. They were measured as the
growth of peak memory from one layer to three, at width 1024, 2 x 4,096 tokens, chunk 64, bfloat16 autocast,
on an H200.
"""


class ForwardDecoder(MixerDecoder):
    """A decoder for any mixer or block: calls its `forward` for each token and copies the state into fixed buffers."""

    def __init__(self, mixer: Module, state: TensorTuple, memory_mode: Mode) -> None:
        self.mixer, self.memory_mode = mixer, memory_mode
        self.is_capturable = isinstance(mixer, Mixer) and mixer.capture_unsupported_reason(True) is None
        self.buffers: TensorTuple = state.detach().map(torch.clone)

    @staticmethod
    def unsupported(mixer: Mixer) -> str | None:
        """Why a mixer cannot be decoded by calling its `forward` for each token; None if it can."""
        name = type(mixer).__name__
        if mixer.stride is not None:
            return f"{name} layers wait for all other layers"
        growing = any(part.growing() for _, part in parts(mixer.start(1)))
        return f"the state of {name} layers grows" if growing else None

    def step(self, x: Tensor, ctx: StepContext) -> Tensor:
        shared = ctx.cached("context", make=SharedValues)
        y, state, _ = self.mixer(
            x, self.buffers, Context(ctx.position, None, self.memory_mode, ctx.text, shared)
        )
        overwrite_rows(self.buffers.tensors(), state.tensors(), ctx.active)
        return y

    def state(self, position: Tensor) -> TensorTuple:
        return self.buffers.map(torch.clone)

    @property
    def diverged(self) -> Tensor | None:
        flags = [memory.diverged for memory in memories(self.buffers)]
        return torch.stack(flags).any(0) if flags else None
