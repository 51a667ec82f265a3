"""Read documents from text, jsonl and parquet files, from file formats of verticals, and from folders,
compressed or not.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import sys
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from remanence.verticals import Format, formats, imported

PLAIN, LINES, TABLE = (".txt", ".md", ".text"), (".jsonl", ".ndjson"), ".parquet"
"""The suffixes of plain text files, of files with one JSON object per line, and of tables."""
FORMATS: dict[str, Format] = {suffix: each for each in formats() for suffix in each.suffixes}
"""The file formats of verticals, by suffix."""
PIECE = 1 << 18
"""The number of bytes read from a file at a time."""
ROWS = 1024
"""The number of rows read from a parquet file at a time."""

Document = Iterable[bytes]
"""A text as UTF-8, in pieces that may be cut anywhere, even inside a character."""


def _zstd(path: Path) -> IO[bytes]:
    """Open a .zst file for reading. Raises ValueError if the library is not installed."""
    try:
        import zstandard  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise ValueError(
            f"{path}: reading .zst needs the extra 'data'; pip install 'remanence[data]'"
        ) from None
    return io.BufferedReader(_Frames(path, zstandard.ZstdDecompressor()))


class _Frames(io.RawIOBase):
    """The decompressed bytes of all frames of a .zst file. Raises EOFError if the last frame is cut off. The
    library's own reader reads only the first frame and does not detect this.
    """

    def __init__(self, path: Path, unpacker: Any) -> None:
        self.pieces, self.held = self._unpacked(path, unpacker), memoryview(b"")

    def _unpacked(self, path: Path, unpacker: Any) -> Generator[bytes, None, None]:
        """Yield the decompressed pieces of the file."""
        with open(path, "rb") as file:
            frame, data = None, file.read(PIECE)
            while data:
                frame = frame or unpacker.decompressobj()
                yield frame.decompress(data)
                data = frame.unused_data or file.read(PIECE)
                frame = None if frame.eof else frame
            if frame:
                raise EOFError("it ends in the middle")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.held and (piece := next(self.pieces, None)) is not None:
            self.held = memoryview(piece)
        size = min(len(buffer), len(self.held))
        buffer[:size], self.held = self.held[:size], self.held[size:]
        return size

    def close(self) -> None:
        self.pieces.close()
        super().close()


def _parquet(path: Path) -> Any:
    """Import and return pyarrow. Raises ValueError if it is not installed."""
    try:
        import pyarrow.parquet  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise ValueError(
            f"{path}: reading .parquet needs the extra 'data'; pip install 'remanence[data]'"
        ) from None
    return pyarrow


SAMPLE, FOREIGN = 1 << 16, 0.2
"""The number of bytes at the start of a file to examine, and the share of non-text bytes from which it counts
as binary. Texts in Latin-1 have a smaller share.
"""
OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".bz2": bz2.open,
    ".zst": _zstd,
}
"""Functions that open compressed files, by suffix."""


def kind(path: Path) -> str | None:
    """Return the suffix of a file without that of its compression, such as ".jsonl", or None if the file type
    is not supported.
    """
    inner = Path(path.stem) if path.suffix in OPENERS else path
    return inner.suffix if inner.suffix in (*PLAIN, *LINES, *FORMATS, TABLE) else None


def files(sources: list[Path]) -> list[Path]:
    """Return all files to read, including those in folders, in an order that does not depend on the machine."""
    found: list[Path] = []
    for source in sources:
        if source.is_dir():
            inside = sorted(path for path in source.rglob("*") if path.is_file() and kind(path))
            if not inside:
                suffixes = ", ".join((*PLAIN, *LINES, TABLE, *FORMATS))
                *names, last = ("text", "jsonl", "parquet", *(each.name for each in formats()))
                wanted = f"{', '.join(names)} or {last} files ({suffixes}, also compressed)"
                raise ValueError(f"{source}: expected {wanted}, got none")
            if any(kind(path) == TABLE for path in inside):  # a README in such a folder describes the dataset
                inside = [path for path in inside if path.name != "README.md"]
            found += inside
        elif source.is_file():
            found.append(source)
        else:
            raise ValueError(f"{source}: no such file or folder")
    return found


@dataclass(frozen=True)
class File:
    """A file to read. Its documents make one shard."""

    path: Path

    full = None
    """The number of tokens after which a shard is full. None: a file's shard is never split."""

    def names(self, number: int) -> Iterator[str]:
        """Yield the names of the shards that this file makes as source `number`."""
        yield f"{number:05d}"

    def made_from(self) -> dict[str, object]:
        """Return what the shard depends on: the file's name, size and modification time."""
        stat = self.path.stat()
        return {"source": self.path.name, "size": stat.st_size, "changed": stat.st_mtime_ns}

    def documents(self, field: str, skip: int = 0) -> Iterator[Document | None]:
        """Return the documents of the file. `skip` must be 0."""
        assert not skip, "a file makes one shard, which begins at its beginning"
        return documents(self.path, field)


