"""Files that are whole or not there: written under a temporary name, flushed, and renamed. Nothing is ever unpickled.

What is being written is locked, and a lock dies with its process: so what a killed process left can be told from what
another one is writing, and is removed by the next that writes the same file.
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
"""The names of temporary folders."""
KIND = "sha256:"
"""What the digest of a JSON object begins with."""


def flush(path: Path) -> None:
    """Have the disk keep a file's content, or a folder's names: they survive a loss of power from then on."""
    if fcntl is None and path.is_dir():
        return
    number = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path that takes the place of `path` when the block ends, and is removed if the block fails."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: expected a file to write, got a folder or a device")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: expected its folder to exist; make {path.parent} first")
    if any(name.startswith(".") and name.endswith(".tmp") for name in path.parent.parts):
        yield path  # in a folder that is itself temporary: it is seen, or not, with all that is in it
        flush(path)
        return
    with _workshop(path) as folder:
        temporary = folder / path.name
        yield temporary
        flush(temporary)
        os.replace(temporary, path)
        flush(path.parent)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that takes the place of `path`, which does not exist or is an empty folder, when the block
    ends.
    """
    with _workshop(path) as folder:
        temporary = folder / path.name
        temporary.mkdir()
        yield temporary
        flush(temporary)
        os.replace(temporary, path)
        flush(path.parent)


@contextmanager
def _workshop(path: Path) -> Iterator[Path]:
    """A locked folder beside `path`, whose name no other can have; those that killed processes left are removed."""
    remove_leftovers(path.parent, path.name)
    folder, lock = path, None
    while lock is None:  # a folder may be taken for a leftover before it is locked
        folder = path.parent / f".{path.name}.{token_hex(8)}.tmp"
        folder.mkdir()
        with suppress(BlockingIOError):
            lock = _lock(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove what killed processes have left in a folder (of the file `name`); what is being written now is locked."""
    if fcntl is None:
        return
    for left in os.listdir(folder):
        found = LEFT.fullmatch(left)
        if found is not None and name in (None, found[1]):
            with suppress(OSError):
                lock = _lock(folder / left)
                if lock is not None:
                    shutil.rmtree(folder / left, ignore_errors=True)
                    os.close(lock)


def _lock(folder: Path) -> int | None:
    """The descriptor of a folder (or file) that is open and locked; None if it is gone. Another's lock is a
    BlockingIOError.
    """
    if fcntl is None:
        return os.open(os.devnull, os.O_RDONLY)
    try:
        number = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(number), os.stat(folder)):
            return number
    except FileNotFoundError:
        pass
    except BlockingIOError:
        os.close(number)
        raise
    except OSError:  # a disk that knows no locks
        return number
    os.close(number)
    return None


@contextmanager
def locked(folder: Path, who: str) -> Iterator[None]:
    """`folder`, made if it does not exist, for this process alone until the block ends or the process dies.

    A second process is refused: `who` says what the first one is, as "a training run". Folders that were made here and
    are empty in the end are removed.
    """
    made, lock = [path for path in (folder, *folder.parents) if not path.exists()], None
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
        os.close(lock)


@contextmanager
def locked_file(path: Path, who: str) -> Iterator[None]:
    """A file, made if it does not exist, for this process alone, as `locked` has it for a folder."""
    path.touch()
    try:
        lock = _lock(path)
    except BlockingIOError:
        raise ValueError(f"{path}: in use by {who} that is still going on; wait for it or end it") from None
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def append_line(path: Path, line: str) -> None:
    """One more line of a file, on the disk when this returns; half a line that a killed process left is ended."""
    with open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else "\n" + line
        file.write((line + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def file_digest(path: Path) -> str:
    """Of a whole file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical(data: Any) -> bytes:
    """JSON data as bytes that do not depend on the order of its keys."""
    try:
        return json.dumps(data, sort_keys=True).encode()
    except RecursionError:
        raise ValueError("expected plain data, got lists inside lists without end") from None


def sealed(data: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object with the digest of itself."""
    return {**data, DIGEST: _digest(data)}


def unsealed(what: object, data: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object without its digest, if it has one that fits; one without is taken as it is."""
    rest = {key: value for key, value in data.items() if key != DIGEST}
    # Damage to the digest's own name must not pass for an object that never had one.
    renamed = any(isinstance(value, str) and value.startswith(KIND) for value in rest.values())
    if renamed or (DIGEST in data and data[DIGEST] != _digest(rest)):
        raise ValueError(
            f"{what}: damaged, or changed by hand: its digest does not fit; remove the entry {DIGEST!r} to accept it"
        )
    return rest


def _digest(data: Mapping[str, Any]) -> str:
    return KIND + hashlib.sha256(canonical(data)).hexdigest()[:32]


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write an object as it is; `sealed` first, `read_json` notices damage."""
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
