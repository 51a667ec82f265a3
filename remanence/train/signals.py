"""Signals that a run handles between two steps instead of immediately."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def received_signals() -> Iterator[set[str]]:
    """Collect the names of received signals (SIGTERM, SIGINT, SIGUSR1) in the set that is returned.

    Signals that the platform lacks, or that are ignored (as with `nohup`), are left alone.
    """
    received: set[str] = set()
    names = [name for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in (getattr(signal, name) for name in names)}

    def note(number: int, _: object) -> None:
        """Record a signal instead of acting on it."""
        received.add(signal.Signals(number).name)
        if number == signal.SIGINT:
            signal.signal(number, before[number])  # a second Ctrl-C interrupts at once

    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, note)
    except ValueError:  # only the main thread can handle signals
        yield received
        return
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
