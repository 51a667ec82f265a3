"""Update rules: how gradients change the weights of a memory. They work with any net.

A `Rule` has a method ``update``; custom rules run on the generic path (reference.py, generic.py). Rules that are linear
in the gradients, `LinearRule`, also have a closed form over a chunk, whose coefficients are computed here. With gamma
= 1 - alpha, and products over (j, t]:  Gamma[t, j] = prod gamma,  E[t, j] = prod eta  for t >= j, else 0:

    S_t = m_t S_0 - sum_i E[t, i] theta_i u_i                                  past surprise, eq. 14
    M_t = a_t M_0 + r_t S_0 - sum_i P[t, i] u_i                                write, eq. 13

where a = Gamma[:, 0], m = E[:, 0] (the products over (0, t]), r = Gamma m, P = (Gamma E) diag(theta).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeGuard

import torch
from torch import Tensor

from remanence.ops.state import Gates, RuleState, Weights

Loss = Callable[[Tensor, Tensor], Tensor]
"""An inner loss: a function of predictions and values ``[... e]`` that returns losses ``[...]``."""


def squared_loss(prediction: Tensor, value: Tensor) -> Tensor:
    """Return half the squared distance (eq. 12; the gradient's factor of 2 is absorbed by the step size, as
    in the paper's appendix C).
    """
    return 0.5 * (prediction - value).square().sum(-1)


def dot_product_loss(prediction: Tensor, value: Tensor) -> Tensor:
    """Return minus the inner product. Its gradient does not depend on the prediction, which gives linear
    attention.
    """
    return -(prediction * value).sum(-1)


LOSSES: dict[str, Loss] = {"squared": squared_loss, "dot": dot_product_loss}
"""The inner losses that a rule can name."""


class ConstructorSignature:
    """A descriptor that shows the signature of a rule's ``__init__`` in `help`, which `Rule.__new__` would
    hide.
    """

    def __get__(self, rule: Rule | None, kind: type[Rule]) -> inspect.Signature:
        signature = inspect.signature((LinearRule if kind is Rule else kind).__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


class Rule:
    """Base class of update rules: subclass it, define `update`, and add an instance to `RULES`.

    The operator, the layer, streaming, decoding and memory files need no more than `update`, and `init_state` if the
    rule keeps buffers beside the weights; `observe` and `objective` are for losses of several tokens. `update` is
    written for one head and one document; torch.func.vmap maps it over heads and rows, so it must not modify its
    arguments or branch on their values.

    ``Rule(momentum=False, ...)`` makes a `LinearRule`.

    Attributes:
        momentum, forget: whether the rule takes a momentum gate and a forget gate beside the step size.
        max_step: the largest step size that a layer's gate gives. The operator takes any step size.
        forget_channels: whether the forget gate has a value for each channel of the keys. The memory must then be a
            matrix.
        granularity: "token": `update` is called for every token, with the gradient of that token's loss. "chunk": it is
            called once for a chunk, with the gradient of the chunk's losses, weighted by their step sizes and summed.
        anchor: the weights at which the gradient is taken: "chunk", those at the start of the chunk; "token" (only with
            granularity "token"), those before the token's own update.
        read: the weights that answer a token's query: "token", those after the update with all tokens of the chunk up
            to this one; "chunk", those at the start of the chunk.
        loss: ``"squared"``, ``"dot"``, or any function (prediction, value) -> loss that torch.func can differentiate.
    """

    momentum: bool = False
    forget: bool = False
    forget_channels: bool = False
    max_step: float = 1.0
    granularity: Literal["token", "chunk"] = "token"
    anchor: Literal["chunk", "token"] = "chunk"
    read: Literal["token", "chunk"] = "token"
    loss: str | Loss = "squared"

    def __new__(cls, *args: Any, **fields: Any) -> Rule:
        return super().__new__(LinearRule if cls is Rule else cls)

    __signature__ = ConstructorSignature()

    def update(self, state: RuleState, gradients: Weights, gates: Gates) -> RuleState:
        """Return the weights and buffers after an update.

        Args:
            state: the head's weights and buffers before the update; with granularity "chunk", at the chunk's start.
            gradients: one gradient for each weight, in the weight's shape.
            gates: logarithms of the token's gates, scalars (``[f]`` with `forget_channels`); with granularity "chunk",
                of the gates of all tokens of the chunk, ``[c]`` each (with ``read="token"``, of the tokens so far).
        """
        raise NotImplementedError(f"{type(self).__name__}: expected a method update(state, gradients, gates)")

    def init_state(self, weights: Weights) -> Weights:
        """Return the buffers of one head at the start of a document: a tuple of floating-point tensors of any
        shape, empty by default.
        """
        return ()

    def gradient_at(self, weights: Weights, gates: Gates) -> Weights:
        """Return the weights at which a token's gradient is taken, given the weights of the anchor. Used with
        granularity "token" only.
        """
        return weights

    def observe(self, buffers: Weights, k: Tensor, v: Tensor) -> Weights:
        """Return the buffers with a token's key and value, before its gradient is taken. Used with granularity
        "token" only.
        """
        return buffers

    def objective(self, loss: Tensor, predict: Callable[[Tensor], Tensor], buffers: Weights) -> Tensor:
        """Return what a token's gradient is taken of: by default `loss`, that of the token itself. `predict` are the
        answers to any keys ``[... f]``. Used with granularity "token" only.
        """
        return loss

    def parallel_chunk(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Gates, state: RuleState
    ) -> tuple[Tensor, Tensor, RuleState]:
        """Compute a chunk of a matrix memory at once, in PyTorch operations that autograd can differentiate. Return the
        answers ``[m c' e]``, the surprise ``[m c]`` and the end state.

        A rule without it is computed token by token. k and v are ``[m c ...]``, q ``[m c' f]`` has the last c' tokens,
        and m is rows times heads. It is not used by subclasses, which may have another `update`.
        """
        raise NotImplementedError

    @property
    def loss_function(self) -> Loss:
        """The inner loss as a function (prediction, value) -> loss."""
        return LOSSES[self.loss] if isinstance(self.loss, str) else self.loss


def descend(weights: Weights, gradients: Weights, gates: Gates) -> Weights:
    """Return ``(1 - alpha) W - theta u`` for each weight: a step of gradient descent, with forgetting."""
    gamma = 1.0 if gates.log_keep is None else gates.log_keep.exp()
    theta = gates.log_step.exp()
    return tuple(gamma * weight - theta * u for weight, u in zip(weights, gradients, strict=True))


@dataclass(frozen=True, kw_only=True)
class LinearRule(Rule):
    """A rule whose updates are linear in the gradients (equations 13 and 14): Titans, TTT, DeltaNet and others.

    momentum, forget
        Whether past surprise is carried on as momentum (eta), and whether the memory decays (alpha).
    decay_first
        Whether the gradient is taken at weights that are already decayed by the token's own gate, as in Gated DeltaNet.
    anchor
        Where the gradient is taken: ``"chunk"``, at the weights at the start of the chunk (eq. 16); ``"token"``, at the
        weights before each token (eq. 14 as printed). ``"token"`` is computed in parallel for a memory that is linear
        in its weights; other nets need ``chunk=1`` for it.
    loss
        ``"squared"``, ``"dot"``, or any function (prediction, value) -> loss that torch.func can differentiate.
    max_step
        The largest step size that a layer's gate gives. With 2, a token-exact write of the squared loss can reflect
        what is stored at a key, ``I - 2 k k'``, instead of only replacing it.
    """

    momentum: bool = True
    forget: bool = True
    decay_first: bool = False
    anchor: Literal["chunk", "token"] = "chunk"
    loss: str | Loss = "squared"
    max_step: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.max_step <= 2:
            raise ValueError(f"max_step: expected a number above 0 and at most 2, got {self.max_step!r}")
        if self.anchor not in ("chunk", "token"):
            raise ValueError(f"anchor: expected 'chunk' or 'token', got {self.anchor!r}")
        if not callable(self.loss) and self.loss not in LOSSES:
            raise ValueError(f"loss: expected a function or one of {', '.join(LOSSES)}, got {self.loss!r}")
        if self.decay_first and not self.forget:
            raise ValueError(
                "decay_first: expected False for a rule that does not forget, got True (set forget=True)"
            )

    def update(self, state: RuleState, gradients: Weights, gates: Gates) -> RuleState:
        theta = gates.log_step.exp()
        S = tuple(-theta * now for now in gradients)
        if gates.log_momentum is not None:
            eta = gates.log_momentum.exp()
            S = tuple(
                eta * past - theta * now for past, now in zip(state.buffers, gradients, strict=True)
            )  # eq. 14
        gamma = torch.ones_like(theta) if gates.log_keep is None else gates.log_keep.exp()
        M = tuple(gamma * W + change for W, change in zip(state.weights, S, strict=True))  # eq. 13
        return RuleState(M, S if self.momentum else ())

    def init_state(self, weights: Weights) -> Weights:
        return tuple(torch.zeros_like(weight) for weight in weights) if self.momentum else ()

    def gradient_at(self, weights: Weights, gates: Gates) -> Weights:
        if not self.decay_first or gates.log_keep is None:
            return weights
        return tuple(gates.log_keep.exp() * weight for weight in weights)


_CLOSED_FORM_METHODS = (
    *("update", "init_state", "gradient_at", "observe", "objective", "loss_function", "granularity", "read"),
)
"""The attributes of `LinearRule` that a subclass must not override if the closed form is to apply."""


def is_parallel(rule: Rule) -> bool:
    """Whether the class of a rule itself, not a parent, defines `Rule.parallel_chunk`."""
    return "parallel_chunk" in vars(type(rule)) and type(rule) is not Rule


def is_linear(rule: object) -> TypeGuard[LinearRule]:
    """Whether the closed forms and kernels apply to a rule: it must be a `LinearRule`, or an instance of a
    subclass that does not override how updates are computed.
    """
    kind = type(rule)
    return kind is LinearRule or (
        isinstance(rule, LinearRule)
        and all(getattr(kind, name) is getattr(LinearRule, name) for name in _CLOSED_FORM_METHODS)
    )


def pack_state(rule: Rule, weights: Sequence[Tensor], buffers: Sequence[Tensor]) -> tuple[Weights, Weights]:
    """Return the `layers` and `buffers` of a `MemoryState`, from the weights and buffers ``[r h ...]`` of a
    memory. For a `LinearRule` with momentum, each weight and its momentum are stacked in one tensor of
    `layers`.
    """
    if is_linear(rule) and buffers:
        pairs = zip(weights, buffers, strict=True)
        return tuple(torch.stack(pair, 2) for pair in pairs), ()
    return tuple(torch.stack([weight], 2) for weight in weights), tuple(buffers)


RULES: dict[str, Rule] = {
    "titans": LinearRule(),
    "no_momentum": LinearRule(momentum=False),
    "no_forget": LinearRule(forget=False),
    "ttt": LinearRule(momentum=False, forget=False),
    "delta": LinearRule(momentum=False, forget=False, anchor="token"),
    "gated_delta": LinearRule(momentum=False, decay_first=True, anchor="token"),
    "wide_delta": LinearRule(momentum=False, decay_first=True, anchor="token", max_step=2.0),
    "linear_attention": LinearRule(momentum=False, forget=False, loss="dot"),
}
"""The update rules that a configuration can name."""


class Coefficients(NamedTuple):
    """The coefficients of the closed form for one chunk, or for many chunks (leading axes).

    The state J is (M, S), p = 2, or M alone, p = 1, for a rule without momentum.

    gradient_factors
        P ``[c c]``: the factor of each gradient in the weights of each token.
    state_factors
        (a, r) ``[c p]``: the factors of J in the weights of each token.
    end_state_factors, end_gradient_factors
        ``[p p]`` and ``[c p]``: the factors of J and of the gradients in the state at the end of the chunk. If the
        chunk is not complete, they are the identity and zero.
    anchor_scale
        ``[c]``: each token's factor on the anchor weights, for decay_first; otherwise None.
    """

    gradient_factors: Tensor
    state_factors: Tensor
    end_state_factors: Tensor
    end_gradient_factors: Tensor
    anchor_scale: Tensor | None


class _DecayMatrix(torch.autograd.Function):
    """`decay_matrix`, with its gradient."""

    @staticmethod
    def forward(ctx: Any, log_gate: Tensor) -> Tensor:
        products = _gate_products(log_gate)
        ctx.save_for_backward(products)
        return products.mT

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return decay_matrix_backward(ctx.saved_tensors[0].mT, grad)


def _gate_products(log_gate: Tensor) -> Tensor:
    """Return a matrix ``[... j t]`` with the product of the gates over (j, t]."""
    c = log_gate.shape[-1]
    later = torch.ones(c, c, dtype=log_gate.dtype, device=log_gate.device).triu(1)  # [j t], 1 where t > j
    return torch.addcmul(1.0 - later, log_gate.exp().unsqueeze(-2), later).cumprod(-1).triu_()


def decay_matrix_backward(decayed: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient ``[... c]`` of the log gates, from the output of `decay_matrix` and its gradient
    ``[... c c]``.

    The derivative of a product of gates with respect to the log of one of them is the product itself. No
    division is needed, so the result is exact even for a gate of 0.
    """
    c = decayed.shape[-1]
    until = torch.ones(c, c, dtype=decayed.dtype, device=decayed.device).tril()
    return ((grad * decayed).mT @ until).triu_(1).sum(-2)


def decay_matrix(log_gate: Tensor) -> Tensor:
    """Return the matrix ``[... c c]`` of gate products over (j, t] for t >= j, and 0 elsewhere, from log
    gates ``[... c]``.

    The result is exact for a log gate of -inf, because the gates themselves are multiplied and no product is
    divided by another.
    """
    return _DecayMatrix.apply(log_gate)


def coefficients(rule: LinearRule, gates: Gates, complete: Tensor) -> Coefficients:
    """Return the coefficients of the closed form for chunks with log gates ``[... c]``. The mask `complete`
    ``[...]`` tells which chunks are complete.
    """
    step = gates.log_step.exp()
    kept = decay_matrix(gates.log_keep if gates.log_keep is not None else torch.zeros_like(step))
    keep = gates.log_keep.cumsum(-1).exp() if gates.log_keep is not None else torch.ones_like(step)
    scale = gates.log_keep.exp() if rule.decay_first and gates.log_keep is not None else None
    if gates.log_momentum is None:
        gradient_factors = kept * step.unsqueeze(-2)
        state_factors = keep.unsqueeze(-1)
        end_gradient_factors = gradient_factors[..., -1, :].unsqueeze(-1)
        end_state_factors = keep[..., -1, None, None]
    else:
        moved = decay_matrix(gates.log_momentum)
        past = gates.log_momentum.cumsum(-1).exp()
        carry = (kept @ past.unsqueeze(-1)).squeeze(-1)
        gradient_factors = (kept @ moved) * step.unsqueeze(-2)
        state_factors = torch.stack([keep, carry], -1)
        end_gradient_factors = torch.stack([gradient_factors[..., -1, :], moved[..., -1, :] * step], -1)
        last = past[..., -1]
        end_state_factors = torch.stack(
            [keep[..., -1], carry[..., -1], torch.zeros_like(last), last], -1
        ).unflatten(-1, (2, 2))
    same = torch.eye(
        end_state_factors.shape[-1], dtype=end_state_factors.dtype, device=end_state_factors.device
    )
    end_state_factors = torch.where(complete[..., None, None], end_state_factors, same)
    end_gradient_factors = torch.where(complete[..., None, None], end_gradient_factors, 0.0)
    return Coefficients(gradient_factors, state_factors, end_state_factors, end_gradient_factors, scale)


def coefficients_backward(gates: Gates, complete: Tensor, grad: Coefficients) -> Gates:
    """Return the gradients of the log gates from the gradients of the coefficients. They are computed by
    hand, because autograd records nothing inside a torch operator.
    """
    step = gates.log_step.exp()
    g_end_state_factors, g_end_gradient_factors = (
        torch.where(complete[..., None, None], x, 0.0)
        for x in (grad.end_state_factors, grad.end_gradient_factors)
    )
    kept = decay_matrix(gates.log_keep if gates.log_keep is not None else torch.zeros_like(step))
    keep = gates.log_keep.cumsum(-1).exp() if gates.log_keep is not None else torch.ones_like(step)
    g_gradient_factors, g_keep = grad.gradient_factors.clone(), grad.state_factors[..., 0].clone()
    g_gradient_factors[..., -1, :] += g_end_gradient_factors[..., 0]
    g_keep[..., -1] += g_end_state_factors[..., 0, 0]
    g_momentum = None
    if gates.log_momentum is None:
        g_step = (g_gradient_factors * kept).sum(-2)
        g_kept = g_gradient_factors.mul_(step.unsqueeze(-2))
    else:
        moved, past = decay_matrix(gates.log_momentum), gates.log_momentum.cumsum(-1).exp()
        g_carry, g_past = grad.state_factors[..., 1].clone(), torch.zeros_like(past)
        g_carry[..., -1] += g_end_state_factors[..., 0, 1]
        g_past[..., -1] += g_end_state_factors[..., 1, 1]
        g_step = (
            (g_gradient_factors * (kept @ moved))
            .sum(-2)
            .addcmul_(g_end_gradient_factors[..., 1], moved[..., -1, :])
        )
        g_product = g_gradient_factors.mul_(step.unsqueeze(-2))
        g_kept = (g_product @ moved.mT).add_(g_carry.unsqueeze(-1) * past.unsqueeze(-2))
        g_moved = kept.mT @ g_product
        g_moved[..., -1, :] += g_end_gradient_factors[..., 1] * step
        g_past += (kept.mT @ g_carry.unsqueeze(-1)).squeeze(-1)
        g_momentum = decay_matrix_backward(moved, g_moved).add_(_suffix_sum(g_past * past))
    g_forget = None
    if gates.log_keep is not None:
        g_forget = decay_matrix_backward(kept, g_kept).add_(_suffix_sum(g_keep * keep))
        if grad.anchor_scale is not None:
            g_forget.addcmul_(grad.anchor_scale, gates.log_keep.exp())
    return Gates(g_step.mul_(step), g_momentum, g_forget)


def _suffix_sum(x: Tensor) -> Tensor:
    """Return the sums from each index to the end of the last axis: the backward of cumsum."""
    return x.flip(-1).cumsum(-1).flip(-1)
