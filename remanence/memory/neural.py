"""NeuralMemory: a layer whose weights are written by what it reads (Titans, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import NamedTuple, Unpack

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from remanence.config import MemoryConfig, build, change
from remanence.layers import (
    Features,
    GateProjection,
    Linear,
    Module,
    RMSNorm,
    ShortConv,
    by_heads,
    project,
)
from remanence.memory.components import InitialMemory, check_input, resolve_net, resolve_rule, threshold
from remanence.memory.observation import current_observer
from remanence.ops import (
    Deep,
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
"""With `induction`, the initial share of the token's own query in its key."""


class _NeuralMemoryState(NamedTuple):
    memory: MemoryState
    conv: tuple[Tensor, Tensor, Tensor]


class NeuralMemoryState(_NeuralMemoryState, TensorTuple):
    """What the layer carries from call to call: its memory, and the last inputs of its convolutions (q, k, v)."""

    __slots__ = ()

    @property
    def diverged(self) -> Bool[Tensor, " r"]:
        """Per row: whether the memory has been infinite, NaN or too large to be of use since its document began."""
        return self.memory.diverged

    def crop(self, tokens: int) -> NeuralMemoryState:
        """The state before each row's last `tokens` tokens were read; they must lie in the open chunk."""
        q, k, v = (rewind(past, tokens) for past in self.conv)
        return NeuralMemoryState(self.memory.crop(tokens), (q, k, v))


class Trace(NamedTuple):
    """All that can be seen of one call: output, state, and per token and head the surprise and the log gates (0 at
    padding).
    """

    y: Tensor
    state: NeuralMemoryState
    surprise: Tensor
    gates: Gates


