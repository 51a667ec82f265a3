"""One chunk of a memory with any net, inner loss and rule. Gradients are computed by torch.func.

Linear rules use the coefficients of their closed form (`chunk_step`); other rules call their `update`
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


def _chunk_step_of_head(
    net: Net, rule: LinearRule, coef: Coefficients, q: Tensor, k: Tensor, v: Tensor, state: Weights
) -> tuple[Tensor, Tensor, Weights]:
    """Compute `chunk_step` for one head: keys ``[c e]``, queries ``[c' e]`` of the last c' tokens, and layers
    ``[p ...]``.
    """

    def loss(weights: Weights, k: Tensor, v: Tensor) -> Tensor:
        return rule.loss_function(net.apply(weights, k), v)

    start = tuple(layer[0] for layer in state)
    if coef.anchor_scale is None:
        u, surprise = vmap(grad_and_value(loss), in_dims=(None, 0, 0))(start, k, v)
    else:
        u, surprise = vmap(grad_and_value(loss))(
            tuple(torch.tensordot(coef.anchor_scale, W, 0) for W in start), k, v
        )
    queried = slice(k.shape[0] - q.shape[0], None)
    weights, end = [], []
    for layer, change in zip(state, u, strict=True):
        weights.append(
            torch.tensordot(coef.state_factors[queried], layer, 1)
            - torch.tensordot(coef.gradient_factors[queried], change, 1)
        )
        end.append(
            torch.tensordot(coef.end_state_factors, layer, 1)
            - torch.tensordot(coef.end_gradient_factors.mT, change, 1)
        )
    return vmap(net.apply)(tuple(weights), q), surprise, tuple(end)


def chunk_step(
    net: Net, rule: LinearRule, coef: Coefficients, q: Tensor, k: Tensor, v: Tensor, state: Weights
) -> tuple[Tensor, Tensor, Weights]:
    """Return the answers, the surprise and the end state of one chunk ``[m c e]``, for all m rows and heads."""

    def head(coef: tuple[Tensor, ...], *rest: Any) -> tuple[Tensor, Tensor, Weights]:
        return _chunk_step_of_head(net, rule, Coefficients._make([*coef, *[None] * (5 - len(coef))]), *rest)

    return vmap(head)(tuple(x for x in coef if x is not None), q, k, v, state)


def rule_step(
    net: Net, rule: Rule, writes: bool, gates: Gates, q: Tensor, k: Tensor, v: Tensor, state: RuleState
) -> tuple[Tensor, Tensor, RuleState]:
    """Compute `chunk_step` by calling the rule's `update`, with gates ``[m c]`` and a state ``[m ...]``.

    With ``writes=False`` (the chunk is not complete), the returned end state is meaningless, and computations
    that only the end state needs may be skipped.
    """
    present = [(name, gate) for name, gate in zip(Gates._fields, gates, strict=True) if gate is not None]

    def head(logs: tuple[Tensor, ...], *rest: Any) -> tuple[Tensor, Tensor, RuleState]:
        gates = Gates(**dict(zip([name for name, _ in present], logs, strict=True)))
        step = _update_per_chunk if rule.granularity == "chunk" else _update_per_token
        return step(net, rule, writes, gates, *rest)

    return vmap(head)(tuple(gate for _, gate in present), q, k, v, state)


def _checked_update(rule: Rule, state: RuleState, gradients: Weights, gates: Gates) -> RuleState:
    """Return the result of the rule's `update`, or raise ValueError if its shapes differ from those of the
    state.
    """
    new = rule.update(state, gradients, gates)
    shapes = [[[list(x.shape) for x in part] for part in each] for each in (state, new)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"rule: expected update of {type(rule).__name__} to return weights and buffers of shapes {shapes[0]}, "
            f"got {shapes[1]}"
        )
    return RuleState(*new)


def _update_per_token(
    net: Net, rule: Rule, writes: bool, gates: Gates, q: Tensor, k: Tensor, v: Tensor, start: RuleState
) -> tuple[Tensor, Tensor, RuleState]:
    """Compute `rule_step` for one head, with an update for every token."""

    def loss(weights: Weights, k: Tensor, v: Tensor) -> Tensor:
        return rule.loss_function(net.apply(weights, k), v)

    def objective(weights: Weights, k: Tensor, v: Tensor, buffers: Weights) -> tuple[Tensor, Tensor]:
        own = loss(weights, k, v)
        return rule.objective(own, lambda keys: net.apply(weights, keys), buffers), own

    kept = ("gradient_at", "observe", "objective")
    is_parallel = rule.anchor == "chunk" and all(
        getattr(type(rule), name) is getattr(Rule, name) for name in kept
    )
    if is_parallel:
        found, losses = vmap(grad_and_value(loss), in_dims=(None, 0, 0))(start.weights, k, v)
    now, first, answers, surprises = start, k.shape[0] - q.shape[0], [], []
    for t in range(k.shape[0]):
        gates_t = gates.select(t)
        if is_parallel:
            u, surprise = tuple(x[t] for x in found), losses[t]
        else:
            now = RuleState(now.weights, rule.observe(now.buffers, k[t], v[t]))
            at = rule.gradient_at((now if rule.anchor == "token" else start).weights, gates_t)
            u, (_, surprise) = grad_and_value(objective, has_aux=True)(at, k[t], v[t], now.buffers)
        now = _checked_update(rule, now, u, gates_t)
        surprises.append(surprise)
        if t >= first:
            answers.append(net.apply((now if rule.read == "token" else start).weights, q[t - first]))
    return torch.stack(answers) if answers else q, torch.stack(surprises), now


def _update_per_chunk(
    net: Net, rule: Rule, writes: bool, gates: Gates, q: Tensor, k: Tensor, v: Tensor, start: RuleState
) -> tuple[Tensor, Tensor, RuleState]:
    """Compute `rule_step` for one head, with one update per chunk, or one update per query for
    ``read="token"``.
    """

    def loss(weights: Weights, k: Tensor, v: Tensor) -> Tensor:
        return rule.loss_function(net.apply(weights, k), v)

    def total(weights: Weights) -> tuple[Tensor, Tensor]:
        losses = vmap(loss, in_dims=(None, 0, 0))(weights, k, v)
        return (step * losses).sum(), losses

    step, first = gates.log_step.exp(), k.shape[0] - q.shape[0]
    if rule.read == "chunk":
        y = vmap(net.apply, in_dims=(None, 0))(start.weights, q) if q.shape[0] else q
        if not writes:
            losses = vmap(loss, in_dims=(None, 0, 0))(start.weights, k[first:], v[first:])
            return y, torch.cat([torch.zeros_like(step[:first]), losses]), start
        u, (_, losses) = grad_and_value(total, has_aux=True)(start.weights)
        return y, losses, _checked_update(rule, start, u, gates)
    found, losses = vmap(grad_and_value(loss), in_dims=(None, 0, 0))(start.weights, k, v)
    sums = [(x * step.view(-1, *[1] * (x.dim() - 1))).cumsum(0) for x in found]
    now, answers = start, []
    for t in range(min(first, k.shape[0] - 1), k.shape[0]):
        now = _checked_update(rule, start, tuple(x[t] for x in sums), gates.select(slice(t + 1)))
        if t >= first:
            answers.append(net.apply(now.weights, q[t - first]))
    return torch.stack(answers) if answers else q, losses, now
