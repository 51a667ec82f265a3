"""Language modelling: perplexity per window and as one stream with carried memory, and loss by position.

For DNA models the metrics are per base, and Markov models are available as a baseline.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import log
from pathlib import Path

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

BIN_EDGES = np.unique(np.round(2.0 ** np.arange(0, 56, 0.5)).astype(np.int64))
"""Edges of the position bins over which losses are averaged: 1, 2, 3, 4, 6, 8, 11, 16, ..."""
BYTE_LETTERS = set(byte_level_json()["model"]["vocab"])
"""The characters that represent bytes in the vocabulary of byte-level tokenizers."""


@dataclass(frozen=True, kw_only=True)
class LmSettings:
    """Settings of the language modelling evaluation.

    Attributes:
        data: a text file, jsonl, parquet, FASTA, a folder of them, or hf:NAME. Every document starts with an
            empty memory.
        views: "stream" (memory carried through each document), "window" (memory reset at every window), and
            for DNA "markov" (Markov models of the bases, as a baseline).
        window: number of tokens in a window.
        max_tokens: maximum number of tokens to read from the start of each file. Default: all.
        rows: batch size, in windows.
        every: also report the mean over each block of this many tokens of a file, as a curve.
        orders: orders of the Markov models (number of preceding bases that a prediction depends on).
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
    """Perplexity, bits per byte, and loss by position.

    The first token of a document is not predicted, so it has no loss in any view.
    """

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
        return [self._measure(unit) for unit in units]

    def _measure(self, unit: Setting) -> Result:
        """Return the sums of losses over the documents of a file. Files are read as a stream, in constant
        memory.
        """
        if unit["view"] == "markov":
            return self._measure_markov(unit)
        sums = Sums(every=self.settings.every)
        saved = self.subject.checkpoint.load(self.subject.model) if unit["view"] == "stream" else None
        if saved:
            sums = Sums(**saved[1])
        for number, document in enumerate(self.texts.of(self.files[unit["file"]])):
            tokens_left = None if self.settings.max_tokens is None else self.settings.max_tokens - sums.tokens
            if tokens_left is not None and tokens_left < 2:
                break
            if number < sums.document:  # already counted before the interruption
                deque(document, maxlen=0)
                continue
            lists = _CountingStream(self.tokenizer, _truncate(self.tokenizer.stream(document), tokens_left))
            if unit["view"] == "stream":
                self._measure_stream(lists, sums, number, saved[0] if saved else None)
                saved = None
            else:
                for losses in self._window_losses(lists, unit["window"]):
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

    def _measure_markov(self, unit: Setting) -> Result:
        """Return the sums of losses of the Markov model of every order, and of their mixture, by name."""
        models, tokens_left = Mixture(unit["orders"]), self.settings.max_tokens
        sums = [Sums(every=self.settings.every) for _ in range(len(unit["orders"]) + 1)]
        for document in self.texts.of(self.files[unit["file"]]):
            first = 1  # the first token of a document has no loss
            for tokens in _truncate(self.tokenizer.stream(document), tokens_left):
                bits = models.bits(np.array(tokens))
                for own, costs in zip(sums, bits, strict=True):
                    own.add(torch.from_numpy(costs[first:] * log(2)))
                first, tokens_left = 0, None if tokens_left is None else tokens_left - len(tokens)
                self.subject.on_tokens(len(tokens))
            if tokens_left is not None and tokens_left < 2:
                break
        names = [*map(str, unit["orders"]), "mixture"]
        return {
            name: {"nll": own.nll, "tokens": own.count, "places": own.places}
            for name, own in zip(names, sums, strict=True)
        }

    def _measure_stream(self, lists: _CountingStream, sums: Sums, number: int, state: State | None) -> None:
        """Add the losses of one document to `sums`, from the current position on, and save the state
        regularly.

        `state` is the state at that position, or None at the start of the document.
        """
        sums.document = number
        for losses, state_after in self.subject.stream_losses(_skip_tokens(lists, sums.position - 1), state):
            sums.add(losses, sums.position)
            self.subject.checkpoint.save(self.subject.model, state_after, sums.to_dict)

    def _window_losses(self, lists: Iterable[Sequence[int]], window: int) -> Iterator[torch.Tensor]:
        """Yield the losses of windows, in nats. Each window starts with an empty memory, and its last target
        is the first input of the next window.
        """
        held: list[int] = []
        block_size = self.settings.rows * window
        for tokens in lists:
            held += tokens
            while len(held) > block_size:
                block = torch.tensor(held[: block_size + 1])
                yield self.subject.losses(block.unfold(0, window + 1, window))[0]
                held = held[block_size:]
        for start in range(0, len(held) - 1, window):
            yield self.subject.losses(torch.tensor([held[start : start + window + 1]]))[0]

    def rows(self, results: Sequence[tuple[Setting, Result]]) -> list[Row]:
        rows = []
        for view in self.settings.views:
            own = [(unit, result) for unit, result in results if unit["view"] == view]
            if view == "markov":
                for order in own[0][1]:
                    rows += self._rows_by_place(
                        {"view": view, "order": order}, [found[order] for _, found in own]
                    )
                continue
            setting = {key: value for key, value in own[0][0].items() if key != "file"}
            nll, tokens, size = (sum(result[key] for _, result in own) for key in ("nll", "tokens", "bytes"))
            rows += [self.row("perplexity", perplexity(nll / tokens), setting, count=tokens)]
            name = f"bits per {self.unit}"
            rows += [self.row(name, nll / log(2) / size, setting, count=size)] if size else []
            if view == "stream":
                for index, (start, end) in enumerate(zip([0, *BIN_EDGES], [*BIN_EDGES, None], strict=True)):
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
                rows += self._rows_by_place(setting, [found for _, found in own])[1:]
        return rows

    def _rows_by_place(self, setting: Setting, found: Sequence[Result]) -> list[Row]:
        """Return rows of bits per token: first over all files, then for each block of `every` tokens."""
        nll, count = (sum(each[key] for each in found) for key in ("nll", "tokens"))
        rows = [self.row(f"bits per {self.unit}", nll / log(2) / count, setting, count=count)]
        places = [each.get("places", []) for each in found]  # results of earlier versions have no places
        for index in range(max(map(len, places))):
            own = [each[index] for each in places if index < len(each)]
            nll, count = sum(each[0] for each in own), sum(each[1] for each in own)
            where = {**setting, "from": index * self.settings.every}
            rows.append(self.row("bits by place", nll / log(2) / count, where, count=count, detail=True))
        return rows

    def plots(self, rows: Mapping[str, Sequence[Row]], stem: Path) -> list[Path]:
        return [*self._plot_by_position(rows, stem), *self._plot_by_place(rows, stem)]

    def _plot_by_place(self, rows: Mapping[str, Sequence[Row]], stem: Path) -> list[Path]:
        """Plot the bits per token of each block of `every` tokens. Returns no path if there are no blocks."""
        lines: dict[str, list[tuple[float, float]]] = {}
        for mode, own in rows.items():
            for row in own:
                if row.metric != "bits by place":
                    continue
                order = row.setting.get("order")
                markov = f"Markov, order {order}" if order != "mixture" else "Markov, orders mixed"
                if order is None or mode == next(iter(rows)):  # Markov models are the same in every mode
                    name = f"memory {mode}" if order is None else markov
                    lines.setdefault(name, []).append((row.setting["from"], row.value))
        if not lines:
            return []
        lines = dict(sorted(lines.items(), key=lambda line: line[0].startswith("Markov")))
        styles = {name: (index, int(name.startswith("Markov"))) for index, name in enumerate(lines)}
        path = stem.with_name(f"{stem.name}.lm-places.png")
        title = f"Mean over blocks of {format_length(self.settings.every)} tokens, in one pass"
        y = f"bits per {'base' if self.unit == 'base' else 'token'}"
        return [curves(path, lines, title=title, x="tokens read before", y=y, styles=styles, linear=True)]

    def _plot_by_position(self, rows: Mapping[str, Sequence[Row]], stem: Path) -> list[Path]:
        """Plot the loss by position in the text. Returns no path if the view "stream" was not measured."""
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
        title = "Loss by position from the start of the text"
        return [
            curves(path, lines, title=title, x="tokens read before", y="loss, nats per token", ticks=ticks)
        ]


