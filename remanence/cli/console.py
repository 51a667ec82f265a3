"""The console for tables and progress bars. All text is printed literally: markup is not interpreted, and
control characters are escaped.
"""

from __future__ import annotations

import sys
from typing import Any

import rich.console
from rich.text import Text

from remanence.runtime.terminal import shown, unguarded


class Console(rich.console.Console):
    """A rich console for stdout, or for stderr with `error`. The escape sequences of rich itself are printed
    unchanged; all other text is escaped in `render_str`, which rich calls to measure and to print text.
    """

    def __init__(self, *, error: bool = False, width: int | None = None) -> None:
        stream = unguarded(sys.stderr if error else sys.stdout)
        super().__init__(file=stream, width=width, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the text with control characters escaped."""
        return super().render_str(shown(text, keep=""), **options)


def coloured(text: str, style: str) -> Text:
    """Return the text in a color, with control characters escaped, for a cell of a table."""
    return Text(shown(text, keep=""), style=style)
