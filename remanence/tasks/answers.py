"""A model's answers and their scores."""

from __future__ import annotations

import re
from typing import NamedTuple


class Likelihood(NamedTuple):
    """The likelihood of a text that follows another text.

    `log` is the log-probability. `greedy` tells whether each token was the most likely one; if so, `after` is
    the text of the most likely next token.
    """

    log: float
    greedy: bool
    after: str = ""

    def states(self, value: str) -> bool:
        """Whether the scored text is the most likely text, and `value`, with which it ends, is complete
        there.
        """
        return self.greedy and contains_value(value + self.after, value)


class Answer(NamedTuple):
    """The generated text, and the likelihood of each option."""

    text: str
    options: list[Likelihood]

    @property
    def ranked(self) -> list[int]:
        """The indices of the options, the most likely first. Of equal options the last comes first, because
        it is never the right one.
        """
        order = range(len(self.options) - 1, -1, -1)
        return sorted(order, key=lambda index: -self.options[index].log)


def contains_value(text: str, value: str) -> bool:
    """Whether a text states a value completely: "13608", "136.5" and "136,000" do not state 136."""
    pattern = rf"(?<!\w)(?<!\d[.,]){re.escape(value)}(?!\w)(?![.,:-]\d)"
    return re.search(pattern, text, re.IGNORECASE) is not None
