"""Several sessions over one model as the rows of one batch: read and generate together, then go on separately."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch

from remanence.inference.generate import Generation, Sampling, SamplingFields
from remanence.inference.reader import read
from remanence.inference.session import Session
from remanence.model import State
from remanence.runtime.errors import DivergedError
from remanence.runtime.keywords import show_fields
from remanence.tokenizers.tokens import ByteTokenizer, JsonTokenizer, Tokenizer


def _same(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether two tokenizers give the same tokens: sessions load their own from a model's folder."""
    if isinstance(one, JsonTokenizer) and isinstance(other, JsonTokenizer):
        return (one.text, one.end) == (other.text, other.end)
    return one is other or (isinstance(one, ByteTokenizer) and isinstance(other, ByteTokenizer))


class SessionBatch:
    """``batch = Session.batch([a, b])``, then ``batch.read([text, other])`` or ``batch.generate([prompt, other])``.

    The sessions have the same model, tokenizer, `write` and memory mode; their texts may differ in length. Every call
    leaves each session with the state it would have alone, up to the rounding of batched products, so sessions can be
    saved, forked, used alone, and put into other batches in between.
    """

    def __init__(self, sessions: Sequence[Session]) -> None:
        if not sessions or not all(isinstance(session, Session) for session in sessions):
            raise ValueError(f"sessions: expected at least one Session, got {list(sessions)!r}")
        if len({id(session) for session in sessions}) < len(sessions):
            raise ValueError("sessions: expected each session once, got one twice; use fork() for a second")
        first = sessions[0]
        for session in sessions[1:]:
            if session.model is not first.model or not _same(session.tokenizer, first.tokenizer):
                raise ValueError("sessions: expected the same model and tokenizer in all, got different ones")
            if (session.write, session.memory_mode) != (first.write, first.memory_mode):
                raise ValueError(
                    "sessions: expected the same write and memory_mode in all, got different ones"
                )
        self.sessions = list(sessions)

    def read(self, texts: Sequence[str | bytes]) -> None:
        """Read a text in each session. If the memory of one diverges, no session changes."""
        self._check_texts("texts", texts)
        first = self.sessions[0]
        rows = [[token for some in first.tokenizer.stream([text]) for token in some] for text in texts]
        longest = max(map(len, rows))
        if not longest:
            return
        device = first.model.device
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
        lengths = torch.tensor([[len(row)] for row in rows], device=device)
        # Rows at different positions are read with a mask: it cuts each at the borders of its own chunks.
        mask = torch.arange(longest, device=device) < lengths
        found = read(first.model, tokens, self._joined(), mask=mask, memory_mode=first.memory_mode)
        if found.diverged:
            raise DivergedError(
                "memory: expected finite numbers, got a memory that diverged in one of the texts"
            )
        self._split(found.state)

    @show_fields(Sampling)
    def generate(self, prompts: Sequence[str], **sampling: Unpack[SamplingFields]) -> list[str]:
        """Read a prompt in each session and continue it, as `Session.generate`. With a seed, the first session draws
        with it, the next one with the next seed, and so on.
        """
        self._check_texts("prompts", prompts)
        first = self.sessions[0]
        generation = Generation(
            first.model,
            prompts,
            Sampling(**sampling),
            tokenizer=first.tokenizer,
            state=self._joined(),
            write=first.write,
            memory_mode=first.memory_mode,
        ).run()
        self._split(generation.state)
        return generation.texts

    def _check_texts(self, name: str, texts: Sequence[str | bytes]) -> None:
        if isinstance(texts, str | bytes) or len(texts) != len(self.sessions):
            got = "a single text" if isinstance(texts, str | bytes) else len(texts)
            raise ValueError(f"{name}: expected one for each of {len(self.sessions)} sessions, got {got}")

    def _joined(self) -> State:
        return State.concat([session.state for session in self.sessions])

    def _split(self, state: State) -> None:
        for row, session in enumerate(self.sessions):
            session.state = state.rows([row])
