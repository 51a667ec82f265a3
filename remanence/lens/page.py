"""The lens page: one self-contained HTML file, written piece by piece while a text of any length is read.

Each piece of the text is a block of JSON with the text, the length of each token in UTF-16 units, and little-endian
arrays in base64: the signals, float32 ``[t l signals]``; log(1 - forget), float32 ``[t l h]``; and the matches
``[t l h k]``, as uint16 distances followed by int8 cosines (127 stands for 1). The last block holds the metadata.
`unpack` reads the data of a page.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeAlias

import numpy as np
from torch import Tensor

from remanence.lens.recording import SIGNALS, TOP, Recording
from remanence.memory.neural import NeuralMemory
from remanence.tokenizers.tokens import Tokenizer

Array: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.number]]"
"""A numpy array of numbers."""
COSINE = 127
"""The integer that represents a cosine of 1."""


class Page:
    """Writes one page: create ``page = Page(file, tokenizer, title)``, call `add` for every recording, then
    `finish`.
    """

    def __init__(self, file: TextIO, tokenizer: Tokenizer, title: str) -> None:
        self.file, self.decoder, self.title = file, tokenizer.decoder(), title
        self.ends: list[int] = []
        self.norms: list[list[float]] = []
        head, tail = _asset("page.html").split("<!-- pieces -->")
        self.tail = tail.replace("/* script */", _asset("page.js"))
        self.file.write(head.replace("/* style */", _asset("page.css")).replace("{title}", escape(title)))

    def add(self, recording: Recording) -> None:
        """Write the next piece of the text."""
        texts = [self.decoder.push(token) for token in recording.tokens]
        lengths = np.array([len(text.encode("utf-16-le", "surrogatepass")) // 2 for text in texts], "<u2")
        cosine = (recording.cosine.clamp(-1, 1) * COSINE).round()
        piece = {
            "text": "".join(texts),
            "lengths": _base64(lengths),
            "signals": _base64(_array(recording.signals, "<f4")),
            "keep": _base64(_array(recording.keep, "<f4")),
            "matches": _base64(_array(recording.distance, "<u2"), _array(cosine, "<i1")),
        }
        self._block("piece", piece)
        self.ends.append((self.ends[-1] if self.ends else 0) + len(recording.tokens))
        self.norms.append(recording.norm.tolist())
        self.heads, self.top = recording.distance.shape[2:]

    def finish(self, facts: str, layers: list[str], start: list[float], reach: int, conv: int) -> None:
        """Write the metadata and the end of the page.

        Args:
            facts: a line of text about the model and the text.
            layers: the name of each memory.
            start: the norm of each memory's weights before the text.
            reach: number of earlier tokens among which matches were searched.
            conv: kernel size of the short convolutions.
        """
        about = {
            "title": self.title,
            "facts": facts,
            "layers": layers,
            "start": start,
            "reach": reach,
            "conv": conv,
            "signals": SIGNALS,
            "rest": self.decoder.finish(),
            "ends": self.ends,
            "norms": self.norms,
            "heads": self.heads,
            "kept": self.top,
        }
        self._block("about", about)
        self.file.write(self.tail)

    def _block(self, kind: str, data: Mapping[str, object]) -> None:
        """Write a block of JSON. `kind` is "piece" or "about"."""
        # An unescaped "<" in the text could end the HTML element.
        text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
        self.file.write(f'<script type="application/json" data-kind="{kind}">{text}</script>\n')


def estimate_page_bytes(memories: Sequence[NeuralMemory], size: int) -> int:
    """Return the approximate size in bytes of the page for a text of `size` bytes, assuming one byte per
    token.
    """
    heads = max(memory.heads for memory in memories)
    arrays = 2 + len(memories) * (4 * len(SIGNALS) + heads * (4 + 3 * TOP))
    frame = sum(len(_asset(f"page.{kind}")) for kind in ("html", "css", "js"))
    return frame + round(size * (1 + arrays * 4 / 3))


def _asset(name: str) -> str:
    """Return the content of a file in this package."""
    return (files("remanence.lens") / name).read_text(encoding="utf-8")


def _array(tensor: Tensor, dtype: str) -> Array:
    """Convert a CPU tensor to a numpy array of a dtype."""
    return tensor.numpy().astype(dtype)


def _base64(*arrays: Array) -> str:
    """Return the bytes of arrays, one after the other, as base64 text."""
    return base64.b64encode(b"".join(array.tobytes() for array in arrays)).decode()


class PageData(NamedTuple):
    """The data in a page: its metadata, the text of each token, and the arrays of `Recording` for the whole text."""

    about: dict[str, Any]
    tokens: list[str]
    signals: Array
    keep: Array
    distance: Array
    cosine: Array


def unpack(path: str | Path) -> PageData:
    """Read the data in a page that `remanence lens` wrote, as numpy arrays."""
    page = Path(path).read_text(encoding="utf-8")
    found = re.findall(r'<script type="application/json" data-kind="(\w+)">(.*?)</script>', page, re.DOTALL)
    blocks = [json.loads(text) for kind, text in found if kind == "piece"]
    abouts = [json.loads(text) for kind, text in found if kind == "about"]
    if len(abouts) != 1 or not blocks:
        raise ValueError(f"{path}: expected a page that `remanence lens` wrote, got something else")
    about = abouts[0]
    layers, heads, top = len(about["layers"]), about["heads"], about["kept"]
    tokens: list[str] = []
    parts: list[tuple[Array, ...]] = []
    for block in blocks:
        text = block["text"].encode("utf-16-le", "surrogatepass")
        lengths = np.frombuffer(base64.b64decode(block["lengths"]), "<u2")
        ends = 2 * lengths.cumsum(dtype=np.int64)
        for length, end in zip(lengths.tolist(), ends.tolist(), strict=True):
            tokens.append(text[end - 2 * length : end].decode("utf-16-le"))
        raw, shape = base64.b64decode(block["matches"]), (len(lengths), layers, heads, top)
        count = len(raw) // 3
        signals = np.frombuffer(base64.b64decode(block["signals"]), "<f4").reshape(len(lengths), layers, -1)
        keep = np.frombuffer(base64.b64decode(block["keep"]), "<f4").reshape(len(lengths), layers, heads)
        distance = np.frombuffer(raw, "<u2", count).reshape(shape)
        cosine = np.frombuffer(raw, "<i1", count, 2 * count).reshape(shape) / COSINE
        parts.append((signals, keep, distance, cosine))
    return PageData(about, tokens, *(np.concatenate(column) for column in zip(*parts, strict=True)))
