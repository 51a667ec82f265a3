"""NeuralMemory: a layer that updates the weights of its memory while it reads (Titans, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import NamedTuple, Unpack

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from remanence.config import MemoryConfig, build, change
from remanence.layers import (
    GateProjection,
    Linear,
    Module,
    RMSNorm,
    ShortConv,
    per_head_matmul,
    project,
)
from remanence.memory.components import (
    InitialMemory,
    apply_threshold,
    check_input,
    make_features,
    mean_over_channels,
    resolve_net,
    resolve_rule,
)
from remanence.memory.observation import current_observer
from remanence.ops import (
    FeatureNet,
    Gates,
    MemoryState,
    Net,
    current_weights,
    memorize,
    query,
    start,
)
from remanence.ops.checks import check_offsets, count_documents
from remanence.ops.layout import pad_to_mask
from remanence.ops.state import Weights
from remanence.runtime.deprecation import renamed_method
from remanence.runtime.keywords import MemoryFields, show_fields
from remanence.runtime.module import check_transforms
from remanence.runtime.positions import is_aligned
from remanence.runtime.state import TensorTuple, rewind

OWN_QUERY_SHARE = 0.05
"""The initial weight of a token's own query in its key, with `induction`."""


class _NeuralMemoryState(NamedTuple):
    memory: MemoryState
    conv: tuple[Tensor, Tensor, Tensor]


class NeuralMemoryState(_NeuralMemoryState, TensorTuple):
    """The state of a `NeuralMemory`: the state of its memory, and the last inputs of its convolutions for q,
    k and v.
    """

    __slots__ = ()

    @property
    def diverged(self) -> Bool[Tensor, " r"]:
        """Whether the memory of each row has become infinite, NaN or too large since the start of its
        document.
        """
        return self.memory.diverged

    def crop(self, tokens: int) -> NeuralMemoryState:
        """Return the state before the last `tokens` tokens of each row, which must be in the incomplete
        chunk.
        """
        q, k, v = (rewind(past, tokens) for past in self.conv)
        return NeuralMemoryState(self.memory.crop(tokens), (q, k, v))


class Trace(NamedTuple):
    """The result of `NeuralMemory.trace`: the output, the state, and the surprise and log gates of every
    token and head (0 at padding). Of a forget gate for each channel, it is the log of the mean over channels.
    """

    y: Tensor
    state: NeuralMemoryState
    surprise: Tensor
    gates: Gates


