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
    """The state of a kNN layer.

    attention
        The state of the sliding window.
    k, v
        Keys and values of the open segment ``[r w h e]``, which are not in the store yet.
    token_importance
        The importance of the tokens of the open segment ``[r w]``; -inf: do not write the token.
    last
        The model's output for the last token ``[r d]``, which gives the surprise of the next token; d is 0 unless the
        write policy is "surprise".
    store
        The store of older keys and values.
    """

    __slots__ = ()
    minus_infinity = ("token_importance",)

    @property
    def open_length(self) -> Tensor:
        """Number of tokens in the open segment ``[r]``. A full segment stays open until the next token is read."""
        return open_tokens(self.attention.position, self.token_importance.shape[1])

    def crop(self, tokens: int) -> KnnState:
        available = torch.where(
            self.attention.position == self.open_length, self.open_length, self.open_length - 1
        )
        if bool((available < tokens).any()):
            raise ValueError(
                f"tokens: expected at most {int(available.min())}, as earlier ones are in the store, got {tokens}"
            )
        if tokens and self.last.shape[1]:
            raise ValueError(
                "tokens: expected 0, as a store written by surprise depends on the last token read, got more"
            )
        kept = torch.arange(self.token_importance.shape[1], device=self.token_importance.device) < (
            self.open_length - tokens
        ).unsqueeze(-1)
        k, v = (x * kept[..., None, None] for x in (self.k, self.v))
        return KnnState(
            self.attention.crop(tokens), k, v, self.token_importance.where(kept, 0.0), self.last, self.store
        )


def open_tokens(position: Tensor, window: int) -> Tensor:
    """Number of tokens in the open segment of each row ``[r]``, given its position ``[r]`` and the segment
    length.
    """
    return torch.where(position > 0, (position - 1) % window + 1, 0)
