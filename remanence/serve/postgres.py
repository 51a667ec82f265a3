"""The tables of `database` in PostgreSQL, for servers on several machines."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from remanence.runtime.errors import first_line
from remanence.serve.database import SCHEMA_VERSION, TABLES, Database

try:
    import psycopg
except ImportError as error:
    raise ImportError(
        f"--database needs the extra 'postgres': pip install 'remanence[postgres]' ({error})"
    ) from None


class _Connection:
    """A connection that takes queries as SQLite does."""

    def __init__(self, inner: psycopg.Connection) -> None:
        self.inner = inner

    def execute(self, query: str, values: Sequence[object] = ()) -> psycopg.Cursor:
        return self.inner.execute(query.replace("?", "%s").encode(), values)


class PostgresDatabase(Database):
    """Memories, versions and API keys in PostgreSQL: ``PostgresDatabase("postgresql://user@host/name")``."""

    conflicts = (psycopg.errors.IntegrityError,)

    def __init__(self, url: str) -> None:
        self.url = url
        self._lock = threading.RLock()
        self._open = self._connect()
        with self._transaction("schema") as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS schema_versions (version BIGINT NOT NULL)")
            found = connection.execute("SELECT MAX(version) FROM schema_versions").fetchone()[0]
            if found is not None and found > SCHEMA_VERSION:
                raise ValueError(
                    f"--database: expected schema {SCHEMA_VERSION} or older, got {found}; a newer remanence made it"
                )
            for statement in filter(str.strip, TABLES.split(";")):
                connection.execute(statement)
            if found != SCHEMA_VERSION:
                connection.execute("INSERT INTO schema_versions VALUES (?)", (SCHEMA_VERSION,))

    def _connect(self) -> psycopg.Connection:
        try:
            return psycopg.connect(self.url, autocommit=True, connect_timeout=10)
        except psycopg.Error as error:
            raise ValueError(
                f"--database: expected a PostgreSQL that can be reached, got another ({first_line(error)})"
            ) from None

    def _connected(self) -> psycopg.Connection:
        """The connection, which is opened again if it was lost."""
        if self._open.closed:
            self._open = self._connect()
        return self._open

    def close(self) -> None:
        with self._lock:
            self._open.close()

    @contextmanager
    def _transaction(self, memory: str = "") -> Iterator[Any]:
        with self._lock:
            inner = self._connected()
            with inner.transaction():
                # Until the end of the transaction, also against other servers.
                inner.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", (memory,))
                yield _Connection(inner)

    def _rows(self, query: str, *values: object) -> list[tuple]:
        with self._lock:
            return _Connection(self._connected()).execute(query, values).fetchall()

    def _erase(self) -> None:
        """PostgreSQL removes deleted rows from its files by itself (autovacuum)."""
