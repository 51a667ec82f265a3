"""The chat command: reads messages from stdin, prints answers, and runs slash commands."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from remanence.cli.arguments import Folder
from remanence.cli.sessions import SamplingOptions, open_session, saving
from remanence.io.shipped import CHAT_MODEL, resolve_model_path
from remanence.io.user_data import make_data_folder
from remanence.runtime.errors import Terminated
from remanence.runtime.terminal import echo, echo_generated

if TYPE_CHECKING:
    from remanence.cli.conversation import Conversation
    from remanence.inference.session import Session


@dataclass(frozen=True, kw_only=True)
class Chat(SamplingOptions):
    """Chat with a model. Without MODEL, with remanence-smollm2, which stores what you say to it and remembers it in the
    next chat. With another model and --memory-file, its memory persists from one chat to the next.

    /help shows the commands: /memory, /forget, /save, /load, /fork, /quit. The chat template of the tokenizer is used
    if it has one.
    """

    model: Folder = Path(CHAT_MODEL)
    """Model folder, or the name of a packaged model (remanence-small, remanence-smollm2)."""
    memory_file: Path | None = None
    """Memory file: loaded if it exists, and saved after every answer. Default: for remanence-smollm2
    remanence-smollm2.mem in the user's data folder, or in the folder that REMANENCE_DATA names; else none.
    """
    no_memory: bool = False
    """Begin with an empty memory and do not save it."""

    def run(self) -> None:
        check_chat_model(self.model)
        path = self._memory_path()
        with ExitStack() as locks:
            locks.enter_context(saving("--memory-file", path))
            self._run(path, locks)

    def _memory_path(self) -> Path | None:
        """The memory file to use; None: nothing is loaded or saved."""
        if self.no_memory and self.memory_file is not None:
            raise ValueError(f"--no-memory: expected no --memory-file beside it, got {self.memory_file}")
        if self.no_memory or self.memory_file is not None or str(self.model) != CHAT_MODEL:
            return self.memory_file
        return make_data_folder() / f"{CHAT_MODEL}.mem"

    def _run(self, path: Path | None, locks: ExitStack) -> None:
        """Run the chat until the input ends or /quit is entered."""
        from remanence.cli.conversation import COMMANDS, Conversation
        from remanence.inference.chat import Turns

        self.sampling()  # checks the options before the model is loaded
        session = open_session(self.model, self.device, None, "on", self.write, self.force)
        if path is not None and path.exists():
            load_memory(session, path, self.force)
        turns, interactive = Turns(session.tokenizer), sys.stdin.isatty()
        talk = Conversation(session, turns, self.sampling(session), path, locks, self.force)
        if interactive and talk.lists_sentences:
            echo(f"{talk.size()}. /help shows the commands; Ctrl-D ends, Ctrl-C ends an answer.")
        elif interactive:
            echo(f"{session.tokens:,} tokens remembered. {COMMANDS}; Ctrl-D ends, Ctrl-C ends an answer.")
        for line in lines(interactive):
            if not line.startswith("/"):
                answer_and_save(talk, line, interactive)
                continue
            try:
                if not talk.run_command(line):
                    return
            except (ValueError, OSError) as error:
                if not interactive:
                    raise
                echo(f"{error}", error=True)


def check_chat_model(model: Path) -> None:
    """Raise an error if the chat model of this package is meant and its weights are not there."""
    folder = resolve_model_path(model)
    if str(model) == CHAT_MODEL and not (folder / "config.json").is_file():
        raise ValueError(
            f"model: expected the weights of {CHAT_MODEL}, got a package without them; give another model: remanence "
            "chat MODEL"
        )


def load_memory(session: Session, path: Path, force: bool) -> None:
    """Load the memory file of a chat. An error says how to begin without the file."""
    try:
        session.load(path, force=force)
    except ValueError as error:
        other = "to begin with an empty memory, move this file away or give another --memory-file"
        raise ValueError(f"{error}; {other}") from None


def answer_and_save(talk: Conversation, line: str, interactive: bool) -> None:
    """Print the answer to a message and save the memory. Ctrl-C ends the answer at a terminal, and the chat
    otherwise; SIGTERM ends the chat.
    """
    try:
        talk.answer(line)
    except KeyboardInterrupt as stopped:
        if not interactive or isinstance(stopped, Terminated):
            talk.save()
            raise
    echo_generated("\n")
    try:
        talk.save()
    except KeyboardInterrupt as stopped:  # the answer is complete: save it before going on or stopping
        talk.save()
        if not interactive or isinstance(stopped, Terminated):
            raise


def lines(interactive: bool) -> Iterator[str]:
    """Yield the non-empty lines of stdin. Bytes that are not UTF-8 are kept as surrogates."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    while True:
        try:
            line = input("> " if interactive else "")
        except EOFError:
            return
        if line.strip():
            yield line
