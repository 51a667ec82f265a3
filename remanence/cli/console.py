"""The console for tables and bars: to it any text is text, without markup and with control characters shown."""

from __future__ import annotations

import sys
from typing import Any

import rich.console
from rich.text import Text

from remanence.runtime.terminal import shown, unguarded


class Console(rich.console.Console):
    """Rich's console of stdout, or of stderr. Its own sequences go behind the guards; every text goes through
    `render_str`, to be measured and to be printed.
    """

    def __init__(self, *, error: bool = False, width: int | None = None) -> None:
        stream = unguarded(sys.stderr if error else sys.stdout)
        super().__init__(file=stream, width=width, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(shown(text, keep=""), **options)


def coloured(text: str, style: str) -> Text:
    """A cell in a colour."""
    return Text(shown(text, keep=""), style=style)
