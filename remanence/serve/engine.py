"""The engine: a thread that reads texts and generates answers for many sessions at once.

Rows join and leave the batch between two steps. Long texts are read in pieces between the steps, so that answers under
way do not wait for them. Each row has what it would have alone, up to the rounding of batched products.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from remanence.config import Mode
from remanence.inference.reader import piece_slices, read
from remanence.inference.sampling import Answer, FinishReason, Sampling, draw_seed
from remanence.inference.threads import threads_for
from remanence.model import CausalModel, State
from remanence.runtime.errors import DivergedError
from remanence.runtime.positions import positions_of
from remanence.tokenizers.tokens import Tokenizer


class BusyError(ValueError):
    """The queue is full: the request can be sent again later."""


class CancelledError(ValueError):
    """The request was cancelled, or the engine was closed, before its answer was complete."""


class Result(NamedTuple):
    """The result of a job.

    text
        The answer.
    tokens_read, tokens_generated
        The number of tokens of the prompt and of the answer.
    finish_reason
        Why the answer ended.
    state
        The state after the prompt and the answer.
    """

    text: str
    tokens_read: int
    tokens_generated: int
    finish_reason: FinishReason
    state: State


Event = str | Result | Exception
"""What a job delivers: pieces of text, then either the result or an error."""


@dataclass(eq=False)
class Job:
    """A text to read and an answer to generate.

    Attributes:
        tokens: the text to read before the answer.
        state: the state of one session to start from.
        sampling: settings of the answer; ``max_tokens=0`` only reads.
        deliver: called in the engine's thread with each `Event`. It must return quickly.
        memory_mode: the memory mode of all calls.
        deadline: the value of `time.monotonic` at which the job is cancelled; None: never.
    """

    tokens: list[int]
    state: State
    sampling: Sampling
    deliver: Callable[[Event], None]
    memory_mode: Mode = "on"
    deadline: float | None = None
    is_cancelled: bool = field(default=False, init=False)

    def cancel(self) -> None:
        """Stop the job at its next step. Its state is dropped, and it delivers a `CancelledError`."""
        self.is_cancelled = True


class _Reading:
    """A job whose text is being read."""

    def __init__(self, job: Job, piece: int) -> None:
        self.job, self.state = job, job.state
        position = positions_of(job.state.position)[0]
        self.pieces = deque(piece_slices(len(job.tokens), piece, position))


class _Row:
    """A job whose answer is being generated: one row of the batch."""

    def __init__(self, job: Job, answer: Answer, logits: Tensor) -> None:
        self.job, self.answer, self.logits = job, answer, logits


class Engine:
    """Runs jobs with one model: ``with Engine(model, tokenizer) as engine: engine.submit(job)``.

    Args:
        model: the model of all sessions. Nothing else may use it meanwhile except from other threads.
        tokenizer: its tokenizer.
        max_rows: largest number of jobs that are read or answered at the same time.
        max_waiting: largest number of jobs that wait for a row; `submit` refuses more.
        piece: number of tokens of a text that are read between two steps of the answers.
    """

    def __init__(
        self,
        model: CausalModel,
        tokenizer: Tokenizer,
        *,
        max_rows: int = 16,
        max_waiting: int = 64,
        piece: int = 256,
    ) -> None:
        for name, value in (("max_rows", max_rows), ("piece", piece)):
            if value < 1:
                raise ValueError(f"{name}: expected an integer of at least 1, got {value}")
        self.model, self.tokenizer = model, tokenizer
        self.max_rows, self.max_waiting, self.piece = max_rows, max_waiting, piece
        self.tokens_read = self.tokens_generated = 0
        self._waiting: deque[Job] = deque()
        self._reading: deque[_Reading] = deque()
        self._rows: list[_Row] = []
        self._states: State | None = None
        """The states of `_rows`, as the rows of one state."""
        self._changed = threading.Condition()
        self._is_closed = self._is_draining = False
        self._thread = threading.Thread(target=self._run, name="remanence-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_running(self) -> bool:
        """Whether the engine accepts jobs and its thread is alive."""
        return self._thread.is_alive() and not (self._is_closed or self._is_draining)

    @property
    def num_waiting(self) -> int:
        """The number of jobs that wait for a row."""
        return len(self._waiting)

    @property
    def num_active(self) -> int:
        """The number of jobs that are being read or answered."""
        return len(self._reading) + len(self._rows)

    def submit(self, job: Job) -> Job:
        """Queue a job. Raises `BusyError` if too many jobs are waiting."""
        if not job.tokens:
            raise ValueError("tokens: expected at least one token to read, got none")
        with self._changed:
            if not self.is_running:
                raise CancelledError("engine: expected one that runs, got one that was closed")
            if len(self._waiting) >= self.max_waiting:
                raise BusyError(
                    f"engine: {self.max_waiting} requests are waiting already; send this one again later"
                )
            self._waiting.append(job)
            self._changed.notify()
        return job

    def close(self, *, finish: bool = False, timeout: float | None = None) -> None:
        """Stop the engine. With `finish`, jobs that were submitted are completed first, for at most `timeout`
        seconds; all others deliver a `CancelledError`.
        """
        with self._changed:
            self._is_draining = True
            self._is_closed = self._is_closed or not finish
            self._changed.notify()
        self._thread.join(timeout)
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    # What follows runs in the engine's thread.

    def _run(self) -> None:
        """Run jobs until the engine is closed."""
        while self._admit():
            self._drop_cancelled()
            if self._reading:
                reading = self._reading.popleft()
                self._guard([reading.job], lambda reading=reading: self._read_piece(reading))  # type: ignore[misc]
            if self._rows:
                self._guard([row.job for row in self._rows], self._step)
        closed = CancelledError("engine: closed before the answer was complete")
        jobs = [*self._waiting, *(each.job for each in self._reading), *(row.job for row in self._rows)]
        self._waiting.clear()
        self._reading.clear()
        self._rows, self._states = [], None
        for job in jobs:
            job.deliver(closed)

    def _admit(self) -> bool:
        """Wait for jobs and take as many as there are free rows. Returns False if the engine is to stop."""
        with self._changed:
            while not (self._is_closed or self._is_draining or self._waiting or self.num_active):
                self._changed.wait()
            while self._waiting and self.num_active < self.max_rows:
                self._reading.append(_Reading(self._waiting.popleft(), self.piece))
            return not self._is_closed and bool(self.num_active)

    def _guard(self, jobs: list[Job], function: Callable[[], None]) -> None:
        """Call a function. If it raises, drop the jobs and deliver the error to each."""
        try:
            with torch.no_grad(), threads_for(self.model):
                function()
        except Exception as error:
            self._reading = deque(each for each in self._reading if each.job not in jobs)
            self._keep_rows([row.job not in jobs for row in self._rows])
            for job in jobs:
                job.deliver(error)

    def _drop_cancelled(self) -> None:
        """Drop jobs that were cancelled or are past their deadline, and deliver an error to each."""
        now = time.monotonic()
        late = lambda job: job.deadline is not None and now > job.deadline
        ended = [each for each in self._reading if each.job.is_cancelled or late(each.job)]
        if ended:
            self._reading = deque(each for each in self._reading if each not in ended)
        dropped = [each.job for each in ended]
        keep = [not (row.job.is_cancelled or late(row.job)) for row in self._rows]
        dropped += [row.job for row, on in zip(self._rows, keep, strict=True) if not on]
        self._keep_rows(keep)
        with self._changed:
            gone = [job for job in self._waiting if job.is_cancelled or late(job)]
            for job in gone:
                self._waiting.remove(job)
        for job in dropped + gone:
            reason = "cancelled" if job.is_cancelled else "not complete within its time limit"
            job.deliver(CancelledError(f"request: {reason}"))

    def _keep_rows(self, keep: list[bool]) -> None:
        """Keep the rows of the batch whose entry is true."""
        if all(keep):
            return
        places = [place for place, on in enumerate(keep) if on]
        self._rows = [self._rows[place] for place in places]
        self._states = self._states.rows(places) if places and self._states is not None else None

    def _read_piece(self, reading: _Reading) -> None:
        """Read the next piece of a text. After the last one, the job joins the batch."""
        job = reading.job
        tokens = torch.tensor([job.tokens[reading.pieces.popleft()]], device=self.model.device)
        found = read(self.model, tokens, reading.state, memory_mode=job.memory_mode)
        if found.diverged:
            raise DivergedError("memory: expected finite numbers, got a memory that diverged in this text")
        self.tokens_read += tokens.shape[1]
        reading.state = found.state
        if reading.pieces:
            self._reading.append(reading)
            return
        answer = Answer(self.tokenizer, job.sampling, draw_seed(job.sampling))
        if answer.finish_reason is not None:  # nothing to generate
            self._finish(job, answer, found.state)
            return
        row = _Row(job, answer, self._check_logits(self.model.logits(found.last))[0])
        self._rows.append(row)
        self._states = found.state if self._states is None else State.concat([self._states, found.state])

    def _step(self) -> None:
        """Choose a token for each row and read the tokens of the rows that continue."""
        chosen = [row.answer.choose(row.logits) for row in self._rows]
        ended = [token == self.tokenizer.end for token in chosen]
        assert self._states is not None
        for place, row in enumerate(self._rows):
            if ended[place]:
                text = row.answer.push(chosen[place])
                self._finish(row.job, row.answer, self._states.rows([place]), text)
        self._keep_rows([not each for each in ended])
        chosen = [token for token, each in zip(chosen, ended, strict=True) if not each]
        # A batch has one memory mode.
        for mode in dict.fromkeys(row.job.memory_mode for row in self._rows):
            self._read_tokens(
                [place for place, row in enumerate(self._rows) if row.job.memory_mode == mode], chosen
            )
        finished = []
        for place, (row, token) in enumerate(zip(self._rows, chosen, strict=True)):
            if bool(self._states.diverged[place].any()):
                row.job.deliver(DivergedError("memory: expected finite numbers, got a memory that diverged"))
                finished.append(True)
                continue
            self.tokens_generated += 1
            text = row.answer.push(token)
            finished.append(row.answer.finish_reason is not None)
            if finished[-1]:
                self._finish(row.job, row.answer, self._states.rows([place]), text)
            elif text:
                row.job.deliver(text)
        self._keep_rows([not each for each in finished])

    def _read_tokens(self, places: list[int], chosen: list[int]) -> None:
        """Read one token in each of the rows at `places`, and set their states and logits."""
        assert self._states is not None
        tokens = torch.tensor(chosen, device=self.model.device).unsqueeze(-1)
        mask = None
        if len(places) < len(self._rows):
            mask = torch.zeros_like(tokens, dtype=torch.bool)
            mask[places] = True
        trace = self.model.trace(
            tokens, self._states, mask=mask, memory_mode=self._rows[places[0]].job.memory_mode
        )
        logits = self.model.logits(trace.hidden[:, -1])[:, : self.tokenizer.vocabulary].cpu()
        self._states = trace.state
        for place in places:
            self._rows[place].logits = logits[place]

    def _check_logits(self, logits: Tensor) -> Tensor:
        """Return the logits of all tokens of the tokenizer ``[b v]`` on the CPU. Raises an error if they are
        not finite.
        """
        logits = logits[:, : self.tokenizer.vocabulary].cpu()
        if not bool(logits.isfinite().all()):
            raise ValueError(
                "model: expected finite logits, got infinite or NaN ones; its weights are damaged"
            )
        return logits

    def _finish(self, job: Job, answer: Answer, state: State, text: str = "") -> None:
        """Deliver the last piece of text and the result of a job."""
        if text:
            job.deliver(text)
        reason = answer.finish_reason
        assert reason is not None
        job.deliver(Result(answer.text, len(job.tokens), len(answer.tokens), reason, state))
