"""The state of a kNN layer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from remanence.layers.attention import AttentionState
from remanence.memory.store import StoreState
from remanence.runtime.state import TensorTuple


class _KnnState(NamedTuple):
    attention: AttentionState
    k: Tensor
    v: Tensor
    token_importance: Tensor
    last: Tensor
    store: StoreState


class KnnState(_KnnState, TensorTuple):
    """The attention window; keys and values of the open segment ``[r w h e]``, from the left, not yet in the store, and
    the importance of each token ``[r w]`` (-inf: not to be written); the model's last output ``[r d]``, from which the
    next token's surprise is computed; the store.
    """

    __slots__ = ()
    minus_infinity = ("token_importance",)

    @property
    def opened(self) -> Tensor:
        """Tokens of the open segment ``[r]``. A whole one stays open until the next token comes."""
        return open_tokens(self.attention.position, self.token_importance.shape[1])

    def crop(self, tokens: int) -> KnnState:
        available = torch.where(self.attention.position == self.opened, self.opened, self.opened - 1)
        if bool((available < tokens).any()):
            raise ValueError(
                f"tokens: expected at most {int(available.min())}, as earlier ones are in the store, got {tokens}"
            )
        if tokens and self.last.shape[1]:
            raise ValueError(
                "tokens: expected 0, as a store written by surprise depends on the last token read, got more"
            )
        kept = torch.arange(self.token_importance.shape[1], device=self.token_importance.device) < (
            self.opened - tokens
        ).unsqueeze(-1)
        k, v = (x * kept[..., None, None] for x in (self.k, self.v))
        return KnnState(
            self.attention.crop(tokens), k, v, self.token_importance.where(kept, 0.0), self.last, self.store
        )


def open_tokens(position: Tensor, window: int) -> Tensor:
    """Tokens of the open segment ``[r]`` of rows that have read so many."""
    return torch.where(position > 0, (position - 1) % window + 1, 0)
