"""How a block of chunks is computed, forward and backward: by the closed form, token by token, by autograd, or by a
rule's own update.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from remanence.ops import closed_form as cf
from remanence.ops.clamp import GradientClamp
from remanence.ops.generic import chunk_step, rule_step
from remanence.ops.nets import MLP, Net
from remanence.ops.rules import Coefficients, LinearRule, Rule, coefficients, coefficients_backward, is_linear
from remanence.ops.state import Gates, RuleState, Weights


class ChunkBlock(NamedTuple):
    """The inputs of consecutive chunks: ``[n m c e]``, log gates ``[n m c]`` (None if absent), complete ``[n m]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_step: Tensor
    log_momentum: Tensor | None
    log_keep: Tensor | None
    complete: Tensor

    @property
    def gates(self) -> Gates:
        return Gates(self.log_step, self.log_momentum, self.log_keep)

    def part(self, chunks: slice) -> ChunkBlock:
        return ChunkBlock._make(None if x is None else x[chunks] for x in self)


Grad = Tensor | None


def _received(s: ChunkBlock, g_y: Tensor, g_surprise: Tensor) -> Tensor:
    """``[n m]``: the absolute sum of the gradients of a chunk's outputs, times the largest query if that is above 1."""
    reach = s.q.abs().flatten(2).amax(-1).clamp(min=1.0) if s.q.numel() else 1.0
    return g_y.abs().sum((-1, -2)) * reach + g_surprise.abs().sum(-1)


class ChunkScan(Protocol):
    """How a block of chunks is computed: from a state J to (answers, surprise, state), and back to the gradients of
    inputs and J.

    `folds` is False while nothing but one open chunk is read: the state's end is then its start, and is not computed.
    """

    folds: bool
    slow: list[Tensor]  # parameters of the net and the loss themselves, from their own parameters()

    def forward(self, s: ChunkBlock, state: Weights) -> tuple[Tensor, Tensor, Weights]: ...

    def backward(
        self,
        s: ChunkBlock,
        state: Weights,
        g_y: Tensor,
        g_surprise: Tensor,
        g_state: list[Tensor],
        clamp: GradientClamp,
    ) -> tuple[list[Grad], list[Tensor], list[Grad]]: ...


