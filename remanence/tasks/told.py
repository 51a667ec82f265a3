"""The deprecated name of `remanence.tasks.fact_dialogues`."""

from __future__ import annotations

from remanence.io.migrations import warn_deprecated
from remanence.tasks import fact_dialogues


def __getattr__(name: str) -> object:
    """Return an attribute of `fact_dialogues`, with a deprecation warning."""
    new = "FactDialogues" if name == "Told" else name
    if name.startswith("__") or not hasattr(fact_dialogues, new):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn_deprecated(f"{__name__}.{name}", f"remanence.tasks.fact_dialogues.{new}")
    return getattr(fact_dialogues, new)
