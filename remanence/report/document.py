"""A document as a list of parts. It is written as Markdown with separate pictures, or as one HTML page that
contains the pictures.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import NamedTuple

MARK = "<!-- made by remanence report -->"
"""Comment in the first lines of every report, by which an earlier report is recognised and may be
overwritten.
"""


class Heading(NamedTuple):
    """A heading; level 1 is the title."""

    text: str
    level: int = 2


class Text(NamedTuple):
    """A paragraph."""

    text: str


class Table(NamedTuple):
    """A table with a header row."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


class Picture(NamedTuple):
    """A PNG image; `name` is its file name without the suffix."""

    name: str
    caption: str
    png: bytes
    """Contents of the PNG file."""


Part = Heading | Text | Table | Picture
"""One part of a document."""


def markdown(parts: Sequence[Part], folder: str) -> str:
    """Return the document as Markdown. `folder` is the folder of the pictures, relative to the document."""
    return "\n\n".join([MARK, *(_markdown(part, folder) for part in parts)]) + "\n"


def _markdown(part: Part, folder: str) -> str:
    """Return one part as Markdown."""
    if isinstance(part, Heading):
        return f"{'#' * part.level} {_plain(part.text)}"
    if isinstance(part, Text):
        return _plain(part.text)
    if isinstance(part, Picture):
        return f"![{_plain(part.caption)}]({folder}/{part.name}.png)"
    lines = [part.header, ["---"] * len(part.header), *part.rows]
    return "\n".join(f"| {' | '.join(map(_plain, line))} |" for line in lines)


def _plain(text: str) -> str:
    """Escape the characters that have a meaning in Markdown or HTML, and join all lines to one."""
    for sign in "\\`*_[]|":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.replace("&", "&amp;").replace("<", "&lt;").split())


def page(parts: Sequence[Part], title: str) -> str:
    """Return the document as one HTML page that contains its pictures and style sheet."""
    style = (files("remanence.report") / "report.css").read_text(encoding="utf-8")
    head = [
        f'<!doctype html>\n{MARK}\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>",
    ]
    return "\n".join([*head, *map(_html, parts), "</body>\n</html>\n"])


def _html(part: Part) -> str:
    """Return one part as HTML."""
    if isinstance(part, Heading):
        return f"<h{part.level}>{escape(part.text)}</h{part.level}>"
    if isinstance(part, Text):
        return f"<p>{escape(part.text)}</p>"
    if isinstance(part, Picture):
        data, caption = base64.b64encode(part.png).decode(), escape(part.caption)
        image = f'<img alt="{caption}" src="data:image/png;base64,{data}">'
        return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"
    rows = "\n".join([_table_row("th", part.header), *(_table_row("td", row) for row in part.rows)])
    return f'<div class="wide"><table>\n{rows}\n</table></div>'


def _table_row(tag: str, cells: Sequence[str]) -> str:
    """Return a row of an HTML table. `tag` is "th" for header cells or "td" for other cells."""
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"
