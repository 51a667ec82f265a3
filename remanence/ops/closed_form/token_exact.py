"""The token-exact rule for a memory that is linear in its weights, computed by solving one triangular system
per chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from remanence.ops.closed_form.layers import (
    append_ones,
    drop_ones,
    flatten_state,
    scale_tokens,
    stack_scaled,
    stack_scaled_backward,
)
from remanence.ops.closed_form.records import (
    Anchor,
    ChunkGrads,
    KeyActivations,
    is_token_exact,
    prediction_and_slope,
    prediction_backward,
)
from remanence.ops.nets import MLP
from remanence.ops.rules import Coefficients, LinearRule


def _shift_by_one_token(x: Tensor, first: Tensor) -> Tensor:
    """Return the coefficients ``[m c n]`` of the previous token. The first token of a chunk gets `first`
    ``[n]``.
    """
    return torch.cat([first.expand(x.shape[0], 1, -1), x[:, :-1]], 1)


def previous_token_factors(coef: Coefficients) -> tuple[Tensor, Tensor]:
    """Return P and (a, r) before each token's own update (but after its own decay, for decay_first)."""
    # This is computed on the device, because a CUDA graph cannot capture a copy from the host.
    untouched = (torch.arange(coef.state_factors.shape[-1], device=coef.state_factors.device) == 0).to(
        coef.state_factors.dtype
    )
    gradient_factors = _shift_by_one_token(
        coef.gradient_factors, coef.gradient_factors.new_zeros(coef.gradient_factors.shape[-1])
    )
    return scale_tokens(gradient_factors, coef.anchor_scale), scale_tokens(
        _shift_by_one_token(coef.state_factors, untouched), coef.anchor_scale
    )


def token_exact_solver(net: MLP, rule: LinearRule, k: Tensor, coef: Coefficients) -> Tensor | None:
    """Return (I + (X X^T) P~)^-1 for every chunk, which does not depend on the state. Return None if the rule
    does not need it.
    """
    if not is_token_exact(net, rule) or rule.loss != "squared":
        return None
    x = append_ones(net, k)
    return invert_unit_triangular(torch.bmm(x, x.mT).mul_(previous_token_factors(coef)[0]))


def invert_unit_triangular(A: Tensor) -> Tensor:
    """Return (I + A)^-1 for strictly lower triangular A ``[m c c]``. Inverses of diagonal blocks are merged
    in pairs: below the diagonal, the merged block is -X2 A21 X1.

    All matrices are processed at once. torch's triangular solver processes one after the other, and
    synchronises its threads after each of them. On a busy CPU, it took 1 to 2 s for 256 matrices of 32 x 32,
    and this function 0.1 s (on an idle CPU, both take about the same time).
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


def record_token_exact(net: MLP, rule: LinearRule, anchor: Anchor, k: Tensor, v: Tensor) -> KeyActivations:
    """Compute `record_keys` for the token-exact rule, where the error of each token is taken at the weights
    before it.

    With ~ for the previous token, Z = (a~ X W + r~ X S) - [(X X^T) P~] D. For the squared loss, D = Z -
    target, so D solves a unit triangular system with the matrix I + (X X^T) P~. For the dot loss, D = -v.
    """
    x = append_ones(net, k)
    gradient_factors, state_factors = previous_token_factors(anchor.coef)
    output = torch.bmm(stack_scaled(x, state_factors), flatten_state(anchor.state[0]))
    if anchor.solver is not None:
        target = v - k if net.residual else v
        error = torch.bmm(anchor.solver, output - target)
        output = error + target
    else:
        error = -v
        output = output.baddbmm_(torch.bmm(x, x.mT).mul_(gradient_factors), error, alpha=-1)
    _, prediction, slope = prediction_and_slope(net, rule, k, v, output)
    return KeyActivations([x], [error], [output], [], [], [], None, prediction, slope)


def record_token_exact_backward(
    net: MLP,
    rule: LinearRule,
    anchor: Anchor,
    key_activations: KeyActivations,
    g: ChunkGrads,
    g_surprise: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute the backward of `record_token_exact` for the dot loss. Return the gradients of k and v. For the
    squared loss, see `prepare_chunks_backward`.
    """
    x, error, g_x = key_activations.inputs[0], key_activations.errors[0], g.inputs[0]
    gradient_factors, state_factors = previous_token_factors(anchor.coef)
    g_k, g_v, g_output = prediction_backward(net, rule, key_activations, g.errors[0], g_surprise)
    g_v = g_v.baddbmm((torch.bmm(x, x.mT) * gradient_factors).mT, g_output)  # D = -v also enters Z
    flatten_state(g.state[0]).baddbmm_(stack_scaled(x, state_factors).mT, g_output)
    _token_outputs_backward(
        anchor.coef, anchor.state[0], x, gradient_factors, state_factors, error, g_output, g_x, g.coef
    )
    g_x = drop_ones(net, g_x)
    return (g_x if g_k is None else g_k + g_x), g_v


