"""The command line. Arguments are parsed before torch is imported, so that --help and errors appear quickly.

Each command is a dataclass of its arguments with a method `run`, which imports torch and the rest of the package.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, NoReturn, get_args

import tyro

from remanence.cli.attach import Attach
from remanence.cli.chat import Chat
from remanence.cli.check import Check
from remanence.cli.data import Data
from remanence.cli.demo import Demo
from remanence.cli.evaluate import RECIPE_PREFIX, Eval
from remanence.cli.models import Info, Inspect, New, Presets
from remanence.cli.report import Report
from remanence.cli.serve import Keys, Serve
from remanence.cli.sessions import Generate, Lens, Read
from remanence.cli.train import Export, Train
from remanence.io.migrations import current_field
from remanence.runtime.choices import check_choice, did_you_mean
from remanence.runtime.errors import Terminated
from remanence.runtime.overrides import split_overrides
from remanence.runtime.terminal import echo, escaped_output

Command = (
    Annotated[Demo, tyro.conf.subcommand("demo")]
    | Annotated[New, tyro.conf.subcommand("new")]
    | Annotated[Attach, tyro.conf.subcommand("attach")]
    | Annotated[Read, tyro.conf.subcommand("read")]
    | Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Chat, tyro.conf.subcommand("chat")]
    | Annotated[Serve, tyro.conf.subcommand("serve")]
    | Annotated[Keys, tyro.conf.subcommand("keys")]
    | Annotated[Inspect, tyro.conf.subcommand("inspect")]
    | Annotated[Lens, tyro.conf.subcommand("lens")]
    | Annotated[Data, tyro.conf.subcommand("data")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Export, tyro.conf.subcommand("export")]
    | Annotated[Eval, tyro.conf.subcommand("eval")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Check, tyro.conf.subcommand("check")]
    | Annotated[Presets, tyro.conf.subcommand("presets")]
    | Annotated[Info, tyro.conf.subcommand("info")]
)
"""The type of all commands, from which tyro makes the subcommands."""
COMMANDS: dict[str, Any] = {each.__metadata__[0].name: each.__origin__ for each in get_args(Command)}
"""The class of each command, by name."""
DESCRIPTION = "Sequence models that keep learning after training ends."
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
"""Matches color codes in the messages of tyro."""
OVERRIDABLE: dict[str, type[New] | type[Train] | type[Eval]] = {"new": New, "train": Train, "eval": Eval}
"""Commands that accept --field=value for the fields of a preset, recipe or task."""

_MEMORY_FILE = {"--memory": "--memory-file"}
"""Renaming of the option for memory files."""
RENAMED_OPTIONS: dict[str, dict[str, str]] = {
    "read": _MEMORY_FILE,
    "generate": {**_MEMORY_FILE, "--mode": "--memory-mode"},
    "chat": _MEMORY_FILE,
    "lens": _MEMORY_FILE,
    "export": _MEMORY_FILE,
    "eval": {"--memory": "--memory-mode"},
    "attach": {"--memory": "--kind"},
}
"""Present names of deprecated options, by command. Deprecated options work, with a warning, but --help does
not list them.
"""


def main(arguments: list[str] | None = None) -> None:
    """Run a command. The exit code is 0 on success, 2 for a wrong argument or file, 1 for an internal error, a closed
    output pipe or a broken law of ``check``, 130 after Ctrl-C, and 143 after SIGTERM.

    Errors of the user are shown in one line, without a traceback. Control characters in all output are
    printed in escaped form.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments in (["--version"], ["-V"]):
        from remanence import __version__

        echo(f"remanence {__version__}")
        return
    try:
        command = _parse(arguments)
        # The progress bars of these libraries use control characters, which we would print in escaped form.
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        with escaped_output(), sigterm_raises():
            command.run()
    except BrokenPipeError:  # the program that reads our output has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (
        ValueError,
        OSError,
        ImportError,
    ) as error:  # the message of an ImportError names the extra to install
        _fail(f"remanence: error: {error}", 2)
    except Terminated:
        _fail("remanence: terminated", 143)
    except KeyboardInterrupt:
        _fail("remanence: interrupted", 130)
    except Exception:  # a bug; its traceback may quote text from files, so control characters are escaped
        with escaped_output():
            traceback.print_exc()
        sys.exit(1)


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """Context manager in which the first SIGTERM raises `Terminated`, as Ctrl-C raises KeyboardInterrupt.
    Later ones are ignored, so that files can be saved. If the parent process has set SIGTERM to be ignored,
    nothing changes.
    """

    def stop(number: int, _: object) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)
        raise Terminated

    before = signal.getsignal(signal.SIGTERM)
    if before is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _parse(arguments: list[str]) -> Command:
    """Parse the arguments and return the command. A wrong argument is reported in one line, instead of tyro's
    box of several lines. --help prints the help and exits.
    """
    if arguments and not arguments[0].startswith("-"):
        check_choice("command", arguments[0], COMMANDS)
        arguments = _current_options(arguments)
    overridable = OVERRIDABLE.get(arguments[0]) if arguments else None
    overrides: tuple[tuple[str, str], ...] = ()
    if overridable is not None:
        arguments, overrides = split_overrides(arguments, overridable.OPTIONS, overridable.OVERRIDES_OF)
        overrides = tuple((_current_field(arguments[0], name), value) for name, value in overrides)
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            command = tyro.cli(Command, prog="remanence", description=DESCRIPTION, args=arguments)
            return (
                replace(command, overrides=overrides) if isinstance(command, New | Train | Eval) else command
            )
        except SystemExit as stop:
            code = stop.code
    if code:
        messages = COLOURS.sub("", errors.getvalue()).splitlines()
        lines = [line.strip("╰╯│─ ") for line in messages if not line.startswith("╭")]
        hint = _options_hint(arguments)
        _fail(f"remanence: error: {hint}{' '.join(line for line in lines if line.strip('- '))}", 2)
    if overridable is not None:
        for line in overridable.list_fields():
            echo(line)
    sys.exit(code)


