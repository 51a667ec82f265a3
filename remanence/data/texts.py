"""Local texts, or datasets of the hub, as documents and as sentences."""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from remanence.core.tokens import Tokenizer
from remanence.data.sources import LINES, OPENERS, _read, documents, files, kind
from remanence.data.streams import PREFIX, parts

SENTENCE = 1000
"""Characters after which a sentence without an end is cut."""
SPARE = 16
"""Tokens of hay kept behind a stretch: a sentence may have a few less where it stands first."""

Encode = Callable[[str], list[int]]


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
        """Sentence after sentence of all documents, white space made single."""
        for document in self:
            held = ""
            for piece in decoded(document):
                held += piece
                *whole, held = re.split(r"(?<=[.!?])\s+", held)
                for sentence in whole:
                    yield from _plain(sentence)
            yield from _plain(held)


def decoded(document: Iterable[bytes]) -> Iterator[str]:
    """A document's text: its pieces may be cut inside a character."""
    return codecs.iterdecode(document, "utf-8", "replace")


def _plain(sentence: str) -> Iterator[str]:
    words = " ".join(sentence.split())
    for start in range(0, len(words), SENTENCE):
        yield words[start : start + SENTENCE]


def lines(what: str, source: str | None, hint: str) -> list[dict[str, Any]]:
    """The entries of a jsonl file, compressed or not."""
    if source is None or not Path(source).is_file() or kind(Path(source)) not in LINES:
        raise ValueError(f"{what}: expected {hint}, got {source or 'none'}; --{what}=PATH gives one")
    path, found = Path(source), []
    with OPENERS.get(path.suffix, lambda p: open(p, "rb"))(path) as file:
        for number, line in enumerate(_read(path, file.readline), 1):
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
    """Sentences and their tokens, from which a stretch of exactly so many tokens can be cut.

    Tokens are those of a sentence with the space before it, as a text has it; only what a text begins with has none.
    """

    def __init__(self, sentences: list[str], tokens: np.ndarray, borders: np.ndarray, encode: Encode) -> None:
        self.sentences, self.tokens, self.borders, self.encode = sentences, tokens, borders, encode
        self.parts: dict[int, Hay] = {}

    @classmethod
    def of(cls, what: str, sentences: Iterable[str], tokenizer: Tokenizer, least: int, rows: int = 2) -> Hay:
        """As many sentences as give several times the tokens that are needed at least: stretches can begin at several places."""
        tokens, borders, kept = array("i"), array("q", [0]), []
        for sentence in sentences:
            tokens.extend(tokenizer.encode(" " + sentence))
            borders.append(len(tokens))
            kept.append(sentence)
            if len(tokens) >= rows * least:
                break
        if len(tokens) < least:
            raise ValueError(f"{what}: expected a text of at least {least:,} tokens, got {len(tokens):,}")
        return cls(kept, np.array(tokens, np.int32), np.array(borders, np.int64), tokenizer.encode)

    def part(self, least: int) -> Hay:
        """What `of` gives for so many tokens: a short text is the same whatever longer ones are asked for beside it."""
        if least not in self.parts:
            count = min(int(np.searchsorted(self.borders, 2 * least)), len(self.sentences))
            end = int(self.borders[count])
            self.parts[least] = Hay(self.sentences[:count], self.tokens[:end], self.borders[: count + 1], self.encode)
        return self.parts[least]

    @cached_property
    def text(self) -> str:
        return " ".join(self.sentences)

    def begin(self, count: int, chance: np.random.Generator) -> int:
        """The number of a sentence, drawn of those that so many tokens follow."""
        last = int(np.searchsorted(self.borders[:-1], len(self.tokens) - count - SPARE, "right"))
        return int(chance.integers(max(1, last)))

    def stretch(self, first: int, count: int, *, space: bool) -> tuple[np.ndarray, np.ndarray]:
        """So many tokens from the beginning of a sentence on, with or without a space, and the sentences' borders in them."""
        opening = np.array(self.encode(" " * space + self.sentences[first]), np.int32)
        after = int(self.borders[first + 1])
        tokens = np.concatenate([opening, self.tokens[after : after + max(0, count - len(opening))]])[:count]
        borders = np.concatenate([[0], self.borders[first + 1 :] - after + len(opening)])
        return tokens, borders[borders <= count]


def most(encode: Encode, sentence: str) -> int:
    """The tokens a sentence has at most: with a space before it, or as the first of a text."""
    return max(len(encode(" " + sentence)), len(encode(sentence)))


def hidden(hay: Hay, needles: Sequence[str], depths: Sequence[float], size: int, chance: np.random.Generator) -> np.ndarray:
    """So many tokens: hay, with each needle at the border nearest to its depth, 0 being the beginning and 1 the end."""
    order = sorted(range(len(needles)), key=lambda index: depths[index])
    inside = [np.array(hay.encode(" " + needles[index]), np.int32) for index in order]
    first = hay.begin(size - sum(map(len, inside)), chance)
    for leading in (False, True):  # whether a needle is what the text begins with, and the hay follows
        if leading:
            inside[0] = np.array(hay.encode(needles[order[0]]), np.int32)
        text, borders = hay.stretch(first, size - sum(map(len, inside)), space=leading)
        places = [int(borders[np.abs(borders - depths[index] * len(text)).argmin()]) for index in order]
        if not places or places[0]:
            break
    if leading:
        places[0] = 0
    parts, last = [], 0
    for place, needle in zip(places, inside, strict=True):
        parts += [text[last:place], needle]
        last = place
    return np.concatenate([*parts, text[last:]])