def _token_outputs_backward(
    coef: Coefficients, state: Tensor, x: Tensor, gradient_factors: Tensor, state_factors: Tensor,
    error: Tensor, g_output: Tensor, g_x: Tensor,
    g_coef: Coefficients,
) -> None:  # fmt: skip
    """Compute the gradients of keys and coefficients from the gradient of the outputs Z, and add them to
    `g_x` and `g_coef` in place.
    """
    g_masked_scores = torch.bmm(g_output, error.mT).neg_()
    g_gram = g_masked_scores * gradient_factors
    g_gradient_factors, g_state_factors = (
        g_masked_scores.mul_(torch.bmm(x, x.mT)),
        torch.zeros_like(state_factors),
    )
    g_x.baddbmm_(g_gram + g_gram.mT, x)
    stack_scaled_backward(
        torch.bmm(g_output, flatten_state(state).mT), x, state_factors, g_x, g_state_factors
    )
    _previous_token_factors_backward(coef, g_coef, g_gradient_factors, g_state_factors)


class PreparedChunks(NamedTuple):
    """The quantities of the token-exact rule with the squared loss that are computed for many chunks before
    their states are known.

    D = T (X~ J - target) = U J - T target (`record_token_exact`), and the state at the end of a chunk is F J -
    K^T D.
    """

    x: Tensor  # keys, with ones
    gradient_factors: Tensor  # P of the previous token
    state_factors: Tensor  # (a, r) of the previous token
    solver: Tensor  # T
    U: Tensor  # T X~
    solved_target: Tensor  # T target; overwritten by the errors D, chunk by chunk
    K: Tensor


def prepare_chunks(net: MLP, coef: Coefficients, k: Tensor, v: Tensor) -> PreparedChunks:
    """Compute the quantities that do not depend on the states, for many chunks."""
    x = append_ones(net, k)
    gradient_factors, state_factors = previous_token_factors(coef)
    solver = invert_unit_triangular(torch.bmm(x, x.mT).mul_(gradient_factors))
    target = v - k if net.residual else v
    return PreparedChunks(
        x,
        gradient_factors,
        state_factors,
        solver,
        torch.bmm(solver, stack_scaled(x, state_factors)),
        torch.bmm(solver, target),
        stack_scaled(x, coef.end_gradient_factors),
    )


def token_exact_step(
    state: Tensor, U: Tensor, solved_target: Tensor, K: Tensor, end_state_factors: Tensor, end: Tensor | None
) -> None:
    """Process one chunk in place: `solved_target` becomes the errors D, and the end state is written to `end`
    unless that is None. `end_state_factors` is F.
    """
    solved_target.baddbmm_(U, flatten_state(state), beta=-1)
    if end is not None:
        torch.bmm(end_state_factors, state.flatten(2), out=end.flatten(2))
        flatten_state(end).baddbmm_(K.mT, solved_target, alpha=-1)


def token_exact_step_backward(
    g_end: Tensor | None, U: Tensor, K: Tensor, end_state_factors: Tensor, g_error: Tensor, g_start: Tensor
) -> None:
    """Compute the backward of `token_exact_step`, and add it to the gradients of the errors and of the start
    state in place.
    """
    if g_end is not None:
        g_error.baddbmm_(K, flatten_state(g_end), alpha=-1)
        g_start.flatten(2).baddbmm_(end_state_factors.mT, g_end.flatten(2))
    flatten_state(g_start).baddbmm_(U.mT, g_error)


def prepare_chunks_backward(
    net: MLP, coef: Coefficients, prepared: PreparedChunks, state: Tensor, error: Tensor,
    g_error: Tensor, g_end: Tensor | None, g_x: Tensor, g_coef: Coefficients,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of k and v for many chunks, from the gradients of their errors and end states.
    Other gradients are added to `g_x` and `g_coef` in place.
    """
    if g_end is not None:
        stack_scaled_backward(
            torch.bmm(error, flatten_state(g_end).mT),
            prepared.x,
            coef.end_gradient_factors,
            g_x,
            g_coef.end_gradient_factors,
            sign=-1,
        )
        g_coef.end_state_factors.baddbmm_(g_end.flatten(2), state.flatten(2).mT)
    g_output = torch.bmm(prepared.solver.mT, g_error)
    _token_outputs_backward(
        coef,
        state,
        prepared.x,
        prepared.gradient_factors,
        prepared.state_factors,
        error,
        g_output,
        g_x,
        g_coef,
    )
    g_x = drop_ones(net, g_x)
    return (g_x + g_output if net.residual else g_x), -g_output


def _previous_token_factors_backward(
    coef: Coefficients, g_coef: Coefficients, g_gradient_factors: Tensor, g_state_factors: Tensor
) -> None:
    """Add the gradients of the coefficients to `g_coef`, from the gradients of the results of
    `previous_token_factors`.
    """
    if coef.anchor_scale is not None and g_coef.anchor_scale is not None:
        gradient_factors, state_factors = previous_token_factors(coef._replace(anchor_scale=None))
        g_coef.anchor_scale.add_((g_gradient_factors * gradient_factors).sum(-1)).add_(
            (g_state_factors * state_factors).sum(-1)
        )
        g_gradient_factors = scale_tokens(g_gradient_factors, coef.anchor_scale)
        g_state_factors = scale_tokens(g_state_factors, coef.anchor_scale)
    g_coef.gradient_factors[:, :-1] += g_gradient_factors[:, 1:].tril()
    g_coef.state_factors[:, :-1] += g_state_factors[:, 1:]
