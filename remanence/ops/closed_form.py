"""The closed form of an MLP memory over whole chunks, forward and backward, written out.

Every gradient of an MLP is rank one in each layer's weight, u_l = outer(X_l, D_l), so weights per token never exist:
they appear only as masked products. For the keys at the anchor weights (`record`, one chunk, sequential because the
anchor is the last chunk's end):

    Z_l = X_l W_l,  X_{l+1} = act(Z_l),  D_L = dloss/dZ_L,  D_l = (D_{l+1} W_{l+1}^T) act'(Z_l)

for the queries at every token's own weights (`read`, many chunks at once), with A_1 = Q and A_{l+1} = act(Y_l):

    Y_l = a (A_l W_l) + r (A_l S_l) - [(A_l X_l^T) P] D_l

and for the state at the chunk's end (`fold`). A state is J = (W, S) stacked, ``[m p f f']`` with p = 2, or p = 1 for a
rule without momentum; so a A W + r A S is one product of (a A | r A) with J's rows. A bias is a column of ones in X and
A. The oracle for all of it is autograd through reference.py.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from remanence.ops.nets import EPS, MLP, Net, shrink
from remanence.ops.rules import Coefficients, LinearRule, Rule, is_linear
from remanence.ops.state import Weights

_aten = torch.ops.aten
DENSITY = 1.0 / math.sqrt(2.0 * math.pi)


def unsupported(net: Net, rule: Rule) -> str | None:
    """Why such a memory has no closed form, in words; None if it has one."""
    if not is_linear(rule):
        return f"the rule {type(rule).__name__} has no closed form"
    if isinstance(net, MLP) and isinstance(rule.loss, str):
        return None
    return "only MLP memories with one of the named losses have a closed form"


def activate(net: MLP, z: Tensor) -> Tensor:
    return _aten.gelu(z) if net.activation == "gelu" else _aten.silu(z)


def pull(net: MLP, grad: Tensor, z: Tensor) -> Tensor:
    """grad * act'(z), in one pass."""
    return _aten.gelu_backward(grad, z) if net.activation == "gelu" else _aten.silu_backward(grad, z)


def activate_with_slope(net: MLP, z: Tensor) -> tuple[Tensor, Tensor]:
    """act(z) and act'(z), which share their costly half."""
    if net.activation == "gelu":
        below = torch.erf(z * math.sqrt(0.5)).add_(1.0).mul_(0.5)
        return z * below, below.addcmul_(z, (z * z).mul_(-0.5).exp_(), value=DENSITY)
    gate = torch.sigmoid(z)
    value = z * gate
    return value, torch.addcmul(gate, value, 1.0 - gate)


def curvature(net: MLP, z: Tensor) -> Tensor:
    """act''(z)."""
    if net.activation == "gelu":
        square = z * z
        return (square * -0.5).exp_().mul_(square.sub_(2.0)).mul_(-DENSITY)
    gate = torch.sigmoid(z)
    return gate * (1.0 - gate) * (2.0 + z * (1.0 - 2.0 * gate))


class Norm(NamedTuple):
    """LayerNorm without gain of one tensor, kept for its derivatives.

    Rows beyond float32's squares are shrunk first (nets.py), and their derivatives with them.
    """

    source: Tensor  # shrunk
    value: Tensor
    mean: Tensor
    rstd: Tensor
    shrink: Tensor

    def pull(self, grad: Tensor) -> Tensor:
        """Backward: rstd (grad - mean(grad) - value mean(grad value))."""
        only_input = [True, False, False]
        shape = self.source.shape[-1:]
        g = _aten.native_layer_norm_backward(
            grad, self.source, shape, self.mean, self.rstd, None, None, only_input
        )[0]
        return g.mul_(self.shrink)

    def backward(self, g_value: Tensor, grad: Tensor, pulled: Tensor, g_pulled: Tensor) -> Tensor:
        """The source's gradient, from those of value and of pulled = pull(grad), which follows the source through value
        and rstd.
        """
        rstd = self.rstd * self.shrink
        along = (grad * self.value).mean(-1, keepdim=True)
        g_along = (g_pulled * self.value).mean(-1, keepdim=True)
        through_value = (g_pulled * along).addcmul_(grad, g_along)
        through_rstd = (g_pulled * pulled).mean(-1, keepdim=True).mul_(rstd)
        return self.pull(torch.addcmul(g_value, through_value, rstd, value=-1)).addcmul_(
            self.value, through_rstd, value=-1
        )


