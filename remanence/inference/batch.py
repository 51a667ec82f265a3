"""A batch of sessions with one model, which read and generate together as the rows of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch

from remanence.inference.generate import Generation
from remanence.inference.reader import read
from remanence.inference.sampling import Sampling, SamplingFields
from remanence.inference.session import Session
from remanence.model import State
from remanence.runtime.errors import DivergedError
from remanence.runtime.keywords import show_fields
from remanence.tokenizers.tokens import ByteTokenizer, JsonTokenizer, Tokenizer


def _same_tokenizer(a: Tokenizer, b: Tokenizer) -> bool:
    """Whether two tokenizers give the same tokens. Sessions may have separate copies loaded from the same
    folder.
    """
    if isinstance(a, JsonTokenizer) and isinstance(b, JsonTokenizer):
        return (a.text, a.end) == (b.text, b.end)
    return a is b or (isinstance(a, ByteTokenizer) and isinstance(b, ByteTokenizer))


class SessionBatch:
    """Sessions that read and generate together: ``batch = Session.batch([a, b])``, ``batch.read([text_a, text_b])``.

    The sessions must have the same model, tokenizer, `write` and memory mode; their texts may differ in length. After
    each call, every session has the state that it would have alone, up to the rounding of batched products. Between
    calls, sessions can be saved, forked, used alone, or put into other batches.
    """

    def __init__(self, sessions: Sequence[Session]) -> None:
        if not sessions or not all(isinstance(session, Session) for session in sessions):
            raise ValueError(f"sessions: expected at least one Session, got {list(sessions)!r}")
        if len({id(session) for session in sessions}) < len(sessions):
            raise ValueError("sessions: expected each session once, got one twice; use fork() for a second")
        first = sessions[0]
        for session in sessions[1:]:
            if session.model is not first.model or not _same_tokenizer(session.tokenizer, first.tokenizer):
                raise ValueError("sessions: expected the same model and tokenizer in all, got different ones")
            if (session.write, session.memory_mode) != (first.write, first.memory_mode):
                raise ValueError(
                    "sessions: expected the same write and memory_mode in all, got different ones"
                )
        self.sessions = list(sessions)

    def read(self, texts: Sequence[str | bytes]) -> None:
        """Read one text in each session. If any memory diverges, no session changes."""
        self._check_texts("texts", texts)
        first = self.sessions[0]
        for session in self.sessions:
            session.end_answer()
        rows = [[token for tokens in first.tokenizer.stream([text]) for token in tokens] for text in texts]
        longest = max(map(len, rows))
        if not longest:
            return
        device = first.model.device
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
        lengths = torch.tensor([[len(row)] for row in rows], device=device)
        # Rows at different positions need a mask, which splits each row at its own chunk boundaries.
        mask = torch.arange(longest, device=device) < lengths
        found = read(first.model, tokens, self._batch_state(), mask=mask, memory_mode=first.memory_mode)
        if found.diverged:
            raise DivergedError(
                "memory: expected finite numbers, got a memory that diverged in one of the texts"
            )
        self._set_states(found.state)

    @show_fields(Sampling)
    def generate(self, prompts: Sequence[str], **sampling: Unpack[SamplingFields]) -> list[str]:
        """Return the text that each session generates after its prompt, as `Session.generate` does. Session
        number i uses ``seed + i`` as its random seed.
        """
        self._check_texts("prompts", prompts)
        first = self.sessions[0]
        generation = Generation(
            first.model,
            prompts,
            Sampling(**sampling),
            tokenizer=first.tokenizer,
            state=self._batch_state(),
            write=first.write,
            memory_mode=first.memory_mode,
        ).run()
        self._set_states(generation.state)
        for session in self.sessions:
            session.note_answer()
        return generation.texts

    def _check_texts(self, name: str, texts: Sequence[str | bytes]) -> None:
        """Raise an error unless there is one text per session. `name` is the argument name to show in the
        error.
        """
        if isinstance(texts, str | bytes) or len(texts) != len(self.sessions):
            got = "a single text" if isinstance(texts, str | bytes) else len(texts)
            raise ValueError(f"{name}: expected one for each of {len(self.sessions)} sessions, got {got}")

    def _batch_state(self) -> State:
        """Return the states of all sessions as the rows of one state."""
        return State.concat([session.state for session in self.sessions])

    def _set_states(self, state: State) -> None:
        """Give each session its row of a batch state."""
        for row, session in enumerate(self.sessions):
            session.state = state.rows([row])
