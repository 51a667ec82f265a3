"""Text generation: greedy or sampled, streamed, for one or several prompts of different lengths, from any
state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from remanence.config import Mode
from remanence.inference.decoder import Decoder, decoder_class, unsupported
from remanence.inference.reader import read
from remanence.inference.sampling import Answer, Sampling, draw_seed
from remanence.inference.threads import threads_for
from remanence.model import CausalModel, State
from remanence.runtime.errors import DivergedError
from remanence.tokenizers.tokens import ByteTokenizer, Tokenizer, load_tokenizer
from remanence.tokenizers.vocabulary import BYTES

IN_PLACE = {"cuda"}
"""Types of devices on which tokens are decoded in place if the model supports it. There, the time of a step
is mostly that of launching kernels. Decoders with `is_faster_on_cpu` are used on a CPU too.
"""

DIVERGED = "state: expected finite numbers, got a memory that has diverged; start again without it"
"""Error message for a memory that has diverged."""

Write = Literal["all", "prompt", "none"]
"""The text that generation writes to the neural memory: "all" (prompt and generated text), "prompt" or "none"."""
WRITES: tuple[Write, ...] = ("all", "prompt", "none")


def decoder_for(model: CausalModel, state: State, memory_mode: Mode) -> Decoder | None:
    """A decoder that continues from a state, if the model has one that takes less time on its device than calls of the
    model; else None.
    """
    if unsupported(model, memory_mode) is not None:  # type: ignore[arg-type]
        return None
    kind = decoder_class(model)
    if model.device.type not in IN_PLACE and not kind.is_faster_on_cpu:
        return None
    found: Decoder = kind(model, state, memory_mode)
    return found


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
        seed = draw_seed(self.sampling)
        answers = [Answer(self.tokenizer, self.sampling, seed + row) for row in range(len(self.prompts))]
        self.tokens = [answer.tokens for answer in answers]
        logits = self._read_prompts()
        while any(active := [answer.finish_reason is None for answer in answers]):
            chosen = [answer.choose(logits[row]) if active[row] else 0 for row, answer in enumerate(answers)]
            continues = [on and token != self.tokenizer.end for on, token in zip(active, chosen, strict=True)]
            if any(continues):
                logits = self._read_tokens(chosen, continues)
            for row, token in enumerate(chosen):
                if active[row] and (text := answers[row].push(token)):
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
        if self.sampling.max_tokens > 0:
            self._decoder = decoder_for(self.model, state, self.modes[1])
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
            with threads_for(self.model):
                logits = self._decoder.step(tokens, rows)
            return self._check_finite(logits, self._decoder.diverged, continues)
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
