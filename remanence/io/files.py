"""Atomic writes of files and folders: written under a temporary name, flushed, and renamed. Nothing is unpickled.

Temporary folders are locked while they are written, and a lock ends with its process. Unlocked ones were left by a
killed process, and the next process that writes the same file removes them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: folders can be neither locked nor flushed, and leftovers stay
    fcntl = None  # type: ignore[assignment]

LARGEST = 64 * 2**20
"""Bytes of a JSON file in a model's folder at most. Tokenizers of 256K tokens have half as many."""

DIGEST = "digest"
"""The entry of a JSON object, or of a safetensors file's metadata, that holds the digest of everything else."""
LEFT = re.compile(r"\.(.+)\.[0-9a-f]{16}\.tmp")
"""The names of temporary folders, with the name of what is made in them."""
TEMPORARY = re.compile(r"\.(.+\.[0-9a-f]{16}|[0-9]{8})\.tmp")
"""These, and checkpoints that are being written."""
KIND = "sha256:"
"""What the digest of a JSON object begins with."""


def flush(path: Path) -> None:
    """Flush a file's content, or the entries of a folder, to disk (fsync)."""
    if fcntl is None and path.is_dir():
        return
    number = os.open(path, os.O_RDWR if fcntl is None else os.O_RDONLY)  # Windows flushes what can be written
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path that takes the place of `path` when the block ends, and is removed if the block fails. A link is
    followed; a file that was there leaves its permissions to the new one.
    """
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{path}: expected a name that a file can have, got one with {error.object[error.start]!a} at "
            f"position {error.start}"
        ) from None
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: expected a file to write, got a folder or a device")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: expected its folder to exist; make {path.parent} first")
    path = path.resolve()
    if any(TEMPORARY.fullmatch(name) for name in path.parent.parts):
        yield path  # in a folder that is itself temporary: it is seen, or not, with all that is in it
        _finish(path, path.parent.stat().st_mode & 0o666)
        return
    with _temporary_folder(path) as folder:
        temporary = folder / path.name
        yield temporary
        _finish(temporary, path.stat().st_mode & 0o777 if path.exists() else folder.stat().st_mode & 0o666)
        os.replace(temporary, path)
        flush(path.parent)


def _finish(path: Path, mode: int) -> None:
    """Set a file's permissions and flush it. (safetensors makes files that only their owner can read.)"""
    os.chmod(path, mode)
    flush(path)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that takes the place of `path`, which does not exist or is an empty folder, when the block
    ends.
    """
    path = path.resolve()
    with _temporary_folder(path) as folder:
        temporary = folder / path.name
        temporary.mkdir()
        yield temporary
        flush(temporary)
        os.replace(temporary, path)
        flush(path.parent)


@contextmanager
def _temporary_folder(path: Path) -> Iterator[Path]:
    """A locked folder beside `path`, whose name no other can have; those that killed processes left are removed."""
    remove_leftovers(path.parent, path.name)
    folder, lock = path, None
    while lock is None:  # a folder may be taken for a leftover before it is locked
        folder = path.parent / f".{_label(path.name)}.{token_hex(8)}.tmp"
        folder.mkdir()
        with suppress(BlockingIOError):
            lock = _lock(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _release(lock)


def _label(name: str) -> str:
    """A file's name, or its digest if the name is too long for a temporary name."""
    return name if len(os.fsencode(name)) <= 200 else hashlib.sha256(os.fsencode(name)).hexdigest()


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove what killed processes have left in a folder (of the file `name`); what is being written now is locked."""
    for left in os.listdir(folder):
        found = LEFT.fullmatch(left)
        if found is not None and (name is None or found[1] == _label(name)):
            with suppress(OSError):
                lock = _lock(folder / left, certain=True)
                if lock is not None:
                    shutil.rmtree(folder / left, ignore_errors=True)
                    _release(lock)


_held: set[int] = set()
"""Descriptors of what this process has locked. A child that it forks must not hold them beyond its parent's death."""


def _lock(path: Path, *, certain: bool = False) -> int | None:
    """The descriptor of a folder or file that is open and locked; None if it is gone. Another's lock is a
    BlockingIOError. Where the system or the disk has no locks, none is held, which is None if one must be `certain`.
    """
    if fcntl is None:
        return None if certain else os.open(os.devnull, os.O_RDONLY)
    try:
        number = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.path.samestat(os.fstat(number), os.stat(path))
    except BlockingIOError:
        os.close(number)
        raise
    except FileNotFoundError:
        found = False
    except OSError:
        found = not certain
    if not found:
        os.close(number)
        return None
    _held.add(number)
    return number


