"""A chunk's keys at the anchor weights, and the state at the chunk's end."""

from __future__ import annotations

import torch
from torch import Tensor

from remanence.ops.closed_form.layers import (
    activate_with_slope,
    curvature,
    rows,
    scaled,
    spread,
    spread_backward,
    with_ones,
    without_ones,
)
from remanence.ops.closed_form.queries import read
from remanence.ops.closed_form.records import (
    Anchor,
    Grads,
    Record,
    exact,
    prediction_and_slope,
    prediction_backward,
)
from remanence.ops.closed_form.token_exact import record_exact, record_exact_backward
from remanence.ops.nets import MLP
from remanence.ops.rules import LinearRule
from remanence.ops.state import Weights


def record(net: MLP, rule: LinearRule, anchor: Anchor, k: Tensor, v: Tensor) -> Record:
    """What the anchor weights make of a chunk's keys ``[m c e]`` and values."""
    if exact(net, rule):
        return record_exact(net, rule, anchor, k, v)
    depth, scale = len(anchor.state), anchor.co.scale
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    slopes: list[Tensor] = []
    products: list[Tensor] = []
    x = k
    for layer in range(depth):
        if layer:
            x, slope = activate_with_slope(net, outputs[-1])
            slopes.append(slope)
        inputs.append(with_ones(net, x))
        products.append(torch.bmm(inputs[-1], anchor.weight(layer)))
        outputs.append(scaled(products[-1], scale))
    norm, prediction, slope = prediction_and_slope(net, rule, k, v, outputs[-1])
    errors = [norm.pull(slope) if norm else slope]
    returned: list[Tensor] = []
    for layer in range(depth - 1, 0, -1):
        returned.insert(0, torch.bmm(errors[0], without_ones(net, anchor.weight(layer).mT)))
        errors.insert(0, scaled(returned[0], scale) * slopes[layer - 1])
    return Record(inputs, errors, outputs, slopes, products, returned, norm, prediction, slope)


def record_backward(
    net: MLP, rule: LinearRule, anchor: Anchor, rec: Record, g: Grads, g_surprise: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of k and v, from those of the layer inputs and errors in `g`; the rest of `g` is added to."""
    if exact(net, rule):
        return record_exact_backward(net, rule, anchor, rec, g, g_surprise)
    last, scale = len(anchor.state) - 1, anchor.co.scale
    g_outputs: list[Tensor] = []
    for layer in range(last):  # D_l was made from D_{l+1}; undo the last made first
        z, back = rec.outputs[layer], rec.returned[layer]
        g_back = g.errors[layer] * rec.slopes[layer]
        if scale is not None and g.co.scale is not None:
            g.co.scale.add_((g_back * back).sum(-1))
            g_back = scaled(g_back, scale)
        g_outputs.append(scaled(curvature(net, z).mul_(back).mul_(g.errors[layer]), scale))
        g.errors[layer + 1].baddbmm_(g_back, without_ones(net, anchor.weight(layer + 1).mT).mT)
        g_weight = g.state[layer + 1][:, 0]
        (g_weight[:, :-1] if net.bias else g_weight).add_(torch.bmm(g_back.mT, rec.errors[layer + 1]))
    g_k, g_v, g_last = prediction_backward(net, rule, rec, g.errors[last], g_surprise)
    g_outputs.append(g_last)
    for layer in range(last, -1, -1):
        g_z = g_outputs[layer]
        if scale is not None and g.co.scale is not None:
            g.co.scale.add_((g_z * rec.products[layer]).sum(-1))
            g_z = scaled(g_z, scale)
        g.state[layer][:, 0].add_(torch.bmm(rec.inputs[layer].mT, g_z))
        g_x = without_ones(net, g.inputs[layer].baddbmm_(g_z, anchor.weight(layer).mT))
        if layer:
            g_outputs[layer - 1].addcmul_(g_x, rec.slopes[layer - 1])
    return (g_x if g_k is None else g_k + g_x), g_v


def record_next(
    net: MLP,
    rule: LinearRule,
    anchor: Anchor,
    inputs: list[Tensor],
    errors: list[Tensor],
    k: Tensor,
    v: Tensor,
) -> Record:
    """`record` of one more token ``[m 1 e]`` of a chunk whose inputs and errors so far are known: nothing has to be
    solved.

    The coefficients are that token's; for the token-exact rule, as they stood one token `earlier`.
    """
    if not exact(net, rule):
        return record(net, rule, anchor, k, v)
    reading = read(net, anchor, inputs, errors, k)
    _, prediction, slope = prediction_and_slope(net, rule, k, v, reading.outputs[0])
    return Record(reading.inputs, [slope], reading.outputs, [], [], [], None, prediction, slope)


def fold(anchor: Anchor, inputs: list[Tensor], errors: list[Tensor], into: Weights) -> None:
    """The state at the chunk's end, from the state at its start."""
    for state, x, error, end in zip(anchor.state, inputs, errors, into, strict=True):
        torch.bmm(anchor.co.fold, state.flatten(2), out=end.flatten(2))
        rows(end).baddbmm_(spread(x, anchor.co.fold_mix).mT, error, alpha=-1)


def fold_backward(anchor: Anchor, rec: Record, g_end: list[Tensor], g: Grads) -> None:
    """From the gradients of the state at the chunk's end to everything it came from, added to `g`."""
    co = anchor.co
    for layer, grad in enumerate(g_end):
        x, error, tall = rec.inputs[layer], rec.errors[layer], rows(grad)
        spread_backward(torch.bmm(error, tall.mT), x, co.fold_mix, g.inputs[layer], g.co.fold_mix, sign=-1)
        g.errors[layer].baddbmm_(spread(x, co.fold_mix), tall, alpha=-1)
        flat, start = grad.flatten(2), anchor.state[layer].flatten(2)
        g.co.fold.baddbmm_(flat, start.mT)
        g.state[layer].flatten(2).baddbmm_(co.fold.mT, flat)
