"""The engine: a thread that reads texts and generates answers for many sessions at once.

Rows join and leave the batch between two steps. Long texts are read in pieces between the steps, so that answers under
way do not wait for them. Each row has what it would have alone, up to the rounding of batched products.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
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
from remanence.serve.batch import Batch
from remanence.tokenizers.tokens import Tokenizer

JOIN_STEPS = 8
"""Number of steps after which rows join a batch although more texts are being read that could join with them."""


class BusyError(ValueError):
    """The queue is full: the request can be sent again later."""


class CancelledError(ValueError):
    """The request was cancelled, or the engine was closed, before its answer was complete."""


class TimeLimitError(CancelledError):
    """The answer was not complete within the time limit of the request."""


class Result(NamedTuple):
    """The result of a job.

    text
        The answer.
    tokens_read, tokens_generated
        The number of tokens of the prompt and of the answer.
    finish_reason
        Why the answer ended.
    state
        The state after the prompt and the answer, without the fields that can be computed from the others.
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

    def __len__(self) -> int:
        """The number of tokens of the next piece."""
        return self.pieces[0].stop - self.pieces[0].start


class _Row:
    """A job whose answer is being generated: one row of a batch."""

    def __init__(self, job: Job, answer: Answer, logits: Tensor) -> None:
        self.job, self.answer, self.logits = job, answer, logits


