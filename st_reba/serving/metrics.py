"""What Prometheus is told."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKENS = tuple(4**power for power in range(1, 11))
_TEXTS = tuple(2**power for power in range(11))


class Metrics:
    """Counts of one server, in a registry of its own."""

    CONTENT_TYPE = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        own = self._registry = CollectorRegistry()
        self.requests = Counter("st_reba_requests", "Answers, by path and status.", ["path", "status"], registry=own)
        self.seconds = Histogram(
            "st_reba_request_seconds", "From a request's head to its answer.", ["path"], buckets=_SECONDS, registry=own
        )
        self.tokens = Counter("st_reba_tokens", "Of texts that were read.", registry=own)
        self.left = Counter("st_reba_requests_left", "Requests whose client went away while they waited.", registry=own)
        self.batch_texts = Histogram("st_reba_batch_texts", "Of a batch.", buckets=_TEXTS, registry=own)
        self.batch_tokens = Histogram(
            "st_reba_batch_tokens", "Of a batch, padding included.", buckets=_TOKENS, registry=own
        )
        self.batch_seconds = Histogram(
            "st_reba_batch_seconds", "That the model ran for a batch.", buckets=_SECONDS, registry=own
        )
        self._waiting_texts = Gauge("st_reba_waiting_texts", "In the queue.", registry=own)
        self._waiting_tokens = Gauge("st_reba_waiting_tokens", "In the queue.", registry=own)

    def watch(self, texts: Callable[[], int], tokens: Callable[[], int]) -> None:
        """What waits, asked for when the figures are read."""
        self._waiting_texts.set_function(texts)
        self._waiting_tokens.set_function(tokens)

    def shown(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self._registry)
