"""The answers to a chunk's queries, each at the weights of its own token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from remanence.ops.closed_form.layers import (
    Norm,
    activate,
    normalise,
    pull,
    rows,
    spread,
    spread_backward,
    with_ones,
    without_ones,
)
from remanence.ops.closed_form.records import Anchor, Grads
from remanence.ops.nets import MLP
from remanence.ops.rules import Coefficients


class Reading(NamedTuple):
    """The queries' way through the memory, kept for backward."""

    answers: Tensor
    inputs: list[Tensor]  # A_l
    spreads: list[Tensor]  # (a A_l | r A_l)
    scores: list[Tensor]  # A_l X_l^T
    outputs: list[Tensor]  # Y_l
    norm: Norm | None


def read(net: MLP, anchor: Anchor, inputs: list[Tensor], errors: list[Tensor], q: Tensor) -> Reading:
    """The answers to queries ``[m c' e]``, the chunk's last c' tokens, each at its own token's weights."""
    mix, own = _last(anchor.co, q.shape[1])
    outputs: list[Tensor] = []
    queries, spreads, scores = [], [], []
    x = q
    for layer, state in enumerate(anchor.state):
        if layer:
            x = activate(net, outputs[-1])
        queries.append(with_ones(net, x))
        spreads.append(spread(queries[-1], own))
        scores.append(torch.bmm(queries[-1], inputs[layer].mT))
        y = torch.bmm(spreads[-1], rows(state))
        outputs.append(y.baddbmm_(scores[-1] * mix, errors[layer], alpha=-1))
    norm = normalise(outputs[-1]) if net.norm else None
    answer = norm.value if norm else outputs[-1]
    return Reading(answer + q if net.residual else answer, queries, spreads, scores, outputs, norm)


def _last(co: Coefficients, count: int) -> tuple[Tensor, Tensor]:
    first = co.mix.shape[1] - count
    return co.mix[:, first:], co.own[:, first:]


def read_backward(
    net: MLP,
    anchor: Anchor,
    inputs: list[Tensor],
    errors: list[Tensor],
    reading: Reading,
    g_answers: Tensor,
    g_co: Coefficients,
) -> tuple[Tensor, Grads]:
    """The queries' gradient, and those of everything they met; the coefficients' are added in place."""
    mix, own = _last(anchor.co, g_answers.shape[1])
    g_mix, g_own = _last(g_co, g_answers.shape[1])
    g_inputs, g_errors, g_state = [], [], []
    g_y = reading.norm.pull(g_answers) if reading.norm else g_answers
    for layer in range(len(anchor.state) - 1, -1, -1):
        a, scores, state = reading.inputs[layer], reading.scores[layer], anchor.state[layer]
        g_blend = torch.bmm(g_y, errors[layer].mT).neg_()
        g_mix.addcmul_(g_blend, scores)
        g_scores = g_blend.mul_(mix)
        g_errors.append(torch.bmm((scores * mix).neg_().mT, g_y))
        g_inputs.append(torch.bmm(g_scores.mT, a))
        g_state.append(torch.bmm(reading.spreads[layer].mT, g_y).view_as(state))
        g_a = torch.bmm(g_scores, inputs[layer])
        spread_backward(torch.bmm(g_y, rows(state).mT), a, own, g_a, g_own)
        g_a = without_ones(net, g_a)
        g_y = pull(net, g_a, reading.outputs[layer - 1]) if layer else g_a
    return (g_y + g_answers if net.residual else g_y), Grads(
        g_inputs[::-1], g_errors[::-1], g_state[::-1], g_co
    )
