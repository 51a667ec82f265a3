"""The laws of `remanence.testing` as a table for any PyTorch module. ``remanence check`` prints it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from remanence.testing import (
    assert_causal,
    assert_contracts,
    assert_derivative,
    assert_deterministic,
    assert_round_trip,
    assert_rows_isolated,
    assert_same_function,
    assert_split,
    tensors,
)

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""The largest difference by dtype for laws that hold up to rounding, relative to the largest output."""

CAUSAL_POSITIONS = 16
"""The number of tokens that are changed, one at a time, to test causality."""


@runtime_checkable
class HasReference(Protocol):
    """A module that states its function a second time, as a plain loop whose inner gradients are taken by autograd of
    the written loss. The law "reference" compares outputs, states and gradients.
    """

    def reference(self, x: Tensor, state: Any) -> tuple[Tensor, Any]: ...


class Stateful(nn.Module):
    """Any module as ``y, state = step(x, state)``, the form that the laws expect.

    A module whose forward has no parameter `keyword` takes no state; the state is then always None. The first element
    of a returned tuple is the output, and the second the state.
    """

    def __init__(self, module: nn.Module, keyword: str = "state") -> None:
        super().__init__()
        self.module, self.keyword = module, keyword
        self.takes_state = keyword in inspect.signature(module.forward).parameters

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        result = self.module(x, **({self.keyword: state} if self.takes_state else {}))
        y, new = (result[0], result[1]) if isinstance(result, (tuple, list)) else (result, None)
        if not isinstance(y, Tensor) or y.shape[:2] != x.shape[:2]:
            got = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(f"forward: expected an output [{x.shape[0]}, {x.shape[1]}, ...], got {got}")
        return y, new if self.takes_state else None


class Finding(NamedTuple):
    """The result of one law: whether it holds (None: not tested), and why it does not or was not tested."""

    law: str
    holds: bool | None
    detail: str = ""


class Subject(NamedTuple):
    """What the laws are tested with: the module, and a function that draws inputs of a number of tokens."""

    step: Stateful
    draw: Callable[[int], Tensor]
    tokens: int
    tolerance: float


def _causality(on: Subject) -> None:
    positions = torch.linspace(0, on.tokens - 1, min(on.tokens, CAUSAL_POSITIONS)).long().tolist()
    assert_causal(on.step, on.draw(on.tokens), positions)


def _split(on: Subject) -> None:
    x, last = on.draw(on.tokens), on.tokens - 1
    third = on.tokens // 3
    for sizes in ([1, last], [last, 1], [third, 1, on.tokens - third - 1], [1] * on.tokens):
        assert_split(on.step, x, sizes, on.tolerance)


def _rows(on: Subject) -> None:
    assert_rows_isolated(on.step, on.draw(on.tokens))


def _determinism(on: Subject) -> None:
    assert_deterministic(on.step, on.draw(on.tokens))


def _round_trip(on: Subject) -> None:
    assert_round_trip(on.step, on.draw(on.tokens))


def _gradients(on: Subject) -> None:
    assert_derivative(on.step, on.draw(on.tokens))


def _reference(on: Subject) -> None:
    x = on.draw(on.tokens)
    leaves = [x.requires_grad_()] if x.is_floating_point() else list(on.step.parameters())
    reference: Callable[..., Any] = on.step.module.reference  # type: ignore[assignment]
    assert_same_function(lambda *_: on.step(x, None), lambda *_: reference(x, None), leaves, on.tolerance)


def _contraction(on: Subject) -> None:
    """Random tokens, one repeated token, and random tokens ten times as large."""
    texts = [on.draw(2 * on.tokens)]
    texts.append(texts[0][:, :1].expand_as(texts[0]).contiguous())
    if texts[0].is_floating_point():
        texts.append(10 * texts[0])
    for text in texts:
        assert_contracts(on.step, (on.draw(on.tokens), on.draw(on.tokens)), text)


def _without_state(on: Subject) -> str:
    return "" if on.step.takes_state else f"forward has no parameter {on.step.keyword!r}"


def _without_tensors(on: Subject) -> str:
    if reason := _without_state(on):
        return reason
    return "" if tensors(on.step(on.draw(1), None)[1]) else "the state holds no tensor"


def _without_float64(on: Subject) -> str:
    return "" if on.tolerance <= TOLERANCES[torch.float64] else "needs float64"


def _without_reference(on: Subject) -> str:
    return "" if isinstance(on.step.module, HasReference) else "the module has no method reference(x, state)"


def _always(on: Subject) -> str:
    return ""


LAWS: dict[str, tuple[Callable[[Subject], None], Callable[[Subject], str]]] = {
    "causality": (_causality, _always),
    "split": (_split, _without_state),
    "rows": (_rows, _always),
    "determinism": (_determinism, _always),
    "round trip": (_round_trip, _without_tensors),
    "gradients": (_gradients, _without_float64),
    "reference": (_reference, _without_reference),
    "contraction": (_contraction, _without_tensors),
}
"""The laws by name, each with the check and a function that returns why it cannot be tested, or an empty string."""

OPTIONAL = ("contraction",)
"""Properties that a good module may lack."""


def check(
    module: nn.Module,
    draw: Callable[[int], Tensor],
    *,
    tokens: int = 96,
    state: str = "state",
    laws: list[str] | None = None,
) -> list[Finding]:
    """Return what holds of a module, law by law.

    Args:
        module: a module with ``forward(x) -> y`` or ``forward(x, state=...) -> (y, state)``. It is switched to
            evaluation mode.
        draw: returns a random input ``[rows tokens ...]`` for a number of tokens, with at least two rows.
        tokens: length of the inputs. It should be greater than the module's chunks.
        state: name of forward's parameter for the state.
        laws: names of `LAWS`; None for all.

    Raises:
        ValueError: the module cannot be called in this way.
    """
    step = Stateful(module.eval(), state)
    x = draw(tokens)
    try:
        y, _ = step(x, None)
    except Exception as error:  # whatever the module raises
        raise ValueError(
            f"{type(module).__name__}: forward failed on {list(x.shape)}: {_line(error)}"
        ) from error
    subject = Subject(step, draw, tokens, TOLERANCES.get(y.dtype, TOLERANCES[torch.float32]))
    return [_find(law, subject) for law in (LAWS if laws is None else laws)]


def _find(law: str, subject: Subject) -> Finding:
    """Test one law. What the module raises is a violation of the law that was tested."""
    test, reason_against = LAWS[law]
    if reason := reason_against(subject):
        return Finding(law, None, reason)
    try:
        test(subject)
    except AssertionError as broken:
        return Finding(law, False, _line(broken, kind=False))
    except Exception as error:  # whatever the module raises
        return Finding(law, False, _line(error))
    return Finding(law, True)


def _line(error: Exception, kind: bool = True) -> str:
    """Return the message of an error as one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if kind else text
