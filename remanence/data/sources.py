"""Where documents come from: text files, jsonl, folders of them, compressed or not."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

PLAIN, LINES = (".txt", ".md", ".text"), (".jsonl", ".ndjson")


def _zstd(path: Path) -> IO[bytes]:
    try:
        import zstandard  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise ValueError(f"{path}: reading .zst needs the extra 'data'; pip install 'remanence[data]'") from None
    return zstandard.open(path, "rb")


OPENERS: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open, ".zst": _zstd}


def kind(path: Path) -> str | None:
    """The suffix that says what a file holds, a compression's set aside; None for a file that is not ours to read."""
    inner = Path(path.stem) if path.suffix in OPENERS else path
    return inner.suffix if inner.suffix in (*PLAIN, *LINES) else None


def files(sources: list[Path]) -> list[Path]:
    """Every file to read, folders searched, in an order that does not depend on the machine."""
    found: list[Path] = []
    for source in sources:
        if source.is_dir():
            inside = sorted(path for path in source.rglob("*") if path.is_file() and kind(path))
            if not inside:
                raise ValueError(
                    f"{source}: expected text or jsonl files ({', '.join((*PLAIN, *LINES))}, also compressed), got none"
                )
            found += inside
        elif source.is_file():
            found.append(source)
        else:
            raise ValueError(f"{source}: no such file or folder")
    return found


def documents(path: Path, field: str = "text") -> Iterator[bytes]:
    """The documents of one file as UTF-8: each line's `field` of jsonl, the whole of any other."""
    with OPENERS.get(path.suffix, lambda p: open(p, "rb"))(path) as file:
        try:
            if kind(path) in LINES:
                yield from _lines(path, file, field)
            else:
                yield file.read()
        except (lzma.LZMAError, gzip.BadGzipFile, EOFError) as error:
            raise ValueError(f"{path}: damaged ({error})") from None


def _lines(path: Path, file: IO[bytes], field: str) -> Iterator[bytes]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            entry: Any = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise ValueError(f"{path}: line {number}: expected a JSON object, got {line[:40]!r}") from None
        if not isinstance(entry, dict) or not isinstance(entry.get(field), str):
            raise ValueError(f"{path}: line {number}: expected a text in {field!r}; --field names another")
        yield entry[field].encode("utf-8", "surrogatepass")