class Engine:
    """Runs jobs with one model: ``with Engine(model, tokenizer) as engine: engine.submit(job)``.

    Args:
        model: the model of all sessions. Nothing else may use it meanwhile except from other threads.
        tokenizer: its tokenizer.
        max_rows: largest number of jobs that are read or answered at the same time.
        max_waiting: largest number of jobs that wait for a row; `submit` refuses more.
        piece: number of tokens of texts that are read between two steps of the answers.
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
        self._joining: list[tuple[_Row, State]] = []
        """Rows whose text has been read, with their states, that are not in a batch yet."""
        self._batches: dict[Mode, Batch[_Row]] = {}
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
    def is_alive(self) -> bool:
        """Whether the engine's thread is alive, which also completes jobs while the engine is closed."""
        return self._thread.is_alive()

    @property
    def num_waiting(self) -> int:
        """The number of jobs that wait for a row."""
        return len(self._waiting)

    @property
    def num_active(self) -> int:
        """The number of jobs that are being read or answered."""
        rows = sum(len(batch.rows) for batch in list(self._batches.values()))
        return len(self._reading) + len(self._joining) + rows

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
            self._drop_ended()
            if self._reading:
                self._read_some()
            self._join()
            for batch in list(self._batches.values()):
                if batch.rows:
                    self._guard([row.job for row in batch.rows], partial(self._step, batch))
        closed = CancelledError("engine: closed before the answer was complete")
        jobs = [*self._waiting, *self._jobs()]
        self._waiting.clear()
        self._drop(jobs)
        for job in jobs:
            job.deliver(closed)

    def _jobs(self) -> list[Job]:
        """The jobs that are being read or answered."""
        rows = [row for batch in self._batches.values() for row in batch.rows]
        return [
            *(each.job for each in self._reading),
            *(row.job for row, _ in self._joining),
            *(row.job for row in rows),
        ]

    def _drop(self, jobs: list[Job]) -> None:
        """Drop jobs that are being read or answered."""
        self._reading = deque(each for each in self._reading if each.job not in jobs)
        self._joining = [each for each in self._joining if each[0].job not in jobs]
        for batch in self._batches.values():
            batch.keep([row.job not in jobs for row in batch.rows])

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
            self._drop(jobs)
            for job in jobs:
                job.deliver(error)

    def _drop_ended(self) -> None:
        """Drop jobs that were cancelled or are past their deadline, and deliver an error to each."""
        now = time.monotonic()
        ended = lambda job: job.is_cancelled or (job.deadline is not None and now > job.deadline)
        dropped = [job for job in self._jobs() if ended(job)]
        if dropped:
            self._drop(dropped)
        with self._changed:
            gone = [job for job in self._waiting if ended(job)]
            for job in gone:
                self._waiting.remove(job)
        for job in dropped + gone:
            if job.is_cancelled:
                job.deliver(CancelledError("request: cancelled"))
            else:
                job.deliver(TimeLimitError("request: expected an answer within its time limit, got none"))

    def _read_some(self) -> None:
        """Read the next pieces of texts, of as many as together have at most `piece` tokens with padding."""
        group = [self._reading.popleft()]
        mode, longest = group[0].job.memory_mode, len(group[0])
        while self._reading and self._reading[0].job.memory_mode == mode:
            longest = max(longest, len(self._reading[0]))
            if longest * (len(group) + 1) > self.piece:
                break
            group.append(self._reading.popleft())
        is_read = False
        if len(group) > 1:
            # An error of one of them is found below.
            with suppress(Exception), torch.no_grad(), threads_for(self.model):
                self._read_pieces(group)
                is_read = True
        for reading in [] if is_read else group:
            self._guard([reading.job], partial(self._read_pieces, [reading]))

    def _read_pieces(self, group: list[_Reading]) -> None:
        """Read the next piece of each text. After its last one, a job is ready to join a batch."""
        pieces = [reading.job.tokens[reading.pieces[0]] for reading in group]
        longest = max(map(len, pieces))
        device = self.model.device
        tokens = torch.tensor([piece + [0] * (longest - len(piece)) for piece in pieces], device=device)
        mask, state = None, group[0].state
        if len(group) > 1:
            lengths = torch.tensor([[len(piece)] for piece in pieces], device=device)
            mask = torch.arange(longest, device=device) < lengths
            state = State.concat([reading.state for reading in group])
        found = read(self.model, tokens, state, mask=mask, memory_mode=group[0].job.memory_mode)
        flags = found.state.diverged.tolist() if found.diverged else [False] * len(group)
        logits = self.model.logits(found.last)[:, : self.tokenizer.vocabulary].cpu()
        for place, (reading, piece) in enumerate(zip(group, pieces, strict=True)):
            own = found.state if len(group) == 1 else found.state.rows([place])
            reading.pieces.popleft()
            self.tokens_read += len(piece)
            if flags[place]:
                text = "memory: expected finite numbers, got a memory that diverged in this text"
                reading.job.deliver(DivergedError(text))
            else:
                self._after_piece(reading, own, logits[place])

    def _after_piece(self, reading: _Reading, state: State, logits: Tensor) -> None:
        """Continue with the next piece of a text, or with its answer."""
        reading.state, job = state, reading.job
        if reading.pieces:
            self._reading.append(reading)
            return
        answer = Answer(self.tokenizer, job.sampling, draw_seed(job.sampling))
        if answer.finish_reason is not None:  # nothing to generate
            self._finish(job, answer, state)
        else:
            self._joining.append((_Row(job, answer, logits), state))

    def _join(self) -> None:
        """Let rows join their batches, all at once: the states of a batch are copied when rows join it."""
        for mode in dict.fromkeys(row.job.memory_mode for row, _ in self._joining):
            batch = self._batches.setdefault(mode, Batch(self.model, mode))
            if batch.rows and self._reading and batch.steps < JOIN_STEPS:
                continue
            pairs = [each for each in self._joining if each[0].job.memory_mode == mode]
            rows, states = [row for row, _ in pairs], [state for _, state in pairs]
            join = partial(batch.join, rows, states)
            self._guard([row.job for row in rows], join)
            self._joining = [each for each in self._joining if each[0].job.memory_mode != mode]

    def _step(self, batch: Batch[_Row]) -> None:
        """Choose a token for each row and read the tokens of the rows that continue."""
        self._drop_infinite(batch)
        chosen = [row.answer.choose(row.logits) for row in batch.rows]
        continues = [token != self.tokenizer.end for token in chosen]
        diverged = [False] * len(chosen)
        if any(continues):
            logits, diverged = batch.step(chosen, continues)
            for row, own in zip(batch.rows, logits, strict=True):
                row.logits = own[: self.tokenizer.vocabulary]
        finished: dict[int, str] = {}
        for place, (row, token) in enumerate(zip(batch.rows, chosen, strict=True)):
            if diverged[place] and continues[place]:
                row.job.deliver(DivergedError("memory: expected finite numbers, got a memory that diverged"))
                continue
            self.tokens_generated += continues[place]
            text = row.answer.push(token)
            if row.answer.finish_reason is not None:
                finished[place] = text
            elif text:
                row.job.deliver(text)
        if finished:
            states = batch.states(list(finished))
            for number, (place, text) in enumerate(finished.items()):
                row = batch.rows[place]
                self._finish(row.job, row.answer, states.rows([number]), text)
        batch.keep([not bad and place not in finished for place, bad in enumerate(diverged)])

    def _drop_infinite(self, batch: Batch[_Row]) -> None:
        """Drop rows whose logits are not finite, and deliver an error to each."""
        finite = [bool(row.logits.isfinite().all()) for row in batch.rows]
        for row, fits in zip(batch.rows, finite, strict=True):
            if not fits:
                row.job.deliver(
                    ValueError(
                        "model: expected finite logits, got infinite or NaN ones; its weights are damaged"
                    )
                )
        batch.keep(finite)

    def _finish(self, job: Job, answer: Answer, state: State, text: str = "") -> None:
        """Deliver the last piece of text and the result of a job."""
        if text:
            job.deliver(text)
        reason = answer.finish_reason
        assert reason is not None
        job.deliver(Result(answer.text, len(job.tokens), len(answer.tokens), reason, state.saved()))
