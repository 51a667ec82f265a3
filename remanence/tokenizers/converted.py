"""Convert other tokenizers to ``tokenizer.json``: tiktoken's rank files and SentencePiece's models.

Both file formats are plain data and are parsed directly, so neither library is needed and nothing is
unpickled. Functions return the content of a ``tokenizer.json`` and the token that ends a text.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from remanence.io.files import LARGEST
from remanence.runtime.errors import first_line

Converted = tuple[dict[str, Any], str | None]
"""The content of a ``tokenizer.json``, and the text of the token that ends a text (None if there is none)."""

CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The regular expression with which cl100k_base splits a text into words."""
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The regular expression with which GPT-2 splits a text into words."""
_LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTERS[0]}*{_LETTERS[1]}+{_LETTERS[2]}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_LETTERS[0]}+{_LETTERS[1]}*{_LETTERS[2]}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The regular expression with which o200k_base splits a text into words."""
TIKTOKEN: dict[str, tuple[str, int]] = {
    "r50k_base": (GPT2, 50_256),
    "p50k_base": (GPT2, 50_256),
    "cl100k_base": (CL100K, 100_257),
    "o200k_base": (O200K, 199_999),
}
"""By the name of a rank file, what the file does not contain: the regular expression that splits a text, and
the token id of <|endoftext|>. Files with other names use the expression of cl100k_base and the first free id.
"""
END_OF_TEXT = "<|endoftext|>"


def tiktoken_json(path: Path, letters: Mapping[int, str]) -> Converted:
    """Convert a rank file, which has a token in base64 and its rank on each line. `letters` maps each byte to
    the character that ``tokenizer.json`` writes for it.
    """
    ranks: dict[bytes, int] = {}
    for line in path.read_bytes().splitlines():
        if line.strip():
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing or len(set(ranks.values())) < len(ranks):
        raise ValueError(
            f"expected a rank of its own for each byte and token, got none for {len(missing)} bytes"
        )
    pattern, end = TIKTOKEN.get(path.stem, (CL100K, max(ranks.values()) + 1))

    def written(token: bytes) -> str:
        """Return a token as ``tokenizer.json`` writes it."""
        return "".join(letters[byte] for byte in token)

    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    ordered = sorted(ranks, key=ranks.__getitem__)
    # The end token is in the vocabulary too; otherwise the library would choose its id.
    vocabulary = {written(token): ranks[token] for token in ordered} | {END_OF_TEXT: end}
    model = _bpe(vocabulary, _merges(ordered, ranks, written))
    pieces: dict[str, Any] = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]}}
    pieces["decoder"] = level
    # tiktoken first looks up a whole word, and merges only if it is not found.
    return _whole({**model, "ignore_merges": True}, {END_OF_TEXT: end}, **pieces), END_OF_TEXT


class _Piece(NamedTuple):
    """An entry of a SentencePiece vocabulary: its text, its score, and its kind (see `UNKNOWN`)."""

    text: str
    score: float
    kind: int


UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
"""Kinds of SentencePiece vocabulary entries that are not plain text. USER_DEFINED entries were defined by the user.
"""
UNIGRAM, BPE = 1, 2
"""SentencePiece's numbers for the two model types."""
SPACE = "▁"
"""The character that SentencePiece writes for a space."""