class ClosedFormScan:
    """An MLP memory: keys one chunk after the other, then all the block's queries at once."""

    def __init__(self, net: MLP, rule: LinearRule, folds: bool) -> None:
        self.net, self.rule, self.folds = net, rule, folds
        self.slow: list[Tensor] = []

    def _keys(
        self, s: ChunkBlock, co: Coefficients, state: Weights
    ) -> tuple[Weights, list[cf.Anchor], list[cf.Record]]:
        """The states ``[n+1 m ...]`` at the chunks' borders (``[1 m ...]`` if it does not fold), and the records."""
        n = s.k.shape[0]
        states = tuple(layer.unsqueeze(0) for layer in state)
        if self.folds:
            states = tuple(layer.new_empty(n + 1, *layer.shape) for layer in state)
            for layer, first in zip(states, state, strict=True):
                layer[0] = first
        borders = list(zip(*[layer.unbind() for layer in states], strict=True))
        anchors, records = [], []
        for i, (own, k, v) in enumerate(zip(_unbind(co, n), s.k.unbind(), s.v.unbind(), strict=True)):
            anchors.append(cf.Anchor(borders[i], own))
            records.append(cf.record(self.net, self.rule, anchors[-1], k, v))
            if self.folds:
                cf.fold(anchors[-1], records[-1].inputs, records[-1].errors, borders[i + 1])
        return states, anchors, records

    def _queries(
        self, s: ChunkBlock, co: Coefficients, states: Weights, records: list[cf.Record]
    ) -> tuple[cf.Anchor, list[Tensor], list[Tensor], cf.Reading]:
        together = cf.Anchor(
            tuple(layer[: len(records)].flatten(0, 1) for layer in states),
            _map(lambda x: x.flatten(0, 1), co),
        )
        inputs, errors = (
            _join([record.inputs for record in records]),
            _join([record.errors for record in records]),
        )
        return together, inputs, errors, cf.read(self.net, together, inputs, errors, s.q.flatten(0, 1))

    def forward(self, s: ChunkBlock, state: Weights) -> tuple[Tensor, Tensor, Weights]:
        co = coefficients(self.rule, s.gates, s.complete)
        states, _, records = self._keys(s, co, state)
        *_, reading = self._queries(s, co, states, records)
        surprise = torch.stack([record.surprise(self.rule) for record in records])
        return (
            reading.answers.unflatten(0, s.q.shape[:2]),
            surprise,
            tuple(_last_state(layer, s.complete) for layer in states if self.folds),
        )

    def backward(
        self,
        s: ChunkBlock,
        state: Weights,
        g_y: Tensor,
        g_surprise: Tensor,
        g_state: list[Tensor],
        clamp: GradientClamp,
    ) -> tuple[list[Grad], list[Tensor], list[Grad]]:
        co = coefficients(self.rule, s.gates, s.complete)
        g_co = _map(lambda x: torch.zeros_like(x, memory_format=torch.contiguous_format), co)
        states, anchors, records = self._keys(s, co, state)
        together, inputs, errors, reading = self._queries(s, co, states, records)
        flat = _map(lambda x: x.flatten(0, 1), g_co)
        g_q, g = cf.read_backward(self.net, together, inputs, errors, reading, g_y.flatten(0, 1), flat)
        del together, inputs, errors, reading
        n = len(anchors)
        parts = [
            list(zip(*[x.unflatten(0, (n, -1)).unbind() for x in group], strict=True)) for group in g[:3]
        ]
        g_k, g_v = torch.empty_like(s.k), torch.empty_like(s.v)
        received, g_cos = _received(s, g_y, g_surprise), _unbind(g_co, n)
        for i in range(n - 1, -1, -1):
            own = cf.Grads._make([*[list(group[i]) for group in parts], g_cos[i]])
            if self.folds:
                cf.fold_backward(anchors[i], records[i], g_state, own)
            g_k[i], g_v[i] = cf.record_backward(
                self.net, self.rule, anchors[i], records[i], own, g_surprise[i]
            )
            g_state = own.state
            clamp.apply(g_state, received[i])
        g_gates = coefficients_backward(s.gates, s.complete, g_co)
        return [g_q.view_as(s.q), g_k, g_v, *g_gates], g_state, []


