"""How well a text is predicted: window by window and as one stream with carried memory, and by position.

A text may be a genome: then numbers are per base, and Markov models can be measured beside the model.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import torch

from remanence.data.texts import Texts
from remanence.evaluate.plots import curves
from remanence.evaluate.subject import Subject
from remanence.evaluate.task import Result, Row, Setting, Task, check_minimum, perplexity
from remanence.model import State
from remanence.runtime.overrides import format_length
from remanence.tasks.markov import MOST, Mixture
from remanence.tokenizers.tokens import ByteTokenizer, JsonTokenizer, Tokenizer, byte_level_json

EDGES = np.unique(np.round(2.0 ** np.arange(0, 56, 0.5)).astype(np.int64))
"""Positions at which a new mean of losses begins: 1, 2, 3, 4, 6, 8, 11, 16, ..."""
LETTERS = set(byte_level_json()["model"]["vocab"])
"""What byte-level tokenizers write bytes as."""


@dataclass(frozen=True, kw_only=True)
class LmSettings:
    """
    Attributes:
        data: a text file, jsonl, parquet, FASTA, a folder of them, or hf:NAME. Every document begins with an empty
            memory.
        views: "stream" (memory carried through each document), "window" (begun anew every so many tokens), and of DNA
            "markov" (no model, but counts of what followed the bases before, for comparison).
        window: tokens of a window.
        max_tokens: of each file, only the first.
        rows: windows of a batch.
        every: also the mean over every so many tokens of a file, one after the other, for a curve of it.
        orders: of the Markov models.
    """

    data: str | None = None
    views: tuple[str, ...] = ("window", "stream")
    window: int = 2048
    max_tokens: int | None = None
    rows: int = 8
    every: int | None = None
    orders: tuple[int, ...] = (2, 4, 6, 8, 12)

    def __post_init__(self) -> None:
        check_minimum(1, window=self.window, rows=self.rows, every=self.every)
        check_minimum(2, max_tokens=self.max_tokens)
        check_minimum(0, orders=self.orders)
        if max(self.orders) > MOST:
            raise ValueError(f"orders: expected at most {MOST}, got {max(self.orders)}")
        if not self.views or set(self.views) - {"window", "stream", "markov"}:
            got = ",".join(self.views) or "none"
            raise ValueError(f"views: expected one or more of window, stream and markov, got {got}")


class Lm(Task):
    """Perplexity, bits per byte, and loss against position. In both views a document's first token does not count."""

    name = "lm"
    Settings = LmSettings

    def __init__(self, subject: Subject, settings: LmSettings) -> None:
        super().__init__(subject, settings)
        self.texts = Texts("lm.data", settings.data, "a text file, a folder of them or hf:NAME")
        for path in self.texts.paths:
            if not path.stat().st_size:
                raise ValueError(f"lm.data: expected texts of at least two tokens, got the empty file {path}")
        self.tokenizer = subject.tokenizer
        self.unit = getattr(self.tokenizer, "unit", "byte")
        if "markov" in settings.views and self.unit != "base":
            raise ValueError("lm.views: expected markov with a model of DNA, got a model of text")
        self.files: dict[str, Path | None] = {path.name: path for path in self.texts.paths} or {
            self.texts.source: None
        }
        if len(self.files) < len(self.texts.paths):
            self.files = {str(path): path for path in self.texts.paths}

    @property
    def identity(self) -> Setting:
        s = self.settings
        return {
            **self.texts.identity, "max_tokens": s.max_tokens, **({"every": s.every} if s.every else {})
        }  # fmt: skip

    def units(self) -> list[list[Setting]]:
        own = {"window": {"window": self.settings.window}, "markov": {"orders": list(self.settings.orders)}}
        views = [{"view": view, **own.get(view, {})} for view in self.settings.views]
        return [[{**view, "file": name}] for view in views for name in self.files]

    def cost(self, unit: Setting) -> int:
        path = self.files[unit["file"]]
        size = (
            1 << 20
            if path is None
            else path.stat().st_size * (3 if path.suffix in (".xz", ".gz", ".bz2", ".zst") else 1)
        )
        return min(size, self.settings.max_tokens or size)

    def measure(self, units: list[Setting]) -> list[Result]:
        return [self._measured(unit) for unit in units]

    def _measured(self, unit: Setting) -> Result:
        """Sums over a file's documents: what is held at a time is a few windows, however long they are."""
        if unit["view"] == "markov":
            return self._markov(unit)
        sums = Sums(every=self.settings.every)
        found = self.subject.bookmark.find(self.subject.model) if unit["view"] == "stream" else None
        if found:
            sums = Sums(**found[1])
        for number, document in enumerate(self.texts.of(self.files[unit["file"]])):
            left = None if self.settings.max_tokens is None else self.settings.max_tokens - sums.tokens
            if left is not None and left < 2:
                break
            if number < sums.document:  # counted before the interruption
                deque(document, maxlen=0)
                continue
            lists = _Counted(self.tokenizer, _limited(self.tokenizer.stream(document), left))
            if unit["view"] == "stream":
                self._stream(lists, sums, number, found[0] if found else None)
                found = None
            else:
                for losses in self._windows(lists, unit["window"]):
                    sums.add(losses.flatten())
            sums.tokens, sums.bytes = sums.tokens + lists.tokens, sums.bytes + lists.bytes - lists.first
            sums.document, sums.position = number + 1, 1
        if not sums.count:
            raise ValueError(f"lm.data: expected a text of at least two tokens, got {unit['file']}")
        return {
            "nll": sums.nll,
            "tokens": sums.count,
            "bytes": sums.bytes,
            **({"bins": sums.bins, "places": sums.places} if unit["view"] == "stream" else {}),
        }

    def _markov(self, unit: Setting) -> Result:
        """The same sums for every order and their mixture, which read a file's documents one after the other."""
        models, left = Mixture(unit["orders"]), self.settings.max_tokens
        sums = [Sums(every=self.settings.every) for _ in range(len(unit["orders"]) + 1)]
        for document in self.texts.of(self.files[unit["file"]]):
            first = 1  # as everywhere, a document's first token does not count
            for tokens in _limited(self.tokenizer.stream(document), left):
                bits = models.bits(np.array(tokens))
                for own, costs in zip(sums, bits, strict=True):
                    own.add(torch.from_numpy(costs[first:] * log(2)))
                first, left = 0, None if left is None else left - len(tokens)
                self.subject.on_tokens(len(tokens))
            if left is not None and left < 2:
                break
        names = [*map(str, unit["orders"]), "mixture"]
        return {
            name: {"nll": own.nll, "tokens": own.count, "places": own.places}
            for name, own in zip(names, sums, strict=True)
        }

    def _stream(self, lists: _Counted, sums: Sums, number: int, state: State | None) -> None:
        """One document from where it stands; the bookmark knows all that was counted."""
        sums.document = number
        for losses, now in self.subject.stream_losses(_without(lists, sums.position - 1), state):
            sums.add(losses, sums.position)
            self.subject.bookmark.keep(self.subject.model, now, sums.plain)

    def _windows(self, lists: Iterable[Sequence[int]], window: int) -> Iterator[torch.Tensor]:
        """Losses of windows that each begin anew: a window's last target is the next one's first input."""
        held: list[int] = []
        room = self.settings.rows * window
        for tokens in lists:
            held += tokens
            while len(held) > room:
                block = torch.tensor(held[: room + 1])
                yield self.subject.losses(block.unfold(0, window + 1, window))[0]
                held = held[room:]
        for start in range(0, len(held) - 1, window):
            yield self.subject.losses(torch.tensor([held[start : start + window + 1]]))[0]

    def rows(self, results: Sequence[tuple[Setting, Result]]) -> list[Row]:
        rows = []
        for view in self.settings.views:
            own = [(unit, result) for unit, result in results if unit["view"] == view]
            if view == "markov":
                for order in own[0][1]:
                    rows += self._places({"view": view, "order": order}, [found[order] for _, found in own])
                continue
            setting = {key: value for key, value in own[0][0].items() if key != "file"}
            nll, tokens, size = (sum(result[key] for _, result in own) for key in ("nll", "tokens", "bytes"))
            rows += [self.row("perplexity", perplexity(nll / tokens), setting, count=tokens)]
            name = f"bits per {self.unit}"
            rows += [self.row(name, nll / log(2) / size, setting, count=size)] if size else []
            if view == "stream":
                for index, (start, end) in enumerate(zip([0, *EDGES], [*EDGES, None], strict=True)):
                    sums = [result["bins"][index] for _, result in own]
                    count = sum(each[1] for each in sums)
                    if count:
                        where = {
                            **setting,
                            "from": int(start),
                            "before": int(end) if end is not None else None,
                        }
                        loss = sum(each[0] for each in sums) / count
                        rows.append(self.row("loss by position", loss, where, count=count, detail=True))
                rows += self._places(setting, [found for _, found in own])[1:]
        return rows

    def _places(self, setting: Setting, found: Sequence[Result]) -> list[Row]:
        """Bits per token of all files together, then of each stretch of `every` tokens."""
        nll, count = (sum(each[key] for each in found) for key in ("nll", "tokens"))
        rows = [self.row(f"bits per {self.unit}", nll / log(2) / count, setting, count=count)]
        places = [each.get("places", []) for each in found]  # of an earlier version there are none
        for index in range(max(map(len, places))):
            own = [each[index] for each in places if index < len(each)]
            nll, count = sum(each[0] for each in own), sum(each[1] for each in own)
            where = {**setting, "from": index * self.settings.every}
            rows.append(self.row("bits by place", nll / log(2) / count, where, count=count, detail=True))
        return rows

    def plots(self, rows: Mapping[str, Sequence[Row]], stem: Path) -> list[Path]:
        return [*self._by_position(rows, stem), *self._by_place(rows, stem)]

    def _by_place(self, rows: Mapping[str, Sequence[Row]], stem: Path) -> list[Path]:
        lines: dict[str, list[tuple[float, float]]] = {}
        for mode, own in rows.items():
            for row in own:
                if row.metric != "bits by place":
                    continue
                order = row.setting.get("order")
                markov = f"Markov, order {order}" if order != "mixture" else "Markov, orders mixed"
                if order is None or mode == next(iter(rows)):  # they are the same for every mode
                    name = f"memory {mode}" if order is None else markov
                    lines.setdefault(name, []).append((row.setting["from"], row.value))
        if not lines:
            return []
        lines = dict(sorted(lines.items(), key=lambda line: line[0].startswith("Markov")))
        looks = {name: (index, int(name.startswith("Markov"))) for index, name in enumerate(lines)}
        path = stem.with_name(f"{stem.name}.lm-places.png")
        title = f"Mean of every {format_length(self.settings.every)} tokens, in one reading"
        y = f"bits per {'base' if self.unit == 'base' else 'token'}"
        return [curves(path, lines, title=title, x="tokens read before", y=y, looks=looks, linear=True)]

    def _by_position(self, rows: Mapping[str, Sequence[Row]], stem: Path) -> list[Path]:
        lines = {
            f"memory {mode}": [
                (row.setting["from"], row.value) for row in own if row.metric == "loss by position"
            ]
            for mode, own in rows.items()
        }
        lines = {name: points for name, points in lines.items() if points}
        if not lines:
            return []
        ticks = {
            float(x): format_length(x)
            for x in (2**n for n in range(0, 40, 2))
            if x <= max(p[0] for line in lines.values() for p in line)
        }
        path = stem.with_name(f"{stem.name}.lm.png")
        title = "Loss against position, from the text's beginning"
        return [
            curves(path, lines, title=title, x="tokens read before", y="loss, nats per token", ticks=ticks)
        ]


