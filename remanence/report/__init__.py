"""Write evaluation results and training runs as one report, in Markdown and HTML."""

from remanence.report.sections import compose, write

__all__ = ["compose", "write"]
