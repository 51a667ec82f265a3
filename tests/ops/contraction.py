"""How much an update can enlarge the difference between two memories that read the same token: the largest singular
value of its Jacobian, searched over gates, keys, values and weights.
"""

import itertools
import math

import torch
from torch.func import grad, jacrev

from remanence.ops import NETS, Gates, RuleState

WIDTH, VALUES = 3, 2


def jacobian(rule, k, v, gates, weights, net=NETS["linear"]):
    """The Jacobian of all weights and buffers after an update with respect to those before it, for one head."""
    state = RuleState(tuple(weights), tuple(rule.init_state(tuple(weights))))
    sizes = [[x.shape for x in part] for part in state]

    def flat(state):
        return torch.cat([x.flatten() for part in state for x in part])

    def step(vector):
        shapes = [*sizes[0], *sizes[1]]
        parts = [x.view(s) for x, s in zip(vector.split([s.numel() for s in shapes]), shapes, strict=True)]
        now = RuleState(tuple(parts[: len(weights)]), tuple(parts[len(weights) :]))
        at = rule.gradient_at(now.weights, gates)
        u = grad(lambda W: rule.loss_function(net.apply(W, k), v))(at)
        return flat(rule.update(now, u, gates))

    return jacrev(step)(flat(state))


def gates_of(rule, logits):
    """Gates between 0 and 1 (a step of up to `max_step`) from a vector of logits."""
    logs = torch.nn.functional.logsigmoid(logits)
    return Gates(
        logs[0] + math.log(rule.max_step),
        logs[1] if rule.momentum else None,
        (logs[2 : 2 + WIDTH] if rule.forget_channels else logs[2]) if rule.forget else None,
    )


def gain(rule, key, value, logits, weight):
    k = torch.nn.functional.normalize(key, dim=-1)
    return torch.linalg.matrix_norm(jacobian(rule, k, value, gates_of(rule, logits), (weight,)), ord=2)


def worst_gain(rule, starts=3, steps=40, largest=10.0):
    """The largest gain found: gates at their ends with plain and mixed keys, then gradient ascent from random places.
    `largest` bounds the weights and values.
    """
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    found = 0.0
    for ends in itertools.product((-40.0, 40.0), repeat=3):
        logits = torch.tensor([ends[0], ends[1], ends[2], *[-ends[2]] * (WIDTH - 1)], dtype=torch.float64)
        for key in (torch.eye(WIDTH, dtype=torch.float64)[0], torch.ones(WIDTH, dtype=torch.float64)):
            found = max(found, float(gain(rule, key, draw(VALUES), logits, draw(WIDTH, VALUES))))
    for _ in range(starts):
        place = [draw(WIDTH), draw(VALUES), draw(2 + WIDTH), draw(WIDTH, VALUES)]
        place = [x.requires_grad_() for x in place]
        for _ in range(steps):
            now = gain(rule, *place)
            found = max(found, float(now.detach()))
            if not now.requires_grad:  # linear attention: the gradient does not depend on the weights
                break
            slopes = torch.autograd.grad(now, place, allow_unused=True)
            with torch.no_grad():
                for x, slope in zip(place, slopes, strict=True):
                    if slope is not None:
                        x.add_(slope / slope.norm().clamp_min(1e-12), alpha=0.5)
                place[1].clamp_(-largest, largest)
                place[3].clamp_(-largest, largest)
    return found
