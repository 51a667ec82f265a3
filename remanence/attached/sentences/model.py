"""`SentenceModel`: a pretrained model with a memory of sentences.

The pretrained model reads with a sliding window. Sentences of plain text and of users' messages are stored with a key
computed from hidden states. Where an answer begins, the user's message is the query: the sentences with the nearest
keys are put behind the context, in the order in which they were read, and the answer is computed with these in its
context and with a low-rank update of the weights. As in Titans' MAC, what is retrieved is context. Any other text has
the logits of the pretrained model, and the memory of an open answer is the only thing that an answer changes: when it
has ended, the pretrained model reads its tokens like any others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remanence.attached.config import AttachConfig
from remanence.attached.model import Attached
from remanence.attached.sentences import removal
from remanence.attached.sentences.adapter import SwitchedLora
from remanence.attached.sentences.encoder import SpanEncoder
from remanence.attached.sentences.segments import ANSWER, OTHER, TEXT, Position, Segmenter
from remanence.attached.sentences.state import SentenceState
from remanence.attached.sentences.vocabulary import NEWLINE
from remanence.backbone import State, Trace
from remanence.config import Mode
from remanence.mixers import Mixer
from remanence.model import check_tokens
from remanence.ops.checks import check_offsets
from remanence.runtime.positions import positions_of, with_host_copy
from remanence.tokenizers.tokens import Tokenizer

if TYPE_CHECKING:
    from remanence.attached.base import PretrainedSource


class Sentence(NamedTuple):
    """A stored sentence: its tokens, and its first and last position (exclusive)."""

    tokens: list[int]
    start: int
    end: int


class _Row:
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


class SentenceModel(nn.Module):
    """A pretrained model with a memory of sentences: ``logits, state = model(tokens, state)``.

    It satisfies the protocol `remanence.causal_model.CausalModel`. `attached` is the pretrained model with a sliding
    window; `encoder` computes keys and queries, and `adapter` is the low-rank update that answers are computed with.
    """

    folder: Path | None = None
    """The folder from which the model was loaded; None if it was not loaded."""
    log_unigrams = None

    def __init__(self, attached: Attached, flags: np.ndarray | None = None) -> None:
        super().__init__()
        self.attached = attached
        config = self.sentences = attached.config.sentences
        like = attached.embed.weight
        self.flags = nn.Parameter(
            torch.zeros(attached.vocab_size, dtype=torch.uint8) if flags is None else torch.from_numpy(flags),
            requires_grad=False,
        )
        self.encoder = SpanEncoder(attached.config.dim, config)
        self.adapter = SwitchedLora(attached.base.base_model.get_submodule("layers"), config.rank)
        self.to(like.device)
        self._segmenter: tuple[int, Segmenter] | None = None
        self._memory_mode: Mode = "on"

    # The interface of a language model.

    @property
    def config(self) -> AttachConfig:
        return self.attached.config

    @property
    def base(self) -> Any:
        """The pretrained model."""
        return self.attached.base

    @property
    def source(self) -> PretrainedSource:
        return self.attached.source

    @property
    def embed(self) -> nn.Embedding:
        return self.attached.embed

    @property
    def device(self) -> torch.device:
        return self.attached.device

    @property
    def vocab_size(self) -> int:
        return self.attached.vocab_size

    @property
    def max_positions(self) -> int | None:
        return self.attached.max_positions

    @property
    def has_memory(self) -> bool:
        return True

    @property
    def mixers(self) -> Sequence[Mixer]:
        return []

    @property
    def checkpointing(self) -> bool:
        return self.attached.checkpointing

    @checkpointing.setter
    def checkpointing(self, on: bool) -> None:
        self.attached.checkpointing = on

    @property
    def memory_mode(self) -> Mode:
        """The memory mode of calls that do not specify one."""
        return self._memory_mode

    @memory_mode.setter
    def memory_mode(self, mode: Mode) -> None:
        self._memory_mode = self.check_mode(mode)

    def check_mode(self, mode: Mode) -> Mode:
        return self.attached.check_mode(mode)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.attached.logits(hidden)

    def saved_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the encoder and the adapter, and the flags of the vocabulary."""
        for name, parameter in self.named_parameters():
            if not name.startswith("attached."):
                yield name, parameter

    def current_config(self) -> AttachConfig:
        return self.attached.current_config()

    def upgrade_config(self, saved: dict[str, Any], where: str) -> dict[str, Any]:
        return self.attached.upgrade_config(saved, where)

    def pretrained_tokenizer(self) -> Tokenizer | None:
        return self.attached.pretrained_tokenizer()

    def capture_unsupported_reason(self, carries: bool) -> str | None:
        return self.attached.capture_unsupported_reason(carries)

    def decode_unsupported_reason(self, memory_mode: Mode) -> str | None:
        if memory_mode == "off":
            return "answers without a memory are read like other text"
        return self.attached.decode_unsupported_reason(memory_mode)

    def state_template(self) -> State:
        return self.start(1).map(lambda tensor: torch.empty_like(tensor, device="meta"))

    def state_layout(self) -> tuple[State, list[int]]:
        return self.state_template(), list(range(self.config.num_layers + 1))

    def describe(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        from remanence.attached.folder import describe

        return describe(self)

    def save(self, folder: str | Path) -> None:
        """Write the configuration, the new parameters, and the name and digest of the pretrained model."""
        from remanence.attached.folder import save

        save(self, folder)

    def detach(self) -> Any:
        """Remove the memory and return the pretrained model."""
        self.adapter.remove()
        return self.attached.detach()

    # States.

    @property
    def segmenter(self) -> Segmenter:
        """The segmenter with the present flags of the vocabulary."""
        version = self.flags._version
        if self._segmenter is None or self._segmenter[0] != version:
            self._segmenter = version, Segmenter(self.sentences, self.flags.detach().cpu().numpy())
        return self._segmenter[1]

    def start(self, rows: int) -> State:
        """The initial state of `rows` documents."""
        c, device = self.sentences, self.device
        like = self.embed.weight.detach()
        whole = lambda *shape: torch.zeros(rows, *shape, dtype=torch.int64, device=device)
        sentences = SentenceState(
            keys=like.new_zeros(rows, 0, c.key_dim),
            ids=torch.zeros(rows, 0, c.longest, dtype=torch.int32, device=device),
            spans=whole(0, 2),
            length=torch.zeros(rows, dtype=torch.int64, device=device),
            hidden=like.new_zeros(rows, c.history, len(c.layers) * self.config.dim),
            recent=whole(max(c.history, self.config.window or c.history)) - 1,
            scan=whole(len(Position._fields) + 1),
            pending=whole(0),
            skipped=torch.zeros(rows, dtype=torch.int64, device=device),
        )
        plain = self.attached.start(rows)
        return State((*plain.blocks, sentences), plain.position)

    def forward(
        self,
        tokens: Tensor,
        state: State | None = None,
        *,
        mask: Tensor | None = None,
        offsets: Tensor | Sequence[int] | None = None,
        memory_mode: Mode | None = None,
    ) -> tuple[Tensor, State]:
        """The logits of the next token at each position ``[b t v]``, and the new state."""
        trace = self.trace(tokens, state, mask=mask, offsets=offsets, memory_mode=memory_mode)
        return self.logits(trace.hidden), trace.state

    def trace(
        self,
        tokens: Tensor,
        state: State | None = None,
        *,
        mask: Tensor | None = None,
        offsets: Tensor | Sequence[int] | None = None,
        memory_mode: Mode | None = None,
        keep: bool = True,
        layers: bool = False,
    ) -> Trace:
        """Run `forward` without the logits."""
        if layers:
            raise ValueError(
                "layers: expected False for a memory of sentences, whose answers have a context of their own"
            )
        tokens = check_tokens(tokens, mask, self.vocab_size)
        mode = self._memory_mode if memory_mode is None else self.check_mode(memory_mode)
        documents = _documents(tokens, mask, offsets, None if state is None else len(state.position))
        state = self.start(len(documents)) if state is None else state
        self._check(state, len(documents))
        call = _Call(self, state, documents, mode)
        call.run()
        hidden = self.embed.weight.new_zeros(tokens.numel(), self.config.dim)
        index = torch.cat([each.places for each in documents]).to(self.device)
        found = [row.hidden for row in call.rows]
        if any(found):
            hidden = hidden.index_put((index,), torch.cat([part for parts in found for part in parts]))
        none = (None,) * (self.config.num_layers + 1)
        return Trace(hidden.view(*tokens.shape, -1), call.state(), none, ())

    def _check(self, state: object, rows: int) -> None:
        depth = self.config.num_layers + 1
        if (
            not isinstance(state, State)
            or len(state.blocks) != depth
            or not isinstance(state.blocks[-1], SentenceState)
        ):
            raise ValueError(
                f"state: expected the State this model returned, or None, got {type(state).__name__}"
            )
        if len(state.position) != rows:
            raise ValueError(f"state: expected {rows} rows, one for each document, got {len(state.position)}")

    # Sentences.

    def stored(self, state: State) -> list[list[Sentence]]:
        """The stored sentences of every row, in the order in which they were read."""
        own = state.blocks[-1]
        found = []
        for row, count in enumerate(own.length.tolist()):
            ids, spans = own.ids[row, :count].tolist(), own.spans[row, :count].tolist()
            found.append([Sentence(each[: b - a], a, b) for each, (a, b) in zip(ids, spans, strict=True)])
        return found

    @torch.no_grad()
    def search(self, state: State, tokens: Sequence[int]) -> list[list[tuple[int, float]]]:
        """For every row, the stored sentences by their similarity to a message of a user with these tokens: indices
        into `stored` and cosines, the most similar first.
        """
        form, rows = self.sentences.format, len(state.position)
        message = torch.tensor([[*form.user, *tokens, form.end]], device=self.device).expand(rows, -1)
        asked = self.trace(message, state, memory_mode="frozen").state
        query = _Call(self, asked, [], "frozen").queries(list(range(rows)))
        own = state.blocks[-1]
        found = []
        for row, count in enumerate(own.length.tolist()):
            score = own.keys[row, :count].to(query.dtype) @ query[row]
            order = score.argsort(descending=True, stable=True)
            found.append(list(zip(order.tolist(), score[order].tolist(), strict=True)))
        return found

    def end_of_answer(self, state: State) -> list[int]:
        """The tokens that end an open answer of the first row, to be read before text that does not belong to it; empty
        if there is no open answer.
        """
        form, part = self.sentences.format, Position(*state.blocks[-1].scan[0, :-1].tolist()).part
        return [form.end, form.newline] if part == ANSWER else []

    @torch.no_grad()
    def close_sentence(self, state: State) -> State:
        """A state in which the open sentence of every row is stored, if it has at least two tokens. A sentence is
        otherwise stored when the next one begins or the message ends.
        """
        nothing = _Document(np.zeros(0, np.int64), torch.zeros(0, dtype=torch.int64))
        call = _Call(self, state, [nothing] * len(state.position), "on")
        opened = [row for row in call.rows if row.place.part == TEXT and row.read - row.place.start >= 2]
        for row in opened:
            hidden = call.own.hidden[row.index : row.index + 1, :0]
            call._store([row], [nothing.tokens], hidden, [[(row.place.start, row.read)]])
            row.place = row.place._replace(start=row.read)
        return call.state()

    @torch.no_grad()
    def without(self, state: State, remove: Sequence[int], row: int = 0) -> State:
        """A state of one row without the sentences `remove` (indices into `stored`).

        The other stored sentences stay. As an answer, or the hidden state of a later token, may depend on a removed
        sentence, the pretrained model goes on without the context of the window; an open sentence is stored first.
        The keys of other sentences are not computed again.
        """
        return removal.without(self, state.rows([row]), remove) if remove else state.rows([row])


def with_answer_tokens(
    model: SentenceModel, state: State, tokens: Sequence[Sequence[int]], answer: State
) -> State:
    """A state after more tokens of open answers, given for each row. `answer` is the pretrained model's state within
    the answers after them.
    """
    none = _Document(np.zeros(0, np.int64), torch.zeros(0, dtype=torch.int64))
    call = _Call(model, state, [none] * len(tokens), "on")
    for row, ids in zip(call.rows, tokens, strict=True):
        row.extend_answer(ids, model.segmenter.flags)
    call.own = call.own._replace(answer=answer)
    return call.state()


class _Document(NamedTuple):
    """The tokens of one document of a call ``[t]`` on the host, and their places in the flat output ``[t]``."""

    tokens: np.ndarray
    places: Tensor


def _documents(
    tokens: Tensor, mask: Tensor | None, offsets: Tensor | Sequence[int] | None, rows: int | None
) -> list[_Document]:
    """The documents of a call."""
    host, (count, length) = tokens.cpu().numpy(), tokens.shape
    places = torch.arange(count * length).view(count, length)
    if offsets is not None:
        if mask is not None:
            raise ValueError("offsets: expected None beside a mask, got both")
        borders = check_offsets(offsets, count, length, rows if rows is not None else len(offsets) - 1)
        assert borders is not None
        return [_Document(host[0, a:b], places[0, a:b]) for a, b in pairwise(borders)]
    if mask is None:
        return [_Document(host[row], places[row]) for row in range(count)]
    if mask.shape != tokens.shape or mask.dtype != torch.bool:
        raise ValueError(
            f"mask: expected booleans of shape {list(tokens.shape)}, got {list(mask.shape)} {mask.dtype}"
        )
    known = mask.cpu()
    return [_Document(host[row][known[row].numpy()], places[row][known[row]]) for row in range(count)]


class _Call:
    """One call of a `SentenceModel`: rows are read in turns of plain text and of answers."""

    def __init__(self, model: SentenceModel, state: State, documents: list[_Document], mode: Mode) -> None:
        self.model, self.mode = model, mode
        self.plain = State(state.blocks[:-1], state.position)
        self.own: SentenceState = state.blocks[-1]
        scans, pending = self.own.scan.tolist(), self.own.pending.tolist()
        positions = positions_of(state.position)
        self.rows = [
            _Row(index, document.tokens, scans[index], pending[index], positions[index])
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

    def _answer_length(self, row: _Row) -> int:
        if row.place.part != ANSWER or self.mode == "off":
            return 0
        return self.model.segmenter.answer_length(row.left, row.read + len(row.pending), row.place)

    # Text.

    def _read_plain(self, rows: list[_Row]) -> None:
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
        self._store(rows, given, features, sentences)
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

    def _store(
        self,
        rows: list[_Row],
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
        longest = max(self.model.sentences.longest, self.model.sentences.query)
        found = []
        for start in range(0, len(places), 256):
            part = places[start : start + 256]
            x = torch.stack([F.pad(h[a : a + n], (0, 0, 0, longest - n)) for h, a, n in part])
            lengths = torch.tensor([n for *_, n in part], device=x.device)
            mask = torch.arange(longest, device=x.device) < lengths.unsqueeze(-1)
            found.append(self.model.encoder(x, mask, query=query))
        return torch.cat(found)

    def _append(
        self,
        own: SentenceState,
        rows: list[_Row],
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

    def recall(self, rows: list[_Row]) -> list[list[list[int]]]:
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

    def _open_answers(self, rows: list[_Row]) -> list[Tensor]:
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
        """Compute the state within open answers again, for a state from a file, or one of several that were joined."""
        opened = [row for row in self.rows if row.place.part == ANSWER]
        if not opened:
            return
        self._open_answers(opened)
        behind = [row for row in opened if row.pending]
        if behind:
            self._continue_answers(behind, [np.array(row.pending, np.int64) for row in behind])

    def _read_answers(self, rows: list[_Row]) -> None:
        """Read the next tokens of answers."""
        given = [row.left[: self._answer_length(row)] for row in rows]
        trace = self._continue_answers(rows, given)
        for number, (row, tokens) in enumerate(zip(rows, given, strict=True)):
            row.hidden.append(trace.hidden[number, : len(tokens)])
            row.done += len(tokens)
            row.extend_answer(tokens.tolist(), self.model.segmenter.flags)

    def _continue_answers(self, rows: list[_Row], tokens: list[np.ndarray]) -> Trace:
        """Read tokens of open answers with the adapter."""
        assert self.own.answer is not None
        index = [row.index for row in rows]
        with self.model.adapter.active():
            trace = self._attached(tokens, index, self.own.answer, layers=False)
        self.own = self.own._replace(answer=_merged(self.own.answer, trace.state, index, len(self.rows)))
        return trace


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


__all__ = ["OTHER", "Sentence", "SentenceModel", "recalled_context"]
