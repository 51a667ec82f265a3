"""Cutting a stream of tokens into sentences, and finding where answers begin and end.

Sentences are cut in plain text and in users' messages. Answers and messages of other roles are not stored.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from remanence.attached.sentences.config import SentenceConfig
from remanence.attached.sentences.vocabulary import END, NEWLINE, OPENS, SHORTENED, SPECIAL, STOP

TEXT, OTHER, HEADER, ANSWER = range(4)
"""The part of the chat format that a token is in: text to store; a message that is not stored; the tokens before a
message; an answer.
"""


class Position(NamedTuple):
    """Where the scan of one row is. All positions count from the start of the document.

    part
        One of `TEXT`, `OTHER`, `HEADER` and `ANSWER`.
    header
        In `HEADER`: the number of its tokens that were scanned.
    roles
        In `HEADER`: the roles that it can still be, 1 for a user and 2 for the assistant, as a sum.
    start
        The first token of the open sentence.
    question_start, question_end
        The last message of a user.
    answer_start
        The first token of the answer.
    last
        The flags of the last token.
    """

    part: int = TEXT
    header: int = 0
    roles: int = 0
    start: int = 0
    question_start: int = 0
    question_end: int = 0
    answer_start: int = 0
    last: int = 0


class Scanned(NamedTuple):
    """The result of `Segmenter.scan`: the number of tokens scanned (`length`), the sentences that ended
    ``(start, end)``, and the new position.
    """

    length: int
    sentences: list[tuple[int, int]]
    position: Position


class Segmenter:
    """Scans tokens. `flags` are the flags of the vocabulary ``[v]``."""

    def __init__(self, config: SentenceConfig, flags: np.ndarray) -> None:
        self.config, self.flags = config, flags

    def answer_length(self, tokens: np.ndarray, at: int, position: Position) -> int:
        """The number of tokens that belong to the open answer. The first of them is at position `at`."""
        ends = np.flatnonzero(self.flags[tokens] & SPECIAL)
        left = self.config.answer - (at - position.answer_start)
        return max(0, min(len(tokens), left, int(ends[0]) if len(ends) else len(tokens)))

    def scan(self, tokens: np.ndarray, at: int, position: Position) -> Scanned:
        """Scan tokens outside an answer, the first of which is at position `at`, up to the start of the next
        answer.
        """
        if position.part == ANSWER:
            position = position._replace(part=OTHER)
        flags = self.flags[tokens]
        special = flags & SPECIAL > 0
        before = np.concatenate([np.array([position.last], np.uint8), flags[:-1]])
        flags = np.where((before & SHORTENED > 0) & (flags & STOP > 0), flags & ~np.uint8(END), flags)
        previous = np.concatenate([np.array([position.last], np.uint8), flags[:-1]])
        cuts = (previous & NEWLINE > 0) | ((previous & END > 0) & (flags & OPENS > 0))
        marks = np.flatnonzero(special | cuts).tolist()
        found: list[tuple[int, int]] = []
        index, mark, total = 0, 0, len(tokens)
        while index < total:
            if position.part == HEADER and not special[index]:
                position = self._header(int(tokens[index]), at + index, position)
                index += 1
                if position.part == ANSWER:
                    break
                continue
            while mark < len(marks) and marks[mark] < index:
                mark += 1
            stop = marks[mark] if mark < len(marks) else total
            place = at + stop  # the token at `stop` may end the sentence before it
            if position.part == TEXT:
                while min(place, at + total - 1) - position.start >= self.config.longest:
                    found.append((position.start, position.start + self.config.longest))
                    position = position._replace(start=position.start + self.config.longest)
            if stop == total:
                index = total
            elif special[stop]:
                if position.part == TEXT and place - position.start >= 2:
                    found.append((position.start, place))
                position = self._special(int(tokens[stop]), place, position)
                index = stop + 1
            else:
                if position.part == TEXT and place - position.start >= self.config.shortest:
                    found.append((position.start, place))
                    position = position._replace(start=place)
                index = stop + 1
        last = int(flags[index - 1]) if index else position.last
        return Scanned(index, found, position._replace(last=last))

    def _special(self, token: int, place: int, position: Position) -> Position:
        """The position after a token of the chat format."""
        form = self.config.format
        if position.part == TEXT and position.question_start > position.question_end:
            position = position._replace(question_end=place)
        roles = (token == form.user[0]) + 2 * (token == form.assistant[0])
        if roles:
            return position._replace(part=HEADER, header=1, roles=roles)
        return position._replace(part=TEXT, start=place + 1)

    def _header(self, token: int, place: int, position: Position) -> Position:
        """The position after the next token of a header."""
        count, form = position.header, self.config.format
        roles = 0
        for role, ids in ((1, form.user), (2, form.assistant)):
            if position.roles & role and count < len(ids) and ids[count] == token:
                roles += role
                if count + 1 == len(ids):
                    if role == 2:
                        return position._replace(part=ANSWER, answer_start=place + 1)
                    return position._replace(part=TEXT, start=place + 1, question_start=place + 1)
        return position._replace(part=HEADER if roles else OTHER, header=count + 1, roles=roles)
