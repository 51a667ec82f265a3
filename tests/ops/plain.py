"""The two-layer memory in plain torch, chunk after chunk, with autograd for its gradients and products in any dtype.

What a user would write: the yardstick for the kernels' rounding. In float64 it is the chunked tier (tested).
"""

import torch
import torch.nn.functional as F

from remanence.ops import Gates, Rule
from remanence.ops.nets import LAYER_NORM_EPS, MLP
from remanence.ops.rules import coefficients


def plain(q, k, v, gates, weights, momentum=None, *, net: MLP, rule: Rule, chunk: int, dtype: torch.dtype):
    """Answers, surprise and the state's layers, from a document's start; products have operands and results of
    `dtype`.
    """
    exact = weights[0].dtype
    product = lambda a, b: (a.to(dtype) @ b.to(dtype)).to(exact)
    b, t, h, _ = q.shape
    n = -(-t // chunk)
    cut = lambda x: (
        F.pad(x, [0, 0] * (x.dim() - 2) + [0, n * chunk - t]).unflatten(1, (n, chunk)).movedim(3, 1).unbind(2)
    )
    q, k, v = (cut(x.to(exact)) for x in (q, k, v))
    columns = [[None] * n if gate is None else cut(gate) for gate in gates]
    W = [weight.expand(b, *weight.shape) for weight in weights]
    S = list(momentum or [torch.zeros_like(weight) for weight in W])
    answers, surprises = [], []
    for i in range(n):
        complete = torch.full((b, h), (i + 1) * chunk <= t, device=W[0].device)
        co = coefficients(rule, Gates(*[column[i] for column in columns]), complete)
        own, fold_mix = co.state_factors.unsqueeze(-1), co.end_gradient_factors.unsqueeze(-1)
        # What the chunk's first weights make of its keys.
        z = product(k[i], W[0])
        x, slope = _activate(net, z)
        value, rstd = _norm(product(x, W[1])) if net.norm else (product(x, W[1]), None)
        error = value + k[i] - v[i] if net.residual else value - v[i]
        surprises.append(0.5 * error.square().sum(-1))
        D2 = error if rstd is None else rstd * (error - _mean(error) - value * _mean(error * value))
        D1 = product(D2, W[1].mT) * slope
        # What each token's own weights answer to its query.
        read = q[i]
        for layer, (keys, errors) in enumerate([(k[i], D1), (x, D2)]):
            a = _activate(net, read)[0] if layer else read
            read = own[..., 0, :] * product(a, W[layer]) - product(
                product(a, keys.mT) * co.gradient_factors, errors
            )
            read = read + own[..., 1, :] * product(a, S[layer]) if rule.momentum else read
        answer = _norm(read)[0] if net.norm else read
        answers.append(answer + q[i] if net.residual else answer)
        ends, pasts = [], []
        for weight, past, inputs, errors in ((W[0], S[0], k[i], D1), (W[1], S[1], x, D2)):
            fold = co.end_state_factors[..., None, None]
            end = fold[..., 0, 0, :, :] * weight - product((fold_mix[..., 0, :] * inputs).mT, errors)
            if rule.momentum:
                end = end + fold[..., 0, 1, :, :] * past
                past = fold[..., 1, 1, :, :] * past - product((fold_mix[..., 1, :] * inputs).mT, errors)
            ends.append(end)
            pasts.append(past)
        W, S = ends, pasts
    layers = [torch.stack([w, s] if rule.momentum else [w], 2) for w, s in zip(W, S, strict=True)]
    back = lambda pieces: torch.cat(pieces, 2).movedim(1, 2)[:, :t]
    return back(answers), back(surprises), *layers


def _activate(net, z):
    """act(z), act'(z)."""
    if net.activation == "gelu":
        below = 0.5 * (1.0 + torch.erf(z * 0.5**0.5))
        return z * below, below + z * torch.exp(-0.5 * z * z) / (2.0 * torch.pi) ** 0.5
    gate = torch.sigmoid(z)
    return z * gate, gate + z * gate * (1.0 - gate)


def _mean(x):
    return x.mean(-1, keepdim=True)


def _norm(x):
    centred = x - _mean(x)
    rstd = torch.rsqrt(_mean(centred.square()) + LAYER_NORM_EPS)
    return centred * rstd, rstd
