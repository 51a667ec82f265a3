"""What files of earlier versions call things, and what they are called now: the one table that every reader of old files uses."""

from __future__ import annotations

TENSORS = {
    "blocks.": "backbone.blocks.",  # 0.1: a model's layers were its own, not its backbone's
    "norm.": "backbone.norm.",
}
"""How a parameter's name began, and how it begins now."""

PREFIXES = ("model.", "exp_avg.", "exp_avg_sq.")
"""What may stand in front of a parameter's name in a file."""


def current_name(name: str) -> str:
    """A parameter's name as it is now, with what a file has in front of it."""
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
    name = name.removeprefix(prefix)
    for old, new in TENSORS.items():
        if name.startswith(old):
            return prefix + new + name.removeprefix(old)
    return prefix + name


def first_name(name: str) -> str:
    """A parameter's name as version 0.1 wrote it: fingerprints are made of these, so that memory files stay valid."""
    for old, new in TENSORS.items():
        if name.startswith(new):
            return old + name.removeprefix(new)
    return name
