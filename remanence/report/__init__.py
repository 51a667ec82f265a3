"""From evaluations and training runs to one document: the papers' numbers beside ours, and what cannot be compared said so."""

from remanence.report.compose import compose, write

__all__ = ["compose", "write"]
