"""Local texts or datasets of the hub, as documents and as sentences."""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from remanence.data.sources import LINES, OPENERS, documents, files, kind, read_pieces
from remanence.data.streams import PREFIX, parts

SENTENCE = 1000
"""The number of characters after which a sentence without an end is cut."""


class Texts:
    """The documents of a file, a folder or ``hf:NAME[:CONFIG[:SPLIT]]``, each as an iterable of pieces of
    bytes.
    """

    def __init__(self, argument: str, source: str | None, hint: str) -> None:
        """`argument` is the argument name, and `hint` the expected value, to show in error messages."""
        if source is None:
            option = f"--{argument.removeprefix('--')}"
            raise ValueError(f"{argument}: expected {hint}, got none; {option}=PATH gives one")
        self.source = source
        self.paths: list[Path] = []
        if not source.startswith(PREFIX):
            if not Path(source).exists():
                raise ValueError(f"{argument}: expected {hint}, got {source}, which is not there")
            self.paths = files([Path(source)])

    @cached_property
    def identity(self) -> dict[str, str]:
        """The data's name, and a digest of its files' names, sizes and first bytes, which is enough to notice
        other files.
        """
        digest = hashlib.sha256(self.source.encode() if not self.paths else b"")
        for path in self.paths:
            with open(path, "rb") as file:
                digest.update(f"{path.name} {path.stat().st_size} ".encode() + file.read(1 << 16))
        return {
            "data": Path(self.source).name if self.paths else self.source,
            "digest": digest.hexdigest()[:16],
        }

    def of(self, path: Path | None) -> Iterator[Iterable[bytes]]:
        """Yield the documents of one file, or all documents of the hub's dataset if `path` is None. Rows
        without text are skipped.
        """
        found = (
            documents(path)
            if path
            else (document for part in parts(self.source) for document in part.documents("text"))
        )
        return (document for document in found if document is not None)

    def __iter__(self) -> Iterator[Iterable[bytes]]:
        paths: list[Path | None] = [*self.paths] or [None]
        for path in paths:
            yield from self.of(path)

    def sentences(self) -> Iterator[str]:
        """Yield the sentences of all documents in order, with each run of white space replaced by one space."""
        for document in self:
            held = ""
            for piece in decoded(document):
                held += piece
                *complete, held = re.split(r"(?<=[.!?])\s+", held)
                for sentence in complete:
                    yield from _plain(sentence)
            yield from _plain(held)


def decoded(document: Iterable[bytes]) -> Iterator[str]:
    """Yield the text of a document. Its pieces may be cut inside a character."""
    return codecs.iterdecode(document, "utf-8", "replace")


def _plain(sentence: str) -> Iterator[str]:
    """Yield a sentence with single spaces, cut into pieces of at most `SENTENCE` characters."""
    words = " ".join(sentence.split())
    for start in range(0, len(words), SENTENCE):
        yield words[start : start + SENTENCE]


def lines(argument: str, source: str | None, hint: str) -> list[dict[str, Any]]:
    """Return the entries of a jsonl file, compressed or not. `argument` is the argument name, and `hint` the
    expected value, to show in error messages.
    """
    if source is None or not Path(source).is_file() or kind(Path(source)) not in LINES:
        raise ValueError(f"{argument}: expected {hint}, got {source or 'none'}; --{argument}=PATH gives one")
    path, found = Path(source), []
    with OPENERS.get(path.suffix, lambda p: open(p, "rb"))(path) as file:
        for number, line in enumerate(read_pieces(path, file.readline), 1):
            try:
                entry = json.loads(line) if line.strip() else None
            except (json.JSONDecodeError, UnicodeDecodeError):
                raise ValueError(
                    f"{path}: line {number}: expected a JSON object, got {line[:40]!r}"
                ) from None
            if entry is not None:
                found.append(entry)
    if not found:
        raise ValueError(f"{path}: expected at least one line, got none")
    return found
