"""Selection of the number of CPU threads with which a model runs fastest, measured once per model."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from weakref import WeakKeyDictionary

import torch

from remanence.model import CausalModel
from remanence.runtime.device import fastest_threads, threads_are_set, using_threads

TIMED_TOKENS = 128
"""Number of tokens in a call whose time is measured."""

_FASTEST: WeakKeyDictionary[CausalModel, int] = WeakKeyDictionary()
"""The fastest number of threads of each model that has been measured."""


def threads_for(model: CausalModel) -> AbstractContextManager[None]:
    """Return a context manager that sets the number of threads with which a model runs fastest on this CPU.

    The first call measures it (`runtime/device.py: fastest_threads`). Later calls use the same number, so that results
    do not depend on the number of calls. PyTorch's number of threads is restored afterwards. A number of threads that
    the user has set is never changed.
    """
    if model.device.type != "cpu" or threads_are_set():
        return nullcontext()
    if model not in _FASTEST:
        _FASTEST[model] = fastest_threads(lambda: _run(model, TIMED_TOKENS), lambda: _run(model, 1))
    return using_threads(_FASTEST[model])


@torch.no_grad()
def _run(model: CausalModel, tokens: int) -> None:
    """Run the model on `tokens` tokens, to measure the time."""
    model.trace(
        torch.zeros(1, min(tokens, model.max_positions or tokens), dtype=torch.long, device=model.device)
    )
