"""Choosing tokens: the settings of sampling, and one answer while it is generated."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from math import isfinite
from typing import Literal, TypedDict

import torch
from torch import Tensor

from remanence.runtime.sampling import MAX_TOKENS, PHRASE_BYTES, PHRASE_TOKENS, TEMPERATURE
from remanence.tokenizers.tokens import ByteTokenizer, Tokenizer

FinishReason = Literal["stop", "length"]
"""Why an answer ended: at the end token or a stop string, or after `max_tokens`."""


def draw_seed(sampling: Sampling) -> int:
    """Return the random seed of the first answer: that of `sampling`, or a new one."""
    return secrets.randbits(61) if sampling.seed is None else sampling.seed


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings for choosing tokens and for stopping.

    Attributes:
        max_tokens: largest number of tokens to generate for each prompt.
        temperature: the logits are divided by it; 0 always takes the most likely token (greedy decoding).
        top_k: sample only from this many most likely tokens. None: no limit.
        top_p: sample only from the most likely tokens whose probabilities add up to this. None: no limit.
        no_repeat: length in tokens of phrases that may not occur twice in one answer. 0 allows repetition.
            None means 16 for bytes and 6 for other tokenizers when sampling, and 0 at temperature 0.
        stop: strings that end the output and are not included in it.
        seed: random seed of the first prompt. Each following prompt uses the next integer, so that no text depends on
            the others in the batch. None uses a new random seed for every call.
    """

    max_tokens: int = MAX_TOKENS
    temperature: float = TEMPERATURE
    top_k: int | None = None
    top_p: float | None = None
    no_repeat: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if type(self.max_tokens) is not int or self.max_tokens < 0:
            raise ValueError(f"max_tokens: expected an integer of at least 0, got {self.max_tokens!r}")
        if not isfinite(self.temperature) or self.temperature < 0:
            raise ValueError(f"temperature: expected a number of at least 0, got {self.temperature!r}")
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise ValueError(f"top_k: expected an integer of at least 1, got {self.top_k!r}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected a number above 0 and up to 1, got {self.top_p!r}")
        if self.no_repeat is not None and (type(self.no_repeat) is not int or self.no_repeat < 0):
            raise ValueError(f"no_repeat: expected an integer of at least 0, or None, got {self.no_repeat!r}")
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed < 2**62):
            raise ValueError(f"seed: expected an integer from 0 to 2^62, or None, got {self.seed!r}")
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop: expected texts of at least one character, got {list(self.stop)!r}")

    def phrase(self, tokenizer: Tokenizer) -> int | None:
        """Return the length in tokens of the phrases that an answer may not repeat, or None if it may repeat
        any phrase.
        """
        if self.no_repeat is not None or not self.temperature:
            return self.no_repeat or None
        return PHRASE_BYTES if isinstance(tokenizer, ByteTokenizer) else PHRASE_TOKENS


