"""The order of versions: which memories an owner has, which versions each memory has had, and with which answers; and
API keys.

A version never changes. A memory names its newest version, its head, and is moved to another by compare-and-swap, so
that two requests that started from the same version cannot both succeed. A change is on disk when its call returns.
The tables are in a SQLite file, or in PostgreSQL (`postgres`).
"""

from __future__ import annotations

import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

TABLES = """
CREATE TABLE IF NOT EXISTS memories (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, name TEXT, head TEXT NOT NULL, created DOUBLE PRECISION NOT NULL,
    UNIQUE (owner, name)
);
CREATE TABLE IF NOT EXISTS versions (
    id TEXT PRIMARY KEY, memory TEXT NOT NULL REFERENCES memories (id) ON DELETE CASCADE, parent TEXT,
    tokens BIGINT NOT NULL, bytes BIGINT NOT NULL, messages BIGINT NOT NULL, transcript TEXT NOT NULL,
    created DOUBLE PRECISION NOT NULL
);
CREATE INDEX IF NOT EXISTS versions_of_memory ON versions (memory, created);
CREATE TABLE IF NOT EXISTS keys (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, digest TEXT NOT NULL UNIQUE, created DOUBLE PRECISION NOT NULL
);
CREATE TABLE IF NOT EXISTS answers (
    version TEXT PRIMARY KEY REFERENCES versions (id) ON DELETE CASCADE, owner TEXT NOT NULL, key TEXT,
    request TEXT NOT NULL, text TEXT NOT NULL, finish_reason TEXT NOT NULL, tokens_read BIGINT NOT NULL,
    tokens_generated BIGINT NOT NULL, UNIQUE (owner, key)
);
"""
SCHEMA_VERSION = 2
"""The version of the tables, saved in the file."""
WAIT_SECONDS = 30.0
"""How long a change waits for that of another process."""


class ConflictError(ValueError):
    """Another request changed the memory first."""


class Version(NamedTuple):
    """One version of a memory.

    id
        Its name, which is also that of its file. The first version of a memory has no file: nothing was read.
    memory, parent
        The memory that it belongs to, and the version that it was made from.
    tokens, bytes
        The number of tokens read and generated so far, and the size of the file.
    messages, transcript
        The number of chat messages in the conversation so far, and a digest of them.
    created
        The time in seconds since 1970.
    """

    id: str
    memory: str
    parent: str | None
    tokens: int
    bytes: int
    messages: int
    transcript: str
    created: float


class Memory(NamedTuple):
    """A memory: its owner, the name that the owner gave it, and its newest version."""

    id: str
    owner: str
    name: str | None
    head: str
    created: float


class Key(NamedTuple):
    """An API key: its name, whose memories it opens, the digest of its text, and when it was made. The text is not
    stored.
    """

    id: str
    owner: str
    digest: str
    created: float


class Answer(NamedTuple):
    """An answer, kept as long as its version, for a client that sends the same request again.

    version
        The version that it made.
    owner, key
        Who asked, and the digest of the request's ``Idempotency-Key``; None without.
    request
        The digest of the request.
    text, finish_reason, tokens_read, tokens_generated
        What was answered.
    """

    version: str
    owner: str
    key: str | None
    request: str
    text: str
    finish_reason: str
    tokens_read: int
    tokens_generated: int


class Usage(NamedTuple):
    """The number of memories of an owner, and the size of all their files."""

    memories: int
    bytes: int


def new_id(kind: str) -> str:
    """Return a new identifier that cannot be guessed: ``mem_...`` or ``ver_...``."""
    return f"{kind}_{secrets.token_hex(16)}"


