"""Sequences from FASTA files, a piece at a time: a genome is never held as a whole, even if it is a single line."""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from remanence.data.sources import OPENERS, PIECE, read_pieces
from remanence.dna.alphabet import AMBIGUOUS, BAD, BASES, BLANK, TOKENS, wrong_letter
from remanence.runtime.choices import short_repr

_CLEANED = bytes(BASES.encode()[token] if token < len(BASES) else 0 for token in TOKENS.tolist())
_BLANK = bytes(byte for byte, token in enumerate(TOKENS.tolist()) if token == BLANK)
_WRONG = bytes(byte for byte, token in enumerate(TOKENS.tolist()) if token == BAD)
_MARK = b"\xef\xbb\xbf"
"""What some editors on Windows put in front of a text in UTF-8."""
NAME = 100
"""Bytes of a header that are kept."""


def clean(raw: bytes) -> bytes:
    """The bases of a part of a sequence, in capitals and without white space; a zero for what is no base."""
    return raw.translate(_CLEANED, _BLANK)


def wrong_at(raw: bytes) -> int:
    """Where a part of a sequence has its first letter that is no base."""
    return len(raw) - len(raw.lstrip(bytes(set(range(256)) - set(_WRONG))))


class Record(NamedTuple):
    """A sequence: its name, the line of its header, and its bases in pieces, to be read before the next record's."""

    name: str
    line: int
    pieces: Iterator[bytes]


def records(path: Path, size: int = PIECE) -> Iterator[Record]:
    """The sequences of a FASTA file, compressed or not, of which `size` bytes are read at a time.

    Lower case is read as upper case, U as T, and ambiguity codes as N, which a warning counts at the end. An error
    names the line of what is no DNA: text in front of the first header, a record without bases, any other letter.
    """
    found = _parts(path, size)
    header = next(found)
    while isinstance(header, _Header):
        rest = _Rest(found)
        pieces = iter(rest)
        yield Record(header.name, header.line, pieces)
        deque(pieces, maxlen=0)  # what was not asked for
        header = rest.next


def documents(path: Path) -> Iterator[Iterator[bytes]]:
    """The bases of each sequence, in pieces: a file as documents of text."""
    return (record.pieces for record in records(path))


class _Header(NamedTuple):
    name: str
    line: int


class _Rest:
    """The pieces up to the next header, which is then `next`."""

    def __init__(self, found: Iterator[_Header | bytes]) -> None:
        self.found = found
        self.next: _Header | bytes = b""

    def __iter__(self) -> Iterator[bytes]:
        for part in self.found:
            if isinstance(part, _Header):
                self.next = part
                return
            yield part


def _parts(path: Path, size: int) -> Iterator[_Header | bytes]:
    """Headers, and the bases that follow each in pieces."""
    line, bases, header, ambiguous = 1, 0, None, Counter[str]()
    for new_line, is_header, raw in _lines(path, size):
        line = new_line
        if is_header:
            if header is not None and not bases:
                raise ValueError(_empty(path, header))
            header, bases = _Header(raw.decode("utf-8", "replace").strip(), line), 0
            yield header
            continue
        cleaned = clean(raw)
        if header is None and cleaned:
            before = raw[: len(raw) - len(raw.lstrip())].count(b"\n")
            start = short_repr(raw.strip()[:1].decode("latin-1"))
            wanted = "expected a header that begins with '>'"
            raise ValueError(f"{path}: line {line + before}: {wanted}, got a line that begins with {start}")
        if b"\0" in cleaned:
            at = wrong_at(raw)
            where = line + raw[:at].count(b"\n")
            raise ValueError(
                f"{path}: line {where}: expected bases ({BASES}, U or ambiguity codes), "
                f"got {wrong_letter(raw[at : at + 4])}"
            )
        if cleaned:
            _count(raw, cleaned, ambiguous)
            bases += len(cleaned)
            yield cleaned
    if header is None:
        raise ValueError(f"{path}: expected FASTA records, got an empty file")
    if not bases:
        raise ValueError(_empty(path, header))
    if ambiguous:
        letters = ", ".join(f"{count:,} {letter}" for letter, count in sorted(ambiguous.items()))
        warnings.warn(f"{path}: ambiguity codes are read as N: {letters}", stacklevel=2)


def _empty(path: Path, header: _Header) -> str:
    return f"{path}: line {header.line}: expected bases after the header {short_repr(header.name)}, got none"


def _count(raw: bytes, cleaned: bytes, ambiguous: Counter[str]) -> None:
    """Count ambiguity codes, which are rare: only where there is an N at all."""
    if b"N" in cleaned:
        for letter in AMBIGUOUS:
            if found := raw.count(letter.encode()) + raw.count(letter.lower().encode()):
                ambiguous[letter] += found


def _lines(path: Path, size: int) -> Iterator[tuple[int, bool, bytes]]:
    """Headers without their '>', and what stands between them, in pieces cut anywhere; the line each begins on."""
    line, inside, held, fresh, first = 1, False, b"", True, True
    with OPENERS.get(path.suffix, lambda p: open(p, "rb"))(path) as file:
        for piece in read_pieces(path, lambda: file.read(size)):
            if first:
                held, first = held + piece, len(held + piece) < len(_MARK)
                if first:
                    continue
                piece, held = held.removeprefix(_MARK), b""
            while piece:
                if inside or (fresh and piece[:1] == b">"):  # to the end of the header's line
                    part, end, piece = piece.partition(b"\n")
                    held = (held + part)[: NAME + 1]
                    inside, fresh = not end, bool(end)
                    if end:
                        yield line, True, held[1:]
                        line, held = line + 1, b""
                    continue
                at = piece.find(b"\n>") + 1
                part, piece = (piece[:at], piece[at:]) if at else (piece, b"")
                yield line, False, part
                line, fresh = line + part.count(b"\n"), part.endswith(b"\n")
    if first and held:  # a file of one or two bytes
        yield (line, True, held[1:]) if held[:1] == b">" else (line, False, held)
    elif inside:
        yield line, True, held[1:]
