"""One call of a `SentenceModel`: text is read and its sentences are stored; where an answer begins, sentences are
recalled.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from remanence.attached.sentences.segments import ANSWER, Position
from remanence.attached.sentences.state import SentenceState
from remanence.attached.sentences.vocabulary import NEWLINE
from remanence.backbone import State, Trace
from remanence.config import Mode
from remanence.ops.checks import check_offsets
from remanence.runtime.positions import positions_of, with_host_copy

if TYPE_CHECKING:
    from remanence.attached.sentences.model import SentenceModel


class Document(NamedTuple):
    """The tokens of one document of a call ``[t]`` on the host, and their places in the flat output ``[t]``."""

    tokens: np.ndarray
    places: Tensor


def documents_of(
    tokens: Tensor, mask: Tensor | None, offsets: Tensor | Sequence[int] | None, rows: int | None
) -> list[Document]:
    """The documents of a call."""
    host, (count, length) = tokens.cpu().numpy(), tokens.shape
    places = torch.arange(count * length).view(count, length)
    if offsets is not None:
        if mask is not None:
            raise ValueError("offsets: expected None beside a mask, got both")
        borders = check_offsets(offsets, count, length, rows if rows is not None else len(offsets) - 1)
        assert borders is not None
        return [Document(host[0, a:b], places[0, a:b]) for a, b in pairwise(borders)]
    if mask is None:
        return [Document(host[row], places[row]) for row in range(count)]
    if mask.shape != tokens.shape or mask.dtype != torch.bool:
        raise ValueError(
            f"mask: expected booleans of shape {list(tokens.shape)}, got {list(mask.shape)} {mask.dtype}"
        )
    known = mask.cpu()
    return [Document(host[row][known[row].numpy()], places[row][known[row]]) for row in range(count)]


class CallRow:
    """One row during a call: the tokens to read, and what has been read of them."""

    def __init__(
        self, index: int, tokens: np.ndarray, scan: list[int], pending: list[int], position: int
    ) -> None:
        self.index, self.tokens, self.pending = index, tokens, pending[: scan[-1]]
        self.place, self.done = Position(*scan[:-1]), 0
        self.read = position - len(self.pending)
        """The number of tokens that the pretrained model has read, outside of answers."""
        self.hidden: list[Tensor] = []

    @property
    def left(self) -> np.ndarray:
        return self.tokens[self.done :]

    def extend_answer(self, tokens: Sequence[int], flags: np.ndarray) -> None:
        """Add tokens to the open answer."""
        if tokens:
            self.pending = [*self.pending, *tokens]
            self.place = self.place._replace(last=int(flags[tokens[-1]]))


class SentenceCall:
    """One call of a `SentenceModel`: rows are read in turns of plain text and of answers."""

    def __init__(self, model: SentenceModel, state: State, documents: list[Document], mode: Mode) -> None:
        self.model, self.mode = model, mode
        self.plain = State(state.blocks[:-1], state.position)
        self.own: SentenceState = state.blocks[-1]
        scans, pending = self.own.scan.tolist(), self.own.pending.tolist()
        positions = positions_of(state.position)
        self.rows = [
            CallRow(index, document.tokens, scans[index], pending[index], positions[index])
            for index, document in enumerate(documents)
        ]
        self.reads = [position - scan[-1] for position, scan in zip(positions, scans, strict=True)]
        seen = [read - skipped for read, skipped in zip(self.reads, self.own.skipped.tolist(), strict=True)]
        self.plain = self.plain._replace(position=self._position(seen))

    def _position(self, counts: list[int]) -> Tensor:
        device = self.model.device
        return with_host_copy(torch.tensor(counts, dtype=torch.int64, device=device), counts)

    def run(self) -> None:
        """Read all tokens."""
        if self.own.answer is None and self.mode != "off":
            self._restore_answers()
        while waiting := [row for row in self.rows if row.done < len(row.tokens)]:
            answering = [row for row in waiting if self._answer_length(row)]
            if answering:
                self._read_answers(answering)
            else:
                self._read_plain(waiting)

    def state(self) -> State:
        """The state after the call."""
        own, device = self.own, self.model.device
        longest = max((len(row.pending) for row in self.rows), default=0)
        scan = torch.tensor([[*row.place, len(row.pending)] for row in self.rows], dtype=torch.int64)
        pending = torch.tensor(
            [row.pending + [-1] * (longest - len(row.pending)) for row in self.rows], dtype=torch.int64
        ).view(len(self.rows), longest)
        own = own._replace(scan=scan.to(device), pending=pending.to(device))
        if not any(row.place.part == ANSWER for row in self.rows):
            own = own._replace(answer=None)
        return State(
            (*self.plain.blocks, own), self._position([row.read + len(row.pending) for row in self.rows])
        )

    def _answer_length(self, row: CallRow) -> int:
        if row.place.part != ANSWER or self.mode == "off":
            return 0
        return self.model.segmenter.answer_length(row.left, row.read + len(row.pending), row.place)

    # Text.

    def _read_plain(self, rows: list[CallRow]) -> None:
        """Read text outside of answers, up to the next answer of each row; first the tokens of an answer that has
        ended.
        """
        model, given, sentences = self.model, [], []
        for row in rows:
            at = row.read + len(row.pending)
            scanned = model.segmenter.scan(row.left, at, row.place)
            given.append(np.concatenate([np.array(row.pending, np.int64), row.left[: scanned.length]]))
            sentences.append(scanned.sentences)
            row.place, row.done = scanned.position, row.done + scanned.length
        trace = self._attached(given, [row.index for row in rows], self.plain, layers=True)
        self.plain = _merged(self.plain, trace.state, [row.index for row in rows], len(self.rows))
        features = model.encoder.features([trace.layers[n] for n in model.sentences.layers])
        for number, (row, tokens) in enumerate(zip(rows, given, strict=True)):
            row.hidden.append(trace.hidden[number, len(row.pending) : len(tokens)])
            row.read, row.pending = row.read + len(tokens), []
        self.store(rows, given, features, sentences)
        opened = [row for row in rows if row.place.part == ANSWER and self.mode != "off"]
        if opened:
            last = self._open_answers(opened)
            for row, vector in zip(opened, last, strict=True):
                row.hidden[-1] = torch.cat([row.hidden[-1][:-1], vector.unsqueeze(0)])

    def _attached(self, tokens: list[np.ndarray], rows: list[int], state: State, layers: bool) -> Trace:
        """Run the pretrained model on tokens of some rows, padded to the longest."""
        longest = max(map(len, tokens))
        padded = np.zeros((len(tokens), longest), np.int64)
        mask = np.zeros((len(tokens), longest), bool)
        for number, each in enumerate(tokens):
            padded[number, : len(each)], mask[number, : len(each)] = each, True
        device = self.model.device
        own = state if rows == list(range(len(self.rows))) else _rows(state, rows)
        return self.model.attached.trace(
            torch.from_numpy(padded).to(device),
            own,
            mask=None if mask.all() else torch.from_numpy(mask).to(device),
            layers=layers,
        )

    def store(
        self,
        rows: list[CallRow],
        given: list[np.ndarray],
        features: Tensor,
        sentences: list[list[tuple[int, int]]],
    ) -> None:
        """Update the last tokens of some rows, and store the sentences that have ended."""
        c, own, device = self.model.sentences, self.own, self.model.device
        index = [row.index for row in rows]
        hidden, recent = own.hidden[index], own.recent[index]
        new_keys: dict[int, Tensor] = {}
        new_ids: dict[int, np.ndarray] = {}
        spans, places, new_hidden, new_recent = [], [], [], []
        for number, (row, tokens) in enumerate(zip(rows, given, strict=True)):
            features_all = torch.cat([hidden[number], features[number, : len(tokens)].to(hidden.dtype)])
            ids_all = torch.cat([recent[number], torch.from_numpy(tokens).to(device)])
            first = row.read - len(features_all)  # position of its first entry
            for start, end in sentences[number] if self.mode in ("on", "fresh") else ():
                spans.append((number, start, end))
                places.append((features_all, start - first, end - start))
            if sentences[number] and self.mode in ("on", "fresh"):
                host = ids_all.tolist()
                offset = row.read - len(host)
                new_ids[number] = np.full((len(sentences[number]), c.longest), -1, np.int32)
                for place, (start, end) in enumerate(sentences[number]):
                    new_ids[number][place, : end - start] = host[start - offset : end - offset]
            new_hidden.append(features_all[-c.history :])
            new_recent.append(ids_all[-recent.shape[1] :])
        own = own._replace(
            hidden=_put(own.hidden, index, torch.stack(new_hidden)),
            recent=_put(own.recent, index, torch.stack(new_recent)),
        )
        if spans:
            keys = self._encode(places, query=False).to(own.keys.dtype).detach()
            for number in new_ids:
                chosen = [i for i, (each, *_) in enumerate(spans) if each == number]
                new_keys[number] = keys[chosen]
            own = self._append(own, rows, new_keys, new_ids, sentences)
        self.own = own

    def _encode(self, places: list[tuple[Tensor, int, int]], *, query: bool) -> Tensor:
        """Keys or queries of spans, each given as hidden states ``[t d]``, first index and length."""
        distinct = {id(hidden): hidden for hidden, *_ in places}
        sizes = [len(hidden) for hidden in distinct.values()]
        offsets = dict(zip(distinct, np.cumsum([0, *sizes]).tolist(), strict=False))
        flat = torch.cat(list(distinct.values())) if len(distinct) > 1 else next(iter(distinct.values()))
        spans = torch.tensor([(offsets[id(hidden)] + a, n) for hidden, a, n in places], device=flat.device)
        steps = torch.arange(
            max(self.model.sentences.longest, self.model.sentences.query), device=flat.device
        )
        found = []
        for part in spans.split(256):
            first, length = part[:, :1], part[:, 1:]
            hidden = flat[(first + steps).clamp(max=len(flat) - 1)]
            found.append(self.model.encoder(hidden, steps < length, query=query))
        return torch.cat(found)

    def _append(
        self,
        own: SentenceState,
        rows: list[CallRow],
        keys: dict[int, Tensor],
        ids: dict[int, np.ndarray],
        sentences: list[list[tuple[int, int]]],
    ) -> SentenceState:
        """Add new sentences, by the number of their row in `rows`."""
        c, device = self.model.sentences, self.model.device
        by_row = {rows[number].index: number for number in keys}
        counts, lists = own.length.tolist(), []
        for row, count in enumerate(counts):
            parts = [own.keys[row, :count], own.ids[row, :count], own.spans[row, :count]]
            if row in by_row:
                number = by_row[row]
                new = [
                    keys[number],
                    torch.from_numpy(ids[number]).to(device),
                    torch.tensor(sentences[number], dtype=torch.int64, device=device),
                ]
                parts = [torch.cat(pair)[-c.size :] for pair in zip(parts, new, strict=True)]
            lists.append(parts)
        longest = max(len(parts[0]) for parts in lists)
        pad = lambda x, value: F.pad(x, (0, 0, 0, longest - len(x)), value=value)
        stacked = [torch.stack([pad(parts[n], -1 if n == 1 else 0) for parts in lists]) for n in range(3)]
        length = torch.tensor([len(parts[0]) for parts in lists], dtype=torch.int64, device=device)
        return own._replace(keys=stacked[0], ids=stacked[1], spans=stacked[2], length=length)

    # Answers.

    def queries(self, rows: list[int]) -> Tensor:
        """The queries of the last messages of rows ``[k e]``. The pretrained model must not have read beyond the
        tokens before the answer.
        """
        scans, places = self.own.scan.tolist(), []
        for row in rows:
            place = self.rows[row].place if self.rows else Position(*scans[row][:-1])
            read = self.rows[row].read if self.rows else self.reads[row]
            first, length = self._question(place, read)
            hidden = self.own.hidden[row]
            places.append((hidden, max(0, first - (read - len(hidden))), length))
        return self._encode(places, query=True)

    def _question(self, place: Position, read: int) -> tuple[int, int]:
        """The first token of the query of an answer, and the number of its tokens: 0 if no message of a user ended
        within the last `history` of the `read` tokens.
        """
        c = self.model.sentences
        first = max(place.question_start, place.question_end - c.query, read - c.history)
        return first, max(0, place.question_end - first)

    def recall(self, rows: list[CallRow]) -> list[list[list[int]]]:
        """The tokens of the sentences that are recalled for the answers of rows, in the order in which they were
        read.
        """
        own, c = self.own, self.model.sentences
        if not own.keys.shape[1]:
            return [[] for _ in rows]
        index = [row.index for row in rows]
        queries = self.queries(index)
        score = torch.einsum("rne,re->rn", own.keys[index].to(queries.dtype), queries)
        allowed = torch.arange(own.keys.shape[1], device=score.device) < own.length[index].unsqueeze(-1)
        questions = [self._question(row.place, row.read) for row in rows]
        first, length = torch.tensor(questions, device=score.device).unbind(-1)
        allowed &= (own.spans[index, :, 1] <= first.unsqueeze(-1)) & (length > 0).unsqueeze(-1)
        if self.mode == "fresh":
            segment = self.model.config.segment
            since = torch.tensor([row.read // segment * segment for row in rows], device=score.device)
            allowed &= own.spans[index, :, 0] >= since.unsqueeze(-1)
        score = score.masked_fill(~allowed, -torch.inf)
        best = score.topk(min(c.recalled, score.shape[1]), 1)
        chosen = best.indices.masked_fill(best.values == -torch.inf, score.shape[1]).sort(1).values.tolist()
        found = []
        for row, some in zip(index, chosen, strict=True):
            known = [n for n in some if n < score.shape[1]]
            ids = own.ids[row, known].tolist()
            found.append([[token for token in each if token >= 0] for each in ids])
        return found

    def _block(self, sentences: list[list[int]]) -> list[int]:
        """The tokens that recalled sentences put into the context."""
        return recalled_context(self.model.sentences.format, self.model.segmenter.flags, sentences)

    def _open_answers(self, rows: list[CallRow]) -> list[Tensor]:
        """Recall sentences for answers that begin, and read them with the adapter. Returns the last hidden vector of
        each row ``[d]``.
        """
        blocks = [np.array(self._block(each), np.int64) for each in self.recall(rows)]
        index = [row.index for row in rows]
        with self.model.adapter.active():
            trace = self._attached(blocks, index, self.plain, layers=False)
        before = self.plain if self.own.answer is None else self.own.answer
        self.own = self.own._replace(answer=_merged(before, trace.state, index, len(self.rows)))
        return [trace.hidden[number, len(block) - 1] for number, block in enumerate(blocks)]

    def _restore_answers(self) -> None:
        """Compute the state within open answers again, for a state from a file, or one of several that were joined,
        unless the first token to read ends the answer.
        """
        ends = lambda row: len(row.tokens) and not self._answer_length(row)
        opened = [row for row in self.rows if row.place.part == ANSWER and not ends(row)]
        if not opened:
            return
        self._open_answers(opened)
        behind = [row for row in opened if row.pending]
        if behind:
            self._continue_answers(behind, [np.array(row.pending, np.int64) for row in behind])

    def _read_answers(self, rows: list[CallRow]) -> None:
        """Read the next tokens of answers."""
        given = [row.left[: self._answer_length(row)] for row in rows]
        trace = self._continue_answers(rows, given)
        for number, (row, tokens) in enumerate(zip(rows, given, strict=True)):
            row.hidden.append(trace.hidden[number, : len(tokens)])
            row.done += len(tokens)
            row.extend_answer(tokens.tolist(), self.model.segmenter.flags)

    def _continue_answers(self, rows: list[CallRow], tokens: list[np.ndarray]) -> Trace:
        """Read tokens of open answers with the adapter."""
        assert self.own.answer is not None
        index = [row.index for row in rows]
        with self.model.adapter.active():
            trace = self._attached(tokens, index, self.own.answer, layers=False)
        self.own = self.own._replace(answer=_merged(self.own.answer, trace.state, index, len(self.rows)))
        return trace


def with_answer_tokens(
    model: SentenceModel, state: State, tokens: Sequence[Sequence[int]], answer: State
) -> State:
    """A state after more tokens of open answers, given for each row. `answer` is the pretrained model's state within
    the answers after them.
    """
    none = Document(np.zeros(0, np.int64), torch.zeros(0, dtype=torch.int64))
    call = SentenceCall(model, state, [none] * len(tokens), "on")
    for row, ids in zip(call.rows, tokens, strict=True):
        row.extend_answer(ids, model.segmenter.flags)
    call.own = call.own._replace(answer=answer)
    return call.state()


def recalled_context(form: Any, flags: np.ndarray, sentences: list[list[int]]) -> list[int]:
    """The tokens that recalled sentences put into the context, one sentence a line."""
    block = list(form.recall_start)
    for ids in sentences:
        own = list(ids)
        while own and flags[own[-1]] & NEWLINE:
            own.pop()
        while own and flags[own[0]] & NEWLINE:
            own.pop(0)
        block += [*own, form.newline]
    return block + list(form.recall_end)


def _rows(state: State, rows: list[int]) -> State:
    """Some rows of a state, with their positions on the host."""
    places = positions_of(state.position)
    return state.rows(rows).at([places[row] for row in rows])


def _put(full: Tensor, rows: list[int], part: Tensor) -> Tensor:
    """A tensor with some of its rows replaced."""
    if len(rows) == len(full):
        return part
    return full.index_copy(0, torch.tensor(rows, device=full.device), part.to(full.dtype))


def _merged(full: State, part: State, rows: list[int], total: int) -> State:
    """A state with some of its rows replaced by those of another."""
    if len(rows) == total:
        return part
    places, new = positions_of(full.position), positions_of(part.position)
    for row, place in zip(rows, new, strict=True):
        places[row] = place
    pairs = iter(part.tensors())
    return full.map(lambda tensor: _put(tensor, rows, next(pairs))).at(places)
