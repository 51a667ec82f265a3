"""The token-exact rule for a memory that is linear in its weights: one triangular system per chunk."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from remanence.ops.closed_form.layers import rows, scaled, spread, spread_backward, with_ones, without_ones
from remanence.ops.closed_form.records import (
    Anchor,
    Grads,
    Record,
    exact,
    prediction_and_slope,
    prediction_backward,
)
from remanence.ops.nets import MLP
from remanence.ops.rules import Coefficients, LinearRule


def _before(x: Tensor, first: Tensor) -> Tensor:
    """Each token's coefficients ``[m c n]`` as they stood one token earlier; `first` ``[n]`` at the chunk's start."""
    return torch.cat([first.expand(x.shape[0], 1, -1), x[:, :-1]], 1)


def earlier(co: Coefficients) -> tuple[Tensor, Tensor]:
    """P and (a, r) as each token meets them before its own write (but after its own decay, for decay_first)."""
    # Not copied from the host, which a graph cannot capture.
    untouched = (torch.arange(co.own.shape[-1], device=co.own.device) == 0).to(co.own.dtype)
    mix = _before(co.mix, co.mix.new_zeros(co.mix.shape[-1]))
    return scaled(mix, co.scale), scaled(_before(co.own, untouched), co.scale)


def solver(net: MLP, rule: LinearRule, k: Tensor, co: Coefficients) -> Tensor | None:
    """(I + (X X^T) P~)^-1 of every chunk at once, where the rule needs it: no part of it waits for a state."""
    if not exact(net, rule) or rule.loss != "squared":
        return None
    x = with_ones(net, k)
    return inverse(torch.bmm(x, x.mT).mul_(earlier(co)[0]))


def inverse(A: Tensor) -> Tensor:
    """(I + A)^-1 for A ``[m c c]`` below the diagonal: blocks merged two by two, -X2 A21 X1 standing between them.

    Products over all of them at once: torch's triangular solver goes matrix by matrix, and on a CPU whose cores are
    shared each waits for the threads of the one before (1 to 2 s for 256 of 32 x 32, where this takes 0.1 s; alone,
    about the same).
    """
    count, c = A.shape[0], A.shape[-1]
    size = 1 << (c - 1).bit_length()
    A = torch.nn.functional.pad(A, (0, size - c, 0, size - c))
    X, half = A.new_ones(count, size, 1, 1), 1
    while half < size:
        pairs = A.unflatten(-1, (-1, 2 * half)).unflatten(1, (-1, 2 * half)).diagonal(dim1=1, dim2=3)
        below = pairs[:, half:, :half].movedim(-1, 1)
        first, second = X[:, 0::2], X[:, 1::2]
        X = A.new_zeros(count, first.shape[1], 2 * half, 2 * half)
        X[..., :half, :half], X[..., half:, half:] = first, second
        X[..., half:, :half] = -below if half == 1 else -(second @ below @ first)
        half *= 2
    return X[:, 0, :c, :c]


def record_exact(net: MLP, rule: LinearRule, anchor: Anchor, k: Tensor, v: Tensor) -> Record:
    """Every token's error at its own weights, for a memory linear in them: one unit triangular system per chunk.

    With ~ for one token earlier, Z = (a~ X W + r~ X S) - [(X X^T) P~] D. For the squared loss D = Z - target, so that
    (I + (X X^T) P~) D equals what is known; for the dot loss D = -v is known itself, and nothing has to be solved.
    """
    x = with_ones(net, k)
    mix, own = earlier(anchor.co)
    output = torch.bmm(spread(x, own), rows(anchor.state[0]))
    if anchor.solver is not None:
        target = v - k if net.residual else v
        error = torch.bmm(anchor.solver, output - target)
        output = error + target
    else:
        error = -v
        output = output.baddbmm_(torch.bmm(x, x.mT).mul_(mix), error, alpha=-1)
    _, prediction, slope = prediction_and_slope(net, rule, k, v, output)
    return Record([x], [error], [output], [], [], [], None, prediction, slope)


def record_exact_backward(
    net: MLP, rule: LinearRule, anchor: Anchor, rec: Record, g: Grads, g_surprise: Tensor
) -> tuple[Tensor, Tensor]:
    """Of the dot loss; for the squared one see `prepare_backward`."""
    x, error, g_x = rec.inputs[0], rec.errors[0], g.inputs[0]
    mix, own = earlier(anchor.co)
    g_k, g_v, g_output = prediction_backward(net, rule, rec, g.errors[0], g_surprise)
    g_v = g_v.baddbmm((torch.bmm(x, x.mT) * mix).mT, g_output)  # D = -v is met a second time, inside Z
    rows(g.state[0]).baddbmm_(spread(x, own).mT, g_output)
    _blend_backward(anchor.co, anchor.state[0], x, mix, own, error, g_output, g_x, g.co)
    g_x = without_ones(net, g_x)
    return (g_x if g_k is None else g_k + g_x), g_v


def _blend_backward(
    co: Coefficients, state: Tensor, x: Tensor, mix: Tensor, own: Tensor, error: Tensor, g_output: Tensor, g_x: Tensor,
    g_co: Coefficients,
) -> None:  # fmt: skip
    """From Z, what each token's own weights answered, to the keys and coefficients it came from, added in place."""
    g_blend = torch.bmm(g_output, error.mT).neg_()
    g_gram = g_blend * mix
    g_mix, g_own = g_blend.mul_(torch.bmm(x, x.mT)), torch.zeros_like(own)
    g_x.baddbmm_(g_gram + g_gram.mT, x)
    spread_backward(torch.bmm(g_output, rows(state).mT), x, own, g_x, g_own)
    _earlier_backward(co, g_co, g_mix, g_own)