def _current_options(arguments: list[str]) -> list[str]:
    """Return the arguments with deprecated option names replaced by the present ones, and print a warning for
    each.
    """
    renamed = RENAMED_OPTIONS.get(arguments[0], {})
    given = [argument.partition("=") for argument in arguments]
    for name in dict.fromkeys(name for name, _, _ in given if name in renamed):
        _warn_renamed(name, renamed[name])
    return [renamed.get(name, name) + equals + value for name, equals, value in given]


def _current_field(command: str, name: str) -> str:
    """Return the present name of a config field that was given as --name=value, and print a warning if the
    given name is deprecated.
    """
    prefix = RECIPE_PREFIX if command == "eval" else ""
    if not name.startswith(prefix):
        return name
    current = prefix + current_field("train", name.removeprefix(prefix))
    if current != name:
        _warn_renamed(f"--{name}", f"--{current}")
    return current


def _warn_renamed(old: str, new: str) -> None:
    """Print a warning that an option is deprecated."""
    echo(f"remanence: warning: {old} is deprecated: use {new}", error=True)


def _options_hint(arguments: list[str]) -> str:
    """Return a suggestion for each unknown option that resembles an option of the command; empty if there is
    none.
    """
    if not arguments or arguments[0] not in COMMANDS:
        return ""
    kinds = {each.name: str(each.type) for each in dataclasses.fields(COMMANDS[arguments[0]])}
    own = [
        f"--{name.replace('_', '-')}" for name, kind in kinds.items()
        if kind != "Folder" and not any(mark in kind for mark in ("Positional", "Suppress"))
    ]  # fmt: skip
    given = [each.partition("=")[0].replace("_", "-") for each in arguments if each.startswith("--")]
    hints = [
        f"{name}: no option of {arguments[0]}{hint}"
        for name in given
        if name not in (*own, "--help") and (hint := did_you_mean(name, own))
    ]
    return "".join(f"{each} " for each in hints)


def _fail(message: str, code: int) -> NoReturn:
    """Print a message to stderr and exit with a code."""
    echo(message, error=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