class TokenExactScan(ClosedFormScan):
    """A matrix by the token-exact rule: what does not wait for the state is computed for all of the block's chunks at
    once, and the scan itself is two products a chunk, forwards and back.

    With the solver T of each chunk (closed_form), D = T (X~ J - target) = U J - known, where U = T X~ and X~ are the
    keys times their coefficients one token earlier; and the state at the chunk's end is F J - K^T D.
    """

    def _prepare(self, s: ChunkBlock, co: Coefficients) -> tuple[Coefficients, cf.Prepared]:
        flat = _map(lambda x: x.flatten(0, 1), co)
        return flat, cf.prepare(self.net, flat, s.k.flatten(0, 1), s.v.flatten(0, 1))

    def _scan_states(
        self, s: ChunkBlock, co: Coefficients, ready: cf.Prepared, state: Weights
    ) -> tuple[Tensor, Tensor]:
        """The states ``[n+1 m p f e]`` at the chunks' borders (``[1 ...]`` if it does not fold) and the errors
        ``[n m c e]``.
        """
        n, (J,) = s.k.shape[0], state
        states = J.new_empty(n + 1 if self.folds else 1, *J.shape)
        states[0] = J
        U, K, errors = (x.unflatten(0, (n, -1)) for x in (ready.U, ready.K, ready.known))
        for i in range(n):
            cf.exact_step(states[i], U[i], errors[i], K[i], co.fold[i], states[i + 1] if self.folds else None)
        return states, errors

    def _read_queries(
        self, s: ChunkBlock, flat: Coefficients, x: Tensor, states: Tensor, errors: Tensor
    ) -> tuple[cf.Anchor, cf.Reading]:
        together = cf.Anchor((states[: len(errors)].flatten(0, 1),), flat)
        return together, cf.read(self.net, together, [x], [errors.flatten(0, 1)], s.q.flatten(0, 1))

    def forward(self, s: ChunkBlock, state: Weights) -> tuple[Tensor, Tensor, Weights]:
        co = coefficients(self.rule, s.gates, s.complete)
        flat, ready = self._prepare(s, co)
        states, errors = self._scan_states(s, co, ready, state)
        _, reading = self._read_queries(s, flat, ready.x, states, errors)
        surprise = 0.5 * errors.square().sum(-1)
        return (
            reading.answers.unflatten(0, s.q.shape[:2]),
            surprise,
            (_last_state(states, s.complete),) if self.folds else (),
        )

    def backward(
        self,
        s: ChunkBlock,
        state: Weights,
        g_y: Tensor,
        g_surprise: Tensor,
        g_state: list[Tensor],
        clamp: GradientClamp,
    ) -> tuple[list[Grad], list[Tensor], list[Grad]]:
        co = coefficients(self.rule, s.gates, s.complete)
        flat, ready = self._prepare(s, co)
        states, errors = self._scan_states(s, co, ready, state)
        together, reading = self._read_queries(s, flat, ready.x, states, errors)
        g_co = _map(lambda x: torch.zeros_like(x, memory_format=torch.contiguous_format), co)
        g_flat = _map(lambda x: x.flatten(0, 1), g_co)
        error = errors.flatten(0, 1)
        g_q, g = cf.read_backward(self.net, together, [ready.x], [error], reading, g_y.flatten(0, 1), g_flat)
        del reading
        n = len(errors)
        g_error = g.errors[0].addcmul_(error, g_surprise.flatten(0, 1).unsqueeze(-1))
        U, K, g_errors, g_starts = (x.unflatten(0, (n, -1)) for x in (ready.U, ready.K, g_error, g.state[0]))
        received = _received(s, g_y, g_surprise)
        g_ends = torch.empty_like(g_starts) if self.folds else None
        for i in range(n - 1, -1, -1):
            if g_ends is not None:
                g_ends[i] = g_state[0]
            cf.exact_step_backward(
                g_state[0] if self.folds else None, U[i], K[i], co.fold[i], g_errors[i], g_starts[i]
            )
            g_state = [g_starts[i]]
            clamp.apply(g_state, received[i])
        g_end = None if g_ends is None else g_ends.flatten(0, 1)
        g_k, g_v = cf.prepare_backward(
            self.net, flat, ready, together.state[0], error, g_error, g_end, g.inputs[0], g_flat
        )
        g_gates = coefficients_backward(s.gates, s.complete, g_co)
        return [g_q.view_as(s.q), g_k.view_as(s.k), g_v.view_as(s.v), *g_gates], [g_state[0].clone()], []


class AutogradScan:
    """Any net, any inner loss: each chunk by torch.func, the block's gradients by autograd."""

    def __init__(self, net: Net, rule: Rule, folds: bool) -> None:
        self.net, self.rule, self.folds = net, rule, folds
        owners = [part for part in (net, rule, rule.loss) if hasattr(part, "parameters")]
        self.slow: list[Tensor] = [p for owner in owners for p in owner.parameters() if p.requires_grad]

    def _chunks(self, s: ChunkBlock) -> list[Any]:
        """The gates of each chunk, as `_step` takes them."""
        assert is_linear(self.rule)
        return _unbind(coefficients(self.rule, s.gates, s.complete), s.k.shape[0])

    def _step(
        self, gates: Any, q: Tensor, k: Tensor, v: Tensor, state: Weights
    ) -> tuple[Tensor, Tensor, Weights]:
        assert is_linear(self.rule)
        return chunk_step(self.net, self.rule, gates, q, k, v, state)

    def forward(self, s: ChunkBlock, state: Weights) -> tuple[Tensor, Tensor, Weights]:
        answers, surprises = [], []
        for i, gates in enumerate(self._chunks(s)):
            y, surprise, end = self._step(gates, s.q[i], s.k[i], s.v[i], state)
            if self.folds:
                whole = [s.complete[i].view(-1, *[1] * (layer.dim() - 1)) for layer in state]
                state = tuple(torch.where(*each) for each in zip(whole, end, state, strict=True))
            answers.append(y)
            surprises.append(surprise)
        return torch.stack(answers), torch.stack(surprises), state if self.folds else ()

    def backward(
        self,
        s: ChunkBlock,
        state: Weights,
        g_y: Tensor,
        g_surprise: Tensor,
        g_state: list[Tensor],
        clamp: GradientClamp,
    ) -> tuple[list[Grad], list[Tensor], list[Grad]]:
        inputs = [None if x is None else x.detach().requires_grad_() for x in s[:-1]]
        state = tuple(x.detach().requires_grad_() for x in state)
        with torch.enable_grad():
            y, surprise, end = self.forward(ChunkBlock._make([*inputs, s.complete]), state)
        outputs = [(y, g_y), (surprise, g_surprise), *zip(end, g_state, strict=True)]
        grads = _grads(outputs, [*inputs, *state, *self.slow])
        first, last = len(inputs), len(inputs) + len(state)
        g_start: list[Tensor] = grads[first:last]  # type: ignore[assignment]
        clamp.apply(g_start, _received(s, g_y, g_surprise).sum(0))
        return grads[:first], g_start, grads[last:]


