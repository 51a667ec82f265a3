"""Text generation: greedy or sampled, streamed, for one or several prompts of different lengths, from any
state.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal, TypedDict, cast

import torch
from torch import Tensor

from remanence.config import Mode
from remanence.inference.decoder import Decoder, unsupported
from remanence.inference.reader import read
from remanence.inference.threads import threads_for
from remanence.model import CausalModel, Model, State
from remanence.runtime.errors import DivergedError
from remanence.runtime.sampling import MAX_TOKENS, PHRASE_BYTES, PHRASE_TOKENS, TEMPERATURE
from remanence.tokenizers.tokens import ByteTokenizer, Tokenizer, load_tokenizer
from remanence.tokenizers.vocabulary import BYTES

IN_PLACE = {"cuda"}
"""Types of devices on which tokens are decoded in place if the model supports it. There, the time of a step
is mostly that of launching kernels.
"""

DIVERGED = "state: expected finite numbers, got a memory that has diverged; start again without it"
"""Error message for a memory that has diverged."""

Write = Literal["all", "prompt", "none"]
"""The text that generation writes to the neural memory: "all" (prompt and generated text), "prompt" or "none"."""
WRITES: tuple[Write, ...] = ("all", "prompt", "none")


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


class Generation:
    """Generates an answer to each prompt: iterate with ``for row, text in generation``, then use ``.texts``,
    ``.tokens`` and ``.state``.

    The state includes all prompts and generated tokens, and is up to date whenever the loop is left. `state` is the
    state to start from: one row for all prompts, or one row per prompt; None means a new document. `write`
    says which text is written to the neural memory: "all" (prompt and answer), "prompt" or "none".
    """

    def __init__(
        self,
        model: CausalModel,
        prompts: Sequence[str],
        sampling: Sampling | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        state: State | None = None,
        write: Write = "all",
        memory_mode: Mode | None = None,
    ) -> None:
        self.model, self.sampling = model, sampling or Sampling()
        self.tokenizer = check_tokenizer(model, tokenizer)
        if write not in WRITES:
            raise ValueError(f"write: expected one of {', '.join(WRITES)}, got {write!r}")
        if (
            isinstance(prompts, str)
            or not prompts
            or not all(isinstance(prompt, str) and prompt for prompt in prompts)
        ):
            raise ValueError(f"prompts: expected texts of at least one character, got {prompts!r}")
        self.prompts = [self.tokenizer.encode(prompt) for prompt in prompts]
        if not all(self.prompts):
            raise ValueError(
                "prompts: expected at least one token each, got a text of which the tokenizer leaves nothing"
            )
        if state is not None and len(state.position) == 1:
            state = state.rows([0] * len(prompts))
        elif state is not None and len(state.position) != len(prompts):
            raise ValueError(
                f"state: expected one row, or one for each of {len(prompts)} prompts, got {len(state.position)}"
            )
        self._state: State | None = model.start(len(prompts)) if state is None else state
        self._decoder: Decoder | None = None
        mode = model.check_mode(memory_mode or model.memory_mode)
        mode_without_writing: Mode = "frozen" if model.has_memory and mode != "off" else mode
        self.modes: tuple[Mode, Mode] = {
            "all": (mode, mode),
            "prompt": (mode, mode_without_writing),
            "none": (mode_without_writing, mode_without_writing),
        }[write]
        self.started = False
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.texts = [""] * len(prompts)

    @property
    def state(self) -> State:
        """The state after all tokens read and generated so far."""
        # Made only when it is needed: a copy for every token would take longer than generating the token.
        if self._state is None:
            assert self._decoder is not None
            self._state = self._decoder.state
        return self._state

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """Yield the row number and the next piece of text, for all rows, until every answer has ended."""
        if self.started:
            raise ValueError(
                "generation: expected to be run once, got a second run; make another one from .state"
            )
        self.started = True
        writers = [_Writer(self.tokenizer, self.sampling.stop) for _ in self.prompts]
        filters = [_PhraseFilter(self.sampling.phrase(self.tokenizer)) for _ in self.prompts]
        seed = secrets.randbits(61) if self.sampling.seed is None else self.sampling.seed
        generators = [torch.Generator().manual_seed(seed + row) for row in range(len(self.prompts))]
        logits = self._read_prompts()
        active = [self.sampling.max_tokens > 0] * len(writers)
        while any(active):
            chosen = [
                choose(filters[row].mask_repeated(logits[row]), self.sampling, generators[row]) if on else 0
                for row, on in enumerate(active)
            ]
            continues = [on and token != self.tokenizer.end for on, token in zip(active, chosen, strict=True)]
            if any(continues):
                logits = self._read_tokens(chosen, continues)
            for row, token in enumerate(chosen):
                if not active[row]:
                    continue
                text = writers[row].push(token) if continues[row] else ""
                if continues[row]:
                    self.tokens[row].append(token)
                    filters[row].push(token)
                if (
                    not continues[row]
                    or writers[row].stopped
                    or len(self.tokens[row]) >= self.sampling.max_tokens
                ):
                    active[row] = False
                    text += writers[row].finish()
                if text:
                    self.texts[row] += text
                    yield row, text
        self._state, self._decoder = self.state, None
        if bool(self._state.diverged.any()):  # when the last token was written
            raise DivergedError(DIVERGED)

    def run(self) -> Generation:
        """Generate all answers to the end, and return this object."""
        for _ in self:
            pass
        return self

    @torch.no_grad()
    def _read_prompts(self) -> Tensor:
        """Read the prompts and return the logits after the last token of each ``[b v]``, on the CPU."""
        longest = max(len(prompt) for prompt in self.prompts)
        device = self.model.device
        padded = torch.tensor(
            [prompt + [0] * (longest - len(prompt)) for prompt in self.prompts], device=device
        )
        mask = torch.tensor(
            [[True] * len(prompt) + [False] * (longest - len(prompt)) for prompt in self.prompts],
            device=device,
        )
        is_unpadded = bool(mask.all())
        last, state, *_ = read(
            self.model, padded, self.state, mask=None if is_unpadded else mask, memory_mode=self.modes[0]
        )
        self._state = state
        if device.type in IN_PLACE and self.sampling.max_tokens > 0:
            model = cast(Model, self.model)  # only models with our own layers can be decoded in place
            if unsupported(model, self.modes[1]) is None:
                self._decoder = Decoder(model, state, self.modes[1])
        return self._check_finite(self.model.logits(last), state.diverged, [True] * len(self.prompts))

    @torch.no_grad()
    def _read_tokens(self, chosen: list[int], continues: list[bool]) -> Tensor:
        """Read the chosen tokens of the rows where `continues` is true, and return the next logits ``[b v]`` on
        the CPU.
        """
        device = self.model.device
        tokens, rows = torch.tensor(chosen, device=device), torch.tensor(continues, device=device)
        if self._decoder is not None:
            self._state = None
            return self._check_finite(self._decoder.step(tokens, rows), self._decoder.diverged, continues)
        mask = None if all(continues) else rows.unsqueeze(-1)
        with threads_for(self.model):
            trace = self.model.trace(tokens.unsqueeze(-1), self.state, mask=mask, memory_mode=self.modes[1])
            logits = self.model.logits(trace.hidden[:, -1])
        self._state = trace.state
        return self._check_finite(logits, trace.state.diverged, continues)

    def _check_finite(self, logits: Tensor, diverged: Tensor, continues: list[bool]) -> Tensor:
        """Return the logits on the CPU, where tokens are chosen. Raises an error if a memory has diverged or
        the logits of a row in `continues` are not finite. Logits and flags are copied in one transfer, the only
        one per token.
        """
        logits, flags = (
            torch.cat([logits[:, : self.tokenizer.vocabulary], diverged.unsqueeze(-1)], 1)
            .cpu()
            .tensor_split([-1], 1)
        )
        if bool(flags.any()):
            raise DivergedError(DIVERGED)
        if not bool(logits[torch.tensor(continues, device="cpu")].isfinite().all()):
            raise ValueError(
                "model: expected finite logits, got infinite or NaN ones; its weights, or a store's file, are damaged"
            )
        return logits


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


BYTE_VOCABULARY = 2 * BYTES - 2
"""The largest vocabulary size for which a model without a tokenizer is assumed to read bytes."""


def own_tokenizer(model: CausalModel) -> Tokenizer | None:
    """Return the tokenizer in the folder that the model was loaded from, or else that of the underlying
    pretrained model. None if there is neither.
    """
    if model.folder is not None:
        tokenizer = load_tokenizer(model.folder)
        if (model.folder / "tokenizer.json").is_file():
            return tokenizer
    return model.pretrained_tokenizer()


def check_tokenizer(model: CausalModel, tokenizer: Tokenizer | None) -> Tokenizer:
    """Return the tokenizer to use: the given one, the model's own, or bytes if the vocabulary is that small.
    Raises an error if the tokenizer has more tokens than the model.
    """
    tokenizer = own_tokenizer(model) if tokenizer is None else tokenizer
    if tokenizer is None and model.vocab_size > BYTE_VOCABULARY:
        raise ValueError(
            f"tokenizer: expected one for the model's {model.vocab_size:,} tokens, got none, neither as an "
            "argument nor with the model; load_tokenizer(folder) of remanence.tokenizers.tokens reads one"
        )
    tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
    if tokenizer.vocabulary > model.vocab_size:
        raise ValueError(
            f"tokenizer: expected at most the model's {model.vocab_size} tokens, got {tokenizer.vocabulary}"
        )
    return tokenizer
