"""The memory rule as the paper writes it: one head, one document, one token after the other.

All other backends are tested against this one.

Every rule runs its own `update`, including the rules that have a closed form. The gradient is computed by
autograd from the loss as written, and never derived by hand. This backend is slow, exact in float64, and
twice differentiable.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vmap

from remanence.ops.layout import Layout, gates_with_tail
from remanence.ops.nets import Net
from remanence.ops.rules import Rule, pack_state
from remanence.ops.state import Gates, MemoryState, RuleState, Weights


def memorize_document(
    net: Net, rule: Rule, chunk: int, q: Tensor, k: Tensor, v: Tensor, gates: Gates, state: RuleState
) -> tuple[Tensor, Tensor, RuleState]:
    """Return the answers ``[t e]``, the surprise ``[t]``, and the state at the end of the last complete
    chunk, for one head of one document.

    This computes equations 12 to 15, or the update of another rule. q, k, v are ``[t e]``, log gates are
    ``[t]``; `state` is the state at the start of a chunk, where the tokens begin.
    """

    def loss(W: Weights, t: int) -> Tensor:  # eq. 12
        return rule.loss_function(net.apply(W, k[t]), v[t])

    def objective(W: Weights, t: int, buffers: Weights) -> tuple[Tensor, Tensor]:
        own = loss(W, t)
        return rule.objective(own, lambda keys: net.apply(W, keys), buffers), own

    start = now = state
    answers, surprises = [], []
    for t in range(k.shape[0]):
        first, ends = t - t % chunk, (t + 1) % chunk == 0
        if rule.granularity == "token":
            gates_t = gates.select(t)
            now = RuleState(now.weights, rule.observe(now.buffers, k[t], v[t]))
            W = rule.gradient_at((now if rule.anchor == "token" else start).weights, gates_t)
            u, (_, surprise) = grad_and_value(objective, has_aux=True)(W, t, now.buffers)
            now = rule.update(now, u, gates_t)  # eqs. 13 and 14
        else:
            surprise = loss(start.weights, t)
            if rule.read == "token" or ends:
                gates_so_far = gates.select(slice(first, t + 1))

                def total(W: Weights, first: int = first, t: int = t) -> Tensor:
                    return sum(gates.log_step[i].exp() * loss(W, i) for i in range(first, t + 1))  # type: ignore[return-value]

                now = rule.update(start, grad(total)(start.weights), gates_so_far)
        answers.append(net.apply((now if rule.read == "token" else start).weights, q[t]))  # eq. 15
        surprises.append(surprise)
        if ends:
            start = now
    return torch.stack(answers), torch.stack(surprises), start


def memorize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    state: MemoryState,
    net: Net,
    rule: Rule,
    chunk: int,
    offsets: list[int] | None,
) -> tuple[Tensor, MemoryState, Tensor]:
    """Run `memorize_document` for every row and head. The arguments are those of `remanence.ops.memorize` and
    must have been checked. Returns the answers, the new state and the surprise.
    """
    layout = Layout(q.shape[0], q.shape[1], state, chunk, offsets, recomputes_tail=True)
    queries, k, v, gates = (
        layout.query_rows(q),
        layout.rows_with_tail(state.k, k),
        layout.rows_with_tail(state.v, v),
        gates_with_tail(layout, state, gates),
    )
    memory = state.rule_state
    present = [(name, gate) for name, gate in zip(Gates._fields, gates, strict=True) if gate is not None]
    answers, surprises = queries.new_zeros(*queries.shape[:3], v.shape[-1]), torch.zeros_like(gates.log_step)
    rows = []
    for row, total in enumerate(layout.totals):
        end = RuleState(tuple(x[row] for x in memory.weights), tuple(x[row] for x in memory.buffers))
        if total:

            def document(*head: Any) -> tuple[Tensor, Tensor, RuleState]:
                q, k, v, logs, start = head
                gates = Gates(**dict(zip([name for name, _ in present], logs, strict=True)))
                return memorize_document(net, rule, chunk, q, k, v, gates, start)

            logs = tuple(gate[row, :total] for _, gate in present)
            head = (queries[row, :total], k[row, :total], v[row, :total], logs, end)
            y, surprise, end = vmap(document, in_dims=(1, 1, 1, 1, 0), out_dims=(1, 1, 0))(*head)
            answers = answers.index_put((torch.tensor(row), torch.arange(total)), y)
            surprises = surprises.index_put((torch.tensor(row), torch.arange(total)), surprise)
        rows.append(end)
    weights, buffers = ([torch.stack(x) for x in zip(*part, strict=True)] for part in zip(*rows, strict=True))
    layers, kept = pack_state(rule, weights, buffers)
    answers, surprises = layout.to_batch(answers), layout.to_batch(surprises)
    return answers, layout.next_state(state, layers, k, v, gates, (answers, surprises), kept), surprises
