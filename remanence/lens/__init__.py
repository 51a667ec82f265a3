"""A text as a memory saw it, as one HTML page: `look` reads the text, `Page` writes what was recorded as it comes."""

from remanence.lens.look import REACH, SIGNALS, Look, look, matches, norms, stride, watched
from remanence.lens.page import Page, page_bytes, unpack

__all__ = [
    "REACH",
    "SIGNALS",
    "Look",
    "Page",
    "look",
    "matches",
    "norms",
    "page_bytes",
    "stride",
    "unpack",
    "watched",
]
