"""A user's text in memory, split into a training part and a held-out part at its end."""

from __future__ import annotations

import warnings
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from remanence.data.shards import INDEX, dtype_for
from remanence.data.texts import Texts
from remanence.runtime.overrides import format_length
from remanence.tokenizers.tokens import Tokenizer

SHARE, HELD = 10, 1 << 16
"""One in `SHARE` bytes at the end of a text is held out, but at most `HELD` bytes, which are read in seconds.
"""
LEAST, MOST = 4096, 1 << 28
"""The minimum size of a text in bytes, and the maximum number of bytes that are read."""


class OwnText(NamedTuple):
    """The bytes of the documents to train on and of the held-out documents. `cut` tells whether the first
    held-out document is the rest of the last training document.
    """

    train: list[bytes]
    held: list[bytes]
    cut: bool

    @property
    def size(self) -> int:
        """The number of bytes to train on."""
        return sum(map(len, self.train))


def read_text(argument: str, source: str | None) -> OwnText:
    """Read a file, a folder or a dataset hf:NAME, and hold out its end. `argument` is the argument name to show
    in error messages.
    """
    if source and (Path(source) / INDEX).is_file():
        raise ValueError(
            f"{argument}: expected texts, got the prepared folder {source}; "
            f"`remanence train text --data.kind=documents --data.path={source}` reads it"
        )
    texts = Texts(argument, source, "a text file, a folder of them or hf:NAME")
    documents, size = list[bytes](), 0
    for pieces in texts:
        document = b"".join(pieces)[: MOST - size]
        size += len(document)
        documents += [document] if document else []
        if size == MOST:
            read = f"{format_length(MOST)} bytes"
            warnings.warn(
                f"{source}: only the first {read} are read; `remanence data prepare` takes all", stacklevel=2
            )
            break
    if not size:
        raise ValueError(
            f"{argument}: expected a text of at least {LEAST:,} bytes, got {source}, which is empty"
        )
    if size < LEAST:
        raise ValueError(f"{argument}: expected a text of at least {LEAST:,} bytes, got {size:,} in {source}")
    return _split(documents, min(size // SHARE, HELD))


def _split(documents: list[bytes], wanted: int) -> OwnText:
    """Hold out the last `wanted` bytes, or slightly more to avoid cutting a character. A document at the
    border is split.
    """
    train, held = list(documents), list[bytes]()
    while wanted >= len(train[-1]):
        held.insert(0, train.pop())
        wanted -= len(held[0])
    at = len(train[-1]) - wanted
    while wanted and at and train[-1][at] & 0xC0 == 0x80:  # inside a UTF-8 character
        at -= 1
    if wanted and at:
        held.insert(0, train[-1][at:])
        train[-1] = train[-1][:at]
    return OwnText(train, held, bool(wanted and at))


class OwnTokens:
    """Tokenized documents in memory, with the same interface as a prepared folder (`data/shards.py: Tokens`).

    If `rows` is given, documents are split so that there is at least one for each row.
    """

    def __init__(self, text: OwnText, tokenizer: Tokenizer, rows: int | None = None) -> None:
        self.tokenizer, self.vocabulary = tokenizer, tokenizer.vocabulary
        end = [] if tokenizer.end is None else [tokenizer.end]
        tokens, borders = list[np.ndarray](), [0]
        for number, document in enumerate(text.train):
            found = [token for piece in tokenizer.stream([document]) for token in piece]
            if not (text.cut and number == len(text.train) - 1):
                found += end
            tokens.append(np.asarray(found, dtype_for(self.vocabulary)))
            borders.append(borders[-1] + len(found))
        self.shards = [np.concatenate(tokens)]
        if rows is not None:
            borders = _split_spans(borders, max(1, borders[-1] // rows))
        self.start, self.end = np.array(borders[:-1]), np.array(borders[1:])
        self.lengths = self.end - self.start

    @cached_property
    def digest(self) -> str:
        """A digest of all tokens and document ends."""
        return sha256(self.shards[0].tobytes() + self.end.astype("<i8").tobytes()).hexdigest()[:32]

    def __len__(self) -> int:
        return len(self.lengths)

    def piece(self, document: int, start: int, stop: int) -> np.ndarray:
        """Return the tokens `start` to `stop` of a document, or fewer if it ends before."""
        first, end = int(self.start[document]), int(self.end[document])
        return self.shards[0][min(first + start, end) : min(first + stop, end)]


def _split_spans(borders: list[int], most: int) -> list[int]:
    """Insert borders so that no span between two borders is longer than `most`."""
    found = [0]
    for start, end in pairwise(borders):
        found += [*range(start + most, end, most), end]
    return found
