"""Observation of the values that neural memories store and predict during a call, without changing the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from remanence.memory.neural import NeuralMemory

Observer = Callable[["NeuralMemory", Tensor, Tensor], None]
"""A function that is called with a memory, the values that it stores, and its predictions for the queries,
both ``[b t h e]``.
"""

_OBSERVER: ContextVar[Observer | None] = ContextVar("observer", default=None)


@contextmanager
def observing_memories(observer: Observer) -> Iterator[None]:
    """Within this context, every forward pass that writes to a neural memory calls `observer`.

    This applies only to the current thread (or asyncio task): other sessions with the same model are not
    observed. MAC calls its memory once per segment.
    """
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


def current_observer() -> Observer | None:
    """Return the observer of the current context, or None. Compiled code is never observed."""
    return None if torch.compiler.is_compiling() else _OBSERVER.get()
