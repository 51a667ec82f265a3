"""Whether a model's calls can be captured as CUDA graphs, and from which positions on."""

from __future__ import annotations

from math import lcm

from torch import Tensor

from remanence.model import Model


def unsupported(model: Model, length: int, carries: bool) -> str | None:
    """Why calls of so many tokens cannot be captured, for rows that carry a state or begin, in words; None if
    they can.
    """
    if model.device.type != "cuda":
        return "only CUDA has graphs"
    if any(type(parameter.data) is not Tensor for parameter in model.parameters()):
        return "the weights are sharded"
    if (reason := model.uncapturable(carries)) is not None:
        return reason
    border = border_of(model)
    if carries and length % border:
        known = f"rows that go on must stand at multiples of {border} tokens, a chunk and a segment"
        return f"{known}, but each call reads {length}"
    return None


def border_of(model: Model) -> int:
    """Tokens after which a chunk of every memory and a segment end together."""
    return lcm(*[mixer.border for mixer in model.mixers])


def longest_window(model: Model) -> int:
    """Tokens that any layer's sliding attention reaches back."""
    return max((mixer.reach for mixer in model.mixers), default=0)
