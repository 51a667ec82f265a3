"""DNA as tokens: one for each base, and symbols for what a sequence is asked about."""

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
"""The letters that have a token each, in the tokens' order. N is any base."""
AMBIGUOUS = "RYSWKMBDHV"
"""IUPAC's other codes, each for some of the bases. They are read as N."""
ENDS, ASKS, FIRST = 5, 6, 7
"""The tokens that end a document and that ask for a sequence's label, and the first label's."""
VOCABULARY = 32
MOST_LABELS = VOCABULARY - FIRST
BAD, BLANK = 255, 254
"""What `TOKENS` has for a byte that is no letter of a sequence, and for white space."""


def _table() -> np.ndarray:
    table = np.full(256, BAD, np.uint8)
    for token, letter in enumerate(BASES):
        table[[ord(letter), ord(letter.lower())]] = token
    for letter in AMBIGUOUS:
        table[[ord(letter), ord(letter.lower())]] = BASES.index("N")
    table[[ord("U"), ord("u")]] = BASES.index("T")  # RNA is read as its DNA
    table[list(b" \t\r\n")] = BLANK
    return table


TOKENS = _table()
"""The token of every byte: either case, with U as T and ambiguity codes as N."""
LETTERS = np.frombuffer(BASES.encode(), np.uint8)
COMPLEMENT = np.array([3, 2, 1, 0, 4, *range(5, 256)], np.uint8)


def base_tokens(text: bytes) -> np.ndarray:
    """The tokens of a sequence, without white space; an error names the first letter that is none of a sequence."""
    found = TOKENS[np.frombuffer(text, np.uint8)]
    bad = np.flatnonzero(found == BAD)
    if len(bad):
        raise ValueError(f"sequence: expected the letters of DNA, got {wrong_letter(text[bad[0] :])}")
    return found[found != BLANK]


def wrong_letter(text: bytes) -> str:
    """What an error says of a text that begins with a letter of no DNA."""
    letter = text[:4].decode("utf-8", "replace")[:1]
    protein = letter.isascii() and letter.isalpha()
    return short_repr(letter) + (", as in a protein" if protein else "")


def reverse_complement(tokens: np.ndarray) -> np.ndarray:
    """The other strand, read in its own direction (the last axis is the sequence's)."""
    return COMPLEMENT[tokens[..., ::-1]]


class DnaTokenizer:
    """One token per base. `labels` are the classes that sequences are asked about; each is a token of its own."""

    vocabulary: int = VOCABULARY
    end: int | None = ENDS
    unit = "base"
    """What a token stands for."""
    example: ClassVar = {"file": "bases.txt", "stem": "bases", "prompt": "ATG", "text": "ACGT" * 8}
    """A file, a prompt and a text, for a model card."""

    def __init__(self, labels: Sequence[str] = ()) -> None:
        if len(labels) > MOST_LABELS:
            raise ValueError(f"labels: expected at most {MOST_LABELS} classes, got {len(labels)}")
        self.labels = tuple(labels)

    @property
    def identity(self) -> object:
        """What a digest of the tokenizer is made of."""
        return dna_json(self.labels)

    def encode(self, text: str) -> list[int]:
        return base_tokens(utf8(text)).tolist()

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(BASES[token] for token in tokens if token < len(BASES))

    def decoder(self) -> Decoder:
        return _DnaDecoder()

    def stream(self, pieces: Iterable[str | bytes]) -> Iterator[list[int]]:
        for piece in pieces:
            raw = piece if isinstance(piece, bytes) else utf8(piece)
            for start in range(0, len(raw), PIECE):
                yield base_tokens(raw[start : start + PIECE]).tolist()

    def save(self, folder: Path) -> None:
        write_json(folder / "tokenizer.json", dna_json(self.labels))
        write_settings(folder, dna_json(self.labels), END, self.end)


class _DnaDecoder:
    def push(self, token: int) -> str:
        return BASES[token] if token < len(BASES) else ""

    def finish(self) -> str:
        return ""


def dna_json(labels: Sequence[str] = ()) -> dict[str, Any]:
    """The tokenizer in the ``tokenizers`` library's format, so that Hugging Face reads the same tokens.

    There, a letter that is none of a sequence is N: that library has no way to refuse one.
    """
    special = [END, "<|label|>", *(f"<|label:{label}|>" for label in labels)]
    special += [f"<|unused:{token}|>" for token in range(ENDS + len(special), VOCABULARY)]
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    changes = [("\\s+", ""), ("[Uut]", "T"), ("a", "A"), ("c", "C"), ("g", "G"), (f"(?i)[{AMBIGUOUS}n]", "N")]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token, "content": text, **added} for token, text in enumerate(special, ENDS)],
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
    """The tokenizer that a ``tokenizer.json`` describes, if it is one of these."""
    try:
        texts = [str(entry["content"]) for entry in tokenizer["added_tokens"]]
    except (KeyError, TypeError):
        return None
    named = [re.fullmatch(r"<\|label:(.*)\|>", text, re.DOTALL) for text in texts]
    labels = [found[1] for found in named if found]
    fits = len(labels) <= MOST_LABELS and tokenizer == dna_json(labels)
    return DnaTokenizer(labels) if fits else None
