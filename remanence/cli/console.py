"""The console for tables and progress bars. All text is printed literally: markup is not interpreted, and
control characters are escaped.
"""

from __future__ import annotations

import sys
from typing import Any

import rich.console
from rich.text import Text

from remanence.runtime.terminal import escape_controls, unescaped_stream


class Console(rich.console.Console):
    """A rich console for stdout, or for stderr with `error`. The escape sequences of rich itself are printed
    unchanged; all other text is escaped in `render_str`, which rich calls to measure and to print text.
    """

    def __init__(self, *, error: bool = False, width: int | None = None) -> None:
        stream = unescaped_stream(sys.stderr if error else sys.stdout)
        super().__init__(file=stream, width=width, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the text with control characters escaped."""
        return super().render_str(escape_controls(text, allowed=""), **options)


def coloured(text: str, style: str) -> Text:
    """Return the text in a color, with control characters escaped, for a cell of a table."""
    return Text(escape_controls(text, allowed=""), style=style)