class RuleScan(AutogradScan):
    """Any rule, by its own `update`. The state is the weights ``[m 1 ...]``, `depth` of them, then the buffers."""

    def __init__(self, net: Net, rule: Rule, folds: bool, depth: int) -> None:
        super().__init__(net, rule, folds)
        self.depth = depth

    def _chunks(self, s: ChunkBlock) -> list[Gates]:
        return [s.gates.part(i) for i in range(s.k.shape[0])]

    def _step(
        self, gates: Gates, q: Tensor, k: Tensor, v: Tensor, state: Weights
    ) -> tuple[Tensor, Tensor, Weights]:
        start = RuleState(tuple(layer[:, 0] for layer in state[: self.depth]), tuple(state[self.depth :]))
        y, surprise, end = rule_step(self.net, self.rule, self.folds, gates, q, k, v, start)
        return y, surprise, (*[weight.unsqueeze(1) for weight in end.weights], *end.buffers)


def _last_state(states: Tensor, complete: Tensor) -> Tensor:
    """The state ``[m ...]`` after each row's complete chunks ``[n m]``, from those at all borders ``[n+1 m ...]``.

    Not simply the last one: a chunk that is not complete adds zero times its errors, and those of padding may overflow.
    A copy, as a view would keep all states of the block alive for as long as its checkpoint.
    """
    return states[complete.sum(0), torch.arange(states.shape[1], device=states.device)]


def _map(function: Any, co: Coefficients) -> Coefficients:
    return Coefficients._make(None if x is None else function(x) for x in co)


def _unbind(co: Coefficients, n: int) -> list[Coefficients]:
    """One per chunk."""
    columns = [[None] * n if x is None else x.unbind() for x in co]
    return [Coefficients._make(row) for row in zip(*columns, strict=True)]


def _join(layers_by_chunk: list[Any]) -> list[Tensor]:
    return [torch.cat(layer) for layer in zip(*layers_by_chunk, strict=True)]


def _grads(outputs: list[tuple[Tensor, Tensor]], inputs: list[Tensor | None]) -> list[Grad]:
    """autograd.grad through the outputs that require it. Zeros for inputs without a gradient, None for None."""
    pairs = [(output, grad) for output, grad in outputs if output.requires_grad]
    present = [x for x in inputs if x is not None]
    found = iter(
        torch.autograd.grad([x for x, _ in pairs], present, [grad for _, grad in pairs], allow_unused=True)
    )
    return [None if x is None else _or_zeros(next(found), x) for x in inputs]


def _or_zeros(grad: Grad, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad


def scan_for(net: Net, rule: Rule, folds: bool, depth: int) -> ChunkScan:
    """The fastest way to run a memory with `depth` weights."""
    if not is_linear(rule):
        return RuleScan(net, rule, folds, depth)
    if isinstance(net, MLP) and isinstance(rule.loss, str):
        return (TokenExactScan if cf.exact(net, rule) and rule.loss == "squared" else ClosedFormScan)(
            net, rule, folds
        )
    return AutogradScan(net, rule, folds)
