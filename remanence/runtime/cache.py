"""Results of functions of sizes, kept for the next layer or call that asks the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
T = TypeVar("T")


def cached_by_size(make: Callable[P, T]) -> Callable[P, T]:
    """A function of sizes that is asked the same again and again, by every layer: its last results are kept. Not while
    torch looks on only for shapes: a tensor without numbers must not stay.
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
