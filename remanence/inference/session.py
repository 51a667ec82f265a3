"""A session: one document of any length that a model reads and continues. Its state can be saved to a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Unpack

import torch

from remanence.attached.folder import load_model
from remanence.attached.sentences.model import Sentence
from remanence.config import Mode
from remanence.inference import memfile
from remanence.inference.generate import WRITES, Generation, Write, check_tokenizer
from remanence.inference.reader import ReadResult, piece_size, read, token_pieces
from remanence.inference.sampling import Sampling, SamplingFields
from remanence.inference.sentences import (
    ANSWERED,
    NOTE,
    ReadTimes,
    StoredSentence,
    StoresSentences,
    meant,
    plain,
)
from remanence.model import CausalModel, State
from remanence.runtime.deprecation import renamed_method
from remanence.runtime.errors import DivergedError
from remanence.runtime.keywords import show_fields
from remanence.runtime.positions import positions_of
from remanence.tokenizers.tokens import Tokenizer

if TYPE_CHECKING:
    from remanence.inference.batch import SessionBatch

Source = str | bytes | Path | Iterable[str | bytes]
"""The text that a session reads: a string, bytes, the path of a file, or an iterable of parts of a text."""
FILE_CHUNK = 1 << 16
"""Number of bytes that are read from a file at a time."""


class Reading(NamedTuple):
    """The number of tokens read and their mean surprise (None if no memory was written)."""

    tokens: int
    surprise: float | None


class Session:
    """One document that a model reads and continues: ``session.read(text)``, ``session.generate(prompt)``,
    ``session.save(path)``.

    Args:
        model: a `CausalModel`, the folder of one, or a model with an attached memory.
        tokenizer: by default the tokenizer in the model's folder, or that of the pretrained model. Without
            either, bytes are used if the vocabulary is as small as that of a byte tokenizer.
        write: what `generate` writes to the neural memory: "all" (the prompt and the generated text), "prompt" or
            "none". `read` always writes. The attention window always contains the most recent tokens.
        memory_mode: "on", "off" (no memory), "frozen" (read, not written) or "fresh" (reset at every segment). None
            means the present ``model.memory_mode``. Sessions with the same model may have different modes, also in
            different threads.
    """

    def __init__(
        self,
        model: CausalModel | str | Path,
        tokenizer: Tokenizer | None = None,
        *,
        write: Write = "all",
        memory_mode: Mode | None = None,
    ) -> None:
        if write not in WRITES:
            raise ValueError(f"write: expected one of {', '.join(WRITES)}, got {write!r}")
        found = load_model(model).eval() if isinstance(model, (str, Path)) else model
        if not isinstance(found, CausalModel):  # a Hugging Face wrapper, as `remanence.attach` returns it
            found = getattr(found, "model", None)
        if not isinstance(found, CausalModel):
            got = type(model).__name__
            raise ValueError(
                f"model: expected a folder, a Model, or what remanence.attach returns, got {got}"
            )
        self.model: CausalModel = found
        self.write = write
        self.memory_mode = self.model.check_mode(memory_mode or self.model.memory_mode)
        self.tokenizer = check_tokenizer(self.model, tokenizer)
        self._current: State | Generation = self.model.start(1)
        self._is_streaming = False
        self._has_answered = False
        """Whether the last tokens were generated, so that text that is read next is not part of them."""
        self._times = ReadTimes()
        """When tokens were read, if the model stores sentences."""

    @property
    def state(self) -> State:
        """The state after all tokens read and generated so far, also while an answer is being generated."""
        return self._current if isinstance(self._current, State) else self._current.state

    @state.setter
    def state(self, state: State) -> None:
        self._check_idle("state")
        self._current, self._has_answered = state, False
        self._times.crop(self.tokens)

    @property
    def tokens(self) -> int:
        """The number of tokens read and generated so far."""
        return positions_of(self.state.position)[0]

    def _check_idle(self, action: str) -> None:
        """Raise an error while a stream is unfinished, because continuing the stream would overwrite a change
        of the state. `action` is the name to show in the error.
        """
        if self._is_streaming:
            raise ValueError(
                f"{action}: expected no answer under way, got an unfinished stream; finish its loop, or end it with "
                "stream.close()"
            )

    def read(self, source: Source) -> Reading:
        """Read a string, a file (a `Path`), or an iterable of parts of a text (an open file, a generator) in
        constant memory. Returns the number of tokens read and their mean surprise.
        """
        self.end_answer()
        surprise, count, before = 0.0, 0, self.tokens
        for piece in self.read_pieces(source):
            surprise, count = surprise + piece.surprise, count + piece.surprise_count
        return Reading(self.tokens - before, surprise / count if count else None)

    def read_pieces(self, source: Source, skip: int = 0) -> Iterator[ReadResult]:
        """Read a source piece by piece, and yield the result of `inference.reader.read` for each piece. The
        first `skip` tokens are skipped.
        """
        self.end_answer()
        lists = _without_first(self.tokenizer.stream(_text_parts(source)), skip)
        for tokens in token_pieces(lists, piece_size(self.model), self.tokens):
            yield self._read(tokens)

    reading = renamed_method("reading", "read_pieces")
    """Deprecated name of `read_pieces`."""

    def note_answer(self) -> None:
        """Note that the last tokens were generated."""
        self._has_answered = True

    def end_answer(self) -> None:
        """End an answer that was generated, so that text that is read next does not count as part of it."""
        self._check_idle("read")
        if not self._has_answered or not isinstance(self.model, StoresSentences):
            return
        if tokens := self.model.end_of_answer(self.state):
            self._read(tokens)

    def _read(self, tokens: list[int]) -> ReadResult:
        """Read one piece of tokens and update the state. Raises `DivergedError`, with the state unchanged, if
        the memory diverges.
        """
        self._check_idle("read")
        piece = read(
            self.model,
            torch.tensor([tokens], device=self.model.device),
            self.state,
            memory_mode=self.memory_mode,
        )
        if piece.diverged:
            raise DivergedError(
                f"memory: expected finite numbers, got a memory that diverged near token {self.tokens}"
            )
        self._current, self._has_answered = piece.state, False
        self._note_time()
        return piece

    def _note_time(self) -> None:
        """Note when the last tokens were read, if the model stores sentences."""
        if isinstance(self.model, StoresSentences):
            self._times.add(self.tokens)

    @show_fields(Sampling)
    def generate(self, prompt: str, **sampling: Unpack[SamplingFields]) -> str:
        """Return the text that the model generates after the prompt. The arguments are the fields of `Sampling`.

        By default tokens are sampled at temperature 0.7 and no phrase of 16 bytes (6 tokens of other tokenizers)
        occurs twice; ``temperature=0`` takes the most likely token every time.
        """
        return "".join(self.stream(prompt, **sampling))

    @show_fields(Sampling)
    def stream(self, prompt: str, **sampling: Unpack[SamplingFields]) -> Iterator[str]:
        """Like `generate`, but yield pieces of text. If the loop is left early, the text generated so far is
        in the state.

        While the stream is unfinished, `save` and `fork` use the text generated so far, and `read`, `generate`, `load`
        and another stream raise an error. If the memory diverges, a `DivergedError` is raised and the session returns
        to its state before the prompt.
        """
        self._check_idle("prompt")
        if not prompt:
            raise ValueError("prompt: expected a text of at least one character, got an empty one")
        generation = Generation(
            self.model,
            [prompt],
            Sampling(**sampling),
            tokenizer=self.tokenizer,
            state=self.state,
            write=self.write,
            memory_mode=self.memory_mode,
        )
        before, self._is_streaming = self.state, True
        try:
            for _, text in generation:
                self._current = generation
                yield text
            self._current = generation
        except ValueError:  # a diverged memory cannot be used
            self._current = before
            raise
        finally:
            self._is_streaming = False
            if self._current is generation:
                self._current, self._has_answered = generation.state, True
                self._note_time()

    def advance(self, state: State, *, is_answer: bool = False) -> None:
        """Replace the state by one after more text, which was read elsewhere for this session. `is_answer` says whether
        its last tokens were generated.
        """
        self._check_idle("state")
        self._current, self._has_answered = state, is_answer
        self._note_time()

    @property
    def has_answered(self) -> bool:
        """Whether the last tokens were generated: text that is read next is not part of them."""
        return self._has_answered

    def save(
        self,
        path: str | Path,
        notes: Mapping[str, object] | None = None,
        *,
        known: memfile.Identity | None = None,
    ) -> None:
        """Write the state to a memory file, which appears only once it is complete. The text is not written, except
        for the sentences that a memory of sentences stores, with the times at which they were read. `notes` is JSON
        data to store in the file. `known` is the result of `memfile.identify`, if the weights have not
        changed since.
        """
        written = dict(notes or {})
        if isinstance(self.model, StoresSentences):
            (stored,) = self.model.stored(self.state)
            written[NOTE] = self._times.since(stored[0].start if stored else self.tokens)
            written[ANSWERED] = self._has_answered
        memfile.save(path, self.model, self.state, written, known=known)

    # Stored sentences.

    def sentences(self, text: str | None = None) -> list[StoredSentence]:
        """The sentences in the memory, in the order in which they were read, with the times at which they were read.
        With `text`, the most similar to it first, with their similarities.

        Only models with a memory of sentences can list them. A sentence that has not ended is not in the list.
        """
        model, (stored,) = self._stored()
        written = [self._times.at(each.end) for each in stored]
        texts = [self.tokenizer.decode(each.tokens).strip() for each in stored]
        if text is None:
            return [StoredSentence(*each) for each in zip(texts, written, strict=True)]
        ids = self.tokenizer.encode(text)
        if not ids:
            raise ValueError("text: expected a text of at least one character, got an empty one")
        (found,) = model.search(self.state, ids)
        return [StoredSentence(texts[index], written[index], score) for index, score in found]

    def forget(self, text: str) -> list[StoredSentence]:
        """Remove the stored sentence that `text` is, or that contains it, or else the one that is most similar to it.
        Returns what was removed: the sentence, several times if it was stored several times.

        Raises a ValueError, and removes nothing, if no stored sentence fits or several do. Of a removed sentence
        nothing remains in the state. Recent answers may repeat it, so the model goes on without them: its context
        is empty afterwards, and the other stored sentences stay in the memory.
        """
        self._check_idle("forget")
        model, _ = self._stored()
        closed = self.fork()
        closed.state = model.close_sentence(self.state)  # the last sentence of a text can be removed, too
        content, stored = plain(meant(text, closed.sentences(text))), closed.sentences()
        gone = [index for index, each in enumerate(stored) if plain(each.text) == content]
        self.state = model.without(closed.state, gone)
        return [stored[index] for index in gone]

    def _stored(self) -> tuple[StoresSentences, list[list[Sentence]]]:
        """The model and its stored sentences. Raises a ValueError if it stores none."""
        if not isinstance(self.model, StoresSentences):
            got = type(self.model).__name__
            raise ValueError(
                f"model: expected one with a memory of sentences, got a {got}, whose memory has no parts to list"
            )
        return self.model, self.model.stored(self.state)

    def load(
        self,
        path: str | Path,
        *,
        force: bool = False,
        verify: bool = False,
        known: memfile.Identity | None = None,
    ) -> Session:
        """Replace the state by the one in a memory file, and return this session.

        `force` accepts a file made with other weights. `verify` also checks large stores, which are otherwise
        read from the file only when they are used. `known` is the result of `memfile.identify`, if the weights have not
        changed since.
        """
        self._check_idle("load")
        state, notes = memfile.load_with_notes(path, self.model, force=force, verify=verify, known=known)
        if len(state.position) != 1:
            raise ValueError(f"{path}: expected the memory of one document, got {len(state.position)}")
        times = ReadTimes.from_json(str(path), notes.get(NOTE, []))
        self.state, self._times, self._has_answered = state, times, notes.get(ANSWERED) is True
        return self

    @staticmethod
    def batch(sessions: Sequence[Session]) -> SessionBatch:
        """Return a batch of sessions with the same model, which read and generate together."""
        from remanence.inference.batch import SessionBatch

        return SessionBatch(sessions)

    def fork(self) -> Session:
        """Return an independent copy of the session. No tensor is copied, because states are never changed in
        place.
        """
        other = Session(self.model, self.tokenizer, write=self.write, memory_mode=self.memory_mode)
        other.state, other._times = self.state, ReadTimes(self._times.pairs)
        other._has_answered = self._has_answered
        return other


def _without_first(lists: Iterable[list[int]], skip: int) -> Iterator[list[int]]:
    """Yield lists of tokens without the first `skip` tokens of the text."""
    for tokens in lists:
        skipped = min(skip, len(tokens))
        skip -= skipped
        yield tokens[skipped:]


def _text_parts(source: Source) -> Iterable[str | bytes]:
    """Return a source as an iterable of parts. Raises an error for a string that is the name of an existing
    file, because the file was probably meant.
    """
    if isinstance(source, Path):
        return _file_parts(source)
    if isinstance(source, str) and _is_file(source):
        hint = f"read(Path({source!r})) reads the file"
        raise ValueError(f"source: expected a text, got the name of a file, {source!r}; {hint}")
    return [source] if isinstance(source, (str, bytes)) else source


def _is_file(text: str) -> bool:
    """Whether a text is the name of an existing file."""
    try:
        return len(text) < 4096 and Path(text).is_file()
    except (OSError, ValueError):  # not a possible file name
        return False


def _file_parts(path: Path) -> Iterator[bytes]:
    """Yield the content of a file in parts of `FILE_CHUNK` bytes. Raises an error if it is missing or empty."""
    if not path.is_file():
        got = "a folder" if path.is_dir() else "nothing there"
        raise ValueError(f"source: expected a text file, got {got}: {path}")
    with open(path, "rb") as file:
        if not (piece := file.read(FILE_CHUNK)):
            raise ValueError(f"source: expected a text, got {path}, which is empty")
        while piece:
            yield piece
            piece = file.read(FILE_CHUNK)
