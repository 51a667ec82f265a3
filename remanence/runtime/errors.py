"""Errors that callers handle by type. All of them are ValueErrors with a message of one line."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """What an error of someone else's says, in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]


class OtherConfigError(ValueError):
    """A checkpoint and the config that is to go on from it do not fit: nothing is damaged, one of them was changed."""


class DivergedError(ValueError):
    """Numbers that have to be finite are not: a memory's while it reads, or the loss of a training run."""


class Terminated(KeyboardInterrupt):
    """A request to end (SIGTERM), handled as an interruption is: what saves on Ctrl-C saves on this too."""
