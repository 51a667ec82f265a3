"""A low-rank update of the pretrained weights that is switched on for some calls only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

ACTIVE: ContextVar[SwitchedLora | None] = ContextVar("adapter", default=None)
"""The adapter that is switched on in this thread."""

SCALE = 2.0
"""The factor of every update."""


class SwitchedLora(nn.Module):
    """LoRA on every linear map of the layers of a pretrained model: ``with adapter.active(): model(...)``.

    Outside of `active`, the pretrained model computes what it computed before, bit for bit.
    """

    def __init__(self, layers: nn.Module, rank: int) -> None:
        super().__init__()
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()
        self.hooks = []
        self._converted: dict[str, tuple[tuple[Any, ...], tuple[Tensor, Tensor]]] = {}
        for path, module in layers.named_modules():
            if isinstance(module, nn.Linear):
                name = path.replace(".", "_")
                self.down[name] = nn.Parameter(
                    torch.randn(module.in_features, rank) / math.sqrt(module.in_features)
                )
                self.up[name] = nn.Parameter(torch.zeros(rank, module.out_features))
                self.hooks.append(module.register_forward_hook(self._hook(name)))
        if not self.hooks:
            raise ValueError("model: expected layers with nn.Linear, which LoRA is added to, got none")

    def _hook(self, name: str) -> Any:
        def add(_: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            if ACTIVE.get() is not self:
                return None
            x = given[0]
            down, up = self._weights(name, x.dtype)
            low = (x @ down).flatten(0, -2)
            return torch.addmm(output.flatten(0, -2), low, up, alpha=SCALE).view_as(output)

        return add

    def _weights(self, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The two factors of a linear map in a dtype. Without gradients, they are converted only when they change."""
        down, up = self.down[name], self.up[name]
        if down.dtype == up.dtype == dtype:
            return down, up
        if torch.is_grad_enabled():
            return down.to(dtype), up.to(dtype)
        key = dtype, down.data_ptr(), down._version, up.data_ptr(), up._version
        known = self._converted.get(name)
        if known is None or known[0] != key:
            with torch.inference_mode(False):
                known = self._converted[name] = key, (down.detach().to(dtype), up.detach().to(dtype))
        return known[1]

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context manager that switches the adapter on for calls in this thread."""
        token = ACTIVE.set(self)
        try:
            yield
        finally:
            ACTIVE.reset(token)

    def remove(self) -> None:
        """Remove the adapter from the pretrained model."""
        for hook in self.hooks:
            hook.remove()
