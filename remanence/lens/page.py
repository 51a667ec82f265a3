"""The page: one file that needs nothing else, written piece by piece while a text of any length is read.

Each piece of the text is a block of JSON: its text, how many UTF-16 units of it belong to each token, and base64 of
little-endian arrays: signals float32 ``[t l signals]``; what each head kept, as a logarithm, float32 ``[t l h]``;
matches, as uint16 distances and then int8 cosines (127 is 1) ``[t l h k]``. The last block describes the others.
`unpack` reads a page back.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
from torch import Tensor

from remanence.lens.look import SIGNALS, TOP, Look
from remanence.memory.neural import NeuralMemory
from remanence.tokenizers.tokens import Tokenizer

COSINE = 127
"""What a cosine of 1 is written as."""


class Page:
    """``page = Page(file, ...)``, `add` for every look, `finish`."""

    def __init__(self, file: TextIO, tokenizer: Tokenizer, title: str) -> None:
        self.file, self.decoder, self.title = file, tokenizer.decoder(), title
        self.ends: list[int] = []
        self.norms: list[list[float]] = []
        head, tail = _asset("page.html").split("<!-- pieces -->")
        self.tail = tail.replace("/* script */", _asset("page.js"))
        self.file.write(head.replace("/* style */", _asset("page.css")).replace("{title}", escape(title)))

    def add(self, seen: Look) -> None:
        texts = [self.decoder.push(token) for token in seen.tokens]
        lengths = np.array([len(text.encode("utf-16-le", "surrogatepass")) // 2 for text in texts], "<u2")
        cosine = (seen.cosine.clamp(-1, 1) * COSINE).round()
        piece = {
            "text": "".join(texts),
            "lengths": _packed(lengths),
            "signals": _packed(_array(seen.signals, "<f4")),
            "keep": _packed(_array(seen.keep, "<f4")),
            "matches": _packed(_array(seen.distance, "<u2"), _array(cosine, "<i1")),
        }
        self._block("piece", piece)
        self.ends.append((self.ends[-1] if self.ends else 0) + len(seen.tokens))
        self.norms.append(seen.norm.tolist())
        self.heads, self.top = seen.distance.shape[2:]

    def finish(self, facts: str, layers: list[str], start: list[float], reach: int, conv: int) -> None:
        """Write what describes the page: facts as a line of text, the memories' names and their norms before the text,
        how far back matches were looked for, and the kernel of the convolutions.
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

    def _block(self, kind: str, data: dict[str, Any]) -> None:
        # No "<" of the text may stand in the page's source, where it could end the block.
        text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
        self.file.write(f'<script type="application/json" data-kind="{kind}">{text}</script>\n')


def page_bytes(memories: Sequence[NeuralMemory], size: int) -> int:
    """About how large the page of a text of so many bytes is, if each of its tokens is one. Arrays are base64."""
    heads = max(memory.heads for memory in memories)
    arrays = 2 + len(memories) * (4 * len(SIGNALS) + heads * (4 + 3 * TOP))
    frame = sum(len(_asset(f"page.{kind}")) for kind in ("html", "css", "js"))
    return frame + round(size * (1 + arrays * 4 / 3))


def _asset(name: str) -> str:
    return (files("remanence.lens") / name).read_text(encoding="utf-8")


def _array(tensor: Tensor, kind: str) -> np.ndarray[Any, Any]:
    return tensor.numpy().astype(kind)


def _packed(*arrays: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(b"".join(array.tobytes() for array in arrays)).decode()


class Unpacked(NamedTuple):
    """A page's data: ``tokens`` are their texts; the arrays are those of `Look`, for all of the text."""

    about: dict[str, Any]
    tokens: list[str]
    signals: np.ndarray[Any, Any]
    keep: np.ndarray[Any, Any]
    distance: np.ndarray[Any, Any]
    cosine: np.ndarray[Any, Any]


def unpack(path: str | Path) -> Unpacked:
    """Read a page's data back, for use elsewhere."""
    page = Path(path).read_text(encoding="utf-8")
    found = re.findall(r'<script type="application/json" data-kind="(\w+)">(.*?)</script>', page, re.DOTALL)
    blocks = [json.loads(text) for kind, text in found if kind == "piece"]
    abouts = [json.loads(text) for kind, text in found if kind == "about"]
    if len(abouts) != 1 or not blocks:
        raise ValueError(f"{path}: expected a page that `remanence lens` wrote, got something else")
    about = abouts[0]
    layers, heads, top = len(about["layers"]), about["heads"], about["kept"]
    tokens: list[str] = []
    parts: list[tuple[np.ndarray[Any, Any], ...]] = []
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
    return Unpacked(about, tokens, *(np.concatenate(column) for column in zip(*parts, strict=True)))
