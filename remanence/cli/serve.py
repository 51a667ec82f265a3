"""The commands of a server: serve, keys."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from remanence.cli.arguments import Device, Folder
from remanence.cli.chat import check_chat_model
from remanence.io.shipped import CHAT_MODEL, resolve_model_path
from remanence.io.user_data import make_data_folder
from remanence.runtime.terminal import echo

if TYPE_CHECKING:
    from remanence.serve.server import Settings


def data_folder(model: Path, data: Path | None) -> Path:
    """The folder in which a server keeps its memories. It is made so that only the user can read it."""
    if data is None:
        data = make_data_folder() / "serve" / model.resolve().name
    try:
        data.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ValueError(
            f"--data: expected a folder that can be made, got {data} ({error.strerror or error})"
        ) from None
    return data


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve a model over HTTP, in the form of OpenAI's API, with a memory for each user. Without MODEL,
    remanence-smollm2. The address has a web page, too. Ctrl-C completes the answers under way and ends the server.

    A request names its memory in the field `user` or the header X-Session-Id. Only this machine can reach the server,
    unless --host is given; then requests need an API key (remanence keys add NAME).
    """

    model: Folder = Path(CHAT_MODEL)
    """Model folder, or the name of a packaged model (remanence-small, remanence-smollm2)."""
    name: str | None = None
    """Name of the model in requests. Default: that of its folder."""
    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0: all of this machine."""
    port: int = 8000
    """Port to listen at; 0: any free one."""
    data: Path | None = None
    """Folder of the memories. Default: in the user's data folder, or in the folder that REMANENCE_DATA names."""
    database: str | None = None
    """PostgreSQL that has the order of versions and the keys, instead of a file in --data: postgresql://USER@HOST/NAME
    (extra `postgres`). Servers that share it and the files serve the same memories.
    """
    store: str | None = None
    """Folder of the files of memories, instead of one in --data, or a URL that fsspec opens (extra `store`):
    s3://BUCKET/FOLDER, gs://BUCKET/FOLDER.
    """
    replicas: int | None = None
    """Number of processes that answer, on this machine or on the Ray cluster that RAY_ADDRESS names (extra `ray`), each
    with a GPU if --device is one. On several machines, with --database and --store.
    """
    allow_host: tuple[str, ...] = ()
    """Further names by which this machine addresses the server, when it listens at 127.0.0.1."""
    rows: int = 16
    """Largest number of requests that are answered at the same time; others wait."""
    waiting: int = 64
    """Largest number of requests that wait; others are refused (503)."""
    cache_mb: int = 1024
    """Size of the memories that are kept in RAM between requests, in MB."""
    keep_versions: int = 8
    """Number of versions of each memory that are kept, to go back to."""
    max_memories: int = 10_000
    """Largest number of memories of an owner."""
    max_gb: float = 1024.0
    """Largest size of the files of an owner, in GB."""
    tokens_per_minute: int = 0
    """Number of tokens of an owner that are read and generated in a minute; 0: no limit."""
    max_body_kb: int = 1024
    """Largest size of a request, in KB."""
    max_upload_mb: int = 1024
    """Largest size of an uploaded memory file, in MB."""
    timeout: float = 300.0
    """Seconds after which a request is given up."""
    grace: float = 30.0
    """Seconds in which answers under way are completed when the server ends."""
    device: Device = "auto"
    """Device to run on."""

    def run(self) -> None:
        try:
            from remanence.serve.server import Server, Settings, address, listen
        except ImportError as error:
            raise ImportError(
                f"serve needs the extra 'serve': pip install 'remanence[serve]' ({error})"
            ) from None
        from remanence.cli.sessions import open_session
        from remanence.serve.access import Limits

        if not 0 <= self.port < 2**16:
            raise ValueError(f"--port: expected an integer from 0 to 65535, got {self.port}")
        self._check_positive()
        check_chat_model(self.model)
        limits = Limits(
            max_memories=self.max_memories,
            max_bytes=round(self.max_gb * 1e9),
            tokens_per_minute=self.tokens_per_minute,
            max_body=self.max_body_kb * 1000,
            max_upload=self.max_upload_mb * 1_000_000,
            timeout=self.timeout,
            max_waiting=self.waiting,
        )
        settings = Settings(
            name=self.name or self.model.resolve().name,
            folder=data_folder(self.model, self.data),
            host=self.host,
            hosts=tuple(name.lower() for name in self.allow_host),
            max_rows=self.rows,
            cache_bytes=self.cache_mb * 1_000_000,
            keep_versions=self.keep_versions,
            grace=self.grace,
            database=self.database,
            store=self.store,
            limits=limits,
        )
        if self.replicas is not None:
            self._run_replicas(settings)
            return
        with (
            listen(self.host, self.port) as listener,
            Server(open_session(self.model, self.device, None), settings) as server,
        ):
            echo(f"{settings.name}: {address(listener)}, memories in {settings.folder}")
            server.run(listener)

    def _run_replicas(self, settings: Settings) -> None:
        from remanence.cli.sessions import open_session
        from remanence.runtime.device import resolve
        from remanence.serve.ray import run

        assert self.replicas is not None
        open_model = partial(open_session, resolve_model_path(self.model).resolve(), self.device, None)
        gpus = 1.0 if resolve(self.device).type == "cuda" else 0.0
        run(open_model, settings, port=self.port, replicas=self.replicas, gpus=gpus)

    def _check_positive(self) -> None:
        """Raise an error for an option that is too small."""
        least = {"waiting": 0, "cache_mb": 0, "tokens_per_minute": 0, "max_gb": 0.001, "grace": 0}
        if self.replicas is not None:
            least["replicas"] = 1
        others = ("rows", "keep_versions", "max_memories", "max_body_kb", "max_upload_mb", "timeout")
        for name, smallest in {**dict.fromkeys(others, 1), **least}.items():
            if not getattr(self, name) >= smallest:
                option = f"--{name.replace('_', '-')}"
                raise ValueError(
                    f"{option}: expected a number of at least {smallest}, got {getattr(self, name)}"
                )


