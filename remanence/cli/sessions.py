"""Commands that run a model on text, with or without a memory file: read, generate, lens."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from remanence.cli.arguments import Device, Folder, Mode
from remanence.cli.byte_stream import ByteStream
from remanence.cli.progress import Bar, Progress
from remanence.io.files import locked_target, remove_leftovers
from remanence.io.outputs import make_folder
from remanence.runtime.terminal import echo, echo_generated

if TYPE_CHECKING:
    from remanence.inference.sampling import Sampling
    from remanence.inference.session import Session

AUTOSAVE = float(os.environ.get("REMANENCE_AUTOSAVE", "60"))
"""Seconds between two saves while reading: the most work that is lost if the process is killed."""
Write = Literal["all", "prompt", "none"]
"""The text that is written to the neural memory: prompt and generated text, the prompt only, or nothing."""


@dataclass(frozen=True)
class Read:
    """Read text files of any size into a memory, in constant space, and save the memory to a file. If interrupted
    (Ctrl-C, SIGTERM), the command saves what it has read so far.

    Surprise is the memory's loss on a token before the token is written: half of the squared error between the
    memory's prediction for the token's key and the token's value, summed over the dimensions of the value and averaged
    over heads, layers and tokens.
    """

    model: Folder
    """Model folder, or the name of a packaged model (remanence-small)."""
    files: tyro.conf.Positional[tuple[Path, ...]]
    """Text files, read one after the other as one document."""
    save: Path
    """Memory file to write."""
    memory_file: Path | None = None
    """Memory file to start from."""
    resume: bool = False
    """Continue an interrupted reading, whose memory is in --save: give the same files, and it goes on where
    it stopped.
    """
    force: bool = False
    """Also load a memory file made with other weights of the same configuration."""
    device: Device = "auto"
    """Device to run on."""

    def run(self) -> None:
        with saving("--save", self.save):
            self._run()

    def _run(self) -> None:
        """Check the arguments, read the files, and save the memory."""
        from remanence.inference import memfile
        from remanence.lens.recording import describe_surprise

        save = self.save
        if not self.files:
            raise ValueError("files: expected at least one text to read, got none")
        for path in self.files:
            check_text("files", path)
        if not any(path.stat().st_size for path in self.files):
            raise ValueError(f"files: expected a text, got {self.files[0]}, which is empty")
        hint = "--resume continues it, --memory-file adds to it"
        check_target("--save", save, unless=save if self.resume else self.memory_file, hint=hint)
        continued = self.resume and save.exists()
        memory = save if continued else self.memory_file
        session = open_session(self.model, self.device, memory, force=self.force)
        source = ByteStream(self.files)
        notes: dict[str, Any] = {"begun": session.tokens, "source": source.fingerprint()}
        if continued:
            notes = memfile.read_file(save)[0]["notes"]
            if notes.get("source") != source.fingerprint() or type(notes.get("begun")) is not int:
                raise ValueError(f"--resume: expected the files that {save} was reading, got others")
        before = session.tokens
        warn_beyond_trained_length(self.model, session, source.size)
        for path in self.files:
            warn_if_binary(path)
        surprise = self._read(session, source, notes)
        try:
            session.save(save, notes)
        except KeyboardInterrupt:  # the whole text has been read: save before stopping
            session.save(save, notes)
            raise
        unit = describe_surprise(session.model)
        mean = f", mean surprise {surprise:.4f} ({unit})" if surprise is not None else ""
        counts = f"{session.tokens - before:,} tokens read, {session.tokens:,} in all{mean}"
        echo(f"{save}: {counts}, {save.stat().st_size:,} bytes")

    def _read(self, session: Session, source: ByteStream, notes: dict[str, Any]) -> float | None:
        """Read the whole source and return the mean surprise, or None if no memory was written. The memory is
        saved from time to time and when interrupted.
        """

        before, surprise, count, saved = session.tokens, 0.0, 0, time.monotonic()
        with Progress() as progress:
            bar = progress.add("reading", source.size)
            try:
                for piece in session.read_pieces(source, skip=before - notes["begun"]):
                    surprise, count = surprise + piece.surprise, count + piece.surprise_count
                    mean = surprise / count if count else None
                    show_tokens(bar, source.position, session.tokens - before, mean)
                    if time.monotonic() - saved > AUTOSAVE:
                        session.save(self.save, notes)
                        saved = time.monotonic()
            except KeyboardInterrupt:
                session.save(self.save, notes)
                tokens = f"{session.tokens:,} tokens"
                echo(f"interrupted after {tokens}, saved in {self.save}; --resume continues", error=True)
                raise
        return surprise / count if count else None


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Sampling options of `generate` and `chat`."""

    max_tokens: int | None = None
    """Largest number of tokens to generate. Default: 128, with a memory of sentences 256."""
    temperature: float | None = None
    """Sampling temperature; 0 takes the most likely token. Default: 0.7, with a memory of sentences 0."""
    top_k: int | None = None
    """Sample from this many most likely tokens."""
    top_p: float | None = None
    """Sample from the most likely tokens whose probabilities add up to this (nucleus sampling)."""
    no_repeat: int | None = None
    """Size of n-grams that may not repeat in one answer, in tokens; 0: no limit. Default: 16 for bytes, 6 for other
    tokenizers, 0 at temperature 0, 16 with a memory of sentences.
    """
    stop: tuple[str, ...] = ()
    """Strings that end the output."""
    seed: int | None = None
    """Random seed for sampling. Default: a new one each time."""
    write: Write = "all"
    """Text that is written to the neural memory: all (prompt and generated text), the prompt only, or none."""
    force: bool = False
    """Also load a memory file made with other weights of the same configuration."""
    device: Device = "auto"
    """Device to run on."""

    def sampling(self, session: Session | None = None) -> Sampling:
        """Return the options as a `Sampling`, with the default values for the model of a session."""
        from remanence.inference.sampling import Sampling
        from remanence.inference.sentences import SAMPLING, StoresSentences

        own = session is not None and isinstance(session.model, StoresSentences)
        default = SAMPLING if own else Sampling()
        return Sampling(
            max_tokens=default.max_tokens if self.max_tokens is None else self.max_tokens,
            temperature=default.temperature if self.temperature is None else self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            no_repeat=default.no_repeat if self.no_repeat is None else self.no_repeat,
            stop=self.stop,
            seed=self.seed,
        )


