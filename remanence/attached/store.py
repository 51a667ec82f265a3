"""A kNN store for an attention layer of a pretrained model. Memorizing Transformers adds such a store by
fine-tuning.

The store uses the queries, keys and values of the pretrained layer, before rotation. A gate for each head
adds the retrieved values to the output of attention. The gate is tanh of a parameter that is initialised to
zero, so the store has no effect at first; the paper's sigmoid gate is never zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from remanence.attached import window
from remanence.attached.config import AttachConfig
from remanence.layers.attention import AttentionOutput, AttentionState
from remanence.memory.search import SEARCHES
from remanence.memory.store import Store
from remanence.mixers.base import Context
from remanence.mixers.knn import Knn, KnnState
from remanence.mixers.knn_state import open_tokens
from remanence.ops.layout import from_rows, to_rows
from remanence.runtime.choices import check_choice

if TYPE_CHECKING:
    from remanence.attached.reading import Call

POLICIES = ("all", "random")
"""The supported write policies. Other policies need token frequencies or the outputs of all layers."""


class PrecomputedAttention:
    """A replacement for the attention module of `Knn` that computes no attention: its input `local` is
    attention that the pretrained model has computed. It calls `fuse`, and returns the output in the order of
    the call and the state.
    """

    def __call__(
        self,
        local: AttentionOutput,
        state: AttentionState | None,
        offsets: list[int] | None,
        *,
        fuse: Callable[[AttentionOutput], Tensor],
        lse: bool,
    ) -> tuple[Tensor, AttentionState]:
        return from_rows(fuse(local), local.row_index), local.state


class AttachedKnn(Knn):
    """The kNN store of a layer. Its input is an `AttentionOutput`, which contains attention over the window,
    the queries for the search, and the keys and values to write.

    Attributes:
        window: the window of the layer's attention, behind which the store begins. It changes with `Attached.window`.
    """

    def __init__(self, config: AttachConfig) -> None:
        nn.Module.__init__(self)
        c, (heads, _, width) = config.knn, config.heads
        check_choice("search", c.search, SEARCHES)
        check_choice("write", c.write, POLICIES)
        if c.fuse != "gate":
            raise ValueError(f"fuse: expected 'gate', which can be initialised to zero, got {c.fuse!r}")
        assert config.window is not None
        self.config, self.window, self.segment = c, config.window, config.segment
        self.dim, self.persistent, self.output_dim = config.dim, 0, 0
        self.attention = PrecomputedAttention()  # type: ignore[assignment]
        self.shares_store = self.owns_store = False
        self.store = Store(
            c.size, heads, width, c.evict,
            half_life=c.half_life, dtype=c.store_dtype, device=c.store_device,
        )  # fmt: skip
        self.search = SEARCHES[c.search]()
        self.log_scale, self.gate = nn.Parameter(torch.empty(heads)), nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def _start(self, rows: int, store: Store) -> KnnState:
        like = self.log_scale.detach()
        heads, width = self.store.heads, self.store.width
        none = lambda length: like.new_zeros(rows, length, heads, width)
        nothing = torch.zeros(rows, dtype=torch.int64, device=like.device)
        attention = AttentionState(none(0), none(0), nothing, nothing)
        importance = torch.zeros(rows, self.window, device=like.device)
        last = like.new_zeros(rows, 0)
        return KnnState(
            attention, none(self.window), none(self.window), importance, last, store.start(rows, like)
        )

    def check(self, state: KnnState) -> None:
        if not isinstance(state, KnnState) or state.token_importance.shape[1] != self.window:
            raise ValueError(
                f"state: expected a kNN store with a window of {self.window} tokens, got another's"
            )

    @torch.no_grad()
    def fit_window(self, state: KnnState) -> KnnState:
        """Convert a state that was made with a larger window: the tokens of its open segment that have left the
        current window are written to the store.
        """
        wide, window = state.token_importance.shape[1], self.window
        if wide == window:
            return state
        position, opened = state.attention.position, state.open_length
        begin = position - opened
        start = begin - begin % window  # where the first segment of the current window begins
        end = position - open_tokens(position, window)
        segments = -(-(wide + window - 1) // window)
        column = torch.arange(segments * window, device=position.device) - (begin - start).unsqueeze(-1)
        held = (column >= 0) & (column < opened.unsqueeze(-1))

        def align(x: Tensor, nothing: float) -> Tensor:
            shape = [*column.shape, *[1] * (x.dim() - 2)]
            index = column.clamp(0, wide - 1).view(shape).expand(-1, -1, *x.shape[2:])
            return x.gather(1, index).masked_fill(~held.view(shape), nothing)

        # Tokens before `begin` are in the store already. Minus infinity: they are not written again.
        k, v, importance = align(state.k, 0), align(state.v, 0), align(state.token_importance, -torch.inf)
        store = state.store.clone()
        for first in range(0, segments * window, window):
            part, at = slice(first, first + window), start + first
            segment = (k[:, part], v[:, part], importance[:, part], at.unsqueeze(-1))
            store = self.write(store, *segment, at + window <= end, True)
        index = (end - start).unsqueeze(-1) + torch.arange(window, device=position.device)
        row = torch.arange(len(index), device=index.device).unsqueeze(-1)
        index = index.clamp(max=segments * window - 1)
        kept = torch.arange(window, device=index.device) < (position - end).unsqueeze(-1)
        importance = importance[row, index].masked_fill(~kept, 0.0)
        return state._replace(k=k[row, index], v=v[row, index], token_importance=importance, store=store)

    def importance(self, x: Tensor | AttentionOutput, ctx: Context) -> Tensor:
        """The importance of each token ``[b t]``. It depends on the tokens in `ctx`, not on x."""
        assert ctx.text is not None
        return super().importance(ctx.text.tokens, ctx)

    def combine(self, y: Tensor, retrieved: tuple[Tensor, Tensor] | None) -> Tensor:
        """Interpolate between attention over the window, `y`, and the retrieved output, by the gate of each
        head. Queries that retrieved no entry (log-sum-exp of -inf) keep `y`. `retrieved` is the output and
        its log-sum-exp; None: return `y`.
        """
        if retrieved is None:
            return y
        assert self.gate is not None
        found = retrieved[0].to(y.dtype)
        gate = torch.tanh(self.gate).to(y.dtype).unsqueeze(-1)
        return y + gate * torch.where(retrieved[1].unsqueeze(-1) > -torch.inf, found - y, torch.zeros_like(y))

    def read(
        self,
        seen: window.WindowOutput,
        queries_keys: tuple[Tensor, Tensor],
        state: KnnState | None,
        call: Call,
    ) -> tuple[Tensor, KnnState]:
        """Query and update the store. Returns attention over the window, `seen`, combined with the retrieved
        values ``[b t h e]``, and the new state. `queries_keys` are the queries and keys of the layer before
        rotation.
        """
        q, k = (to_rows(x, call.offsets)[0] for x in queries_keys)
        k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
        position = seen.state.position
        empty = k[:, :0].detach()
        local = AttentionOutput(
            seen.y, q, k, seen.v, AttentionState(empty, empty, position, position), seen.packed_index
        )
        ctx = Context(call.position, call.offsets, call.memory_mode, call.text, call.shared, call.keep)
        if state is None:  # start without slots; `forward` adds as many as the call can fill
            state = self._start(len(position), self.store.with_size(0))
        y, after, _ = self(local, state, ctx)
        return y, after
