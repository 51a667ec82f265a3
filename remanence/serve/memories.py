"""Memories of many owners: sessions in files, one for each version, and the most recently used ones in memory too."""

from __future__ import annotations

import hashlib
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from remanence.inference.memfile import identify
from remanence.inference.sentences import StoredSentence
from remanence.inference.session import Session
from remanence.io.files import canonical
from remanence.model import CausalModel
from remanence.serve.database import Answer, ConflictError, Database, Memory, Version, new_id
from remanence.serve.store import FolderStore, Store, StoreError
from remanence.tokenizers.tokens import Tokenizer

ORPHAN_SECONDS = 3600.0
"""Files of versions that were never committed are deleted if they are older than this: a running request may
still commit a newer one.
"""

UPLOADS = "uploads"
"""The folder of files that are being uploaded, or copied from a store."""


class NotFoundError(ValueError):
    """The owner has no memory or version of this name."""


def transcripts(messages: Sequence[Mapping[str, str]], after: str = "") -> list[str]:
    """Return the digest of a conversation after each of its messages. `after` is that of the messages before them."""
    found = []
    for message in messages:
        content = [after, message["role"], message["content"].strip()]
        after = hashlib.sha256(canonical(content)).hexdigest()
        found.append(after)
    return found


class Memories:
    """Versions of memories in a folder: ``session = memories.load(version)``, ``memories.commit(...)``.

    Args:
        model: the model of all memories. A file made with another model is refused.
        folder: the folder of the memories.
        tokenizer: the tokenizer of the model; None: the model's own.
        cache_bytes: the size of the states kept in memory; the least recently used ones are read from their
            files again.
        keep_versions: the number of versions of a memory that are kept.
        database: the order of versions; None: in a SQLite file in the folder.
        store: the files of versions; None: in the folder, too.
    """

    def __init__(
        self,
        model: CausalModel,
        folder: Path,
        *,
        tokenizer: Tokenizer | None = None,
        cache_bytes: int = 2**30,
        keep_versions: int = 8,
        database: Database | None = None,
        store: Store | None = None,
    ) -> None:
        for name, value in (("cache_bytes", cache_bytes + 1), ("keep_versions", keep_versions)):
            if value < 1:
                raise ValueError(f"{name}: expected a positive integer, got {value}")
        self.model, self.folder = model, folder
        self.cache_bytes, self.keep_versions = cache_bytes, keep_versions
        self.uploads = folder / UPLOADS
        """The folder of files that are being uploaded or copied."""
        self.uploads.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.store = FolderStore(folder / "versions") if store is None else store
        self.database = Database(folder / "memories.sqlite") if database is None else database
        self._empty = Session(model, tokenizer)
        self._known = identify(model)
        self._cached: OrderedDict[str, Session] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.Lock()
        self.collect_garbage()

    def close(self) -> None:
        self.database.close()

    @property
    def cached_bytes(self) -> int:
        """The size of the states in memory."""
        return self._cached_bytes

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

    def find_existing(self, owner: str, name: str) -> Memory | None:
        """Return the memory of this name or identifier; None if a memory of this name can be created. Raises
        `NotFoundError` for an identifier that the owner does not have.
        """
        memory = self.database.memory(owner, name)
        if memory is None and name.startswith("mem_"):
            raise NotFoundError(f"memory: expected one of yours, got {name!r}")
        return memory

    def find_or_create(self, owner: str, name: str) -> Memory:
        """Return the memory of this name, which is created if the owner has none."""
        if (memory := self.find_existing(owner, name)) is not None:
            return memory
        try:
            return self.database.create(owner, name)
        except ConflictError:  # another request created it meanwhile
            return self.find(owner, name)

    def head(self, memory: Memory) -> Version:
        """Return the newest version of a memory."""
        return self.find_version(memory.owner, memory.head)

    def new_session(self) -> Session:
        """Return a session with an empty memory."""
        return self._empty.fork()

    def load(self, version: Version) -> Session:
        """Return a session that continues from a version, from memory or from its file."""
        if not version.bytes:
            return self.new_session()
        with self._lock:
            if version.id in self._cached:
                self._cached.move_to_end(version.id)
                return self._cached[version.id].fork()
        session = self.new_session()
        with self.store.reading(version.id, version.bytes) as path:
            try:
                session.load(path, verify=self.store.is_copied, known=self._known)
            except ValueError as error:
                raise StoreError(str(error).replace(f"{path}:", f"{version.id}:")) from None
        self._cache(version.id, session)
        return session.fork()

    def _cache(self, identifier: str, session: Session) -> None:
        """Keep a session in memory, and drop the least recently used ones if there are too many."""
        with self._lock:
            if identifier not in self._cached:
                self._cached[identifier] = session
                self._cached_bytes += session.state.nbytes
            while self._cached_bytes > self.cache_bytes:
                _, dropped = self._cached.popitem(last=False)
                self._cached_bytes -= dropped.state.nbytes

    def _drop(self, versions: Sequence[str]) -> None:
        """Remove the sessions and the files of versions."""
        with self._lock:
            for version in versions:
                if (session := self._cached.pop(version, None)) is not None:
                    self._cached_bytes -= session.state.nbytes
        self.store.delete(versions)

    def commit(
        self,
        parent: Version,
        session: Session,
        *,
        messages: int = 0,
        digest: str = "",
        moves_head: bool = True,
        replaces: bool = False,
        identifier: str | None = None,
        keep: int | None = None,
        answer: Answer | None = None,
    ) -> Version:
        """Save a session as the version after `parent`, and return the version. It is on disk when this returns.

        Raises `ConflictError` if another version was made from `parent` meanwhile; nothing changes then.

        Args:
            parent: the version that the session continued from.
            session: the session, which is not used by others afterwards.
            messages, digest: the number of messages of the conversation, and their digest.
            moves_head: whether the new version becomes the newest one. Otherwise it is a branch, and the memory still
                has the head that it had.
            replaces: whether the session does not continue from `parent`, but takes its place.
            identifier: the identifier of the new version; None: a new one.
            keep: the number of versions that are kept; None: `keep_versions`.
            answer: the answer that the version is made with.
        """
        identifier = identifier or new_id("ver")
        with self.store.writing(identifier) as path:
            session.save(path, known=self._known)
            size = path.stat().st_size
        version = Version(
            identifier, parent.memory, None if replaces else parent.id, session.tokens, size, messages, digest,
            time.time(),
        )  # fmt: skip
        try:
            self.database.commit(version, parent.id if moves_head else None, answer)
        except ConflictError:  # after any other error, the version may be in the table
            self.store.delete([identifier])
            raise
        self._cache(identifier, session)
        if old := self.database.prune(parent.memory, self.keep_versions if keep is None else keep):
            self._drop(old)
        return version

    def chain(self, version: Version) -> Iterator[Version]:
        """Yield a version and those that it was made from, as far as they are kept."""
        known = {each.id: each for each in self.database.versions(version.memory)}
        found: Version | None = version
        while found is not None:
            yield found
            found = known.get(found.parent or "")

    def num_read(self, version: Version, digests: Sequence[str]) -> int:
        """Return the number of messages that a version contains, of a conversation with these digests: as many as some
        version had read that this one was made from.
        """
        read = {each.transcript for each in self.chain(version)}
        return max((count for count, digest in enumerate(digests, 1) if digest in read), default=0)

    def open_upload(self, path: Path) -> Session:
        """Return the session in a memory file, which is checked like any file of a stranger."""
        try:
            return self.new_session().load(path, verify=True, known=self._known)
        except ValueError as error:
            raise ValueError(str(error).replace(f"{path}:", "file:")) from None

    def upload(self, memory: Memory, session: Session) -> Version:
        """Make the session in a memory file the newest version of a memory."""
        return self.commit(self.head(memory), session, replaces=True)

    def fork(self, owner: str, version: Version, name: str | None = None) -> Memory:
        """Create a memory that continues from a version of another one."""
        session = self.load(version)
        memory = self.database.create(owner, name)
        if version.bytes:
            try:
                self.commit(self.head(memory), session, messages=version.messages, digest=version.transcript)
            except BaseException:
                self.delete(memory)
                raise
        return self.find(owner, memory.id)

    def rollback(self, memory: Memory, version: Version) -> None:
        """Make an earlier version the newest one again: what was read after it is forgotten. The later versions
        are still there, as branches, until they are too old.
        """
        if version.memory != memory.id:
            raise NotFoundError(f"version: expected one of {memory.id}, got {version.id!r}")
        self.database.move_head(memory.id, memory.head, version.id)

    def forget(self, memory: Memory, text: str) -> list[StoredSentence]:
        """Remove the stored sentence that a text means, as `Session.forget`, and return what was removed. All earlier
        versions are deleted, since they contain it.
        """
        head = self.head(memory)
        session = self.load(head)
        removed = session.forget(text)
        self.commit(head, session, messages=head.messages, digest=head.transcript, keep=0)
        return removed

    def delete(self, memory: Memory) -> None:
        """Delete a memory and the files of all its versions. If a file cannot be deleted, the memory is still listed,
        so that it can be deleted again.
        """
        self._drop([version.id for version in self.database.versions(memory.id)])
        self._drop(
            self.database.delete(memory.id)
        )  # those of another server that were committed meanwhile, too

    def collect_garbage(self, age: float = ORPHAN_SECONDS) -> None:
        """Delete files that belong to no version, as a killed process leaves them, if they are old enough."""
        now = time.time()
        for path in self.uploads.iterdir():
            with suppress(FileNotFoundError):
                if now - path.stat().st_mtime > age:
                    shutil.rmtree(path)
        found = self.store.names()  # before the table: a version that is committed meanwhile is in it
        self.store.delete_old(found - self.database.all_versions(), age)
