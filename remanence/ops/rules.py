"""How a memory changes. Knows no net.

A `Rule` is any object with ``update``; a user's own takes the generic path (reference.py, generic.py). The rules that
are linear in the gradients, `LinearRule`, also have a closed form over a chunk, whose coefficients are computed here.
With gamma = 1 - alpha, and products over (j, t]:  Gamma[t, j] = prod gamma,  E[t, j] = prod eta  for t >= j, else 0:

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


def squared(prediction: Tensor, value: Tensor) -> Tensor:
    """Half the squared distance (eq. 12; its factor 2 lives in the step size, as in the paper's appendix C)."""
    return 0.5 * (prediction - value).square().sum(-1)


def dot(prediction: Tensor, value: Tensor) -> Tensor:
    """Minus the inner product: its gradient ignores what is already stored, which makes linear attention."""
    return -(prediction * value).sum(-1)


LOSSES: dict[str, Loss] = {"squared": squared, "dot": dot}


class ConstructorSignature:
    """The signature of a rule's ``__init__``, which `Rule.__new__` would hide from `help`."""

    def __get__(self, rule: Rule | None, kind: type[Rule]) -> inspect.Signature:
        signature = inspect.signature((LinearRule if kind is Rule else kind).__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


class Rule:
    """How gradients change a memory: subclass it, write `update`, and add an instance to `RULES`.

    ``class Mine(Rule)`` with `update`, and `init_state` if the rule has a state beside the weights, is all that the
    operator, the layer, streaming, decoding and memory files need. `update` is written for one head and one document;
    torch.func maps it over heads and rows, so it must not change its arguments or branch on their values.

    ``Rule(momentum=False, ...)`` makes a `LinearRule`.

    Attributes:
        momentum, forget: whether the rule takes a momentum gate and a forget gate beside the step size.
        granularity: "token": `update` is called for every token, with the gradient of that token's loss. "chunk": it is
            called once for a chunk, with the gradient of the chunk's losses, weighted by their step sizes and summed.
        anchor: where the gradient is taken: at the weights of the chunk's start, or, with granularity "token", at each
            token's own.
        read: the weights that a token's query is answered from: "token", those after the update with all tokens of the
            chunk up to this one; or "chunk", those of the chunk's start.
        loss: ``"squared"``, ``"dot"``, or any function (prediction, value) -> loss that torch.func can differentiate.
    """

    momentum: bool = False
    forget: bool = False
    granularity: Literal["token", "chunk"] = "token"
    anchor: Literal["chunk", "token"] = "chunk"
    read: Literal["token", "chunk"] = "token"
    loss: str | Loss = "squared"

    def __new__(cls, *args: Any, **fields: Any) -> Rule:
        return super().__new__(LinearRule if cls is Rule else cls)

    __signature__ = ConstructorSignature()

    def update(self, state: RuleState, gradients: Weights, gates: Gates) -> RuleState:
        """The state after an update.

        Args:
            state: the head's weights and buffers before it: with granularity "chunk", at the chunk's start.
            gradients: one for each of the weights, in their shapes.
            gates: the logarithms of the token's gates, numbers; or, with granularity "chunk", of the gates of the
                chunk's tokens, ``[c]`` each. With ``read="token"`` these are the tokens so far.
        """
        raise NotImplementedError(f"{type(self).__name__}: expected a method update(state, gradients, gates)")

    def init_state(self, weights: Weights) -> Weights:
        """The buffers of one head at a document's start, floating-point tensors of any shapes; none by default."""
        return ()

    def gradient_at(self, weights: Weights, gates: Gates) -> Weights:
        """The weights at which a token's gradient is taken, from those of the anchor; for granularity "token"."""
        return weights

    @property
    def loss_function(self) -> Loss:
        return LOSSES[self.loss] if isinstance(self.loss, str) else self.loss


@dataclass(frozen=True, kw_only=True)
class LinearRule(Rule):
    """The rules whose updates are linear in the gradients (equations 13 and 14): Titans, TTT, DeltaNet and others.

    momentum, forget
        Whether past surprise is carried (eta) and whether the memory decays (alpha).
    decay_first
        Take the gradient at the weights already decayed by the token's own gate, as Gated DeltaNet does.
    anchor
        Where the gradient is taken: at the weights of the chunk's start (eq. 16), or at each token's own (eq. 14 to the
        letter). ``"token"`` runs in parallel for a memory that is linear in its weights; others use ``chunk=1`` for it.
    loss
        ``"squared"``, ``"dot"``, or any function (prediction, value) -> loss that torch.func can differentiate.
    """

    momentum: bool = True
    forget: bool = True
    decay_first: bool = False
    anchor: Literal["chunk", "token"] = "chunk"
    loss: str | Loss = "squared"

    def __post_init__(self) -> None:
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


_CLOSED = ("update", "init_state", "gradient_at", "loss_function", "granularity", "read")


def is_linear(rule: object) -> TypeGuard[LinearRule]:
    """Whether a rule is a `LinearRule` as written here, for the closed forms and kernels; not a subclass that changes
    how it computes.
    """
    kind = type(rule)
    return kind is LinearRule or (
        isinstance(rule, LinearRule)
        and all(getattr(kind, name) is getattr(LinearRule, name) for name in _CLOSED)
    )


def stored(rule: Rule, weights: Sequence[Tensor], buffers: Sequence[Tensor]) -> tuple[Weights, Weights]:
    """A memory's weights and buffers ``[r h ...]`` as a state's `layers` and `buffers`: the closed forms have each
    weight and its momentum in one tensor.
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
    "linear_attention": LinearRule(momentum=False, forget=False, loss="dot"),
}


class Coefficients(NamedTuple):
    """One chunk's part of the closed form, or many chunks' (leading axes).

    The state is J = (M, S), p = 2, or just M, p = 1, for a rule without momentum.

    mix ``[c c]``: P. own ``[c p]``: a, r: how much of J each token's own weights still hold. fold ``[p p]`` and
    fold_mix ``[c p]``: what turns J and the tokens' gradients into the chunk's end state; they leave it alone where the
    chunk is not complete. scale ``[c]``: shrinks the anchor per token, for decay_first.
    """

    mix: Tensor
    own: Tensor
    fold: Tensor
    fold_mix: Tensor
    scale: Tensor | None


class _Decay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log_gate: Tensor) -> Tensor:
        products = _products(log_gate)
        ctx.save_for_backward(products)
        return products.mT

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return decay_backward(ctx.saved_tensors[0].mT, grad)


def _products(log_gate: Tensor) -> Tensor:
    """``[... j t]``: the product of gates over (j, t]."""
    c = log_gate.shape[-1]
    later = torch.ones(c, c, dtype=log_gate.dtype, device=log_gate.device).triu(1)  # [j t], 1 where t > j
    return torch.addcmul(1.0 - later, log_gate.exp().unsqueeze(-2), later).cumprod(-1).triu_()


def decay_backward(decayed: Tensor, grad: Tensor) -> Tensor:
    """The log gates' gradient ``[... c]``, from what `decay` made of them and its gradient ``[... c c]``.

    A product over (j, t] changes with the log of its gate m by itself: no quotient, so nothing to lose at a gate of 0.
    """
    c = decayed.shape[-1]
    until = torch.ones(c, c, dtype=decayed.dtype, device=decayed.device).tril()
    return ((grad * decayed).mT @ until).triu_(1).sum(-2)


def decay(log_gate: Tensor) -> Tensor:
    """``[... c]`` logs to ``[... c c]``: the product of gates over (j, t] for t >= j, 0 above the diagonal. Exact at
    -inf.

    Products of the gates themselves, never quotients of two products; the derivative is taken with respect to the logs.
    """
    return _Decay.apply(log_gate)


def coefficients(rule: LinearRule, gates: Gates, complete: Tensor) -> Coefficients:
    """The closed form's coefficients for gates ``[... c]`` of chunks that are complete where told ``[...]``."""
    step = gates.log_step.exp()
    kept = decay(gates.log_keep if gates.log_keep is not None else torch.zeros_like(step))
    keep = gates.log_keep.cumsum(-1).exp() if gates.log_keep is not None else torch.ones_like(step)
    scale = gates.log_keep.exp() if rule.decay_first and gates.log_keep is not None else None
    if gates.log_momentum is None:
        mix = kept * step.unsqueeze(-2)
        own = keep.unsqueeze(-1)
        fold_mix = mix[..., -1, :].unsqueeze(-1)
        fold = keep[..., -1, None, None]
    else:
        moved = decay(gates.log_momentum)
        past = gates.log_momentum.cumsum(-1).exp()
        carry = (kept @ past.unsqueeze(-1)).squeeze(-1)
        mix = (kept @ moved) * step.unsqueeze(-2)
        own = torch.stack([keep, carry], -1)
        fold_mix = torch.stack([mix[..., -1, :], moved[..., -1, :] * step], -1)
        last = past[..., -1]
        fold = torch.stack([keep[..., -1], carry[..., -1], torch.zeros_like(last), last], -1).unflatten(
            -1, (2, 2)
        )
    same = torch.eye(fold.shape[-1], dtype=fold.dtype, device=fold.device)
    fold = torch.where(complete[..., None, None], fold, same)
    fold_mix = torch.where(complete[..., None, None], fold_mix, 0.0)
    return Coefficients(mix, own, fold, fold_mix, scale)


def coefficients_backward(gates: Gates, complete: Tensor, grad: Coefficients) -> Gates:
    """The gates' gradients from those of their coefficients, written out: inside a torch operator nothing is taped."""
    step = gates.log_step.exp()
    g_fold, g_fold_mix = (torch.where(complete[..., None, None], x, 0.0) for x in (grad.fold, grad.fold_mix))
    kept = decay(gates.log_keep if gates.log_keep is not None else torch.zeros_like(step))
    keep = gates.log_keep.cumsum(-1).exp() if gates.log_keep is not None else torch.ones_like(step)
    g_mix, g_keep = grad.mix.clone(), grad.own[..., 0].clone()
    g_mix[..., -1, :] += g_fold_mix[..., 0]
    g_keep[..., -1] += g_fold[..., 0, 0]
    g_momentum = None
    if gates.log_momentum is None:
        g_step = (g_mix * kept).sum(-2)
        g_kept = g_mix.mul_(step.unsqueeze(-2))
    else:
        moved, past = decay(gates.log_momentum), gates.log_momentum.cumsum(-1).exp()
        g_carry, g_past = grad.own[..., 1].clone(), torch.zeros_like(past)
        g_carry[..., -1] += g_fold[..., 0, 1]
        g_past[..., -1] += g_fold[..., 1, 1]
        g_step = (g_mix * (kept @ moved)).sum(-2).addcmul_(g_fold_mix[..., 1], moved[..., -1, :])
        g_product = g_mix.mul_(step.unsqueeze(-2))
        g_kept = (g_product @ moved.mT).add_(g_carry.unsqueeze(-1) * past.unsqueeze(-2))
        g_moved = kept.mT @ g_product
        g_moved[..., -1, :] += g_fold_mix[..., 1] * step
        g_past += (kept.mT @ g_carry.unsqueeze(-1)).squeeze(-1)
        g_momentum = decay_backward(moved, g_moved).add_(_suffix(g_past * past))
    g_forget = None
    if gates.log_keep is not None:
        g_forget = decay_backward(kept, g_kept).add_(_suffix(g_keep * keep))
        if grad.scale is not None:
            g_forget.addcmul_(grad.scale, gates.log_keep.exp())
    return Gates(g_step.mul_(step), g_momentum, g_forget)


def _suffix(x: Tensor) -> Tensor:
    """Sums from each place to the end: backward of cumsum."""
    return x.flip(-1).cumsum(-1).flip(-1)
