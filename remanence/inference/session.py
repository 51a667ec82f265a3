"""A model that reads, remembers and answers: one document without an end, one memory, saved and restored as a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import torch

from remanence.attached.folder import load_model
from remanence.config import Mode
from remanence.inference import memfile
from remanence.inference.generate import WRITES, Generation, Sampling, SamplingFields, Write, check_tokenizer
from remanence.inference.reader import Read, piece_of, read, token_pieces
from remanence.model import CausalModel, State
from remanence.runtime.errors import DivergedError
from remanence.runtime.keywords import show_fields
from remanence.runtime.positions import positions_of
from remanence.tokenizers.tokens import Tokenizer

if TYPE_CHECKING:
    from remanence.inference.batch import SessionBatch

Source = str | bytes | Path | Iterable[str | bytes]
"""What a session reads."""
FILE = 1 << 16
"""Bytes of a file that are read at a time."""


class Reading(NamedTuple):
    """How much was read, and the mean surprise of it (None without a memory that was written)."""

    tokens: int
    surprise: float | None


class Session:
    """``session.read(text)``, ``session.generate(prompt)``, ``session.save(path)``.

    `write` says what `generate` may write to the neural memory: "all" (the prompt and its own words), "prompt", or
    "none". Reading always writes. The attention window moves on in every case: it is what was just said, not what is
    remembered.

    `memory_mode` is "on", "off" (as if there were no memory), "frozen" (read, not written) or "fresh" (reset at every
    segment); None takes ``model.memory_mode`` once. It belongs to the session: others over the same model may have
    another, also in other threads.

    Without a `tokenizer`, it is the one in the model's folder or of its pretrained model; bytes for a model that has
    no other and a vocabulary of that size.
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
        found: Any = load_model(model).eval() if isinstance(model, (str, Path)) else model
        if not isinstance(found, CausalModel):  # a Hugging Face wrapper, as `remanence.attach` returns?
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
        self._now: State | Generation = self.model.start(1)
        self._streams = False

    @property
    def state(self) -> State:
        """All that was read and said. While an answer comes, the answer knows it."""
        return self._now if isinstance(self._now, State) else self._now.state

    @state.setter
    def state(self, state: State) -> None:
        self._check_idle("state")
        self._now = state

    @property
    def tokens(self) -> int:
        """How many tokens have been read and said."""
        return positions_of(self.state.position)[0]

    def _check_idle(self, what: str) -> None:
        """Refuse what a stream that goes on later would undo: it has its own state."""
        if self._streams:
            raise ValueError(
                f"{what}: expected no answer under way, got an unfinished stream; finish its loop, or end it with "
                "stream.close()"
            )

    def read(self, source: Source) -> Reading:
        """Read a text, a file (a `Path`), or a stream of pieces of one (an open file, a generator) in constant
        memory.
        """
        surprise, count, before = 0.0, 0, self.tokens
        for piece in self.reading(source):
            surprise, count = surprise + piece.surprise, count + piece.surprised
        return Reading(self.tokens - before, surprise / count if count else None)

    def reading(self, source: Source, skip: int = 0) -> Iterator[Read]:
        """`read`, piece by piece: what `inference.reader.read` returns for each. `skip` passes over the first
        tokens.
        """
        self._check_idle("read")
        lists = _without_first(self.tokenizer.stream(_pieces(source)), skip)
        for tokens in token_pieces(lists, piece_of(self.model), self.tokens):
            yield self._read(tokens)

    def _read(self, tokens: list[int]) -> Read:
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
        self._now = piece.state
        return piece

    @show_fields(Sampling)
    def generate(self, prompt: str, **sampling: Unpack[SamplingFields]) -> str:
        """Read the prompt and continue it. The arguments are those of `Sampling`: max_tokens, temperature, stop, ...

        By default tokens are sampled at temperature 0.7 and no phrase of 16 bytes (6 tokens of other tokenizers)
        occurs twice; ``temperature=0`` takes the most likely token every time.
        """
        return "".join(self.stream(prompt, **sampling))

    @show_fields(Sampling)
    def stream(self, prompt: str, **sampling: Unpack[SamplingFields]) -> Iterator[str]:
        """`generate`, piece by piece. Generated text stays in the state even if the loop is left early. Until its end,
        `save` and `fork` take what has come so far; `read`, `generate`, another stream and `load` are refused.

        If the memory diverges on the way, an error says so, and the session is where it was before the prompt.
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
        before, self._streams = self.state, True
        try:
            for _, text in generation:
                self._now = generation
                yield text
            self._now = generation
        except ValueError:  # a memory that diverged on the way is of no use
            self._now = before
            raise
        finally:
            self._streams = False
            if self._now is generation:
                self._now = generation.state

    def save(self, path: str | Path) -> None:
        """Write the memory, without the text, to a file that only appears when it is whole."""
        memfile.save(path, self.model, self.state)

    def load(self, path: str | Path, *, force: bool = False, verify: bool = False) -> Session:
        """Take up the memory in a file in place of this session's own; `force` accepts one made with other weights,
        `verify` reads large stores whole, which else stay in the file until they are used.
        """
        self._check_idle("load")
        state = memfile.load(path, self.model, force=force, verify=verify)
        if len(state.position) != 1:
            raise ValueError(f"{path}: expected the memory of one document, got {len(state.position)}")
        self.state = state
        return self

    @staticmethod
    def batch(sessions: Sequence[Session]) -> SessionBatch:
        """Several sessions over one model as rows of a batch, which read and generate together."""
        from remanence.inference.batch import SessionBatch

        return SessionBatch(sessions)

    def fork(self) -> Session:
        """Another session that knows the same and goes its own way. Costs nothing: states are never changed in
        place.
        """
        other = Session(self.model, self.tokenizer, write=self.write, memory_mode=self.memory_mode)
        other.state = self.state
        return other


def _without_first(lists: Iterable[list[int]], skip: int) -> Iterator[list[int]]:
    """Lists of tokens without the first `skip` tokens of all."""
    for tokens in lists:
        skipped = min(skip, len(tokens))
        skip -= skipped
        yield tokens[skipped:]


def _pieces(source: Source) -> Iterable[str | bytes]:
    """A source in pieces. A text that is a file's name is refused: the file was meant."""
    if isinstance(source, Path):
        return _file_pieces(source)
    if isinstance(source, str) and _is_file(source):
        hint = f"read(Path({source!r})) reads the file"
        raise ValueError(f"source: expected a text, got the name of a file, {source!r}; {hint}")
    return [source] if isinstance(source, (str, bytes)) else source


def _is_file(text: str) -> bool:
    try:
        return len(text) < 4096 and Path(text).is_file()
    except (OSError, ValueError):  # a text that no file can be called
        return False


def _file_pieces(path: Path) -> Iterator[bytes]:
    if not path.is_file():
        got = "a folder" if path.is_dir() else "nothing there"
        raise ValueError(f"source: expected a text file, got {got}: {path}")
    with open(path, "rb") as file:
        if not (piece := file.read(FILE)):
            raise ValueError(f"source: expected a text, got {path}, which is empty")
        while piece:
            yield piece
            piece = file.read(FILE)
