"""Tokenizers: bytes, any ``tokenizer.json``, or a file that can be converted to one. A model's folder
contains its tokenizer.
"""

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
"""The file next to a trained model, and two of its keys. The file holds the steps and tokens of the training,
the kind of data, whether the model was saved with a tokenizer, and the largest number of tokens over which a
memory was trained (`REACH`).
"""

PIECE = 1 << 16
"""The number of characters or bytes that are encoded at a time when a text is streamed."""


LONE = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""Surrogates that do not stand for a byte. The range left out is what Python uses for bytes that are not
UTF-8.
"""


def utf8(text: str) -> bytes:
    """Encode a text as UTF-8. Surrogates that stand for invalid bytes, as in command-line arguments and file
    names, become these bytes again. Any other lone surrogate, as from JSON, becomes the replacement character
    U+FFFD.
    """
    return LONE.sub("\ufffd", text).encode("utf-8", "surrogateescape")


class Decoder(Protocol):
    """Converts tokens to text one by one. A character is held back until all its bytes have arrived."""

    def push(self, token: int) -> str: ...

    def finish(self) -> str: ...


class Tokenizer(Protocol):
    """The interface of all tokenizers."""

    vocabulary: int
    """The number of token ids, including unused ones."""
    end: int | None  # the token that ends a document, or None

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def decoder(self) -> Decoder: ...

    def stream(self, pieces: Iterable[str | bytes]) -> Iterator[list[int]]:
        """Yield the tokens of a text that arrives in pieces cut anywhere, in lists of bounded length."""
        ...

    def save(self, folder: Path) -> None: ...


class ByteTokenizer:
    """One token per byte of UTF-8, and token 256 for the end of a document. Bytes that are not valid UTF-8
    are kept.
    """

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
    """Decodes byte tokens as they arrive."""

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self.decoder.decode(bytes([token])) if token < 256 else ""

    def finish(self) -> str:
        return self.decoder.decode(b"", final=True)


END = "<|end|>"
"""The text of the byte tokenizer's end-of-document token in ``tokenizer.json``."""


def byte_level_json() -> dict[str, Any]:
    """Return the byte tokenizer in the format of the ``tokenizers`` library, so that Hugging Face gives the
    same tokens.

    This format writes each byte as one character: the byte's own Latin-1 character if it is printable, else
    the next unused character from code 256 on.
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
        """`end` is the text of the token that ends a document, and `words` are the entries returned by
        `_words`. `text` is the content of the ``tokenizer.json`` if it was converted from another kind of
        file; otherwise `path` is read.
        """
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
            self.inner.no_truncation()  # texts are never shortened
            # The highest id plus one: a model needs a row for each id, and ids may have gaps.
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
        """Yield tokens of a streamed text. It is cut at line ends or else before a space, where most
        tokenizers do not merge.
        """
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
    """Decodes tokens as they arrive. Text is returned when its last character is complete; incomplete text is
    returned by `finish`.
    """

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
def _one_line(path: Path, content: str) -> Iterator[None]:
    """Convert the library's errors, including panics, which are not even Exceptions, to a ValueError with one
    line. `content` says what failed.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path}: {content} ({first[:LONGEST]})") from None


SETTINGS = "tokenizer_config.json"
"""The settings file that Hugging Face expects next to ``tokenizer.json``."""
DIGEST = "remanence_digest"
"""The key in ``tokenizer_config.json`` of the digest of its other entries and of ``tokenizer.json``, whose
format does not allow extra entries.
"""

TEMPLATE, LONGEST_TEMPLATE = "chat_template", 2**17
"""The key and file name of a chat template, and the maximum number of characters of a template."""

THEIRS = "model_max_length"
"""A key that transformers writes to every ``tokenizer_config.json`` and this package never does. When
transformers saves a tokenizer, it keeps our digest but writes another ``tokenizer.json``, so the digest is
then ignored.
"""


def _digest(settings: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> str:
    """Return the digest of the settings, without their own digest, and of the content of ``tokenizer.json``."""
    rest = {name: value for name, value in settings.items() if name != DIGEST}
    return hashlib.sha256(canonical([rest, tokenizer])).hexdigest()[:32]


def write_settings(
    folder: Path,
    tokenizer: Mapping[str, Any],
    end: str | None,
    number: int | None,
    words: Mapping[str, str] | None = None,
) -> None:
    """Write the settings that Hugging Face needs: padding on the left, and the end token with text `end` and
    id `number`.
    """
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
    """Return the tokenizer in a model's folder, or the byte tokenizer if there is none."""
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
    """Read a ``tokenizer.json``, with the end token named in a ``tokenizer_config.json`` next to it, or
    convert a file of tiktoken (``.tiktoken``) or SentencePiece (``.model``).
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
"""The suffixes of tokenizer files that are converted."""
HUB = re.compile(r"[\w.-]+(/[\w.-]+)?")
"""The pattern of a model's name on the Hugging Face hub."""


def tokenizer_file(name: str | Path) -> Path:
    """Return the path of a tokenizer file: `name` itself if it is a file, the ``tokenizer.json`` in a folder,
    or that of a model on the Hugging Face hub, which is downloaded once.
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
    except Exception as error:  # of many types: no such model, no network, no permission
        raise ValueError(
            f"tokenizer: expected a file, a folder, or a model on Hugging Face's hub, got {path} ({first_line(error)})"
        ) from None


def _words(path: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings for chats: the texts of the begin and end tokens, and the chat template, which may
    be in a separate file. Missing ones are left out.
    """
    found = {name: settings.get(name) for name in ("bos_token", "eos_token")}
    words = {name: told.get("content") if isinstance(told, dict) else told for name, told in found.items()}
    template, file = settings.get(TEMPLATE), path.with_name(f"{TEMPLATE}.jinja")
    if file.is_file() and file.stat().st_size <= LONGEST_TEMPLATE:
        template = file.read_text(encoding="utf-8", errors="replace")
    if isinstance(template, list):  # several templates with names
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
    if isinstance(template, str) and len(template) <= LONGEST_TEMPLATE:
        words[TEMPLATE] = template
    return {name: text for name, text in words.items() if isinstance(text, str)}


def _settings(path: Path) -> dict[str, Any]:
    """Return the content of the ``tokenizer_config.json`` next to a ``tokenizer.json``, or an empty
    dictionary.
    """
    settings = path.with_name(SETTINGS)
    return read_json(settings, LARGEST) if settings.is_file() else {}


def pair_tokens(tokenizer: Tokenizer, context: str, end: str) -> tuple[list[int], list[int]]:
    """Encode `context` and `end` together and return the tokens of each. Encoding them together matters,
    because the first token of `end` may include a space.
    """
    before, whole = tokenizer.encode(context), tokenizer.encode(context + end)
    return whole[: len(before)], whole[len(before) :]
