"""The command line. It parses before torch is imported, so that --help and a wrong argument answer at once."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True)
class Demo:
    """Watch a memory learn while it reads: key-value pairs stream in, surprise falls, recall rises. Writes a table and a plot."""

    out: Path = Path("out/demo")
    """Folder for the plot (memory.png) and the numbers (memory.json)."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to run."""
    seed: int = 0
    """Of the pairs and of the initial memory."""

    def run(self) -> None:
        from remanence.demo import main

        main(self.out, self.device, self.seed)


@dataclass(frozen=True)
class Info:
    """Versions, device and operator backends: what a bug report needs."""

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device to look for."""

    def run(self) -> None:
        import platform

        import torch

        import remanence
        from remanence.device import resolve
        from remanence.ops import BACKENDS

        python = f"Python {platform.python_version()}, {platform.platform()}"
        print(f"remanence {remanence.__version__}, torch {torch.__version__}, {python}")
        print(f"device {resolve(self.device)}, operator backends: {', '.join(BACKENDS)}")


Command = Annotated[Demo, tyro.conf.subcommand("demo")] | Annotated[Info, tyro.conf.subcommand("info")]


def main(arguments: list[str] | None = None) -> None:
    """Exit code 0 when done, 2 for a wrong argument or file, 130 after Ctrl-C; errors are one line, without a traceback."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments in (["--version"], ["-V"]):
        from remanence import __version__

        print(f"remanence {__version__}")
        return
    command = tyro.cli(
        Command, prog="remanence", description="Sequence models that keep learning after training ends.", args=arguments
    )
    try:
        command.run()
    except (ValueError, OSError) as error:
        sys.exit(_say(f"remanence: error: {error}", 2))
    except KeyboardInterrupt:
        sys.exit(_say("remanence: interrupted", 130))


def _say(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
