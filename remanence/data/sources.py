"""Where documents come from: text files, jsonl, parquet, formats of verticals, folders of them, compressed or not."""

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
FORMATS: dict[str, Format] = {suffix: each for each in formats() for suffix in each.suffixes}
"""The formats of verticals by suffix."""
PIECE = 1 << 18
"""Bytes of a file that are read at a time."""
ROWS = 1024
"""Rows of a parquet file that are read at a time."""

Document = Iterable[bytes]
"""A text as UTF-8, in pieces cut anywhere."""


def _zstd(path: Path) -> IO[bytes]:
    try:
        import zstandard  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise ValueError(
            f"{path}: reading .zst needs the extra 'data'; pip install 'remanence[data]'"
        ) from None
    return io.BufferedReader(_Frames(path, zstandard.ZstdDecompressor()))


class _Frames(io.RawIOBase):
    """A .zst file unpacked: all its frames, and an error if the last is cut off. The library's reader does neither."""

    def __init__(self, path: Path, unpacker: Any) -> None:
        self.pieces, self.held = self._unpacked(path, unpacker), memoryview(b"")

    def _unpacked(self, path: Path, unpacker: Any) -> Generator[bytes, None, None]:
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
    try:
        import pyarrow.parquet  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise ValueError(
            f"{path}: reading .parquet needs the extra 'data'; pip install 'remanence[data]'"
        ) from None
    return pyarrow


SAMPLE, FOREIGN = 1 << 16, 0.2
"""Bytes of a file that are looked at, and the share of them that makes it no text. Languages in Latin-1 have less."""
OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".bz2": bz2.open,
    ".zst": _zstd,
}


def kind(path: Path) -> str | None:
    """The suffix of a file's content, without that of a compression; None for a file that is not read."""
    inner = Path(path.stem) if path.suffix in OPENERS else path
    return inner.suffix if inner.suffix in (*PLAIN, *LINES, *FORMATS, TABLE) else None


def files(sources: list[Path]) -> list[Path]:
    """Every file to read, folders searched, in an order that does not depend on the machine."""
    found: list[Path] = []
    for source in sources:
        if source.is_dir():
            inside = sorted(path for path in source.rglob("*") if path.is_file() and kind(path))
            if not inside:
                suffixes = ", ".join((*PLAIN, *LINES, TABLE, *FORMATS))
                *names, last = ("text", "jsonl", "parquet", *(each.name for each in formats()))
                wanted = f"{', '.join(names)} or {last} files ({suffixes}, also compressed)"
                raise ValueError(f"{source}: expected {wanted}, got none")
            if any(kind(path) == TABLE for path in inside):  # then a README describes the dataset
                inside = [path for path in inside if path.name != "README.md"]
            found += inside
        elif source.is_file():
            found.append(source)
        else:
            raise ValueError(f"{source}: no such file or folder")
    return found


@dataclass(frozen=True)
class File:
    """A file to read, whose documents make one shard."""

    path: Path

    full = None
    """Tokens after which a shard is full: never."""

    def names(self, number: int) -> Iterator[str]:
        """Of the shards it makes, as the source of this number."""
        yield f"{number:05d}"

    def made_from(self) -> dict[str, object]:
        """What its shard depends on, as far as can be seen without reading."""
        stat = self.path.stat()
        return {"source": self.path.name, "size": stat.st_size, "changed": stat.st_mtime_ns}

    def documents(self, field: str, skip: int = 0) -> Iterator[Document | None]:
        assert not skip, "a file makes one shard, which begins at its beginning"
        return documents(self.path, field)


def documents(path: Path, field: str = "text") -> Iterator[Document | None]:
    """The documents of one file: each line's or row's `field` of jsonl and parquet; what a vertical's format
    has (`remanence.verticals.Format`); any other file is one document.

    None stands for a line or row whose field is null. A document must be read to its end before the next.
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
    """The share of bytes that are no text in UTF-8: parts of no character, and control characters."""
    text = codecs.getincrementaldecoder("utf-8")("ignore").decode(data)  # a character may be cut at the end
    control = sum(character < " " and character not in "\t\n\r\f\x1b" for character in text)
    return (len(data) - len(text.encode()) + control) / max(1, len(data))


def binary_warning(path: Path, *, unpack: bool = True) -> str | None:
    """One line about a file whose beginning does not look like text; None if it does. Tables are not looked at."""
    if unpack and kind(path) in (TABLE, *LINES, *FORMATS):
        return None
    opener = OPENERS.get(path.suffix) if unpack else None
    with (opener or (lambda each: open(each, "rb")))(path) as file:
        share = foreign_share(next(read_pieces(path, lambda: file.read(SAMPLE)), b""))
    if share < FOREIGN:
        return None
    return f"{path} does not look like text: {100 * share:.0f} % of its bytes are not UTF-8"


def read_pieces(path: Path, read: Callable[[], bytes]) -> Iterator[bytes]:
    """What `read` returns until the file ends; an error names a compressed file that cannot be unpacked."""
    damage: list[type[Exception]] = [lzma.LZMAError, zlib.error, EOFError, OSError]
    if "zstandard" in sys.modules:
        damage.append(sys.modules["zstandard"].ZstdError)
    try:
        while data := read():
            yield data
    except tuple(damage) as error:
        raise ValueError(f"{path}: damaged ({error})") from None


def _lines(path: Path, lines: Iterable[bytes], field: str) -> Iterator[Document | None]:
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
    """A parquet file's column of texts, a few rows at a time; bytes that are not UTF-8 stay as they are."""
    if path.suffix != TABLE:
        raise ValueError(f"{path}: expected a parquet file as it is, got a compressed one; unpack it first")
    arrow = _parquet(path)
    with open(path, "rb") as file:
        try:
            # Without these two a row group, which may be the entire file, is held in memory.
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
    if field not in schema.names:
        raise ValueError(
            f"{path}: expected a column {field!r}, got {', '.join(schema.names)}; --field names another"
        )
    type_ = schema.field(field).type
    types = arrow.types
    if not (types.is_string(type_) or types.is_large_string(type_)):
        raise ValueError(f"{path}: column {field!r}: expected texts, got {type_}; --field names another")
    return field
