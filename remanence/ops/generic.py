"""Any net and any inner loss, chunk by chunk: gradients by torch.func, weights per token, chunk by chunk."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from remanence.ops.nets import Net
from remanence.ops.rules import Coefficients, Rule
from remanence.ops.state import Weights


def _head(
    net: Net, rule: Rule, co: Coefficients, q: Tensor, k: Tensor, v: Tensor, state: Weights
) -> tuple[Tensor, Tensor, Weights]:
    """One head, one chunk: keys ``[c e]``, queries ``[c' e]`` of its last c' tokens, state ``[p ...]`` per layer."""

    def loss(weights: Weights, k: Tensor, v: Tensor) -> Tensor:
        return rule.loss_function(net.apply(weights, k), v)

    start = tuple(layer[0] for layer in state)
    if co.scale is None:
        u, surprise = vmap(grad_and_value(loss), in_dims=(None, 0, 0))(start, k, v)
    else:
        u, surprise = vmap(grad_and_value(loss))(tuple(torch.tensordot(co.scale, W, 0) for W in start), k, v)
    asked = slice(k.shape[0] - q.shape[0], None)
    own, end = [], []
    for layer, change in zip(state, u, strict=True):
        own.append(torch.tensordot(co.own[asked], layer, 1) - torch.tensordot(co.mix[asked], change, 1))
        end.append(torch.tensordot(co.fold, layer, 1) - torch.tensordot(co.fold_mix.mT, change, 1))
    return vmap(net.apply)(tuple(own), q), surprise, tuple(end)


def chunk_step(
    net: Net, rule: Rule, co: Coefficients, q: Tensor, k: Tensor, v: Tensor, state: Weights
) -> tuple[Tensor, Tensor, Weights]:
    """One chunk of every row and head, ``[m c e]``: answers, surprise, and the state at its end."""

    def head(co: tuple[Tensor, ...], *rest: Any) -> tuple[Tensor, Tensor, Weights]:
        return _head(net, rule, Coefficients._make([*co, *[None] * (5 - len(co))]), *rest)

    return vmap(head)(tuple(x for x in co if x is not None), q, k, v, state)