def documents(path: Path, field: str = "text") -> Iterator[Document | None]:
    """Yield the documents of one file. In jsonl and parquet files, a document is the `field` of a line or
    row. Formats of verticals have their own rule (`remanence.verticals.Format`). Any other file is one
    document.

    Yields None for a line or row whose field is null. Each document must be read to its end before the next.
    """
    if kind(path) == TABLE:
        yield from _rows(path, field)
        return
    if (suffix := kind(path)) in FORMATS:
        yield from imported(FORMATS[suffix].documents)(path)
        return
    with OPENERS.get(path.suffix, lambda p: open(p, "rb"))(path) as file:
        if kind(path) in LINES:
            yield from _lines(path, read_pieces(path, file.readline), field)
        else:
            yield read_pieces(path, lambda: file.read(PIECE))


def foreign_share(data: bytes) -> float:
    """Return the share of bytes that are not text: invalid UTF-8 and control characters."""
    text = codecs.getincrementaldecoder("utf-8")("ignore").decode(data)  # the last character may be cut
    control = sum(character < " " and character not in "\t\n\r\f\x1b" for character in text)
    return (len(data) - len(text.encode()) + control) / max(1, len(data))


def binary_warning(path: Path, *, unpack: bool = True) -> str | None:
    """Return a one-line warning if the beginning of a file does not look like text, else None. Files of
    jsonl, parquet and verticals' formats are not examined, unless `unpack` is False.
    """
    if unpack and kind(path) in (TABLE, *LINES, *FORMATS):
        return None
    opener = OPENERS.get(path.suffix) if unpack else None
    with (opener or (lambda each: open(each, "rb")))(path) as file:
        share = foreign_share(next(read_pieces(path, lambda: file.read(SAMPLE)), b""))
    if share < FOREIGN:
        return None
    return f"{path} does not look like text: {100 * share:.0f} % of its bytes are not UTF-8"


def read_pieces(path: Path, read: Callable[[], bytes]) -> Iterator[bytes]:
    """Yield what `read` returns until the file ends. Raises ValueError with the path if a compressed file is
    damaged.
    """
    damage: list[type[Exception]] = [lzma.LZMAError, zlib.error, EOFError, OSError]
    if "zstandard" in sys.modules:
        damage.append(sys.modules["zstandard"].ZstdError)
    try:
        while data := read():
            yield data
    except tuple(damage) as error:
        raise ValueError(f"{path}: damaged ({error})") from None


def _lines(path: Path, lines: Iterable[bytes], field: str) -> Iterator[Document | None]:
    """Yield the `field` of each line of a jsonl file, or None where it is null. Empty lines are skipped."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry: Any = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise ValueError(f"{path}: line {number}: expected a JSON object, got {line[:40]!r}") from None
        if not isinstance(entry, dict) or not isinstance(entry.get(field, 0), str | None):
            raise ValueError(f"{path}: line {number}: expected a text in {field!r}; --field names another")
        yield None if entry[field] is None else [entry[field].encode("utf-8", "surrogatepass")]


def _rows(path: Path, field: str) -> Iterator[Document | None]:
    """Yield the texts of a parquet column, reading a few rows at a time. Bytes that are not UTF-8 are kept."""
    if path.suffix != TABLE:
        raise ValueError(f"{path}: expected a parquet file as it is, got a compressed one; unpack it first")
    arrow = _parquet(path)
    with open(path, "rb") as file:
        try:
            # Without these two options a whole row group, which may be the entire file, is held in memory.
            table = arrow.parquet.ParquetFile(file, buffer_size=PIECE, pre_buffer=False)
            column = _column(path, table.schema_arrow, field, arrow)
            for batch in table.iter_batches(ROWS, columns=[column], use_threads=False):
                for text in batch.column(0).cast("large_binary").to_pylist():
                    yield [text] if text is not None else None
        except (arrow.ArrowException, OSError) as error:
            raise ValueError(
                f"{path}: damaged, or not a parquet file ({' '.join(str(error).split())})"
            ) from None


def _column(path: Path, schema: Any, field: str, arrow: Any) -> str:
    """Return `field` if the table has a column of texts with this name, else raise ValueError."""
    if field not in schema.names:
        raise ValueError(
            f"{path}: expected a column {field!r}, got {', '.join(schema.names)}; --field names another"
        )
    type_ = schema.field(field).type
    types = arrow.types
    if not (types.is_string(type_) or types.is_large_string(type_)):
        raise ValueError(f"{path}: column {field!r}: expected texts, got {type_}; --field names another")
    return field
