"""Checks whether the calls of a model can be captured as CUDA graphs, and at which positions in a text."""

from __future__ import annotations

from math import lcm

from torch import Tensor, nn

from remanence.model import Model
from remanence.runtime.module import (
    alteration_reason,
    is_package_module,
    modules_covered_by,
    modules_of,
    overridden_method,
)


def unsupported(model: Model, length: int, carries: bool) -> str | None:
    """Return the reason why calls of `length` tokens cannot be captured as CUDA graphs, or None if they can.
    `carries` is whether the calls also pass a state on.
    """
    if model.device.type != "cuda":
        return "only CUDA has graphs"
    if any(type(parameter.data) is not Tensor for parameter in model.parameters()):
        return "the weights are sharded"
    if (reason := model.capture_unsupported_reason(carries)) is not None:
        return reason
    if (reason := uncaptured_code_reason(model)) is not None:
        return reason
    border = alignment_of(model)
    if carries and length % border:
        known = f"rows with a state must be at multiples of {border} tokens, whole chunks and segments"
        return f"{known}, but each call reads {length}"
    return None


def uncaptured_code_reason(model: Model) -> str | None:
    """Return a description of Python code in the model that a captured graph would not run, such as hooks or
    overrides that may branch on the host. None if there is no such code.
    """
    modules = modules_of(model)
    if (reason := alteration_reason(modules)) is not None:
        return f"{reason}, which a captured graph would not call"
    for parameter in model.parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return "a parameter has hooks, which a captured graph would not call"
    if (
        name := overridden_method(model, "capture_unsupported_reason", ("forward", "trace", "logits"))
    ) is not None:
        return f"{type(model).__name__} overrides {name} and not capture_unsupported_reason"
    known: set[nn.Module] = {model}
    for mixer in model.mixers:
        if (name := overridden_method(mixer, "capture_unsupported_reason")) is not None:
            return f"{type(mixer).__name__} overrides {name} and not capture_unsupported_reason"
        known |= modules_covered_by(mixer, "capture_unsupported_reason")
    for module in modules:
        if not (
            is_package_module(module)
            or module in known
            or type(module) in (nn.Embedding, nn.Linear, nn.ModuleList)
        ):
            return f"a module ({type(module).__name__}) is not one of ours, and may branch on the host"
    return None


def alignment_of(model: Model) -> int:
    """Return the number of tokens at whose multiples every chunk of a memory and every segment is complete."""
    return lcm(*[mixer.alignment for mixer in model.mixers])


def longest_window(model: Model) -> int:
    """Return the largest attention window of any layer, in tokens."""
    return max((mixer.window_size for mixer in model.mixers), default=0)
