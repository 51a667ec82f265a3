"""Text to tokens and back: bytes, or any ``tokenizer.json``, or what can be made one. It lies in its model's folder."""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from remanence.io.files import LARGEST, canonical, read_json, replacing, write_json
from remanence.io.shipped import resolve_model_path
from remanence.runtime.choices import LONGEST, short_repr
from remanence.runtime.errors import first_line
from remanence.tokenizers.converted import converted
from remanence.tokenizers.vocabulary import BYTES
from remanence.verticals import tokenizer_of as vertical_tokenizer

TRAINED, TOKENIZER, REACH = "trained.json", "tokenizer", "reach"
"""Beside a trained model: the steps and tokens it was trained on, the kind of their data, whether it was saved with a
tokenizer, and over how many tokens a memory was trained at most.
"""

PIECE = 1 << 16
"""Characters (or bytes) that are encoded at a time when a text comes as a stream."""


LONE = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""Halves of a pair that no text in UTF-8 has; those in between stand for bytes."""


def utf8(text: str) -> bytes:
    """A text as UTF-8. Bytes that were none, as an argument of the command line or a file's name can have, are these
    bytes again; any other lone surrogate, as from JSON, becomes the replacement character U+FFFD.
    """
    return LONE.sub("\ufffd", text).encode("utf-8", "surrogateescape")


class Decoder(Protocol):
    """Turns tokens into text as they come; a character whose bytes are not all there yet is held back."""

    def push(self, token: int) -> str: ...

    def finish(self) -> str: ...


class Tokenizer(Protocol):
    vocabulary: int
    end: int | None  # the token that ends a document, if there is one

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def decoder(self) -> Decoder: ...

    def stream(self, pieces: Iterable[str | bytes]) -> Iterator[list[int]]:
        """Tokens of a text that comes in pieces cut anywhere, in lists of bounded length."""
        ...

    def save(self, folder: Path) -> None: ...


class ByteTokenizer:
    """One token per byte of UTF-8, and 256 for the end of a document. Bytes that are no UTF-8 are read as they are."""

    vocabulary: int = BYTES
    end: int | None = BYTES - 1

    def encode(self, text: str) -> list[int]:
        return list(utf8(text))

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")

    def decoder(self) -> Decoder:
        return _ByteDecoder()

    def stream(self, pieces: Iterable[str | bytes]) -> Iterator[list[int]]:
        for piece in pieces:
            raw = piece if isinstance(piece, bytes) else utf8(piece)
            for start in range(0, len(raw), PIECE):
                yield list(raw[start : start + PIECE])

    def save(self, folder: Path) -> None:
        write_json(folder / "tokenizer.json", byte_level_json())
        write_settings(folder, byte_level_json(), END, self.end)


class _ByteDecoder:
    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self.decoder.decode(bytes([token])) if token < 256 else ""

    def finish(self) -> str:
        return self.decoder.decode(b"", final=True)


END = "<|end|>"


def byte_level_json() -> dict[str, Any]:
    """The byte tokenizer in the ``tokenizers`` library's format, so that Hugging Face reads the same tokens.

    That format writes a byte as one character: itself where it is printable in Latin-1, else the next free one from 256
    on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letter = {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + index) for index, byte in enumerate(others)
    }
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": BYTES - 1, "content": END, **added}],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letter[byte]: byte for byte in range(256)},
            "merges": [],
        },
    }


