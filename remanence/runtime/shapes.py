"""The axis legend: the meaning of each letter in a shape.

Shapes are written the same way in annotations, ``Float[Tensor, "b t h e"]``, and in docstrings, ``[b t h
e]``. An axis written as a word (``width``, ``keys``) means that word. Axes of one or two letters are listed
here. `AXES` applies everywhere, `ROOM_AXES` only within one subpackage.

Arithmetic is written out: ``r+1``, ``c-1``, ``b*t``, and ``pf`` for p times f. A prime marks a part of an
axis: ``c'`` is the last tokens of a chunk. ``#r`` is r or 1; ``*a`` and ``...`` are any number of leading
axes. Capital letters in kernels are constants of that kernel.

The legend is for readers. Tests check the annotations against real shapes, and that every letter in use is
listed.
"""

from __future__ import annotations

AXES: dict[str, str] = {
    "b": "batch: rows of a call",
    "t": "tokens in a call",
    "d": "model width",
    "v": "vocabulary",
    "h": "heads",
    "e": "head width, and the width of a value",
    "f": "width of a key's features, or of a layer inside a memory",
    "i": "inputs of a matrix",
    "o": "outputs of a matrix",
    "r": "state rows: one per document",
    "s": "tokens of the history that earlier calls left: a cache, or what a convolution still sees",
    "c": "tokens in a chunk or in a segment",
    "n": "a count that has no letter of its own: chunks in a call, layers that are stacked, entries of a store",
    "m": "rows times heads, flattened",
    "k": "neighbours that a query finds",
    "l": "layers that have a memory",
    "a": "any axes in front",
}
"""Axes with the same meaning in the whole package."""

ROOM_AXES: dict[str, dict[str, str]] = {
    "ops": {
        "p": "parts of a state: weights, and momentum if the rule has it",
        "j": "earlier tokens of the same chunk",
        "w": "channels of a convolution: heads times width",
        "g": "groups: layers that one launch of a kernel computes",
        "L": "tokens of a row, its open chunk included",
    },
    "attached": {
        "q": "queries of an attention mask",
        "p": "tokens of an open answer",
        "w": "tokens in a window",
    },
    "layers": {"p": "persistent tokens", "C": "tokens in a full segment"},
    "mixers": {"w": "tokens in a window"},
}
"""Axes with a meaning in one subpackage only, by the subpackage's name."""