class NeuralMemory(Module):
    """The neural memory layer: ``y, state = NeuralMemory(dim=512, heads=8)(x, state)``.

    q, k and v are projections of x after a causal convolution and SiLU; q and k are normalised to unit length, and a
    deep memory maps them to features with its first layers. Gates are computed from x, per token and head. The memory
    learns k -> v and is queried with q; the retrieved values are normalised, gated by x and projected to dim. The state
    is returned and never stored in the module: pass None at a document's start, then the state that the previous call
    returned. Calls may have any length. Rows of a batch are independent.

    Rows of different lengths: pass ``mask=``, true where a token counts, or pack the documents into one row and pass
    ``offsets=``.

    Pass the fields of `MemoryConfig` (`dim` is required), a config, or both: ``NeuralMemory(config, chunk=64)``.

    `reset_parameters` initialises the layer again, and each part has its own, for models made on the meta device:
    after ``to_empty``, call it once, or on all modules by ``model.apply``. In a Hugging Face model, call it from
    ``_init_weights`` for the modules of this package; without that, ``from_pretrained`` leaves a memory that its
    checkpoint lacks uninitialised.
    """

    @show_fields(MemoryConfig)
    def __init__(self, config: MemoryConfig | None = None, **fields: Unpack[MemoryFields]) -> None:
        super().__init__()
        if config is not None and not isinstance(config, MemoryConfig):
            raise ValueError(
                f"config: expected a MemoryConfig, or fields by name (dim=512, heads=8), got {config!r}"
            )
        self.config = change(config, fields) if config is not None else build(MemoryConfig, fields)
        c = self.config
        net = resolve_net(c)
        self.deep = isinstance(net, FeatureNet)
        self.net: Net = net.fast if isinstance(net, FeatureNet) else net  # updated at test time
        self.rule = resolve_rule(c, self.net)
        self.heads, self.head_dim = c.shape
        self.features = make_features(net, self.heads, self.head_dim)
        self.key_dim = net.features(self.head_dim) if isinstance(net, FeatureNet) else self.head_dim
        self.q_proj, self.k_proj, self.v_proj, self.g_proj = (Linear(c.dim, c.inner) for _ in range(4))
        self.q_conv, self.k_conv, self.v_conv = (ShortConv(c.inner, c.conv, c.chunk - 1) for _ in range(3))
        step_bias = -log(10 * getattr(net, "depth", 2)) if c.step_bias is None else c.step_bias
        biases = {"step": step_bias, "momentum": c.momentum_bias, "forget": c.forget_bias}
        by_head = self.rule.forget and not self.rule.forget_channels
        self.gate_names = ["step", *["momentum"] * self.rule.momentum, *["forget"] * by_head]
        self.gates = GateProjection(c.dim, self.heads, [biases[name] for name in self.gate_names])
        self.channel_gates: GateProjection | None = None
        if self.rule.forget_channels:
            self.channel_gates = GateProjection(c.dim, self.heads * self.key_dim, [c.forget_bias])
        self.norm = RMSNorm(self.head_dim)
        self.o_proj = Linear(c.inner, c.dim)
        self.initial = InitialMemory(self.net, self.heads, self.head_dim, self.key_dim)
        self.checks = (
            True  # on a CPU, check that x is finite; models turn this off, as their loss and state show it
        )
        self.reset_own_parameters()

    @torch.no_grad()
    def reset_own_parameters(self) -> None:
        """With `induction`, initialise the keys so that the key of a token is the query of the previous
        token. Otherwise do nothing.
        """
        if self.config.induction:
            queries, keys = self.q_conv.weight, self.k_conv.weight
            assert queries is not None and keys is not None
            self.k_proj.weight.copy_(self.q_proj.weight)
            later = queries[:, 1:]
            queries.copy_(torch.cat([torch.zeros_like(queries[:, :1]), later], 1))
            # The first token of a document has no previous token. Its key must not be zero before it is normalised:
            # the gradient of the normalisation would be huge.
            keys.copy_(torch.cat([later, OWN_QUERY_SHARE * later[:, -1:]], 1))

    def extra_repr(self) -> str:
        return f"net={resolve_net(self.config)}, rule={self.rule}, chunk={self.config.chunk}"

    def start(self, rows: int, dtype: torch.dtype = torch.float32) -> NeuralMemoryState:
        """Return the initial state of `rows` documents. `dtype` is float32, or float64 for a float64 model."""
        weights = tuple(weight.to(dtype) for weight in self.initial.parameters())
        if self.deep:
            weights = tuple(torch.zeros_like(weight) for weight in weights)
        memory = start(
            weights, rows, rule=self.rule, chunk=self.config.chunk, width=self.head_dim, keys=self.key_dim
        )
        q, k, v = (conv.start(rows, weights[0].detach()) for conv in (self.q_conv, self.k_conv, self.v_conv))
        return NeuralMemoryState(memory, (q, k, v))

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        state: NeuralMemoryState | None = None,
        *,
        mask: Bool[Tensor, "b t"] | None = None,
        offsets: Int[Tensor, " r+1"] | Sequence[int] | None = None,
        traced: bool = False,
    ) -> tuple[Float[Tensor, "b t d"], NeuralMemoryState] | Trace:
        """Return the output for x and the state after it, or a `Trace` if `traced`.

        Args:
            x: input of width dim, in the dtype of the layer's parameters; at most 1e6 in absolute value, which is
                checked on a CPU. Beyond that, a memory may be flagged as diverged.
            state: None at a document's start, then the state that the previous call returned.
            mask: false at padding, for rows of different lengths. Padding, at either end or in between, is not read:
                memory, position and convolution are those of the row without it, and its output is zero.
            offsets: for documents packed into a single row: 0, then the end of each document, the last of which is t.
                The state has one row per document. Not together with `mask`.
            traced: return a `Trace`, as `trace` does.
        """
        seen = self.trace(x, state, mask=mask, offsets=offsets)
        return seen if traced else (seen.y, seen.state)

    def trace(
        self,
        x: Float[Tensor, "b t d"],
        state: NeuralMemoryState | None = None,
        *,
        mask: Bool[Tensor, "b t"] | None = None,
        offsets: Int[Tensor, " r+1"] | Sequence[int] | None = None,
        aligned: bool = False,
    ) -> Trace:
        """Return the result of `forward` together with the surprise and the gates of every token and head.

        `aligned` means that all rows of the state are at a chunk boundary. Without a state this is always so.
        """
        carried = state is not None
        if mask is not None:
            inside, documents = self._unpad(x, mask, offsets)
            seen = self.trace(
                inside, state if carried else self._initial_state(x, len(documents) - 1), offsets=documents
            )
            return Trace(
                pad_to_mask(seen.y, mask),
                seen.state,
                pad_to_mask(seen.surprise, mask),
                seen.gates.map(lambda gate: pad_to_mask(gate, mask)),
            )
        state, borders = self._check_call(x, state, offsets)
        *projected, gate = project(x, self.q_proj, self.k_proj, self.v_proj, self.g_proj)
        q, k, v, gates, conv = self.prepare(x, state.conv, borders, projected)
        answers, memory, surprise = memorize(
            q,
            k,
            v,
            gates,
            state.memory,
            net=self.net,
            rule=self.rule,
            chunk=self.config.chunk,
            offsets=borders,
            aligned=aligned or not carried or is_aligned(state.memory.position, self.config.chunk),
            check=False,
        )
        if (observer := current_observer()) is not None:
            observer(self, v, answers)
        y = self.output(q, answers, gate)
        if carried and not self.deep and torch.is_grad_enabled():
            # A carried state does not depend on the initial memory, but DDP waits for a gradient of every parameter.
            y = y + torch.cat([weight.flatten()[:0] for weight in self.initial.parameters()]).sum().to(
                y.dtype
            )
        return Trace(y, NeuralMemoryState(memory, conv), surprise, mean_over_channels(gates))

    def read(
        self,
        x: Float[Tensor, "b t d"],
        state: NeuralMemoryState,
        *,
        mask: Bool[Tensor, "b t"] | None = None,
        offsets: Int[Tensor, " r+1"] | Sequence[int] | None = None,
    ) -> Float[Tensor, "b t d"]:
        """Return the output for x without writing: every token of x queries the memory in `state`."""
        if mask is not None:
            inside, documents = self._unpad(x, mask, offsets)
            return pad_to_mask(self.read(inside, state, offsets=documents), mask)
        return self.read_frozen(x, state, offsets=offsets)[0]

    def read_frozen(
        self,
        x: Float[Tensor, "b t d"],
        state: NeuralMemoryState | None = None,
        *,
        offsets: Int[Tensor, " r+1"] | Sequence[int] | None = None,
    ) -> tuple[Float[Tensor, "b t d"], NeuralMemoryState]:
        """Return the output of `read` and the new state, which has the same memory but convolutions advanced
        over x.
        """
        state, borders = self._check_call(x, state, offsets)
        y, past_q = self.query(x, self.current_weights(state), state.conv[0], borders)
        # Only the last inputs are kept; packed documents may end anywhere, so all of theirs are projected.
        last = x if borders is not None else x[:, max(0, x.shape[1] - self.k_conv.history) :]
        past_k = self.k_conv.advance(self.k_proj(last), state.conv[1], borders)
        past_v = self.v_conv.advance(self.v_proj(last), state.conv[2], borders)
        return y, NeuralMemoryState(state.memory, (past_q, past_k, past_v))

    def current_weights(self, state: NeuralMemoryState) -> Weights:
        """Return the weights ``[r h ...]`` of the memory after all tokens that were read."""
        return current_weights(state.memory, net=self.net, rule=self.rule)

    def query(
        self,
        x: Float[Tensor, "b t d"],
        weights: Weights,
        conv_state: Float[Tensor, "r past width"],
        borders: list[int] | None = None,
    ) -> tuple[Float[Tensor, "b t d"], Float[Tensor, "r past width"]]:
        """Return the output for x from a memory with the given weights, and the new state of the query
        convolution. `conv_state` is the old state of that convolution.
        """
        q, gate = project(x, self.q_proj, self.g_proj)
        q, conv_state = self.q_conv.convolve_heads(q, conv_state, borders, self.heads, normalize=True)
        q = self.key_features(q)
        return self.output(q, query(q, weights, net=self.net, offsets=borders), gate), conv_state

    def prepare(
        self,
        x: Float[Tensor, "b t d"],
        conv: tuple[Tensor, Tensor, Tensor],
        borders: list[int] | None = None,
        projected: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Gates, tuple[Tensor, Tensor, Tensor]]:
        """Return the inputs of the memory: queries and keys ``[b t h f]``, values ``[b t h e]``, log gates,
        and the new states of the convolutions. `projected` has the projections of x to q, k and v, if they
        are already computed.
        """
        q, k, v = project(x, self.q_proj, self.k_proj, self.v_proj) if projected is None else projected
        q, past_q = self.q_conv.convolve_heads(q, conv[0], borders, self.heads, normalize=True)
        k, past_k = self.k_conv.convolve_heads(k, conv[1], borders, self.heads, normalize=True)
        v, past_v = self.v_conv.convolve_heads(v, conv[2], borders, self.heads)
        return self.key_features(q), self.key_features(k), v, self.log_gates(x), (past_q, past_k, past_v)

    def key_features(self, x: Float[Tensor, "b t h e"]) -> Float[Tensor, "b t h f"]:
        """Return the features of keys or queries. This is the identity unless the memory is deep."""
        return x if self.features is None else self.features(x)

    ask, peek = renamed_method("ask", "query"), renamed_method("peek", "read_frozen")
    settle, lift = renamed_method("settle", "current_weights"), renamed_method("lift", "key_features")

    def output(
        self, q: Float[Tensor, "b t h f"], answers: Float[Tensor, "b t h e"], gate: Float[Tensor, "b t inner"]
    ) -> Float[Tensor, "b t d"]:
        """Compute the layer's output from retrieved values: normalise them, multiply by the gate (`g_proj` of
        x) and project to dim. A deep memory first adds the output of its initial weights.
        """
        if self.deep:
            (initial,) = self.initial.parameters()
            answers = per_head_matmul(q, initial, answers)
        return self.o_proj(self.norm.normalize_gated(answers, gate))

    def log_gates(self, x: Tensor) -> Gates:
        """Return the logarithms of step size, momentum and retention (1 - forget gate) of every token and
        head, or channel of a head.
        """
        logs = dict(
            zip(
                self.gate_names,
                self.gates.log_sigmoids(x, [name == "forget" for name in self.gate_names]),
                strict=True,
            )
        )
        if self.channel_gates is not None:
            (keep,) = self.channel_gates.log_sigmoids(x, [True])
            logs["forget"] = keep.unflatten(-1, (self.heads, -1))
        gates = Gates(logs["step"], logs.get("momentum"), logs.get("forget"))
        if self.config.threshold != 0:
            gates = apply_threshold(gates, self.config.threshold)
        if self.rule.max_step != 1:
            gates = gates._replace(log_step=gates.log_step + log(self.rule.max_step))
        return gates

    def _initial_state(self, x: Tensor, rows: int) -> NeuralMemoryState:
        """Return the initial state of `rows` documents, in float64 if x is float64."""
        return self.start(rows, torch.float64 if x.dtype == torch.float64 else torch.float32)

    def _check_call(
        self, x: Tensor, state: NeuralMemoryState | None, offsets: Tensor | Sequence[int] | None
    ) -> tuple[NeuralMemoryState, list[int] | None]:
        """Check the arguments of a call. Return the state (the initial one if None was given) and the offsets
        as a list or None.
        """
        check_transforms()
        check_input(x, self.config.dim, self.q_proj.weight.dtype, values=self.checks)
        if state is None:
            state = self._initial_state(x, x.shape[0] if offsets is None else count_documents(offsets))
        if not isinstance(state, NeuralMemoryState):
            raise ValueError(
                f"state: expected the state this layer returned, or None, got {type(state).__name__}"
            )
        self.check_state(state.memory)
        expected = [state.memory.position.shape[0], self.q_conv.history, self.heads * self.head_dim]
        for past in state.conv:
            if list(past.shape) != expected:
                raise ValueError(f"state: expected convolution inputs {expected}, got {list(past.shape)}")
        return state, check_offsets(offsets, x.shape[0], x.shape[1], state.memory.position.shape[0])

    def check_state(self, memory: MemoryState) -> None:
        """Raise ValueError if the chunk size of a memory's state is not that of this layer."""
        expected, chunk = self.config.chunk, memory.chunk
        if chunk != expected:
            raise ValueError(
                f"state: expected chunk {expected}, got chunk {chunk}; the chunk is part of the model"
            )

    def _unpad(self, x: Tensor, mask: Tensor, offsets: object) -> tuple[Tensor, list[int]]:
        """Return the tokens without padding, packed into one row, and their offsets. Padding then cannot
        change memory, position or convolution.
        """
        check_transforms()
        if offsets is not None:
            raise ValueError(
                "offsets: expected None beside a mask, got both; a mask already says where each row's document lies"
            )
        if not isinstance(mask, Tensor):
            raise ValueError(
                f"mask: expected a tensor of booleans, true where a token counts, got {type(mask).__name__}"
            )
        if (
            not isinstance(x, Tensor)
            or x.dim() != 3
            or tuple(mask.shape) != tuple(x.shape[:2])
            or mask.dtype != torch.bool
        ):
            expected = list(x.shape[:2]) if isinstance(x, Tensor) else "[batch, tokens]"
            got = f"{list(mask.shape)} {mask.dtype}"
            raise ValueError(
                f"mask: expected booleans of shape {expected}, true where a token counts, got {got}"
            )
        return x[mask].unsqueeze(0), [0, *mask.sum(1).cumsum(0).tolist()]
