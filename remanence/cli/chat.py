"""The chat command: reads messages from stdin, prints answers, and handles slash commands."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from remanence.cli.arguments import Folder
from remanence.cli.sessions import SamplingOptions, check_target, open_session, saving
from remanence.runtime.errors import Terminated
from remanence.runtime.terminal import echo, echo_generated

if TYPE_CHECKING:
    from remanence.inference.chat import Turns
    from remanence.inference.session import Session

COMMANDS = "/quit, /save [FILE], /forget"
"""The slash commands, for messages."""


@dataclass(frozen=True, kw_only=True)
class Chat(SamplingOptions):
    """Chat with a model. With --memory-file, its memory persists from one chat to the next.

    /quit ends the chat, /save [FILE] saves the memory, /forget resets it. The chat template of the tokenizer is used if
    it has one.
    """

    model: Folder
    """Model folder, or the name of a packaged model (remanence-small)."""
    memory_file: Path | None = None
    """Memory file: loaded if it exists, and saved after every answer."""

    def run(self) -> None:
        with saving("--memory-file", self.memory_file):
            self._run()

    def _run(self) -> None:
        """Run the chat until the input ends or /quit is entered."""
        from remanence.inference.chat import Turns

        sampling = self.sampling()
        existing = self.memory_file if self.memory_file is not None and self.memory_file.exists() else None
        session = open_session(self.model, self.device, existing, "on", self.write, self.force)
        turns, interactive = Turns(session.tokenizer), sys.stdin.isatty()
        if interactive:
            echo(f"{session.tokens:,} tokens remembered. {COMMANDS}; Ctrl-D ends, Ctrl-C ends an answer.")
        for line in lines(interactive):
            if line.startswith("/"):
                try:
                    if not self.run_command(line, session, turns):
                        return
                except (ValueError, OSError) as error:
                    if not interactive:
                        raise
                    echo(f"{error}", error=True)
                continue
            try:
                for text in session.stream(turns.text(line), **vars(sampling)):
                    echo_generated(text)
            except KeyboardInterrupt as stopped:
                if not interactive or isinstance(stopped, Terminated):
                    if self.memory_file is not None:
                        session.save(self.memory_file)
                    raise
            echo_generated("\n")
            if sampling.seed is not None:  # otherwise every answer would use the same random numbers
                sampling = replace(sampling, seed=sampling.seed + 1)
            if self.memory_file is not None:
                session.save(self.memory_file)

    def run_command(self, line: str, session: Session, turns: Turns) -> bool:
        """Run a slash command. Returns False if the command ends the chat."""
        command, _, rest = line.partition(" ")
        if command == "/save":
            path = Path(rest.strip()) if rest.strip() else self.memory_file
            if path is None:
                raise ValueError("/save: expected a file, as there is no --memory-file: /save FILE, got none")
            check_target(
                "/save", path, unless=self.memory_file, hint="only the --memory-file in use is overwritten"
            )
            with saving("/save", path if path != self.memory_file else None):
                session.save(path)
            echo(f"{path}: {session.tokens:,} tokens, {path.stat().st_size:,} bytes")
        elif line.strip() == "/forget":
            kept = (
                f"; {self.memory_file} keeps them until the next answer"
                if self.memory_file is not None
                else ""
            )
            echo(f"{session.tokens:,} tokens forgotten{kept}")
            session.state, turns.has_started = session.model.start(1), False
        elif line.strip() != "/quit":
            hint = "to send it to the model, begin with a space"
            raise ValueError(f"{command}: expected one of {COMMANDS}; {hint}")
        return line.strip() != "/quit"


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