def sentencepiece_json(path: Path) -> Converted:
    """Convert a SentencePiece ``.model`` file, unigram or BPE. The file is a protocol buffer message."""
    found: dict[int, list[Any]] = {}
    for number, value in _fields(path.read_bytes()):
        found.setdefault(number, []).append(value)
    pieces = [_piece(raw) for raw in found.get(1, [])]
    trained, normal = (dict(_fields(found[number][-1])) if number in found else {} for number in (2, 3))
    kind, byte_fallback = trained.get(3, UNIGRAM), bool(trained.get(35, 0))
    if not pieces or kind not in (UNIGRAM, BPE):
        raise ValueError(f"expected the pieces of a unigram or BPE model, got {len(pieces)} of kind {kind}")
    unknown = next((index for index, piece in enumerate(pieces) if piece.kind == UNKNOWN), None)
    if kind == UNIGRAM:
        vocabulary = [[piece.text, piece.score] for piece in pieces]
        model: dict[str, Any] = {"type": "Unigram", "unk_id": unknown, "vocab": vocabulary}
        model["byte_fallback"] = byte_fallback
    else:
        order = {piece.text: index for index, piece in enumerate(pieces)}
        plain = [piece.text for piece in pieces if piece.kind not in (UNKNOWN, CONTROL, BYTE)]
        model = _bpe(order, _merges(plain, {text: order[text] for text in plain}, str))
        model |= {"fuse_unk": True, "byte_fallback": byte_fallback}
        model["unk_token"] = None if unknown is None else pieces[unknown].text
    prefixed, squeezed = bool(normal.get(3, 1)), bool(normal.get(4, 1))
    steps: list[dict[str, Any]] = []
    if normal.get(2):
        steps += [{"type": "Precompiled", "precompiled_charsmap": base64.b64encode(normal[2]).decode()}]
    if squeezed:
        steps += [{"type": "Strip", "strip_left": True, "strip_right": True}]
        steps += [{"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}]
    steps += [{"type": "Prepend", "prepend": SPACE}] if prefixed else []
    steps += [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    back: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    back += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    back += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
    special = {piece.text: index for index, piece in enumerate(pieces) if piece.kind == CONTROL}
    end = trained.get(42, 2)
    text = pieces[end].text if end < len(pieces) and pieces[end].kind == CONTROL else None
    parts = {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "decoder": {"type": "Sequence", "decoders": back},
    }
    user_defined = {piece.text: index for index, piece in enumerate(pieces) if piece.kind == USER_DEFINED}
    return _whole(model, special, user_defined, **parts), text


def _piece(raw: bytes) -> _Piece:
    """Parse a vocabulary entry from its protocol buffer message."""
    fields = dict(_fields(raw))
    (score,) = struct.unpack("<f", fields.get(2, bytes(4)))
    return _Piece(fields[1].decode("utf-8"), score, fields.get(3, 1))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the field number and the value of each field of a protocol buffer message. Values are integers or
    bytes.
    """
    place = 0

    def number() -> int:
        """Read a variable-length integer at the current place."""
        nonlocal place
        value = shift = 0
        while True:
            byte = data[place]
            place, value, shift = place + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128 or shift > 63:
                return value

    while place < len(data):
        key = number()
        kind = key & 7
        if kind == 0:
            yield key >> 3, number()
            continue
        size = {1: 8, 5: 4}[kind] if kind != 2 else number()
        if place + size > len(data):
            raise ValueError("expected a whole file, got the beginning of one")
        yield key >> 3, data[place : place + size]
        place += size


def _merges(ordered: list[Any], ranks: Mapping[Any, int], written: Callable[[Any], str]) -> list[list[str]]:
    """Return all pairs of tokens that form another token, in the order of the tokens they form."""
    merges = []
    for token in ordered:
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [(a, b) for a, b in halves if a in ranks and b in ranks]
        merges += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return [[written(a), written(b)] for a, b in merges]


def _bpe(vocabulary: dict[str, int], merges: list[list[str]]) -> dict[str, Any]:
    """Return the "model" section of a ``tokenizer.json`` for BPE."""
    fixed = {
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
    }
    flags = {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE", **fixed, **flags, "vocab": vocabulary, "merges": merges}


def _whole(
    model: dict[str, Any],
    special: Mapping[str, int],
    user_defined: Mapping[str, int] | None = None,
    **parts: Any,
) -> dict[str, Any]:
    """Assemble a ``tokenizer.json``. `special` and `user_defined` map the texts of special and of user-defined
    tokens to their ids; `parts` are further sections.
    """
    added = [
        {"id": number, "content": text, "special": text in special}
        | {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for text, number in sorted({**special, **(user_defined or {})}.items(), key=lambda item: item[1])
    ]
    empty = {"truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": None}
    rest = {"post_processor": None, "decoder": None, **parts}
    return {"version": "1.0", **empty, "added_tokens": added, **rest, "model": model}


def converted(path: Path, letters: Mapping[int, str]) -> Converted:
    """Convert a ``.tiktoken`` or ``.model`` file to the content of a ``tokenizer.json``. `letters` maps each
    byte to the character written for it.
    """
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{path}: expected at most {LARGEST:,} bytes, got {path.stat().st_size:,}")
    try:
        return tiktoken_json(path, letters) if path.suffix == ".tiktoken" else sentencepiece_json(path)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, struct.error) as error:
        kind = "tiktoken's ranks" if path.suffix == ".tiktoken" else "a SentencePiece model"
        raise ValueError(f"{path}: not a file of {kind} ({first_line(error)})") from None
