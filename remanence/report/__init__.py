"""Evaluation results and training runs in one document, as Markdown and as HTML."""

from remanence.report.sections import compose, write

__all__ = ["compose", "write"]
