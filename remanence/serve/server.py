"""A server in one process: it opens the memories, starts the engine, and runs until it is told to stop."""

from __future__ import annotations

import errno
import logging
import socket
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn

from remanence.inference.session import Session
from remanence.runtime.terminal import echo
from remanence.serve.access import Access, Limits
from remanence.serve.app import make_app
from remanence.serve.database import Database
from remanence.serve.engine import Engine
from remanence.serve.gate import LOG
from remanence.serve.memories import UPLOADS, Memories
from remanence.serve.metrics import Metrics
from remanence.serve.service import Service
from remanence.serve.store import open_store

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""The names of the local machine."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a server.

    Attributes:
        name: the name of the model in requests.
        folder: where memories are kept.
        host: the address to listen at.
        hosts: further names under which the server may be addressed.
        max_rows: largest number of requests that are answered at the same time.
        cache_bytes: the size of the memories that are kept in RAM between requests.
        keep_versions: the number of versions of a memory that are kept.
        grace: seconds in which answers under way are completed when the server stops.
        database: the URL of a PostgreSQL; None: a SQLite file in the folder.
        store: the folder or the URL of the files of versions; None: in the folder.
        limits: how much a request and an owner may use.
    """

    name: str
    folder: Path
    host: str = "127.0.0.1"
    hosts: tuple[str, ...] = ()
    max_rows: int = 16
    cache_bytes: int = 2**30
    keep_versions: int = 8
    grace: float = 30.0
    database: str | None = None
    store: str | None = None
    limits: Limits = field(default_factory=Limits)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in LOOPBACK


class Server:
    """Everything that a server has: ``with Server(session, settings) as server: server.run(listen(host, port))``.

    Args:
        session: a session with the model to serve.
        settings: the settings.
    """

    def __init__(self, session: Session, settings: Settings) -> None:
        self.settings = settings
        limits, folder = settings.limits, settings.folder
        store = None if settings.store is None else open_store(settings.store, folder / UPLOADS)
        self.memories = Memories(
            session.model,
            folder,
            tokenizer=session.tokenizer,
            cache_bytes=settings.cache_bytes,
            keep_versions=settings.keep_versions,
            database=open_database(folder, settings.database),
            store=store,
        )
        try:
            check_keys(self.memories.database, settings)
        except ValueError:
            self.memories.close()
            raise
        self.access = Access(self.memories.database, limits)
        self.engine = Engine(session.model, session.tokenizer, max_rows=settings.max_rows)
        self.service = Service(self.engine, self.memories, self.access, Metrics())
        hosts = (*LOOPBACK, *settings.hosts) if settings.is_local else None
        self._server: uvicorn.Server | None = None
        self.app = make_app(self.service, self.access, settings.name, hosts=hosts)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.engine.close()
        self.memories.close()

    def run(self, listener: socket.socket) -> None:
        """Serve at a socket until `stop`, SIGINT or SIGTERM, then complete the answers under way, for at most `grace`
        seconds.
        """
        start_log()
        config = uvicorn.Config(
            self.app,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_graceful_shutdown=max(1, round(self.settings.grace)),
        )
        self._server = uvicorn.Server(config)
        try:
            self._server.run(sockets=[listener])
        except KeyboardInterrupt:  # uvicorn raises the signal again when it has stopped
            if not self._server.started:
                raise

    def stop(self) -> None:
        """Let `run` return, from another thread."""
        if self._server is not None:
            self._server.should_exit = True


def open_database(folder: Path, url: str | None) -> Database:
    """Return the database at a URL of PostgreSQL, or that in a folder."""
    if url is None:
        return Database(folder / "memories.sqlite")
    if not url.startswith(("postgresql://", "postgres://")):
        raise ValueError("--database: expected a URL that begins with postgresql://, got another")
    from remanence.serve.postgres import PostgresDatabase

    return PostgresDatabase(url)


def check_keys(database: Database, settings: Settings) -> None:
    """Raise an error for a server without API keys that others can reach."""
    if not settings.is_local and not database.has_keys():
        raise ValueError(
            f"--host: expected an API key for a server that others can reach, got {settings.host} and no key; "
            "remanence keys add NAME makes one"
        )


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except UnicodeError:
        raise ValueError(f"--host: expected an address of this machine, got {host}") from None
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL or (error.errno or 0) < 0:  # negative: no such name
            raise ValueError(f"--host: expected an address of this machine, got {host}") from None
        why = error.strerror or error
        raise ValueError(f"--port: expected a free one of {host}, got {port} ({why})") from None


def address(listener: socket.socket) -> str:
    """Return the URL of a socket."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class _EchoHandler(logging.Handler):
    """Writes the log to stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        echo(record.getMessage(), error=True)


def start_log() -> None:
    """Write the log of requests to stderr."""
    if not LOG.handlers:
        LOG.addHandler(_EchoHandler())
        LOG.setLevel(logging.INFO)
        LOG.propagate = False
