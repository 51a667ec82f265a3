"""Any net, any inner loss and any rule, chunk by chunk, with gradients by torch.func.

Linear rules are computed by the coefficients of their closed form (`chunk_step`), others by their own `update`
(`rule_step`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from remanence.ops.nets import Net
from remanence.ops.rules import Coefficients, LinearRule, Rule
from remanence.ops.state import Gates, RuleState, Weights


def _head(
    net: Net, rule: LinearRule, co: Coefficients, q: Tensor, k: Tensor, v: Tensor, state: Weights
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
    net: Net, rule: LinearRule, co: Coefficients, q: Tensor, k: Tensor, v: Tensor, state: Weights
) -> tuple[Tensor, Tensor, Weights]:
    """One chunk of every row and head, ``[m c e]``: answers, surprise, and the state at its end."""

    def head(co: tuple[Tensor, ...], *rest: Any) -> tuple[Tensor, Tensor, Weights]:
        return _head(net, rule, Coefficients._make([*co, *[None] * (5 - len(co))]), *rest)

    return vmap(head)(tuple(x for x in co if x is not None), q, k, v, state)


def rule_step(
    net: Net, rule: Rule, writes: bool, gates: Gates, q: Tensor, k: Tensor, v: Tensor, state: RuleState
) -> tuple[Tensor, Tensor, RuleState]:
    """`chunk_step` by the rule's own `update`, with gates ``[m c]`` and a state ``[m ...]``.

    Without `writes`, as while a chunk is open, the state at the end has no meaning, and only what the queries' tokens
    need is computed.
    """
    present = [(name, gate) for name, gate in zip(Gates._fields, gates, strict=True) if gate is not None]

    def head(logs: tuple[Tensor, ...], *rest: Any) -> tuple[Tensor, Tensor, RuleState]:
        own = Gates(**dict(zip([name for name, _ in present], logs, strict=True)))
        by = _by_chunk if rule.granularity == "chunk" else _by_token
        return by(net, rule, writes, own, *rest)

    return vmap(head)(tuple(gate for _, gate in present), q, k, v, state)


def _updated(rule: Rule, state: RuleState, gradients: Weights, gates: Gates) -> RuleState:
    new = rule.update(state, gradients, gates)
    shapes = [[[list(x.shape) for x in part] for part in each] for each in (state, new)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"rule: expected update of {type(rule).__name__} to return weights and buffers of shapes {shapes[0]}, "
            f"got {shapes[1]}"
        )
    return RuleState(*new)


def _by_token(
    net: Net, rule: Rule, writes: bool, gates: Gates, q: Tensor, k: Tensor, v: Tensor, start: RuleState
) -> tuple[Tensor, Tensor, RuleState]:
    """One head, one chunk, an update for every token."""

    def loss(weights: Weights, k: Tensor, v: Tensor) -> Tensor:
        return rule.loss_function(net.apply(weights, k), v)

    together = rule.anchor == "chunk" and type(rule).gradient_at is Rule.gradient_at
    if together:
        found, losses = vmap(grad_and_value(loss), in_dims=(None, 0, 0))(start.weights, k, v)
    now, first, answers, surprises = start, k.shape[0] - q.shape[0], [], []
    for t in range(k.shape[0]):
        own = gates.part(t)
        if together:
            u, surprise = tuple(x[t] for x in found), losses[t]
        else:
            at = rule.gradient_at((now if rule.anchor == "token" else start).weights, own)
            u, surprise = grad_and_value(loss)(at, k[t], v[t])
        now = _updated(rule, now, u, own)
        surprises.append(surprise)
        if t >= first:
            answers.append(net.apply((now if rule.read == "token" else start).weights, q[t - first]))
    return torch.stack(answers) if answers else q, torch.stack(surprises), now


def _by_chunk(
    net: Net, rule: Rule, writes: bool, gates: Gates, q: Tensor, k: Tensor, v: Tensor, start: RuleState
) -> tuple[Tensor, Tensor, RuleState]:
    """One head, one chunk, a single update; of the tokens so far for each query, if the rule reads at the token."""

    def loss(weights: Weights, k: Tensor, v: Tensor) -> Tensor:
        return rule.loss_function(net.apply(weights, k), v)

    def total(weights: Weights) -> tuple[Tensor, Tensor]:
        losses = vmap(loss, in_dims=(None, 0, 0))(weights, k, v)
        return (step * losses).sum(), losses

    step, first = gates.log_step.exp(), k.shape[0] - q.shape[0]
    if rule.read == "chunk":
        y = vmap(net.apply, in_dims=(None, 0))(start.weights, q) if q.shape[0] else q
        if not writes:
            own = vmap(loss, in_dims=(None, 0, 0))(start.weights, k[first:], v[first:])
            return y, torch.cat([torch.zeros_like(step[:first]), own]), start
        u, (_, losses) = grad_and_value(total, has_aux=True)(start.weights)
        return y, losses, _updated(rule, start, u, gates)
    found, losses = vmap(grad_and_value(loss), in_dims=(None, 0, 0))(start.weights, k, v)
    sums = [(x * step.view(-1, *[1] * (x.dim() - 1))).cumsum(0) for x in found]
    now, answers = start, []
    for t in range(min(first, k.shape[0] - 1), k.shape[0]):
        now = _updated(rule, start, tuple(x[t] for x in sums), gates.part(slice(t + 1)))
        if t >= first:
            answers.append(net.apply(now.weights, q[t - first]))
    return torch.stack(answers) if answers else q, losses, now
