"""Write files and folders atomically: under a temporary name first, then flushed and renamed. Nothing is
unpickled.

A temporary folder is locked while it is written, and the lock ends with the process. An unlocked temporary
folder was left by a killed process; the next process that writes the same file removes it.
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
except ImportError:  # Windows: folders can be neither locked nor flushed, and leftover folders stay
    fcntl = None  # type: ignore[assignment]

LARGEST = 64 * 2**20
"""The maximum size in bytes of a JSON file in a model's folder. A tokenizer of 256K tokens has half this
size.
"""

DIGEST = "digest"
"""The key in a JSON object, or in a safetensors file's metadata, that holds the digest of all other entries.
"""
LEFT = re.compile(r"\.(.+)\.[0-9a-f]{16}\.tmp")
"""The pattern of a temporary folder's name. Group 1 is the name of the file or folder that is written in it.
"""
TEMPORARY = re.compile(r"\.(.+\.[0-9a-f]{16}|[0-9]{8})\.tmp")
"""The pattern of the names of temporary folders and of checkpoints that are being written."""
KIND = "sha256:"
"""The prefix of a JSON object's digest."""


def flush(path: Path) -> None:
    """Flush a file's content, or the entries of a folder, to disk (fsync)."""
    if fcntl is None and path.is_dir():
        return
    number = os.open(path, os.O_RDWR if fcntl is None else os.O_RDONLY)  # Windows needs write access
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; it replaces `path` when the block ends, and is removed if the block
    fails.

    Symbolic links are followed. If `path` already exists, the new file gets its permissions.
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
        yield path  # the folder is temporary itself, and is renamed as a whole later
        _finish(path, path.parent.stat().st_mode & 0o666)
        return
    with _temporary_folder(path) as folder:
        temporary = folder / path.name
        yield temporary
        _finish(temporary, path.stat().st_mode & 0o777 if path.exists() else folder.stat().st_mode & 0o666)
        os.replace(temporary, path)
        flush(path.parent)


def _finish(path: Path, mode: int) -> None:
    """Set a file's permissions and flush it to disk. (safetensors creates files that only their owner can
    read.)
    """
    os.chmod(path, mode)
    flush(path)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill; it is renamed to `path` when the block ends. `path` must not exist or
    be an empty folder.
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
    """Yield a locked temporary folder next to `path` with a unique name, and remove it afterwards. Folders
    left by killed processes are removed first.
    """
    remove_leftovers(path.parent, path.name)
    folder, lock = path, None
    while lock is None:  # another process may remove the folder as a leftover before it is locked
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
    """Return a file's name, or its digest if the name is too long to be part of a temporary name."""
    return name if len(os.fsencode(name)) <= 200 else hashlib.sha256(os.fsencode(name)).hexdigest()


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove temporary folders that killed processes left in `folder`: those for the file `name`, or all if
    it is None. Folders that are being written are locked, and stay.
    """
    for left in os.listdir(folder):
        found = LEFT.fullmatch(left)
        if found is not None and (name is None or found[1] == _label(name)):
            with suppress(OSError):
                lock = _lock(folder / left, required=True)
                if lock is not None:
                    shutil.rmtree(folder / left, ignore_errors=True)
                    _release(lock)


_held: set[int] = set()
"""File descriptors of the locks that this process holds. A forked child closes them, so that no lock outlives
its owner.
"""


def _lock(path: Path, *, required: bool = False) -> int | None:
    """Open and lock a folder or file and return its descriptor, or None if it does not exist.

    Raises BlockingIOError if another process holds the lock. Where the system or the disk does not support
    locks, an unlocked descriptor is returned, or None if `required`.
    """
    if fcntl is None:
        return None if required else os.open(os.devnull, os.O_RDONLY)
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
        found = not required
    if not found:
        os.close(number)
        return None
    _held.add(number)
    return number


def _release(lock: int) -> None:
    """Unlock and close a descriptor returned by `_lock`."""
    _held.discard(lock)
    if fcntl is not None:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)  # also unlocks it for child processes that have it open
    os.close(lock)


def _close_inherited_locks() -> None:
    """Close the descriptors of the parent's locks. Runs in a forked child."""
    for lock in _held:
        os.close(lock)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited_locks)


