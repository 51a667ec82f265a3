"""Memories of many owners: states in files, one for each version, and the most recently used ones in memory too."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from remanence.inference import memfile
from remanence.io.files import canonical, flush, remove_leftovers
from remanence.model import CausalModel, State
from remanence.serve.database import ConflictError, Database, Memory, Version, new_id

ORPHAN_SECONDS = 3600.0
"""Files of versions that were never committed are deleted if they are older than this: a running request may
still commit a newer one.
"""


class NotFoundError(ValueError):
    """The owner has no memory or version of this name."""


def transcript(messages: Sequence[dict[str, str]]) -> str:
    """Return the digest of the messages of a conversation, which tells whether a request continues it."""
    return hashlib.sha256(canonical(list(messages))).hexdigest()


class Memories:
    """Versions of memories in a folder: ``state = memories.load(version)``, ``memories.commit(...)``.

    Args:
        model: the model of all memories. A file made with another model is refused.
        folder: where the database and the files are.
        cache_bytes: the size of the states kept in memory; the least recently used ones are read from their
            files again.
        keep_versions: the number of versions of a memory that are kept.
    """

    def __init__(
        self, model: CausalModel, folder: Path, *, cache_bytes: int = 2**30, keep_versions: int = 32
    ) -> None:
        for name, value in (("cache_bytes", cache_bytes + 1), ("keep_versions", keep_versions)):
            if value < 1:
                raise ValueError(f"{name}: expected a positive integer, got {value}")
        self.model, self.folder = model, folder
        self.cache_bytes, self.keep_versions = cache_bytes, keep_versions
        self.files = folder / "versions"
        self.files.mkdir(parents=True, exist_ok=True)
        self.database = Database(folder / "memories.sqlite")
        self._cached: OrderedDict[str, State] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.Lock()
        self.collect_garbage()

    def close(self) -> None:
        self.database.close()

    def path(self, version: str) -> Path:
        """Return the path of the file of a version."""
        return self.files / f"{version}.mem"

    def find(self, owner: str, identifier: str) -> Memory:
        """Return an owner's memory by its identifier or name. Raises `NotFoundError`."""
        if (memory := self.database.memory(owner, identifier)) is None:
            raise NotFoundError(f"memory: expected one of yours, got {identifier!r}")
        return memory

    def find_version(self, owner: str, identifier: str) -> Version:
        """Return a version of one of the owner's memories. Raises `NotFoundError`."""
        if (version := self.database.version(owner, identifier)) is None:
            raise NotFoundError(f"version: expected one of your memories', got {identifier!r}")
        return version

    def find_or_create(self, owner: str, name: str) -> Memory:
        """Return the memory of this name, which is created if the owner has none."""
        if (memory := self.database.memory(owner, name)) is not None:
            return memory
        if name.startswith("mem_"):
            raise NotFoundError(f"memory: expected one of yours, got {name!r}")
        try:
            return self.database.create(owner, name)
        except ConflictError:  # another request created it meanwhile
            return self.find(owner, name)

    def load(self, version: Version) -> State:
        """Return the state of a version, from memory or from its file."""
        if version.parent is None and not version.bytes:
            return self.model.start(1)
        with self._lock:
            if version.id in self._cached:
                self._cached.move_to_end(version.id)
                return self._cached[version.id]
        state = memfile.load(self.path(version.id), self.model)
        self._cache(version.id, state)
        return state

    def _cache(self, identifier: str, state: State) -> None:
        """Keep a state in memory, and drop the least recently used ones if there are too many."""
        with self._lock:
            if identifier not in self._cached:
                self._cached[identifier] = state
                self._cached_bytes += state.nbytes
            while self._cached_bytes > self.cache_bytes:
                _, dropped = self._cached.popitem(last=False)
                self._cached_bytes -= dropped.nbytes

    def _drop(self, identifier: str) -> None:
        """Remove the state and the file of a version."""
        with self._lock:
            if (state := self._cached.pop(identifier, None)) is not None:
                self._cached_bytes -= state.nbytes
        with suppress(FileNotFoundError):
            self.path(identifier).unlink()

    def commit(
        self, parent: Version, state: State, *, messages: int = 0, digest: str = "", moves_head: bool = True
    ) -> Version:
        """Save a state as the version after `parent`, and return the version. It is on disk when this returns.

        Raises `ConflictError` if another version was made from `parent` meanwhile; nothing changes then. Without
        `moves_head`, the new version is a branch, and its memory still has the head that it had.
        """
        identifier = new_id("ver")
        path = self.path(identifier)
        memfile.save(path, self.model, state)
        version = Version(
            identifier, parent.memory, parent.id, int(state.position[0]), path.stat().st_size, messages, digest,
            time.time(),
        )  # fmt: skip
        try:
            self.database.commit(version, parent.id if moves_head else None)
        except BaseException:
            path.unlink()
            raise
        self._cache(identifier, state)
        for old in self.database.prune(parent.memory, self.keep_versions):
            self._drop(old)
        return version

    def upload(self, memory: Memory, path: Path) -> Version:
        """Make the state in a memory file the newest version of a memory. The file is checked like any file of
        a stranger.
        """
        state = memfile.load(path, self.model, verify=True)
        if len(state.position) != 1:
            raise ValueError(f"file: expected the memory of one document, got {len(state.position)}")
        return self.commit(self.find_version(memory.owner, memory.head), state)

    def fork(self, owner: str, version: Version, name: str | None = None) -> Memory:
        """Create a memory that continues from a version of another one."""
        state = self.load(version)
        memory = self.database.create(owner, name)
        first = self.find_version(owner, memory.head)
        if version.tokens:
            self.commit(first, state, messages=version.messages, digest=version.transcript)
        return self.find(owner, memory.id)

    def rollback(self, memory: Memory, version: Version) -> Version:
        """Make an earlier version's state the newest version: what was read after it is forgotten."""
        if version.memory != memory.id:
            raise NotFoundError(f"version: expected one of {memory.id}, got {version.id!r}")
        head = self.find_version(memory.owner, memory.head)
        return self.commit(head, self.load(version), messages=version.messages, digest=version.transcript)

    def delete(self, memory: Memory) -> None:
        """Delete a memory and the files of all its versions."""
        for version in self.database.delete(memory.id):
            self._drop(version)
        flush(self.files)

    def collect_garbage(self, age: float = ORPHAN_SECONDS) -> None:
        """Delete files that belong to no version, as a killed process leaves them, if they are old enough."""
        remove_leftovers(self.files)
        known, now = self.database.all_versions(), time.time()
        for path in self.files.glob("ver_*.mem"):
            with suppress(FileNotFoundError):
                if path.stem not in known and now - path.stat().st_mtime > age:
                    path.unlink()