@dataclass
class Sums:
    """Sums over a file, as plain data: the losses and their bins, and the tokens and bytes of finished documents.

    `document` and `position` are where the reading stands. `places` are sums over every so many tokens, if asked for.
    """

    nll: float = 0.0
    count: int = 0
    tokens: int = 0
    bytes: int = 0
    document: int = 0
    position: int = 1
    bins: list[list[float]] = field(default_factory=lambda: [[0.0, 0] for _ in range(len(EDGES) + 1)])
    every: int | None = None
    places: list[list[float]] = field(default_factory=list)

    def add(self, losses: torch.Tensor, position: int | None = None) -> None:
        values = losses.double().cpu().numpy()
        if self.every:
            where = (self.count + np.arange(len(values))) // self.every
            if len(where):
                self.places += [[0.0, 0] for _ in range(len(self.places), int(where[-1]) + 1)]
            for place in np.unique(where):
                own, before = values[where == place], self.places[place]
                self.places[place] = [before[0] + float(own.sum()), before[1] + len(own)]
        self.nll, self.count = self.nll + float(values.sum()), self.count + len(values)
        if position is not None:
            indices = np.searchsorted(EDGES, np.arange(position, position + len(values)), "right")
            self.position = position + len(values)
            for index in np.unique(indices):
                own = values[indices == index]
                self.bins[index] = [self.bins[index][0] + float(own.sum()), self.bins[index][1] + len(own)]

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def _without(lists: Iterable[list[int]], count: int) -> Iterator[list[int]]:
    """Without the first tokens."""
    for tokens in lists:
        passed = min(count, len(tokens))
        count -= passed
        yield tokens[passed:]


