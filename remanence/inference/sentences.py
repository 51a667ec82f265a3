"""The sentences that a session has stored: what they are, when they were read, and which of them a text means."""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import NamedTuple, Protocol, runtime_checkable

from remanence.attached.sentences.model import Sentence
from remanence.inference.sampling import Sampling
from remanence.model import State
from remanence.runtime.choices import short_repr

SIMILAR, MARGIN = 0.5, 0.1
"""The smallest cosine at which a text means a sentence that does not contain it, and how much smaller that of any other
sentence must be.
"""
SAMPLING = Sampling(max_tokens=256, temperature=0.0, no_repeat=16)
"""The default settings of generation at the command line: the most likely tokens, without loops. A phrase of 16 tokens
is longer than a name or a number that an answer may need twice.
"""
NOTE = "times"
"""The key of the times in the notes of a memory file."""
ANSWERED = "answered"
"""The key in the notes of a memory file that says whether the last tokens were generated."""
LATEST = 2**36
"""A limit for times, in seconds since 1970."""


@runtime_checkable
class StoresSentences(Protocol):
    """Interface of a model whose states contain sentences that can be listed, searched and removed."""

    def stored(self, state: State) -> list[list[Sentence]]: ...

    def search(self, state: State, tokens: Sequence[int]) -> list[list[tuple[int, float]]]: ...

    def end_of_answer(self, state: State) -> list[int]: ...

    def close_sentence(self, state: State) -> State: ...

    def without(self, state: State, remove: Sequence[int], row: int = 0) -> State: ...


class StoredSentence(NamedTuple):
    """A sentence in the memory of a session.

    text
        The sentence.
    written
        The local time at which it was read; None if it is not known.
    similarity
        Its cosine to the text that was searched for; None without a search.
    """

    text: str
    written: datetime | None
    similarity: float | None = None


class ReadTimes:
    """When the tokens of a session were read: pairs of a number of tokens and a time in seconds since 1970. The tokens
    up to this number, and behind that of the pair before, were read at this time.
    """

    def __init__(self, pairs: Sequence[tuple[int, int]] = ()) -> None:
        self.pairs = list(pairs)

    def add(self, tokens: int) -> None:
        """Note that the tokens up to the number `tokens` have been read by now."""
        now = int(time.time())
        self.crop(tokens)
        if self.pairs and self.pairs[-1][1] == now:
            self.pairs.pop()
        if not self.pairs or self.pairs[-1][0] < tokens:
            self.pairs.append((tokens, now))

    def crop(self, tokens: int) -> None:
        """Remove the times of tokens behind the number `tokens`."""
        while self.pairs and self.pairs[-1][0] > tokens:
            self.pairs.pop()

    def at(self, tokens: int) -> datetime | None:
        """The local time at which the tokens up to the number `tokens` were read; None if it is not known."""
        index = bisect_left(self.pairs, (tokens, 0))
        return datetime.fromtimestamp(self.pairs[index][1]).astimezone() if index < len(self.pairs) else None

    def since(self, tokens: int) -> list[list[int]]:
        """The pairs, as data for JSON, of the tokens behind the number `tokens`."""
        return [list(pair) for pair in self.pairs if pair[0] > tokens]

    @classmethod
    def from_json(cls, where: str, data: object) -> ReadTimes:
        """The times in the notes of a memory file. `where` is its path, for errors."""
        if isinstance(data, list) and all(map(_is_pair, data)):
            pairs = [(int(tokens), int(seconds)) for tokens, seconds in data]
            if all(a < b for (a, _), (b, _) in pairwise(pairs)):
                return cls(pairs)
        raise ValueError(
            f"{where}: {NOTE}: expected pairs of tokens and seconds in order, got {short_repr(data)}"
        )


def _is_pair(value: object) -> bool:
    """Whether JSON data is a pair of a number of tokens and a time."""
    if not isinstance(value, list) or [type(each) for each in value] != [int, int]:
        return False
    return value[0] >= 0 and 0 <= value[1] < LATEST


def plain(text: str) -> str:
    """A text in lower case, without marks around words and with single spaces, to compare sentences; as it is if it has
    no words.
    """
    return " ".join(re.findall(r"\w+(?:[^\w\s]\w+)*", text.casefold())) or text.strip()


def _containing(wanted: str, by_content: Mapping[str, StoredSentence]) -> list[StoredSentence]:
    """The sentences that contain a text."""
    return [each for content, each in by_content.items() if wanted and f" {wanted} " in f" {content} "]


def _nearest(by_content: Mapping[str, StoredSentence]) -> list[StoredSentence]:
    """The most similar sentence and those that are about as similar, the most similar first."""
    similar = [each for each in by_content.values() if (each.similarity or 0.0) >= SIMILAR]
    return [each for each in similar if (each.similarity or 0.0) > (similar[0].similarity or 0.0) - MARGIN]


def meant(text: str, ranked: Sequence[StoredSentence]) -> str:
    """The sentence of a memory that a text means: the one that it is, the only one that contains it, or else the one
    that is most similar. Other sentences come before questions. `ranked` has the sentences with their
    similarities, the most similar first.

    Raises a ValueError if there is no such sentence, or if it can be several.
    """
    by_content: dict[str, StoredSentence] = {}
    for sentence in ranked:
        by_content.setdefault(plain(sentence.text), sentence)
    wanted = plain(text)
    if wanted and wanted in by_content:
        return by_content[wanted].text
    statements = {key: each for key, each in by_content.items() if not each.text.rstrip().endswith("?")}
    # A question about a fact does not state it.
    found = _containing(wanted, statements) or _containing(wanted, by_content)
    found = found or _nearest(statements) or _nearest(by_content)
    if len(found) == 1:
        return found[0].text
    if not found:
        raise ValueError(
            f"text: expected words of a stored sentence, got {short_repr(text)}, which fits none; nothing was removed"
        )
    some = ", ".join(short_repr(each.text) for each in found[:3]) + (", ..." if len(found) > 3 else "")
    raise ValueError(
        f"text: expected words of one stored sentence, got {short_repr(text)}, which fits {len(found)}: {some}; "
        "nothing was removed; give more of its words"
    )