@dataclass(frozen=True, kw_only=True)
class Generate(SamplingOptions):
    """Generate text from a prompt, with or without a memory file. Several prompts are generated as one batch and
    printed as lines of JSON.
    """

    model: Folder
    """Model folder, or the name of a packaged model (remanence-small)."""
    prompt: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT")]
    """One or more prompts."""
    memory_file: Path | None = None
    """Memory file to start from."""
    save: Path | None = None
    """Memory file to write after generation."""
    memory_mode: Mode = "on"
    """Neural memory: on (read and written), off (not used), frozen (read only), fresh (reset at every segment)."""

    def run(self) -> None:
        """Print the answer to a single prompt while it is generated, or the answers to several prompts at the
        end.
        """
        with saving("--save", self.save):
            self._run()

    def _run(self) -> None:
        """Check the arguments, generate and print the answers, and save the memory."""
        from remanence.inference import memfile
        from remanence.inference.generate import Generation

        prompts = self.prompt
        self.sampling()  # checks the options before the model is loaded
        if not prompts or not all(prompts):
            raise ValueError("--prompt: expected a text of at least one character, got an empty one")
        if self.save is not None and len(prompts) > 1:
            expected = "expected a single prompt, as one memory holds one text"
            raise ValueError(f"--save: {expected}, got {len(prompts)}")
        if self.save is not None:
            hint = "a memory is only overwritten if it is the --memory-file in use"
            check_target("--save", self.save, unless=self.memory_file, hint=hint)
        session = open_session(
            self.model, self.device, self.memory_file, self.memory_mode, self.write, self.force
        )
        options: dict[str, Any] = {
            "tokenizer": session.tokenizer,
            "state": session.state,
            "write": self.write,
            "memory_mode": self.memory_mode,
        }
        generation = Generation(session.model, prompts, self.sampling(session), **options)
        if len(prompts) == 1:
            for _, text in generation:
                echo_generated(text)
            echo_generated("\n")
        else:
            for prompt, text in zip(prompts, generation.run().texts, strict=True):
                echo_generated(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False) + "\n")
        if self.save is not None:
            memfile.save(self.save, session.model, generation.state)