@dataclass(frozen=True, kw_only=True)
class Keys:
    """Make, list or remove the API keys of a server. A server that has keys answers only requests with one of them.

    A key belongs to an owner, and opens the owner's memories only. `add OWNER` prints a new key, which is not stored
    and cannot be shown again; `remove ID` takes an identifier that `list` shows.
    """

    action: Annotated[Literal["add", "list", "remove"], tyro.conf.Positional]
    name: Annotated[str | None, tyro.conf.Positional] = None
    """The owner of a new key, or the identifier of the key to remove."""
    model: Path = Path(CHAT_MODEL)
    """The model of the server."""
    data: Path | None = None
    """The folder of the server's memories, as --data of remanence serve."""
    database: str | None = None
    """The PostgreSQL of the server, as --database of remanence serve."""

    def run(self) -> None:
        try:
            from remanence.serve.access import add_key
            from remanence.serve.server import open_database
        except ImportError as error:
            raise ImportError(
                f"keys needs the extra 'serve': pip install 'remanence[serve]' ({error})"
            ) from None

        if (self.name is None) != (self.action == "list"):
            expected = "no name" if self.action == "list" else "one"
            raise ValueError(f"name: expected {expected} to {self.action}, got {self.name!r}")
        database = open_database(data_folder(self.model, self.data), self.database)
        try:
            if self.action == "add":
                assert self.name is not None
                _, text = add_key(database, self.name)
                echo(text)
            elif self.action == "remove":
                assert self.name is not None
                if not database.remove_key(self.name):
                    raise ValueError(
                        f"name: expected the identifier of a key, as `remanence keys list` shows it, got {self.name!r}"
                    )
            else:
                for key in database.all_keys():
                    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(key.created))
                    echo(f"{key.id}  {made}  {key.owner}")
        finally:
            database.close()