class SamplingFields(TypedDict, total=False):
    """The fields of `Sampling` as keyword arguments, so that editors can complete them."""

    max_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    no_repeat: int | None
    stop: tuple[str, ...]
    seed: int | None


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Choose one token from the logits ``[v]`` of one row. Runs on the CPU, so that a seed gives the same
    token on every device.
    """
    logits = logits.detach().to("cpu", torch.float64)
    if not sampling.temperature:
        return int(logits.argmax())
    logits = (logits - logits.max()) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(logits):
        logits = logits.index_fill(
            0, logits.sort(descending=True, stable=True).indices[sampling.top_k :], -torch.inf
        )
    if sampling.top_p is not None:
        ordered, order = logits.sort(descending=True, stable=True)
        before = ordered.softmax(0).cumsum(0) - ordered.softmax(0)
        logits = logits.index_fill(0, order[before >= sampling.top_p], -torch.inf)
    return int(torch.multinomial(logits.softmax(0), 1, generator=generator))


class _PhraseFilter:
    """The tokens of one answer so far, to exclude tokens that would repeat a phrase of `size` tokens. None
    for `size` allows repetition.
    """

    def __init__(self, size: int | None) -> None:
        self.size, self.tokens = size, list[int]()
        self.next_tokens: dict[tuple[int, ...], set[int]] = {}

    def _last_tokens(self) -> tuple[int, ...]:
        """Return the last `size` - 1 tokens, which form a phrase together with the next token."""
        return tuple(self.tokens[len(self.tokens) - (self.size or 1) + 1 :])

    def push(self, token: int) -> None:
        """Add a generated token."""
        if self.size is not None and len(self.tokens) >= self.size - 1:
            self.next_tokens.setdefault(self._last_tokens(), set()).add(token)
        self.tokens.append(token)

    def mask_repeated(self, logits: Tensor) -> Tensor:
        """Return the logits ``[v]`` with -inf for tokens that would repeat a phrase; unchanged if all tokens
        would.
        """
        excluded = self.next_tokens.get(self._last_tokens(), set()) if self.next_tokens else set()
        if not excluded or len(excluded) == len(logits):  # some token must be chosen
            return logits
        return logits.index_fill(0, torch.tensor(sorted(excluded), device=logits.device), -torch.inf)


class Answer:
    """One answer while it is generated: which token is next, the text so far, and why it ended.

    Args:
        tokenizer: converts tokens to text; its `end` token ends the answer.
        sampling: how tokens are chosen, and when the answer ends.
        seed: random seed of this answer, instead of that in `sampling`.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: Sampling, seed: int) -> None:
        self.sampling, self.end = sampling, tokenizer.end
        self.tokens: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None if sampling.max_tokens > 0 else "length"
        self._writer = _Writer(tokenizer, sampling.stop)
        self._filter = _PhraseFilter(sampling.phrase(tokenizer))
        self._generator = torch.Generator().manual_seed(seed)

    def choose(self, logits: Tensor) -> int:
        """Choose the next token from the logits ``[v]`` after the last one."""
        return choose(self._filter.mask_repeated(logits), self.sampling, self._generator)

    def push(self, token: int) -> str:
        """Add the chosen token and return the text that can now be shown. Sets `finish_reason` if the answer
        ends with it.
        """
        text = ""
        if token == self.end:
            self.finish_reason = "stop"
        else:
            text = self._writer.push(token)
            self.tokens.append(token)
            self._filter.push(token)
            if self._writer.stopped:
                self.finish_reason = "stop"
            elif len(self.tokens) >= self.sampling.max_tokens:
                self.finish_reason = "length"
        if self.finish_reason is not None:
            text += self._writer.finish()
        self.text += text
        return text


class _Writer:
    """Converts tokens to text that can be shown at once: holds back incomplete characters and text that may
    be the beginning of a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self.decoder, self.stop = tokenizer.decoder(), stop
        self.held, self.stopped = "", False

    def push(self, token: int) -> str:
        """Add a token and return the text that can now be shown."""
        return self._release(self.decoder.push(token))

    def finish(self) -> str:
        """Return the text that was held back, at the end of the answer."""
        text = self._release(self.decoder.finish())
        if self.stopped:
            return text
        text, self.held = text + self.held, ""
        return text

    def _release(self, text: str) -> str:
        """Add text and return the part that can be shown; sets `stopped` when a stop string is found."""
        if self.stopped:
            return ""
        self.held += text
        stop_positions = [
            position for position in (self.held.find(stop) for stop in self.stop) if position >= 0
        ]
        if stop_positions:
            self.stopped = True
            return self.held[: min(stop_positions)]
        num_held = max((_overlap(self.held, stop) for stop in self.stop), default=0)
        text, self.held = self.held[: len(self.held) - num_held], self.held[len(self.held) - num_held :]
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the number of last characters of the text that could be the beginning of the stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