@dataclass(frozen=True)
class Lens:
    """Write an HTML page that shows how the model's memories process a text.

    For each token, the page has the surprise (the memory's loss before the token is written: half of the squared error,
    summed over the dimensions of the value), the gates, the norms of the memory and its prediction.
    """

    model: Folder
    """Model folder, or the name of a packaged model (remanence-small)."""
    text: Path
    """Text file to read."""
    out: Path = Path("lens.html")
    """HTML page to write; an existing file is replaced."""
    memory_file: Path | None = None
    """Memory file to start from."""
    layers: tuple[int, ...] = ()
    """Layers whose memories are shown, counted from 1. Default: all."""
    tokens: int = 20_000
    """Number of tokens to show, from the start; 0: all."""
    reach: int = 8_192
    """Number of earlier tokens to search for values similar to a prediction, at most 65,535."""
    device: Device = "auto"
    """Device to run on."""

    def run(self) -> None:
        """Write the page while the text is read."""
        from remanence.inference import memfile
        from remanence.io.files import display_name, replacing
        from remanence.lens import (
            Page,
            estimate_page_bytes,
            memory_layers,
            piece_length,
            record,
            weight_norms,
        )

        text, out = self.text, self.out
        check_text("--text", text)
        if not text.stat().st_size:
            raise ValueError(f"--text: expected a non-empty file, got {text}, which is empty")
        if out.resolve() == text.resolve():
            raise ValueError(f"--out: expected another file than --text, got {out}")
        if self.tokens < 0:
            raise ValueError(f"--tokens: expected at least 0, got {self.tokens}")
        session = open_session(self.model, self.device, self.memory_file)
        make_folder("--out", out)
        model, before, source = session.model, session.tokens, ByteStream([text])
        only = [number - 1 for number in self.layers]
        shown_layers = memory_layers(model, only)
        several = len(set(model.config.pattern)) > 1
        names = [f"layer {index + 1}" + f" {model.config.blocks[index]}" * several for index in shown_layers]
        start = weight_norms(shown_layers, session.state).tolist()
        most = self.tokens or None
        size = source.size if most is None else min(source.size, most)
        echo(f"{out}: about {estimate_page_bytes(list(shown_layers.values()), size) / 1e6:,.1f} MB")
        with (
            replacing(out) as temporary,
            open(temporary, "w", encoding="utf-8", newline="\n") as file,
            Progress() as progress,
        ):
            bar = progress.add("reading", size)
            page = Page(file, session.tokenizer, f"{text.name} as {display_name(self.model)} saw it")
            for piece in record(session, source, piece_length(model, size), self.reach, only, most):
                page.add(piece)
                surprise = float(piece.signals[..., 0].mean())
                done = session.tokens - before
                show_tokens(bar, done if most and size == most else source.position, done, surprise)
            if most and session.tokens - before == most < source.size:
                echo(
                    f"{text.name}: only the first {most:,} tokens are shown; --tokens 0 shows all", error=True
                )
            if not page.ends:
                raise ValueError(f"--text: expected at least one token, got none in {text}")
            after = f" after {before:,} in {self.memory_file.name}" if self.memory_file else ""
            blocks = " ".join(model.config.pattern)
            facts = [
                f"{text.name}, {session.tokens - before:,} tokens{after}",
                f"{display_name(self.model)}: {blocks}, {len(names)} of {model.config.num_layers} layers shown",
                f"weights {memfile.fingerprint(model).weights[:12]}",
            ]
            page.finish(" · ".join(facts), names, start, self.reach, model.config.memory.conv)
        warn_if_binary(text)
        echo(f"{out}: {session.tokens - before:,} tokens, {out.stat().st_size:,} bytes")


