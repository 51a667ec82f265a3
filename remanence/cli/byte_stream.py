"""Reads text files as one stream of bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path


class ByteStream:
    """The bytes of several files as one stream, read in pieces. `position` is the number of bytes read so
    far, and `size` is the total number.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files, self.position = files, 0
        self.size = sum(path.stat().st_size for path in files)

    def fingerprint(self) -> str:
        """Return a hash of the files' sizes and beginnings, which shows whether --resume was given the same
        files.
        """
        digest = hashlib.sha256()
        for path in self.files:
            with open(path, "rb") as file:
                digest.update(f"{path.stat().st_size} ".encode() + file.read(1 << 16))
        return digest.hexdigest()[:32]

    def __iter__(self) -> Iterator[bytes]:
        """Yield the content of all files in pieces."""
        for path in self.files:
            with open(path, "rb") as file:
                while piece := file.read(1 << 14):
                    self.position += len(piece)
                    yield piece
