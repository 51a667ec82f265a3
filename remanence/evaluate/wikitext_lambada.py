"""WikiText word perplexity and LAMBADA accuracy, as defined by lm-evaluation-harness."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import log

import torch

from remanence.data.streams import PREFIX
from remanence.data.texts import Texts, decoded, lines
from remanence.evaluate.subject import Subject
from remanence.evaluate.task import Result, Row, Setting, Task, check_minimum, perplexity, share
from remanence.tokenizers.tokens import pair_tokens


@dataclass(frozen=True, kw_only=True)
class WikitextSettings:
    """Settings of the WikiText evaluation.

    Attributes:
        data: WikiText's test split as one text (wiki.test.raw), or jsonl with one page per line in the field
            "text".
        window: number of tokens per window, as max_length in the harness. Default: a whole page.
        pages: number of pages, from the start of the data. Default: all.
    """

    data: str | None = None
    window: int | None = None
    pages: int | None = None

    def __post_init__(self) -> None:
        check_minimum(1, window=self.window, pages=self.pages)


class Wikitext(Task):
    """Word perplexity of detokenised pages, each preceded by the end-of-text token.

    The number of words is counted in the original page, before it is detokenised.
    """

    name = "wikitext"
    Settings = WikitextSettings

    def __init__(self, subject: Subject, settings: WikitextSettings) -> None:
        super().__init__(subject, settings)
        self.texts = Texts("wikitext.data", settings.data, "WikiText's test split as one text")
        whole = ("".join(decoded(document)) for document in self.texts)
        self.pages = [page for text in whole for page in split_pages(text)][: settings.pages]
        if not self.pages:
            raise ValueError(
                f"wikitext.data: expected at least one page, got {settings.data}, which is empty"
            )
        # Files with <unk> have rare words replaced by it, so results are not comparable with wiki.test.raw.
        self.unk = any("<unk>" in page for page in self.pages)
        end = subject.tokenizer.end
        if end is None:
            wanted = "a tokenizer with an end-of-text token, which precedes each page"
            raise ValueError(f"wikitext: expected {wanted}, got one without")
        self.prefix = end

    @property
    def identity(self) -> Setting:
        return {**self.texts.identity, "window": self.settings.window, "unk": self.unk}

    def units(self) -> list[list[Setting]]:
        return [[{"page": number}] for number in range(len(self.pages))]

    def cost(self, unit: Setting) -> int:
        return len(self.pages[unit["page"]])

    def measure(self, units: list[Setting]) -> list[Result]:
        found = []
        for page in (self.pages[unit["page"]] for unit in units):
            tokens = torch.tensor([self.prefix, *self.subject.tokenizer.encode(detokenize(page))])
            nll = 0.0
            for start, first, stop in harness_windows(len(tokens) - 1, self.settings.window):
                losses, _ = self.subject.losses(tokens[None, start : stop + 1])
                nll += float(losses[0, first - start :].sum(dtype=torch.float64))
            found.append(
                {
                    "nll": nll,
                    "words": len(re.split(r"\s+", page)),
                    "bytes": len(page.encode()),
                    "tokens": len(tokens) - 1,
                }
            )
        return found

    def rows(self, results: Sequence[tuple[Setting, Result]]) -> list[Row]:
        nll, words, size, tokens = (
            sum(result[key] for _, result in results) for key in ("nll", "words", "bytes", "tokens")
        )
        return [
            self.row("word perplexity", perplexity(nll / words), {"pages": len(results)}, count=words),
            self.row("token perplexity", perplexity(nll / tokens), {"pages": len(results)}, count=tokens),
            self.row("bits per byte", nll / log(2) / size, {"pages": len(results)}, count=size),
        ]


def harness_windows(count: int, window: int | None) -> list[tuple[int, int, int]]:
    """Return the windows over `count` targets as (first input, first target, end), as in the harness.

    The targets of the windows do not overlap. If the last window has fewer targets, it starts earlier, so
    that its context is as long as the others. None as `window`: one window for all targets.
    """
    window = window or max(1, count)
    found = []
    for first in range(0, count, window):
        stop = min(first + window, count)
        found.append((max(0, stop - window), first, stop))
    return found


def split_pages(text: str) -> list[str]:
    """Split a text into pages at first-level headings, as in the document-level WikiText of the hub."""
    pages: list[list[str]] = [[]]
    for line in text.split("\n"):
        plain = line.replace("= = =", "===").replace("= =", "==").strip()
        if plain.startswith("= ") and plain.endswith(" ="):
            pages.append([])
        pages[-1].append(line)
    return [page for page in ("\n".join(lines) for lines in pages) if page.strip()]


DETOKENIZER_RULES: tuple[tuple[str, str], ...] = (
    (r"s '", "s'"),
    (r"/' [0-9]/", "/'[0-9]/"),
    (r" @-@ ", "-"),
    (r" @,@ ", ","),
    (r" @\.@ ", "."),
    (r" ([:;.!?,]) ", r"\1 "),
    (r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"{\s*([^}]*?)\s*}", r"{\1}"),
    (r"\"\s*([^\"]*?)\s*\"", r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
    (r"= = = =", "===="),
    (r"= = =", "==="),
    (r"= =", "=="),
    (" " + chr(176) + " ", chr(176)),
    (r" \n", "\n"),
    (r"\n ", "\n"),
    (r" N ", " 1 "),
    (r" 's", "'s"),
)
"""The detokeniser of the harness as (pattern, replacement). Its errors are kept for comparable results: the
second rule never applies.
"""


def detokenize(page: str) -> str:
    """Undo the tokenisation of a WikiText page, with the rules of the harness."""
    for pattern, replacement in DETOKENIZER_RULES:
        page = re.sub(pattern, replacement, page)
    return page


@dataclass(frozen=True, kw_only=True)
class LambadaSettings:
    """Settings of the LAMBADA evaluation.

    Attributes:
        data: jsonl, or hf:NAME; each line has "text", whose last word is predicted, or "context" and
            "continuation".
        samples: number of passages, from the start of the data. Default: all.
        batch: batch size, in texts.
    """

    data: str | None = None
    samples: int | None = None
    batch: int = 8

    def __post_init__(self) -> None:
        check_minimum(1, samples=self.samples, batch=self.batch)


class Lambada(Task):
    """Perplexity of the last word of a passage, and accuracy: whether greedy decoding gives the word."""

    name = "lambada"
    Settings = LambadaSettings

    def __init__(self, subject: Subject, settings: LambadaSettings) -> None:
        super().__init__(subject, settings)
        hint = "a jsonl file with passages, or hf:NAME"
        entries: Iterable[object]
        if settings.data is not None and settings.data.startswith(PREFIX):
            self.texts = Texts("lambada.data", settings.data, hint)
            entries = ({"text": "".join(decoded(document))} for document in self.texts)
        else:
            entries = lines("lambada.data", settings.data, hint)
            self.texts = Texts("lambada.data", settings.data, hint)
        self.passages = [
            _parse_passage(number, entry) for number, entry in enumerate(islice(entries, settings.samples), 1)
        ]

    @property
    def identity(self) -> Setting:
        return self.texts.identity

    def units(self) -> list[list[Setting]]:
        return [[{"passage": number} for number in range(len(self.passages))]]

    def cost(self, unit: Setting) -> int:
        return len(self.passages[unit["passage"]][0])

    def measure(self, units: list[Setting]) -> list[Result]:
        pairs = [pair_tokens(self.subject.tokenizer, *self.passages[unit["passage"]]) for unit in units]
        found = self.subject.likelihoods([context for context, _ in pairs], [end for _, end in pairs])
        return [{"log": each.log, "right": each.greedy} for each in found]

    def rows(self, results: Sequence[tuple[Setting, Result]]) -> list[Row]:
        count = len(results)
        mean = sum(result["log"] for _, result in results) / count
        right = share(sum(result["right"] for _, result in results), count)
        return [
            self.row("perplexity", perplexity(-mean), count=count),
            self.row("accuracy", **right),
        ]


def _parse_passage(number: int, entry: object) -> tuple[str, str]:
    """Split a passage into its context and its last word. `number` is the line number for error messages."""
    if isinstance(entry, dict) and isinstance(entry.get("text"), str) and " " in entry["text"].strip():
        context, word = entry["text"].rsplit(" ", 1)
        return context, " " + word
    if isinstance(entry, dict) and all(
        isinstance(entry.get(key), str) and entry[key] for key in ("context", "continuation")
    ):
        return entry["context"], " " + entry["continuation"].lstrip()
    raise ValueError(
        f"lambada.data: line {number}: expected 'text', or 'context' and 'continuation', got {str(entry)[:40]!r}"
    )