class NeuralMemory(Module):
    """``y, state = NeuralMemory(dim=512, heads=8)(x, state)``: reads x into its memory, and answers from it.

    x -> (q, k, v): projection, causal convolution, SiLU; q and k at unit length, and lifted to features by a deep
    memory's first layers. Gates from x, per token and head. The memory writes k -> v and is asked q; its answers are
    normalised, gated by x and projected back. The state is returned, never kept in the module: pass None at a
    document's start and what you got afterwards, in calls of any length. Rows of a batch never meet.

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
        self.deep = isinstance(net, Deep)
        self.net: Net = net.fast if isinstance(net, Deep) else net  # what is written
        self.rule = resolve_rule(c, self.net)
        self.heads, self.head_dim = c.shape
        self.features: Features | None = None
        if isinstance(net, Deep) and net.depth > 1:
            self.features = Features(self.heads, self.head_dim, net.hidden(self.head_dim), net.depth - 1)
        self.q_proj, self.k_proj, self.v_proj, self.g_proj = (Linear(c.dim, c.inner) for _ in range(4))
        self.q_conv, self.k_conv, self.v_conv = (ShortConv(c.inner, c.conv, c.chunk - 1) for _ in range(3))
        step_bias = -log(10 * getattr(net, "depth", 2)) if c.step_bias is None else c.step_bias
        biases = {"step": step_bias, "momentum": c.momentum_bias, "forget": c.forget_bias}
        self.gate_names = ["step", *["momentum"] * self.rule.momentum, *["forget"] * self.rule.forget]
        self.gates = GateProjection(c.dim, self.heads, [biases[name] for name in self.gate_names])
        self.norm = RMSNorm(self.head_dim)
        self.o_proj = Linear(c.inner, c.dim)
        self.initial = InitialMemory(self.net, self.heads, self.head_dim)
        self.checks = (
            True  # on a CPU, that x is finite; a model made of such layers sees it in its loss and its state
        )
        self.reset_own_parameters()

    @torch.no_grad()
    def reset_own_parameters(self) -> None:
        """With `induction`, keys start as the query of the token before."""
        if self.config.induction:
            queries, keys = self.q_conv.weight, self.k_conv.weight
            assert queries is not None and keys is not None
            self.k_proj.weight.copy_(self.q_proj.weight)
            later = queries[:, 1:]
            queries.copy_(torch.cat([torch.zeros_like(queries[:, :1]), later], 1))
            # A document's first token has none before it. Its key, brought to unit length, must not be made of nothing:
            # the gradient there would be as large as that length is small.
            keys.copy_(torch.cat([later, OWN_QUERY_SHARE * later[:, -1:]], 1))

    def extra_repr(self) -> str:
        return f"net={resolve_net(self.config)}, rule={self.rule}, chunk={self.config.chunk}"

    def start(self, rows: int, dtype: torch.dtype = torch.float32) -> NeuralMemoryState:
        """The state of `rows` documents of which nothing has been read. float32 unless the model runs in float64."""
        weights = tuple(weight.to(dtype) for weight in self.initial.parameters())
        if self.deep:
            weights = tuple(torch.zeros_like(weight) for weight in weights)
        memory = start(weights, rows, rule=self.rule, chunk=self.config.chunk, width=self.head_dim)
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
        """Read x, answer, and return the state.

        Args:
            x: features of the configuration's dim, in the dtype of the layer's parameters; of at most 1e6 in
                absolute value, which is checked on a CPU. Beyond that a memory may be flagged as diverged.
            state: None at a document's start, then what the call before returned.
            mask: true where a token counts, for rows of different lengths. Padding, at either end or in between, is
                not read: memory, position and convolution are those of the row without it, and its output is zero.
            offsets: for documents packed one behind the other in a single row: 0, each one's end, the last being t.
                The state then has a row for each document. Not together with `mask`.
            traced: return all that `trace` does.
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
        """`forward`, with the surprise and the gates of every token and head beside its result.

        `aligned` says that all rows of the state stand at a chunk's border; without a state they do.
        """
        carried = state is not None
        if mask is not None:
            inside, documents = self._unpad(x, mask, offsets)
            seen = self.trace(
                inside, state if carried else self._fresh(x, len(documents) - 1), offsets=documents
            )
            return Trace(
                pad_to_mask(seen.y, mask),
                seen.state,
                pad_to_mask(seen.surprise, mask),
                seen.gates.map(lambda gate: pad_to_mask(gate, mask)),
            )
        state, borders = self._checked(x, state, offsets)
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
            # A carried state no longer needs the initial memory, yet DDP waits for a gradient of every parameter.
            y = y + torch.cat([weight.flatten()[:0] for weight in self.initial.parameters()]).sum().to(
                y.dtype
            )
        return Trace(y, NeuralMemoryState(memory, conv), surprise, gates)

    def read(
        self,
        x: Float[Tensor, "b t d"],
        state: NeuralMemoryState,
        *,
        mask: Bool[Tensor, "b t"] | None = None,
        offsets: Int[Tensor, " r+1"] | Sequence[int] | None = None,
    ) -> Float[Tensor, "b t d"]:
        """Ask without writing: the memory stays as `state` holds it, for every token of x."""
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
        """`read`, and the state afterwards: the same memory, with convolutions that have gone on over x."""
        state, borders = self._checked(x, state, offsets)
        y, past_q = self.query(x, self.current_weights(state), state.conv[0], borders)
        # Only the newest inputs stay in a history; packed documents may end anywhere, so there all are projected.
        last = x if borders is not None else x[:, max(0, x.shape[1] - self.k_conv.history) :]
        past_k = self.k_conv.advance(self.k_proj(last), state.conv[1], borders)
        past_v = self.v_conv.advance(self.v_proj(last), state.conv[2], borders)
        return y, NeuralMemoryState(state.memory, (past_q, past_k, past_v))

    def current_weights(self, state: NeuralMemoryState) -> Weights:
        """The memory's weights as they are after all that was read."""
        return current_weights(state.memory, net=self.net, rule=self.rule)

    def query(
        self,
        x: Float[Tensor, "b t d"],
        weights: Weights,
        past: Float[Tensor, "r past width"],
        borders: list[int] | None = None,
    ) -> tuple[Float[Tensor, "b t d"], Float[Tensor, "r past width"]]:
        """What given weights answer to x, with a history of inputs for the queries' convolution that is the caller's
        own.
        """
        q, gate = project(x, self.q_proj, self.g_proj)
        q, past = self.q_conv.activated(q, past, borders, self.heads, normalize=True)
        q = self.key_features(q)
        return self.output(q, query(q, weights, net=self.net, offsets=borders), gate), past

    def prepare(
        self,
        x: Float[Tensor, "b t d"],
        conv: tuple[Tensor, Tensor, Tensor],
        borders: list[int] | None = None,
        projected: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Gates, tuple[Tensor, Tensor, Tensor]]:
        """What the memory gets of x: queries and keys ``[b t h f]``, values ``[b t h e]``, log gates; and the
        convolutions' new histories.
        """
        q, k, v = project(x, self.q_proj, self.k_proj, self.v_proj) if projected is None else projected
        q, past_q = self.q_conv.activated(q, conv[0], borders, self.heads, normalize=True)
        k, past_k = self.k_conv.activated(k, conv[1], borders, self.heads, normalize=True)
        v, past_v = self.v_conv.activated(v, conv[2], borders, self.heads)
        return self.key_features(q), self.key_features(k), v, self.log_gates(x), (past_q, past_k, past_v)

    def key_features(self, x: Float[Tensor, "b t h e"]) -> Float[Tensor, "b t h f"]:
        """Keys or queries as the memory is given them: features, if it is deep."""
        return x if self.features is None else self.features(x)

    ask, peek = renamed_method("ask", "query"), renamed_method("peek", "read_frozen")
    settle, lift = renamed_method("settle", "current_weights"), renamed_method("lift", "key_features")

    def output(
        self, q: Float[Tensor, "b t h f"], answers: Float[Tensor, "b t h e"], gate: Float[Tensor, "b t inner"]
    ) -> Float[Tensor, "b t d"]:
        """From the memory's answers to the layer's: what training left beside them, normalised, gated (`g_proj` of x),
        projected back.
        """
        if self.deep:
            (left,) = self.initial.parameters()
            answers = by_heads(q, left, answers)
        return self.o_proj(self.norm.gated(answers, gate))

    def log_gates(self, x: Tensor) -> Gates:
        # A forget gate's log is of what is kept.
        logs = dict(
            zip(
                self.gate_names,
                self.gates.logs(x, [name == "forget" for name in self.gate_names]),
                strict=True,
            )
        )
        gates = Gates(logs["step"], logs.get("momentum"), logs.get("forget"))
        if self.config.threshold == 0:
            return gates
        return threshold(gates, self.config.threshold)

    def _fresh(self, x: Tensor, rows: int) -> NeuralMemoryState:
        return self.start(rows, torch.float64 if x.dtype == torch.float64 else torch.float32)

    def _checked(
        self, x: Tensor, state: NeuralMemoryState | None, offsets: Tensor | Sequence[int] | None
    ) -> tuple[NeuralMemoryState, list[int] | None]:
        check_transforms()
        check_input(x, self.config.dim, self.q_proj.weight.dtype, values=self.checks)
        if state is None:
            state = self._fresh(x, x.shape[0] if offsets is None else count_documents(offsets))
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
        """That a memory's state has this layer's chunk."""
        own, chunk = self.config.chunk, memory.chunk
        if chunk != own:
            raise ValueError(
                f"state: expected chunk {own}, got chunk {chunk}; the chunk is part of the model"
            )

    def _unpad(self, x: Tensor, mask: Tensor, offsets: object) -> tuple[Tensor, list[int]]:
        """Only the tokens that count, packed behind one another: padding then cannot touch memory, position or
        convolution.
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
