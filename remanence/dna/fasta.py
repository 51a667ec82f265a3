"""Streaming FASTA reader: sequences are read in pieces, never as a whole, even if a genome is a single line."""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from remanence.data.sources import OPENERS, PIECE, read_pieces
from remanence.dna.alphabet import AMBIGUOUS, BASES, INVALID, TOKENS, WHITESPACE, describe_invalid_letter
from remanence.runtime.choices import short_repr

_CLEANED = bytes(BASES.encode()[token] if token < len(BASES) else 0 for token in TOKENS.tolist())
"""Translation table from bytes to bases. Invalid letters become zero bytes."""
_BLANK = bytes(byte for byte, token in enumerate(TOKENS.tolist()) if token == WHITESPACE)
"""All bytes that are white space."""
_WRONG = bytes(byte for byte, token in enumerate(TOKENS.tolist()) if token == INVALID)
"""All bytes that are invalid in a sequence."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""The UTF-8 byte order mark, which some editors write at the start of a file."""
NAME = 100
"""Maximum number of bytes of a header line that are kept as the record's name."""


def clean(raw: bytes) -> bytes:
    """Return the bases of a piece of a sequence, in upper case and without white space.

    Invalid letters become zero bytes.
    """
    return raw.translate(_CLEANED, _BLANK)


def find_invalid(raw: bytes) -> int:
    """Return the index of the first invalid letter in a piece of a sequence, or its length if there is none."""
    return len(raw) - len(raw.lstrip(bytes(set(range(256)) - set(_WRONG))))


class Record(NamedTuple):
    """A sequence of a FASTA file. Its pieces must be read before the next record is requested."""

    name: str
    """Text of the header, without the '>'."""
    line: int
    """Line number of the header."""
    pieces: Iterator[bytes]
    """Iterator over pieces of the bases."""


def read_records(path: Path, size: int = PIECE) -> Iterator[Record]:
    """Iterate over the sequences of a FASTA file, compressed or not, reading `size` bytes at a time.

    Lower case is read as upper case, U as T, and ambiguity codes as N; a warning at the end gives the number
    of ambiguity codes. Text before the first header, a record without bases, and invalid letters raise errors
    that name the line.
    """
    found = _parse(path, size)
    header = next(found)
    while isinstance(header, _Header):
        record_pieces = _RecordPieces(found)
        pieces = iter(record_pieces)
        yield Record(header.name, header.line, pieces)
        deque(pieces, maxlen=0)  # skip the pieces that the caller did not read
        header = record_pieces.next


def read_documents(path: Path) -> Iterator[Iterator[bytes]]:
    """Iterate over the sequences of a file as documents, each an iterator over pieces of bases."""
    return (record.pieces for record in read_records(path))


class _Header(NamedTuple):
    """A header line: its text without the '>', and its line number."""

    name: str
    line: int


class _RecordPieces:
    """Iterator over the pieces of a record. At its end, the header of the next record is in `next`."""

    def __init__(self, found: Iterator[_Header | bytes]) -> None:
        self.found = found
        self.next: _Header | bytes = b""

    def __iter__(self) -> Iterator[bytes]:
        for part in self.found:
            if isinstance(part, _Header):
                self.next = part
                return
            yield part


def _parse(path: Path, size: int) -> Iterator[_Header | bytes]:
    """Yield each header, followed by the cleaned pieces of bases of its record."""
    line, bases, header, ambiguous = 1, 0, None, Counter[str]()
    for new_line, is_header, raw in _split_lines(path, size):
        line = new_line
        if is_header:
            if header is not None and not bases:
                raise ValueError(_empty_record_error(path, header))
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
            at = find_invalid(raw)
            where = line + raw[:at].count(b"\n")
            raise ValueError(
                f"{path}: line {where}: expected bases ({BASES}, U or ambiguity codes), "
                f"got {describe_invalid_letter(raw[at : at + 4])}"
            )
        if cleaned:
            _count_ambiguous(raw, cleaned, ambiguous)
            bases += len(cleaned)
            yield cleaned
    if header is None:
        raise ValueError(f"{path}: expected FASTA records, got an empty file")
    if not bases:
        raise ValueError(_empty_record_error(path, header))
    if ambiguous:
        letters = ", ".join(f"{count:,} {letter}" for letter, count in sorted(ambiguous.items()))
        warnings.warn(f"{path}: ambiguity codes are read as N: {letters}", stacklevel=2)


def _empty_record_error(path: Path, header: _Header) -> str:
    """Return the error message for a record without bases."""
    return f"{path}: line {header.line}: expected bases after the header {short_repr(header.name)}, got none"


def _count_ambiguous(raw: bytes, cleaned: bytes, ambiguous: Counter[str]) -> None:
    """Add the ambiguity codes of a piece to the counter. Pieces without an N have none and are skipped."""
    if b"N" in cleaned:
        for letter in AMBIGUOUS:
            if found := raw.count(letter.encode()) + raw.count(letter.lower().encode()):
                ambiguous[letter] += found


def _split_lines(path: Path, size: int) -> Iterator[tuple[int, bool, bytes]]:
    """Yield (line number, whether it is a header, bytes) for headers without their '>' and for pieces of the
    text between headers. The line number is that of the start.
    """
    line, inside, held, fresh, first = 1, False, b"", True, True
    with OPENERS.get(path.suffix, lambda p: open(p, "rb"))(path) as file:
        for piece in read_pieces(path, lambda: file.read(size)):
            if first:
                held, first = held + piece, len(held + piece) < len(_BYTE_ORDER_MARK)
                if first:
                    continue
                piece, held = held.removeprefix(_BYTE_ORDER_MARK), b""
            while piece:
                if inside or (fresh and piece[:1] == b">"):  # up to the end of the header line
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
