"""DNA tokenizer: one token per base, and tokens for the labels of classification."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from remanence.io.files import write_json
from remanence.runtime.choices import short_repr
from remanence.tokenizers.tokens import END, PIECE, Decoder, utf8, write_settings

BASES = "ACGTN"
"""The letters that have their own token, in the order of the tokens. N stands for any base."""
AMBIGUOUS = "RYSWKMBDHV"
"""IUPAC ambiguity codes. Each stands for several possible bases and is encoded as N."""
END_TOKEN, LABEL_QUERY, FIRST_LABEL = 5, 6, 7
"""Token ids: end of document, label query (the model predicts the label after it), and the first label."""
VOCABULARY = 32
"""Number of tokens, including unused ones."""
MAX_LABELS = VOCABULARY - FIRST_LABEL
"""Maximum number of class labels."""
INVALID, WHITESPACE = 255, 254
"""Values in `TOKENS` for bytes that are invalid in a sequence, and for white space."""


def _make_token_table() -> np.ndarray:
    """Build the lookup table `TOKENS`."""
    table = np.full(256, INVALID, np.uint8)
    for token, letter in enumerate(BASES):
        table[[ord(letter), ord(letter.lower())]] = token
    for letter in AMBIGUOUS:
        table[[ord(letter), ord(letter.lower())]] = BASES.index("N")
    table[[ord("U"), ord("u")]] = BASES.index("T")  # RNA is encoded as DNA
    table[list(b" \t\r\n")] = WHITESPACE
    return table


TOKENS = _make_token_table()
"""Lookup table from bytes to tokens. Upper and lower case are equal, U is read as T, and ambiguity codes as
N.
"""
LETTERS = np.frombuffer(BASES.encode(), np.uint8)
"""ASCII codes of `BASES`."""
COMPLEMENT = np.array([3, 2, 1, 0, 4, *range(5, 256)], np.uint8)
"""Lookup table from each token to the token of the complementary base."""


def base_tokens(text: bytes) -> np.ndarray:
    """Encode a sequence as tokens ``[bases]``, skipping white space. An error names the first invalid letter."""
    found = TOKENS[np.frombuffer(text, np.uint8)]
    bad = np.flatnonzero(found == INVALID)
    if len(bad):
        raise ValueError(
            f"sequence: expected the letters of DNA, got {describe_invalid_letter(text[bad[0] :])}"
        )
    return found[found != WHITESPACE]


def describe_invalid_letter(text: bytes) -> str:
    """Return a description of the invalid letter at the start of `text`, for error messages."""
    letter = text[:4].decode("utf-8", "replace")[:1]
    protein = letter.isascii() and letter.isalpha()
    return short_repr(letter) + (", as in a protein" if protein else "")


def reverse_complement(tokens: np.ndarray) -> np.ndarray:
    """Return the reverse complement of token sequences, along the last axis."""
    return COMPLEMENT[tokens[..., ::-1]]


class DnaTokenizer:
    """Tokenizer with one token per base. `labels` are the class names of a classifier, with one token each."""

    vocabulary: int = VOCABULARY
    """Number of tokens."""
    end: int | None = END_TOKEN
    """Token at the end of a document."""
    unit = "base"
    """Name of the unit that one token represents, used in the names of metrics."""
    example: ClassVar = {"file": "bases.txt", "stem": "bases", "prompt": "ATG", "text": "ACGT" * 8}
    """Example file, prompt and text for the model card."""

    def __init__(self, labels: Sequence[str] = ()) -> None:
        if len(labels) > MAX_LABELS:
            raise ValueError(f"labels: expected at most {MAX_LABELS} classes, got {len(labels)}")
        self.labels = tuple(labels)

    @property
    def identity(self) -> object:
        """The data from which the digest of the tokenizer is computed."""
        return dna_json(self.labels)

    def encode(self, text: str) -> list[int]:
        return base_tokens(utf8(text)).tolist()

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the bases as text. Tokens that are not bases are skipped."""
        return "".join(BASES[token] for token in tokens if token < len(BASES))

    def decoder(self) -> Decoder:
        """Return a decoder that takes one token at a time."""
        return _DnaDecoder()

    def stream(self, pieces: Iterable[str | bytes]) -> Iterator[list[int]]:
        """Encode pieces of a sequence one after another, and yield lists of tokens."""
        for piece in pieces:
            raw = piece if isinstance(piece, bytes) else utf8(piece)
            for start in range(0, len(raw), PIECE):
                yield base_tokens(raw[start : start + PIECE]).tolist()

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json`` and its settings to a folder."""
        write_json(folder / "tokenizer.json", dna_json(self.labels))
        write_settings(folder, dna_json(self.labels), END, self.end)


class _DnaDecoder:
    """Decodes one token at a time."""

    def push(self, token: int) -> str:
        return BASES[token] if token < len(BASES) else ""

    def finish(self) -> str:
        return ""


def dna_json(labels: Sequence[str] = ()) -> dict[str, Any]:
    """Return the tokenizer in the format of the ``tokenizers`` library, so that Hugging Face gives the same
    tokens.

    That library encodes an invalid letter as N, because it cannot raise an error.
    """
    special = [END, "<|label|>", *(f"<|label:{label}|>" for label in labels)]
    special += [f"<|unused:{token}|>" for token in range(END_TOKEN + len(special), VOCABULARY)]
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    changes = [("\\s+", ""), ("[Uut]", "T"), ("a", "A"), ("c", "C"), ("g", "G"), (f"(?i)[{AMBIGUOUS}n]", "N")]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token, "content": text, **added} for token, text in enumerate(special, END_TOKEN)
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Replace", "pattern": {"Regex": old}, "content": new} for old, new in changes
            ],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "N",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letter: token for token, letter in enumerate(BASES)},
            "merges": [],
        },
    }


def read_dna_json(tokenizer: Mapping[str, Any]) -> DnaTokenizer | None:
    """Return the DNA tokenizer that a parsed ``tokenizer.json`` describes, or None if it describes another
    tokenizer.
    """
    try:
        texts = [str(entry["content"]) for entry in tokenizer["added_tokens"]]
    except (KeyError, TypeError):
        return None
    named = [re.fullmatch(r"<\|label:(.*)\|>", text, re.DOTALL) for text in texts]
    labels = [found[1] for found in named if found]
    fits = len(labels) <= MAX_LABELS and tokenizer == dna_json(labels)
    return DnaTokenizer(labels) if fits else None
