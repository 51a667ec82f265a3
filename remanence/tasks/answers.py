"""Answers of a model and their scores."""

from __future__ import annotations

import re
from typing import NamedTuple


class Likelihood(NamedTuple):
    """Of a text after another: the log of its probability, whether each of its tokens was the likeliest, and if so the
    text of the likeliest token after it.
    """

    log: float
    greedy: bool
    after: str = ""

    def states(self, value: str) -> bool:
        """Whether the likeliest text is the one that was scored, and `value`, which it ends with, ends there."""
        return self.greedy and states(value + self.after, value)


class Answer(NamedTuple):
    """The generated text, and how likely each of the options was."""

    said: str
    options: list[Likelihood]

    @property
    def ranked(self) -> list[int]:
        """The options' indices, the likeliest first. Of equal ones the last comes first: it is never the right one."""
        order = range(len(self.options) - 1, -1, -1)
        return sorted(order, key=lambda index: -self.options[index].log)


def states(said: str, value: str) -> bool:
    """Whether a text states a value that also ends there: "13608", "136.5" and "136,000" do not state 136."""
    pattern = rf"(?<!\w)(?<!\d[.,]){re.escape(value)}(?!\w)(?![.,:-]\d)"
    return re.search(pattern, said, re.IGNORECASE) is not None