class Database:
    """Memories, versions and API keys in one SQLite file. Its methods may be called in any thread."""

    conflicts: tuple[type[Exception], ...] = (sqlite3.IntegrityError,)
    """The errors of a row that contradicts another."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.RLock()
        self._connection = sqlite3.connect(
            path, check_same_thread=False, isolation_level=None, timeout=WAIT_SECONDS
        )
        self._write_ahead()
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.execute("PRAGMA foreign_keys = ON")
        self._connection.execute("PRAGMA secure_delete = ON")
        found = self._connection.execute("PRAGMA user_version").fetchone()[0]
        if found > SCHEMA_VERSION:
            raise ValueError(
                f"{path}: expected schema {SCHEMA_VERSION} or older, got {found}; a newer remanence made it"
            )
        with self._transaction() as connection:
            for statement in TABLES.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _write_ahead(self) -> None:
        """Keep changes in a log beside the file. SQLite itself does not wait if another process does the same."""
        ends = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError:
                if time.monotonic() > ends:
                    raise
                time.sleep(0.01)

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    @contextmanager
    def _transaction(self, memory: str = "") -> Iterator[Any]:
        """Run statements that take effect together, or not at all, and not beside others for the same memory. Yields
        an object with the method ``execute(query, values)``.
        """
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    def _rows(self, query: str, *values: object) -> list[tuple]:
        with self._lock:
            return self._connection.execute(query, values).fetchall()

    def _erase(self) -> None:
        """Remove deleted rows from the files."""
        with self._lock:  # the log has them, too
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def create(self, owner: str, name: str | None = None) -> Memory:
        """Create an empty memory. Raises `ConflictError` if the owner has one of this name."""
        now, memory = time.time(), new_id("mem")
        first = Version(new_id("ver"), memory, None, 0, 0, 0, "", now)
        try:
            with self._transaction() as connection:
                connection.execute(
                    "INSERT INTO memories VALUES (?, ?, ?, ?, ?)", (memory, owner, name, first.id, now)
                )
                connection.execute(f"INSERT INTO versions VALUES ({', '.join('?' * len(first))})", first)
        except self.conflicts:
            raise ConflictError(f"name: expected one that no memory has, got {name!r}") from None
        return Memory(memory, owner, name, first.id, now)

    def memory(self, owner: str, identifier: str) -> Memory | None:
        """Return an owner's memory by its identifier or name; None if the owner has no such memory."""
        found = self._rows(
            "SELECT * FROM memories WHERE owner = ? AND (id = ? OR name = ?)", owner, identifier, identifier
        )
        return Memory(*found[0]) if found else None

    def memories(self, owner: str) -> list[Memory]:
        """Return all memories of an owner, the oldest first."""
        return [
            Memory(*row)
            for row in self._rows("SELECT * FROM memories WHERE owner = ? ORDER BY created, id", owner)
        ]

    def version(self, owner: str, identifier: str) -> Version | None:
        """Return a version of one of the owner's memories; None if there is none."""
        found = self._rows(
            "SELECT versions.* FROM versions JOIN memories ON memories.id = memory WHERE owner = ? AND versions.id = ?",
            owner, identifier,
        )  # fmt: skip
        return Version(*found[0]) if found else None

    def versions(self, memory: str) -> list[Version]:
        """Return the versions of a memory, the oldest first."""
        return [
            Version(*row)
            for row in self._rows("SELECT * FROM versions WHERE memory = ? ORDER BY created, id", memory)
        ]

    def all_versions(self) -> set[str]:
        """Return the identifiers of all versions of all memories."""
        return {row[0] for row in self._rows("SELECT id FROM versions")}

    def commit(self, version: Version, expected_head: str | None, answer: Answer | None = None) -> None:
        """Add a version, with the answer that made it, and make it the head of its memory. Raises `ConflictError`,
        without any change, if the head is not `expected_head`, if the memory is gone, or if there is an answer with the
        same key. With None, the head is left as it is: a branch, whose parent must still be there.
        """
        with self._transaction(version.memory) as connection:
            if expected_head is None:
                parent = connection.execute("SELECT 1 FROM versions WHERE id = ?", (version.parent,))
                if parent.fetchone() is None:
                    raise ConflictError("version: it was deleted meanwhile")
            if expected_head is not None:
                changed = connection.execute(
                    "UPDATE memories SET head = ? WHERE id = ? AND head = ?",
                    (version.id, version.memory, expected_head),
                )
                if changed.rowcount != 1:
                    raise ConflictError(
                        "memory: another request has changed or deleted it; send this one again"
                    )
            try:
                connection.execute(f"INSERT INTO versions VALUES ({', '.join('?' * len(version))})", version)
            except self.conflicts:
                raise ConflictError("memory: it was deleted meanwhile") from None
            if answer is None:
                return
            try:
                connection.execute(f"INSERT INTO answers VALUES ({', '.join('?' * len(answer))})", answer)
            except self.conflicts:
                raise ConflictError(
                    "Idempotency-Key: a request with this one was answered meanwhile; send it again"
                ) from None

    def answer_to(self, owner: str, key: str) -> Answer | None:
        """Return the answer to an owner's request with this digest of a key; None if there is none."""
        found = self._rows("SELECT * FROM answers WHERE owner = ? AND key = ?", owner, key)
        return Answer(*found[0]) if found else None

    def answer_of(self, version: str) -> Answer | None:
        """Return the answer that a version was made with; None if there is none."""
        found = self._rows("SELECT * FROM answers WHERE version = ?", version)
        return Answer(*found[0]) if found else None

    def move_head(self, memory: str, expected_head: str, head: str) -> None:
        """Make another version of a memory its head. Raises `ConflictError` if the head is not `expected_head`."""
        with self._transaction(memory) as connection:
            changed = connection.execute(
                "UPDATE memories SET head = ? WHERE id = ? AND head = ? AND EXISTS "
                "(SELECT 1 FROM versions WHERE id = ? AND memory = memories.id)",
                (head, memory, expected_head, head),
            )
            if changed.rowcount != 1:
                raise ConflictError("memory: another request has changed or deleted it; send this one again")

    def usage(self, owner: str) -> Usage:
        """Return how much an owner has stored."""
        ((count,),) = self._rows("SELECT COUNT(*) FROM memories WHERE owner = ?", owner)
        ((size,),) = self._rows(
            "SELECT COALESCE(SUM(bytes), 0) FROM versions JOIN memories ON memories.id = memory WHERE owner = ?",
            owner,
        )
        return Usage(count, int(size))

    def delete(self, memory: str) -> list[str]:
        """Delete a memory with all its versions, and return their identifiers."""
        with self._transaction(memory) as connection:
            found = [
                row[0] for row in connection.execute("SELECT id FROM versions WHERE memory = ?", (memory,))
            ]
            connection.execute("DELETE FROM memories WHERE id = ?", (memory,))
        self._erase()
        return found

    def prune(self, memory: str, keep: int) -> list[str]:
        """Delete all versions of a memory except the newest `keep` and the head. Returns the identifiers of the
        deleted ones.
        """
        with self._transaction(memory) as connection:
            rows = connection.execute(
                "SELECT versions.id, head FROM versions JOIN memories ON memories.id = memory WHERE memory = ? "
                "ORDER BY versions.created DESC, versions.id", (memory,),
            ).fetchall()  # fmt: skip
            old = [identifier for identifier, head in rows[keep:] if identifier != head]
            for each in old:
                connection.execute("DELETE FROM versions WHERE id = ?", (each,))
        if not keep:
            self._erase()
        return old

    # API keys.

    def add_key(self, key: Key) -> None:
        """Add an API key."""
        with self._transaction() as connection:
            connection.execute("INSERT INTO keys VALUES (?, ?, ?, ?)", key)

    def all_keys(self) -> list[Key]:
        """Return all API keys, the oldest first."""
        return [Key(*row) for row in self._rows("SELECT * FROM keys ORDER BY created, id")]

    def has_keys(self) -> bool:
        """Whether there is any API key."""
        return bool(self._rows("SELECT 1 FROM keys LIMIT 1"))

    def key(self, digest: str) -> Key | None:
        """Return the API key with this digest; None if there is none."""
        found = self._rows("SELECT * FROM keys WHERE digest = ?", digest)
        return Key(*found[0]) if found else None

    def remove_key(self, identifier: str) -> bool:
        """Remove an API key. Returns whether there was one of this name."""
        with self._transaction() as connection:
            return connection.execute("DELETE FROM keys WHERE id = ?", (identifier,)).rowcount == 1
