"""Signals that a run handles between two steps instead of immediately."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def received_signals() -> Iterator[set[str]]:
    """The names of the signals received so far, of those this platform has and nobody ignores (as `nohup` does)."""
    received: set[str] = set()
    names = [name for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in (getattr(signal, name) for name in names)}

    def note(number: int, _: object) -> None:
        received.add(signal.Signals(number).name)
        if number == signal.SIGINT:
            signal.signal(number, before[number])  # a second one does not wait for the step

    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, note)
    except ValueError:  # not in the main thread, which gets no signals
        yield received
        return
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