@dataclass
class Sums:
    """Sums over a file, which are also saved when an evaluation is interrupted."""

    nll: float = 0.0
    """Sum of all losses, in nats."""
    count: int = 0
    """Number of losses."""
    tokens: int = 0
    """Number of tokens of finished documents."""
    bytes: int = 0
    """Number of bytes of finished documents, without the first token of each."""
    document: int = 0
    """Index of the current document in the file."""
    position: int = 1
    """Position of the next loss in the current document, from 1."""
    bins: list[list[float]] = field(default_factory=lambda: [[0.0, 0] for _ in range(len(BIN_EDGES) + 1)])
    """Sum and number of losses in each position bin (see `BIN_EDGES`)."""
    every: int | None = None
    """Number of tokens in each block of `places`, which are reported separately. None: no blocks."""
    places: list[list[float]] = field(default_factory=list)
    """Sum and number of losses in each block of `every` tokens."""

    def add(self, losses: torch.Tensor, position: int | None = None) -> None:
        """Add the losses of consecutive tokens, in nats.

        `position` is the position of the first of them in its document; if it is None, `bins` and `position`
        stay unchanged.
        """
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
            indices = np.searchsorted(BIN_EDGES, np.arange(position, position + len(values)), "right")
            self.position = position + len(values)
            for index in np.unique(indices):
                own = values[indices == index]
                self.bins[index] = [self.bins[index][0] + float(own.sum()), self.bins[index][1] + len(own)]

    def to_dict(self) -> Result:
        """Return the sums as JSON data, to be saved in the checkpoint."""
        return asdict(self)


