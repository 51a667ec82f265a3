"""Evaluations and training runs as one document: the papers' numbers beside ours, and why some cannot be compared."""

from remanence.report.compose import compose, write

__all__ = ["compose", "write"]
