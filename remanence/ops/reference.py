"""The memory rule as the paper writes it: one head, one document, one token after the other. This is the truth.

The gradient is taken by autograd of the written loss, never derived by hand. Slow, exact in float64, differentiable
(twice, too).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from remanence.ops.layout import Layout, gates_rows
from remanence.ops.nets import Net
from remanence.ops.rules import Rule
from remanence.ops.state import Gates, MemoryState, Weights


def memorize_document(
    net: Net,
    rule: Rule,
    chunk: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: tuple[Tensor, ...],
    weights: Weights,
    momentum: Weights,
) -> tuple[Tensor, Tensor, Weights, Weights]:
    """Equations 12 to 15 for one head, from a chunk's start on: q, k, v ``[t e]``, log gates ``[t]``.

    Returns answers, surprise, and (weights, momentum) as they were when the last complete chunk ended.
    """
    M, S = weights, momentum
    border, anchor = (M, S), M
    answers, surprises = [], []
    theta, eta, gamma = (log_gate.exp() for log_gate in gates)
    for t in range(k.shape[0]):
        if t % chunk == 0 or rule.anchor == "token":
            anchor = M

        def loss(W: Weights, t: int = t) -> Tensor:  # eq. 12
            return rule.loss_function(net.apply(W, k[t]), v[t])

        u, surprise = grad_and_value(loss)(
            tuple(gamma[t] * W for W in anchor) if rule.decay_first else anchor
        )
        S = tuple(eta[t] * past - theta[t] * now for past, now in zip(S, u, strict=True))  # eq. 14
        M = tuple(gamma[t] * W + change for W, change in zip(M, S, strict=True))  # eq. 13
        answers.append(net.apply(M, q[t]))  # eq. 15
        surprises.append(surprise)
        if (t + 1) % chunk == 0:
            border = (M, S)
    return torch.stack(answers), torch.stack(surprises), *border


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
    """The truth for every row and head; the arguments are those of `remanence.ops.memorize`, already checked."""
    layout = Layout(q.shape[0], q.shape[1], state, chunk, offsets, replay=True)
    queries, k, v, gates = (
        layout.queries(q),
        layout.rows(state.k, k),
        layout.rows(state.v, v),
        gates_rows(layout, state, gates),
    )
    nothing = tuple(torch.zeros_like(weight) for weight in state.weights)
    momentum = state.momentum if rule.momentum else nothing
    log_gates = (
        gates.log_step,
        torch.full_like(gates.log_step, -torch.inf) if gates.log_momentum is None else gates.log_momentum,
        torch.zeros_like(gates.log_step) if gates.log_keep is None else gates.log_keep,
    )
    answers, surprises = queries.new_zeros(*queries.shape[:3], v.shape[-1]), torch.zeros_like(gates.log_step)
    rows = []
    for row, total in enumerate(layout.totals):
        end, change = tuple(weight[row] for weight in state.weights), tuple(past[row] for past in momentum)
        if total:

            def document(*head: Any) -> tuple[Tensor, Tensor, Weights, Weights]:
                return memorize_document(net, rule, chunk, *head)

            head = (
                queries[row, :total],
                k[row, :total],
                v[row, :total],
                tuple(gate[row, :total] for gate in log_gates),
                end,
                change,
            )
            y, surprise, end, change = vmap(document, in_dims=(1, 1, 1, 1, 0, 0), out_dims=(1, 1, 0, 0))(
                *head
            )
            answers = answers.index_put((torch.tensor(row), torch.arange(total)), y)
            surprises = surprises.index_put((torch.tensor(row), torch.arange(total)), surprise)
        rows.append(
            [torch.stack(pair if rule.momentum else pair[:1], 1) for pair in zip(end, change, strict=True)]
        )
    layers = tuple(torch.stack(layer) for layer in zip(*rows, strict=True))
    answers, surprises = layout.back(answers), layout.back(surprises)
    return answers, layout.next_state(state, layers, k, v, gates, (answers, surprises)), surprises
