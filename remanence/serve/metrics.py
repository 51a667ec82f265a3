"""What the server counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

__all__ = ["CONTENT_TYPE_LATEST", "Metrics"]

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""The limits of the classes in which times are counted."""


class Metrics:
    """The metrics of one server, without any content of requests."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "requests",
            "Requests by route and status.",
            ["route", "status"],
            namespace="remanence",
            registry=self.registry,
        )
        timed = lambda name, text: Histogram(
            name, text, namespace="remanence", registry=self.registry, buckets=SECONDS
        )
        self.duration = timed("request_seconds", "Time from a request to the end of its response.")
        self.first_token = timed(
            "first_token_seconds", "Time from a request to the first text of its answer."
        )
        self.restore = timed("restore_seconds", "Time in which the memory of a request is loaded.")
        self.commit = timed("commit_seconds", "Time in which a new version is written to disk.")

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a number that is looked up whenever metrics are read."""
        Gauge(name, text, namespace="remanence", registry=self.registry).set_function(value)

    def text(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        return generate_latest(self.registry)
