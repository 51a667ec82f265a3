"""Errors that callers handle by type. All of them are ValueErrors with a message of one line."""

from __future__ import annotations


class DivergedError(ValueError):
    """Numbers that have to be finite are not: a memory's while it reads, or the loss of a training run."""