class JsonTokenizer:
    """A tokenizer of the ``tokenizers`` library, from its ``tokenizer.json``."""

    def __init__(
        self,
        path: Path,
        end: str | None = None,
        words: Mapping[str, str] | None = None,
        text: str | None = None,
    ) -> None:
        """`text` is the ``tokenizer.json`` that was made of a file of another kind."""
        try:
            from tokenizers import Tokenizer as Inner
        except ImportError:
            raise ValueError(
                f"{path}: reading it needs the extra 'hf'; pip install 'remanence[hf]'"
            ) from None
        self.path = path
        with _one_line(path, "not a tokenizer.json"):
            self.text = path.read_text(encoding="utf-8") if text is None else text
            self.inner = Inner.from_str(self.text)
            self.inner.no_padding()
            self.inner.no_truncation()  # a text is as long as it is
            # Not their number: a model needs a place for each token, and there may be gaps.
            self.vocabulary = max(self.inner.get_vocab().values(), default=-1) + 1
            self.end = None if end is None else self.inner.token_to_id(end)
        if not self.vocabulary:
            raise ValueError(f"{path}: expected a tokenizer with tokens, got one without")
        if end is not None and self.end is None:
            raise ValueError(
                f"{path}: expected a token for the end of a text (eos_token) {short_repr(end)}, got none"
            )
        self.end_text, self.words = end, dict(words or {})

    def encode(self, text: str) -> list[int]:
        text = utf8(text).decode("utf-8", "replace")
        with _one_line(self.path, "cannot encode a text"):
            return self.inner.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        with _one_line(self.path, "cannot decode tokens"):
            return self.inner.decode(list(tokens))

    def decoder(self) -> Decoder:
        return _JsonDecoder(self)

    def stream(self, pieces: Iterable[str | bytes]) -> Iterator[list[int]]:
        """Cut at the ends of lines (or, failing that, before a space), where most tokenizers do not join."""
        reader = codecs.getincrementaldecoder("utf-8")("replace")
        held = ""
        for piece in pieces:
            held += reader.decode(piece) if isinstance(piece, bytes) else piece
            while len(held) >= PIECE:
                line, space = held.rfind("\n", 0, PIECE) + 1, held.rfind(" ", 1, PIECE)
                cut = line or (space if space > 0 else PIECE)
                yield self.encode(held[:cut])
                held = held[cut:]
        held += reader.decode(b"", final=True)
        if held:
            yield self.encode(held)

    def save(self, folder: Path) -> None:
        with replacing(folder / "tokenizer.json") as temporary:
            temporary.write_text(self.text, encoding="utf-8")
        write_settings(folder, json.loads(self.text), self.end_text, self.end, self.words)


class _JsonDecoder:
    """Text comes once its last character is whole; what is then still pending comes at the end as it is."""

    def __init__(self, tokenizer: JsonTokenizer) -> None:
        from tokenizers.decoders import DecodeStream

        self.tokenizer, self.stream = tokenizer, DecodeStream(skip_special_tokens=True)
        self.pending: list[int] = []

    def push(self, token: int) -> str:
        with _one_line(self.tokenizer.path, "cannot decode tokens"):
            text = self.stream.step(self.tokenizer.inner, token) or ""
        self.pending = [] if text else [*self.pending, token]
        return text

    def finish(self) -> str:
        return self.tokenizer.decode(self.pending)


@contextmanager
def _one_line(path: Path, what: str) -> Iterator[None]:
    """The library's errors, which are plain Exceptions or, where it panics, not even those, as one line."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path}: {what} ({first[:LONGEST]})") from None


SETTINGS = "tokenizer_config.json"
DIGEST = "remanence_digest"
"""The entry of ``tokenizer_config.json`` with the digest of its other entries and of ``tokenizer.json``, whose own
format takes no entries of ours.
"""

TEMPLATE, LONGEST_TEMPLATE = "chat_template", 2**17
"""The entry with a chat's template, and the most characters that are taken for one."""

THEIRS = "model_max_length"
"""An entry that transformers writes into every ``tokenizer_config.json``, and we into none. It keeps our digest, and
writes a ``tokenizer.json`` of its own beside it: so the digest does not count there.
"""


def _digest(settings: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in settings.items() if name != DIGEST}
    return hashlib.sha256(canonical([rest, tokenizer])).hexdigest()[:32]