class Prepared(NamedTuple):
    """Of many chunks by the token-exact rule with the squared loss, what waits for no state: D = T (X~ J - target) = U
    J - known (`record_exact`), and the state at a chunk's end is F J - K^T D.
    """

    x: Tensor  # keys, with ones
    mix: Tensor  # P and (a, r) one token earlier
    own: Tensor
    solver: Tensor  # T
    U: Tensor
    known: Tensor  # overwritten by the errors D, chunk by chunk
    K: Tensor


def prepare(net: MLP, co: Coefficients, k: Tensor, v: Tensor) -> Prepared:
    x = with_ones(net, k)
    mix, own = earlier(co)
    solver = inverse(torch.bmm(x, x.mT).mul_(mix))
    target = v - k if net.residual else v
    return Prepared(
        x,
        mix,
        own,
        solver,
        torch.bmm(solver, spread(x, own)),
        torch.bmm(solver, target),
        spread(x, co.fold_mix),
    )


def exact_step(state: Tensor, U: Tensor, known: Tensor, K: Tensor, fold: Tensor, end: Tensor | None) -> None:
    """One chunk: what is known becomes its errors, and the state's end is written, if it has one."""
    known.baddbmm_(U, rows(state), beta=-1)
    if end is not None:
        torch.bmm(fold, state.flatten(2), out=end.flatten(2))
        rows(end).baddbmm_(K.mT, known, alpha=-1)


def exact_step_backward(
    g_end: Tensor | None, U: Tensor, K: Tensor, fold: Tensor, g_error: Tensor, g_start: Tensor
) -> None:
    """Adds what a chunk's end brings to the gradients of its errors and, through these too, of its start."""
    if g_end is not None:
        g_error.baddbmm_(K, rows(g_end), alpha=-1)
        g_start.flatten(2).baddbmm_(fold.mT, g_end.flatten(2))
    rows(g_start).baddbmm_(U.mT, g_error)


def prepare_backward(
    net: MLP, co: Coefficients, ready: Prepared, state: Tensor, error: Tensor,
    g_error: Tensor, g_end: Tensor | None, g_x: Tensor, g_co: Coefficients,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of k and v, of many chunks at once, from those of their errors and of the states at their ends."""
    if g_end is not None:
        spread_backward(torch.bmm(error, rows(g_end).mT), ready.x, co.fold_mix, g_x, g_co.fold_mix, sign=-1)
        g_co.fold.baddbmm_(g_end.flatten(2), state.flatten(2).mT)
    g_output = torch.bmm(ready.solver.mT, g_error)
    _blend_backward(co, state, ready.x, ready.mix, ready.own, error, g_output, g_x, g_co)
    g_x = without_ones(net, g_x)
    return (g_x + g_output if net.residual else g_x), -g_output


def _earlier_backward(co: Coefficients, g_co: Coefficients, g_mix: Tensor, g_own: Tensor) -> None:
    if co.scale is not None and g_co.scale is not None:
        mix, own = earlier(co._replace(scale=None))
        g_co.scale.add_((g_mix * mix).sum(-1)).add_((g_own * own).sum(-1))
        g_mix, g_own = scaled(g_mix, co.scale), scaled(g_own, co.scale)
    g_co.mix[:, :-1] += g_mix[:, 1:].tril()
    g_co.own[:, :-1] += g_own[:, 1:]
