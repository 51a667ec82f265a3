"""Checks of the properties that a streaming memory must have, as functions that accept any module.

A `step` is a callable ``y, state = step(x, state)`` with x of shape ``[b t ...]`` and None as the first state; a module
can be used as one. Each function raises an AssertionError that names the first violation.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

Step = Callable[[Tensor, Any], tuple[Tensor, Any]]
"""A function ``y, state = step(x, state)``."""


def distance(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference, divided by the larger of 1 and the largest finite absolute value of a.

    Equal infinities count as equal (a log gate of -inf is a gate of 0). The distance is infinite if infinities differ
    or either side has a NaN.
    """
    if a.shape != b.shape:
        raise AssertionError(f"shapes differ: {list(a.shape)} and {list(b.shape)}")
    if a.numel() == 0:
        return 0.0
    a, b = a.detach(), b.detach()
    differ = a != b
    if not bool(differ.any()):
        return 0.0
    difference = (a - b)[differ].abs().max()
    size = a[a.isfinite()].abs().max().clamp_min(1.0) if bool(a.isfinite().any()) else 1.0
    return float("inf") if not bool(difference.isfinite()) else float(difference / size)


def tensors(tree: Any) -> list[Tensor]:
    """Return all tensors in nested tuples, lists, dataclasses and mappings (or what has ``values()``), in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        tree = [getattr(tree, field.name) for field in dataclasses.fields(tree)]
    elif callable(getattr(tree, "values", None)):
        tree = list(tree.values())
    return [tensor for child in tree for tensor in tensors(child)] if isinstance(tree, (tuple, list)) else []


def assert_close(a: Any, b: Any, tolerance: float, what: str = "results") -> None:
    """Check that two trees of tensors agree: floating-point tensors within the tolerance of `distance`,
    others exactly. `what` is the name to show in error messages.
    """
    left, right = tensors(a), tensors(b)
    if len(left) != len(right):
        raise AssertionError(f"{what}: {len(left)} tensors on one side, {len(right)} on the other")
    for index, (x, y) in enumerate(zip(left, right, strict=True)):
        if not x.is_floating_point():
            if not torch.equal(x, y):
                raise AssertionError(f"{what}[{index}]: differ, {x.tolist()} and {y.tolist()}")
        elif (difference := distance(x, y)) > tolerance:
            raise AssertionError(f"{what}[{index}]: apart by {difference:.3g}, allowed {tolerance:.3g}")


def _different_content(x: Tensor) -> Tensor:
    """Return other content of the same kind as x: random numbers, or the token ids of x in random order."""
    if x.is_floating_point():
        return torch.randn_like(x)
    return x.flatten()[torch.randperm(x.numel(), device=x.device)].view_as(x)


def assert_causal(step: Step, x: Tensor, positions: Iterable[int] | None = None) -> None:
    """Check that changing token t leaves every output before t bit-identical, and changes some output from t
    on.
    """
    before, _ = step(x, None)
    for t in range(x.shape[1]) if positions is None else positions:
        changed = x.clone()
        # If x holds token ids, the token is replaced by another id that occurs in x.
        others = x.flatten()[x.flatten() != x[:, t].flatten()[0]]
        changed[:, t] = torch.randn_like(changed[:, t]) if x.is_floating_point() else others[0]
        after, _ = step(changed, None)
        differ = (
            (before[:, :t] != after[:, :t]).transpose(0, 1).reshape(t, -1) if t else before.new_zeros(0, 1)
        )
        moved = differ.any(-1).nonzero().flatten().tolist()
        if moved:
            raise AssertionError(f"not causal: changing token {t} moved the outputs at {moved[:8]}")
        if torch.equal(before[:, t:], after[:, t:]):
            raise AssertionError(f"changing token {t} changed no output at all: the law was not tested")


def assert_rows_isolated(step: Step, x: Tensor) -> None:
    """Check that changing one row of a batch leaves the outputs and states of all other rows bit-identical.
    In states, rows are the first axis.
    """
    if x.shape[0] < 2:
        raise ValueError("x: expected at least two rows to tell apart, got one")
    before, state = step(x, None)
    for row in range(x.shape[0]):
        changed = x.clone()
        changed[row] = _different_content(changed[row])
        after, other = step(changed, None)
        rest = [r for r in range(x.shape[0]) if r != row]
        for a, b in zip([before, *tensors(state)], [after, *tensors(other)], strict=True):
            if a.shape[:1] == x.shape[:1] and not torch.equal(a[rest], b[rest]):
                raise AssertionError(f"rows not isolated: changing row {row} moved another")


def assert_split(step: Step, x: Tensor, sizes: Sequence[int], tolerance: float = 1e-10) -> None:
    """Check that reading x in calls of the given sizes, with the state passed on, gives the same outputs and
    final state as one call.
    """
    if sum(sizes) != x.shape[1]:
        raise ValueError(f"sizes: expected to add up to the {x.shape[1]} tokens of x, got {list(sizes)}")
    whole, end = step(x, None)
    pieces, state = [], None
    for piece in x.split(list(sizes), 1):
        y, state = step(piece, state)
        pieces.append(y)
    assert_close(torch.cat(pieces, 1), whole, tolerance, f"outputs of calls {list(sizes)} against the whole")
    assert_close(state, end, tolerance, f"state after calls {list(sizes)} against the whole")


def assert_packed(
    module: Callable[..., tuple[Tensor, Any]], documents: Sequence[Tensor], tolerance: float = 1e-10
) -> None:
    """Check that documents ``[t ...]`` packed into one row with ``offsets=`` give the same results as each
    document read alone.
    """
    offsets = [0]
    for document in documents:
        offsets.append(offsets[-1] + document.shape[0])
    together, state = module(torch.cat(list(documents)).unsqueeze(0), None, offsets=offsets)
    for index, document in enumerate(documents):
        if document.shape[0] == 0:
            continue
        alone, end = module(document.unsqueeze(0), None)
        assert_close(
            together[:, offsets[index] : offsets[index + 1]], alone, tolerance, f"packed document {index}"
        )
        assert_close(
            [tensor[index : index + 1] for tensor in tensors(state)],
            end,
            tolerance,
            f"state of packed document {index}",
        )


def assert_padding_inert(
    module: Callable[..., tuple[Tensor, Any]], x: Tensor, mask: Tensor, tolerance: float = 1e-10
) -> None:
    """Check that, with ``mask=``, the content of the padding does not change any result bit, and that each
    row gives the same results as its tokens read alone.
    """
    first, state = module(x, None, mask=mask)
    noise = torch.where(mask.view(*mask.shape, *[1] * (x.dim() - 2)), x, _different_content(x))
    second, other = module(noise, None, mask=mask)
    for a, b in zip([first, *tensors(state)], [second, *tensors(other)], strict=True):
        if not torch.equal(a, b):
            raise AssertionError("padding is not inert: its content changed a result")
    for row in range(x.shape[0]):
        if not mask[row].any():
            continue
        alone, end = module(x[row][mask[row]].unsqueeze(0), None)
        assert_close(first[row][mask[row]], alone[0], tolerance, f"padded row {row} against its tokens alone")
        assert_close(
            [tensor[row : row + 1] for tensor in tensors(state)], end, tolerance, f"state of padded row {row}"
        )


def assert_deterministic(module: nn.Module, x: Tensor) -> None:
    """Check that two equal calls give bit-identical results, and that forward does not change any parameter,
    buffer, input or given state.
    """
    kept = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    original = x.clone()
    y, state = module(x, None)
    given = [tensor.clone() for tensor in tensors(state)]
    if given:
        module(x, state)
    z, end = module(x, None)
    for name, tensor in module.state_dict().items():
        if not torch.equal(tensor, kept[name]):
            raise AssertionError(f"forward changed {name}")
    if not torch.equal(x, original):
        raise AssertionError("forward changed its input")
    for a, b in zip(tensors(state), given, strict=True):
        if not torch.equal(a, b):
            raise AssertionError("forward changed the state it was given")
    for a, b in zip([y, *given], [z, *tensors(end)], strict=True):
        if not torch.equal(a, b):
            raise AssertionError("two equal calls gave different results")


def assert_pure(module: nn.Module, x: Tensor) -> None:
    """Check `assert_deterministic` in training mode, that evaluation mode gives the same bits, and that a
    carried state has an effect.
    """
    mode = module.training
    module.train()
    assert_deterministic(module, x)
    y, state = module(x, None)
    again, _ = module(x, state)
    module.eval()
    z, _ = module(x, None)
    module.train(mode)
    if not torch.equal(y, z):
        raise AssertionError("training and evaluation mode differ")
    if torch.equal(y, again):
        raise AssertionError("a carried state changed nothing: the law was not tested")


def assert_round_trip(step: Step, x: Tensor) -> None:
    """Check that a state saved with `torch.save` in the middle of x and loaded again gives the same bits for
    the rest of x.
    """
    first, rest = x.split([x.shape[1] // 2, x.shape[1] - x.shape[1] // 2], 1)
    _, state = step(first, None)
    if not tensors(state):
        raise AssertionError("the state holds no tensor: the law was not tested")
    file = io.BytesIO()
    try:
        torch.save(state, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
    except (TypeError, AttributeError, pickle.PicklingError, RuntimeError) as error:
        raise AssertionError(f"the state cannot be saved and loaded: {error}") from None
    for a, b in zip(tensors(step(rest, state)), tensors(step(rest, loaded)), strict=True):
        if not torch.equal(a, b):
            raise AssertionError("the loaded state gives other results than the saved one")


DERIVATIVE_STEPS = (1e-3, 1e-4, 1e-5, 1e-6)
"""Steps of the central differences of `assert_derivative`. The second is compared with the gradient."""


def assert_derivative(module: nn.Module, x: Tensor, tolerance: float = 1e-5) -> None:
    """Check that the gradients of parameters and x are the derivatives of the output: the slopes along a
    random direction, by central differences. Use it in float64.

    The gradient may differ as much as the slopes of steps of different sizes do among each other, so that a
    module of which a part computes in float32 is not blamed for its rounding.
    """
    places: list[Tensor] = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if x.is_floating_point():
        x = x.detach().clone().requires_grad_()
        places.append(x)
    if not places:
        raise AssertionError("neither a parameter nor x takes a gradient: the law was not tested")
    y, _ = module(x, None)
    weights = torch.randn_like(y) / y.numel() ** 0.5
    value = (y * weights).sum()
    if not value.requires_grad:
        raise AssertionError("no gradient: the output does not depend on x or the parameters for autograd")
    found = torch.autograd.grad(value, places, allow_unused=True)

    def value_at(place: Tensor, moved: Tensor) -> float:
        kept = place.detach().clone()
        with torch.no_grad():
            place.copy_(moved)
            result = float((module(x, None)[0] * weights).sum())
            place.copy_(kept)
        return result

    for place, grad in zip(places, found, strict=True):
        direction = torch.randn_like(place) / place.numel() ** 0.5
        own = 0.0 if grad is None else float((grad * direction).sum())
        slopes = [
            (value_at(place, place + h * direction) - value_at(place, place - h * direction)) / (2 * h)
            for h in DERIVATIVE_STEPS
        ]
        slope, (first, second, third) = slopes[1], [abs(a - b) for a, b in pairwise(slopes)]
        error = first + second + 0.1 * third
        if not abs(slope - own) <= max(tolerance * max(1.0, abs(slope)), error):
            where = "x" if place is x else next(n for n, p in module.named_parameters() if p is place)
            raise AssertionError(
                f"the gradient of {where} along a direction is {own:.6g}, the slope {slope:.6g}"
            )


def state_growth(step: Step, before: tuple[Tensor, Tensor], text: Tensor, pieces: int = 16) -> float:
    """Return by how much the difference between two states grows at most while both read the same text.

    The states are those after the two texts of `before`. The first half of `text` is read without measuring,
    so that inputs that the state keeps (convolutions, incomplete chunks) are the same. The difference is the
    Frobenius norm over all floating-point tensors, measured after each piece; the result is its largest ratio
    to an earlier value, and 0 if the states became equal.
    """
    half = text.shape[1] // 2
    states = [step(text[:, :half], step(each, None)[1])[1] for each in before]
    lowest, growth = _state_distance(*states), 0.0
    floor = 1e-9 * max(1.0, _norm(tensors(states[0])))
    for piece in text[:, half:].tensor_split(pieces, 1):
        if piece.shape[1] == 0:
            continue
        states = [step(piece, state)[1] for state in states]
        now = _state_distance(*states)
        if not now < float("inf"):
            return float("inf")
        growth = max(growth, now / lowest) if max(now, lowest) > floor else growth
        lowest = max(min(lowest, now), floor)
    return growth


def _norm(parts: Sequence[Tensor]) -> float:
    """Return the Frobenius norm over all floating-point tensors."""
    squares = [x.detach().double().square().sum() for x in parts if x.is_floating_point()]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def _state_distance(a: Any, b: Any) -> float:
    """Return the Frobenius norm of the difference of two states. Equal infinities do not differ."""
    pairs = zip(tensors(a), tensors(b), strict=True)
    return _norm([torch.where(x == y, 0.0, x - y) for x, y in pairs if x.is_floating_point()])


def assert_contracts(step: Step, before: tuple[Tensor, Tensor], text: Tensor) -> None:
    """Check that the difference between two states never grows while both read the same text (`state_growth`
    of at most 1, up to rounding).
    """
    growth = state_growth(step, before, text)
    if not growth <= 1 + 1e-6:
        raise AssertionError(f"the difference between two states grew {growth:.3g} times")


def assert_gradients_reach(module: nn.Module, x: Tensor) -> None:
    """Check that every parameter that requires a gradient gets one that is finite and not all zero."""
    module.zero_grad()
    y, _ = module(x, None)
    (y * torch.randn_like(y)).sum().backward()
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None or not parameter.grad.isfinite().all() or not parameter.grad.any():
            raise AssertionError(f"no usable gradient reached {name}")


def assert_same_function(
    f: Callable[..., Any], g: Callable[..., Any], inputs: Sequence[Tensor], tolerance: float = 1e-10
) -> None:
    """Check that f(*inputs) and g(*inputs), which return trees of tensors, agree in every output and in the
    gradients of all inputs.
    """
    left, right = tensors(f(*inputs)), tensors(g(*inputs))
    assert_close(left, right, tolerance, "outputs")
    weights = [torch.randn_like(x) if x.is_floating_point() else None for x in left]
    gradients = []
    for outputs in (left, right):
        parts = [
            (x * w).sum() for x, w in zip(outputs, weights, strict=True) if w is not None and x.requires_grad
        ]
        if not parts:
            raise AssertionError(
                "no output depends on an input that wants a gradient: the law was not tested"
            )
        found = torch.autograd.grad(torch.stack(parts).sum(), list(inputs), allow_unused=True)
        gradients.append(
            [torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, found, strict=True)]
        )
    assert_close(gradients[0], gradients[1], tolerance, "gradients of the inputs")
