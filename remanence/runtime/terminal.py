"""What the command line says. Control characters are shown, not sent: a name or a text in a stranger's file cannot
move the cursor, clear the screen or rename the window.

`echo` is for our own lines, `echo_generated` for what a model says, `cli/console.py: Console` for tables and bars.
`guarded` is for all others: warnings, logs and libraries, which write to stdout and stderr as they like.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

LAYOUT = "\n\t"
"""Control characters that belong to a text of several lines."""
CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # C0, delete, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # turn the direction in which text is shown
    "\u2028\u2029"  # end a line
    "\ud800-\udfff]"  # surrogates: bytes of a file's name that are no UTF-8, or half a character of JSON
)


SURROGATES = re.compile("[\ud800-\udfff]")
"""What no stream of UTF-8 can take."""


def shown(text: str, keep: str = LAYOUT) -> str:
    """The text with its control characters written out, as ``\\x1b``, but for those to `keep`."""
    return CONTROL.sub(lambda found: found[0] if found[0] in keep else _escape(found[0]), text)


def _escape(character: str) -> str:
    # JSON leaves no character below delete as it is, and writes the others like this: it stays JSON.
    return repr(character)[1:-1] if character < "\x7f" else f"\\u{ord(character):04x}"


def echo(text: str, *, error: bool = False) -> None:
    """Print one line to stdout or stderr, whatever is in the text."""
    print(shown(text, keep=""), file=sys.stderr if error else sys.stdout, flush=error)


def echo_json(data: Any) -> None:
    """Print data as JSON of several lines, in which JSON itself escapes control characters."""
    print(json.dumps(data, indent=1))


def echo_generated(text: str) -> None:
    """Print what a model says as it comes: to a pipe or a file as it is, to a terminal with control characters shown.

    They are shown one by one, so that a sequence is caught that comes in several pieces.
    """
    stream = unguarded(sys.stdout)
    stream.write(shown(text) if stream.isatty() else SURROGATES.sub("\ufffd", text))
    stream.flush()


@contextmanager
def guarded() -> Iterator[None]:
    """Meanwhile, whatever is written to stdout and stderr has its control characters shown."""
    stdout, stderr = (cast(TextIO, _Guard(stream)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(stdout), redirect_stderr(stderr):
        yield


def unguarded(stream: TextIO) -> TextIO:
    """The stream behind the guards, for what has been made harmless or is meant to be raw."""
    while isinstance(stream, _Guard):
        stream = stream.behind
    return stream


class _Guard:
    def __init__(self, stream: TextIO) -> None:
        self.behind = stream

    def write(self, text: str) -> int:
        self.behind.write(shown(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind, name)
