"""A conversation at the command line: messages, answers, and commands that begin with a slash."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from remanence.cli.sessions import check_target, saving
from remanence.inference.sentences import StoresSentences
from remanence.runtime.terminal import echo, echo_generated

if TYPE_CHECKING:
    from remanence.inference.chat import Turns
    from remanence.inference.sampling import Sampling
    from remanence.inference.sentences import StoredSentence
    from remanence.inference.session import Session

LISTED, FOUND = 50, 8
"""How many sentences `/memory` shows: the last ones, and those that are nearest to a text."""
HELP = {
    "/memory [TEXT]": "show what was written to the memory when; with TEXT, what is nearest to it",
    "/forget [TEXT]": "remove the fact that TEXT means; without TEXT, everything",
    "/save [FILE]": "save the memory; with FILE, a copy of it",
    "/load [FILE]": "go on with the memory in FILE, or with the one that was saved last",
    "/fork [FILE]": "go on with a copy in FILE, or with one that is not saved",
    "/help": "show these commands",
    "/quit": "end, as Ctrl-D does",
}
"""What the slash commands do."""
COMMANDS = ", ".join(HELP)
"""The slash commands, for messages."""


class Conversation:
    """A session with a user: `answer` prints the answer to a message, `run_command` runs a slash command.

    Args:
        session: the session.
        turns: formats messages.
        sampling: how answers are generated.
        memory_file: the memory file in use, saved after every answer; None: nothing is saved.
        locks: holds the lock of the memory file.
        force: also load memory files made with other weights.
    """

    def __init__(
        self,
        session: Session,
        turns: Turns,
        sampling: Sampling,
        memory_file: Path | None,
        locks: ExitStack,
        force: bool = False,
    ) -> None:
        self.session, self.turns, self.sampling = session, turns, sampling
        self.memory_file, self.locks, self.force = memory_file, locks, force
        self.saved_file = memory_file
        """The file that /load without a name opens."""
        self.commands: dict[str, Callable[[str], bool]] = {
            "/memory": self.show_memory, "/forget": self.forget, "/save": self.save_as, "/load": self.load,
            "/fork": self.fork, "/help": self.show_help, "/quit": lambda text: False,
        }  # fmt: skip
        self.begin_turns()

    @property
    def lists_sentences(self) -> bool:
        """Whether the memory consists of sentences that can be listed."""
        return isinstance(self.session.model, StoresSentences)

    def begin_turns(self) -> None:
        """Format the next message as the first one, or, if the memory has a conversation, as the next one."""
        self.turns.has_started = self.lists_sentences and self.session.tokens > 0

    def answer(self, message: str) -> None:
        """Print the answer to a message while it is generated. If it is interrupted (KeyboardInterrupt), what was
        generated so far is in the memory.
        """
        before, has_started = self.session.tokens, self.turns.has_started
        try:
            for text in self.session.stream(self.turns.text(message), **vars(self.sampling)):
                echo_generated(text)
        finally:
            if self.session.tokens == before:  # the message has not been read
                self.turns.has_started = has_started
        if self.sampling.seed is not None:  # otherwise every answer would use the same random numbers
            self.sampling = replace(self.sampling, seed=self.sampling.seed + 1)

    def save(self) -> None:
        """Save the memory to the memory file in use, if there is one."""
        if self.memory_file is not None:
            self.session.save(self.memory_file)

    def size(self) -> str:
        """The size of the memory as text."""
        count = f"{self.session.tokens:,} tokens"
        if self.lists_sentences:
            number = len(self.session.sentences())
            count = f"{number:,} sentence{'' if number == 1 else 's'}"
        path = self.memory_file
        if path is not None and path.is_file():
            return f"{count}, {path.stat().st_size:,} bytes in {path}"
        return f"{count}, {self.session.state.saved().nbytes:,} bytes, not saved"

    def run_command(self, line: str) -> bool:
        """Run a slash command. Returns False if the command ends the chat."""
        name, _, text = line.strip().partition(" ")
        if name not in self.commands or (text and f"{name} [" not in COMMANDS):
            hint = "to send it to the model, begin with a space"
            raise ValueError(f"{name}: expected one of {COMMANDS}; {hint}")
        return self.commands[name](text.strip())

    def show_help(self, text: str) -> bool:
        width = max(map(len, HELP))
        for name, what in HELP.items():
            echo(f"{name:{width}}  {what}")
        return True

    def show_memory(self, text: str) -> bool:
        if not self.lists_sentences:
            echo(f"{self.size()}; this kind of memory has no sentences to list")
            return True
        listed = self.session.sentences(text or None)
        shown = listed[:FOUND] if text else listed[-LISTED:]
        if hidden := len(listed) - len(shown) if not text else 0:
            echo(f"{hidden:,} earlier ones are not shown; /memory TEXT finds what is nearest to TEXT")
        for sentence in shown:
            echo(describe(sentence))
        echo(self.size())
        return True

    def forget(self, text: str) -> bool:
        if not text:
            path = self.memory_file
            kept = f"; {path} keeps them until the next answer" if path is not None else ""
            echo(f"{self.session.tokens:,} tokens forgotten{kept}")
            self.session.state, self.turns.has_started = self.session.model.start(1), False
            return True
        try:
            removed = self.session.forget(text)
        except ValueError as error:
            raise ValueError(f"/forget: {str(error).removeprefix('text: ')}") from None
        self.turns.has_started = False  # the model goes on without the messages before
        self.save()
        for sentence in removed:
            echo(f"forgotten: {describe(sentence)}")
        return True

    def save_as(self, name: str) -> bool:
        path = Path(name) if name else self.memory_file
        if path is None:
            raise ValueError("/save: expected a file, as there is no --memory-file: /save FILE, got none")
        check_target(
            "/save", path, unless=self.memory_file, hint="only the --memory-file in use is overwritten"
        )
        with saving("/save", None if is_same(path, self.memory_file) else path):
            self.session.save(path)
        echo(f"{path}: {self.session.tokens:,} tokens, {path.stat().st_size:,} bytes")
        return True

    def load(self, name: str) -> bool:
        path = Path(name) if name else self.saved_file
        if path is None:
            raise ValueError("/load: expected a memory file, as none is in use: /load FILE, got none")
        if not path.is_file():
            raise ValueError(f"/load: expected a memory file, got {path}, which is not there")
        with ExitStack() as opened:
            self.enter_lock(opened, "/load", path)
            self.session.load(path, force=self.force)
            self.use(path, opened)
        self.begin_turns()
        echo(self.size())
        return True

    def fork(self, name: str) -> bool:
        if not name:
            self.memory_file = None
            back = "" if self.saved_file is None else f"; /load goes back to {self.saved_file}"
            echo(f"a copy that is not saved{back}")
            return True
        path = Path(name)
        check_target("/fork", path, unless=None, hint="existing files are not overwritten")
        with ExitStack() as opened:
            self.enter_lock(opened, "/fork", path)
            self.session.save(path)
            self.use(path, opened)
        echo(f"{self.size()}; answers are saved there from now on")
        return True

    def enter_lock(self, stack: ExitStack, command: str, path: Path) -> None:
        """Lock a memory file, unless this conversation has locked it already."""
        if not is_same(path, self.saved_file):
            stack.enter_context(saving(command, path))

    def use(self, path: Path, locks: ExitStack) -> None:
        """Make a memory file the one in use, and release the lock of the one before."""
        if not is_same(path, self.saved_file):
            self.locks.close()
            self.locks.push(locks.pop_all())
        self.memory_file = self.saved_file = path


def is_same(path: Path, other: Path | None) -> bool:
    """Whether two paths are the same file, which need not exist."""
    return other is not None and path.resolve() == other.resolve()


def describe(sentence: StoredSentence) -> str:
    """A stored sentence as a line: the time at which it was read, and its text."""
    when = f"{sentence.written:%Y-%m-%d %H:%M}" if sentence.written is not None else "time unknown"
    score = "" if sentence.similarity is None else f"  {sentence.similarity:5.2f}"
    return f"{when}{score}  {' '.join(sentence.text.split())}"