def write_settings(
    folder: Path,
    tokenizer: Mapping[str, Any],
    end: str | None,
    number: int | None,
    words: Mapping[str, str] | None = None,
) -> None:
    """What Hugging Face wants to know beside the tokens: padding stands at the left, and where a text ends."""
    settings: dict[str, Any] = {
        **(words or {}),
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    if end is not None:
        settings |= {"eos_token": end, "pad_token": end}
    write_json(folder / SETTINGS, settings | {DIGEST: _digest(settings, tokenizer)})
    if number is not None:
        write_json(folder / "generation_config.json", {"eos_token_id": number, "pad_token_id": number})


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer in a model's folder; bytes if there is none."""
    folder = resolve_model_path(folder)
    path, trained = folder / "tokenizer.json", folder / TRAINED
    if not path.is_file() and trained.is_file() and read_json(trained, LARGEST).get(TOKENIZER):
        raise ValueError(f"{path}: no such file, which the model was saved with")
    if path.is_file():
        return read_tokenizer(path)
    if DIGEST in _settings(path):
        raise ValueError(f"{path}: no such file, but a {SETTINGS} that was written with it")
    return ByteTokenizer()


def read_tokenizer(path: Path) -> Tokenizer:
    """A ``tokenizer.json``, with the end of a text that a ``tokenizer_config.json`` beside it names; or a file of
    tiktoken's (``.tiktoken``) or SentencePiece's (``.model``).
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if path.suffix in OTHERS:
        letters = {byte: letter for letter, byte in byte_level_json()["model"]["vocab"].items()}
        made, ending = converted(path, letters)
        return JsonTokenizer(path, ending, text=json.dumps(made, ensure_ascii=False))
    tokenizer, settings = read_json(path, LARGEST), _settings(path)
    if DIGEST in settings and THEIRS not in settings and settings[DIGEST] != _digest(settings, tokenizer):
        raise ValueError(
            f"{path}: damaged, or changed by hand, or its {SETTINGS} is: their digest does not fit; "
            f"remove the entry {DIGEST!r} there to accept them"
        )
    if tokenizer == byte_level_json():
        return ByteTokenizer()
    if (own := vertical_tokenizer(tokenizer)) is not None:
        return own
    end, words = settings.get("eos_token"), _words(path, settings)
    if words.get("eos_token") is None and end is not None:
        where = path.with_name(SETTINGS)
        raise ValueError(f"{where}: eos_token: expected a text, or null for none, got {short_repr(end)}")
    return JsonTokenizer(path, words.get("eos_token"), words)


OTHERS = (".tiktoken", ".model")
HUB = re.compile(r"[\w.-]+(/[\w.-]+)?")


def tokenizer_file(name: str | Path) -> Path:
    """The file that is meant: itself, the ``tokenizer.json`` of a folder, or that of a model on Hugging Face's hub,
    which is downloaded once.
    """
    path = Path(name)
    if path.is_dir():
        return path / "tokenizer.json"
    hub = HUB.fullmatch(path.as_posix()) and path.suffix not in (".json", *OTHERS)
    if path.exists() or not hub:
        return path
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError
    except ImportError:
        raise ValueError(
            f"tokenizer: {path} on the hub needs the extra 'hf'; pip install 'remanence[hf]'"
        ) from None
    try:
        for beside in (SETTINGS, f"{TEMPLATE}.jinja"):
            with suppress(EntryNotFoundError):
                hf_hub_download(path.as_posix(), beside)
        return Path(hf_hub_download(path.as_posix(), "tokenizer.json"))
    except Exception as error:  # of many kinds: no such model, no network, no permission
        raise ValueError(
            f"tokenizer: expected a file, a folder, or a model on Hugging Face's hub, got {path} ({first_line(error)})"
        ) from None


def _words(path: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """What a chat is written with: the tokens that templates name, and the template, which may lie in its own file."""
    found = {name: settings.get(name) for name in ("bos_token", "eos_token")}
    words = {name: told.get("content") if isinstance(told, dict) else told for name, told in found.items()}
    template, file = settings.get(TEMPLATE), path.with_name(f"{TEMPLATE}.jinja")
    if file.is_file() and file.stat().st_size <= LONGEST_TEMPLATE:
        template = file.read_text(encoding="utf-8", errors="replace")
    if isinstance(template, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
    if isinstance(template, str) and len(template) <= LONGEST_TEMPLATE:
        words[TEMPLATE] = template
    return {name: text for name, text in words.items() if isinstance(text, str)}


def _settings(path: Path) -> dict[str, Any]:
    """What stands in the ``tokenizer_config.json`` beside a ``tokenizer.json``, if there is one."""
    settings = path.with_name(SETTINGS)
    return read_json(settings, LARGEST) if settings.is_file() else {}


def pair_tokens(tokenizer: Tokenizer, context: str, end: str) -> tuple[list[int], list[int]]:
    """Tokens of a text and of what follows it, as the whole is encoded: an end's first token may hold a space."""
    before, whole = tokenizer.encode(context), tokenizer.encode(context + end)
    return whole[: len(before)], whole[len(before) :]