@contextmanager
def locked(folder: Path, holder: str) -> Iterator[None]:
    """Lock `folder` for this process until the block ends or the process dies. The folder is created if it
    does not exist.

    Raises ValueError if another process holds the lock; `holder` describes that process in the message, such as
    "a training run". Folders that were created here and are empty at the end are removed.
    """
    made, lock = [path for path in (folder, *folder.parents) if not path.exists()], None
    if not made and not folder.is_dir():
        raise ValueError(f"{folder}: expected a folder, got a file")
    try:
        while lock is None:  # the previous process may be removing its empty folder right now
            folder.mkdir(parents=True, exist_ok=True)
            lock = _lock(folder)
    except BlockingIOError:
        raise ValueError(
            f"{folder}: in use by {holder} that is still going on; wait for it or end it"
        ) from None
    try:
        yield
    finally:
        with suppress(OSError):  # raised if the folder is not empty, because the run has written files
            for path in made:
                if path.exists():
                    path.rmdir()
        _release(lock)


@contextmanager
def locked_target(path: Path, holder: str) -> Iterator[None]:
    """Lock a file that is going to be replaced, as `locked` does for a folder. The lock is held on a separate
    file next to it, which is removed at the end.
    """
    path = path.resolve()
    lock = path.with_name(f".{_label(path.name)}.lock")
    with locked_file(lock, holder, path):
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


@contextmanager
def locked_file(path: Path, holder: str, shown_path: Path | None = None) -> Iterator[None]:
    """Lock a file, as `locked` does for a folder. The file is created if it does not exist. `shown_path` is the
    path to show in error messages, if it is not `path`.
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
            f"{shown_path or path}: in use by {holder} that is still going on; wait for it or end it"
        ) from None
    try:
        yield
    finally:
        _release(lock)


def append_line(path: Path, line: str) -> None:
    """Append a line to a file and flush it to disk. If the last line was left incomplete by a killed process,
    a newline is added to it first.
    """
    with open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else "\n" + line
        file.write((line + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def file_digest(path: Path) -> str:
    """Return the SHA-256 digest of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical(data: object) -> bytes:
    """Encode JSON data as bytes that do not depend on the order of keys."""
    try:
        return json.dumps(data, sort_keys=True).encode()
    except RecursionError:
        raise ValueError("expected plain data, got lists inside lists without end") from None


def add_digest(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a JSON object with a digest of its entries added."""
    return {**data, DIGEST: _digest(data)}


def check_digest(owner: object, data: Mapping[str, Any]) -> dict[str, Any]:
    """Check a JSON object's digest and return the object without it. An object without a digest is accepted.
    `owner` is the name to show in error messages.
    """
    content = {key: value for key, value in data.items() if key != DIGEST}
    # An object whose digest key was damaged must not be accepted as one without a digest.
    renamed = any(isinstance(value, str) and value.startswith(KIND) for value in content.values())
    if renamed or (DIGEST in data and data[DIGEST] != _digest(content)):
        raise ValueError(
            f"{owner}: damaged, or changed by hand: its digest does not fit; remove the entry {DIGEST!r} to accept it"
        )
    return content


def _digest(data: Mapping[str, object]) -> str:
    """Return the digest of a JSON object: `KIND` and 32 hexadecimal digits."""
    return KIND + hashlib.sha256(canonical(data)).hexdigest()[:32]


def write_json(path: Path, data: Mapping[str, object]) -> None:
    """Write a JSON object atomically. `read_json` detects damage if the object has a digest (`add_digest`)."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def read_json(path: Path, max_bytes: int | None = None) -> dict[str, Any]:
    """Read a JSON object from a file, check its digest, and return it without the digest. Raises ValueError
    if the file has more than `max_bytes` bytes.
    """
    if max_bytes is not None and path.stat().st_size > max_bytes:
        raise ValueError(f"{path}: expected at most {max_bytes:,} bytes, got {path.stat().st_size:,}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not a JSON file ({error})") from None
    except ValueError as error:  # a number with thousands of digits
        raise ValueError(f"{path}: not a JSON file that can be read ({error})") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return check_digest(path, data)


def display_name(source: Path) -> str:
    """Return the name of a file or folder. The model folder of every run is named ``model``, so the run's
    name is put before it.
    """
    path = source.resolve()
    return f"{path.parent.name}/{path.name}" if path.name == "model" and path.parent.name else path.name