def _release(lock: int) -> None:
    _held.discard(lock)
    if fcntl is not None:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)  # also for children that have it open
    os.close(lock)


def _close_inherited_locks() -> None:
    """In a forked child: close the descriptors of the parent's locks."""
    for lock in _held:
        os.close(lock)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited_locks)


@contextmanager
def locked(folder: Path, who: str) -> Iterator[None]:
    """`folder`, made if it does not exist, for this process alone until the block ends or the process dies.

    A second process is refused: `who` says what the first one is, as "a training run". Folders that were made here and
    are empty in the end are removed.
    """
    made, lock = [path for path in (folder, *folder.parents) if not path.exists()], None
    if not made and not folder.is_dir():
        raise ValueError(f"{folder}: expected a folder, got a file")
    try:
        while lock is None:  # the process before may remove its empty folder just now
            folder.mkdir(parents=True, exist_ok=True)
            lock = _lock(folder)
    except BlockingIOError:
        raise ValueError(f"{folder}: in use by {who} that is still going on; wait for it or end it") from None
    try:
        yield
    finally:
        with suppress(OSError):  # not empty: the run is there
            for path in made:
                if path.exists():
                    path.rmdir()
        _release(lock)


@contextmanager
def locked_target(path: Path, who: str) -> Iterator[None]:
    """A file that is going to be replaced, for this process alone, as `locked` has it for a folder. The lock is on a
    file beside it, which is removed in the end.
    """
    path = path.resolve()
    lock = path.with_name(f".{_label(path.name)}.lock")
    with locked_file(lock, who, path):
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


@contextmanager
def locked_file(path: Path, who: str, meant: Path | None = None) -> Iterator[None]:
    """A file, made if it does not exist, for this process alone, as `locked` has it for a folder. An error names the
    file that is `meant`.
    """
    lock = None
    try:
        while lock is None:
            path.touch()
            if not path.is_file():
                raise ValueError(f"{path}: expected a file, got a folder or a device")
            lock = _lock(path)
    except BlockingIOError:
        raise ValueError(
            f"{meant or path}: in use by {who} that is still going on; wait for it or end it"
        ) from None
    try:
        yield
    finally:
        _release(lock)


def append_line(path: Path, line: str) -> None:
    """Append a line to a file and flush it to disk. An incomplete last line of a killed process is ended first."""
    with open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else "\n" + line
        file.write((line + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def file_digest(path: Path) -> str:
    """The SHA-256 digest of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical(data: object) -> bytes:
    """JSON data as bytes that do not depend on the order of keys."""
    try:
        return json.dumps(data, sort_keys=True).encode()
    except RecursionError:
        raise ValueError("expected plain data, got lists inside lists without end") from None


def sealed(data: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object with a digest of its other entries added."""
    return {**data, DIGEST: _digest(data)}


def unsealed(what: object, data: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object without its digest, which is checked. An object without a digest is accepted."""
    rest = {key: value for key, value in data.items() if key != DIGEST}
    # Damage to the digest's own name must not pass for an object that never had one.
    renamed = any(isinstance(value, str) and value.startswith(KIND) for value in rest.values())
    if renamed or (DIGEST in data and data[DIGEST] != _digest(rest)):
        raise ValueError(
            f"{what}: damaged, or changed by hand: its digest does not fit; remove the entry {DIGEST!r} to accept it"
        )
    return rest


def _digest(data: Mapping[str, object]) -> str:
    return KIND + hashlib.sha256(canonical(data)).hexdigest()[:32]


def write_json(path: Path, data: Mapping[str, object]) -> None:
    """Write a JSON object atomically. `read_json` detects damage if the object is `sealed`."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def read_json(path: Path, most: int | None = None) -> dict[str, Any]:
    """A file's object, without its digest, which is checked; of a file with more than `most` bytes nothing is read."""
    if most is not None and path.stat().st_size > most:
        raise ValueError(f"{path}: expected at most {most:,} bytes, got {path.stat().st_size:,}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not a JSON file ({error})") from None
    except ValueError as error:  # a number of thousands of digits
        raise ValueError(f"{path}: not a JSON file that can be read ({error})") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return unsealed(path, data)


def display_name(source: Path) -> str:
    """The name of a file or folder; for a run's model also the run's name, as all of them are named ``model``."""
    path = source.resolve()
    return f"{path.parent.name}/{path.name}" if path.name == "model" and path.parent.name else path.name
