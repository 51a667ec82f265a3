"""The configuration of a memory of sentences. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from remanence.runtime.choices import short_repr


@dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """The token ids that a chat template writes around messages.

    Attributes:
        user: the tokens before a user's message.
        assistant: the tokens before an answer.
        end: the token that ends a message.
        newline: the token between recalled sentences.
        recall_start: the tokens before recalled sentences, which follow those before the answer.
        recall_end: the tokens after recalled sentences. The answer follows.
    """

    user: tuple[int, ...] = ()
    assistant: tuple[int, ...] = ()
    end: int = 0
    newline: int = 0
    recall_start: tuple[int, ...] = ()
    recall_end: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            ids = tuple(value) if isinstance(value, list | tuple) else (value,)
            if any(type(each) is not int or each < 0 for each in ids):
                raise ValueError(f"format.{field.name}: expected token ids, got {short_repr(value)}")
            if isinstance(field.default, tuple):
                object.__setattr__(self, field.name, ids)


@dataclass(frozen=True, kw_only=True)
class SentenceConfig:
    """The settings of a memory of sentences.

    Attributes:
        layers: indices of the layers whose inputs are encoded; empty: layers at two fifths and two thirds of the depth.
        heads, head_dim: number and width of the averages over a sentence that the encoder computes.
        key_dim: width of keys and queries.
        recalled: number of sentences that are recalled for an answer.
        longest, shortest: the largest number of tokens in a sentence, and the smallest at which it ends by itself.
        query: number of tokens at the end of a user's message from which the query is computed.
        answer: number of tokens after which an answer is taken to have ended.
        size: number of sentences that are stored; when there are more, the oldest are dropped.
        rank: rank of the low-rank update (LoRA) of the pretrained weights that is active in answers.
        format: the token ids around messages; empty: taken from the tokenizer.
    """

    layers: tuple[int, ...] = ()
    heads: int = 8
    head_dim: int = 96
    key_dim: int = 384
    recalled: int = 5
    longest: int = 64
    shortest: int = 4
    query: int = 56
    answer: int = 512
    size: int = 65536
    rank: int = 16
    format: ChatFormat = ChatFormat()

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not isinstance(self.format, ChatFormat):
            object.__setattr__(self, "format", ChatFormat(**dict(self.format)))
        for name in ("heads", "head_dim", "key_dim", "recalled", "query", "answer", "size", "rank"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}: expected an integer of at least 1, got {short_repr(value)}")
        if type(self.shortest) is not int or not 2 <= self.shortest <= self.longest:
            raise ValueError(
                f"shortest: expected from 2 to longest={self.longest} tokens, got {short_repr(self.shortest)}"
            )

    def for_model(self, num_layers: int, chat_format: ChatFormat | None) -> SentenceConfig:
        """A copy completed for a pretrained model: with the indices of encoded layers and the token ids."""
        layers = self.layers or (round(num_layers * 0.4), round(num_layers * 2 / 3))
        if any(type(n) is not int or not 0 <= n < num_layers for n in layers):
            raise ValueError(f"layers: expected some of 0 to {num_layers - 1}, got {short_repr(layers)}")
        known = self.format if self.format.user else chat_format
        if known is None:
            raise ValueError(
                "format: expected a tokenizer whose chat marks are known (<|im_start|> or <start_of_turn>), or the "
                "token ids around messages"
            )
        return replace(self, layers=layers, format=known)

    @property
    def history(self) -> int:
        """Number of recent tokens whose hidden vectors a state keeps: an open sentence, or a query with the
        tokens that follow it before the answer.
        """
        return max(self.longest + 1, self.query + len(self.format.assistant) + 4)


def sentence_config(given: Any) -> SentenceConfig:
    """A `SentenceConfig` from one, from a mapping of its fields, or from None."""
    if isinstance(given, SentenceConfig):
        return given
    known = {field.name for field in fields(SentenceConfig)}
    data = dict(given or {})
    for name in data:
        if name not in known:
            raise ValueError(f"sentences: expected fields of SentenceConfig, got {name!r}")
    return SentenceConfig(**data)
