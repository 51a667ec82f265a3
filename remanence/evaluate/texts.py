"""Local texts, or datasets of the hub, as documents and as sentences."""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from remanence.data.sources import LINES, OPENERS, documents, files, kind
from remanence.data.streams import PREFIX, parts
from remanence.tokens import Tokenizer

SENTENCE = 1000
"""Characters after which a sentence without an end is cut."""


class Texts:
    """The documents of a file, a folder or ``hf:NAME[:CONFIG[:SPLIT]]``: as many as there are, each as pieces of bytes."""

    def __init__(self, what: str, source: str | None, hint: str) -> None:
        if source is None:
            raise ValueError(f"{what}: expected {hint}, got none; --{what}=PATH gives one")
        self.source = source
        self.paths: list[Path] = []
        if not source.startswith(PREFIX):
            if not Path(source).exists():
                raise ValueError(f"{what}: expected {hint}, got {source}, which is not there")
            self.paths = files([Path(source)])

    @cached_property
    def identity(self) -> dict[str, str]:
        """The data's name, and a digest of its files' names, sizes and beginnings: enough to see that they are other ones."""
        digest = hashlib.sha256(self.source.encode() if not self.paths else b"")
        for path in self.paths:
            with open(path, "rb") as file:
                digest.update(f"{path.name} {path.stat().st_size} ".encode() + file.read(1 << 16))
        return {"data": Path(self.source).name if self.paths else self.source, "digest": digest.hexdigest()[:16]}

    def of(self, path: Path | None) -> Iterator[Iterable[bytes]]:
        """One file's documents, or all of the hub's; empty ones are passed over."""
        found = documents(path) if path else (document for part in parts(self.source) for document in part.documents("text"))
        return (document for document in found if document is not None)

    def __iter__(self) -> Iterator[Iterable[bytes]]:
        places: list[Path | None] = [*self.paths] or [None]
        for place in places:
            yield from self.of(place)

    def sentences(self) -> Iterator[str]:
        """Sentence after sentence of all documents, white space made single, each with a space behind it."""
        for document in self:
            held = ""
            for piece in document:
                held += piece.decode("utf-8", "replace")
                *whole, held = re.split(r"(?<=[.!?])\s+", held)
                for sentence in whole:
                    yield from _plain(sentence)
            yield from _plain(held)


def _plain(sentence: str) -> Iterator[str]:
    words = " ".join(sentence.split())
    for start in range(0, len(words), SENTENCE):
        yield words[start : start + SENTENCE] + " "


def lines(what: str, source: str | None, hint: str) -> list[dict[str, Any]]:
    """The entries of a jsonl file, compressed or not."""
    if source is None or not Path(source).is_file() or kind(Path(source)) not in LINES:
        raise ValueError(f"{what}: expected {hint}, got {source or 'none'}; --{what}=PATH gives one")
    path, found = Path(source), []
    with OPENERS.get(path.suffix, lambda p: open(p, "rb"))(path) as file:
        for number, line in enumerate(file, 1):
            try:
                entry = json.loads(line) if line.strip() else None
            except (json.JSONDecodeError, UnicodeDecodeError):
                raise ValueError(f"{path}: line {number}: expected a JSON object, got {line[:40]!r}") from None
            if entry is not None:
                found.append(entry)
    if not found:
        raise ValueError(f"{path}: expected at least one line, got none")
    return found


class Hay:
    """Tokens of sentences, with the borders between them, from which a stretch of exactly so many tokens can be cut."""

    def __init__(self, what: str, sentences: Iterable[str], tokenizer: Tokenizer, least: int) -> None:
        """As many sentences as give twice the tokens that are needed at least, so that stretches can begin at several places."""
        tokens, borders, text, size = array("i"), array("q", [0]), [], 0
        for sentence in sentences:
            tokens.extend(tokenizer.encode(sentence))
            borders.append(len(tokens))
            text.append(sentence)
            size += len(sentence)
            if len(tokens) >= 2 * least:
                break
        if len(tokens) < least:
            raise ValueError(f"{what}: expected a text of at least {least:,} tokens, got {len(tokens):,}")
        self.tokens, self.borders = np.array(tokens, np.int32), np.array(borders, np.int64)
        self.text = "".join(text)

    def stretch(self, count: int, chance: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """So many tokens from the beginning of some sentence on, and the borders of sentences among them."""
        begins = self.borders[: np.searchsorted(self.borders, len(self.tokens) - count, "right")]
        start = int(chance.choice(begins))
        inside = self.borders[(self.borders >= start) & (self.borders <= start + count)] - start
        return self.tokens[start : start + count], inside


def hidden(hay: np.ndarray, borders: np.ndarray, needles: list[list[int]], depths: list[float]) -> np.ndarray:
    """The hay with each needle at the border nearest to its depth, 0 being the beginning and 1 the end."""
    places = [int(borders[np.abs(borders - depth * len(hay)).argmin()]) for depth in depths]
    parts, last = [], 0
    for index in sorted(range(len(needles)), key=lambda index: (places[index], depths[index])):
        parts += [hay[last : places[index]], np.array(needles[index], np.int32)]
        last = places[index]
    return np.concatenate([*parts, hay[last:]])
