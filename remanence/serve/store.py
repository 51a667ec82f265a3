"""Where the files of versions are: a folder, or a URL that fsspec opens (extra `store`).

A file belongs to one version, is written once and never changes. The table names a version only after its file is
complete, so a file that a killed process has left incomplete belongs to no version. A file of a URL is copied to this
machine before it is read, and its size and checksums are verified.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from remanence.io.files import flush, remove_leftovers
from remanence.runtime.errors import first_line

T = TypeVar("T")
SUFFIX = ".mem"
"""The end of the name of a memory file."""
LOCAL = ("file", "local")
"""The schemes of URLs of folders of this machine."""


class StoreError(OSError):
    """A file of a version cannot be written, read or deleted."""


class Store(Protocol):
    """The files of versions, by the identifiers of the versions."""

    is_copied: bool
    """Whether files are copied from elsewhere when they are read, so that their checksums must be verified."""

    def writing(self, version: str) -> AbstractContextManager[Path]:
        """Yield a path to write a memory file to. It is in the store when the block ends."""

    def reading(self, version: str, size: int) -> AbstractContextManager[Path]:
        """Yield the path of the file of a version, which has so many bytes, for the time of the block."""

    def delete(self, versions: Collection[str]) -> None:
        """Delete the files of versions, as far as there are any. Raises `StoreError` if one is still there."""

    def names(self) -> set[str]:
        """Return the versions that have files."""

    def delete_old(self, versions: Collection[str], age: float) -> None:
        """Delete those files of versions that were written more than `age` seconds ago."""


class FolderStore:
    """Files in a folder. They are flushed to disk.

    Args:
        folder: the folder, which is made if it does not exist.
    """

    is_copied = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        remove_leftovers(folder)

    def path(self, version: str) -> Path:
        """Return the path of the file of a version."""
        return self.folder / f"{version}{SUFFIX}"

    @contextmanager
    def writing(self, version: str) -> Iterator[Path]:
        yield self.path(version)  # memory files are written under another name first, and flushed

    @contextmanager
    def reading(self, version: str, size: int) -> Iterator[Path]:
        path = self.path(version)
        try:
            found = path.stat().st_size
        except OSError as error:
            raise StoreError(f"store: expected the file of {version}, got {error.strerror}") from None
        _check_size(version, found, size)
        yield path

    def delete(self, versions: Collection[str]) -> None:
        for version in versions:
            self.path(version).unlink(missing_ok=True)
        flush(self.folder)
        _check_deleted(version for version in versions if self.path(version).exists())

    def names(self) -> set[str]:
        return {path.stem for path in self.folder.glob(f"ver_*{SUFFIX}")}

    def delete_old(self, versions: Collection[str], age: float) -> None:
        for version in versions:
            with suppress(FileNotFoundError):
                if time.time() - self.path(version).stat().st_mtime > age:
                    self.path(version).unlink()


class UrlStore:
    """Files under a URL that fsspec opens: ``UrlStore("s3://bucket/memories", scratch)``.

    Args:
        url: the URL of a folder, which is made if it does not exist.
        scratch: a folder of this machine, for copies.
    """

    is_copied = True

    def __init__(self, url: str, scratch: Path) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise ImportError(
                f"--store needs the extra 'store': pip install 'remanence[store]' ({error})"
            ) from None
        scheme, self.scratch = url.partition("://")[0], scratch
        try:
            self._system, root = url_to_fs(url)
            self._system.makedirs(root, exist_ok=True)
        except Exception as error:  # of any kind: the package of the scheme raises its own
            raise ValueError(
                f"--store: expected a URL that can be opened, got one of {scheme}:// ({first_line(error)})"
            ) from None
        self._root = root.rstrip("/")

    def _key(self, version: str) -> str:
        return f"{self._root}/{version}{SUFFIX}"

    @contextmanager
    def writing(self, version: str) -> Iterator[Path]:
        with self._copy(version) as path:
            yield path
            key, size = self._key(version), path.stat().st_size
            _guarded(self._system.put_file, str(path), key)
            _check_size(version, _guarded(self._info, key)["size"], size)

    @contextmanager
    def reading(self, version: str, size: int) -> Iterator[Path]:
        with self._copy(version) as path:
            _guarded(self._system.get_file, self._key(version), str(path))
            _check_size(version, path.stat().st_size, size)
            yield path

    @contextmanager
    def _copy(self, version: str) -> Iterator[Path]:
        """The path of a file on this machine, which is removed when the block ends."""
        with tempfile.TemporaryDirectory(prefix="copy-", dir=self.scratch) as folder:
            yield Path(folder) / f"{version}{SUFFIX}"

    def _info(self, key: str) -> dict[str, Any]:
        self._system.invalidate_cache()  # others write and delete files, too
        return self._system.info(key)

    def _exists(self, version: str) -> bool:
        """Whether there is a file of a version now."""
        self._system.invalidate_cache()
        return self._system.exists(self._key(version))

    def _remove(self, version: str) -> None:
        with suppress(FileNotFoundError):
            self._system.rm_file(self._key(version))

    def delete(self, versions: Collection[str]) -> None:
        for version in versions:
            _guarded(self._remove, version)
        _check_deleted(version for version in versions if _guarded(self._exists, version))

    def names(self) -> set[str]:
        self._system.invalidate_cache()
        found = map(os.path.basename, _guarded(self._system.find, self._root, maxdepth=1))
        return {name.removesuffix(SUFFIX) for name in found if name.startswith("ver_")}

    def delete_old(self, versions: Collection[str], age: float) -> None:
        for version in versions:
            with suppress(FileNotFoundError):
                if time.time() - self._system.modified(self._key(version)).timestamp() > age:
                    _guarded(self._remove, version)


def open_store(place: str, scratch: Path) -> Store:
    """Return the store at a URL, or in a folder."""
    scheme, colon, _ = place.partition("://")
    if colon and scheme not in LOCAL:
        return UrlStore(place, scratch)
    folder = Path(unquote(urlsplit(place).path) if colon else place)
    try:
        return FolderStore(folder)
    except OSError as error:
        raise ValueError(
            f"--store: expected a folder that can be made, got {folder} ({error.strerror or error})"
        ) from None


def _guarded(call: Callable[..., T], *arguments: object, **options: object) -> T:
    """Call a function of a file system. Whatever it raises is a `StoreError`."""
    try:
        return call(*arguments, **options)
    except Exception as error:  # of any kind: the package of the scheme raises its own
        raise StoreError(f"store: expected one that answers, got {type(error).__name__}") from error


def _check_size(version: str, found: int, size: int) -> None:
    if found != size:
        raise StoreError(f"store: expected {size:,} bytes of {version}, got {found:,}")


def _check_deleted(left: Iterator[str]) -> None:
    """Raise an error for a file that is still there after its deletion."""
    if (version := next(left, None)) is not None:
        raise StoreError(f"store: expected the file of {version} to be deleted, got one that is still there")
