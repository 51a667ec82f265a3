"""Errors that callers handle by type. All of them are ValueErrors with a message of one line."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's type if the message is empty."""
    return (str(error).splitlines() or [type(error).__name__])[0]


class OtherConfigError(ValueError):
    """A checkpoint does not fit the config of the run that should continue from it. Nothing is damaged; one
    of them was changed.
    """


class DivergedError(ValueError):
    """A value that must be finite is not: in a memory while it reads, or in the loss of a training run."""


class Terminated(KeyboardInterrupt):
    """A request to end the process (SIGTERM). It is a KeyboardInterrupt, so code that saves on Ctrl-C also
    saves here.
    """
