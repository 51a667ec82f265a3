"""The forward and backward pass of a chunk's keys at the anchor weights, and the state at the end of the chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from remanence.ops.closed_form.layers import (
    activate_with_slope,
    activation_second_derivative,
    append_ones,
    drop_ones,
    flatten_state,
    scale_tokens,
    stack_scaled,
    stack_scaled_backward,
)
from remanence.ops.closed_form.queries import read_queries
from remanence.ops.closed_form.records import (
    Anchor,
    ChunkGrads,
    KeyActivations,
    is_token_exact,
    prediction_and_slope,
    prediction_backward,
)
from remanence.ops.closed_form.token_exact import record_token_exact, record_token_exact_backward
from remanence.ops.nets import MLP
from remanence.ops.rules import LinearRule
from remanence.ops.state import Weights


def record_keys(net: MLP, rule: LinearRule, anchor: Anchor, k: Tensor, v: Tensor) -> KeyActivations:
    """Compute the layer inputs, errors and predictions of a chunk's keys ``[m c e]`` and values at the anchor
    weights.
    """
    if is_token_exact(net, rule):
        return record_token_exact(net, rule, anchor, k, v)
    depth, scale = len(anchor.state), anchor.coef.anchor_scale
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    slopes: list[Tensor] = []
    products: list[Tensor] = []
    x = k
    for layer in range(depth):
        if layer:
            x, slope = activate_with_slope(net, outputs[-1])
            slopes.append(slope)
        inputs.append(append_ones(net, x))
        products.append(torch.bmm(inputs[-1], anchor.weight(layer)))
        outputs.append(scale_tokens(products[-1], scale))
    norm, prediction, slope = prediction_and_slope(net, rule, k, v, outputs[-1])
    errors = [norm.backward(slope) if norm else slope]
    returned: list[Tensor] = []
    for layer in range(depth - 1, 0, -1):
        returned.insert(0, torch.bmm(errors[0], drop_ones(net, anchor.weight(layer).mT)))
        errors.insert(0, scale_tokens(returned[0], scale) * slopes[layer - 1])
    return KeyActivations(inputs, errors, outputs, slopes, products, returned, norm, prediction, slope)


def record_keys_backward(
    net: MLP,
    rule: LinearRule,
    anchor: Anchor,
    key_activations: KeyActivations,
    g: ChunkGrads,
    g_surprise: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of k and v, from the gradients of layer inputs and errors in `g`. The gradients of
    the state and the coefficients are added to `g` in place.
    """
    if is_token_exact(net, rule):
        return record_token_exact_backward(net, rule, anchor, key_activations, g, g_surprise)
    last, scale = len(anchor.state) - 1, anchor.coef.anchor_scale
    g_outputs: list[Tensor] = []
    for layer in range(last):  # D_l was computed from D_{l+1}, so the first layer comes first here
        z, returned = key_activations.outputs[layer], key_activations.returned[layer]
        g_returned = g.errors[layer] * key_activations.slopes[layer]
        if scale is not None and g.coef.anchor_scale is not None:
            g.coef.anchor_scale.add_((g_returned * returned).sum(-1))
            g_returned = scale_tokens(g_returned, scale)
        g_outputs.append(
            scale_tokens(activation_second_derivative(net, z).mul_(returned).mul_(g.errors[layer]), scale)
        )
        g.errors[layer + 1].baddbmm_(g_returned, drop_ones(net, anchor.weight(layer + 1).mT).mT)
        g_weight = g.state[layer + 1][:, 0]
        (g_weight[:, :-1] if net.bias else g_weight).add_(
            torch.bmm(g_returned.mT, key_activations.errors[layer + 1])
        )
    g_k, g_v, g_last = prediction_backward(net, rule, key_activations, g.errors[last], g_surprise)
    g_outputs.append(g_last)
    for layer in range(last, -1, -1):
        g_z = g_outputs[layer]
        if scale is not None and g.coef.anchor_scale is not None:
            g.coef.anchor_scale.add_((g_z * key_activations.products[layer]).sum(-1))
            g_z = scale_tokens(g_z, scale)
        g.state[layer][:, 0].add_(torch.bmm(key_activations.inputs[layer].mT, g_z))
        g_x = drop_ones(net, g.inputs[layer].baddbmm_(g_z, anchor.weight(layer).mT))
        if layer:
            g_outputs[layer - 1].addcmul_(g_x, key_activations.slopes[layer - 1])
    return (g_x if g_k is None else g_k + g_x), g_v


def record_next_key(
    net: MLP,
    rule: LinearRule,
    anchor: Anchor,
    inputs: list[Tensor],
    errors: list[Tensor],
    k: Tensor,
    v: Tensor,
) -> KeyActivations:
    """Compute `record_keys` for the next token ``[m 1 e]`` of a chunk, given the inputs and errors of the
    earlier tokens. No linear system has to be solved.

    The anchor must have the coefficients of that token or, for the token-exact rule, its
    `previous_token_factors`.
    """
    if not is_token_exact(net, rule):
        return record_keys(net, rule, anchor, k, v)
    query_activations = read_queries(net, anchor, inputs, errors, k)
    _, prediction, slope = prediction_and_slope(net, rule, k, v, query_activations.outputs[0])
    return KeyActivations(
        query_activations.inputs, [slope], query_activations.outputs, [], [], [], None, prediction, slope
    )


def write_end_state(anchor: Anchor, inputs: list[Tensor], errors: list[Tensor], into: Weights) -> None:
    """Write the state at the end of a chunk into `into`, in place."""
    for state, x, error, end in zip(anchor.state, inputs, errors, into, strict=True):
        torch.bmm(anchor.coef.end_state_factors, state.flatten(2), out=end.flatten(2))
        flatten_state(end).baddbmm_(stack_scaled(x, anchor.coef.end_gradient_factors).mT, error, alpha=-1)


def write_end_state_backward(
    anchor: Anchor, key_activations: KeyActivations, g_end: list[Tensor], g: ChunkGrads
) -> None:
    """Compute the backward of `write_end_state` and add the gradients to `g` in place. `g_end` is the
    gradient of the end state.
    """
    coef = anchor.coef
    for layer, grad in enumerate(g_end):
        x, error, g_end_rows = (
            key_activations.inputs[layer],
            key_activations.errors[layer],
            flatten_state(grad),
        )
        stack_scaled_backward(
            torch.bmm(error, g_end_rows.mT),
            x,
            coef.end_gradient_factors,
            g.inputs[layer],
            g.coef.end_gradient_factors,
            sign=-1,
        )
        g.errors[layer].baddbmm_(stack_scaled(x, coef.end_gradient_factors), g_end_rows, alpha=-1)
        flat, start = grad.flatten(2), anchor.state[layer].flatten(2)
        g.coef.end_state_factors.baddbmm_(flat, start.mT)
        g.state[layer].flatten(2).baddbmm_(coef.end_state_factors.mT, flat)
