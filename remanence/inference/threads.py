"""How many threads a model runs with on a CPU, measured once for each model."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from weakref import WeakKeyDictionary

import torch

from remanence.model import CausalModel
from remanence.runtime.device import fastest_threads, threads_are_set, using_threads

READ = 128
"""Tokens that are read in one call to time it."""

_FASTEST: WeakKeyDictionary[CausalModel, int] = WeakKeyDictionary()


def threads_for(model: CausalModel) -> AbstractContextManager[None]:
    """A context in which a model on a CPU runs with the number of threads that is fastest on this machine now.

    The first call times the model for a moment (`runtime/device.py: fastest_threads`); later calls use the same number,
    so that a text gives the same numbers to the last bit in however many calls it is read. PyTorch's number is restored
    afterwards, and one that the user has set is never changed.
    """
    if model.device.type != "cpu" or threads_are_set():
        return nullcontext()
    if model not in _FASTEST:
        _FASTEST[model] = fastest_threads(lambda: _work(model, READ), lambda: _work(model, 1))
    return using_threads(_FASTEST[model])


@torch.no_grad()
def _work(model: CausalModel, tokens: int) -> None:
    model.trace(
        torch.zeros(1, min(tokens, model.max_positions or tokens), dtype=torch.long, device=model.device)
    )
