"""Answers to requests: which memory a request continues, what of it is still to be read, and the new version."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

from remanence.inference.chat import Turns
from remanence.inference.sampling import FinishReason, Sampling
from remanence.inference.sentences import SAMPLING, StoresSentences
from remanence.inference.session import Session
from remanence.io.files import canonical
from remanence.serve.access import Access
from remanence.serve.database import Answer, ConflictError, Version, new_id
from remanence.serve.engine import BusyError, Engine, Event, Job, Result, TimeLimitError
from remanence.serve.memories import Memories, transcripts
from remanence.serve.metrics import Metrics

T = TypeVar("T")
Message = Mapping[str, str]
"""A message of a conversation, with a `role` and a `content`."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A request for an answer.

    Attributes:
        owner: whose memories it can name.
        memory: the name or identifier of the memory that it continues, which is created if it does not exist.
        version: instead, the version that it continues. If it is not the newest of its memory, the answer becomes a
            branch.
        messages: the messages of the conversation. Those that the memory has read are not read again.
        text: instead, a text to read as it is.
        sampling: fields of `Sampling` that differ from the default.
        is_kept: whether a memory is created if neither `memory` nor `version` is given.
        key: the `Idempotency-Key` of the request: one with the same key is not read again, but gets the same answer.
    """

    owner: str
    memory: str | None = None
    version: str | None = None
    messages: Sequence[Message] = ()
    text: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    is_kept: bool = False
    key: str | None = None

    @property
    def digest(self) -> str:
        """The digest of all that determines the answer."""
        messages = [dict(each) for each in self.messages]
        return _digest([self.memory, self.version, messages, self.text, dict(self.sampling)])

    @property
    def key_digest(self) -> str | None:
        """The digest of the key, which is what is stored."""
        return None if self.key is None else _digest(self.key)

    @property
    def has_answers(self) -> bool:
        """Whether the messages contain earlier answers, so that they are a whole conversation."""
        return any(each["role"] == "assistant" for each in self.messages)


class Started(NamedTuple):
    """A request whose turn has come: its version will have this identifier, or has it, if the request was answered
    before.
    """

    version: str
    is_repeated: bool = False


class Answered(NamedTuple):
    """The end of an answer, which is on disk if it belongs to a memory.

    version, memory
        The identifiers of the new version and of its memory; None if nothing is kept.
    tokens_read, tokens_generated
        The number of tokens of what was read for this request, and of the answer.
    """

    text: str
    finish_reason: FinishReason
    tokens_read: int
    tokens_generated: int
    version: Version | None


def _digest(content: object) -> str:
    return hashlib.sha256(canonical(content)).hexdigest()


class _Opened(NamedTuple):
    """What a request continues: a session, the version that it is at, and what is to be read."""

    session: Session
    parent: Version | None
    tokens: list[int]
    messages: int
    digest: str


class Service:
    """Answers requests: ``async for event in service.answer(turn)``.

    Args:
        engine: reads and generates.
        memories: the memories of all owners.
        access: the limits of owners.
        metrics: counts what is done.
    """

    def __init__(self, engine: Engine, memories: Memories, access: Access, metrics: Metrics) -> None:
        self.engine, self.memories, self.access, self.metrics = engine, memories, access, metrics
        self.turns = Turns(engine.tokenizer)
        self.lists_sentences = isinstance(engine.model, StoresSentences)
        self.sampling = SAMPLING if self.lists_sentences else Sampling()
        self.num_requests = 0
        """The number of requests for answers that are under way or wait for their turn."""
        self._rows = asyncio.Semaphore(engine.max_rows)
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}
        """For each memory in use, its lock, and the number of requests that hold it or wait for it."""

    # One request at a time for each memory, and as many at a time as the engine has rows.

    @asynccontextmanager
    async def locked(self, owner: str, memory: str) -> AsyncIterator[None]:
        """Wait until no other request of this server uses a memory."""
        found = await asyncio.to_thread(self.memories.database.memory, owner, memory)
        name = found.id if found is not None else f"{owner}\0{memory}"
        lock, users = self._locks.get(name, (asyncio.Lock(), 0))
        self._locks[name] = lock, users + 1
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks[name]
            if users > 1:
                self._locks[name] = lock, users - 1
            else:
                del self._locks[name]

    @asynccontextmanager
    async def _turn(self, owner: str, memory: str | None, deadline: float) -> AsyncIterator[None]:
        """Wait for the memory, if one is given, and for a row of the engine. Raises `BusyError` if too many wait."""
        most = self.engine.max_rows + self.access.limits.max_waiting
        if self.num_requests >= most:
            raise BusyError(f"server: {most} requests are under way already; send this one again later")
        self.num_requests += 1
        try:
            async with AsyncExitStack() as held:
                try:
                    async with asyncio.timeout(deadline - time.monotonic()):
                        if memory is not None:
                            await held.enter_async_context(self.locked(owner, memory))
                        await self._rows.acquire()
                        held.callback(self._rows.release)
                except TimeoutError:
                    raise TimeLimitError(
                        "request: expected its turn within the time limit, got none"
                    ) from None
                yield
        finally:
            self.num_requests -= 1

    # Answers.

    async def answer(self, turn: Turn) -> AsyncGenerator[Started | str | Answered]:
        """Yield `Started` when the turn of a request has come, then the pieces of the answer, then `Answered`. A new
        version is on disk then. If the iteration is left early, the memory is as it was before. A request that was
        answered before gets the same answer, and changes nothing.
        """
        begun: float | None = time.monotonic()
        deadline = time.monotonic() + self.access.limits.timeout
        sampling = replace(self.sampling, **turn.sampling)
        async with self._turn(turn.owner, turn.memory, deadline):
            if (repeated := await asyncio.to_thread(self._repeated, turn)) is not None:
                version, known = repeated
                yield Started(version.id, is_repeated=True)
                yield known.text
                reason = cast(FinishReason, known.finish_reason)
                yield Answered(known.text, reason, known.tokens_read, known.tokens_generated, version)
                return
            opened = await asyncio.to_thread(self._open, turn)
            self.access.check_tokens(turn.owner, len(opened.tokens))
            identifier = new_id("ver")
            yield Started(identifier)
            result: Result | None = None
            async with aclosing(self._generate(opened, sampling, deadline)) as events:
                async for event in events:
                    if isinstance(event, Result):
                        result = event
                    else:
                        if begun is not None:
                            self.metrics.first_token.observe(time.monotonic() - begun)
                            begun = None
                        yield event
            assert result is not None
            self.access.charge(turn.owner, result.tokens_read + result.tokens_generated)
            committed = None
            if turn.is_kept or turn.memory is not None or turn.version is not None:
                with self.metrics.commit.time():
                    committed = await uncancelled(self._commit, turn, opened, result, identifier)
            yield Answered(
                result.text, result.finish_reason, result.tokens_read, result.tokens_generated, committed
            )

    def _repeated(self, turn: Turn) -> tuple[Version, Answer] | None:
        """The answer to a request that was answered before. Without a key, it is recognised if it is a whole
        conversation, whose answer is the newest of the memory. (A single message can be meant to be read twice.)
        """
        if turn.key_digest is not None:
            answer = self.memories.database.answer_to(turn.owner, turn.key_digest)
            if answer is not None and answer.request != turn.digest:
                raise ValueError("Idempotency-Key: expected a new one for a new request, got that of another")
        elif turn.memory is not None and turn.has_answers:
            memory = self.memories.find_existing(turn.owner, turn.memory)
            answer = None if memory is None else self.memories.database.answer_of(memory.head)
            if answer is not None and answer.request != turn.digest:
                answer = None
        else:
            answer = None
        return None if answer is None else (self.memories.find_version(turn.owner, answer.version), answer)

    def _open(self, turn: Turn) -> _Opened:
        """Find what a request continues, and what it has to read."""
        parent = None
        if turn.version is not None:
            parent = self.memories.find_version(turn.owner, turn.version)
        elif turn.memory is not None:
            memory = self.memories.find_existing(turn.owner, turn.memory)
            parent = None if memory is None else self.memories.head(memory)
        if parent is None and (turn.memory is not None or turn.is_kept):
            self.access.check_memories(turn.owner)
        if parent is not None or turn.memory is not None or turn.is_kept:
            self.access.check_bytes(turn.owner)
        if parent is None:
            session = self.memories.new_session()
        else:
            with self.metrics.restore.time():
                session = self.memories.load(parent)
        if turn.text is not None:
            tokens = self._after_answer(session) + self.engine.tokenizer.encode(turn.text)
            return _Opened(session, parent, tokens, 0, "")
        before = parent.transcript if turn.version is not None and parent is not None else ""
        digests = transcripts(turn.messages, before)
        count, read = len(turn.messages), 0
        if turn.version is not None and parent is not None:
            count += parent.messages
        elif parent is not None:
            read = self.memories.num_read(parent, digests)
        # A model without a memory of sentences does not tell whether its last tokens were generated.
        continues = session.has_answered or bool(
            parent is not None and parent.messages and not self.lists_sentences
        )
        text = self.turns.conversation(turn.messages[read:], continues=continues)
        return _Opened(session, parent, self.engine.tokenizer.encode(text), count, digests[-1])

    def _after_answer(self, session: Session) -> list[int]:
        """The tokens that end an answer before text that does not belong to it."""
        model = session.model
        if not session.has_answered or not isinstance(model, StoresSentences):
            return []
        return model.end_of_answer(session.state)

    async def _generate(
        self, opened: _Opened, sampling: Sampling, deadline: float
    ) -> AsyncGenerator[str | Result]:
        """Run a job and yield what it delivers. If the iteration is left early, the job is cancelled."""
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def deliver(event: Event) -> None:
            with suppress(RuntimeError):  # the server has stopped
                loop.call_soon_threadsafe(events.put_nowait, event)

        if not opened.tokens:
            raise ValueError(
                "messages: expected a text to read, got one of which the tokenizer leaves nothing"
            )
        job = Job(opened.tokens, opened.session.state, sampling, deliver, deadline=deadline)
        self.engine.submit(job)
        try:
            while True:
                event = await events.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if isinstance(event, Result):
                    return
        finally:
            job.cancel()

    def _commit(self, turn: Turn, opened: _Opened, result: Result, identifier: str) -> Version:
        """Save the state after an answer as a new version."""
        session, parent = opened.session, opened.parent
        session.advance(result.state, is_answer=result.tokens_generated > 0)
        messages, digest = opened.messages, opened.digest
        if turn.text is None:
            message = {"role": "assistant", "content": result.text}
            (digest,) = transcripts([message], digest)
            messages += 1
        created = None
        if parent is None:
            created = self.memories.database.create(turn.owner, turn.memory)
            parent = self.memories.head(created)
        answer = Answer(
            identifier, turn.owner, turn.key_digest, turn.digest, result.text, result.finish_reason, result.tokens_read,
            result.tokens_generated,
        )  # fmt: skip
        save = partial(
            self.memories.commit,
            parent,
            session,
            messages=messages,
            digest=digest,
            identifier=identifier,
            answer=answer,
        )
        if turn.version is None:
            try:
                return save()
            except ConflictError:
                if created is not None and created.name is None:  # no other request knows it
                    self.memories.delete(created)
                raise
        memory = self.memories.find(turn.owner, parent.memory)
        if memory.head == parent.id:
            with suppress(ConflictError):  # another request has continued from the same version
                return save()
        return save(moves_head=False)


async def uncancelled(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a thread, and wait for its end even if this task is cancelled meanwhile."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with suppress(Exception):
            await task
        raise