def _skip_tokens(lists: Iterable[list[int]], count: int) -> Iterator[list[int]]:
    """Yield the lists of tokens without the first `count` tokens."""
    for tokens in lists:
        passed = min(count, len(tokens))
        count -= passed
        yield tokens[passed:]


class _CountingStream:
    """An iterable over lists of tokens that counts all tokens and bytes, and the bytes of the first token."""

    def __init__(self, tokenizer: Tokenizer, lists: Iterable[list[int]]) -> None:
        self.tokenizer, self.lists, self.tokens, self.bytes, self.first = tokenizer, lists, 0, 0, 0

    def __iter__(self) -> Iterator[list[int]]:
        for tokens in self.lists:
            if not self.tokens:
                self.first = num_bytes(self.tokenizer, tokens[:1])
            self.tokens += len(tokens)
            self.bytes += num_bytes(self.tokenizer, tokens)
            yield tokens


def num_bytes(tokenizer: Tokenizer, tokens: Sequence[int]) -> int:
    """Return the number of bytes of text that the tokens encode. The last tokens may be an incomplete
    character.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return len(tokens)
    end = len(tokens)
    while (
        isinstance(tokenizer, JsonTokenizer) and end and "\ufffd" in tokenizer.decode(tokens[end - 1 : end])
    ):
        end -= 1
    size = len(tokenizer.decode(tokens[:end]).encode("utf-8", "surrogatepass"))
    if isinstance(tokenizer, JsonTokenizer):
        size += sum(_token_bytes(tokenizer.inner.id_to_token(token) or "") for token in tokens[end:])
    return size


def _token_bytes(token: str) -> int:
    """Return the number of bytes of a token string: "<0xE2>", byte-level characters, or plain text."""
    if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
        return 1
    return len(token) if set(token) <= BYTE_LETTERS else len(token.encode())


def _truncate(lists: Iterable[list[int]], max_tokens: int | None) -> Iterator[list[int]]:
    """Yield lists of tokens until `max_tokens` tokens were yielded. None: no limit."""
    for tokens in lists:
        if max_tokens is None:
            yield tokens
        else:
            yield tokens[:max_tokens]
            max_tokens -= len(tokens)
            if max_tokens <= 0:
                return
