"""The answers to a chunk's queries, each at the weights after its own token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from remanence.ops.closed_form.layers import (
    Norm,
    activate,
    activation_backward,
    append_ones,
    drop_ones,
    flatten_state,
    layer_norm,
    stack_scaled,
    stack_scaled_backward,
)
from remanence.ops.closed_form.records import Anchor, ChunkGrads
from remanence.ops.nets import MLP
from remanence.ops.rules import Coefficients


class QueryActivations(NamedTuple):
    """The answers to queries, and the activations that backward needs."""

    answers: Tensor
    inputs: list[Tensor]  # A_l
    scaled_inputs: list[Tensor]  # (a A_l | r A_l)
    scores: list[Tensor]  # A_l X_l^T
    outputs: list[Tensor]  # Y_l
    norm: Norm | None


def read_queries(
    net: MLP, anchor: Anchor, inputs: list[Tensor], errors: list[Tensor], q: Tensor
) -> QueryActivations:
    """Compute the answers to queries ``[m c' e]`` of the last c' tokens of a chunk, each at the weights after
    its token. `inputs` and `errors` are X and D of the chunk's keys.
    """
    gradient_factors, state_factors = _query_factors(anchor.coef, q.shape[1])
    outputs: list[Tensor] = []
    queries, scaled_inputs, scores = [], [], []
    x = q
    for layer, state in enumerate(anchor.state):
        if layer:
            x = activate(net, outputs[-1])
        queries.append(append_ones(net, x))
        scaled_inputs.append(stack_scaled(queries[-1], state_factors))
        scores.append(torch.bmm(queries[-1], inputs[layer].mT))
        y = torch.bmm(scaled_inputs[-1], flatten_state(state))
        outputs.append(y.baddbmm_(scores[-1] * gradient_factors, errors[layer], alpha=-1))
    norm = layer_norm(outputs[-1]) if net.norm else None
    answer = norm.value if norm else outputs[-1]
    return QueryActivations(
        answer + q if net.residual else answer, queries, scaled_inputs, scores, outputs, norm
    )


def _query_factors(coef: Coefficients, count: int) -> tuple[Tensor, Tensor]:
    """Return the gradient factors and the state factors of the last `count` tokens."""
    first = coef.gradient_factors.shape[1] - count
    return coef.gradient_factors[:, first:], coef.state_factors[:, first:]


def read_queries_backward(
    net: MLP,
    anchor: Anchor,
    inputs: list[Tensor],
    errors: list[Tensor],
    query_activations: QueryActivations,
    g_answers: Tensor,
    g_coef: Coefficients,
) -> tuple[Tensor, ChunkGrads]:
    """Return the gradient of the queries, and the gradients of layer inputs, errors and state. The gradients
    of the coefficients are added to `g_coef` in place.
    """
    gradient_factors, state_factors = _query_factors(anchor.coef, g_answers.shape[1])
    g_gradient_factors, g_state_factors = _query_factors(g_coef, g_answers.shape[1])
    g_inputs, g_errors, g_state = [], [], []
    g_y = query_activations.norm.backward(g_answers) if query_activations.norm else g_answers
    for layer in range(len(anchor.state) - 1, -1, -1):
        a, scores, state = (
            query_activations.inputs[layer],
            query_activations.scores[layer],
            anchor.state[layer],
        )
        g_masked_scores = torch.bmm(g_y, errors[layer].mT).neg_()
        g_gradient_factors.addcmul_(g_masked_scores, scores)
        g_scores = g_masked_scores.mul_(gradient_factors)
        g_errors.append(torch.bmm((scores * gradient_factors).neg_().mT, g_y))
        g_inputs.append(torch.bmm(g_scores.mT, a))
        g_state.append(torch.bmm(query_activations.scaled_inputs[layer].mT, g_y).view_as(state))
        g_a = torch.bmm(g_scores, inputs[layer])
        stack_scaled_backward(torch.bmm(g_y, flatten_state(state).mT), a, state_factors, g_a, g_state_factors)
        g_a = drop_ones(net, g_a)
        g_y = activation_backward(net, g_a, query_activations.outputs[layer - 1]) if layer else g_a
    return (g_y + g_answers if net.residual else g_y), ChunkGrads(
        g_inputs[::-1], g_errors[::-1], g_state[::-1], g_coef
    )