def open_session(
    folder: Path,
    device: str,
    memory: Path | None,
    memory_mode: Mode = "on",
    write: Write = "all",
    force: bool = False,
) -> Session:
    """Return a session with the model in a folder, continued from a memory file if one is given."""
    from remanence.attached.folder import load_model
    from remanence.inference.session import Session
    from remanence.runtime.device import resolve

    model = load_model(folder, device=resolve(device)).eval()
    session = Session(model, write=write, memory_mode=memory_mode)
    return session if memory is None else session.load(memory, force=force)


def warn_beyond_trained_length(folder: Path, session: Session, size: int) -> None:
    """Print a warning, before `size` bytes are read, if the model may be untrained or was trained on shorter
    texts.
    """
    from remanence.io.files import read_json
    from remanence.io.shipped import resolve_model_path
    from remanence.tokenizers.tokens import REACH, TRAINED

    if not session.model.has_memory:
        return
    path = resolve_model_path(folder) / TRAINED
    if not path.is_file():
        hint = "an untrained model's memory is of no use"
        echo(f"{folder}: no {TRAINED}, so it may be untrained; {hint}", error=True)
        return
    reach, bytes_per_token = read_json(path).get(REACH), 1 if session.tokenizer.vocabulary < 1024 else 4
    tokens = session.tokens + size // bytes_per_token
    if isinstance(reach, int) and tokens > reach:
        about = "" if bytes_per_token == 1 else "about "
        message = (
            f"{about}{tokens:,} tokens will have been read, and its memory was trained over {reach:,} at most"
        )
        echo(f"{folder}: {message}; recall beyond that length was not trained", error=True)


@contextmanager
def saving(argument: str, path: Path | None) -> Iterator[None]:
    """Context manager that creates the folder of a memory file and locks the file while a command runs, so that a
    second command cannot save to the same file. What a killed command left of a save is removed. `argument` is the
    argument name to show in errors. A path of None does nothing.
    """
    if path is None:
        yield
        return
    make_folder(argument, path)
    with locked_target(path, "another command"):
        remove_leftovers(path.resolve().parent, path.resolve().name)
        yield


def check_text(argument: str, path: Path) -> None:
    """Raise an error if a path is not a file. `argument` is the argument name to show in the error."""
    if path.is_dir():
        raise ValueError(f"{argument}: expected a text file, got the folder {path}; name the files in it")
    if not path.is_file():
        raise ValueError(f"{argument}: {path}: no such file")


def warn_if_binary(path: Path) -> None:
    """Print a warning about a file that does not look like text."""
    from remanence.data.sources import binary_warning

    if warning := binary_warning(path, unpack=False):
        echo(warning, error=True)


def check_target(argument: str, path: Path, *, unless: Path | None, hint: str) -> None:
    """Raise an error if a file exists already and is not `unless`. Called before any work, so that nothing is
    overwritten. `argument` is the argument name and `hint` is the advice to show in the error.
    """
    if path.exists() and (unless is None or path.resolve() != unless.resolve()):
        raise ValueError(f"{argument}: {path} exists; {hint}")


def show_tokens(bar: Bar, position: int, tokens: int, surprise: float | None) -> None:
    """Update the progress bar with the position, the number of tokens, the speed and the mean surprise (None
    if there is none).
    """
    note = f"{tokens:,} tokens, {tokens / max(bar.elapsed, 1e-9):,.0f}/s"
    note += f", surprise {surprise:.3f}" if surprise is not None else ""
    bar.update(position, note)