class _Counted:
    """Lists of tokens on their way: how many there were, how many bytes of text they are, and the first of them."""

    def __init__(self, tokenizer: Tokenizer, lists: Iterable[list[int]]) -> None:
        self.tokenizer, self.lists, self.tokens, self.bytes, self.first = tokenizer, lists, 0, 0, 0

    def __iter__(self) -> Iterator[list[int]]:
        for tokens in self.lists:
            if not self.tokens:
                self.first = size_of(self.tokenizer, tokens[:1])
            self.tokens += len(tokens)
            self.bytes += size_of(self.tokenizer, tokens)
            yield tokens


def size_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> int:
    """The bytes of text that tokens stand for. The last ones may be parts of a character: bytes without a text."""
    if isinstance(tokenizer, ByteTokenizer):
        return len(tokens)
    end = len(tokens)
    while (
        isinstance(tokenizer, JsonTokenizer) and end and "\ufffd" in tokenizer.decode(tokens[end - 1 : end])
    ):
        end -= 1
    size = len(tokenizer.decode(tokens[:end]).encode("utf-8", "surrogatepass"))
    if isinstance(tokenizer, JsonTokenizer):
        size += sum(_part(tokenizer.inner.id_to_token(token) or "") for token in tokens[end:])
    return size


def _part(token: str) -> int:
    """Bytes of a token as its file writes it: "<0xE2>", a letter for each byte, or as it is."""
    if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
        return 1
    return len(token) if set(token) <= LETTERS else len(token.encode())


def _limited(lists: Iterable[list[int]], most: int | None) -> Iterator[list[int]]:
    for tokens in lists:
        if most is None:
            yield tokens
        else:
            yield tokens[:most]
            most -= len(tokens)
            if most <= 0:
                return