def normalise(x: Tensor) -> Norm:
    factor = shrink(x)
    x = x * factor
    value, mean, rstd = _aten.native_layer_norm(x, x.shape[-1:], None, None, EPS)
    return Norm(x, value, mean, rstd, factor)


def with_ones(net: MLP, x: Tensor) -> Tensor:
    return torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1) if net.bias else x


def without_ones(net: MLP, x: Tensor) -> Tensor:
    return x[..., :-1] if net.bias else x


def scaled(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor.unsqueeze(-1)


def spread(x: Tensor, factors: Tensor) -> Tensor:
    """x ``[m c f]`` times each of its token's factors ``[m c p]``, side by side: ``[m c pf]``."""
    return (x.unsqueeze(-2) * factors.unsqueeze(-1)).flatten(-2)


def spread_backward(
    grad: Tensor, x: Tensor, factors: Tensor, g_x: Tensor, g_factors: Tensor, sign: int = 1
) -> None:
    """Backward of `spread`, added in place."""
    grad = grad.unflatten(-1, (factors.shape[-1], -1))
    g_factors.add_((grad * x.unsqueeze(-2)).sum(-1), alpha=sign)
    for p in range(factors.shape[-1]):
        g_x.addcmul_(grad[..., p, :], factors[..., p : p + 1], value=sign)


def rows(state: Tensor) -> Tensor:
    """J ``[m p f f']`` as one tall matrix ``[m pf f']``, to stand behind a `spread`."""
    return state.flatten(1, 2)


class Anchor(NamedTuple):
    """What a chunk starts from: the state J of each layer, its tokens' coefficients, and the token-exact solver."""

    state: Weights
    co: Coefficients
    solver: Tensor | None = None

    def weight(self, layer: int) -> Tensor:
        return self.state[layer][:, 0]


class Grads(NamedTuple):
    """Gradients of one chunk's layer inputs, errors, start state and coefficients; added to in place."""

    inputs: list[Tensor]
    errors: list[Tensor]
    state: list[Tensor]
    co: Coefficients


class Record(NamedTuple):
    """A chunk's keys as the anchor weights saw them: layer inputs X, errors D, and what surprise and backward need."""

    inputs: list[Tensor]
    errors: list[Tensor]
    outputs: list[Tensor]  # Z_l, before the activation
    slopes: list[Tensor]  # act'(Z_l)
    products: list[Tensor]  # X_l W_l where the anchor is scaled, else Z_l itself
    returned: list[Tensor]  # D_{l+1} W_{l+1}^T
    norm: Norm | None
    prediction: Tensor
    slope: Tensor  # dloss/dprediction

    def surprise(self, rule: LinearRule) -> Tensor:
        if rule.loss == "squared":
            return 0.5 * (self.slope * self.slope).sum(-1)
        return (self.prediction * self.slope).sum(-1)


def _end(
    net: MLP, rule: LinearRule, k: Tensor, v: Tensor, output: Tensor
) -> tuple[Norm | None, Tensor, Tensor]:
    """From Z_L to the prediction and the loss's slope there."""
    norm = normalise(output) if net.norm else None
    answer = norm.value if norm else output
    prediction = answer + k if net.residual else answer
    return norm, prediction, (prediction - v if rule.loss == "squared" else -v)


def exact(net: MLP, rule: LinearRule) -> bool:
    """Whether each token of a chunk has its own anchor. A net not linear in its weights uses chunks of one for it."""
    return rule.anchor == "token" and net.linear


def record(net: MLP, rule: LinearRule, anchor: Anchor, k: Tensor, v: Tensor) -> Record:
    """What the anchor weights make of a chunk's keys ``[m c e]`` and values."""
    if exact(net, rule):
        return _record_exact(net, rule, anchor, k, v)
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
    norm, prediction, slope = _end(net, rule, k, v, outputs[-1])
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
        return _record_exact_backward(net, rule, anchor, rec, g, g_surprise)
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
    g_k, g_v, g_last = _end_backward(net, rule, rec, g.errors[last], g_surprise)
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


def _end_backward(
    net: MLP, rule: LinearRule, rec: Record, g_error: Tensor, g_surprise: Tensor
) -> tuple[Tensor | None, Tensor, Tensor]:
    """From D_L and the surprise back to (k's residual part, v, Z_L)."""
    g_slope = rec.norm.pull(g_error) if rec.norm else g_error
    weight = g_surprise.unsqueeze(-1)
    if rule.loss == "squared":
        g_prediction = torch.addcmul(g_slope, rec.slope, weight)
        g_v = -g_prediction
    else:
        g_prediction = rec.slope * weight
        g_v = -torch.addcmul(g_slope, rec.prediction, weight)
    g_output = (
        rec.norm.backward(g_prediction, rec.slope, rec.errors[-1], g_error) if rec.norm else g_prediction
    )
    return (g_prediction if net.residual else None), g_v, g_output


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


def _record_exact(net: MLP, rule: LinearRule, anchor: Anchor, k: Tensor, v: Tensor) -> Record:
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
    _, prediction, slope = _end(net, rule, k, v, output)
    return Record([x], [error], [output], [], [], [], None, prediction, slope)


def _record_exact_backward(
    net: MLP, rule: LinearRule, anchor: Anchor, rec: Record, g: Grads, g_surprise: Tensor
) -> tuple[Tensor, Tensor]:
    """Of the dot loss; for the squared one see `prepare_backward`."""
    x, error, g_x = rec.inputs[0], rec.errors[0], g.inputs[0]
    mix, own = earlier(anchor.co)
    g_k, g_v, g_output = _end_backward(net, rule, rec, g.errors[0], g_surprise)
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
    J - known (`_record_exact`), and the state at a chunk's end is F J - K^T D.
    """

    x: Tensor  # keys, with ones
    mix: Tensor  # P and (a, r) one token earlier
    own: Tensor
    solver: Tensor  # T
    U: Tensor
    known: Tensor  # becomes the errors D as the chunks are walked
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
    _, prediction, slope = _end(net, rule, k, v, reading.outputs[0])
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


class Reading(NamedTuple):
    """The queries' way through the memory, kept for backward."""

    answers: Tensor
    inputs: list[Tensor]  # A_l
    spreads: list[Tensor]  # (a A_l | r A_l)
    scores: list[Tensor]  # A_l X_l^T
    outputs: list[Tensor]  # Y_l
    norm: Norm | None


def read(net: MLP, anchor: Anchor, inputs: list[Tensor], errors: list[Tensor], q: Tensor) -> Reading:
    """The answers to queries ``[m c' e]``, the chunk's last c' tokens, each at its own token's weights."""
    mix, own = _last(anchor.co, q.shape[1])
    outputs: list[Tensor] = []
    queries, spreads, scores = [], [], []
    x = q
    for layer, state in enumerate(anchor.state):
        if layer:
            x = activate(net, outputs[-1])
        queries.append(with_ones(net, x))
        spreads.append(spread(queries[-1], own))
        scores.append(torch.bmm(queries[-1], inputs[layer].mT))
        y = torch.bmm(spreads[-1], rows(state))
        outputs.append(y.baddbmm_(scores[-1] * mix, errors[layer], alpha=-1))
    norm = normalise(outputs[-1]) if net.norm else None
    answer = norm.value if norm else outputs[-1]
    return Reading(answer + q if net.residual else answer, queries, spreads, scores, outputs, norm)


def _last(co: Coefficients, count: int) -> tuple[Tensor, Tensor]:
    first = co.mix.shape[1] - count
    return co.mix[:, first:], co.own[:, first:]


def read_backward(
    net: MLP,
    anchor: Anchor,
    inputs: list[Tensor],
    errors: list[Tensor],
    reading: Reading,
    g_answers: Tensor,
    g_co: Coefficients,
) -> tuple[Tensor, Grads]:
    """The queries' gradient, and those of everything they met; the coefficients' are added in place."""
    mix, own = _last(anchor.co, g_answers.shape[1])
    g_mix, g_own = _last(g_co, g_answers.shape[1])
    g_inputs, g_errors, g_state = [], [], []
    g_y = reading.norm.pull(g_answers) if reading.norm else g_answers
    for layer in range(len(anchor.state) - 1, -1, -1):
        a, scores, state = reading.inputs[layer], reading.scores[layer], anchor.state[layer]
        g_blend = torch.bmm(g_y, errors[layer].mT).neg_()
        g_mix.addcmul_(g_blend, scores)
        g_scores = g_blend.mul_(mix)
        g_errors.append(torch.bmm((scores * mix).neg_().mT, g_y))
        g_inputs.append(torch.bmm(g_scores.mT, a))
        g_state.append(torch.bmm(reading.spreads[layer].mT, g_y).view_as(state))
        g_a = torch.bmm(g_scores, inputs[layer])
        spread_backward(torch.bmm(g_y, rows(state).mT), a, own, g_a, g_own)
        g_a = without_ones(net, g_a)
        g_y = pull(net, g_a, reading.outputs[layer - 1]) if layer else g_a
    return (g_y + g_answers if net.residual else g_y), Grads(
        g_inputs[::-1], g_errors[::-1], g_state[::-1], g_co
    )
