"""A cache for results that depend only on sizes, shared by all layers and calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
T = TypeVar("T")


def cached_by_size(make: Callable[P, T]) -> Callable[P, T]:
    """Return `make` with a cache of its 16 latest results, as every layer calls it with the same sizes. The
    cache is not used during compilation or with fake tensors, because a tensor without data must not be
    stored.
    """
    remembered = cast(Callable[P, T], lru_cache(maxsize=16)(torch.inference_mode(False)(make)))

    @wraps(make)
    def ask(*args: P.args, **kwargs: P.kwargs) -> T:
        if (
            torch.compiler.is_compiling()
            or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        ):
            return make(*args, **kwargs)
        return remembered(*args, **kwargs)

    return ask
