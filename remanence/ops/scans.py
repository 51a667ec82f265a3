"""Scans over a block of consecutive chunks, forward and backward: in closed form, by autograd, or with a
rule's `update`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from remanence.ops import closed_form as cf
from remanence.ops.clamp import GradientClamp
from remanence.ops.generic import chunk_step, rule_step
from remanence.ops.nets import MLP, Net
from remanence.ops.rules import (
    Coefficients,
    LinearRule,
    Rule,
    coefficients,
    coefficients_backward,
    is_linear,
    is_parallel,
)
from remanence.ops.state import Gates, RuleState, Weights


class ChunkBlock(NamedTuple):
    """The inputs of n consecutive chunks: q, k, v ``[n m c e]``, log gates ``[n m c]`` (None if the rule does
    not use them), and whether each chunk is complete ``[n m]``. m is rows times heads.
    """

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

    def slice_chunks(self, chunks: slice) -> ChunkBlock:
        """Return the inputs of the selected chunks."""
        return ChunkBlock._make(None if x is None else x[chunks] for x in self)


Grad = Tensor | None
"""A gradient, or None for an input that is None."""


def _received_gradient(s: ChunkBlock, g_y: Tensor, g_surprise: Tensor) -> Tensor:
    """Return the sum of the absolute gradients of each chunk's outputs ``[n m]``. The gradients of the
    answers are multiplied by the largest query if that is above 1.
    """
    largest_query = s.q.abs().flatten(2).amax(-1).clamp(min=1.0) if s.q.numel() else 1.0
    return g_y.abs().sum((-1, -2)) * largest_query + g_surprise.abs().sum(-1)


class ChunkScan(Protocol):
    """A scan over a block of chunks. `forward` maps a state J to the answers ``[n m c e]``, the surprise ``[n
    m c]`` and the end state. `backward` returns the gradients of the inputs, of J and of the slow parameters.

    `completes_chunk` is False if the call completes no chunk. The state then does not change, and no end
    state is computed. `slow_parameters` are the trained parameters of the net, the rule and the loss, from
    their `parameters()`.
    """

    completes_chunk: bool
    slow_parameters: list[Tensor]

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
    """The closed form of an MLP memory. Keys are processed chunk by chunk, then the queries of all chunks at
    once.
    """

    def __init__(self, net: MLP, rule: LinearRule, completes_chunk: bool) -> None:
        self.net, self.rule, self.completes_chunk = net, rule, completes_chunk
        self.slow_parameters: list[Tensor] = []

    def _record_keys(
        self, s: ChunkBlock, coef: Coefficients, state: Weights
    ) -> tuple[Weights, list[cf.Anchor], list[cf.KeyActivations]]:
        """Return the states ``[n+1 m ...]`` at the chunk borders (``[1 m ...]`` if no chunk is complete), and
        for each chunk its anchor and the activations of its keys.
        """
        n = s.k.shape[0]
        states = tuple(layer.unsqueeze(0) for layer in state)
        if self.completes_chunk:
            states = tuple(layer.new_empty(n + 1, *layer.shape) for layer in state)
            for layer, first in zip(states, state, strict=True):
                layer[0] = first
        borders = list(zip(*[layer.unbind() for layer in states], strict=True))
        anchors, records = [], []
        for i, (chunk_coef, k, v) in enumerate(
            zip(_unbind_chunks(coef, n), s.k.unbind(), s.v.unbind(), strict=True)
        ):
            anchors.append(cf.Anchor(borders[i], chunk_coef))
            records.append(cf.record_keys(self.net, self.rule, anchors[-1], k, v))
            if self.completes_chunk:
                cf.write_end_state(anchors[-1], records[-1].inputs, records[-1].errors, borders[i + 1])
        return states, anchors, records

    def _answer_queries(
        self, s: ChunkBlock, coef: Coefficients, states: Weights, records: list[cf.KeyActivations]
    ) -> tuple[cf.Anchor, list[Tensor], list[Tensor], cf.QueryActivations]:
        """Return the anchor of all chunks together, the layer inputs and errors of their keys, and the
        activations of the queries, which include the answers.
        """
        block_anchor = cf.Anchor(
            tuple(layer[: len(records)].flatten(0, 1) for layer in states),
            _map_coefficients(lambda x: x.flatten(0, 1), coef),
        )
        inputs, errors = (
            _concat_layers([record.inputs for record in records]),
            _concat_layers([record.errors for record in records]),
        )
        return (
            block_anchor,
            inputs,
            errors,
            cf.read_queries(self.net, block_anchor, inputs, errors, s.q.flatten(0, 1)),
        )

    def forward(self, s: ChunkBlock, state: Weights) -> tuple[Tensor, Tensor, Weights]:
        coef = coefficients(self.rule, s.gates, s.complete)
        states, _, records = self._record_keys(s, coef, state)
        *_, query_activations = self._answer_queries(s, coef, states, records)
        surprise = torch.stack([record.surprise(self.rule) for record in records])
        return (
            query_activations.answers.unflatten(0, s.q.shape[:2]),
            surprise,
            tuple(_last_state(layer, s.complete) for layer in states if self.completes_chunk),
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
        coef = coefficients(self.rule, s.gates, s.complete)
        g_coef = _map_coefficients(lambda x: torch.zeros_like(x, memory_format=torch.contiguous_format), coef)
        states, anchors, records = self._record_keys(s, coef, state)
        block_anchor, inputs, errors, query_activations = self._answer_queries(s, coef, states, records)
        flat = _map_coefficients(lambda x: x.flatten(0, 1), g_coef)
        g_q, g = cf.read_queries_backward(
            self.net, block_anchor, inputs, errors, query_activations, g_y.flatten(0, 1), flat
        )
        del block_anchor, inputs, errors, query_activations
        n = len(anchors)
        parts = [
            list(zip(*[x.unflatten(0, (n, -1)).unbind() for x in group], strict=True)) for group in g[:3]
        ]
        g_k, g_v = torch.empty_like(s.k), torch.empty_like(s.v)
        received, g_coef_by_chunk = _received_gradient(s, g_y, g_surprise), _unbind_chunks(g_coef, n)
        for i in range(n - 1, -1, -1):
            g_chunk = cf.ChunkGrads._make([*[list(group[i]) for group in parts], g_coef_by_chunk[i]])
            if self.completes_chunk:
                cf.write_end_state_backward(anchors[i], records[i], g_state, g_chunk)
            g_k[i], g_v[i] = cf.record_keys_backward(
                self.net, self.rule, anchors[i], records[i], g_chunk, g_surprise[i]
            )
            g_state = g_chunk.state
            clamp.apply(g_state, received[i])
        g_gates = coefficients_backward(s.gates, s.complete, g_coef)
        return [g_q.view_as(s.q), g_k, g_v, *g_gates], g_state, []


class TokenExactScan(ClosedFormScan):
    """The token-exact rule for a matrix memory. All quantities that do not depend on the state are computed
    for all chunks of the block at once. The scan itself is two matrix products per chunk, forward and
    backward.

    With the solver T of each chunk (see `closed_form`), D = T (X~ J - target) = U J - T target, where U = T X~,
    and X~ are the keys times the state factors of the previous token. The state at the end of the chunk is F
    J - K^T D.
    """

    def _prepare(self, s: ChunkBlock, coef: Coefficients) -> tuple[Coefficients, cf.PreparedChunks]:
        """Return the coefficients with chunks, rows and heads in one axis, and the quantities that do not
        depend on the state.
        """
        flat = _map_coefficients(lambda x: x.flatten(0, 1), coef)
        return flat, cf.prepare_chunks(self.net, flat, s.k.flatten(0, 1), s.v.flatten(0, 1))

    def _scan_states(
        self, s: ChunkBlock, coef: Coefficients, prepared: cf.PreparedChunks, state: Weights
    ) -> tuple[Tensor, Tensor]:
        """Return the states ``[n+1 m p f e]`` at the chunk borders (``[1 m p f e]`` if no chunk is complete)
        and the errors ``[n m c e]``.
        """
        n, (J,) = s.k.shape[0], state
        states = J.new_empty(n + 1 if self.completes_chunk else 1, *J.shape)
        states[0] = J
        U, K, errors = (x.unflatten(0, (n, -1)) for x in (prepared.U, prepared.K, prepared.solved_target))
        for i in range(n):
            cf.token_exact_step(
                states[i],
                U[i],
                errors[i],
                K[i],
                coef.end_state_factors[i],
                states[i + 1] if self.completes_chunk else None,
            )
        return states, errors

    def _read_queries(
        self, s: ChunkBlock, flat: Coefficients, x: Tensor, states: Tensor, errors: Tensor
    ) -> tuple[cf.Anchor, cf.QueryActivations]:
        """Return the anchor of all chunks together, and the activations of the queries, which include the
        answers.
        """
        block_anchor = cf.Anchor((states[: len(errors)].flatten(0, 1),), flat)
        return block_anchor, cf.read_queries(
            self.net, block_anchor, [x], [errors.flatten(0, 1)], s.q.flatten(0, 1)
        )

    def forward(self, s: ChunkBlock, state: Weights) -> tuple[Tensor, Tensor, Weights]:
        coef = coefficients(self.rule, s.gates, s.complete)
        flat, prepared = self._prepare(s, coef)
        states, errors = self._scan_states(s, coef, prepared, state)
        _, query_activations = self._read_queries(s, flat, prepared.x, states, errors)
        surprise = 0.5 * errors.square().sum(-1)
        return (
            query_activations.answers.unflatten(0, s.q.shape[:2]),
            surprise,
            (_last_state(states, s.complete),) if self.completes_chunk else (),
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
        coef = coefficients(self.rule, s.gates, s.complete)
        flat, prepared = self._prepare(s, coef)
        states, errors = self._scan_states(s, coef, prepared, state)
        block_anchor, query_activations = self._read_queries(s, flat, prepared.x, states, errors)
        g_coef = _map_coefficients(lambda x: torch.zeros_like(x, memory_format=torch.contiguous_format), coef)
        g_flat = _map_coefficients(lambda x: x.flatten(0, 1), g_coef)
        error = errors.flatten(0, 1)
        g_q, g = cf.read_queries_backward(
            self.net, block_anchor, [prepared.x], [error], query_activations, g_y.flatten(0, 1), g_flat
        )
        del query_activations
        n = len(errors)
        g_error = g.errors[0].addcmul_(error, g_surprise.flatten(0, 1).unsqueeze(-1))
        U, K, g_errors, g_starts = (
            x.unflatten(0, (n, -1)) for x in (prepared.U, prepared.K, g_error, g.state[0])
        )
        received = _received_gradient(s, g_y, g_surprise)
        g_ends = torch.empty_like(g_starts) if self.completes_chunk else None
        for i in range(n - 1, -1, -1):
            if g_ends is not None:
                g_ends[i] = g_state[0]
            cf.token_exact_step_backward(
                g_state[0] if self.completes_chunk else None,
                U[i],
                K[i],
                coef.end_state_factors[i],
                g_errors[i],
                g_starts[i],
            )
            g_state = [g_starts[i]]
            clamp.apply(g_state, received[i])
        g_end = None if g_ends is None else g_ends.flatten(0, 1)
        g_k, g_v = cf.prepare_chunks_backward(
            self.net, flat, prepared, block_anchor.state[0], error, g_error, g_end, g.inputs[0], g_flat
        )
        g_gates = coefficients_backward(s.gates, s.complete, g_coef)
        return [g_q.view_as(s.q), g_k.view_as(s.k), g_v.view_as(s.v), *g_gates], [g_state[0].clone()], []


class AutogradScan:
    """A linear rule with any net and inner loss. Each chunk is computed with torch.func, and the gradients of
    the block by autograd.
    """

    def __init__(self, net: Net, rule: Rule, completes_chunk: bool) -> None:
        self.net, self.rule, self.completes_chunk = net, rule, completes_chunk
        owners = [part for part in (net, rule, rule.loss) if hasattr(part, "parameters")]
        self.slow_parameters: list[Tensor] = [
            p for owner in owners for p in owner.parameters() if p.requires_grad
        ]

    def _gates_by_chunk(self, s: ChunkBlock) -> list[Any]:
        """Return the coefficients (or in a subclass the gates) of each chunk, as `_step` takes them."""
        assert is_linear(self.rule)
        return _unbind_chunks(coefficients(self.rule, s.gates, s.complete), s.k.shape[0])

    def _step(
        self, gates: Any, q: Tensor, k: Tensor, v: Tensor, state: Weights
    ) -> tuple[Tensor, Tensor, Weights]:
        """Return the answers, the surprise and the end state of one chunk."""
        assert is_linear(self.rule)
        return chunk_step(self.net, self.rule, gates, q, k, v, state)

    def forward(self, s: ChunkBlock, state: Weights) -> tuple[Tensor, Tensor, Weights]:
        answers, surprises = [], []
        for i, gates in enumerate(self._gates_by_chunk(s)):
            y, surprise, end = self._step(gates, s.q[i], s.k[i], s.v[i], state)
            if self.completes_chunk:
                complete = [s.complete[i].view(-1, *[1] * (layer.dim() - 1)) for layer in state]
                state = tuple(torch.where(*each) for each in zip(complete, end, state, strict=True))
            answers.append(y)
            surprises.append(surprise)
        return torch.stack(answers), torch.stack(surprises), state if self.completes_chunk else ()

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
        grads = _autograd_grads(outputs, [*inputs, *state, *self.slow_parameters])
        first, last = len(inputs), len(inputs) + len(state)
        g_start: list[Tensor] = grads[first:last]  # type: ignore[assignment]
        clamp.apply(g_start, _received_gradient(s, g_y, g_surprise).sum(0))
        return grads[:first], g_start, grads[last:]


class RuleScan(AutogradScan):
    """Any rule, by calling its `update`, or its `parallel_chunk` if it has one. The state is a tuple of `depth`
    weights ``[m 1 ...]``, followed by the buffers.
    """

    def __init__(self, net: Net, rule: Rule, completes_chunk: bool, depth: int) -> None:
        super().__init__(net, rule, completes_chunk)
        self.depth = depth

    def _gates_by_chunk(self, s: ChunkBlock) -> list[Gates]:
        return [s.gates.select(i) for i in range(s.k.shape[0])]

    def _step(
        self, gates: Gates, q: Tensor, k: Tensor, v: Tensor, state: Weights
    ) -> tuple[Tensor, Tensor, Weights]:
        start = RuleState(tuple(layer[:, 0] for layer in state[: self.depth]), tuple(state[self.depth :]))
        if is_parallel(self.rule):
            y, surprise, end = self.rule.parallel_chunk(q, k, v, gates, start)
            return y, surprise, (*[weight.unsqueeze(1) for weight in end.weights], *end.buffers)
        y, surprise, end = rule_step(self.net, self.rule, self.completes_chunk, gates, q, k, v, start)
        return y, surprise, (*[weight.unsqueeze(1) for weight in end.weights], *end.buffers)


def _last_state(states: Tensor, complete: Tensor) -> Tensor:
    """Return the state ``[m ...]`` after the last complete chunk of each row, from the states at all chunk
    borders ``[n+1 m ...]`` and the mask of complete chunks ``[n m]``.

    This is not simply the last state: an incomplete chunk adds zero times its errors, and the errors of
    padding may overflow. The result is a copy, because a view would keep all states of the block in memory.
    """
    return states[complete.sum(0), torch.arange(states.shape[1], device=states.device)]


def _map_coefficients(function: Any, coef: Coefficients) -> Coefficients:
    """Apply a function to each coefficient that is not None."""
    return Coefficients._make(None if x is None else function(x) for x in coef)


def _unbind_chunks(coef: Coefficients, n: int) -> list[Coefficients]:
    """Split the coefficients of n chunks into a list with the coefficients of each chunk."""
    columns = [[None] * n if x is None else x.unbind() for x in coef]
    return [Coefficients._make(row) for row in zip(*columns, strict=True)]


def _concat_layers(layers_by_chunk: list[Any]) -> list[Tensor]:
    """Concatenate the tensors of all chunks, layer by layer. The argument has a list of layers for each
    chunk.
    """
    return [torch.cat(layer) for layer in zip(*layers_by_chunk, strict=True)]


def _autograd_grads(outputs: list[tuple[Tensor, Tensor]], inputs: list[Tensor | None]) -> list[Grad]:
    """Return the gradients of the inputs, by autograd. They are zeros for inputs that the outputs do not
    depend on, and None for inputs that are None.
    """
    pairs = [(output, grad) for output, grad in outputs if output.requires_grad]
    present = [x for x in inputs if x is not None]
    found = iter(
        torch.autograd.grad([x for x, _ in pairs], present, [grad for _, grad in pairs], allow_unused=True)
    )
    return [None if x is None else _or_zeros(next(found), x) for x in inputs]


def _or_zeros(grad: Grad, like: Tensor) -> Tensor:
    """Return the gradient, or zeros in the shape of `like` if it is None."""
    return torch.zeros_like(like) if grad is None else grad


def choose_scan(net: Net, rule: Rule, completes_chunk: bool, depth: int) -> ChunkScan:
    """Return the fastest scan for a memory with this net and rule. `depth` is the number of weights of the
    memory.
    """
    if not is_linear(rule):
        return RuleScan(net, rule, completes_chunk, depth)
    if isinstance(net, MLP) and isinstance(rule.loss, str):
        return (
            TokenExactScan if cf.is_token_exact(net, rule) and rule.loss == "squared" else ClosedFormScan
        )(net, rule, completes_chunk)
    return AutogradScan(net, rule, completes_chunk)
